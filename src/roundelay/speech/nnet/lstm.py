"""The LSTM acoustic model: LSTM layers, a linear bottleneck, one logit for every tied state.

    features [batch, frames, inputs] -> LSTM -> linear bottleneck -> linear -> logits [batch, frames, outputs]

`log_posteriors` normalizes the logits. Presets are the published networks and small ones for CPUs.
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
    """Hyperparameters of the network.

    context: repetitions of the first and the last frame before an utterance is scored. Training windows have as many context
    frames, so that the ends of an utterance look as they did in training.
    """

    inputs: int = 120
    layers: int = 2
    hidden: int = 128
    """Cells per layer and direction."""
    bottleneck: int = 128
    """0: no bottleneck; the last LSTM layer is connected to the outputs."""
    outputs: int = 500
    bidirectional: bool = True
    dropout: float = 0.0
    context: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of parameters without building the network."""
        directions = 2 if self.bidirectional else 1
        total, width = 0, self.inputs
        for _ in range(self.layers):
            total += directions * 4 * self.hidden * (width + self.hidden + 2)
            width = directions * self.hidden
        if self.bottleneck:
            total += (width + 1) * self.bottleneck
            width = self.bottleneck
        return total + (width + 1) * self.outputs


PRESETS: dict[str, tuple[ModelShape, str]] = {
    "swb2000": (
        ModelShape(inputs=260, layers=6, hidden=512, bottleneck=256, outputs=32_000),
        "the network of the H-ADPSGD and ADPSGD papers on Switchboard-2000: fMLLR, i-vector and log-mel inputs",
    ),
    "lstm4x800": (
        ModelShape(inputs=120, layers=4, hidden=800, bottleneck=0, outputs=4_000, bidirectional=False),
        "four unidirectional layers of 800 cells, as in the work on Kaldi's parameter averaging",
    ),
    "medium": (ModelShape(layers=3, hidden=256, bottleneck=192, outputs=2_000), "for about a day of speech on a workstation"),
    "small": (ModelShape(layers=2, hidden=160, bottleneck=128, outputs=500), "for a few hours of speech on two cores"),
    "tiny": (ModelShape(layers=1, hidden=96, bottleneck=64, outputs=120), "for isolated words and tests"),
}


def model_folder(path: Path) -> Path:
    """Return the folder of a model: `lstm` below `path` if `path` is a run directory of a recipe, else `path` itself."""
    in_run = path / "lstm"
    return in_run if in_run.is_dir() else path


def preset_shape(name: str, **changes: Any) -> ModelShape:
    """Return the shape of a preset with some fields changed. Raises UsageError for an unknown preset or field."""
    if name not in PRESETS:
        raise UsageError(f"unknown model preset '{name}'", where="model", hint=did_you_mean(name, PRESETS))
    names = {f.name for f in fields(ModelShape)}
    for key in changes:
        if key not in names:
            raise UsageError(f"unknown model setting '{key}'", where=f"model {name}", hint=did_you_mean(key, names))
    return replace(PRESETS[name][0], **changes)


class AcousticModel(nn.Module):
    """Map features to logits of tied states, frame by frame."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.lstm = nn.LSTM(
            shape.inputs,
            shape.hidden,
            shape.layers,
            batch_first=True,
            bidirectional=shape.bidirectional,
            dropout=shape.dropout if shape.layers > 1 else 0.0,
        )
        width = shape.hidden * (2 if shape.bidirectional else 1)
        self.bottleneck = nn.Linear(width, shape.bottleneck) if shape.bottleneck else nn.Identity()
        self.outputs = nn.Linear(shape.bottleneck or width, shape.outputs)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> AcousticModel:
        """Build a preset with some fields of its shape changed."""
        return cls(preset_shape(name, **changes))

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits [batch, frames, outputs].

        `lengths` are the frames of each utterance of a padded batch, so that the backward direction starts at the last frame.
        """
        if lengths is None:
            states, _ = self.lstm(features)
        else:
            packed = nn.utils.rnn.pack_padded_sequence(features, lengths.cpu(), batch_first=True, enforce_sorted=False)
            states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=features.shape[1])
        return self.outputs(self.bottleneck(states))

    @torch.no_grad()
    def log_posteriors(self, features: np.ndarray) -> np.ndarray:
        """Return the log posteriors [frames, outputs] of one utterance [frames, inputs]. Raises DataError for other inputs."""
        if features.shape[1] != self.shape.inputs:
            raise DataError(
                f"the features must have {self.shape.inputs} dimensions (got {features.shape[1]})",
                where="acoustic model",
                hint="use the features that the model was trained on",
            )
        was_training = self.training
        self.eval()
        context = self.shape.context
        padded = np.pad(features, ((context, context), (0, 0)), mode="edge")
        scores = self(torch.from_numpy(np.ascontiguousarray(padded, np.float32))[None])[0]
        self.train(was_training)
        return scores[context : context + len(features)].log_softmax(1).numpy()

    def load_pretrained_layers(self, folder: Path) -> None:
        """Copy all layers of a trained model except the output layer, because its tied states may differ.

        Raises UsageError if the layers have other shapes and DataError if the model is unreadable.
        """
        other = AcousticModel.load(folder)
        same = ("inputs", "layers", "hidden", "bottleneck", "bidirectional")
        different = [name for name in same if getattr(other.shape, name) != getattr(self.shape, name)]
        if different:
            raise UsageError(
                "the pretrained model must have the same shape: "
                + ", ".join(f"{name} {getattr(self.shape, name)} (got {getattr(other.shape, name)})" for name in different),
                where=str(folder),
                hint="set layers, hidden and bottleneck to those of the pretrained model, and use the same features",
            )
        layers = {name: weights for name, weights in other.state_dict().items() if not name.startswith("outputs.")}
        self.load_state_dict({**self.state_dict(), **layers})

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, metadata: dict[str, Any] | None = None) -> None:
        """Write weights, shape and metadata to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, str(folder / WEIGHTS_FILE))
        (folder / SHAPE_FILE).write_text(json.dumps({"shape": asdict(self.shape), **(metadata or {})}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> AcousticModel:
        """Load a model in evaluation mode. Raises DataError if the folder is not a complete model."""
        try:
            shape = ModelShape(**json.loads((folder / SHAPE_FILE).read_text())["shape"])
            model = cls(shape)
            model.load_state_dict(load_file(str(folder / WEIGHTS_FILE)))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise DataError(
                f"the acoustic model cannot be read: {error}",
                where=str(folder),
                hint="name a folder with model.json and model.safetensors, as training and export write them",
            ) from error
        return model.eval()
