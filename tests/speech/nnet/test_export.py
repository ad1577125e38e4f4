"""Exported models read back and give the same posteriors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.numpy import load_file

from roundelay.cli import main
from roundelay.errors import DataError, UsageError
from roundelay.recipes.run_layout import RunLayout
from roundelay.recipes.systems import NetworkSystem, open_system, save_network
from roundelay.speech.corpora.kaldi_dir import write_data_dir
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.nnet import export
from roundelay.speech.nnet.lstm import AcousticModel, ModelShape

OPTIONS = FeatureOptions(mels=8, deltas=1)
SHAPE = ModelShape(inputs=16, layers=2, hidden=6, bottleneck=5, outputs=9)


def corpus_of(folder: Path) -> Corpus:
    folder.mkdir()
    utterances = []
    for n in range(3):
        path = folder / f"u{n}.wav"
        soundfile.write(path, 0.1 * np.random.default_rng(n).normal(size=4000 + 900 * n), 8000)
        utterances.append(Utterance(f"u{n}", "s", ("X",), path))
    return write_data_dir(folder / "data", utterances)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write the parts of a run directory that export needs."""
    torch.manual_seed(3)
    run = tmp_path / "run"
    extract(corpus_of(tmp_path / "audio"), run / "features" / "train", OPTIONS, progress="none")
    save_network(run / "lstm", AcousticModel(SHAPE), np.arange(9), {"strategy": "adpsgd", "epochs": 2.0})
    row = {"name": "lstm", "set": "test", "wer": 12.5, "low": 9.0, "high": 16.0}
    (run / "result.json").write_text(json.dumps({"systems": [row], "paired": []}))
    return run


def test_an_exported_model_reads_back_and_scores_the_same(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "out", tmp_path / "audio" / "data"
    assert main.main(["export", str(run), str(out), "--posteriors", str(data), "--jobs", "1"]) == 0
    assert "log posteriors of 3 utterances" in capsys.readouterr().out
    store, ours = FeatureStore.open(run / "features" / "train"), open_system(RunLayout(run), "lstm")
    assert isinstance(ours, NetworkSystem)
    model, priors = AcousticModel.load(out), load_file(str(out / "priors.safetensors"))["log_priors"]
    written = read_matrices(out / "post.scp")
    assert list(written) == store.ids
    for id in store.ids:
        posteriors = model.log_posteriors(store[id])
        np.testing.assert_array_equal(posteriors, ours.model.log_posteriors(store[id]))
        np.testing.assert_array_equal(posteriors - priors, ours.scores(store, id))
        np.testing.assert_array_equal(written[id], posteriors)
    assert np.exp(priors).sum() == pytest.approx(1.0)
    assert FeatureOptions(**json.loads((out / "features.json").read_text())) == OPTIONS
    card = (out / "README.md").read_text()
    for part in ("| strategy | adpsgd |", "12.50 % (9.00 - 16.00)", "9 tied states", f"{SHAPE.parameters:,} parameters"):
        assert part in card


@pytest.mark.parametrize(
    "shape", [SHAPE, ModelShape(inputs=4, layers=1, hidden=7, bottleneck=0, outputs=5, bidirectional=False)]
)
def test_onnx_gives_the_same_posteriors(shape: ModelShape, tmp_path: Path) -> None:
    """Compares lengths and batch sizes that `write_onnx` does not compare."""
    import onnxruntime

    torch.manual_seed(0)
    model = AcousticModel(shape)
    assert export.write_onnx(model, tmp_path / "model.onnx") <= export.TOLERANCE
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch, frames in ((1, 1), (3, 7), (1, 333)):
        x = np.random.default_rng(frames).normal(size=(batch, frames, shape.inputs)).astype(np.float32)
        (scores,) = session.run(None, {"features": x})
        theirs = torch.from_numpy(scores).log_softmax(-1).numpy()
        for row in range(batch):
            np.testing.assert_allclose(theirs[row], model.log_posteriors(x[row]), atol=1e-4)


def test_the_command_writes_onnx(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(run), str(tmp_path / "out"), "--onnx"]) == 0
    assert "model.onnx: log posteriors equal to" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.onnx").stat().st_size > 4 * SHAPE.parameters


def test_an_onnx_model_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(DataError, match="log posteriors of the ONNX model must differ by at most"):
        export.write_onnx(AcousticModel(SHAPE), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"pip install 'roundelay\[onnx\]'"):
        export.write_onnx(AcousticModel(SHAPE), tmp_path / "model.onnx")
