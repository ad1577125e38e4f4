"""Acoustic systems of a run: models that score every tied state of every frame for the decoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from roundelay.errors import DataError
from roundelay.recipes.run_layout import LSTM, RunLayout, scale_file
from roundelay.speech import memory_guard
from roundelay.speech.decode import DecodeOptions
from roundelay.speech.features.feature_store import Stream
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.nnet.lstm import SHAPE_FILE, AcousticModel

PRIORS_FILE = "priors.safetensors"
SCORE_COPIES = 3
"""Logits, log posteriors and scores are in memory at the same time."""
SYSTEMS = {"mono": "monophone GMM", "tri": "tied-state GMM", "sat": "speaker-adapted tied-state GMM", LSTM: "LSTM"}


class System(Protocol):
    """A trained acoustic model."""

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        """Return log-likelihoods up to a constant per frame, [frames, tied states]."""


@dataclass
class GmmSystem:
    """Scores of a GMM-HMM: log p(x|s)."""

    model: AlignmentModel

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        return self.model.loglikes(store.static(utterance))


@dataclass
class NetworkSystem:
    """Scores of a network: log p(x|s) = log p(s|x) - log p(s) + const."""

    model: AcousticModel
    log_priors: np.ndarray

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        frames = store.frames(utterance)
        needed = SCORE_COPIES * 4.0 * frames * self.model.shape.outputs
        memory_guard.require(needed, f"scoring {frames} frames", f"utterance {utterance}, features {store.name}")
        return self.model.log_posteriors(store[utterance]) - self.log_priors


def open_system(layout: RunLayout, name: str) -> System:
    """Load a system of a run. Raise DataError if the run does not have it."""
    directory = layout.system(name)
    if not directory.is_dir():
        available = [system for system in SYSTEMS if layout.system(system).is_dir()]
        raise DataError(
            f"this run has no system '{name}'",
            where=str(layout.run),
            hint=f"choose one of its systems: {', '.join(available) or 'none is trained yet'}",
        )
    if name != LSTM:
        return GmmSystem(AlignmentModel.load(directory))
    torch.set_num_threads(1)
    return NetworkSystem(AcousticModel.load(directory), load_file(str(directory / PRIORS_FILE))["log_priors"])


def chosen_scale(layout: RunLayout, system: str) -> float:
    """Return the acoustic scale that dev chose for a system, or the default if it was not decoded yet."""
    path = scale_file(layout.decode(system))
    return float(json.loads(path.read_text())["acoustic_scale"]) if path.exists() else DecodeOptions().acoustic_scale


def save_network(directory: Path, model: AcousticModel, counts: np.ndarray, info: dict[str, object]) -> None:
    """Save a network with the log priors of its outputs. A state without frames gets half a count."""
    smoothed = np.maximum(counts, 0.5)
    model.save(directory, info)
    save_file({"log_priors": np.log(smoothed / smoothed.sum()).astype(np.float32)}, str(directory / PRIORS_FILE))


def read_info(directory: Path) -> dict[str, object]:
    """Return model.json of a saved network."""
    return json.loads((directory / SHAPE_FILE).read_text())
