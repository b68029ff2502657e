"""Builds a graph node by node, folding what is known.

In: canonical operators in topological order (`emit`), values (`constant`), leaves; or a graph to go on from
(`Builder.extending`).  Out: a `Graph` (`finish`) without dead nodes and with equal constants merged.
`Terms` writes nodes whose names begin with that of what they stand for.  `statistics` of what is dropped are dropped.
A tensor is *known* when its value follows from constants alone.  A node becomes a known tensor if its
operands are all known and neither they nor its result exceed FOLD_BYTES; one that changes nothing becomes its
operand.  Weights are never known, so arithmetic on them stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..program import Node, TensorType
from .evaluate import KERNELS, evaluate
from .graph import Graph, Statistic
from .operators import OPERATORS, infer

FOLD_BYTES = 16 * 2**20


class Builder:
    """The graph so far. Tensor names in `reserved` are given only by `rename_to`."""

    def __init__(self, reserved: set[str]) -> None:
        self.types: dict[str, TensorType] = {}
        self.values: dict[str, np.ndarray] = {}
        self.pending: dict[str, Callable[[], np.ndarray]] = {}  # known, read from the file at first use
        self.weights: dict[str, Callable[[], np.ndarray]] = {}  # not known, but can be read from the file
        self.nodes: list[Node] = []
        self.inputs: list[str] = []
        self.statistics: list[Statistic] = []
        self._sites = 0
        self._parameters: set[str] = set()
        self._reserved = reserved
        self._node_names: set[str] = set()

    @classmethod
    def extending(
        cls,
        graph: Graph,
        nodes: Iterable[Node] = (),
        types: Mapping[str, TensorType] | None = None,
        constants: Mapping[str, np.ndarray] | None = None,
    ) -> Builder:
        """A builder that holds a graph, and `nodes` over it with their types and constants."""
        builder = cls(reserved=set())
        builder.types = graph.types | dict(types or {})
        builder.values = graph.constants | dict(constants or {})
        builder.nodes = [*graph.nodes, *nodes]
        builder.inputs = list(graph.inputs)
        builder.statistics = list(graph.statistics)
        builder._parameters = set(graph.parameters)
        builder._node_names = {node.name for node in builder.nodes}
        return builder

    # ------------------------------------------------------------------------------------------- leaves

    def input(self, name: str, kind: TensorType) -> None:
        self.types[name] = kind
        self.inputs.append(name)

    def weight(self, name: str, kind: TensorType, read: Callable[[], np.ndarray] | None = None) -> None:
        self.types[name] = kind
        self._parameters.add(name)
        if read is not None:
            self.weights[name] = read

    def is_weight(self, name: str) -> bool:
        return name in self._parameters

    def stored(self, name: str, kind: TensorType, read: Callable[[], np.ndarray]) -> None:
        """A known tensor whose value is read when it is first needed."""
        self.types[name] = kind
        self.pending[name] = read

    def known(self, name: str) -> np.ndarray | None:
        """The tensor's value if it is known."""
        if name in self.pending:
            self.values[name] = self.pending.pop(name)()
        return self.values.get(name)

    def static(self, name: str) -> np.ndarray | None:
        """The value of an operand that becomes an attribute: known, or a weight's value in the file."""
        value = self.known(name)
        return self.weights[name]() if value is None and name in self.weights else value

    def constant(self, value: np.ndarray, name: str) -> str:
        """A new known tensor."""
        name = self.fresh(name)
        self.types[name] = TensorType(value.shape, str(value.dtype))
        self.values[name] = value
        return name

    def fresh(self, wanted: str) -> str:
        """`wanted`, or with a number behind it if a tensor or the model has that name."""
        return unused(wanted, lambda name: name in self.types or name in self._reserved)

    def next_site(self) -> int:
        """The number of one more random draw of the model."""
        self._sites += 1
        return self._sites

    def measure(self, name: str, measured: str, momentum: float) -> None:
        """Note that a weight, if the tensor `name` is one, holds the running average of `measured`."""
        if self.is_weight(name):
            self.statistics.append(Statistic(name, self.types[name], measured, momentum))

    # -------------------------------------------------------------------------------------------- nodes

    def emit(self, op: str, inputs: Sequence[str], attributes: dict[str, Any], name: str) -> tuple[str, ...]:
        """Append one canonical node (or fold it); the names of its results. ValueError if it is ill-typed."""
        kinds = tuple(self.types[tensor] for tensor in inputs)
        results = infer(op, attributes, kinds)
        if _changes_nothing(op, attributes, kinds, results):
            return (inputs[0],)
        folded = self._fold(op, inputs, attributes, kinds, results)
        if folded is not None:
            return tuple(self.constant(value, name) for value in folded)
        outputs = []
        for kind in results:
            tensor = self.fresh(name if len(results) == 1 else f"{name}:{len(outputs)}")
            self.types[tensor] = kind
            outputs.append(tensor)
        self.nodes.append(Node(self._node_name(name), op, tuple(inputs), tuple(outputs), attributes))
        return tuple(outputs)

    def _node_name(self, wanted: str) -> str:
        name = unused(wanted, self._node_names.__contains__)
        self._node_names.add(name)
        return name

    def _fold(self, op, inputs, attributes, kinds, results) -> tuple[np.ndarray, ...] | None:
        if op not in KERNELS or any(kind.bytes > FOLD_BYTES for kind in (*kinds, *results)):
            return None
        values = []
        for tensor in inputs:
            value = self.known(tensor)
            if value is None:
                return None
            values.append(value)
        folded = evaluate(op, attributes, values)
        found = tuple(TensorType(value.shape, str(value.dtype)) for value in folded)
        assert found == results, f"{op}: folded to {found}, inferred {results}"
        return folded

    def rename(self, old: str, new: str, since: int = 0) -> None:
        """Give a tensor made by node `since` or a later one, or by folding, a new name."""
        self.types[new] = self.types.pop(old)
        if old in self.values:
            self.values[new] = self.values.pop(old)
        for i in range(since, len(self.nodes)):
            node = self.nodes[i]
            if old in node.inputs or old in node.outputs:
                inputs, outputs = (_swap(names, old, new) for names in (node.inputs, node.outputs))
                self.nodes[i] = replace(node, inputs=inputs, outputs=outputs)
        self.statistics = [replace(s, measured=new) if s.measured == old else s for s in self.statistics]

    # -------------------------------------------------------------------------------------------- result

    def finish(self, name: str, outputs: dict[str, str], source: Path | None) -> Graph:
        """The graph with `outputs` (model name -> tensor), dead nodes dropped and equal constants merged."""
        final = self._name_outputs(outputs)
        nodes = self._live(set(final))
        nodes = self._merge_constants(nodes)
        used = dict.fromkeys(tensor for node in nodes for tensor in node.inputs)
        made = {tensor for node in nodes for tensor in node.outputs}
        leaves = [tensor for tensor in used if tensor not in made and tensor not in self.inputs]
        parameters = tuple(tensor for tensor in leaves if self._is_parameter(tensor))
        values = {tensor: self.known(tensor) for tensor in leaves}
        constants = {tensor: value for tensor, value in values.items() if value is not None}
        kept = (*self.inputs, *leaves, *(tensor for node in nodes for tensor in node.outputs))
        types = {tensor: self.types[tensor] for tensor in kept}
        measured = tuple(statistic for statistic in self.statistics if statistic.measured in types)
        return Graph(name, nodes, tuple(self.inputs), parameters, constants, final, types, source, measured)

    def _is_parameter(self, tensor: str) -> bool:
        """Of a leaf that is no input."""
        return tensor not in self.values and tensor not in self.pending

    def _name_outputs(self, outputs: dict[str, str]) -> tuple[str, ...]:
        """Give each output's tensor the model's name for it; what no node makes, or is taken, is copied."""
        made = {tensor for node in self.nodes for tensor in node.outputs}
        names: dict[str, str] = {}  # tensor -> the output it became
        final = []
        for wanted, tensor in outputs.items():
            if tensor in made and tensor not in names and tensor not in outputs:
                self.rename(tensor, wanted)
                names[tensor] = wanted
            elif tensor not in made or tensor != wanted:
                wanted = self._copy(names.get(tensor, tensor), wanted)
            final.append(wanted)
        return tuple(final)

    def _copy(self, tensor: str, name: str) -> str:
        """A Reshape to the same shape: an output that is also an input, a weight or another output."""
        name = f"{name}/output" if name in self.types else name
        kind = self.types[tensor]
        self.types[name] = kind
        self.nodes.append(Node(self._node_name(name), "Reshape", (tensor,), (name,), {"shape": kind.shape}))
        return name

    def _live(self, needed: set[str]) -> tuple[Node, ...]:
        live = []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                live.append(node)
                needed.update(node.inputs)
        return tuple(reversed(live))

    def _merge_constants(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        first: dict[tuple[TensorType, bytes], str] = {}
        alias: dict[str, str] = {}
        for tensor in dict.fromkeys(tensor for node in nodes for tensor in node.inputs):
            value = self.known(tensor)
            if value is not None and self.types[tensor].bytes <= FOLD_BYTES:
                other = first.setdefault((self.types[tensor], value.tobytes()), tensor)
                if other != tensor:
                    alias[tensor] = other
        return tuple(
            replace(n, inputs=tuple(alias.get(t, t) for t in n.inputs))
            if any(t in alias for t in n.inputs)
            else n
            for n in nodes
        )


class Terms:
    """Writes nodes into a builder; the names of all begin with `name`."""

    def __init__(self, builder: Builder, name: str) -> None:
        self.builder, self.name = builder, name

    def emit(self, op: str, *inputs: str, label: str = "", **attributes: Any) -> str:
        return self.emit_all(op, *inputs, label=label, **attributes)[0]

    def emit_all(self, op: str, *inputs: str, label: str = "", **attributes: Any) -> tuple[str, ...]:
        name = f"{self.name}/{label}" if label else self.name
        return self.builder.emit(op, inputs, attributes, name)

    def constant(self, value: Any, dtype: str, label: str = "constant") -> str:
        array = np.asarray(value, dtype=np.dtype(dtype))
        return self.builder.constant(array, f"{self.name}/{label}")

    def type_of(self, tensor: str) -> TensorType:
        return self.builder.types[tensor]

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.builder.types[tensor].shape

    def dtype_of(self, tensor: str) -> str:
        return self.builder.types[tensor].dtype

    def reshape(self, tensor: str, shape: Iterable[int], label: str = "") -> str:
        return self.emit("Reshape", tensor, label=label, shape=tuple(shape))


def _swap(names: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in names)


def unused(wanted: str, taken: Callable[[str], bool]) -> str:
    name, count = wanted, 1
    while taken(name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def _changes_nothing(op: str, attributes: dict[str, Any], kinds: Sequence[TensorType], results) -> bool:
    """Whether the node returns its only operand as it is."""
    if len(kinds) != 1 or results[0] != kinds[0]:
        return False
    if op in ("Reshape", "Expand", "Cast", "Concat", "Tile", "Pad"):
        return True  # the type is the same and so is every element
    if op == "Transpose":
        return attributes["perm"] == tuple(range(kinds[0].rank))
    return op == "Slice" and all(step > 0 for step in attributes["steps"])


assert set(KERNELS) <= set(OPERATORS)
