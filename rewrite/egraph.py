"""The e-graph: commands go in as text, tables come out as Python values.

`Engine(book)` holds an e-graph with the rules of a book. `Frozen(egraph, book)` reads every operator, placement and
analysis table once; e-classes are small integers there (egglog's ids share one counter across sorts, so only Tensor
values are numbered).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from egglog.bindings import EggSmolError, EGraph, FrozenRow, RunScheduleOutput
from egglog.bindings import Value as Raw

from ..mesh import Partial, Placement, Replicate, Shard
from ..program import TensorType
from ..rules import Constructor, RuleBook
from .space import RuleConflict
from .terms import Head, Value, write

T = TypeVar("T")


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
        return any(isinstance(output, RunScheduleOutput) and output.report.updated for output in outputs)

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
        self._classes: dict[Raw, int] = {}
        self._values: dict[tuple[Callable, Raw], Any] = {}
        tables = egraph.freeze().functions
        self._placements = {
            row.output: self._placement(name, row)
            for name in ("Shard", "Replicate", "Partial")
            for row in tables[name].rows
        }
        self.nodes: dict[int, list[ENode]] = defaultdict(list)
        self.made_by: dict[ENode, list[str]] = defaultdict(list)
        # class -> (axis, placement, class placed)
        self.below: dict[int, list[tuple[str, Placement, int]]] = defaultdict(list)
        self.placed: dict[tuple[str, Placement, int], int] = {}
        for constructor in book.constructors.values():
            table = tables[constructor.name]
            if constructor.name == "At":
                self._read_placed(table.rows)
            elif constructor.operands or constructor.name in ("Leaf", "Number"):
                for row in table.rows:
                    self.nodes[self.eclass(row.output)].append(self._enode(constructor, row.inputs))
                made = tables.get(f"{constructor.name}-by")
                for row in made.rows if made else ():
                    name = self._plain(_string, row.inputs[0])
                    self.made_by[self._enode(constructor, row.inputs[1:])].append(name)
        self.shape = {self.eclass(r.inputs[0]): self._plain(_ints, r.output) for r in tables["shape"].rows}
        self.level = {self.eclass(r.inputs[0]): self._plain(_int, r.output) for r in tables["level"].rows}
        self.dtype = {self.eclass(r.inputs[0]): self._plain(_string, r.output) for r in tables["dtype"].rows}
        self.kind = {self._plain(_int, r.inputs[0]): self.eclass(r.output) for r in tables["kind"].rows}

    def type(self, eclass: int) -> TensorType | None:
        """The local type of a class, if it is known yet."""
        if eclass in self.shape and eclass in self.dtype:
            return TensorType(self.shape[eclass], self.dtype[eclass])
        return None

    def eclass(self, value: Raw) -> int:
        return self._classes.setdefault(value, len(self._classes))

    def _placement(self, name: str, row: FrozenRow) -> Placement:
        if name == "Shard":
            return Shard(self._plain(_int, row.inputs[0]))
        return Replicate() if name == "Replicate" else Partial()

    def _read_placed(self, rows: Sequence[FrozenRow]) -> None:
        for row in rows:
            axis, placement = self._plain(_string, row.inputs[0]), self._placements[row.inputs[1]]
            inner, outer = self.eclass(row.inputs[2]), self.eclass(row.output)
            self.below[outer].append((axis, placement, inner))
            self.placed[axis, placement, inner] = outer

    def _enode(self, constructor: Constructor, values: Sequence[Raw]) -> ENode:
        attributes: list[Value] = []
        operands: list[int] = []
        for sort, value in zip(constructor.sorts, values, strict=True):
            if sort == "Tensor":
                operands.append(self.eclass(value))
            else:
                attributes.append(self._plain(_CONVERT[sort], value))
        return ENode(Head(constructor.name, tuple(attributes)), tuple(operands))

    def _plain(self, convert: Callable[[EGraph, Raw], T], value: Raw) -> T:
        key = (convert, value)
        if key not in self._values:
            self._values[key] = convert(self._egraph, value)
        return self._values[key]


def _ints(egraph: EGraph, value: Raw) -> tuple[int, ...]:
    return tuple(map(egraph.value_to_i64, egraph.value_to_vec(value)))


_int, _float, _string = EGraph.value_to_i64, EGraph.value_to_f64, EGraph.value_to_string
_CONVERT: dict[str, Callable[[EGraph, Raw], Value]] = {
    "i64": _int,
    "f64": _float,
    "String": _string,
    "Ints": _ints,
}
