"""Reverse-mode gradients of a graph, as canonical nodes.

In: a graph, its scalar loss, the leaves to differentiate by. Out: a `Backward`: nodes to append, their types and
constants, and the gradient's tensor for every leaf that has one.

Each kind of operator is differentiated once, in an e-graph: `(Gradient i (Op ..) g)` is rewritten by the rule files'
gradient rules and the smallest term is taken. Where no rule applies, the operator's own function is differentiated at
run time: `Adjoint` where it is linear in the operand (which is then not read, nor kept), else `Vjp`.
Un-broadcasting and the sum over a tensor's consumers are done here, once for all operators. A cotangent that is the
same along a dimension (that of a sum) is not repeated before something asks for it: what is elementwise broadcasts, and
a value that is not there need not be split. No gradient passes through integers, booleans, and functions that are
constant almost everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..mesh import ONE_DEVICE
from ..program import Node, TensorType, UserError
from ..rules import RuleBook, load_rules
from .alignment import broadcast_reads
from .collectives import infer_local
from .egraph import Engine, ENode, Frozen, type_facts
from .graph import Graph
from .operators import OPERATORS, broadcast
from .space import Kind
from .terms import ADJOINT, RESULT, VJP, Head, adjoint_attributes, decode, encode, leaf, write

ROUNDS = 20
_FLAT = frozenset({"Floor", "Ceil", "Round", "Sign", "ArgMax", "ArgMin", "IsNaN", "IsInf"})
_ELEMENTWISE = frozenset({"Unary", "Binary", "Where", "Cast", "Number"})
_LINEAR: dict[str, frozenset[int]] = {
    **dict.fromkeys(("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"), frozenset(range(8))),
    **dict.fromkeys(
        ("Gather", "GatherElements", "GatherND", "Transpose", "Reshape", "Expand", "Slice", "AveragePool", "CumSum",
         "Trilu", "Tile", "ReduceSum", "ReduceMean", "Pad"), frozenset({0})),
    "ScatterElements": frozenset({2}),
    "ScatterND": frozenset({2}),
    "OneHot": frozenset({1}),
}  # fmt: skip


@dataclass(frozen=True)
class Backward:
    """What to append to the graph; `gradients` lacks the leaves that the loss does not depend on."""

    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray]
    gradients: Mapping[str, str]


@dataclass(frozen=True)
class _Recipe:
    """How a kind's operand gets its cotangent: steps over operands (~i), the result (~n), its cotangent (~(n+1))."""

    steps: tuple[tuple[Head, tuple[int, ...]], ...]
    root: int

    @property
    def elementwise(self) -> bool:
        return all(head.constructor in _ELEMENTWISE for head, _ in self.steps)


def gradients(graph: Graph, loss: str, wrt: Sequence[str], *, book: RuleBook | None = None) -> Backward:
    """Differentiate `loss` by the leaves `wrt`; UserError where a float path ends in an operator without derivative."""
    if graph.types[loss].shape != () or not graph.types[loss].floating:
        raise UserError(f"loss {loss!r} is {graph.types[loss]}: a loss is a floating-point scalar")
    moving = _moving(graph, wrt)
    parts = [
        part for node in _leading_to(graph, loss) for part in _results(node) if part.outputs[0] in moving
    ]
    wanted = [(part, i) for part in parts for i, name in enumerate(part.inputs) if name in moving]
    recipes = _recipes(graph, wanted, book or load_rules())
    tape = _Tape(graph)
    tape.seed(loss)
    for node in reversed(parts):
        cotangent = tape.total(node.outputs[0])
        for i, name in enumerate(node.inputs):
            if cotangent and name in moving:
                tape.add(name, tape.apply(recipes[_key(graph, node, i)], node, i, cotangent))
    found = {name: tape.whole(total, graph.types[name].shape) for name in wrt if (total := tape.total(name))}
    return Backward(tuple(tape.nodes), tape.types, tape.constants, found)


def _moving(graph: Graph, wrt: Iterable[str]) -> set[str]:
    """Floating-point tensors that depend on a leaf of `wrt`."""
    moving = set(wrt)
    for node in graph.nodes:
        if moving.intersection(node.inputs) and node.op not in _FLAT:
            moving.update(name for name in node.outputs if graph.types[name].floating)
    return moving


def _leading_to(graph: Graph, loss: str) -> list[Node]:
    needed, kept = {loss}, []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]


def _results(node: Node) -> list[Node]:
    """An operator with several results as one node for each."""
    if len(node.outputs) == 1:
        return [node]
    return [
        replace(node, name=f"{node.name}/{i}", outputs=(output,), attributes={**node.attributes, RESULT: i})
        for i, output in enumerate(node.outputs)
    ]


# ------------------------------------------------------------------------------------------------ recipes

_Key = tuple[Kind, int]


def _key(graph: Graph, node: Node, operand: int) -> _Key:
    operands = tuple(graph.types[name] for name in node.inputs)
    return Kind(encode(node), operands, graph.types[node.outputs[0]]), operand


