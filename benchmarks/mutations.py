"""Silent bugs of real parallel training, as changes of a correct plan.

    mutations(plan) -> {operator: [Mutation, ..]}    every spot that the plan offers
    Mutation.make() -> Plan                          the changed plan; ValueError where it is not well formed

The operators are those that systems have shipped: DEL and INS a collective, GRP the wrong group, SCL a wrong scale,
LBL a relabelled placement, PERM a wrong rank order, OFF a wrong index offset, LAY a wrong layout within a shard, ORD a
wrong order of operands, ADJ a wrong adjoint, STALE an old value, MASK a wrong mask, CST a wrong constant.
A mutant is a plan that its author believes in: the tensor that goes wrong keeps its name. Where a change of order
cannot matter, because all that follows is a sum over what was reordered (a squared norm), there is no spot for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from parallegg.mesh import Shard
from parallegg.planfile import Plan, Port
from parallegg.program import COLLECTIVE_DOMAIN, Node, TensorType
from parallegg.rewrite.collectives import infer_local
from parallegg.rewrite.operators import infer
from parallegg.rewrite.terms import encode

RAW = "~raw"  # what was the tensor, before something was put behind it


@dataclass(frozen=True)
class Mutation:
    """`what` says it in words; `faulty` are the nodes of the mutant that are wrong or the first to read what is."""

    operator: str
    what: str
    faulty: frozenset[str]
    make: Callable[[], Plan]


Found = Iterator[tuple[str, frozenset[str], Callable[[], Plan]]]


def mutations(plan: Plan) -> dict[str, list[Mutation]]:
    """All mutations of a plan, by operator, in the order of the plan's nodes."""
    site = Site(plan)
    return {name: [Mutation(name, *found) for found in find(site)] for name, find in OPERATORS.items()}


# ------------------------------------------------------------------------------------------------ surgery


