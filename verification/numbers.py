"""Layer 3 of verification: the plan against the original graph on random numbers, in float64.

In: the `Graph` that was planned and the `Plan`.  Out: a `Comparison`, whose verdict is
    tested    every output agrees to RTOL of its magnitude (integers exactly), on two draws of inputs, weights
    refuted   an output differs, is missing, or differs between replicas; or the plan does not run
    unknown   an output is not finite, or does not react to what is drawn: agreement would say nothing
When it is refuted, `first_divergence` is the first tensor of the plan, in program order, whose reassembled
value (`assemble`: concatenate Shard, sum Partial, compare Replicate) is not the original's: plan tensors are
called "<logical tensor>@<layout>".
Draws depend on the seed alone and suit what a leaf is used for (`Uses`): indices lie in the dimension they
index, masks are 0 or 1 and never all 0, what a root or logarithm is taken of is positive.
The original runs with the operators that the plan runs with: onnxruntime and onnx.reference check those
(tests/test_runtime_operators.py). Missing: drift in the plan's own precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..mesh import parse_layout
from ..planfile import Plan
from ..program import Node, TensorType, UserError
from ..rewrite.graph import Graph
from ..runtime.lowering import (
    QUICK,
    Executable,
    ReplicasDiffer,
    Source,
    as_float64,
    assemble,
    flat_program,
    widest_array,
    widest_node,
)

RTOL = 1e-10
ATTEMPTS = 4  # draws until the original's outputs are finite
DRAWS = 4  # draws until every output has reacted; the first two are compared
SMALL = 4  # integers of unknown use lie in [0, SMALL)

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """`reason` says in one line what decided; `tensors_checked` counts the outputs that were compared."""

    verdict: str  # "tested", "refuted" or "unknown"
    reason: str
    tensors_checked: int
    first_divergence: str | None = None
    seed: int = 0


def compare(
    graph: Graph,
    plan: Plan,
    *,
    seed: int = 0,
    source: Source | None = None,
    original: Original | None = None,
    program: Executable | None = None,
    locate: bool = True,
) -> Comparison:
    """`source` gives integer weights; those that it does not have are drawn, as floating ones always are.

    `original` is the graph prepared once, for comparing many plans of it; `program` the plan in float64, lowered.
    Without `locate` the first divergence is not looked for, which takes longer than comparing.
    """
    program = program or Executable(as_float64(plan), compiler_options=QUICK)
    _ = program.mesh  # too few devices is the user's affair, not the plan's
    original = original or Original(graph, source)
    first = original.values(seed)
    samples = [first, original.values(seed + DRAWS)]
    checked: set[str] = set()

    def comparison(verdict: str, reason: str, first: str | None = None) -> Comparison:
        return Comparison(verdict, reason, len(checked), first, seed)

    def where(values: Values) -> str | None:
        return first_divergence(original, program, values) if locate else None

    for values, expected in samples:
        try:
            found = run_plan(program, values)
        except ReplicasDiffer as error:
            return comparison("refuted", str(error), where(values))
        except (UserError, TypeError, ValueError, KeyError, IndexError) as error:
            return comparison("refuted", f"the plan does not run: {error}")
        for name, theirs in expected.items():
            difference = disagreement(found.get(name), theirs)
            if difference:
                return comparison("refuted", f"output {name!r}: {difference}", where(values))
            checked.add(name)
    doubts = original.unsure([expected for _, expected in samples], seed)
    if doubts:
        return comparison("unknown", doubts)
    outputs = "1 output agrees" if len(checked) == 1 else f"{len(checked)} outputs agree"
    return comparison("tested", f"{outputs} to {RTOL:g}")


def run_plan(program: Executable, values: Values) -> Values:
    inputs = {port.name: values[port.name] for port in program.plan.inputs if port.kind == "input"}
    return program.run(program.place(inputs, values.__getitem__), check_replicas=True)


def disagreement(found: np.ndarray | None, expected: np.ndarray) -> str:
    """What differs, in words; nothing if the arrays agree."""
    if found is None:
        return "the plan has no such output"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"expected {expected.dtype}{list(expected.shape)}, found {found.dtype}{list(found.shape)}"
    if found.dtype.kind != "f":
        wrong = int(np.sum(found != expected))
        return f"{wrong} of {expected.size} elements differ" if wrong else ""
    finite = np.isfinite(expected)
    if (
        not np.array_equal(found[~finite], expected[~finite], equal_nan=True)
        or not np.isfinite(found[finite]).all()
    ):
        return "infinities or NaN stand in other places"
    scale = np.max(np.abs(expected), where=finite, initial=0.0)
    error = np.max(np.abs(found - expected), where=finite, initial=0.0)
    return f"differs by {error:.2g} at magnitude {scale:.2g}" if error > RTOL * scale else ""


def first_divergence(original: Original, program: Executable, values: Values) -> str | None:
    plan, known = program.plan, original.graph.types
    produced = [port.local for port in plan.inputs] + [name for node in plan.nodes for name in node.outputs]
    # A copy on its way to another layout is called "<tensor>@<layout>><its goal>".
    named = [(tensor, *tensor.partition(">")[0].rpartition("@")[::2]) for tensor in produced]
    named = [(tensor, logical, layout) for tensor, logical, layout in named if logical in known]
    theirs = original.tensors({logical for _, logical, _ in named}, values)
    inputs = {port.name: values[port.name] for port in plan.inputs if port.kind == "input"}
    arrays = program.place(inputs, values.__getitem__)
    blocks = program.blocks(arrays, list(dict.fromkeys(tensor for tensor, _, _ in named)))
    for tensor, logical, layout in named:
        try:
            value, consistent = assemble(
                blocks[tensor], parse_layout(layout), lambda a, b: not disagreement(a, b)
            )
        except (UserError, ValueError, IndexError):  # another naming, or parts that do not fit together
            continue
        if not consistent or disagreement(value, theirs[logical]):
            return tensor
    return None


# ---------------------------------------------------------------- the original


class Original:
    """The graph in float64 on one device, and what may be fed to it."""

    def __init__(self, graph: Graph, source: Source | None) -> None:
        self.graph = graph
        self.nodes = tuple(map(widest_node, graph.nodes))
        self.constants = {name: widest_array(value) for name, value in graph.constants.items()}
        self.constants |= integer_weights(graph, source)
        self.uses = Uses.of(graph)
        self.run = flat_program(self.nodes, graph.outputs, compiler_options=QUICK)

    def values(self, seed: int) -> tuple[Values, Values]:
        """Leaves and outputs of the first draw whose outputs are finite, or of the last."""
        for attempt in range(ATTEMPTS):
            leaves = self.constants | self.draw(np.random.default_rng((seed, attempt)), positive=attempt >= 2)
            outputs = self.run(leaves)
            if all(map(is_finite, outputs.values())):
                break
        return leaves, outputs

    def tensors(self, names: set[str], values: Values) -> Values:
        return flat_program(self.nodes, sorted(names), compiler_options=QUICK)(values)

    def draw(self, rng: np.random.Generator, positive: bool) -> Values:
        graph, drawn = self.graph, {}
        for name in (*graph.inputs, *graph.parameters):
            if name not in self.constants:
                parameter = name in graph.parameters
                drawn[name] = self.uses.draw(rng, name, graph.types[name], parameter, positive)
        return drawn

    def unsure(self, samples: list[Values], seed: int) -> str:
        """Why agreement of the outputs would say little; nothing if it says something."""
        for name, value in samples[-1].items():
            if not is_finite(value):
                return f"output {name!r}: not finite in {ATTEMPTS} draws of inputs and weights"
        reacting = list(self._depending())
        for extra in range(2, DRAWS + 1):
            still = [name for name in reacting if all(same(samples[0][name], s[name]) for s in samples[1:])]
            if not still:
                return ""
            if extra < DRAWS:
                samples = [*samples, self.values(seed + DRAWS * extra)[1]]
        return f"output {still[0]!r}: the same in {DRAWS - 1} draws of inputs and weights"

    def _depending(self) -> Iterator[str]:
        """Non-empty outputs that a drawn leaf reaches."""
        reached = {*self.graph.inputs, *self.graph.parameters} - self.constants.keys()
        for node in self.nodes:
            if reached.intersection(node.inputs):
                reached.update(node.outputs)
        yield from (name for name in self.graph.outputs if name in reached and self.graph.types[name].size)


def integer_weights(graph: Graph, source: Source | None) -> Values:
    """Those that the source has."""
    found: Values = {}
    for name in graph.parameters:
        if source is not None and not graph.types[name].floating:
            with contextlib.suppress(UserError):  # its file is missing, and any integers will do
                found[name] = np.asarray(source(name))
    return found


def is_finite(value: np.ndarray) -> bool:
    return value.dtype.kind != "f" or bool(np.isfinite(value).all())


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b)


# ---------------------------------------------------------------- what leaves are used for

MOVING = frozenset({"Cast", "Reshape", "Transpose", "Expand", "Slice", "Concat", "Tile", "Clip"})
# Positive where all their operands are.
KEEPING_SIGN = MOVING | {"Add", "Mul", "Div", "Max", "Min", "Sqrt", "Pow", "ReduceSum", "ReduceMean"}
NEEDING_SIGN = {"Sqrt": 0, "Log": 0, "BatchNormalization": 4}
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


@dataclass
class Uses:
    """Uses of leaves: `ranges` of indices, `masks`, `positive` values, `weights` (right of a product)."""

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    masks: set[str] = field(default_factory=set)
    positive: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph) -> Uses:
        uses = cls()
        readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in set(node.inputs):
                readers.setdefault(name, []).append(node)
        for leaf in (*graph.inputs, *graph.parameters):
            uses._follow(graph, readers, leaf)
        uses._mark_positive(graph)
        return uses

    def _follow(self, graph: Graph, readers: Mapping[str, list[Node]], leaf: str) -> None:
        """Forward from a leaf while the value only moves or is shifted by constants."""
        todo, seen = [(leaf, 0, 0)], set()
        while todo:
            tensor, low, high = todo.pop()
            for node in readers.get(tensor, ()):
                if node.name in seen:
                    continue
                seen.add(node.name)
                self._note(graph, node, tensor, leaf, low, high)
                shift = shifted(graph, node, tensor)
                if shift is not None:
                    todo.append((node.outputs[0], low + shift[0], high + shift[1]))

    def _note(self, graph: Graph, node: Node, tensor: str, leaf: str, low: int, high: int) -> None:
        size = indexed_size(graph.types, node, tensor)
        if size is not None:
            a, b = self.ranges.get(leaf, (0, size - high))
            self.ranges[leaf] = max(a, -low), min(b, size - high)
        if node.op in PRODUCTS and node.inputs[1] == tensor:
            self.weights.add(leaf)
        if not graph.types[leaf].floating and is_mask_use(graph, node, tensor):
            self.masks.add(leaf)

    def _mark_positive(self, graph: Graph) -> None:
        """Backward from roots and logarithms through what keeps the sign."""
        wanted: set[str] = set()
        for node in reversed(graph.nodes):
            if node.op in NEEDING_SIGN:
                wanted.add(node.inputs[NEEDING_SIGN[node.op]])
            square = node.op == "Mul" and node.inputs[0] == node.inputs[1]
            if node.op in KEEPING_SIGN and wanted.intersection(node.outputs) and not square:
                wanted.update(node.inputs[:1] if node.op == "Pow" else node.inputs)
        self.positive = wanted

    def draw(
        self, rng: np.random.Generator, name: str, type: TensorType, parameter: bool, positive: bool
    ) -> np.ndarray:
        if type.floating:
            x = rng.standard_normal(type.shape)
            if (parameter or name in self.weights) and type.rank > 1:
                x /= np.sqrt(max(1, type.shape[0] if type.rank == 2 else type.size // type.shape[0]))
            return np.abs(x) + 0.1 if positive or name in self.positive else x
        if type.dtype == "bool" or (name in self.masks and name not in self.ranges):
            mask = rng.integers(0, 2, type.shape)
            mask[(..., slice(1)) if type.rank else ...] = 1  # no row of an attention mask is empty
            return mask.astype(type.dtype)
        low, high = self.ranges.get(name, (0, SMALL))
        return rng.integers(low, max(high, low + 1), type.shape).astype(type.dtype)


def shifted(graph: Graph, node: Node, tensor: str) -> tuple[int, int] | None:
    """The least and greatest amount that `node` adds to `tensor`; None where it computes something else."""
    if node.op in MOVING:
        return 0, 0
    other = [graph.constants.get(name) for name in node.inputs if name != tensor]
    sign = {"Add": 1, "Sub": -1}.get(node.op)
    if sign is None or len(other) != 1 or other[0] is None or not other[0].size or node.inputs[0] != tensor:
        return None
    bounds = sorted((sign * int(other[0].min()), sign * int(other[0].max())))
    return bounds[0], bounds[1]


def indexed_size(types: Mapping[str, TensorType], node: Node, tensor: str) -> int | None:
    """Of the dimension that `tensor` indexes in `node`, if it does; of several the smallest."""
    if node.op == "OneHot":
        return node.attributes["depth"] if node.inputs[0] == tensor else None
    if node.op not in INDEXED or node.inputs[1] != tensor:
        return None
    return INDEXED[node.op](node.attributes, types[node.inputs[0]].shape, types[tensor].shape)


def along_axis(attributes: Mapping[str, Any], shape: tuple[int, ...], indices: tuple[int, ...]) -> int:
    return shape[attributes["axis"]]


def along_several(attributes: Mapping[str, Any], shape: tuple[int, ...], indices: tuple[int, ...]) -> int:
    first = attributes.get("batch_dims", 0)
    return min(shape[first : first + indices[-1]], default=1)


INDEXED: dict[str, Callable[..., int]] = {
    "Gather": along_axis,
    "GatherElements": along_axis,
    "ScatterElements": along_axis,
    "GatherND": along_several,
    "ScatterND": along_several,
}


def is_mask_use(graph: Graph, node: Node, tensor: str) -> bool:
    """Turned into truth values, counted (positions from a mask), or subtracted from 1."""
    if node.op == "Cast":
        return node.attributes["to"] == "bool"
    one = graph.constants.get(node.inputs[0]) if node.op == "Sub" and node.inputs[1] == tensor else None
    return node.op == "CumSum" or (one is not None and bool((one == 1).all()))
