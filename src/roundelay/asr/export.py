"""Trained models for other programs: safetensors with a model card, ONNX checked for equal posteriors, Kaldi posteriors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roundelay.asr.kaldi import write_matrices
from roundelay.asr.model import AcousticModel
from roundelay.errors import DataError, UsageError

TOLERANCE = 1e-3
"""Largest difference of a log posterior that passes for equal: float32 sums in another order."""

CARD = """---
library_name: roundelay
tags: [speech-recognition, acoustic-model, hybrid-hmm]
---
# {title}

A hybrid HMM acoustic model: {direction} LSTM, {layers} layers of {hidden} cells{per_direction}, bottleneck {bottleneck},
{outputs} tied states, {parameters:,} parameters.

| | |
|---|---|
{facts}

**Inputs.** {inputs} features per frame of 10 ms, as `features.json` describes: normalised log-mel energies with deltas.
**Outputs.** A logit per tied state. Subtract `log_priors` (priors.safetensors) from the log-softmax for scaled likelihoods.

**Limits.** Trained on the data named above and nothing else; other microphones, rates, accents and languages will do worse.

```python
from pathlib import Path
from roundelay.asr.model import AcousticModel
model = AcousticModel.load(Path("."))
posteriors = model.log_posteriors(features)      # [frames, {inputs}] -> [frames, {outputs}]
```
"""


def model_card(model: AcousticModel, title: str, facts: dict[str, Any]) -> str:
    shape = model.shape
    return CARD.format(
        title=title,
        direction="bidirectional" if shape.both_ways else "unidirectional",
        per_direction=" per direction" if shape.both_ways else "",
        parameters=shape.parameters,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        **{k: v for k, v in asdict(shape).items() if k in ("layers", "hidden", "bottleneck", "outputs", "inputs")},
    )


def write_onnx(model: AcousticModel, path: Path, frames: int = 50) -> float:
    """Writes model.onnx (any batch, any number of frames); returns the largest difference of a log posterior."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it and says so less clearly
    except ImportError as error:
        raise UsageError(f"writing ONNX needs {error.name}", where="export", do="pip install 'roundelay[onnx]'") from error
    model.eval()
    example = torch.randn(2, frames, model.shape.inputs, generator=torch.Generator().manual_seed(0))
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("frames")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about torch's own LSTM; what counts is checked below
        torch.onnx.export(
            model, (example,), str(path), input_names=["features"], output_names=["scores"], dynamic_shapes={"features": axes},
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch, length in ((2, frames), (1, 2 * frames + 3)):
        x = torch.randn(batch, length, model.shape.inputs, generator=torch.Generator().manual_seed(length))
        theirs = torch.from_numpy(np.asarray(session.run(None, {"features": x.numpy()})[0])).log_softmax(-1)
        with torch.no_grad():
            worst = max(worst, float((model(x).log_softmax(-1) - theirs).abs().max()))
    if worst > TOLERANCE:
        path.unlink()
        raise DataError(
            f"the ONNX model's log posteriors differ by {worst:.2g}", where=str(path), do="report this, with versions"
        )
    return worst


def write_posteriors(folder: Path, matrices: Iterable[tuple[str, np.ndarray]]) -> int:
    """post.ark and post.scp; returns how many utterances."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_matrices(folder / "post.ark", folder / "post.scp", matrices)


def read_facts(path: Path) -> dict[str, Any]:
    about = json.loads(path.read_text())
    return {k: v for k, v in about.items() if k != "shape"}
