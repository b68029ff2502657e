"""Test helper: a canonical Graph written back as an ordinary ONNX model, so that ONNX runtimes can judge it.

Static attributes that ONNX wants as operands become initializers. Parameters and constants become graph inputs'
companions: `run` feeds them. Independent of the reader: nothing here knows where a node came from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from parallegg.program import Node, TensorType
from parallegg.rewrite.graph import Graph

OPSET = 23

INT_OPERANDS = {  # canonical attributes that are int64 operands in ONNX, in operand order
    "Reshape": ("shape",), "Expand": ("shape",), "Slice": ("starts", "ends", "axes", "steps"), "Tile": ("repeats",),
    "CumSum": ("axis",), "Trilu": ("k",), "TopK": ("k",),
    "ReduceSum": ("axes",), "ReduceMean": ("axes",), "ReduceMax": ("axes",), "ReduceMin": ("axes",),
    "ReduceProd": ("axes",),
}  # fmt: skip
SCALARS = {"axis", "k"}


def elem_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type(kind.dtype), kind.shape)


def export(graph: Graph) -> onnx.ModelProto:
    """The graph as an ONNX model whose inputs are the graph's inputs, parameters and constants."""
    initializers: list[onnx.TensorProto] = []
    nodes = [one for node in graph.nodes for one in _nodes(node, graph.types, initializers)]
    inputs = [value_info(name, graph.types[name]) for name in graph.leaves]
    outputs = [value_info(name, graph.types[name]) for name in graph.outputs]
    proto = helper.make_graph(nodes, "canonical", inputs, outputs, initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def _nodes(node: Node, types: Mapping[str, TensorType], initializers: list[onnx.TensorProto]):
    attributes, op = dict(node.attributes), node.op
    kind = types[node.inputs[0]]

    def operand(key: str, value) -> str:
        name = f"{node.outputs[0]}/{key}"
        initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    inputs = list(node.inputs)
    if op == "Slice":
        attributes["axes"] = tuple(range(kind.rank))
    if op == "Cast":
        attributes["to"] = elem_type(attributes["to"])
    elif op == "Clip":
        dtype = np.dtype(kind.dtype)
        inputs += [
            operand(key, np.asarray(attributes.pop(key), dtype)) if key in attributes else ""
            for key in ("min", "max")
        ]
    elif op == "Pad":
        value = np.asarray(attributes.pop("value")).astype(np.dtype(kind.dtype))
        inputs += [operand("pads", np.asarray(attributes.pop("pads"), np.int64)), operand("value", value)]
    elif op == "OneHot":
        inputs.insert(1, operand("depth", np.asarray(attributes.pop("depth"), np.int64)))
    elif op == "Trilu":
        inputs.append(operand("k", np.asarray(attributes.pop("k"), np.int64)))
    elif op == "Reshape":
        attributes["allowzero"] = 1
        inputs.append(operand("shape", np.asarray(attributes.pop("shape"), np.int64)))
    elif op in INT_OPERANDS:
        for key in INT_OPERANDS[op]:
            value = np.asarray(attributes.pop(key), np.int64)
            inputs.append(operand(key, value.reshape(1) if op == "TopK" else value))
        if op.startswith("Reduce"):
            attributes["noop_with_empty_axes"] = 1
    yield helper.make_node(op, inputs, list(node.outputs), name=node.name, **_renamed(op, attributes))


def _renamed(op: str, attributes: dict) -> dict:
    if op == "MaxPool":
        return attributes | {"storage_order": 0}
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
