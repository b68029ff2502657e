"""The logical graph as a program: a plan for one device, in the bytes that the plan checker reads.

    logical_bytes(graph, state) -> the serialized ONNX model

One node computes one tensor under the name that plans call it by (a Concat of many is a chain of Concats of two, as
the planner sees it), so that `certificate.check` compares a plan with it tensor by tensor.
"""

from __future__ import annotations

from ..mesh import ONE_DEVICE
from ..planfile import Plan, Port, to_bytes
from ..rewrite.graph import Graph
from ..rewrite.kinds import in_pairs


def logical_bytes(graph: Graph, state: tuple[tuple[str, str], ...] = ()) -> bytes:
    """A graph as a one-device plan; `state` pairs leaves with the outputs that are their next values."""
    types = dict(graph.types)
    nodes = tuple(part for node in graph.nodes for part in in_pairs(node, types))
    inputs = tuple(Port(name, kind, types[name], (), name) for name, kind in graph.ports)
    outputs = tuple(Port(name, "output", types[name], (), name) for name in graph.outputs)
    return to_bytes(Plan(ONE_DEVICE, inputs, outputs, nodes, types, graph.constants, state=state))
