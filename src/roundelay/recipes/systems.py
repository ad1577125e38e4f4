"""Trained systems: whatever gives the decoder a score for every tied state of every frame."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from roundelay.errors import DataError
from roundelay.speech import memory_guard
from roundelay.speech.decode import DecodeOptions
from roundelay.speech.features.feature_store import Stream
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.nnet.lstm import AcousticModel

PRIORS_FILE = "priors.safetensors"
SCORE_COPIES = 3
"""Logits, log posteriors and scores are in memory together."""
SYSTEMS = {"mono": "monophone GMM", "tri": "tied-state GMM", "sat": "tied-state GMM adapted to speakers", "lstm": "LSTM"}
FIRST_PASS = "tri"
"""The system whose words others adapt to."""


class System(Protocol):
    """Something that has been trained."""

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        """Log-likelihoods up to a constant per frame, [frames, tied states]."""


@dataclass
class GmmSystem:
    model: AlignmentModel

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        return self.model.loglikes(store.static(utterance))


@dataclass
class NetworkSystem:
    """log p(x|s) = log p(s|x) - log p(s) + const"""

    model: AcousticModel
    log_priors: np.ndarray

    def scores(self, store: Stream, utterance: str) -> np.ndarray:
        frames = store.frames(utterance)
        needed = SCORE_COPIES * 4.0 * frames * self.model.shape.outputs
        memory_guard.require(needed, f"scoring {frames} frames", f"utterance {utterance}, features {store.name}")
        return self.model.log_posteriors(store[utterance]) - self.log_priors


def open_system(run: Path, name: str) -> System:
    """A system of a run directory."""
    folder = run / name
    if not folder.is_dir():
        there = [known for known in SYSTEMS if (run / known).is_dir()]
        raise DataError(f"this run has no system '{name}'", where=str(run), hint=f"it has: {', '.join(there) or 'none yet'}")
    if name != "lstm":
        return GmmSystem(AlignmentModel.load(folder))
    torch.set_num_threads(1)
    return NetworkSystem(AcousticModel.load(folder), load_file(str(folder / PRIORS_FILE))["log_priors"])


def chosen_scale(run: Path, system: str) -> float:
    """The acoustic scale that dev has chosen."""
    path = run / "decode" / system / "scale.json"
    return float(json.loads(path.read_text())["acoustic_scale"]) if path.exists() else DecodeOptions().acoustic_scale


def graph_of(name: str) -> str:
    """The decoding graph a system uses: the network shares that of the tied states it was trained on."""
    return "graph-mono" if name == "mono" else "graph-tri"


def save_network(folder: Path, model: AcousticModel, counts: np.ndarray, about: dict[str, object]) -> None:
    """The network with the priors of its outputs. A state that was never seen counts as seen half a time."""
    smoothed = np.maximum(counts, 0.5)
    model.save(folder, about)
    save_file({"log_priors": np.log(smoothed / smoothed.sum()).astype(np.float32)}, str(folder / PRIORS_FILE))


def read_about(folder: Path) -> dict[str, object]:
    return json.loads((folder / "model.json").read_text())
