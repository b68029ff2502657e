"""Test helper: a canonical Graph written back as an ordinary ONNX model, so that ONNX runtimes can judge it.

Static attributes that ONNX wants as operands become initializers; parameters and constants become inputs,
which `run` feeds. Nodes are written as a plan file writes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper
from parallegg.planfile import IR_VERSION, OPSET, onnx_node, value_info
from parallegg.rewrite.graph import Graph


def export(graph: Graph) -> onnx.ModelProto:
    """The graph as an ONNX model whose inputs are the graph's inputs, parameters and constants."""
    initializers: list[onnx.TensorProto] = []
    nodes = []
    for node in graph.nodes:
        proto, extra = onnx_node(node, graph.types)
        nodes.append(proto)
        initializers += extra
    inputs, outputs = (
        [value_info(name, graph.types[name]) for name in names] for names in (graph.leaves, graph.outputs)
    )
    proto = helper.make_graph(nodes, "canonical", inputs, outputs, initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


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
