"""Read the saturated e-graph: layouts of tensors, collectives between them, strategies of kinds; and check it.

A class that stands for leaf i in some layout is where a strategy's reading ends. Between an operator's class and its
leaves a rule may have put several steps (a softmax over a sharded dimension): the strategy is the whole little program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

from ..mesh import Layout, Mesh, Partial, Placement, Replicate, Shard, format_layout
from ..program import TensorType
from .collectives import MOVES, infer_local
from .egraph import ENode, Frozen
from .space import Kind, Move, RuleConflict, Step, Strategy
from .terms import Head

MAX_EXPANSIONS = 64  # ways to compute one value inside a strategy; rules in use give one or two

Reads = tuple[tuple[int, int], ...]  # (operand, layout index), sorted
Choice = tuple[tuple[int, ENode], ...]  # (class, the e-node that computes it), sorted


class Reader:
    """Names the classes of a frozen e-graph: roots (leaf 0 of each type, then each kind) in each of their layouts."""

    def __init__(
        self, frozen: Frozen, kinds: Sequence[Kind], types: Sequence[TensorType], mesh: Mesh
    ) -> None:
        self.frozen, self.kinds, self.types, self.mesh = frozen, kinds, types, mesh
        shards = {p for _, p, _ in frozen.placed if isinstance(p, Shard)}
        self._placements: tuple[Placement, ...] = (Replicate(), *sorted(shards), Partial())
        self._layouts = {
            t: tuple(layout for layout, _ in self._placed(frozen.kind[i])) for i, t in enumerate(types)
        }
        self._rules = cache(self._find_rules)
        self.leaves: dict[int, tuple[int, TensorType, int]] = {}  # class -> (operand, type, layout index)
        for eclass, nodes in frozen.nodes.items():
            for node in nodes:
                if node.head.constructor == "Leaf":
                    self._name_leaf(eclass, node)

    def layouts(self, type_: TensorType) -> tuple[Layout, ...]:
        """All layouts on offer for a type, in canonical order."""
        return self._layouts[type_]

    def placed(self, root: int) -> list[tuple[Layout, int]]:
        """(layout, class) of root number `root` in every layout."""
        return self._placed(self.frozen.kind[root])

    def moves(self, type_: TensorType) -> tuple[Move, ...]:
        """The collectives between the layouts of a type."""
        root = self.types.index(type_)
        found = []
        for target, (_, eclass) in enumerate(self.placed(root)):
            for node in self.frozen.nodes[eclass]:
                if node.head.constructor in MOVES:
                    source = self.leaves[node.operands[0]][2]
                    found.append(Move(source, target, node.head, self._rules(eclass, node)))
        return tuple(sorted(found, key=lambda m: (m.source, m.target, str(m.head))))

    def strategies(self, root: int, kind: Kind) -> tuple[Strategy, ...]:
        """Every way the e-graph knows to leave the kind's result in some layout."""
        found: set[Strategy] = set()
        for out, (_, eclass) in enumerate(self.placed(root)):
            for reads, choice in self._expand(eclass):
                by_operand = dict(reads)
                read = tuple(by_operand.get(i, -1) for i in range(len(kind.operands)))
                found.add(Strategy(out, read, *self._program(eclass, dict(choice))))
        return tuple(sorted(found, key=lambda s: (s.out, s.reads, len(s.steps), str(s.steps))))

    def _placed(self, eclass: int) -> list[tuple[Layout, int]]:
        placed: list[tuple[Layout, int]] = [((), eclass)]
        for axis in self.mesh:
            placed = [
                ((*layout, placement), outer)
                for layout, inner in placed
                for placement in self._placements
                if (outer := self.frozen.placed.get((axis.name, placement, inner))) is not None
            ]
        return placed

    def _name_leaf(self, eclass: int, node: ENode) -> None:
        position, dtype, shape = node.head.attributes
        assert isinstance(position, int) and isinstance(dtype, str) and isinstance(shape, tuple)
        type_ = TensorType(shape, dtype)
        index = {layout: i for i, layout in enumerate(self._layouts[type_])}
        for layout, placed in self._placed(eclass):
            if layout not in index:  # only what an axis divides is on offer; a rule asked for more
                raise RuleConflict(f"{type_} is placed as {format_layout(layout)}, which splits it unevenly")
            self.leaves[placed] = (position, type_, index[layout])

    def _expand(self, root: int) -> list[tuple[Reads, Choice]]:
        """All consistent ways to compute a class from placed leaves: each class on the way computed by one e-node."""
        frozen = self.frozen
        memo: dict[int, list[tuple[Reads, Choice]]] = {}

        def expand(eclass: int, above: frozenset[int]) -> list[tuple[Reads, Choice]]:
            if eclass in self.leaves:
                operand, _, layout = self.leaves[eclass]
                return [(((operand, layout),), ())]
            if eclass in memo:
                return memo[eclass]
            if eclass in above:
                return []
            ways: dict[tuple[Reads, Choice], None] = {}
            for node in frozen.nodes[eclass]:
                partial: list[tuple[Reads, Choice]] = [((), ((eclass, node),))]
                for operand in node.operands:
                    below = expand(operand, above | {eclass})
                    partial = [m for a in partial for b in below if (m := _merged(a, b))][:MAX_EXPANSIONS]
                ways.update(dict.fromkeys(partial))
            memo[eclass] = list(ways)[:MAX_EXPANSIONS]
            return memo[eclass]

        return expand(root, frozenset())

    def _program(self, root: int, choice: dict[int, ENode]) -> tuple[tuple[Step, ...], tuple[str, ...]]:
        """The chosen e-nodes as steps in order, and the rules that made them."""
        steps: list[Step] = []
        index: dict[int, int] = {}
        rules: set[str] = set()

        def visit(eclass: int) -> int:
            if eclass in self.leaves:
                return ~self.leaves[eclass][0]
            if eclass not in index:
                node = choice[eclass]
                operands = tuple(map(visit, node.operands))
                rules.update(self._rules(eclass, node))
                steps.append(Step(node.head, operands))
                index[eclass] = len(steps) - 1
            return index[eclass]

        visit(root)
        return tuple(steps), tuple(sorted(rules))

    def _find_rules(self, eclass: int, node: ENode) -> tuple[str, ...]:
        """Names of the rules that made an e-node, at its own level and at those below."""
        rules = set(self.frozen.made_by.get(node, ()))
        for axis, _, inner in self.frozen.below.get(eclass, ()):
            for below in self.frozen.nodes.get(inner, ()):
                if below.head.constructor == node.head.constructor and self._placed_from(axis, node, below):
                    rules.update(self._rules(inner, below))
        return tuple(sorted(rules))

    def _placed_from(self, axis: str, node: ENode, below: ENode) -> bool:
        """Whether the operands of `node` are those of `below`, placed on the axis."""
        return len(node.operands) == len(below.operands) and all(
            any(a == axis and inner == under for a, _, inner in self.frozen.below.get(operand, ()))
            for operand, under in zip(node.operands, below.operands, strict=True)
        )


