"""Random legal choices: every conversion that they need exists. For tests of what plans mean.

In: a Problem, a NumPy generator, and optionally weights per operator's strategies.  Out: a choice.
Operators choose in the problem's order, each trying its strategies in a random order. Heavier ones tend to
come first: the keys are log weight + Gumbel noise, so the first is drawn in proportion to the weights
(0 comes last).
A strategy must reach every label it reads and leave each consumer a strategy that can still read it; state has
chosen what it reads before that is made, and its producer must leave a label from which it can be had.
Backtracking is bounded; then the 0/1 program with random costs decides. Memory limits are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .problem import Infeasible, Operator, Problem, Tensor, priced_with_absent
from .referee import optimum

Choice = NDArray[np.int64]


def random_choice(
    problem: Problem, rng: np.random.Generator, prefer: Sequence[NDArray[np.float64]] | None = None
) -> Choice:
    """A random choice with finite cost; the same generator state gives the same choice."""
    orders = [_order(o, rng, None if prefer is None else prefer[i]) for i, o in enumerate(problem.operators)]
    choice = _Sampler(problem, orders).run(budget=50 * len(orders) + 1000)
    return choice if choice is not None else _by_program(problem, orders)


def _order(operator: Operator, rng: np.random.Generator, weights: NDArray[np.float64] | None) -> Choice:
    """The operator's strategies of finite cost in the order in which they are tried."""
    noise = rng.gumbel(size=len(operator.cost))
    heavy = np.ones(len(noise), dtype=bool)
    if weights is not None:
        heavy = np.asarray(weights) > 0
        noise += np.log(np.where(heavy, weights, 1.0))
    order = np.lexsort((-noise, ~heavy))
    return order[np.isfinite(operator.cost[order])]


class _Sampler:
    """Depth-first choice with one step of look-ahead at each operator's consumers."""

    def __init__(self, problem: Problem, orders: list[Choice]) -> None:
        self.problem, self.orders = problem, orders
        tables: dict[int, NDArray[np.bool_]] = {}
        for t in problem.tensors:
            if id(t.conversion) not in tables:
                tables[id(t.conversion)] = np.isfinite(priced_with_absent(t.conversion))
        self.reach = [tables[id(t.conversion)] for t in problem.tensors]
        self.label: dict[int, int] = {}  # of the tensors whose producers have chosen
        self.choice = np.zeros(len(orders), dtype=np.int64)

    def run(self, budget: int) -> Choice | None:
        """The first legal choice in the given orders, or None after `budget` steps."""
        count = len(self.orders)
        tried = [iter(())] * count
        o, fresh = 0, True
        for _ in range(budget):
            if o < 0:
                raise Infeasible("no choice has all its conversions")
            if o == count:
                return self.choice
            if fresh:
                tried[o] = iter(self._legal(o))
            s = next(tried[o], None)
            fresh = s is not None
            self._set(o, s)
            o += 1 if fresh else -1
        return None

    def _set(self, o: int, s: int | None) -> None:
        """Operator o chooses a strategy, or none."""
        operator = self.problem.operators[o]
        if s is not None:
            self.choice[o] = s
        if operator.output is not None:
            self.label.pop(operator.output, None)
            if s is not None:
                self.label[operator.output] = int(operator.out[s])

    def _legal(self, o: int) -> Choice:
        """The operator's strategies, in order, that can read what was made and be read by what is to come."""
        operator, order = self.problem.operators[o], self.orders[o]
        order = order[self._readable(o, order, self.label)]
        t = operator.output
        if t is None:
            return order
        fits = np.ones(len(order), dtype=bool)
        for label in np.unique(operator.out[order]):
            seen = {**self.label, t: int(label)}
            readers = sorted({r for r, _ in self.problem.consumers()[t]})
            if not all(self._readable(r, self._open(r, o), seen).any() for r in readers):
                fits &= operator.out[order] != label
        return order[fits]

    def _open(self, reader: int, now: int) -> Choice:
        """The strategies that a reader can still take while operator `now` chooses."""
        return self.choice[[reader]] if reader < now else self.orders[reader]

    def _readable(self, o: int, order: Choice, label: dict[int, int]) -> NDArray[np.bool_]:
        """Which strategies read only labels that can be had from those already made."""
        operator = self.problem.operators[o]
        fits = np.ones(len(order), dtype=bool)
        for a, t in enumerate(operator.arcs):
            if t in label:
                fits &= self.reach[t][label[t]][operator.reads[order, a]]
        return fits


def _by_program(problem: Problem, orders: list[Choice]) -> Choice:
    """The legal choice whose strategies come earliest in their orders."""
    operators = []
    for operator, order in zip(problem.operators, orders, strict=True):
        cost = np.full(len(operator.cost), np.inf)
        cost[order] = np.arange(len(order)) / max(len(order), 1)
        operators.append(replace(operator, cost=cost))
    tensors = [Tensor(t.name, np.where(np.isfinite(t.conversion), 0.0, np.inf)) for t in problem.tensors]
    return optimum(Problem(tuple(tensors), tuple(operators)))[0]
