"""The e-graph: commands go in as text, tables come out as Python values.

`Engine(book)` holds an e-graph with the rules of a book. `Frozen(egraph, book)` reads every operator, placement and
analysis table once; e-classes are small integers there (egglog's ids share one counter across sorts, so only Tensor
values are numbered).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from egglog.bindings import EggSmolError, EGraph

from ..mesh import Partial, Placement, Replicate, Shard
from ..program import TensorType
from ..rules import RuleBook
from .space import RuleConflict
from .terms import Head, Value, write


class Engine:
    """An e-graph with the rules of a book; `(kind i)` names the class of the caller's i-th root."""

    def __init__(self, book: RuleBook) -> None:
        self.book = book
        self.egraph = EGraph()
        self.include(book.program)
        self.run("(function kind (i64) Tensor :no-merge)")

    def size(self) -> int:
        """E-nodes of operators, leaves and placements."""
        tables = self.egraph.freeze().functions
        return sum(len(tables[name].rows) for name in self.book.constructors)

    def saturate(self, ruleset: str) -> None:
        self.run(f"(run-schedule (saturate (run {ruleset})))")

    def run(self, text: str) -> bool:
        """Whether the command changed anything; RuleConflict if two facts contradict each other."""
        try:
            outputs = self.egraph.run_program(*self.egraph.parse_program(text))
        except EggSmolError as error:
            raise RuleConflict(f"the rules contradict each other: {' '.join(str(error).split())}") from None
        return any(getattr(output, "report", None) and output.report.updated for output in outputs)

    def include(self, text: str) -> None:
        """Run a long text: one parsed string keeps a copy of itself in every span, a file does not."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rules.egg"
            path.write_text(text, encoding="utf-8")
            self.run(f'(include "{path.as_posix()}")')


def type_facts(text: str, type_: TensorType) -> str:
    """Commands that state the local type of a term."""
    return f'(set (shape {text}) {write(type_.shape)}) (set (dtype {text}) "{type_.dtype}")'


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
            row.output: self._placement(name, row)
            for name in ("Shard", "Replicate", "Partial")
            for row in tables[name].rows
        }
        self.nodes: dict[int, list[ENode]] = defaultdict(list)
        self.made_by: dict[ENode, list[str]] = defaultdict(list)
        self.below: dict[int, list[tuple[str, Placement, int]]] = defaultdict(
            list
        )  # class -> (axis, placement, class placed)
        self.placed: dict[tuple[str, Placement, int], int] = {}
        for constructor in book.constructors.values():
            table = tables[constructor.name]
            if constructor.name == "At":
                self._read_placed(table.rows)
            elif constructor.operands or constructor.name == "Leaf":
                for row in table.rows:
                    self.nodes[self.eclass(row.output)].append(self._enode(constructor, row.inputs))
                for row in (
                    tables[f"{constructor.name}-by"].rows if f"{constructor.name}-by" in tables else ()
                ):
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
            placement, inner, outer = (
                self._placements[row.inputs[1]],
                self.eclass(row.inputs[2]),
                self.eclass(row.output),
            )
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
