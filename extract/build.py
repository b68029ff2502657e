"""From a graph and the saturated space to the extraction problem.

    tensor     one per input, weight, constant and computed value; its labels are the layouts of its type
    conversion cheapest chain of collectives between two layouts (Dijkstra over the e-graph's moves)     Conversions
    operator   a leaf (any layout without partial sums, free but for its bytes), a computed tensor (the strategies of
               all applications that compute it), or a sink (a graph output, read replicated unless pinned)
    state      a leaf and the output that is its next value are one operator: the output is read in the leaf's layout
    phase      a computed tensor's is its node's, a sink's and state's the last; where algebra made the node, the first
               phase that reads it
    keeper     a computed tensor that later phases read is kept for them in one layout, any: an operator without cost
               that reads it, as a consumer of its own phase, and leaves what they read                         _keeper
    memory     leaves' bytes and those of what is kept
The bytes that wait for the backward pass and those that wait for the optimizer are added up.
Where algebra offers several ways to compute things, a tensor may also stay uncomputed, if nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
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
    """The problem, with what is needed to turn a choice back into a program.

    `maker` and `keeper` are operators of the problem by tensor, for those that are computed and for those kept.
    """

    graph: Graph
    mesh: Mesh
    space: Space
    problem: Problem
    parts: tuple[Part, ...]
    maker: Mapping[str, int]
    keeper: Mapping[str, int]
    types: Mapping[str, TensorType]
    conversions: Mapping[TensorType, Conversions]
    offers: Mapping[Kind, Offer]
    label_axes: tuple[NDArray[np.int32], ...]
    state: tuple[tuple[str, str], ...] = ()

    @property
    def last_phase(self) -> int:
        """The phase in which outputs are read."""
        return max(o.phase for o in self.problem.operators)

    def local_bytes(self, tensor: str) -> NDArray[np.float64]:
        """Bytes of one device's part of a tensor, by label."""
        return _local_bytes(self.types[tensor], self.space.layouts[self.types[tensor]], self.mesh)

    def layout(self, tensor: str, label: int) -> Layout:
        """The layout that a label of a tensor stands for."""
        return self.conversions[self.types[tensor]].layouts[label]

    @property
    def sinks(self) -> tuple[str, ...]:
        """The outputs that the last operators of the problem read: all but the next values of state."""
        return _sinks(self.graph, self.state)

    def taken(self, part: Part, choice: NDArray[np.int64]) -> tuple[Application, Strategy] | None:
        """How a choice computes a part's tensor; None if it does not."""
        number = int(choice[self.maker[part.tensor]])
        for application in part.ways:
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
    phases: Mapping[str, int] | None = None,
    state: Sequence[tuple[str, str]] = (),
) -> Model:
    """The extraction problem of `graph`; `pins` fixes the layouts of inputs, weights and outputs by name.

    `phases` gives nodes' phases in a training step (default: all 0), `state` pairs leaves with their next values.
    """
    state = _checked_state(state, graph, types)
    pins = _shared_pins(_checked_pins(pins or {}, graph, types, space, mesh), state)
    parts = _parts(applications)
    last = max((phases or {}).values(), default=0)
    phase = _part_phases(parts, phases or {}, last)
    kept = _kept(parts, phase, graph.outputs, last)
    optional = len(parts) < len(applications)
    makers = (*graph.leaves, *(part.tensor for part in parts))
    names = (*makers, *(f"{name} kept" for name in kept))
    index = {name: i for i, name in enumerate(names)}
    tensor_types = [types[name] for name in (*makers, *kept)]
    conversions = {
        type_: Conversions(type_, space, mesh, hardware) for type_ in sorted(set(tensor_types), key=str)
    }
    offers = {
        kind: _offer(kind, space, mesh, hardware) for kind in dict.fromkeys(a.kind for a in applications)
    }
    local_bytes = {type_: _local_bytes(type_, space.layouts[type_], mesh) for type_ in conversions}
    leaves = [
        _leaf(index[name], name, conversions[types[name]], local_bytes[types[name]], pins.get(name))
        for name in graph.leaves
    ]

    def source(name: str, reader: int) -> int:
        """The tensor that a reader of that phase reads: what was kept, after the phase in which it was made."""
        return index[f"{name} kept" if name in kept and reader > phase[name] else name]

    following = dict(state)
    operators = [
        _updated(leaf, source(following[leaf.name], last), last) if leaf.name in following else leaf
        for leaf in leaves
    ]
    maker, keeper = {}, {}
    for part in parts:
        maker[part.tensor] = len(operators)
        operators.append(_computed(part, index[part.tensor], source, offers, optional, phase[part.tensor]))
        if part.tensor in kept:
            keeper[part.tensor] = len(operators)
            held = local_bytes[types[part.tensor]]
            operators.append(_keeper(part.tensor, index, held, optional, phase[part.tensor]))
    for name in _sinks(graph, state):
        operators.append(_sink(name, source(name, last), types[name], space, mesh, pins.get(name), last))
    axes = {type_: _label_axes(space.layouts[type_], mesh) for type_ in conversions}
    problem = Problem(
        tuple(
            Tensor(name, conversions[type_].seconds) for name, type_ in zip(names, tensor_types, strict=True)
        ),
        tuple(operators),
        memory_limit,
    )
    label_axes = tuple(axes[type_] for type_ in tensor_types)
    return Model(
        graph, mesh, space, problem, parts, maker, keeper, types, conversions, offers, label_axes, state
    )


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
    conversions: Conversions,
    local_bytes: NDArray[np.float64],
    pin: Layout | None,
) -> Operator:
    layouts = conversions.layouts
    offered = [i for i, layout in enumerate(layouts) if (layout == pin if pin else Partial() not in layout)]
    return Operator(
        name, tensor, (), np.array(offered, np.int32), np.zeros((len(offered), 0), np.int32), np.zeros(len(offered)),
        local_bytes[offered],
    )  # fmt: skip


