"""From a logical graph to operator applications and their kinds.

`applications(graph)` gives one `Application` per tensor that a node computes, in topological order: a variadic Concat
becomes a chain of two-operand ones, an operator with several results one application per result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..program import Node, TensorType
from .builder import unused
from .graph import Graph
from .operators import infer
from .space import Kind
from .terms import RESULT, encode


@dataclass(frozen=True)
class Application:
    """`tensor = kind(operands)` for the node `node`, made by the algebra rules `rules` (none: as the model has it)."""

    tensor: str
    kind: Kind
    operands: tuple[str, ...]
    node: str
    rules: tuple[str, ...] = ()


def applications(graph: Graph) -> tuple[list[Application], dict[str, TensorType]]:
    """All applications in topological order, and the type of every tensor they and the graph name."""
    types = dict(graph.types)
    found: list[Application] = []
    for node in graph.nodes:
        for part in in_pairs(node, types):
            operands = tuple(types[name] for name in part.inputs)
            for index, tensor in enumerate(part.outputs):
                head = encode(_selecting(part, index))
                found.append(Application(tensor, Kind(head, operands, types[tensor]), part.inputs, node.name))
    return found, types


def in_pairs(node: Node, types: dict[str, TensorType]) -> Iterator[Node]:
    """A Concat of n tensors as n - 1 Concats of two, from the right; any other node as it is."""
    if node.op != "Concat" or len(node.inputs) == 2:
        yield node
        return
    *rest, last = node.inputs
    for i in range(len(rest) - 1, -1, -1):
        name = node.outputs[0] if i == 0 else unused(f"{node.outputs[0]}/tail{i}", types.__contains__)
        pair = (rest[i], last)
        types[name] = infer("Concat", node.attributes, (types[rest[i]], types[last]))[0]
        yield Node(f"{node.name}/{i}" if i else node.name, "Concat", pair, (name,), node.attributes)
        last = name


def _selecting(node: Node, index: int) -> Node:
    if len(node.outputs) == 1:
        return node
    return Node(node.name, node.op, node.inputs, node.outputs, {**node.attributes, RESULT: index})
