"""Test helper: a canonical Graph written back as an ordinary ONNX model, so that ONNX runtimes can judge it.

Static attributes that ONNX wants as operands become initializers; parameters and constants become inputs,
which `run` feeds. Independent of the reader: nothing here knows where a node came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from parallegg.program import Node, TensorType
from parallegg.rewrite.graph import Graph

OPSET = 23

OPERANDS = {  # canonical attributes that are operands in ONNX, in their order
    "Reshape": ("shape",), "Expand": ("shape",), "Tile": ("repeats",), "CumSum": ("axis",), "Trilu": ("k",),
    "Slice": ("starts", "ends", "axes", "steps"), "TopK": ("k",), "OneHot": ("depth",),
    "Pad": ("pads", "value"), "Clip": ("min", "max"),
    "ReduceSum": ("axes",), "ReduceMean": ("axes",), "ReduceMax": ("axes",), "ReduceMin": ("axes",),
    "ReduceProd": ("axes",),
}  # fmt: skip
OF_DATA_TYPE = ("value", "min", "max")  # the other operands are int64


def elem_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type(kind.dtype), kind.shape)


def export(graph: Graph) -> onnx.ModelProto:
    """The graph as an ONNX model whose inputs are the graph's inputs, parameters and constants."""
    initializers: list[onnx.TensorProto] = []
    nodes = [_onnx_node(node, graph.types, initializers) for node in graph.nodes]
    inputs = [value_info(name, graph.types[name]) for name in graph.leaves]
    outputs = [value_info(name, graph.types[name]) for name in graph.outputs]
    proto = helper.make_graph(nodes, "canonical", inputs, outputs, initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def _onnx_node(node: Node, types: Mapping[str, TensorType], initializers: list) -> onnx.NodeProto:
    kind, attributes, added = types[node.inputs[0]], _onnx_attributes(node, types), []
    for key in OPERANDS.get(node.op, ()):
        if key not in attributes:
            added.append("")
            continue
        value = np.asarray(attributes.pop(key)).astype(
            np.dtype(kind.dtype if key in OF_DATA_TYPE else "int64")
        )
        added.append(f"{node.outputs[0]}/{key}")
        value = value.reshape(1) if node.op == "TopK" else value
        initializers.append(numpy_helper.from_array(value, added[-1]))
    place = 1 if node.op == "OneHot" else len(node.inputs)
    inputs = [*node.inputs[:place], *added, *node.inputs[place:]]
    return helper.make_node(node.op, inputs, list(node.outputs), name=node.name, **attributes)


def _onnx_attributes(node: Node, types: Mapping[str, TensorType]) -> dict[str, Any]:
    """The attributes, with what ONNX needs besides to mean the same."""
    attributes = dict(node.attributes)
    if node.op == "Slice":
        attributes["axes"] = tuple(range(types[node.inputs[0]].rank))
    if node.op == "Cast":
        attributes["to"] = elem_type(attributes["to"])
    if node.op == "Reshape":
        attributes["allowzero"] = 1
    if node.op.startswith("Reduce"):
        attributes["noop_with_empty_axes"] = 1
    return attributes


def session(model: onnx.ModelProto | str):
    """An ONNX Runtime session that rewrites nothing."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model if isinstance(model, str) else model.SerializeToString(), options)


def random_inputs(graph: Graph, seed: int, high: int = 100) -> dict[str, np.ndarray]:
    """Normal floats, integers below `high`, true booleans and integers named like a mask one."""
    rng = np.random.default_rng(seed)
    values = {}
    for name in graph.inputs:
        kind = graph.types[name]
        if kind.floating:
            values[name] = rng.standard_normal(kind.shape).astype(np.dtype(kind.dtype))
        elif kind.dtype == "bool":
            values[name] = np.ones(kind.shape, bool)
        else:
            values[name] = rng.integers(0, 2 if "mask" in name else high, kind.shape).astype(
                np.dtype(kind.dtype)
            )
    return values


def run(graph: Graph, inputs: Mapping[str, np.ndarray], weight) -> list[np.ndarray]:
    """The outputs of the graph in ONNX Runtime; `weight` gives a parameter's or constant's value."""
    feeds = dict(inputs)
    for name in (*graph.parameters, *graph.constants):
        feeds[name] = np.array(weight(name), order="C")
    return session(export(graph)).run(list(graph.outputs), feeds)
