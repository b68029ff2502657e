"""The extraction problem: one strategy per operator, conversions between the labels they leave and read.

    minimise   sum_o cost_o(s_o) + sum_t sum_{q read by some consumer of t, q != p_t} d_t(p_t, q)

A *tensor* t has labels 0..L-1 (its placements) and a price table `d_t[p, q]` (seconds of the cheapest chain of
collectives, 0 on the diagonal, inf where no chain exists). A copy is paid once however many consumers read it.
An *operator* has one output tensor (or none: a graph output's sink), reads tensors through arcs, and owns
strategies: (label of the output, label read on each arc, seconds, bytes held). A tensor has exactly one producer.
`memory_limit` bounds the sum of the chosen strategies' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value with `len(conversion)` labels; `conversion[p, q]` seconds turn label p into label q."""

    name: str
    conversion: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Operator:
    """One choice: strategy s leaves label `out[s]`, reads `reads[s, a]` on arc a, costs `cost[s]`, holds `memory[s]`."""

    name: str
    output: int | None
    arcs: tuple[int, ...]
    out: NDArray[np.int32]
    reads: NDArray[np.int32]
    cost: NDArray[np.float64]
    memory: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators in topological order over tensors; arcs and outputs index `tensors`."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    memory_limit: float = np.inf

    def consumers(self) -> list[list[tuple[int, int]]]:
        """For each tensor, its (operator, arc) readers in order."""
        readers: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        for o, operator in enumerate(self.operators):
            for a, t in enumerate(operator.arcs):
                readers[t].append((o, a))
        return readers

    def cost(self, choice: NDArray[np.int64]) -> float:
        """The price of a complete choice, recomputed from scratch; inf if a conversion does not exist."""
        total = sum(float(o.cost[s]) for o, s in zip(self.operators, choice, strict=True))
        label = {o.output: int(o.out[s]) for o, s in zip(self.operators, choice, strict=True) if o.output is not None}
        for t, readers in enumerate(self.consumers()):
            wanted = {int(self.operators[o].reads[choice[o], a]) for o, a in readers}
            total += sum(float(self.tensors[t].conversion[label[t], q]) for q in sorted(wanted))
        return total

    def memory(self, choice: NDArray[np.int64]) -> float:
        """Bytes that the chosen strategies hold."""
        return sum(float(o.memory[s]) for o, s in zip(self.operators, choice, strict=True))


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
