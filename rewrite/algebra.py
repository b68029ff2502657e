"""Algebra before any placement: the whole graph in one e-graph, saturated under the `algebra` rules.

In: the operator applications of a graph. Out: applications again, several of them for a tensor that can be computed in
several ways; the extractor chooses among them together with the placements, since all ways to compute a tensor have
the same placements on offer.

Each e-class is one tensor. It keeps the first name that the graph gives it; classes that rules made are named
`algebra/N`. The e-graph may hold cycles (x = x + 0): an e-node is kept if its operands come before it in one order of
the classes, so what is kept is acyclic and contains the graph as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ..mesh import ONE_DEVICE
from ..program import TensorType
from ..rules import RuleBook, with_adjoints
from .collectives import infer_local
from .egraph import Engine, ENode, Frozen, type_facts
from .kinds import Application
from .space import Kind
from .terms import Head, adjoints_in, term, write


def rewrite(
    parts: Sequence[Application],
    types: Mapping[str, TensorType],
    leaves: Sequence[str],
    outputs: Sequence[str],
    book: RuleBook,
    *,
    node_limit: int = 100_000,
    seconds: float = 60.0,
) -> tuple[list[Application], dict[str, TensorType], str]:
    """All ways that the algebra rules know, in topological order; types of all tensors; what stopped it."""
    if not book.named("algebra"):
        return list(parts), dict(types), "fixpoint"
    names = [*leaves, *(part.tensor for part in parts)]
    index = {name: i for i, name in enumerate(names)}
    book = with_adjoints(book, adjoints_in(part.kind.head for part in parts))
    engine = Engine(book)
    lines = [
        f'(set (kind {i}) (Leaf {i} "{types[n].dtype}" {write(types[n].shape)}))'
        for i, n in enumerate(leaves)
    ]
    for part in parts:
        text = term(part.kind.head, tuple(f"(kind {index[name]})" for name in part.operands))
        i = index[part.tensor]
        lines.append(
            f"(set (kind {i}) {text}) (set (level (kind {i})) 0) {type_facts(f'(kind {i})', types[part.tensor])}"
        )
    engine.include("\n".join(lines))
    engine.saturate("analysis")
    stopped_by = _run(engine, node_limit, time.monotonic() + seconds)
    found, known, same = _read(Frozen(engine.egraph, book), names, types, parts)
    found += _copies({o: same[o] for o in outputs if same[o] != o}, known)
    return _live(found, outputs), known, stopped_by


def _run(engine: Engine, node_limit: int, deadline: float) -> str:
    while engine.run("(run algebra 1)"):
        engine.saturate("analysis")
        facts = _new_types(Frozen(engine.egraph, engine.book))
        if facts:
            engine.include("\n".join(facts))
            engine.saturate("analysis")
        if engine.size() > node_limit:
            return "nodes"
        if time.monotonic() > deadline:
            return "time"
    return "fixpoint"


def _new_types(frozen: Frozen) -> list[str]:
    """Facts about the classes that rules made: their types follow from their operands'."""
    known = {eclass: type_ for eclass in frozen.nodes if (type_ := frozen.type(eclass))}
    texts = {eclass: f"(kind {i})" for i, eclass in sorted(frozen.kind.items(), reverse=True)}
    facts, progress = [], True
    while progress:
        progress = False
        for eclass, nodes in frozen.nodes.items():
            if eclass in known and eclass in texts:
                continue
            node = next((n for n in nodes if all(o in known and o in texts for o in n.operands)), None)
            if node is None:
                continue
            texts[eclass] = term(node.head, tuple(texts[o] for o in node.operands))
            if eclass not in known:
                known[eclass] = infer_local(node.head, tuple(known[o] for o in node.operands), ONE_DEVICE)
                facts.append(type_facts(texts[eclass], known[eclass]))
            progress = True
    return facts


def _read(
    frozen: Frozen, names: Sequence[str], types: Mapping[str, TensorType], parts: Sequence[Application]
) -> tuple[list[Application], dict[str, TensorType], dict[str, str]]:
    """Applications, types, and under which name each tensor of the graph is now computed."""
    of_class: dict[int, str] = {}
    for i, name in enumerate(names):
        of_class.setdefault(frozen.kind[i], name)
    order = _order(frozen, [frozen.kind[i] for i in range(len(names))])
    origin = {part.tensor: part.node for part in parts}
    found: list[Application] = []
    known = dict(types)
    for eclass in sorted(order, key=order.__getitem__):
        if any(node.head.constructor == "Leaf" for node in frozen.nodes[eclass]):
            continue
        name = of_class.setdefault(eclass, f"algebra/{len(of_class)}")
        type_ = frozen.type(eclass)
        assert type_ is not None
        known[name] = type_
        for node in _kept(frozen.nodes[eclass], order, order[eclass]):
            operands = tuple(of_class[o] for o in node.operands)
            kind = Kind(node.head, tuple(known[o] for o in operands), type_)
            rules = tuple(sorted(frozen.made_by.get(node, ())))
            found.append(Application(name, kind, operands, origin.get(name, name), rules))
    return found, known, {name: of_class[frozen.kind[i]] for i, name in enumerate(names)}


def _kept(nodes: Sequence[ENode], order: Mapping[int, int], place: int) -> list[ENode]:
    return [n for n in nodes if all(order.get(o, place) < place for o in n.operands)]


def _order(frozen: Frozen, original: Sequence[int]) -> dict[int, int]:
    """A place for every class: the graph's own in its order, a class that rules made as soon as it can be computed."""
    order: dict[int, int] = {}
    given = set(original)
    made = [eclass for eclass in frozen.nodes if eclass not in given]

    def place_ready() -> None:
        progress = True
        while progress:
            ready = [
                c
                for c in made
                if c not in order and any(all(o in order for o in n.operands) for n in frozen.nodes[c])
            ]
            order.update((c, len(order) + i) for i, c in enumerate(ready))
            progress = bool(ready)

    for eclass in original:
        if eclass not in order:
            order[eclass] = len(order)
            place_ready()
    return order


def _live(applications: Sequence[Application], outputs: Sequence[str]) -> list[Application]:
    """Those that an output may depend on."""
    wanted, kept = set(outputs), []
    for application in reversed(applications):
        if application.tensor in wanted:
            kept.append(application)
            wanted.update(application.operands)
    return kept[::-1]


def _copies(same: Mapping[str, str], types: Mapping[str, TensorType]) -> list[Application]:
    """Outputs that turned out equal to an earlier tensor keep their names."""
    return [
        Application(name, Kind(Head("Reshape", (types[of].shape,)), (types[of],), types[name]), (of,), name)
        for name, of in same.items()
    ]
