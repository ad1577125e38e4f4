"""The recipe switchboard on small Kaldi features and alignments, with the paths and the schedule of the recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import Jobs
from toy_kaldi import FMLLR, IVECTOR, LOGMEL, NUM_PDFS, SETS, write_kaldi_layout

from roundelay.cli import main
from roundelay.errors import DataError, UsageError
from roundelay.recipes import FOLDER as RECIPES
from roundelay.recipes import config as recipe_config
from roundelay.recipes import network_stage
from roundelay.recipes.inference import feature_options
from roundelay.recipes.pipeline import KALDI_STAGES, STAGES, stage_fingerprint
from roundelay.recipes.pipeline_context import PipelineContext
from roundelay.recipes.run_layout import RunLayout
from roundelay.speech.features.feature_store import from_spec
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.nnet.lstm import AcousticModel

pytestmark = pytest.mark.timeout(240)  # the first test runs a whole recipe
SMALL = (
    f"kaldi.num_pdfs={NUM_PDFS}",
    "network.layers=1", "network.hidden=24", "network.bottleneck=16",
    "train.learners=3", "train.simulate_nodes=2", "train.batch=2", "train.lr=0.4", "train.checkpoint_every_epochs=8",
)  # fmt: skip
"""Size only: paths, streams, strategy, topology, epochs and schedule are those of the recipe."""
BY_PDF = ("kaldi.alignment_labels=pdfs", "kaldi.train_alignments=exp/pdf_train.txt", "kaldi.dev_alignments=exp/pdf_dev.txt")


def layout(folder: Path) -> Path:
    """Return a directory with the recipe's file and the files that it names."""
    recipe = folder / "switchboard"
    recipe.mkdir()
    shutil.copy(RECIPES / "switchboard" / "recipe.toml", recipe)
    write_kaldi_layout(recipe)
    return recipe


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the recipe once with the command. Return its directory; the run is its sibling."""
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
    assert row["wer"] < 20, "states have distinct features: only boundaries can be wrong"
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


def test_a_graph_of_pdfs_decodes_the_same_without_training(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = done.parent / "run"
    hypotheses = run / "decode" / "lstm" / "test.txt"
    before = hypotheses.read_text()
    assert run_again(done, run, "kaldi.graph=exp/graph_pdfs", "kaldi.graph_labels=pdfs") == 0
    stderr = capsys.readouterr().err
    assert "states: done before" in stderr
    assert "network: done before" in stderr
    assert "decode …" in stderr
    assert hypotheses.read_text() == before
    # Kaldi's own graph with alignments of pdfs: both kinds of label in one recipe.
    assert recipe_config.load(done, [*SMALL, *BY_PDF]).kaldi is not None


def test_posteriors_are_exported_without_a_graph(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(done.parent / "run", run)
    assert run_again(done, run, "kaldi.graph=") == 0
    assert "export the posteriors to decode elsewhere" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["systems"] == []

    streams = recipe_config.load(done).kaldi.test_features  # type: ignore[union-attr]
    streams = "+".join(str(done / part) for part in streams.split("+"))
    out = tmp_path / "exported"
    assert main.main(["export", str(run), str(out), "--posteriors", streams]) == 0
    assert "post.scp" in capsys.readouterr().out
    written, features, model = read_matrices(out / "post.scp"), from_spec(streams), AcousticModel.load(out)
    assert sorted(written) == features.ids
    for id in features.ids[:3]:
        np.testing.assert_allclose(written[id], model.log_posteriors(features[id]), atol=1e-5)
    assert "logmel.scp[cmvn,deltas]" in json.loads((out / "features.json").read_text())["streams"]

    with pytest.raises(DataError, match="trained on external features"):
        feature_options(RunLayout(run))


# ---------------------------------------------------------------------------------------------------- what is wrong


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layout(tmp_path_factory.mktemp("layout"))


@pytest.mark.parametrize(
    ("changes", "code", "messages"),
    [
        (["kaldi.train_alignments=exp/nowhere"], 3, ["cannot read the alignments", "exp/nowhere"]),
        (["kaldi.train_alignments=exp/graph"], 3, ["the folder contains no alignments (ali.*)", "exp/graph"]),
        (["kaldi.transitions=exp/nowhere.txt"], 3, ["cannot read the model", "exp/nowhere.txt"]),
        (
            [f"kaldi.num_pdfs={NUM_PDFS - 1}"],
            3,
            [f"must be >= 0 and < {NUM_PDFS - 1} (got {NUM_PDFS - 1})", "pdfs of utterance train-s", "exp/ali_train"],
        ),
        (["kaldi.dev_features=data/train/fmllr.scp"], 3, ["no utterance has both", "exp/ali_dev"]),
        (["kaldi.dev_features=data/dev/mfcc.scp"], 3, ["cannot read the list", "data/dev/mfcc.scp"]),
        (
            ["kaldi.transitions="],
            2,
            ['alignment_labels = "transitions" needs the transition model', 'alignment_labels = "pdfs"'],
        ),
        (
            ["kaldi.alignment_labels=pdf"],
            2,
            ["alignment_labels must be one of: transitions, pdfs (got 'pdf')", "did you mean 'pdfs'?"],
        ),
        (["train.lerners=4"], 2, ["unknown key 'lerners' in [train]", "did you mean 'learners'?"]),
        (["train.epochs=many"], 2, ["epochs must be a number (got 'many')"]),
        (['train.task="own:Task"'], 2, ["'task' must not be set in [train]", "where: command line"]),
    ],
)
def test_mistakes_are_reported(
    laid_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], code: int, messages: list[str]
) -> None:
    assert run_again(laid_out, tmp_path / "run", *changes, "--until", "states") == code
    stderr = capsys.readouterr().err
    assert all(message in stderr for message in messages), stderr


def test_features_and_alignments_of_different_length_are_reported(
    laid_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    id, *pdfs = (laid_out / "exp" / "pdf_dev.txt").read_text().splitlines()[3].split()
    shorter = tmp_path / "pdf_dev.txt"
    shorter.write_text(f"{id} {' '.join(pdfs[:-4])}\n")
    assert run_again(laid_out, tmp_path / "run", *BY_PDF, f"kaldi.dev_alignments={shorter}", "--until", "states") == 3
    stderr = capsys.readouterr().err
    assert f"utterance {id} has {len(pdfs)} frames of features and {len(pdfs) - 4} of alignment" in stderr
    assert "data/dev/fmllr.scp" in stderr
    assert str(shorter) in stderr


def test_transition_ids_need_the_transition_model() -> None:
    common = {"num_pdfs": 3, "train_features": "a", "train_alignments": "b", "dev_features": "c", "dev_alignments": "d"}
    recipe_config.KaldiInputs(**common, alignment_labels="pdfs")  # type: ignore[arg-type]
    recipe_config.KaldiInputs(**common, alignment_labels="pdfs", graph="g", graph_labels="pdfs")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='graph_labels = "transitions" needs the transition model'):
        recipe_config.KaldiInputs(**common, alignment_labels="pdfs", graph="g")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- nothing stale, nothing twice


def test_only_training_inputs_invalidate_the_network() -> None:
    def changed(*overrides: str) -> list[str]:
        fingerprints = []
        for recipe in (
            recipe_config.load("switchboard"),
            recipe_config.load("switchboard", list(overrides)),
        ):
            before, by_stage = "", {}
            for stage in KALDI_STAGES:
                by_stage[stage.name] = before = stage_fingerprint(recipe, stage, before)
            fingerprints.append(by_stage)
        return [name for name in fingerprints[0] if fingerprints[0][name] != fingerprints[1][name]]

    assert changed("kaldi.graph=other") == ["decode", "score"]
    assert changed("kaldi.test_text=other") == ["decode", "score"]
    assert changed("kaldi.num_pdfs=9000") == ["states", "network", "decode", "score"]
    assert changed("kaldi.dev_features=x.scp") == ["states", "network", "decode", "score"]


def test_training_on_other_alignments_or_initial_weights_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_stage, "build_task", lambda resolved: None)
    monkeypatch.setattr(network_stage, "run_training", lambda task, config: None)
    weights = tmp_path / "initial" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"some weights")
    recipe = recipe_config.load("digits", [f"network.init_from={weights.parent}"])
    context = PipelineContext(recipe, tmp_path, 1, "none")
    (tmp_path / "stages").mkdir()
    stamp, checkpoint = tmp_path / "stages" / "align.json", tmp_path / "network" / "ckpt"

    def kept(alignments: str, **settings: float) -> bool:
        stamp.write_text(json.dumps({"fingerprint": alignments}))
        train = {**recipe.train, **settings}
        network_stage.train_network(context, tmp_path / "network", train, tmp_path / "alignments", 0)
        before = checkpoint.exists()
        checkpoint.mkdir(exist_ok=True)
        return before

    assert not kept("first")
    assert kept("first")
    assert not kept("first", lr=0.125), "other settings"
    assert not kept("first"), "the first settings again"
    weights.write_bytes(b"other weights")
    assert not kept("first"), "other initial weights"
    assert not kept("second"), "other alignments at the same path, with the same settings"
    fingerprint = json.loads((tmp_path / "network" / "fingerprint.json").read_text())
    assert set(fingerprint) == {"settings", "alignments", "initial_weights"}


def test_limits_do_not_invalidate_a_stage() -> None:
    fingerprints = []
    for overrides in ([], ["features.longest_s=600"]):
        recipe = recipe_config.load("spoken", overrides)
        fingerprints.append([stage_fingerprint(recipe, stage, "") for stage in STAGES])
    assert fingerprints[0] == fingerprints[1]