def _recipes(graph: Graph, wanted: Sequence[tuple[Node, int]], book: RuleBook) -> dict[_Key, _Recipe]:
    keys = list(dict.fromkeys(_key(graph, node, i) for node, i in wanted))
    nodes = {_key(graph, node, i): node for node, i in wanted}
    # The e-graph knows Concat of two only; any number of operands get their pieces back.
    found = {key: _piece(key) for key in keys if key[0].head.constructor == "Concat"}
    found |= _by_rules([key for key in keys if key not in found], book)
    return {key: found.get(key) or _by_function(key, nodes[key]) for key in keys}


def _piece(key: _Key) -> _Recipe:
    """Operand i of a Concat gets its piece of the cotangent."""
    kind, operand = key
    axis = decode(kind.head)[1]["axis"]
    before = sum(t.shape[axis] for t in kind.operands[:operand])
    rank, shape = kind.result.rank, list(kind.result.shape)
    shape[axis] = before + kind.operands[operand].shape[axis]
    starts = tuple(before if d == axis else 0 for d in range(rank))
    cotangent = ~(len(kind.operands) + 1)
    return _Recipe(((Head("Slice", (starts, tuple(shape), (1,) * rank)), (cotangent,)),), 0)


def _by_function(key: _Key, node: Node) -> _Recipe:
    """The operator's own function, differentiated when it runs."""
    kind, operand = key
    if (reduction := node.attributes.get("reduction", "none")) not in ("none", "add"):
        raise UserError(
            f"node {node.name!r}: {node.op} with reduction {reduction!r} has no gradient here; 'none' and 'add' have"
        )
    n = len(kind.operands)
    linear = operand in _LINEAR.get(node.op, ()) and kind.operands[operand].dtype == kind.result.dtype
    shape = kind.operands[operand].shape if linear else None
    read = [~i for i in range(n) if not (linear and i == operand)]
    attributes = adjoint_attributes(node.op, node.attributes, operand, shape)
    node_ = Node("", ADJOINT if linear else VJP, ("",) * (len(read) + 1), ("y",), attributes)
    return _Recipe(((encode(node_), (*read, ~(n + 1))),), 0)


def _by_rules(keys: Sequence[_Key], book: RuleBook) -> dict[_Key, _Recipe]:
    """Recipes of all kinds that gradient rules rewrite: one e-graph, the smallest terms."""
    if not keys:
        return {}
    engine = Engine(book)
    lines: list[str] = []
    for index, (kind, operand) in enumerate(keys):
        cotangent = leaf(len(kind.operands), kind.result)
        lines += [
            f"(set (kind {2 * index}) {kind.text}) {type_facts(kind.text, kind.result)} (set (level {kind.text}) 0)",
            f"(set (kind {2 * index + 1}) (Gradient {operand} {kind.text} {cotangent}))",
            *_facts(kind),
        ]
    engine.include("\n".join(lines))
    engine.saturate("analysis")
    for _ in range(ROUNDS):
        if not engine.run("(run gradient 1)"):
            break
    frozen = Frozen(engine.egraph, book)
    recipes = {key: _smallest(frozen, 2 * index, key[0]) for index, key in enumerate(keys)}
    return {key: recipe for key, recipe in recipes.items() if recipe}


def _facts(kind: Kind) -> list[str]:
    head, operand = kind.head, kind.operands[0]
    if head.constructor == "Transpose":
        perm = decode(head)[1]["perm"]
        return [f"(inverse {write(perm)} {write(tuple(int(i) for i in np.argsort(perm)))})"]
    if head.constructor == "Reduce":
        axes: tuple[int, ...] = decode(head)[1]["axes"]
        kept = tuple(1 if d in axes else size for d, size in enumerate(operand.shape))
        count = int(np.prod([operand.shape[d] for d in axes]))
        facts = [f"(kept {write(operand.shape)} {write(axes)} {write(kept)})"]
        return [*facts, f"(count {write(operand.shape)} {write(axes)} {write(float(count))})"]
    return []


def _smallest(frozen: Frozen, root: int, kind: Kind) -> _Recipe | None:
    """The term with the fewest steps for the gradient whose kind is root and whose class is root + 1."""
    ends = {frozen.kind[root]: ~len(kind.operands)}
    for eclass, nodes in frozen.nodes.items():
        for node in nodes:
            if node.head.constructor == "Leaf":
                ends.setdefault(eclass, ~_leaf_position(node, kind))
    best: dict[int, tuple[int, ENode]] = {}
    changed = True
    while changed:
        changed = False
        for eclass, nodes in frozen.nodes.items():
            for node in nodes:
                if node.head.constructor in ("Gradient", "Leaf") or eclass in ends:
                    continue
                if all(o in ends or o in best for o in node.operands):
                    size = 1 + sum(best[o][0] for o in node.operands if o not in ends)
                    if eclass not in best or size < best[eclass][0]:
                        best[eclass] = (size, node)
                        changed = True
    goal = frozen.kind[root + 1]
    if goal in ends:
        return _Recipe((), ends[goal])
    return _steps(goal, best, ends) if goal in best else None