def _updated(leaf: Operator, new: int, phase: int) -> Operator:
    """A leaf whose next value is tensor `new`, of the same type: each layout reads that in the same layout."""
    return replace(leaf, arcs=(new,), reads=leaf.out[:, None], phase=phase)


def _local_bytes(type_: TensorType, layouts: Sequence[Layout], mesh: Mesh) -> NDArray[np.float64]:
    """Bytes of one device's part, by label."""
    local = [TensorType(mesh.local_shape(type_.shape, layout), type_.dtype) for layout in layouts]
    return np.array([float(part.bytes) for part in local])


def _parts(applications: Sequence[Application]) -> tuple[Part, ...]:
    ways: dict[str, list[Application]] = {}
    for application in applications:
        ways.setdefault(application.tensor, []).append(application)
    return tuple(Part(tensor, tuple(several)) for tensor, several in ways.items())


def _part_phases(parts: Sequence[Part], phases: Mapping[str, int], last: int) -> dict[str, int]:
    """Each part's phase by its tensor: its node's, or the first that reads it where the model has no such node."""
    found: dict[str, int] = {}
    first_read: dict[str, int] = {}
    for part in reversed(parts):
        given = (phases[way.node] for way in part.ways if way.node in phases)
        phase = found[part.tensor] = next(given, first_read.get(part.tensor, last))
        for operand in (name for way in part.ways for name in way.operands):
            first_read[operand] = min(phase, first_read.get(operand, last))
    return found


def _kept(
    parts: Sequence[Part], phase: Mapping[str, int], outputs: Sequence[str], last: int
) -> dict[str, None]:
    """The computed tensors that a later phase reads, in order."""
    reads = [(name, phase[part.tensor]) for part in parts for way in part.ways for name in way.operands]
    reads += [(name, last) for name in outputs]
    later = {name for name, when in reads if when > phase.get(name, last)}
    return {part.tensor: None for part in parts if part.tensor in later}


def _computed(
    part: Part,
    output: int,
    source: Callable[[str, int], int],
    offers: Mapping[Kind, Offer],
    optional: bool,
    phase: int,
) -> Operator:
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
    arcs = tuple(source(name, phase) for way in part.ways for name in way.operands)
    outs = np.concatenate(out)
    return Operator(
        part.tensor,
        output,
        arcs,
        outs,
        np.concatenate(rows),
        np.concatenate(cost),
        np.zeros(len(outs)),
        phase,
    )


def _keeper(
    name: str, index: Mapping[str, int], held: NDArray[np.float64], optional: bool, phase: int
) -> Operator:
    """Keeps a tensor in any one layout; `held` are its bytes by label."""
    labels = np.arange(len(held), dtype=np.int32)
    if optional:
        labels, held = np.append(labels, np.int32(ABSENT)), np.append(held, 0.0)
    kept = f"{name} kept"
    return Operator(
        kept, index[kept], (index[name],), labels, labels[:, None], np.zeros(len(labels)), held, phase
    )


def _sink(
    name: str,
    tensor: int,
    type_: TensorType,
    space: Space,
    mesh: Mesh,
    pin: Layout | None,
    phase: int,
) -> Operator:
    label = space.layouts[type_].index(pin or mesh.replicated())
    return Operator(
        f"output {name}", None, (tensor,), np.array([ABSENT], np.int32), np.array([[label]], np.int32),
        np.zeros(1), np.zeros(1), phase,
    )  # fmt: skip


def _sinks(graph: Graph, state: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    following = {new for _, new in state}
    return tuple(name for name in graph.outputs if name not in following)


def _checked_state(
    state: Sequence[tuple[str, str]], graph: Graph, types: Mapping[str, TensorType]
) -> tuple[tuple[str, str], ...]:
    for i, (name, new) in enumerate(state):
        if name not in {*graph.inputs, *graph.parameters}:
            raise UserError(f"state {name!r} is no input or weight of {graph.name}")
        if new not in graph.outputs:
            raise UserError(f"state {name!r}: its next value {new!r} is no output of {graph.name}")
        if types[name] != types[new]:
            raise UserError(f"state {name!r} is {types[name]}, its next value {new!r} is {types[new]}")
        if any(name == other or new == value for other, value in state[:i]):
            raise UserError(f"state {name!r} with the next value {new!r}: one of them is in another pair")
    return tuple(state)


def _shared_pins(pins: Mapping[str, Layout], state: Sequence[tuple[str, str]]) -> Mapping[str, Layout]:
    """A pin of a state's next value is one of the state."""
    shared = dict(pins)
    for name, new in state:
        if new in pins and shared.setdefault(name, pins[new]) != pins[new]:
            raise UserError(
                f"state {name!r} is pinned to {format_layout(pins[name])}, its next value {new!r} to "
                f"{format_layout(pins[new])}: they are one"
            )
    return shared


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