def _merged(a: tuple[Reads, Choice], b: tuple[Reads, Choice]) -> tuple[Reads, Choice] | None:
    """Both ways together, or None if they read one operand in two layouts or compute one class in two ways."""
    reads, choice = dict(a[0]), dict(a[1])
    for operand, layout in b[0]:
        if reads.setdefault(operand, layout) != layout:
            return None
    for eclass, node in b[1]:
        if choice.setdefault(eclass, node) is not node and choice[eclass] != node:
            return None
    return tuple(sorted(reads.items())), tuple(sorted(choice.items(), key=lambda item: item[0]))


def check(frozen: Frozen, reader: Reader, mesh: Mesh) -> None:
    """The checks after saturation; raises RuleConflict with the rules that made the offending e-nodes."""
    for problem, eclass in itertools.chain(_collisions(frozen, reader), _type_errors(frozen, mesh)):
        rules = sorted({name for node in frozen.nodes[eclass] for name in frozen.made_by.get(node, ())})
        raise RuleConflict(problem, tuple(rules))


def _collisions(frozen: Frozen, reader: Reader) -> Iterator[tuple[str, int]]:
    """Two placements, or two tensors, that became one class (tensors of size 0 and 1 are alike in many placements)."""
    names: dict[int, tuple[str, TensorType]] = {}
    for root, what in enumerate(
        [*map(str, reader.types), *(f"{k.head.constructor} {k.result}" for k in reader.kinds)]
    ):
        type_ = [*reader.types, *(k.result for k in reader.kinds)][root]
        if type_.size <= 1:
            continue
        for layout, eclass in reader.placed(root):
            name = f"{what} as {format_layout(layout)}"
            if eclass in names and names[eclass][0] != name:
                yield f"{names[eclass][0]} and {name} became equal", eclass
            names[eclass] = (name, type_)


def _type_errors(frozen: Frozen, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """E-nodes whose local type is not that of their class: a size that a rule forgot to make local."""
    known: dict[tuple[Head, tuple[TensorType, ...]], TensorType | str] = {}
    for eclass, nodes in frozen.nodes.items():
        expected = frozen.type(eclass)
        if expected is None:
            continue
        for node in nodes:
            operands = tuple(t for o in node.operands if (t := frozen.type(o)))
            if node.head.constructor == "Leaf" or len(operands) != len(node.operands):
                continue
            key = (node.head, operands)
            if key not in known:
                known[key] = _inferred(node.head, operands, mesh)
            if known[key] != expected:
                yield (
                    f"{node.head.constructor} {node.head.attributes} of {', '.join(map(str, operands))} "
                    f"gives {known[key]}, not {expected}",
                    eclass,
                )


def _inferred(head: Head, operands: tuple[TensorType, ...], mesh: Mesh) -> TensorType | str:
    try:
        return infer_local(head, operands, mesh)
    except ValueError as error:
        return f"nothing ({error})"
