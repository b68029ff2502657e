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

import time
from collections.abc import Callable, Iterable, Sequence

from ..mesh import ONE_DEVICE, Mesh, Replicate, Shard
from ..program import TensorType
from ..rules import RuleBook, shipped_files, with_adjoints
from . import alignment
from .collectives import infer_local
from .egraph import Engine, Frozen, type_facts
from .reading import Reader, check
from .space import Kind, RuleConflict, Space
from .terms import Head, adjoint_of, adjoints_in, decode, leaf, term, write, write_placement

UNREAD = 99  # the leaf's position of an operand that an adjoint does not read


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

    Raises RuleConflict if the checks after saturation fail, naming the guilty rules.
    """
    types = list(types)
    book = with_adjoints(book, adjoints_in(kind.head for kind in kinds))
    try:
        return _saturate(kinds, types, mesh, book, node_limit, seconds, progress)
    except RuleConflict as conflict:
        progress("the rules contradict each other: looking for the guilty one")
        raise _blame(conflict, kinds, mesh, book) from None


def _saturate(
    kinds: Sequence[Kind],
    types: Iterable[TensorType],
    mesh: Mesh,
    book: RuleBook,
    node_limit: int = 200_000,
    seconds: float = 60.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Space:
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


def _blame(conflict: RuleConflict, kinds: Sequence[Kind], mesh: Mesh, book: RuleBook) -> RuleConflict:
    """The conflict, naming the rules without any one of which it does not happen."""

    def problem(some: Sequence[Kind], rules: RuleBook) -> str | None:
        try:
            _saturate(some, {t for k in some for t in (*k.operands, k.result)}, mesh, rules)
        except RuleConflict as found:
            return found.problem
        return None

    some: Sequence[Kind] = next(([kind] for kind in kinds if problem([kind], book)), kinds)
    text = problem(some, book) or conflict.problem
    parallel = book.named("parallel")
    guilty = [name for name in parallel if problem(some, book.without(name)) is None]
    # Without a shipped rule the value that a wrong rule misplaces may not exist at all: blame the user's rule first.
    own = [name for name in guilty if book.rules[name].place in _own_places(book)]
    names = own or guilty or list(conflict.rules)
    return RuleConflict(text, tuple(f"{name} ({book.rules[name].place})" for name in names))


def _own_places(book: RuleBook) -> set[str]:
    shipped = {str(path) for path in shipped_files()}
    return {rule.place for rule in book.rules.values() if rule.place.rpartition(":")[0] not in shipped | {""}}


class _Graph(Engine):
    """The e-graph while axes are placed."""

    def __init__(self, kinds: Sequence[Kind], types: list[TensorType], mesh: Mesh, book: RuleBook) -> None:
        super().__init__(book)
        self.kinds, self.types, self.mesh = kinds, types, mesh
        roots = [*((leaf(0, t), t) for t in types), *((k.text, k.result) for k in kinds)]
        lines = [
            leaf(i, t) for i, t in dict.fromkeys((i, t) for k in kinds for i, t in enumerate(k.operands))
        ]
        for i, (text, type_) in enumerate(roots):
            lines.append(f"(set (kind {i}) {text}) (set (level {text}) 0) {type_facts(text, type_)}")
        lines += [line for kind in kinds for line in _differentiated(kind)]
        self.include("\n".join(lines))
        self.saturate("analysis")

    def start_axis(self, index: int) -> None:
        axis = self.mesh.axes[index]
        facts = [f'(set (axis-size "{axis.name}") {axis.size})', f'(set (axis-level "{axis.name}") {index})']
        facts += _alignment_facts(Frozen(self.egraph, self.book), index)
        self.include("\n".join(facts))
        self.saturate("analysis")
        self.run("(run place 1)")

    def step(self) -> bool:
        """One round of the parallel rules; whether it changed anything."""
        return self.run("(run parallel 1)")

    def finish_axis(self, index: int) -> None:
        self.saturate("analysis")
        if index + 1 < len(self.mesh):
            self.include("\n".join(_types_between(Frozen(self.egraph, self.book), index + 1, self.mesh)))
            self.saturate("analysis")

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


def _differentiated(kind: Kind) -> list[str]:
    """An adjoint's rules look at the operator that it belongs to, over the same operands."""
    found = adjoint_of(kind.head)
    if not found:
        return []
    _, operand, shape, of = found
    operands, texts = list(kind.operands[:-1]), [leaf(i, t) for i, t in enumerate(kind.operands[:-1])]
    if shape is not None:  # the operand that is not read is a leaf of its own
        operands.insert(operand, kind.result)
        texts.insert(operand, leaf(UNREAD, kind.result))
    text = term(of, tuple(texts))
    return [f"{text} (set (level {text}) 0) {type_facts(text, infer_local(of, tuple(operands), ONE_DEVICE))}"]


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
        f"(reads {write(out)} {write(operand)} {d} {write_placement(Replicate() if c is None else Shard(c))})"
        for d, c in alignment.broadcast_reads(out, operand)
    ]


def _shaped(head: Head, operand: tuple[int, ...]) -> list[str]:
    if head.constructor == "Reshape":
        target = decode(head)[1]["shape"]
        return [
            f"(aligned {write(operand)} {write(target)} {c} {d})"
            for c, d in alignment.reshaped(operand, target)
        ]
    if head.constructor == "Reduce":
        axes, keep = (decode(head)[1][key] for key in ("axes", "keepdims"))
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
                texts[eclass] = f'(At "{axis}" {write_placement(placement)} {text(inner)})'
            else:
                node = frozen.nodes[eclass][0]
                texts[eclass] = term(node.head, tuple(map(text, node.operands)))
        return texts[eclass]

    for eclass in list(frozen.nodes):
        if frozen.level.get(eclass) == level and eclass not in frozen.shape and (type_ := resolve(eclass)):
            facts.append(type_facts(text(eclass), type_))
    return facts
