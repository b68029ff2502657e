"""From a choice of strategies to the explicit per-device program, and what it sends and holds.

Every tensor is computed once, in its strategy's layout, under the name `tensor@layout`; a consumer that reads another
layout gets a copy made by the cheapest chain of collectives, one chain per (tensor, layout). Nodes are in the order of
the graph on every device, so collectives meet in the same order everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..mesh import Layout, format_layout
from ..planfile import Plan, Port
from ..program import Node, TensorType
from ..rewrite.collectives import infer_local
from ..rewrite.graph import Graph
from ..rewrite.kinds import Application
from ..rewrite.operators import OPERATORS
from ..rewrite.space import Strategy
from ..rewrite.terms import RESULT, Head, decode
from .build import Model
from .cost import traffic

EMBEDDED_CONSTANT_BYTES = 1 << 20  # larger folded constants are recomputed from the model


@dataclass
class _Program:
    """The program under construction."""

    model: Model
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)
    copies: dict[tuple[str, int], str] = field(default_factory=dict)  # (tensor, label) -> local name

    def step(self, head: Head, operands: Sequence[str], name: str, origin: str) -> str:
        """Append one local operation that computes `name`."""
        result = infer_local(head, tuple(self.types[o] for o in operands), self.model.mesh)
        op, attributes, domain = decode(head)
        outputs: tuple[str, ...] = (name,)
        if op == "Shift":
            op, domain, operands = "Add", "", (*operands, self._scalar(attributes.pop("value"), result.dtype))
        elif not domain and OPERATORS[op].outputs > 1:
            which = attributes.pop(RESULT)
            outputs = tuple(name if i == which else f"{name}/unused{i}" for i in range(OPERATORS[op].outputs))
            results = OPERATORS[op].infer(attributes, tuple(self.types[o] for o in operands))
            self.types.update(zip(outputs, results, strict=True))
        self.types[name] = result
        self.nodes.append(
            Node(f"{origin}#{len(self.nodes)}", op, tuple(operands), outputs, attributes, domain)
        )
        return name

    def _scalar(self, value: float, dtype: str) -> str:
        name = f"scalar/{dtype}/{value!r}"
        self.constants[name] = np.array(value, dtype=dtype)
        self.types[name] = TensorType((), dtype)
        return name

    def copy(self, tensor: str, label: int, origin: str, have: Mapping[str, int]) -> str:
        """The local name of a tensor in a layout, converted if it is not there yet."""
        if (tensor, label) not in self.copies:
            conversions = self.model.conversions[self.model.types[tensor]]
            current = self.copies[tensor, have[tensor]]
            target = local_name(tensor, conversions.layouts[label])
            chain = conversions.chain(have[tensor], label)
            for i, move in enumerate(chain):
                last = i == len(chain) - 1
                step = target if last else f"{local_name(tensor, conversions.layouts[move.target])}>{target}"
                current = self.step(move.head, (current,), step, origin)
                self.rules.update(move.rules)
            self.copies[tensor, label] = current
        return self.copies[tensor, label]

    def compute(
        self, tensor: str, application: Application, strategy: Strategy, have: Mapping[str, int]
    ) -> None:
        """Append a strategy's steps: the tensor in its layout, from its operands in theirs."""
        name = local_name(tensor, self.model.conversions[self.model.types[tensor]].layouts[strategy.out])
        operands = [
            self.copy(operand, label, application.node, have) if label >= 0 else ""
            for operand, label in zip(application.operands, strategy.reads, strict=True)
        ]
        results: list[str] = []
        for j, step in enumerate(strategy.steps):
            arguments = [results[k] if k >= 0 else operands[~k] for k in step.operands]
            last = j == len(strategy.steps) - 1
            results.append(self.step(step.head, arguments, name if last else f"{name}/{j}", application.node))
        self.rules.update((*strategy.rules, *application.rules))
        self.copies[tensor, strategy.out] = name


