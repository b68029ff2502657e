"""From a graph and the saturated space to the extraction problem.

    tensor     one per input, weight, constant and computed value; its labels are the layouts of its type
    conversion cheapest chain of collectives between two layouts (Dijkstra over the e-graph's moves)     Conversions
    operator   a leaf (any layout without partial sums, free but for its bytes), a computed tensor (the strategies of
               all applications that compute it), or a sink (a graph output, read replicated unless pinned)
Where algebra offers several ways to compute things, a tensor may also stay uncomputed, if nobody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from ..mesh import Layout, Mesh, Partial, Replicate, Shard, format_layout
from ..program import TensorType, UserError
from ..rewrite.collectives import infer_local
from ..rewrite.graph import Graph
from ..rewrite.kinds import Application
from ..rewrite.space import Kind, Move, Space, Strategy
from .cost import step_seconds
from .hardware import Hardware
from .problem import ABSENT, Operator, Problem, Tensor


class Conversions:
    """Prices and chains of collectives between the layouts of one tensor type."""

    def __init__(self, type_: TensorType, space: Space, mesh: Mesh, hardware: Hardware) -> None:
        self.layouts = space.layouts[type_]
        self._moves: dict[tuple[int, int], Move] = {}
        self._prices: dict[tuple[int, int], float] = {}
        for move in space.moves[type_]:
            key = (move.source, move.target)
            price = self._price(type_, move, mesh, hardware)
            if price < self._prices.get(key, np.inf):
                self._prices[key], self._moves[key] = price, move
        self._connect()

    def _connect(self) -> None:
        rows, columns = zip(*self._prices, strict=True) if self._prices else ((), ())
        size = len(self.layouts)
        edges = csr_array((list(self._prices.values()), (rows, columns)), shape=(size, size))
        self.seconds, self._before = dijkstra(edges, return_predecessors=True)

    def repriced(self, rng: np.random.Generator) -> Conversions:
        """The same moves at random prices, so that other legal chains are the cheapest."""
        other = copy(self)
        other._prices = {key: float(rng.lognormal(sigma=2)) for key in self._prices}
        other._connect()
        return other

    def _price(self, type_: TensorType, move: Move, mesh: Mesh, hardware: Hardware) -> float:
        source, target = (
            TensorType(mesh.local_shape(type_.shape, self.layouts[i]), type_.dtype)
            for i in (move.source, move.target)
        )
        return step_seconds(move.head, (source,), target, mesh, hardware)

    def chain(self, source: int, target: int) -> list[Move]:
        """The moves of the cheapest chain, in order."""
        moves = []
        while target != source:
            before = int(self._before[source, target])
            if before < 0:
                raise ValueError(
                    f"no chain of collectives from {self.layouts[source]} to {self.layouts[target]}"
                )
            moves.append(self._moves[before, target])
            target = before
        return moves[::-1]


@dataclass(frozen=True)
class Offer:
    """A kind's strategies with their prices: the cheapest for each (result layout, operand layouts)."""

    strategies: tuple[Strategy, ...]
    seconds: NDArray[np.float64]

    @cached_property
    def out(self) -> NDArray[np.int32]:
        return np.array([s.out for s in self.strategies], dtype=np.int32)

    @cached_property
    def reads(self) -> NDArray[np.int32]:
        return np.array([s.reads for s in self.strategies], dtype=np.int32)


@dataclass(frozen=True)
class Part:
    """A computed tensor with all the applications that compute it."""

    tensor: str
    ways: tuple[Application, ...]


@dataclass(frozen=True)
class Model:
    """The problem, with what is needed to turn a choice back into a program."""

    graph: Graph
    mesh: Mesh
    space: Space
    problem: Problem
    parts: tuple[Part, ...]
    types: Mapping[str, TensorType]
    tensor_names: tuple[str, ...]
    conversions: Mapping[TensorType, Conversions]
    offers: Mapping[Kind, Offer]
    label_axes: tuple[NDArray[np.int32], ...]

    @property
    def leaf_count(self) -> int:
        """The first operators of the problem are the leaves, in the graph's order."""
        return len(self.tensor_names) - len(self.parts)

    def taken(self, part: int, choice: NDArray[np.int64]) -> tuple[Application, Strategy] | None:
        """How a choice computes a part's tensor; None if it does not."""
        number = int(choice[self.leaf_count + part])
        for application in self.parts[part].ways:
            strategies = self.offers[application.kind].strategies
            if number < len(strategies):
                return application, strategies[number]
            number -= len(strategies)
        return None


def build(
    graph: Graph,
    applications: Sequence[Application],
    types: Mapping[str, TensorType],
    space: Space,
    mesh: Mesh,
    hardware: Hardware,
    *,
    pins: Mapping[str, Layout] | None = None,
    memory_limit: float = np.inf,
) -> Model:
    """The extraction problem of `graph`; `pins` fixes the layouts of inputs, weights and outputs by name."""
    pins = _checked_pins(pins or {}, graph, types, space, mesh)
    parts = _parts(applications)
    optional = len(parts) < len(applications)
    names = (*graph.leaves, *(part.tensor for part in parts))
    index = {name: i for i, name in enumerate(names)}
    used = {types[name] for name in names}
    conversions = {type_: Conversions(type_, space, mesh, hardware) for type_ in sorted(used, key=str)}
    offers = {
        kind: _offer(kind, space, mesh, hardware) for kind in dict.fromkeys(a.kind for a in applications)
    }
    operators = [
        _leaf(i, name, types[name], conversions, mesh, pins.get(name)) for i, name in enumerate(graph.leaves)
    ]
    operators += [_computed(part, index, offers, optional) for part in parts]
    operators += [_sink(name, index, types[name], space, mesh, pins.get(name)) for name in graph.outputs]
    axes = {type_: _label_axes(space.layouts[type_], mesh) for type_ in used}
    problem = Problem(
        tuple(Tensor(name, conversions[types[name]].seconds) for name in names),
        tuple(operators),
        memory_limit,
    )
    label_axes = tuple(axes[types[name]] for name in names)
    return Model(graph, mesh, space, problem, parts, types, names, conversions, offers, label_axes)


