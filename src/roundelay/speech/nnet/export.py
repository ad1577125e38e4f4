"""Export trained models: a model card, ONNX verified by comparing posteriors, and posteriors as Kaldi archives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roundelay.errors import DataError, UsageError
from roundelay.speech.features.kaldi_ark import write_matrices
from roundelay.speech.nnet.lstm import AcousticModel

TOLERANCE = 1e-3
"""Largest accepted difference of a log posterior. Sums of float32 in another order differ by less."""
ONNX_OPSET, ONNX_IR = 17, 8
"""Old enough for all current runtimes. The operators used here have not changed since."""

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

**Inputs.** {inputs} features per frame of 10 ms, as `features.json` describes. In training the first and the last frame were
repeated {context} times. `log_posteriors` does this; for the ONNX model, repeat the frames and drop their outputs.

**Outputs.** A logit per tied state. Subtract `log_priors` (priors.safetensors) from the log-softmax for scaled likelihoods.

**Limits.** Trained only on the data named above. Expect more errors with other microphones, rates, accents and languages.

```python
from pathlib import Path
from roundelay.speech.nnet.lstm import AcousticModel
model = AcousticModel.load(Path("."))
posteriors = model.log_posteriors(features)      # [frames, {inputs}] -> [frames, {outputs}]
```
"""


def model_card(model: AcousticModel, title: str, facts: dict[str, Any]) -> str:
    """Return a model card in Markdown. `facts` become the rows of its table."""
    shape = model.shape
    return CARD.format(
        title=title,
        direction="bidirectional" if shape.bidirectional else "unidirectional",
        per_direction=" per direction" if shape.bidirectional else "",
        parameters=shape.parameters,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        **{k: v for k, v in asdict(shape).items() if k in ("layers", "hidden", "bottleneck", "outputs", "inputs", "context")},
    )


def write_onnx(model: AcousticModel, path: Path, frames: int = 50) -> float:
    """Write an ONNX model for any batch size and number of frames, and compare it with `model` in onnxruntime.

    Returns the largest difference of a log posterior. Raises DataError if it exceeds TOLERANCE (the file is removed) and
    UsageError if onnx or onnxruntime is not installed.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            f"writing ONNX needs the {error.name} package", where="export", hint="pip install 'roundelay[onnx]'"
        ) from error
    model.eval()
    onnx.save(onnx_graph(model), str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch, length in ((2, frames), (1, 2 * frames + 3)):
        x = torch.randn(batch, length, model.shape.inputs, generator=torch.Generator().manual_seed(length))
        exported = torch.from_numpy(np.asarray(session.run(None, {"features": x.numpy()})[0])).log_softmax(-1)
        with torch.no_grad():
            worst = max(worst, float((model(x).log_softmax(-1) - exported).abs().max()))
    if worst > TOLERANCE:
        path.unlink()
        raise DataError(
            f"log posteriors of the ONNX model must differ by at most {TOLERANCE:g} (got {worst:.2g})",
            where=str(path),
            hint="report this with the versions of torch, onnx and onnxruntime",
        )
    return worst


def onnx_graph(model: AcousticModel) -> Any:
    """Return the network as an ONNX model.

    The graph is built by hand: torch's exporter takes half a minute, and its second export in a process fixes the number of
    frames.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    weights = {name: t.detach().cpu().numpy() for name, t in model.state_dict().items()}
    shape, nodes, constants = model.shape, [], []
    directions = ("", "_reverse") if shape.bidirectional else ("",)

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(kind: str, inputs: list[str], output: str, **options: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **options))
        return output

    def linear(name: str, x: str, output: str) -> str:
        product = node("MatMul", [x, constant(f"{name}.weight", weights[f"{name}.weight"].T)], f"{name}.product")
        return node("Add", [product, constant(f"{name}.bias", weights[f"{name}.bias"])], output)

    def gates(name: str, layer: int) -> np.ndarray:
        """Return [directions, gates, ...] in the order of ONNX: input, output, forget, cell."""
        stacked = np.stack(
            [weights[f"lstm.{name}_l{layer}{suffix}"].reshape(4, shape.hidden, -1)[[0, 3, 1, 2]] for suffix in directions]
        )
        return stacked.reshape(len(directions), 4 * shape.hidden, -1)

    joined = constant("joined", np.array([0, 0, len(directions) * shape.hidden], np.int64))
    x = node("Transpose", ["features"], "by_frame", perm=[1, 0, 2])
    for layer in range(shape.layers):
        biases = np.concatenate([gates("bias_ih", layer), gates("bias_hh", layer)], axis=1)[..., 0]
        inputs = [
            x,
            constant(f"lstm.{layer}.W", gates("weight_ih", layer)),
            constant(f"lstm.{layer}.R", gates("weight_hh", layer)),
            constant(f"lstm.{layer}.B", biases),
        ]
        direction = "bidirectional" if shape.bidirectional else "forward"
        states = node("LSTM", inputs, f"lstm.{layer}", hidden_size=shape.hidden, direction=direction)
        by_direction = node("Transpose", [states], f"lstm.{layer}.by_direction", perm=[0, 2, 1, 3])
        x = node("Reshape", [by_direction, joined], f"lstm.{layer}.joined")
    x = node("Transpose", [x], "by_utterance", perm=[1, 0, 2])
    if shape.bottleneck:
        x = linear("bottleneck", x, "bottleneck")
    linear("outputs", x, "scores")
    inputs_outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "frames", size])
        for name, size in (("features", shape.inputs), ("scores", shape.outputs))
    ]
    graph = helper.make_graph(nodes, "acoustic_model", inputs_outputs[:1], inputs_outputs[1:], constants)
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)], ir_version=ONNX_IR)
    checker.check_model(onnx_model)
    return onnx_model


def write_posteriors(folder: Path, matrices: Iterable[tuple[str, np.ndarray]]) -> int:
    """Write posteriors by utterance to post.ark and post.scp in a folder. Returns the number of utterances."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_matrices(folder / "post.ark", folder / "post.scp", matrices)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a model.json, without the shape."""
    content = json.loads(path.read_text())
    return {k: v for k, v in content.items() if k != "shape"}
