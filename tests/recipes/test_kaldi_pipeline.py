"""recipes/switchboard on a miniature of what people who have Kaldi hold: its own paths and schedule, small in size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import Jobs
from paths import ROOT
from toy_kaldi import FMLLR, IVECTOR, LOGMEL, NUM_PDFS, SETS, write_kaldi_layout

from roundelay.cli import main
from roundelay.errors import DataError, UsageError
from roundelay.recipes import config as recipe_config
from roundelay.recipes import stages
from roundelay.recipes.inference import options_of_run
from roundelay.recipes.pipeline import GIVEN_STAGES, STAGES, fingerprint
from roundelay.recipes.stages import PipelineContext
from roundelay.speech.features.feature_store import from_spec
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.nnet.lstm import AcousticModel

pytestmark = pytest.mark.timeout(240)  # the first test waits for a whole recipe
RECIPES = ROOT / "src" / "roundelay" / "recipes"
SMALL = (
    f"kaldi.num_pdfs={NUM_PDFS}",
    "network.layers=1", "network.hidden=24", "network.bottleneck=16",
    "train.learners=3", "train.machines=2", "train.batch=2", "train.lr=0.4", "train.save_every_epochs=8",
)  # fmt: skip
"""Size only: paths, streams, strategy, topology, epochs and schedule are those of the recipe."""
BY_PDF = ("kaldi.alignment_labels=pdfs", "kaldi.train_alignments=exp/pdf_train.txt", "kaldi.dev_alignments=exp/pdf_dev.txt")


def layout(folder: Path) -> Path:
    """A folder with the recipe's file and what it speaks of."""
    recipe = folder / "switchboard"
    recipe.mkdir()
    shutil.copy(RECIPES / "switchboard" / "recipe.toml", recipe)
    write_kaldi_layout(recipe)
    return recipe


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, run once with the command; its folder, with the run beside it."""
    folder = tmp_path_factory.mktemp("kaldi")
    recipe = layout(folder)
    with Jobs(folder) as jobs:
        ended = jobs.run("run", str(recipe), f"run={folder / 'run'}", *SMALL, "--jobs", "1", "--json", timeout_s=200)
        ended.expect(0)
    assert json.loads(ended.out) == json.loads((folder / "run" / "result.json").read_text())
    return recipe


def run_again(recipe: Path, run: Path, *more: str) -> int:
    return main.main(["run", str(recipe), f"run={run}", *SMALL, *more, "--jobs", "1"])


@pytest.mark.slow
@pytest.mark.dist
def test_features_and_alignments_of_kaldi_become_a_recognizer(done: Path) -> None:
    run = done.parent / "run"
    (row,) = json.loads((run / "result.json").read_text())["systems"]
    assert (row["name"], row["set"], row["missing"]) == ("lstm", "test", 0)
    assert (row["utterances"], row["speakers"]) == SETS["eval2000"]
    assert row["wer"] < 20, "states with features of their own: what is left are slips at the edges"
    assert row["line"].startswith("%WER ")
    shape = json.loads((run / "lstm" / "model.json").read_text())["shape"]
    assert (shape["inputs"], shape["outputs"]) == (FMLLR + IVECTOR + 3 * LOGMEL, NUM_PDFS)
    assert json.loads((run / "decode" / "lstm" / "scale.json").read_text())["dev_wer"]


def test_pdf_alignments_are_the_same_states(done: Path, tmp_path: Path) -> None:
    assert run_again(done, tmp_path, *BY_PDF, "--until", "states") == 0
    for name in ("train", "dev"):
        ours, theirs = (Alignments.open(run / "alignments" / name) for run in (tmp_path, done.parent / "run"))
        assert ours.ids == theirs.ids
        assert len(ours) == SETS[name][0]
        assert all(np.array_equal(ours[id], theirs[id]) for id in ours.ids)


def test_a_graph_of_pdfs_decodes_the_same_and_trains_nothing(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = done.parent / "run"
    hypotheses = run / "decode" / "lstm" / "test.txt"
    before = hypotheses.read_text()
    assert run_again(done, run, "kaldi.graph=exp/graph_pdfs", "kaldi.graph_labels=pdfs") == 0
    told = capsys.readouterr().err
    assert "states: done before" in told
    assert "network: done before" in told
    assert "decode …" in told
    assert hypotheses.read_text() == before
    # Kaldi's own graph for alignments that were turned into pdfs: both kinds of label in one recipe.
    assert recipe_config.load(done, [*SMALL, *BY_PDF]).given is not None


def test_without_a_graph_the_posteriors_go_to_kaldi(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(done.parent / "run", run)
    assert run_again(done, run, "kaldi.graph=") == 0
    assert "decode the posteriors elsewhere" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["systems"] == []

    streams = recipe_config.load(done).given.test_features  # type: ignore[union-attr]
    streams = "+".join(str(done / part) for part in streams.split("+"))
    out = tmp_path / "exported"
    assert main.main(["export", str(run), str(out), "--posteriors", streams]) == 0
    assert "post.scp" in capsys.readouterr().out
    written, features, model = read_matrices(out / "post.scp"), from_spec(streams), AcousticModel.load(out)
    assert sorted(written) == features.ids
    for id in features.ids[:3]:
        np.testing.assert_allclose(written[id], model.log_posteriors(features[id]), atol=1e-5)
    assert "logmel.scp[cmvn,deltas]" in json.loads((out / "features.json").read_text())["streams"]

    with pytest.raises(DataError, match="trained on features made elsewhere"):
        options_of_run(run)


# ---------------------------------------------------------------------------------------------------- what is wrong


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layout(tmp_path_factory.mktemp("layout"))


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        (["kaldi.train_alignments=exp/nowhere"], 3, ["cannot read the alignments", "exp/nowhere"]),
        (["kaldi.train_alignments=exp/graph"], 3, ["there are no alignments (ali.*) in the folder", "exp/graph"]),
        (["kaldi.transitions=exp/nowhere.txt"], 3, ["cannot read the model", "exp/nowhere.txt"]),
        (
            [f"kaldi.num_pdfs={NUM_PDFS - 1}"],
            3,
            [f"pdf {NUM_PDFS - 1} of {NUM_PDFS - 1}", "utterance train-s", "exp/ali_train"],
        ),
        (["kaldi.dev_features=data/train/fmllr.scp"], 3, ["no utterance has both", "exp/ali_dev"]),
        (["kaldi.dev_features=data/dev/mfcc.scp"], 3, ["cannot read the list", "data/dev/mfcc.scp"]),
        (["kaldi.transitions="], 2, ["alignment_labels is transitions", 'alignment_labels = "pdfs"']),
        (["kaldi.alignment_labels=pdf"], 2, ["alignment_labels cannot be 'pdf'", "did you mean 'pdfs'?"]),
        (["train.lerners=4"], 2, ["there is no setting 'lerners'", "did you mean 'learners'?"]),
        (["train.epochs=many"], 2, ["epochs is 'many'"]),
        (['train.task="own:Task"'], 2, ["'task' is what the recipe itself tells the engine"]),
    ],
)
def test_mistakes_are_named(
    laid_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], code: int, told: list[str]
) -> None:
    assert run_again(laid_out, tmp_path / "run", *changes, "--until", "states") == code
    said = capsys.readouterr().err
    assert all(part in said for part in told), said


def test_features_and_alignments_of_different_length_are_named(
    laid_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    id, *pdfs = (laid_out / "exp" / "pdf_dev.txt").read_text().splitlines()[3].split()
    shorter = tmp_path / "pdf_dev.txt"
    shorter.write_text(f"{id} {' '.join(pdfs[:-4])}\n")
    assert run_again(laid_out, tmp_path / "run", *BY_PDF, f"kaldi.dev_alignments={shorter}", "--until", "states") == 3
    said = capsys.readouterr().err
    assert f"utterance {id} has {len(pdfs)} frames of features and {len(pdfs) - 4} of alignment" in said
    assert "data/dev/fmllr.scp" in said
    assert str(shorter) in said


def test_transition_ids_need_their_model_only_where_they_are_used() -> None:
    common = {"num_pdfs": 3, "train_features": "a", "train_alignments": "b", "dev_features": "c", "dev_alignments": "d"}
    recipe_config.KaldiInputs(**common, alignment_labels="pdfs")  # type: ignore[arg-type]
    recipe_config.KaldiInputs(**common, alignment_labels="pdfs", graph="g", graph_labels="pdfs")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="graph_labels is transitions"):
        recipe_config.KaldiInputs(**common, alignment_labels="pdfs", graph="g")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- nothing stale, nothing twice


def test_only_what_a_network_is_trained_on_trains_it_again() -> None:
    def changed(*overrides: str) -> list[str]:
        prints = []
        for recipe in (
            recipe_config.load(RECIPES / "switchboard"),
            recipe_config.load(RECIPES / "switchboard", list(overrides)),
        ):
            before, found = "", {}
            for stage in GIVEN_STAGES:
                found[stage.name] = before = fingerprint(recipe, stage, before)
            prints.append(found)
        return [name for name in prints[0] if prints[0][name] != prints[1][name]]

    assert changed("kaldi.graph=other") == ["decode", "score"]
    assert changed("kaldi.test_text=other") == ["decode", "score"]
    assert changed("kaldi.num_pdfs=9000") == ["states", "network", "decode", "score"]
    assert changed("kaldi.dev_features=x.scp") == ["states", "network", "decode", "score"]


def test_a_network_trained_on_other_alignments_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.interrupts, "run", lambda command: 0)
    weights = tmp_path / "begun" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"some weights")
    recipe = recipe_config.load(RECIPES / "digits", [f"network.init_from={weights.parent}"])
    work = PipelineContext(recipe, tmp_path, 1, lambda _: None, "none")
    (tmp_path / "stages").mkdir()
    mark, checkpoint = tmp_path / "stages" / "align.json", tmp_path / "network" / "ckpt"

    def kept(made_of: str) -> bool:
        mark.write_text(json.dumps({"fingerprint": made_of}))
        stages.train_network(work, tmp_path / "network", work.recipe.train, tmp_path / "alignments", 0)
        before = checkpoint.exists()
        checkpoint.mkdir(exist_ok=True)
        return before

    assert not kept("some alignments")
    assert kept("some alignments")
    weights.write_bytes(b"other weights")
    assert not kept("some alignments"), "nor one that began from other weights"
    assert not kept("others, of another tree"), "they stand in the same place, and the settings of the engine are the same"


def test_limits_are_no_reason_to_do_a_stage_again() -> None:
    prints = []
    for overrides in ([], ["features.longest_s=600"]):
        recipe = recipe_config.load(RECIPES / "digits", overrides)
        prints.append([fingerprint(recipe, stage, "") for stage in STAGES])
    assert prints[0] == prints[1]
