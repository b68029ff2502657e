"""From a choice of strategies to the explicit per-device program, and what it sends.

Every tensor is computed once, in its strategy's layout, under the name `tensor@layout`; a consumer that reads another
layout gets a copy made by the cheapest chain of collectives, one chain per (tensor, layout, phase of a training step).
The copies of the second and third phase to make one end in `~1` and `~2`. A tensor that later phases read is brought
into the layout in which it is kept for them where it is made. Nodes are in the order of the graph on every device, so
collectives meet in the same order everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mesh import Layout, format_layout
from ..planfile import Plan, Port
from ..program import Node, TensorType
from ..rewrite.collectives import infer_local
from ..rewrite.kinds import Application
from ..rewrite.operators import OPERATORS
from ..rewrite.space import Strategy
from ..rewrite.terms import RESULT, Head, decode
from .build import Model
from .cost import traffic
from .problem import ABSENT

EMBEDDED_CONSTANT_BYTES = 1 << 20  # larger folded constants are recomputed from the model


@dataclass
class _Program:
    """The program under construction."""

    model: Model
    have: Mapping[str, int]  # tensor -> the label in which it is made
    kept: Mapping[
        str, tuple[int, int]
    ]  # tensor -> (the phase that makes it, the label in which later ones have it)
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)
    # (tensor, label) -> phase -> local name
    copies: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)

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

    def made(self, tensor: str) -> str:
        """The local name of a tensor as it is made."""
        return local_name(tensor, self.model.layout(tensor, self.have[tensor]))

    def home(self, tensor: str, phase: int) -> tuple[str, int]:
        """What a phase has of a tensor: its local name and label."""
        if tensor in self.kept and phase > self.kept[tensor][0]:
            made_in, label = self.kept[tensor]
            return self.copy(tensor, label, made_in, f"keep {tensor}"), label
        return self.made(tensor), self.have[tensor]

    def copy(self, tensor: str, label: int, phase: int, origin: str) -> str:
        """The local name of a tensor in a layout, converted if the phase has not done so yet."""
        home, current = self.home(tensor, phase)
        if label == current:
            return home
        copies = self.copies.setdefault((tensor, label), {})
        if phase not in copies:
            target = local_name(tensor, self.model.layout(tensor, label))
            if target in self.types:
                target += f"~{len(copies)}"
            copies[phase] = self.convert(tensor, home, current, label, target, origin)
        return copies[phase]

    def convert(self, tensor: str, home: str, current: int, label: int, target: str, origin: str) -> str:
        """Append the chain of collectives that makes `target` of `home`; returns `target`."""
        *before, final = self.model.conversions[self.model.types[tensor]].chain(current, label)
        for move in before:
            between = f"{local_name(tensor, self.model.layout(tensor, move.target))}>{target}"
            home = self.step(move.head, (home,), between, origin)
        for move in (*before, final):
            self.rules.update(move.rules)
        return self.step(final.head, (home,), target, origin)

    def compute(self, tensor: str, application: Application, strategy: Strategy, phase: int) -> None:
        """Append a strategy's steps: the tensor in its layout, from its operands in theirs."""
        name = self.made(tensor)
        operands = [
            self.copy(operand, label, phase, application.node) if label >= 0 else ""
            for operand, label in zip(application.operands, strategy.reads, strict=True)
        ]
        results: list[str] = []
        for j, step in enumerate(strategy.steps):
            arguments = [results[k] if k >= 0 else operands[~k] for k in step.operands]
            last = j == len(strategy.steps) - 1
            results.append(self.step(step.head, arguments, name if last else f"{name}/{j}", application.node))
        self.rules.update((*strategy.rules, *application.rules))


def local_name(tensor: str, layout: Layout) -> str:
    """`h@S0,R`: what a tensor in a layout is called in the program."""
    return f"{tensor}@{format_layout(layout)}"


def emit(model: Model, choice: NDArray[np.int64]) -> tuple[Plan, frozenset[str]]:
    """The plan of a choice (without metadata), and the names of the rules that it rests on."""
    graph, mesh, problem = model.graph, model.mesh, model.problem
    chosen = list(zip(problem.operators, choice, strict=True))
    have = {o.name: int(o.out[s]) for o, s in chosen if o.output is not None}
    keepers = {
        name: (problem.operators[i].phase, int(problem.operators[i].out[choice[i]]))
        for name, i in model.keeper.items()
    }
    program = _Program(model, have, {name: home for name, home in keepers.items() if home[1] != ABSENT})
    inputs = [
        Port(name, kind, model.types[name], model.layout(name, have[name]), program.made(name))
        for name, kind in graph.ports
    ]
    for port in inputs:
        program.types[port.local] = TensorType(
            mesh.local_shape(port.type.shape, port.layout), port.type.dtype
        )
    kept: list[str] = []
    for part in model.parts:
        if taken := model.taken(part, choice):
            phase = problem.operators[model.maker[part.tensor]].phase
            program.compute(part.tensor, *taken, phase)
            if part.tensor in program.kept:
                kept.append(program.home(part.tensor, phase + 1)[0])
    wanted = {new: have[name] for name, new in model.state}
    sinks = chosen[len(chosen) - len(model.sinks) :]
    wanted |= {name: int(o.reads[s, 0]) for name, (o, s) in zip(model.sinks, sinks, strict=True)}
    outputs = []
    for name in graph.outputs:
        local = program.copy(name, wanted[name], model.last_phase, f"output {name}")
        outputs.append(Port(name, "output", model.types[name], model.layout(name, wanted[name]), local))
    constants = {
        n: v for n, v in graph.constants.items() if v.nbytes <= EMBEDDED_CONSTANT_BYTES
    } | program.constants
    nodes, types = tuple(program.nodes), program.types
    plan = Plan(
        mesh, tuple(inputs), tuple(outputs), nodes, types, constants, state=model.state, kept=tuple(kept)
    )
    return plan, frozenset(program.rules)


def collective_table(plan: Plan) -> list[dict[str, Any]]:
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