class Site:
    """A plan with who reads what, and the ways to change it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.readers: dict[str, list[str]] = {}
        for node in plan.nodes:
            for name in node.inputs:
                self.readers.setdefault(name, []).append(node.name)
        self.maker = {name: node.name for node in plan.nodes for name in node.outputs}

    def numbered(self, *ops: str) -> Iterator[tuple[int, Node]]:
        """The nodes of some operators with their places in the plan; all nodes without operators."""
        return ((i, node) for i, node in enumerate(self.plan.nodes) if not ops or node.op in ops)

    def type(self, tensor: str) -> TensorType:
        return self.plan.types[tensor]

    def ways(self, node: Node) -> int:
        """The size of the mesh axis of a collective."""
        return self.plan.mesh[node.attributes["axis"]].size

    def ordered(self, tensor: str, dim: int) -> bool:
        """Whether the order along a dimension can matter: not if all readers add up what they make of it alone."""
        nodes = [node for node in self.plan.nodes if tensor in node.inputs]
        if not nodes or any(port.local == tensor for port in self.plan.outputs):
            return True
        return any(self._orders(node, tensor, dim) for node in nodes)

    def _orders(self, node: Node, tensor: str, dim: int) -> bool:
        if set(node.inputs) != {tensor}:
            return True
        if node.op == "ReduceSum":
            return dim not in node.attributes["axes"]
        elementwise = len(node.inputs) > 1 or node.op in ("Neg", "Abs", "Sqrt", "Cast")
        return not elementwise or self.ordered(node.outputs[0], dim)

    def reading(self, tensor: str) -> frozenset[str]:
        """Who reads a tensor: where nobody but an output of the plan does, who makes it."""
        return frozenset(self.readers.get(tensor, ())) or frozenset({self.maker.get(tensor, "")})

    def instead(self, i: int, *nodes: Node, constants: Mapping[str, np.ndarray] | None = None) -> Plan:
        """The plan with other nodes in the place of node i."""
        constants = {**self.plan.constants, **(constants or {})}
        types = dict(self.plan.types)
        types |= {
            name: TensorType(value.shape, value.dtype.name)
            for name, value in constants.items()
            if name not in types
        }
        for node in nodes:
            found = self._results(node, tuple(types[name] for name in node.inputs))
            for name, type_ in zip(node.outputs, found, strict=True):
                if types.setdefault(name, type_) != type_:
                    raise ValueError(f"{name} would be {type_}")
        kept = (*self.plan.nodes[:i], *nodes, *self.plan.nodes[i + 1 :])
        return replace(self.plan, nodes=kept, types=types, constants=constants)

    def _results(self, node: Node, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        if node.domain == COLLECTIVE_DOMAIN:
            return (infer_local(encode(node), operands, self.plan.mesh),)
        return infer(node.op, node.attributes, operands)

    def behind(
        self, i: int, *chain: tuple[str, Mapping[str, object]], constant: np.ndarray | None = None
    ) -> Plan:
        """The plan with unary operators behind the (only) result of node i, which keeps its name.

        With a constant the operator has it as its second operand.
        """
        node = self.plan.nodes[i]
        name = before = node.outputs[0]
        nodes, extra = [], {f"{name}~constant": constant} if constant is not None else {}
        before = f"{name}{RAW}"
        nodes.append(replace(node, outputs=(before,)))
        for k, (op, attributes) in enumerate(chain):
            after = name if k == len(chain) - 1 else f"{name}~step{k}"
            nodes.append(_node(f"{node.name}~{k}", op, (before, *extra), after, attributes))
            before = after
        return self.instead(i, *nodes, constants=extra)

    def renamed(self, i: int) -> Plan:
        """The plan without node i: what it computes is what it reads."""
        node = self.plan.nodes[i]
        name, instead = node.outputs[0], node.inputs[0]
        if self.type(name) != self.type(instead):
            raise ValueError("not of one type")
        nodes = [
            replace(n, inputs=tuple(instead if x == name else x for x in n.inputs))
            for n in self.plan.nodes
            if n is not node
        ]
        outputs = tuple(replace(p, local=instead) if p.local == name else p for p in self.plan.outputs)
        kept = tuple(instead if x == name else x for x in self.plan.kept)
        return replace(self.plan, nodes=tuple(nodes), outputs=outputs, kept=tuple(dict.fromkeys(kept)))

    def added(self, i: int) -> frozenset[str]:
        """The names of nodes that `behind` puts there, the node itself, and who reads the result."""
        node = self.plan.nodes[i]
        return frozenset({node.name, *(f"{node.name}~{k}" for k in range(8))}) | self.reading(node.outputs[0])


def _node(name: str, op: str, inputs: Sequence[str], output: str, attributes: Mapping[str, object]) -> Node:
    own = op in ("AllReduce", "AllGather", "LocalSlice", "AllToAll", "ReduceScatter", "Shift")
    return Node(name, op, tuple(inputs), (output,), dict(attributes), COLLECTIVE_DOMAIN if own else "")


def _with(node: Node, **attributes: object) -> Node:
    return replace(node, attributes={**node.attributes, **attributes})


def _repeated(rank: int, dim: int, times: int) -> tuple[str, dict[str, object]]:
    """One block in the place of all of them."""
    return "Tile", {"repeats": tuple(times if d == dim else 1 for d in range(rank))}


def _cut(shape: Sequence[int], dim: int, start: int, end: int) -> tuple[str, dict[str, object]]:
    """Slice of one dimension."""
    starts = tuple(start if d == dim else 0 for d in range(len(shape)))
    ends = tuple(end if d == dim else size for d, size in enumerate(shape))
    return "Slice", {"starts": starts, "ends": ends, "steps": (1,) * len(shape)}


# ------------------------------------------------------------------------------------------------ operators


def deleted(site: Site) -> Found:
    """DEL: a collective is missing; where it changes the shape, every device goes by its own part."""
    for i, node in site.numbered("AllReduce", "Include"):
        yield f"{node.op} missing", site.reading(node.outputs[0]), partial(site.renamed, i)
    for i, node in site.numbered("AllGather", "ReduceScatter", "AllToAll"):
        yield f"{node.op} missing", site.added(i), partial(_own_part, site, i)


def _own_part(site: Site, i: int) -> Plan:
    node = site.plan.nodes[i]
    a, axis = node.attributes, node.attributes["axis"]
    rank = site.type(node.inputs[0]).rank
    cut = ("LocalSlice", {"axis": axis, "dim": a["to_dim"] if node.op == "AllToAll" else a["dim"]})
    whole = _repeated(rank, a["dim"], site.ways(node))
    first, *rest = {"AllGather": [whole], "ReduceScatter": [cut], "AllToAll": [cut, whole]}[node.op]
    replaced = _node(node.name, first[0], node.inputs, node.outputs[0], first[1])
    changed = Site(replace(site.plan, nodes=(*site.plan.nodes[:i], replaced, *site.plan.nodes[i + 1 :])))
    return changed.behind(i, *rest) if rest else site.instead(i, replaced)


def inserted(site: Site) -> Found:
    """INS: a sum over an axis that is complete already, or not asked for yet."""
    for i, _ in _floating(site):
        for axis in site.plan.mesh:
            chain = ("AllReduce", {"axis": axis.name, "reduction": "sum"})
            yield f"AllReduce over {axis.name} too many", site.added(i), partial(site.behind, i, chain)


def _floating(site: Site) -> Iterator[tuple[int, Node]]:
    return (
        (i, n)
        for i, n in site.numbered()
        if len(n.outputs) == 1 and site.type(n.outputs[0]).dtype == "float32"
    )


def other_group(site: Site) -> Found:
    """GRP: the collective of another mesh axis."""
    for i, node in site.numbered():
        if not node.is_collective or "axis" not in node.attributes or node.op == "GatherOrZero":
            continue
        for axis in site.plan.mesh:
            if axis.name != node.attributes["axis"]:
                changed = _with(node, axis=axis.name)
                faulty = site.reading(node.outputs[0]) | {node.name}
                yield f"{node.op} over {axis.name}", faulty, partial(site.instead, i, changed)


def scaled(site: Site) -> Found:
    """SCL: a mean where a sum belongs, a value as many times too large or too small as the axis has devices."""
    for i, node in site.numbered("AllReduce"):
        if node.attributes["reduction"] == "sum":
            faulty = site.reading(node.outputs[0]) | {node.name}
            yield "mean for sum", faulty, partial(site.instead, i, _with(node, reduction="mean"))
    for i, _ in _floating(site):
        for axis, inverse in itertools.product(site.plan.mesh, (False, True)):
            factor = np.float32(1 / axis.size if inverse else axis.size)
            make = partial(site.behind, i, ("Mul", {}), constant=np.asarray(factor))
            yield f"scaled by {factor:.3g}", site.added(i), make


def relabelled(site: Site) -> Found:
    """LBL: a port is taken for split another way, or a collective moves another dimension."""
    for k, port in enumerate(site.plan.inputs):
        for layout in _confused(site, port):
            faulty = site.reading(port.local)
            yield f"{port.name} read as {layout}", faulty, partial(_input_as, site, k, layout)
    for i, node in site.numbered("AllGather", "ReduceScatter", "LocalSlice", "AllToAll"):
        shape = site.type(node.inputs[0]).shape
        for dim in range(len(shape)):
            if dim != node.attributes["dim"] and dim != node.attributes.get("to_dim"):
                faulty = site.reading(node.outputs[0]) | {node.name}
                yield f"{node.op} along {dim}", faulty, partial(site.instead, i, _with(node, dim=dim))


def _confused(site: Site, port: Port) -> Iterator[tuple]:
    """Other layouts with the same local shape."""
    for layout in itertools.permutations(port.layout):
        if layout != port.layout:
            yield layout
    rank = port.type.rank
    for i, placement in enumerate(port.layout):
        if isinstance(placement, Shard):
            for d in range(rank):
                if d != placement.dim:
                    yield (*port.layout[:i], Shard(d), *port.layout[i + 1 :])


def _input_as(site: Site, k: int, layout: tuple) -> Plan:
    """The port, and the state that it belongs to, in another layout."""
    port = site.plan.inputs[k]
    pairs = dict(site.plan.state)
    inputs = (*site.plan.inputs[:k], replace(port, layout=layout), *site.plan.inputs[k + 1 :])
    outputs = tuple(
        replace(p, layout=layout) if p.name == pairs.get(port.name) else p for p in site.plan.outputs
    )
    return replace(site.plan, inputs=inputs, outputs=outputs)


def permuted(site: Site) -> Found:
    """PERM: blocks in a wrong order of ranks."""
    for i, node in site.numbered("AllGather"):
        dim, ways = node.attributes["dim"], site.ways(node)
        if site.ordered(node.outputs[0], dim):
            yield "ranks rotated", site.added(i), partial(_rotated, site, i, dim, ways)
    for i, node in site.numbered("LocalSlice", "ReduceScatter"):
        dim, axis = node.attributes["dim"], node.attributes["axis"]
        if site.ordered(node.outputs[0], dim):
            yield "ranks rotated", site.added(i), partial(_blocks_rotated, site, i, dim, axis)


def _rotated(site: Site, i: int, dim: int, ways: int) -> Plan:
    """The first block of the result of node i comes last."""
    node = site.plan.nodes[i]
    shape = site.type(node.outputs[0]).shape
    raw, head, tail = (f"{node.outputs[0]}{end}" for end in (RAW, "~head", "~tail"))
    block = shape[dim] // ways
    first, rest = _cut(shape, dim, 0, block), _cut(shape, dim, block, shape[dim])
    return site.instead(
        i,
        replace(node, outputs=(raw,)),
        _node(f"{node.name}~0", first[0], (raw,), head, first[1]),
        _node(f"{node.name}~1", rest[0], (raw,), tail, rest[1]),
        _node(f"{node.name}~2", "Concat", (tail, head), node.outputs[0], {"axis": dim}),
    )


def _blocks_rotated(site: Site, i: int, dim: int, axis: str) -> Plan:
    """Every device takes the block of its neighbour."""
    node = site.plan.nodes[i]
    gathered = site.behind(
        i, ("AllGather", {"axis": axis, "dim": dim}), ("LocalSlice", {"axis": axis, "dim": dim})
    )
    at = next(k for k, n in enumerate(gathered.nodes) if n.name == f"{node.name}~0")
    return _rotated(Site(gathered), at, dim, site.plan.mesh[axis].size)


def offset(site: Site) -> Found:
    """OFF: indices that start somewhere else."""
    for i, node in site.numbered("LocalSlice"):
        dim, shape = node.attributes["dim"], site.type(node.inputs[0]).shape
        op, attributes = _cut(shape, dim, 0, shape[dim] // site.ways(node))
        changed = _node(node.name, op, node.inputs, node.outputs[0], attributes)
        faulty = site.reading(node.outputs[0]) | {node.name}
        yield "every device takes the first block", faulty, partial(site.instead, i, changed)
    for i, node in site.numbered("Slice"):
        starts, ends = node.attributes["starts"], node.attributes["ends"]
        shape = site.type(node.inputs[0]).shape
        for d, step in itertools.product(range(len(starts)), (1, -1)):
            if starts[d] + step >= 0 and ends[d] + step <= shape[d]:
                move = [int(k == d) * step for k in range(len(starts))]
                changed = _with(
                    node,
                    starts=tuple(a + b for a, b in zip(starts, move, strict=True)),
                    ends=tuple(a + b for a, b in zip(ends, move, strict=True)),
                )
                faulty = site.reading(node.outputs[0]) | {node.name}
                yield f"slice moved by {step}", faulty, partial(site.instead, i, changed)
    for i, node in site.numbered("LocalIndices"):
        changed = _with(node, rows=node.attributes["rows"] // site.ways(node))
        yield (
            "local rows for all rows",
            site.reading(node.outputs[0]) | {node.name},
            partial(site.instead, i, changed),
        )


def laid_out(site: Site) -> Found:
    """LAY: halves of a dimension interleaved where they should follow each other."""
    for i, node in _floating(site):
        shape = site.type(node.outputs[0]).shape
        for d, size in enumerate(shape):
            parts = next((k for k in (2, 3) if size % k == 0 and size > k), None)
            if parts and site.ordered(node.outputs[0], d):
                split = (*shape[:d], parts, size // parts, *shape[d + 1 :])
                perm = [*range(d), d + 1, d, *range(d + 2, len(split))]
                chain = (
                    ("Reshape", {"shape": split}),
                    ("Transpose", {"perm": tuple(perm)}),
                    ("Reshape", {"shape": shape}),
                )
                yield f"dimension {d} interleaved", site.added(i), partial(site.behind, i, *chain)


def reordered(site: Site) -> Found:
    """ORD: operands in another order; axes of a transposition."""
    for i, node in site.numbered("Sub", "Div", "Pow", "MatMul", "Concat", "Less", "Greater", "Gemm"):
        types = [site.type(name) for name in node.inputs]
        if node.inputs[::-1] != node.inputs and types == types[::-1]:
            faulty = site.reading(node.outputs[0]) | {node.name}
            changed = replace(node, inputs=node.inputs[::-1])
            yield "operands exchanged", faulty, partial(site.instead, i, changed)
    for i, node in site.numbered("Transpose"):
        perm = node.attributes["perm"]
        for a, b in itertools.pairwise(range(len(perm))):
            changed = list(perm)
            changed[a], changed[b] = perm[b], perm[a]
            faulty = site.reading(node.outputs[0]) | {node.name}
            yield "axes exchanged", faulty, partial(site.instead, i, _with(node, perm=tuple(changed)))


COMMUTING = ("Mul", "Pow")  # x * g is g * x; the derivative of a square is, too


def wrong_adjoint(site: Site) -> Found:
    """ADJ: the derivative for another operand, at another point, or of the other kind of move."""
    for i, node in site.numbered("Vjp", "Adjoint"):
        faulty = site.reading(node.outputs[0]) | {node.name}
        operands = len(node.inputs) - (node.op == "Vjp")
        for k in range(max(operands, 2)):
            if k != node.attributes["operand"]:
                changed = _with(node, operand=k)
                yield f"derivative for operand {k}", faulty, partial(site.instead, i, changed)
        pairs = itertools.combinations(range(len(node.inputs)), 2)
        for a, b in pairs if node.attributes["of"] not in COMMUTING else ():
            if node.inputs[a] != node.inputs[b] and site.type(node.inputs[a]) == site.type(node.inputs[b]):
                inputs = list(node.inputs)
                inputs[a], inputs[b] = inputs[b], inputs[a]
                changed = replace(node, inputs=tuple(inputs))
                yield "operands exchanged", faulty, partial(site.instead, i, changed)
    for i, node in site.numbered("ReduceScatter"):
        changed = _node(node.name, "LocalSlice", node.inputs, node.outputs[0], node.attributes)
        faulty = site.reading(node.outputs[0]) | {node.name}
        yield "cut for scattered sum", faulty, partial(site.instead, i, changed)


def stale(site: Site) -> Found:
    """STALE: another tensor of the same type that was there before, or a state that is never updated."""
    by_type: dict[TensorType, list[str]] = {}
    for port in site.plan.inputs:
        by_type.setdefault(site.type(port.local), []).append(port.local)
    for i, node in site.numbered():
        for k, name in enumerate(node.inputs):
            older = [t for t in by_type.get(site.type(name), ()) if t != name]
            if older and site.type(name).shape:
                other = older[(i + k) % len(older)]
                changed = replace(node, inputs=(*node.inputs[:k], other, *node.inputs[k + 1 :]))
                faulty = frozenset({node.name}) | site.reading(node.outputs[0])
                yield f"reads {other} for {name}", faulty, partial(site.instead, i, changed)
        for name in node.outputs:
            by_type.setdefault(site.type(name), []).append(name)
    old = {port.name: port.local for port in site.plan.inputs}
    for k, port in enumerate(site.plan.outputs):
        before = next((old[a] for a, b in site.plan.state if b == port.name), None)
        if before and before != port.local:
            outputs = (*site.plan.outputs[:k], replace(port, local=before), *site.plan.outputs[k + 1 :])
            faulty = frozenset({site.maker.get(port.local, ""), site.maker.get(before, "")}) | site.reading(
                before
            )
            yield f"{port.name} not updated", faulty, partial(replace, site.plan, outputs=outputs)


_ALMOST = {
    "Less": "LessOrEqual", "LessOrEqual": "Less", "Greater": "GreaterOrEqual", "GreaterOrEqual": "Greater",
    "And": "Or", "Or": "And", "Max": "Min", "Min": "Max",
}  # fmt: skip


def masked(site: Site) -> Found:
    """MASK: a condition that is almost the right one."""
    for i, node in site.numbered(*_ALMOST):
        faulty = site.reading(node.outputs[0]) | {node.name}
        yield (
            f"{_ALMOST[node.op]} for {node.op}",
            faulty,
            partial(site.instead, i, replace(node, op=_ALMOST[node.op])),
        )
    for i, node in site.numbered("Where"):
        condition, a, b = node.inputs
        faulty = site.reading(node.outputs[0]) | {node.name}
        yield "branches exchanged", faulty, partial(site.instead, i, replace(node, inputs=(condition, b, a)))
    for i, node in site.numbered("Not"):
        yield "condition not negated", site.reading(node.outputs[0]), partial(site.renamed, i)
    for i, node in site.numbered("Trilu"):
        changed = _with(node, k=node.attributes["k"] + 1)
        yield (
            "one diagonal too many",
            site.reading(node.outputs[0]) | {node.name},
            partial(site.instead, i, changed),
        )


_NUMBERS: Mapping[str, Callable[[object], object]] = {
    "epsilon": lambda x: 10 * x,  # type: ignore[operator]
    "axes": lambda axes: tuple(axes)[:-1] or (),  # type: ignore[call-overload]
    "alpha": lambda x: x + 0.5,  # type: ignore[operator]
    "threshold": lambda x: x / 2,  # type: ignore[operator]
    "value": lambda x: x + 1,  # type: ignore[operator]
    "keepdims": lambda x: 1 - x,  # type: ignore[operator]
}


def other_constant(site: Site) -> Found:
    """CST: another scalar, another attribute, a sum for a mean."""
    for name, value in site.plan.constants.items():
        if value.dtype.kind == "f" and math.isfinite(value.sum()) and abs(value).max(initial=0) < 1e30:
            changed = {**site.plan.constants, name: (value * 1.5 + 0.25).astype(value.dtype)}
            local = next((p.local for p in site.plan.inputs if p.name == name), name)
            yield f"constant {name}", site.reading(local), partial(replace, site.plan, constants=changed)
    for i, node in site.numbered():
        faulty = site.reading(node.outputs[0]) | {node.name}
        for attribute in _NUMBERS.keys() & node.attributes.keys():
            value = _NUMBERS[attribute](node.attributes[attribute])
            if value != node.attributes[attribute]:
                changed = _with(node, **{attribute: value})
                yield f"{node.op} with {attribute} {value}", faulty, partial(site.instead, i, changed)
    for i, node in site.numbered("ReduceSum", "ReduceMean"):
        op = "ReduceMean" if node.op == "ReduceSum" else "ReduceSum"
        faulty = site.reading(node.outputs[0]) | {node.name}
        yield f"{op} for {node.op}", faulty, partial(site.instead, i, replace(node, op=op))


OPERATORS: dict[str, Callable[[Site], Found]] = {
    "DEL": deleted,
    "INS": inserted,
    "GRP": other_group,
    "SCL": scaled,
    "LBL": relabelled,
    "PERM": permuted,
    "OFF": offset,
    "LAY": laid_out,
    "ORD": reordered,
    "ADJ": wrong_adjoint,
    "STALE": stale,
    "MASK": masked,
    "CST": other_constant,
}