def local_name(tensor: str, layout: Layout) -> str:
    """`h@S0,R`: what a tensor in a layout is called in the program."""
    return f"{tensor}@{format_layout(layout)}"


def emit(model: Model, choice: NDArray[np.int64]) -> tuple[Plan, frozenset[str]]:
    """The plan of a choice (without metadata), and the names of the rules that it rests on."""
    graph, mesh, problem = model.graph, model.mesh, model.problem
    program = _Program(model)
    have = {
        o.name: int(o.out[s]) for o, s in zip(problem.operators, choice, strict=True) if o.output is not None
    }
    inputs = [_port(name, kind, model, have[name]) for name, kind in _leaves(graph)]
    for port in inputs:
        program.copies[port.name, have[port.name]] = port.local
        program.types[port.local] = TensorType(
            mesh.local_shape(port.type.shape, port.layout), port.type.dtype
        )
    for i, part in enumerate(model.parts):
        if taken := model.taken(i, choice):
            program.compute(part.tensor, *taken, have)
    outputs = []
    for name, operator, s in zip(
        graph.outputs, problem.operators[-len(graph.outputs) :], choice[-len(graph.outputs) :], strict=True
    ):
        label = int(operator.reads[s, 0])
        local = program.copy(name, label, f"output {name}", have)
        outputs.append(
            Port(
                name, "output", model.types[name], model.conversions[model.types[name]].layouts[label], local
            )
        )
    constants = {
        n: v for n, v in graph.constants.items() if v.nbytes <= EMBEDDED_CONSTANT_BYTES
    } | program.constants
    plan = Plan(mesh, tuple(inputs), tuple(outputs), tuple(program.nodes), program.types, constants)
    return plan, frozenset(program.rules)


def _leaves(graph: Graph) -> list[tuple[str, str]]:
    return [
        *((name, "input") for name in graph.inputs),
        *((name, "parameter") for name in graph.parameters),
        *((name, "constant") for name in graph.constants),
    ]


def _port(name: str, kind: str, model: Model, label: int) -> Port:
    type_ = model.types[name]
    layout = model.conversions[type_].layouts[label]
    return Port(name, kind, type_, layout, local_name(name, layout))


def collective_table(plan: Plan) -> list[dict[str, object]]:
    """Collectives by kind and axis: how many, bytes sent per device, payload bytes."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for node in plan.nodes:
        if node.is_collective and (
            sends := traffic(node.op, node.attributes, plan.types[node.inputs[0]], plan.mesh)
        ):
            row = totals[sends.kind, sends.axis]
            row[0] += 1
            row[1] += sends.sent
            row[2] += sends.payload
    return [
        {"kind": kind, "axis": axis, "count": count, "bytes": sent, "payload_bytes": payload}
        for (kind, axis), (count, sent, payload) in sorted(totals.items())
    ]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: what stays for the whole step, and the most that is alive at once (with it)."""

    parameters: int
    inputs: int
    peak: int


def memory_use(plan: Plan) -> Memory:
    """Liveness over the program's order: a value is held from its node to its last reader; leaves stay."""
    last: dict[str, int] = {}
    for i, node in enumerate(plan.nodes):
        for name in node.inputs:
            last[name] = i
    for port in plan.outputs:
        last[port.local] = len(plan.nodes)
    sizes = {name: type_.bytes for name, type_ in plan.types.items()}
    weights = sum(sizes[p.local] for p in plan.inputs if p.kind != "input")
    fed = sum(sizes[p.local] for p in plan.inputs if p.kind == "input")
    alive = peak = weights + fed
    leaves = {port.local for port in plan.inputs} | set(plan.constants)
    for i, node in enumerate(plan.nodes):
        alive += sum(sizes[name] for name in node.outputs)
        peak = max(peak, alive)
        ended = {
            name for name in (*node.inputs, *node.outputs) if last.get(name, i) == i and name not in leaves
        }
        alive -= sum(sizes[name] for name in ended)
    return Memory(weights, fed, peak)
