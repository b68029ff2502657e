"""Saturate the operators of a model under the parallel rules, one mesh axis after the other.

In: the distinct operators of a model as terms over leaves (`Kind`), the types of its tensors, a mesh, a rule book.
Out: a `Space`: for every tensor type its layouts and the collectives between them, for every kind its strategies.

A parallel rule looks at one operator and the placements of its operands, so two operators with the same attributes,
operand types and operand order have the same strategies: each *kind* of operator is saturated once, whatever the
depth of the model. Operands are leaves (`Leaf position dtype shape`), shared by all kinds, which also makes the checks
after saturation stronger: a wrong rule is seen where two kinds meet.

Per axis: load alignment facts for the shapes that the axes before left -> analysis -> offer placements -> parallel
rules to a fixpoint -> analysis -> types of what the rules made in between -> checks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from egglog.bindings import EGraph, EggSmolError

from ..mesh import Mesh, Placement, Shard
from ..program import TensorType
from ..rules import RuleBook
from . import alignment
from .collectives import infer_local
from .egraph import Frozen
from .reading import Reader, check
from .space import Kind, RuleConflict, Space
from .terms import Head, leaf, term, write


def saturate(
    kinds: Sequence[Kind],
    types: Iterable[TensorType],
    mesh: Mesh,
    book: RuleBook,
    *,
    node_limit: int = 2_000_000,
    seconds: float = 600.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Space:
    """Place every kind on every axis of the mesh and read the result.

    Raises RuleConflict if the checks after saturation fail, naming the rules that made the offending e-nodes.
    """
    graph = _Graph(kinds, sorted(set(types), key=str), mesh, book)
    deadline = time.monotonic() + seconds
    stopped_by = "fixpoint"
    for index, axis in enumerate(mesh):
        progress(f"axis {axis.name}: {graph.size()} e-nodes")
        graph.start_axis(index)
        while graph.step():
            if graph.size() > node_limit:
                stopped_by = "nodes"
            if time.monotonic() > deadline:
                stopped_by = "time"
            if stopped_by != "fixpoint":
                break
        graph.finish_axis(index)
    return graph.read(stopped_by)


class _Graph:
    """The e-graph while axes are placed: commands go in as text, tables come out frozen."""

    def __init__(self, kinds: Sequence[Kind], types: list[TensorType], mesh: Mesh, book: RuleBook) -> None:
        self.kinds, self.types, self.mesh, self.book = kinds, types, mesh, book
        self.egraph = EGraph()
        self._include(book.program)
        self._run("(function kind (i64) Tensor :no-merge)")
        roots = [*((leaf(0, t), t) for t in types), *((k.text, k.result) for k in kinds)]
        lines = [leaf(i, t) for i, t in dict.fromkeys((i, t) for k in kinds for i, t in enumerate(k.operands))]
        for i, (text, type_) in enumerate(roots):
            lines.append(f"(set (kind {i}) {text}) (set (level {text}) 0) {_type_facts(text, type_)}")
        self._include("\n".join(lines))
        self._saturate("analysis")

    def size(self) -> int:
        """E-nodes of operators, leaves and placements."""
        tables = self.egraph.freeze().functions
        return sum(len(tables[name].rows) for name in self.book.constructors)

    def start_axis(self, index: int) -> None:
        axis = self.mesh.axes[index]
        facts = [f'(set (axis-size "{axis.name}") {axis.size})', f'(set (axis-level "{axis.name}") {index})']
        facts += _alignment_facts(Frozen(self.egraph, self.book), index)
        self._include("\n".join(facts))
        self._saturate("analysis")
        self._run("(run place 1)")

    def step(self) -> bool:
        """One round of the parallel rules; whether it changed anything."""
        return self._run("(run parallel 1)")

    def finish_axis(self, index: int) -> None:
        self._saturate("analysis")
        if index + 1 < len(self.mesh):
            self._include("\n".join(_types_between(Frozen(self.egraph, self.book), index + 1, self.mesh)))
            self._saturate("analysis")

    def read(self, stopped_by: str) -> Space:
        frozen = Frozen(self.egraph, self.book)
        reader = Reader(frozen, self.kinds, self.types, self.mesh)
        check(frozen, reader, self.mesh)
        return Space(
            {t: reader.layouts(t) for t in self.types},
            {t: reader.moves(t) for t in self.types},
            {k: reader.strategies(len(self.types) + i, k) for i, k in enumerate(self.kinds)},
            enodes=sum(map(len, frozen.nodes.values())) + len(frozen.placed),
            eclasses=len(set(frozen.nodes) | set(frozen.below)),
            stopped_by=stopped_by,
        )

    def _saturate(self, ruleset: str) -> None:
        self._run(f"(run-schedule (saturate (run {ruleset})))")

    def _run(self, text: str) -> bool:
        try:
            outputs = self.egraph.run_program(*self.egraph.parse_program(text))
        except EggSmolError as error:
            raise RuleConflict(_explain(str(error), self.book)) from None
        return any(getattr(output, "report", None) and output.report.updated for output in outputs)

    def _include(self, text: str) -> None:
        # One parsed string keeps a copy of itself in every span; a file does not.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rules.egg"
            path.write_text(text, encoding="utf-8")
            self._run(f'(include "{path.as_posix()}")')


def _explain(message: str, book: RuleBook) -> str:
    return f"the rules contradict each other: {' '.join(message.split())}"


def _alignment_facts(frozen: Frozen, level: int) -> list[str]:
    """Facts about the shapes of every operator whose value has this level."""
    facts: set[str] = set()
    for eclass, nodes in frozen.nodes.items():
        if frozen.level.get(eclass) != level or eclass not in frozen.shape:
            continue
        out = frozen.shape[eclass]
        for node in nodes:
            shapes = [frozen.shape.get(operand) for operand in node.operands]
            for shape in shapes:
                if shape is not None:
                    facts.update(_reads(out, shape))
            if shapes and shapes[0] is not None:
                facts.update(_shaped(node.head, shapes[0]))
    return sorted(facts)


def _reads(out: tuple[int, ...], operand: tuple[int, ...]) -> list[str]:
    return [
        f"(reads {write(out)} {write(operand)} {d} {'(Replicate)' if c is None else f'(Shard {c})'})"
        for d, c in alignment.broadcast(out, operand)
    ]


def _shaped(head: Head, operand: tuple[int, ...]) -> list[str]:
    if head.constructor == "Reshape":
        target = head.attributes[0]
        return [f"(aligned {write(operand)} {write(target)} {c} {d})" for c, d in alignment.reshaped(operand, target)]
    if head.constructor == "Reduce":
        _, axes, keep = head.attributes
        pairs = alignment.surviving(len(operand), axes, keep)
        return [f"(survives {write(operand)} {write(axes)} {keep} {c} {d})" for c, d in pairs]
    return []


def _types_between(frozen: Frozen, level: int, mesh: Mesh) -> list[str]:
    """Shapes of the values that rules made between an operator and its placed operands."""
    facts: list[str] = []
    texts: dict[int, str] = {}
    types: dict[int, TensorType] = {}

    def resolve(eclass: int) -> TensorType | None:
        if known := types.get(eclass) or frozen.type(eclass):
            return known
        node = frozen.nodes[eclass][0]
        operands = [resolve(operand) for operand in node.operands]
        if None in operands:
            return None
        types[eclass] = infer_local(node.head, tuple(t for t in operands if t), mesh)
        return types[eclass]

    def text(eclass: int) -> str:
        if eclass not in texts:
            if frozen.below[eclass]:
                axis, placement, inner = frozen.below[eclass][0]
                texts[eclass] = f'(At "{axis}" {placement_text(placement)} {text(inner)})'
            else:
                node = frozen.nodes[eclass][0]
                texts[eclass] = term(node.head, tuple(map(text, node.operands)))
        return texts[eclass]

    for eclass in list(frozen.nodes):
        if frozen.level.get(eclass) == level and eclass not in frozen.shape and (type_ := resolve(eclass)):
            facts.append(_type_facts(text(eclass), type_))
    return facts


def _type_facts(text: str, type_: TensorType) -> str:
    return f'(set (shape {text}) {write(type_.shape)}) (set (dtype {text}) "{type_.dtype}")'


def placement_text(placement: Placement) -> str:
    return f"(Shard {placement.dim})" if isinstance(placement, Shard) else f"({type(placement).__name__})"
