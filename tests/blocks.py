"""Small graphs from x to y with random weights, written as ONNX and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import parallegg
from onnx import TensorProto, helper, numpy_helper
from parallegg.rewrite.graph import Graph

Shape = tuple[int, ...]


def block(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    x: Shape,
    weights: Mapping[str, Shape],
    constants: Mapping[str, np.ndarray] | None = None,
) -> Graph:
    """A graph from x to y; `constants` are initializers with these values."""
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype("f") for name, shape in weights.items()}
    stored = [
        numpy_helper.from_array(value, name) for name, value in (values | dict(constants or {})).items()
    ]
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", x), ("y", None))
    ]
    graph = helper.make_graph(nodes, "block", info[:1], info[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return parallegg.load(path)


def feed_forward(x: str, layers: int, width: int) -> tuple[list[onnx.NodeProto], dict[str, Shape]]:
    """Products up to four times the width and down again, from tensor `x` to y; and the weights."""
    nodes, weights, h = [], {}, x
    for i in range(layers):
        out = "y" if i == layers - 1 else f"h{i}"
        nodes += [
            helper.make_node("MatMul", [h, f"up{i}"], [f"u{i}"]),
            helper.make_node("Gelu", [f"u{i}"], [f"a{i}"]),
            helper.make_node("MatMul", [f"a{i}", f"down{i}"], [out]),
        ]
        weights |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
        h = out
    return nodes, weights
