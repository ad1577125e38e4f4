"""The acoustic model: published sizes, padding without effect, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from roundelay.cli import main
from roundelay.errors import DataError, UsageError
from roundelay.speech.nnet.lstm import PRESETS, AcousticModel, ModelShape, preset_shape


def test_the_published_network_has_its_published_size_and_trains() -> None:
    model = AcousticModel.preset("swb2000")
    assert sum(p.numel() for p in model.parameters()) == 43_154_944 == model.shape.parameters
    x, y = torch.randn(2, 21, 260), torch.randint(0, 32_000, (2, 21))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    before = loss()
    before.backward()
    optimizer.step()
    assert float(loss()) < float(before)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "swb2000"])
def test_parameters_are_counted_without_building_the_network(name: str) -> None:
    shape = preset_shape(name)
    assert sum(p.numel() for p in AcousticModel(shape).parameters()) == shape.parameters


def test_list_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", "models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert models["swb2000"]["parameters"] == 43_154_944
    assert set(models) == set(PRESETS)


def test_padded_utterances_score_as_single_ones() -> None:
    model = AcousticModel(ModelShape(inputs=7, layers=2, hidden=5, bottleneck=4, outputs=6)).eval()
    long, short = torch.randn(9, 7), torch.randn(4, 7)
    padded = torch.zeros(2, 9, 7)
    padded[0], padded[1, :4] = long, short
    together = model(padded, torch.tensor([9, 4])).log_softmax(-1).detach().numpy()
    np.testing.assert_allclose(together[0], model.log_posteriors(long.numpy()), atol=1e-6)
    np.testing.assert_allclose(together[1, :4], model.log_posteriors(short.numpy()), atol=1e-6)


def test_utterances_are_scored_with_repeated_first_and_last_frames() -> None:
    torch.manual_seed(0)
    model = AcousticModel.preset("tiny", inputs=6, outputs=5, context=3)
    x = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    with torch.no_grad():
        whole = model(torch.from_numpy(np.concatenate([x[:1]] * 3 + [x] + [x[-1:]] * 3))[None])[0].log_softmax(1).numpy()
    np.testing.assert_allclose(model.log_posteriors(x), whole[3:10], atol=1e-6)


def test_a_loaded_model_scores_like_the_saved_one(tmp_path: Path) -> None:
    model = AcousticModel(ModelShape(inputs=3, layers=1, hidden=4, bottleneck=0, outputs=5, bidirectional=False))
    model.save(tmp_path, {"strategy": "adpsgd"})
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    np.testing.assert_array_equal(AcousticModel.load(tmp_path).log_posteriors(x), model.log_posteriors(x))
    assert json.loads((tmp_path / "model.json").read_text())["strategy"] == "adpsgd"


def test_errors_name_preset_setting_and_dimension(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'small'"):
        preset_shape("smal")
    with pytest.raises(UsageError, match="did you mean 'layers'"):
        preset_shape("small", layer=3)
    model = AcousticModel.preset("tiny")
    with pytest.raises(DataError, match=r"must have 120 dimensions \(got 40\)"):
        model.log_posteriors(np.zeros((3, 40), np.float32))
    model.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(DataError, match="acoustic model cannot be read"):
        AcousticModel.load(tmp_path)
