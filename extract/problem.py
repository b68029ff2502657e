"""The extraction problem: one strategy per operator, conversions between the labels they leave and read.

    minimise   sum_o cost_o(s_o) + sum_{t, phase} sum_{q that phase reads of t} d_t(p_t, q)     Problem.cost
    subject to sum_o memory_o(s_o) <= memory_limit                                            Problem.memory

A *tensor* t has labels 0..L-1 (its placements) and a price table `d_t[p, q]` (seconds of the cheapest chain
of collectives, 0 on the diagonal, inf where no chain exists). An *operator* has one output tensor (or none: a
graph output's sink), reads tensors through arcs in one *phase* (forward 0, backward 1, optimizer 2), and owns
strategies: (label of the output, label read on each arc, seconds, bytes held). A copy is paid once however many
consumers of the same phase read it; each further phase makes and pays its own, since none is kept for it.

A tensor has exactly one producer, which comes before its consumers. The exception is *state*, a parameter or an
optimizer's moment: its operator leaves the old value and reads the updated one, which is produced later, in the
same label (`Operator.may_be_state`). That closes the loop from one step to the next.

The label -1 (`ABSENT`) means "not there": a strategy with `reads[s, a] == -1` does not read arc a, one with
`out[s] == -1` does not compute its output, which is legal only if nobody reads it. `priced_with_absent` says
so as two more lines of the price table: d(p, absent) = 0, d(absent, q) = inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ABSENT = -1


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value with `len(conversion)` labels; `conversion[p, q]` seconds turn label p into label q."""

    name: str
    conversion: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Operator:
    """Strategy s leaves `out[s]`, reads `reads[s, a]` on arc a in `phase`, costs `cost[s]`, holds `memory[s]`."""

    name: str
    output: int | None
    arcs: tuple[int, ...]
    out: NDArray[np.int32]
    reads: NDArray[np.int32]
    cost: NDArray[np.float64]
    memory: NDArray[np.float64]
    phase: int = 0

    def __post_init__(self) -> None:
        count = len(self.cost)
        shapes = (self.out.shape, self.reads.shape, self.memory.shape)
        if count == 0 or shapes != ((count,), (count, len(self.arcs)), (count,)):
            raise ValueError(
                f"operator {self.name!r}: {count} costs and {len(self.arcs)} arcs, but out, reads and memory "
                f"have shapes {shapes}"
            )

    @property
    def may_be_state(self) -> bool:
        """Does it leave one tensor and read one other, in the same label?"""
        return self.output is not None and len(self.arcs) == 1 and bool((self.reads[:, 0] == self.out).all())


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators in topological order over tensors, but for what state reads; arcs and outputs index `tensors`."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    memory_limit: float = np.inf

    def __post_init__(self) -> None:
        made: set[int] = set()
        for operator in self.operators:
            missing = [self.tensors[t].name for t in operator.arcs if t not in made]
            if missing and not operator.may_be_state:
                raise ValueError(f"operator {operator.name!r} reads {missing} before their producer")
            if operator.output is None:
                continue
            name = self.tensors[operator.output].name
            if operator.output in operator.arcs:
                raise ValueError(f"operator {operator.name!r} reads its own output {name!r}")
            if operator.output in made:
                raise ValueError(f"tensor {name!r} has two producers")
            made.add(operator.output)
        if len(made) != len(self.tensors):
            raise ValueError(f"{len(self.tensors) - len(made)} tensors have no producer")

    @cached_property
    def producers(self) -> list[int]:
        """For each tensor, the operator that leaves it."""
        made = {operator.output: o for o, operator in enumerate(self.operators)}
        return [made[t] for t in range(len(self.tensors))]

    @cached_property
    def fans(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """For each (tensor, phase) that is read, the (operator, arc) readers who share its copies, in order."""
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for o, operator in enumerate(self.operators):
            for a, t in enumerate(operator.arcs):
                readers.setdefault((t, operator.phase), []).append((o, a))
        return dict(sorted(readers.items()))

    def fans_of(self, tensor: int | None) -> list[tuple[int, int]]:
        """The keys of `fans` that belong to a tensor."""
        return self._fans_of.get(tensor, [])

    @cached_property
    def _fans_of(self) -> dict[int | None, list[tuple[int, int]]]:
        keys: dict[int | None, list[tuple[int, int]]] = {}
        for key in self.fans:
            keys.setdefault(key[0], []).append(key)
        return keys

    def consumers(self) -> list[list[tuple[int, int]]]:
        """For each tensor, its (operator, arc) readers of all phases."""
        return [[r for key in self.fans_of(t) for r in self.fans[key]] for t in range(len(self.tensors))]

    @cached_property
    def neighbours(self) -> list[NDArray[np.int64]]:
        """For each operator, the others that make or read a tensor that it makes or reads."""
        sharers = [{maker} for maker in self.producers]
        for (t, _), readers in self.fans.items():
            sharers[t].update(o for o, _ in readers)
        tensors = [(*o.arcs, *(() if o.output is None else (o.output,))) for o in self.operators]
        return [
            np.array(sorted(set().union(*(sharers[t] for t in mine)) - {o}), dtype=np.int64)
            for o, mine in enumerate(tensors)
        ]

    def cost(self, choice: NDArray[np.int64]) -> float:
        """The price of a complete choice, recomputed from scratch; inf if a conversion does not exist."""
        total = sum(float(o.cost[s]) for o, s in zip(self.operators, choice, strict=True))
        label = {
            o.output: int(o.out[s])
            for o, s in zip(self.operators, choice, strict=True)
            if o.output is not None
        }
        for (t, _), readers in self.fans.items():
            wanted = {int(self.operators[o].reads[choice[o], a]) for o, a in readers} - {ABSENT}
            if wanted and label[t] == ABSENT:
                return np.inf
            total += sum(float(self.tensors[t].conversion[label[t], q]) for q in sorted(wanted))
        return total

    def memory(self, choice: NDArray[np.int64]) -> float:
        """Bytes that the chosen strategies hold."""
        return sum(float(o.memory[s]) for o, s in zip(self.operators, choice, strict=True))


def priced_with_absent(conversion: NDArray[np.float64]) -> NDArray[np.float64]:
    """The price table with a last row and column for `ABSENT`, so that indexing with -1 finds them."""
    size = len(conversion)
    table = np.full((size + 1, size + 1), np.inf)
    table[:size, :size] = conversion
    table[:, size] = 0.0
    return table


@dataclass(frozen=True, eq=False)
class Solution:
    """A choice with its cost, a proved lower bound on every choice's cost, and how it was found."""

    choice: NDArray[np.int64]
    cost: float
    bound: float
    stopped_by: str
    sweeps: int

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, 0 where the cost is 0."""
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.bound) / self.cost)


class Infeasible(Exception):
    """No choice fits; `smallest_memory` is the least limit for which one is known to."""

    def __init__(self, message: str, smallest_memory: float | None = None) -> None:
        super().__init__(message)
        self.smallest_memory = smallest_memory
