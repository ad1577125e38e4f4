"""The acoustic model: LSTM layers, a linear bottleneck, a score for every tied state.

    features [batch, frames, inputs] -> LSTM (both directions, or one) -> linear -> linear -> [batch, frames, outputs]

The scores are logits; `log_posteriors` normalises them. Presets are the published networks and small ones for CPUs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundelay.errors import DataError, UsageError, did_you_mean

SHAPE_FILE, WEIGHTS_FILE = "model.json", "model.safetensors"


@dataclass(frozen=True)
class ModelShape:
    """The network in numbers."""

    inputs: int = 120
    layers: int = 2
    hidden: int = 128
    """Cells per layer and direction."""
    bottleneck: int = 128
    """0: none, the last layer goes straight to the outputs."""
    outputs: int = 500
    both_ways: bool = True
    dropout: float = 0.0
    edge: int = 0
    """Times the first and the last frame are repeated before an utterance is scored: as often as in the windows it was trained
    on, so that the beginning and the end of an utterance sound to it as they did there."""

    @property
    def parameters(self) -> int:
        """Counted without building it."""
        ways = 2 if self.both_ways else 1
        total, width = 0, self.inputs
        for _ in range(self.layers):
            total += ways * 4 * self.hidden * (width + self.hidden + 2)
            width = ways * self.hidden
        if self.bottleneck:
            total += (width + 1) * self.bottleneck
            width = self.bottleneck
        return total + (width + 1) * self.outputs


PRESETS: dict[str, tuple[ModelShape, str]] = {
    "swb2000": (
        ModelShape(inputs=260, layers=6, hidden=512, bottleneck=256, outputs=32_000),
        "the network of H-ADPSGD and of the ADPSGD papers on Switchboard-2000: fMLLR, i-vector and log-mel inputs",
    ),
    "lstm4x800": (
        ModelShape(inputs=120, layers=4, hidden=800, bottleneck=0, outputs=4_000, both_ways=False),
        "four layers of 800 in one direction, as in the work on Kaldi's parameter averaging",
    ),
    "medium": (ModelShape(layers=3, hidden=256, bottleneck=192, outputs=2_000), "about a day of speech on a workstation"),
    "small": (ModelShape(layers=2, hidden=160, bottleneck=128, outputs=500), "a few hours of speech on two cores"),
    "tiny": (ModelShape(layers=1, hidden=96, bottleneck=64, outputs=120), "isolated words, tests"),
}


def model_folder(named: Path) -> Path:
    """Where the model is: in the folder itself, or in `lstm` of a recipe's run."""
    of_a_run = named / "lstm"
    return of_a_run if of_a_run.is_dir() else named


def preset_shape(name: str, **changes: Any) -> ModelShape:
    if name not in PRESETS:
        raise UsageError(f"there is no model '{name}'", where="model", hint=did_you_mean(name, PRESETS))
    known = {f.name for f in fields(ModelShape)}
    for key in changes:
        if key not in known:
            raise UsageError(f"a model has no '{key}'", where=f"model {name}", hint=did_you_mean(key, known))
    return replace(PRESETS[name][0], **changes)


class AcousticModel(nn.Module):
    """Scores of tied states, frame by frame."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.lstm = nn.LSTM(
            shape.inputs,
            shape.hidden,
            shape.layers,
            batch_first=True,
            bidirectional=shape.both_ways,
            dropout=shape.dropout if shape.layers > 1 else 0.0,
        )
        width = shape.hidden * (2 if shape.both_ways else 1)
        self.bottleneck = nn.Linear(width, shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.outputs = nn.Linear(shape.bottleneck or width, shape.outputs)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> AcousticModel:
        return cls(preset_shape(name, **changes))

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """lengths: frames of each utterance where they differ; the backward direction then starts at the right end."""
        if lengths is None:
            states, _ = self.lstm(features)
        else:
            packed = nn.utils.rnn.pack_padded_sequence(features, lengths.cpu(), batch_first=True, enforce_sorted=False)
            states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=features.shape[1])
        return self.outputs(self.bottleneck(states))

    @torch.no_grad()
    def log_posteriors(self, features: np.ndarray) -> np.ndarray:
        """One utterance [frames, inputs] -> [frames, outputs]."""
        if features.shape[1] != self.shape.inputs:
            raise DataError(
                f"the features have {features.shape[1]} dimensions, the model takes {self.shape.inputs}",
                where="acoustic model",
                hint="use the features it was trained on",
            )
        was_training = self.training
        self.eval()
        padded = np.pad(features, ((self.shape.edge, self.shape.edge), (0, 0)), mode="edge")
        scores = self(torch.from_numpy(np.ascontiguousarray(padded, np.float32))[None])[0]
        self.train(was_training)
        return scores[self.shape.edge : self.shape.edge + len(features)].log_softmax(1).numpy()

    def take_layers(self, folder: Path) -> None:
        """The layers of a trained model, all but the outputs: its states are not ours."""
        other = AcousticModel.load(folder)
        same = ("inputs", "layers", "hidden", "bottleneck", "both_ways")
        unlike = [name for name in same if getattr(other.shape, name) != getattr(self.shape, name)]
        if unlike:
            raise UsageError(
                "that model has another shape: "
                + ", ".join(f"{name} {getattr(other.shape, name)}, not {getattr(self.shape, name)}" for name in unlike),
                where=str(folder),
                hint="give this one the same layers, hidden and bottleneck, and the same features",
            )
        taken = {name: weights for name, weights in other.state_dict().items() if not name.startswith("outputs.")}
        self.load_state_dict({**self.state_dict(), **taken})

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, about: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, str(folder / WEIGHTS_FILE))
        (folder / SHAPE_FILE).write_text(json.dumps({"shape": asdict(self.shape), **(about or {})}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> AcousticModel:
        try:
            shape = ModelShape(**json.loads((folder / SHAPE_FILE).read_text())["shape"])
            model = cls(shape)
            model.load_state_dict(load_file(str(folder / WEIGHTS_FILE)))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise DataError(
                f"this is not a readable acoustic model: {error}",
                where=str(folder),
                hint="a model is two files, model.json and model.safetensors, as training and export write them",
            ) from error
        return model.eval()
