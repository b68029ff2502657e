"""The e-graph's tables as Python values.

`Frozen(egraph, book)` reads every operator, placement and analysis table once. E-classes are small integers; e-class
ids of egglog share one counter across sorts, so only Tensor values are numbered here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from egglog.bindings import EGraph

from ..mesh import Partial, Placement, Replicate, Shard
from ..program import TensorType
from ..rules import RuleBook
from .terms import Head, Value


class ENode(NamedTuple):
    """A constructor with attributes over e-classes."""

    head: Head
    operands: tuple[int, ...]


class Frozen:
    """The e-graph's tables as Python values; e-classes are small integers in order of first appearance."""

    def __init__(self, egraph: EGraph, book: RuleBook) -> None:
        self._egraph = egraph
        self._classes: dict[object, int] = {}
        self._values: dict[tuple[str, object], Value | Placement] = {}
        tables = egraph.freeze().functions
        self._placements = {
            row.output: self._placement(name, row) for name in ("Shard", "Replicate", "Partial") for row in tables[name].rows
        }
        self.nodes: dict[int, list[ENode]] = defaultdict(list)
        self.made_by: dict[ENode, list[str]] = defaultdict(list)
        self.below: dict[int, list[tuple[str, Placement, int]]] = defaultdict(list)  # class -> (axis, placement, class placed)
        self.placed: dict[tuple[str, Placement, int], int] = {}
        for constructor in book.constructors.values():
            table = tables[constructor.name]
            if constructor.name == "At":
                self._read_placed(table.rows)
            elif constructor.operands or constructor.name == "Leaf":
                for row in table.rows:
                    self.nodes[self.eclass(row.output)].append(self._enode(constructor, row.inputs))
                for row in tables[f"{constructor.name}-by"].rows if f"{constructor.name}-by" in tables else ():
                    name = egraph.value_to_string(row.inputs[0])
                    self.made_by[self._enode(constructor, row.inputs[1:])].append(name)
        self.shape = {self.eclass(r.inputs[0]): self._plain("Ints", r.output) for r in tables["shape"].rows}
        self.level = {self.eclass(r.inputs[0]): self._plain("i64", r.output) for r in tables["level"].rows}
        self.dtype = {self.eclass(r.inputs[0]): self._plain("String", r.output) for r in tables["dtype"].rows}
        self.kind = {self._plain("i64", r.inputs[0]): self.eclass(r.output) for r in tables["kind"].rows}

    def type(self, eclass: int) -> TensorType | None:
        """The local type of a class, if it is known yet."""
        if eclass in self.shape and eclass in self.dtype:
            return TensorType(self.shape[eclass], self.dtype[eclass])
        return None

    def eclass(self, value: object) -> int:
        return self._classes.setdefault(value, len(self._classes))

    def _placement(self, name: str, row) -> Placement:
        if name == "Shard":
            return Shard(self._egraph.value_to_i64(row.inputs[0]))
        return Replicate() if name == "Replicate" else Partial()

    def _read_placed(self, rows) -> None:
        for row in rows:
            axis = str(self._plain("String", row.inputs[0]))
            placement, inner, outer = self._placements[row.inputs[1]], self.eclass(row.inputs[2]), self.eclass(row.output)
            self.below[outer].append((axis, placement, inner))
            self.placed[axis, placement, inner] = outer

    def _enode(self, constructor, values) -> ENode:
        attributes, operands = [], []
        for sort, value in zip(constructor.sorts, values, strict=True):
            if sort == "Tensor":
                operands.append(self.eclass(value))
            else:
                attributes.append(self._plain(sort, value))
        return ENode(Head(constructor.name, tuple(attributes)), tuple(operands))

    def _plain(self, sort: str, value):
        key = (sort, value)
        if key not in self._values:
            self._values[key] = _CONVERT[sort](self._egraph, value)
        return self._values[key]


_CONVERT: dict[str, Callable] = {
    "i64": lambda g, v: g.value_to_i64(v),
    "f64": lambda g, v: g.value_to_f64(v),
    "String": lambda g, v: g.value_to_string(v),
    "Ints": lambda g, v: tuple(g.value_to_i64(x) for x in g.value_to_vec(v)),
}