def _leaf_position(node: ENode, kind: Kind) -> int:
    """Operand i is ~i; the leaf after the operands is the result's cotangent."""
    position = node.head.attributes[0]
    assert isinstance(position, int)
    return position if position < len(kind.operands) else position + 1


def _steps(goal: int, best: Mapping[int, tuple[int, ENode]], ends: Mapping[int, int]) -> _Recipe:
    steps: list[tuple[Head, tuple[int, ...]]] = []
    index: dict[int, int] = dict(ends)

    def visit(eclass: int) -> int:
        if eclass not in index:
            node = best[eclass][1]
            operands = tuple(map(visit, node.operands))
            steps.append((node.head, operands))
            index[eclass] = len(steps) - 1
        return index[eclass]

    root = visit(goal)
    return _Recipe(tuple(steps), root)


# ------------------------------------------------------------------------------------------------ the tape


@dataclass
class _Tape:
    """The backward nodes as they are written, and what every tensor has collected.

    Cotangents may have size 1 (or no dimension) where their tensor repeats them: `whole` makes them its shape.
    """

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[str, str] = field(default_factory=dict)
    made: dict[tuple[Head, tuple[str, ...]], str] = field(default_factory=dict)

    def seed(self, loss: str) -> None:
        self.parts[loss].append(self.number(1.0, self.graph.types[loss].dtype))

    def number(self, value: float, dtype: str) -> str:
        name = f"gradient/{dtype}/{value!r}"
        self.constants[name] = np.array(value).astype(dtype)
        self.types[name] = TensorType((), dtype)
        return name

    def type(self, name: str) -> TensorType:
        return self.types.get(name) or self.graph.types[name]

    def total(self, tensor: str) -> str | None:
        """The sum of what the tensor's consumers gave; None if none did."""
        if tensor not in self.totals:
            parts = self.parts.get(tensor)
            if not parts:
                return None
            total = parts[0]
            for i, part in enumerate(parts[1:]):
                total = self.node("Add", {}, (total, part), f"gradient/{tensor}/sum{i}")
            self.totals[tensor] = total
        return self.totals[tensor]

    def add(self, tensor: str, part: str) -> None:
        self.parts[tensor].append(part)

    def apply(self, recipe: _Recipe, node: Node, operand: int, cotangent: str) -> str:
        """The cotangent of an operand of `node`, to be broadcast to the operand's own type."""
        operand_shape, shape = (
            self.graph.types[name].shape for name in (node.inputs[operand], node.outputs[0])
        )
        if not (recipe.elementwise and operand_shape == shape):
            cotangent = self.whole(cotangent, shape)
        ends = (*node.inputs, node.outputs[0], cotangent)
        results: list[str] = []
        for j, (head, operands) in enumerate(recipe.steps):
            name = f"gradient/{node.name}/{operand}/{j}"
            arguments = tuple(results[k] if k >= 0 else ends[~k] for k in operands)
            if head.constructor == "Number":
                (value,) = head.attributes
                assert isinstance(value, float)
                results.append(self.number(value, self.graph.types[node.inputs[operand]].dtype))
                continue
            results.append(self.step(head, arguments, name))
        root = results[recipe.root] if recipe.root >= 0 else ends[~recipe.root]
        return self._unbroadcast(
            root, self.graph.types[node.inputs[operand]], f"gradient/{node.name}/{operand}"
        )

    def step(self, head: Head, inputs: tuple[str, ...], name: str) -> str:
        """One step, or what it is already: both operands of a square get the same."""
        if known := self.made.get((head, inputs)):
            return known
        self.made[head, inputs] = name
        op, attributes, domain = decode(head)
        self.types[name] = infer_local(head, tuple(map(self.type, inputs)), ONE_DEVICE)
        self.nodes.append(Node(name, op, inputs, (name,), attributes, domain))
        return name

    def node(self, op: str, attributes: Mapping[str, object], inputs: tuple[str, ...], name: str) -> str:
        self.types[name] = OPERATORS[op].infer(attributes, tuple(map(self.type, inputs)))[0]
        self.nodes.append(Node(name, op, inputs, (name,), attributes))
        return name

    def whole(self, name: str, shape: tuple[int, ...]) -> str:
        """A cotangent in its tensor's shape."""
        if self.type(name).shape == shape:
            return name
        wanted = f"{name}/whole{list(shape)}"
        return wanted if wanted in self.types else self.node("Expand", {"shape": shape}, (name,), wanted)

    def _unbroadcast(self, name: str, type_: TensorType, origin: str) -> str:
        """Sum over the dimensions along which the operand was repeated."""
        found = self.type(name)
        if broadcast(found.shape, type_.shape) == type_.shape:
            return name
        axes = tuple(d for d, c in broadcast_reads(found.shape, type_.shape) if c is None)
        summed = self.node("ReduceSum", {"axes": axes, "keepdims": 0}, (name,), f"{origin}/summed")
        if self.type(summed).shape == type_.shape:
            return summed
        return self.node("Reshape", {"shape": type_.shape}, (summed,), f"{origin}/shaped")
