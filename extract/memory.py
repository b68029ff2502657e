"""What one device holds: of a program by liveness, and of any choice at one moment of the program.

    memory = memory_use(plan)            bytes that stay, the most that is alive at once, and at which node
    problem = held_at(model, tensor)     its memory is a lower bound on what is alive while the tensor is computed
    problem = held_at_the_turn(model)    or at the end of the forward pass

The last two are linear in the choice, so the extraction can bound them; whatever fits in the limit fits there, too.
Nodes are in the order of the graph in every plan, so what is alive at a moment is known but for the layouts:
    leaves     state in its layout, old or new
    keepers    what was kept before and is read from then on, in its layout
    operator   what it reads and leaves, each once; of a leaf or of what is kept only what is more than the smallest
               part, which is all that those are counted with then (both could be one buffer)
    waiting    what its own phase made and still reads: the smallest part, in whatever layout
Copies made for several readers are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..planfile import Plan
from .build import Model, Part
from .problem import ABSENT, Operator, Problem


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: what stays for the whole step, and the most that is alive at once (with it).

    `moment` is the number of the node at which that is, -1 where there is none.
    """

    parameters: int
    inputs: int
    peak: int
    moment: int


def memory_use(plan: Plan) -> Memory:
    """Liveness over the program's order: a value is held from its node to its last reader; leaves stay.

    State goes where its next value is there and nothing reads it any more: that is donated its memory.
    """
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
    moment = -1
    leaves = {port.local for port in plan.inputs} | set(plan.constants)
    replaced = _replaced(plan, last)
    for i, node in enumerate(plan.nodes):
        alive += sum(sizes[name] for name in node.outputs)
        if alive > peak:
            peak, moment = alive, i
        ended = {
            name for name in (*node.inputs, *node.outputs) if last.get(name, i) == i and name not in leaves
        }
        alive -= sum(sizes[name] for name in ended) + sum(sizes[name] for name in replaced.get(i, ()))
    return Memory(weights, fed, peak, moment)


def _replaced(plan: Plan, last: Mapping[str, int]) -> dict[int, list[str]]:
    """Which leaves end after which node because their next values are there; not those that no node updates."""
    made = {name: i for i, node in enumerate(plan.nodes) for name in node.outputs}
    old = {port.name: port.local for port in plan.inputs}
    new = {port.name: port.local for port in plan.outputs}
    ended = defaultdict(list)
    for name, following in plan.state:
        if new[following] in made:
            ended[max(made[new[following]], last.get(old[name], -1))].append(old[name])
    return ended


def held_at_the_turn(model: Model) -> Problem:
    """The problem that counts leaves and what the forward pass leaves for later, but nothing that is made later."""
    operators = list(model.problem.operators)
    for i in model.keeper.values():
        if operators[i].phase > 0:
            operators[i] = _weightless(operators[i])
    return replace(model.problem, operators=tuple(operators))


def _weightless(operator: Operator) -> Operator:
    return replace(operator, memory=np.zeros_like(operator.memory))


def held_at(model: Model, tensor: str) -> Problem:
    """The model's problem with the bytes that are alive while `tensor` is computed, or fewer; no limit."""
    operators = list(model.problem.operators)
    moment = next(i for i, part in enumerate(model.parts) if part.tensor == tensor)
    alive = _alive(model, moment)
    kept = {name: model.keeper[name] for name in alive if name in model.keeper}
    stays = {name: i for i, name in enumerate(model.graph.leaves)} | kept
    for i in set(model.keeper.values()) - set(kept.values()):
        operators[i] = _weightless(operators[i])
    part = model.parts[moment]
    read = {name for way in part.ways for name in way.operands}
    for name in read & set(stays):
        operator = operators[stays[name]]
        smallest = model.local_bytes(name).min()
        operators[stays[name]] = replace(operator, memory=np.where(operator.out == ABSENT, 0.0, smallest))
    own = operators[model.maker[tensor]]
    waiting = [name for name in alive if name not in stays and name not in read]
    least = sum(model.local_bytes(name).min() for name in waiting) if _certain(model) else 0.0
    operators[model.maker[tensor]] = replace(own, memory=_own(model, part, own, stays) + least)
    return replace(model.problem, operators=tuple(operators))


def _alive(model: Model, moment: int) -> list[str]:
    """Computed tensors that are made before the moment and certainly read at it or later.

    Of what is kept: by a later phase than its own.
    """
    operators = model.problem.operators
    phase = {part.tensor: operators[model.maker[part.tensor]].phase for part in model.parts}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    readers = [
        (i, phase[part.tensor], name)
        for i, part in enumerate(model.parts)
        for way in part.ways
        for name in way.operands
    ]
    readers += [(len(model.parts), model.last_phase, name) for name in model.graph.outputs]
    for i, when, name in readers:
        if name in phase and (name not in model.keeper or when > phase[name]):
            first.setdefault(name, i)
            last[name] = i
    until = last if _certain(model) else first
    made = {part.tensor: i for i, part in enumerate(model.parts)}
    return [name for name, i in made.items() if i < moment <= until.get(name, -1)]


def _certain(model: Model) -> bool:
    """Is every tensor computed? Not where algebra offers another way around it."""
    return all(len(part.ways) == 1 for part in model.parts)


def _own(model: Model, part: Part, operator: Operator, stays: Mapping[str, int]) -> NDArray[np.float64]:
    """Bytes that an operator's strategies read and leave, but for the least of what is counted elsewhere."""
    held = np.where(operator.out == ABSENT, 0.0, model.local_bytes(part.tensor)[operator.out])
    seen: set[str] = set()
    for name, reads in zip((n for way in part.ways for n in way.operands), operator.reads.T, strict=True):
        if name not in seen:  # an operand that is read twice may be one copy
            seen.add(name)
            sizes = model.local_bytes(name)
            held = held + np.where(
                reads == ABSENT, 0.0, sizes[reads] - (sizes.min() if name in stays else 0.0)
            )
    return held