def _offer(kind: Kind, space: Space, mesh: Mesh, hardware: Hardware) -> Offer:
    best: dict[tuple[int, tuple[int, ...]], tuple[float, Strategy]] = {}
    for strategy in space.strategies[kind]:
        seconds = _strategy_seconds(kind, strategy, space, mesh, hardware)
        key = (strategy.out, strategy.reads)
        if key not in best or seconds < best[key][0]:
            best[key] = (seconds, strategy)
    if not best:
        raise UserError(
            f"no rule says how {kind.head.constructor} {kind.head.attributes} runs on the mesh {mesh}"
        )
    return Offer(tuple(s for _, s in best.values()), np.array([c for c, _ in best.values()]))


def _strategy_seconds(kind: Kind, strategy: Strategy, space: Space, mesh: Mesh, hardware: Hardware) -> float:
    operands = [
        TensorType(mesh.local_shape(t.shape, space.layouts[t][max(label, 0)]), t.dtype)
        for t, label in zip(kind.operands, strategy.reads, strict=True)
    ]
    results: list[TensorType] = []
    seconds = 0.0
    for step in strategy.steps:
        arguments = tuple(results[i] if i >= 0 else operands[~i] for i in step.operands)
        results.append(infer_local(step.head, arguments, mesh))
        seconds += step_seconds(step.head, arguments, results[-1], mesh, hardware)
    return seconds


def _leaf(
    tensor: int,
    name: str,
    type_: TensorType,
    conversions: Mapping[TensorType, Conversions],
    mesh: Mesh,
    pin: Layout | None,
) -> Operator:
    layouts = conversions[type_].layouts
    offered = [i for i, layout in enumerate(layouts) if (layout == pin if pin else Partial() not in layout)]
    local = [float(TensorType(mesh.local_shape(type_.shape, layouts[i]), type_.dtype).bytes) for i in offered]
    return Operator(
        name, tensor, (), np.array(offered, np.int32), np.zeros((len(offered), 0), np.int32), np.zeros(len(offered)),
        np.array(local),
    )  # fmt: skip


def _parts(applications: Sequence[Application]) -> tuple[Part, ...]:
    ways: dict[str, list[Application]] = {}
    for application in applications:
        ways.setdefault(application.tensor, []).append(application)
    return tuple(Part(tensor, tuple(several)) for tensor, several in ways.items())


def _computed(part: Part, index: Mapping[str, int], offers: Mapping[Kind, Offer], optional: bool) -> Operator:
    """One operator for all ways to compute a tensor; a strategy of one way reads nothing on the arcs of the others."""
    several = [offers[way.kind] for way in part.ways]
    width = sum(offer.reads.shape[1] for offer in several)
    rows, column = [], 0
    for offer in several:
        block = np.full((len(offer.out), width), ABSENT, np.int32)
        block[:, column : column + offer.reads.shape[1]] = offer.reads
        rows.append(block)
        column += offer.reads.shape[1]
    out, cost = [offer.out for offer in several], [offer.seconds for offer in several]
    if optional:
        rows.append(np.full((1, width), ABSENT, np.int32))
        out.append(np.array([ABSENT], np.int32))
        cost.append(np.zeros(1))
    arcs = tuple(index[name] for way in part.ways for name in way.operands)
    outs = np.concatenate(out)
    return Operator(
        part.tensor,
        index[part.tensor],
        arcs,
        outs,
        np.concatenate(rows),
        np.concatenate(cost),
        np.zeros(len(outs)),
    )


def _sink(
    name: str, index: Mapping[str, int], type_: TensorType, space: Space, mesh: Mesh, pin: Layout | None
) -> Operator:
    label = space.layouts[type_].index(pin or mesh.replicated())
    return Operator(
        f"output {name}", None, (index[name],), np.array([ABSENT], np.int32), np.array([[label]], np.int32),
        np.zeros(1), np.zeros(1),
    )  # fmt: skip


def _checked_pins(
    pins: Mapping[str, Layout], graph: Graph, types: Mapping[str, TensorType], space: Space, mesh: Mesh
) -> Mapping[str, Layout]:
    known = {*graph.inputs, *graph.parameters, *graph.outputs}
    for name, layout in pins.items():
        if name not in known:
            raise UserError(f"pinned tensor {name!r} is no input, weight or output of {graph.name}")
        if Partial() in layout or layout not in space.layouts[types[name]]:
            raise UserError(
                f"pinned tensor {name!r} {types[name]} cannot be laid out as {format_layout(layout)} on the mesh {mesh}"
            )
    return pins


def _label_axes(layouts: Sequence[Layout], mesh: Mesh) -> NDArray[np.int32]:
    """[layouts, axes]: placement codes, equal where the placements are equal."""
    codes = [[_code(placement) for placement in layout] for layout in layouts]
    return np.array(codes, dtype=np.int32).reshape(len(layouts), len(mesh))


def _code(placement) -> int:
    if isinstance(placement, Shard):
        return placement.dim
    return -1 if isinstance(placement, Replicate) else -2
