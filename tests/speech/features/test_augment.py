"""Augmentation: SpecAugment, VTLP, speed perturbation; and networks that start from pretrained layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.audio import read_audio
from roundelay.speech.features.augment import SpecAugment, Vtlp
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.fbank import add_deltas, log_mel
from roundelay.speech.features.speed_perturb import perturb_speed
from roundelay.speech.hmm.align import write_alignments
from roundelay.speech.nnet.frame_task import FrameTask
from roundelay.speech.nnet.lstm import AcousticModel

RATE = 8000


@given(st.integers(0, 8), st.integers(0, 12), st.integers(1, 30), st.integers(0, 1000))
def test_spec_augment_masks_bands_and_stretches_only(freq: int, time: int, length: int, seed: int) -> None:
    x = np.ones((length, 24), np.float32)
    SpecAugment(freq, time, static_dim=8).apply(x, np.random.default_rng(seed))
    masked_frames = (x == 0).all(1)
    masked_mels = (x[~masked_frames] == 0).all(0) if not masked_frames.all() else np.ones(24, bool)
    assert ((x == 0) == (masked_frames[:, None] | masked_mels[None, :])).all()
    if not masked_mels.all():
        assert masked_frames.sum() <= time
        assert (masked_mels.reshape(3, 8) == masked_mels[:8]).all(), "a band is masked in the deltas as well"
        assert masked_mels[:8].sum() <= 2 * freq


def tone(folder: Path, hz: float, seconds: float, name: str) -> Utterance:
    return recorded(folder, 0.3 * np.sin(2 * np.pi * hz * np.arange(int(RATE * seconds)) / RATE), name)


def recorded(folder: Path, samples: np.ndarray, name: str) -> Utterance:
    soundfile.write(folder / f"{name}.wav", samples.astype(np.float32), RATE)
    return Utterance(name, f"of-{name}", ("A",), folder / f"{name}.wav")


@pytest.fixture
def task_folders(tmp_path: Path) -> dict[str, str]:
    # Noise, not tones: frames of a steady tone are equal, so that removing the mean leaves nothing.
    rng = np.random.default_rng(0)
    corpus = Corpus(tmp_path, [recorded(tmp_path, 0.1 * rng.standard_normal(RATE), f"u{n}") for n in range(3)])
    store = extract(corpus, tmp_path / "features", FeatureOptions(rate=RATE), progress="none")
    write_alignments(tmp_path / "states", {name: np.zeros(store.frames(name), np.int32) for name in store.ids}, 2)
    features, states = str(tmp_path / "features"), str(tmp_path / "states")
    return {"features": features, "alignments": states, "valid_features": features, "valid_alignments": states}


def test_masks_depend_on_seed_epoch_and_window_only(task_folders: dict[str, str]) -> None:
    plain, masked = (FrameTask(**task_folders, spec_augment_freq=m, spec_augment_time=m) for m in (0, 6))
    whole = masked.batch(1, 0, masked.samples)[0]
    again = FrameTask(**task_folders, spec_augment_freq=6, spec_augment_time=6)
    pieces = [again.batch(1, n, n + 1)[0] for n in range(again.samples)]
    assert (np.concatenate([p.numpy() for p in pieces]) == whole.numpy()).all()
    assert (masked.batch(2, 0, 1)[0].numpy() != whole.numpy()[:1]).any()
    changed = plain.batch(1, 0, plain.samples)[0].numpy() != whole.numpy()
    assert 0 < changed.mean() < 0.6
    assert (whole.numpy()[changed] == 0).all()
    with pytest.raises(UsageError, match=r"spec_augment_freq must be between 0 and 40 \(got 41\)"):
        FrameTask(**task_folders, spec_augment_freq=41)


def tone_mels(hz: float) -> np.ndarray:
    return log_mel(0.3 * np.sin(2 * np.pi * hz * np.arange(RATE) / RATE), RATE)


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.15])
@pytest.mark.parametrize("hz", [500.0, 1000.0, 2000.0])
def test_vtlp_moves_a_tone_to_the_scaled_frequency(hz: float, factor: float) -> None:
    vtlp = Vtlp(0.2, RATE, 40, 64.0, -200.0)
    x = add_deltas(tone_mels(hz), 2)
    before = x.copy()
    vtlp.warp(x, factor)
    expected = tone_mels(hz * factor).mean(0).argmax()
    assert abs(int(x[:, :40].mean(0).argmax()) - int(expected)) <= 1
    if factor == 1.0:
        np.testing.assert_allclose(x, before, rtol=1e-4, atol=1e-3)
    else:
        static = before[:, :40].copy()
        vtlp.warp(static, factor)
        np.testing.assert_allclose(
            x, add_deltas(static, 2), rtol=1e-3, atol=1e-3, err_msg="deltas are warped like the static features"
        )


def test_vtlp_depends_on_seed_epoch_and_window_only(task_folders: dict[str, str]) -> None:
    plain, warped = (FrameTask(**task_folders, vtlp=w) for w in (0.0, 0.1))
    whole = warped.batch(1, 0, warped.samples)[0].numpy()
    again = FrameTask(**task_folders, vtlp=0.1)
    pieces = [again.batch(1, n, n + 1)[0].numpy() for n in range(again.samples)]
    assert (np.concatenate(pieces) == whole).all()
    assert (warped.batch(2, 0, 1)[0].numpy() != whole[:1]).any()
    assert (plain.batch(1, 0, plain.samples)[0].numpy() != whole).any()
    masked, both = (FrameTask(**task_folders, spec_augment_freq=6, spec_augment_time=6, vtlp=w) for w in (0.0, 0.1))
    zeros = [task.batch(1, 0, task.samples)[0].numpy() == 0 for task in (masked, both)]
    assert (zeros[0] <= zeros[1]).all(), "masks are applied after warping"
    for max_warp in (-0.1, 0.5):
        with pytest.raises(UsageError, match=r"vtlp must be at least 0 and below 0\.5"):
            FrameTask(**task_folders, vtlp=max_warp)


def test_speed_perturbed_copies_have_another_length_pitch_and_speaker(tmp_path: Path) -> None:
    utterance = tone(tmp_path, 400.0, 1.0, "u")
    factors = (0.9, 1.1)
    copies = perturb_speed([utterance], factors, tmp_path / "out", RATE, progress="none")
    for factor, copy in zip(factors, copies, strict=True):
        assert (copy.id, copy.speaker, copy.words) == (f"sp{factor:g}-u", f"sp{factor:g}-of-u", ("A",))
        samples = read_audio(copy, RATE)
        assert len(samples) == pytest.approx(RATE / factor, abs=2)
        spectrum = np.abs(np.fft.rfft(samples))
        assert spectrum.argmax() * RATE / len(samples) == pytest.approx(400.0 * factor, abs=2), (
            "the pitch changes with the speed"
        )
    with pytest.raises(UsageError, match=r"not 1 \(got 1\)"):
        perturb_speed([utterance], (1.0,), tmp_path / "out", RATE)


def test_init_from_copies_all_layers_but_the_outputs(task_folders: dict[str, str], tmp_path: Path) -> None:
    shape = {"layers": 1, "hidden": 8, "bottleneck": 4}
    torch.manual_seed(1)
    trained = AcousticModel.preset("tiny", inputs=120, outputs=7, **shape)
    trained.save(tmp_path / "a-run" / "lstm")
    for path in ("a-run", "a-run/lstm"):
        initial = FrameTask(**task_folders, **shape, init_from=str(tmp_path / path)).build().state_dict()
        for name, weights in trained.state_dict().items():
            assert name.startswith("outputs.") or torch.equal(initial[name], weights)
        assert initial["outputs.weight"].shape == (2, 4), "the alignments have two tied states"
    fresh = FrameTask(**task_folders, **shape).build().state_dict()
    assert not torch.equal(fresh["lstm.weight_ih_l0"], trained.state_dict()["lstm.weight_ih_l0"])


def test_init_from_rejects_other_shapes(task_folders: dict[str, str], tmp_path: Path) -> None:
    AcousticModel.preset("tiny", inputs=120, layers=1, hidden=16, bottleneck=4).save(tmp_path / "wide")
    with pytest.raises(UsageError, match=r"hidden 8 \(got 16\)"):
        FrameTask(**task_folders, layers=1, hidden=8, bottleneck=4, init_from=str(tmp_path / "wide")).build()
    with pytest.raises(DataError, match="acoustic model cannot be read"):
        FrameTask(**task_folders, init_from=str(tmp_path / "nowhere")).build()
