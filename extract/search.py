"""Find a cheap choice and prove how cheap any choice can be.

In: a Problem, and optionally `axes_of_labels[t][label, axis]`, a code of the label on each mesh axis.
Out: a Solution whose cost was recomputed with Problem.cost and whose bound is proved (see dual.py).

    plans      decode                            greedy in pass order, true prices behind, messages ahead
               descend                           best single-operator moves until none helps
               _Search.axis_search               free one mesh axis, then pairs, others as in the plan
    pruning    _Search.prune                     a strategy goes if each choice with it exceeds the plan
    driver     _Search.run                       six hard double sweeps, probe; four soft ones, probe; repeat
    survivors  _Search.finish                    the exact 0/1 program over the strategies left
    hard cases _Search.merge                     the exact program over known plans and likely strategies
    memory     _Limited                          a price nu on memory, by secant; bound B(nu) - nu M

Deterministic: ties go to the first strategy, HiGHS runs on one thread with a fixed seed, and limits count
sweeps and nodes unless `seconds` is given. Missing: joint moves where no axes
are named.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .dual import Dual, FanKey, Floats, Ints, PriceTables, Unit
from .problem import ABSENT, Infeasible, Problem, Solution
from .referee import Answer, pair_count, solve_program
from .trail import Trail, snapshot

HARD_SWEEPS = 6
SOFT_SWEEPS = 4  # between two probes
STILL_PROBES = 3  # without a better plan or bound end an ascent
TEMPERATURES = np.concatenate(
    [np.geomspace(0.5, 0.005, 16), np.geomspace(0.2, 0.002, 16)]
)  # of B / #operators
TINY_PAIRS = 3_500  # a 0/1 program of this many pairs takes a fraction of a second
MOST_PAIRS = 60_000  # and one of this many, some seconds
MERGED_PAIRS = 120_000  # strategies that the bound likes make a program that is nearly integral: seconds, too
MERGES = 3
MERGED_SLACKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of what a strategy worth keeping may cost more
MOST_PAIRS_LIMITED = 8_000  # with a memory row the branching is deeper
NODE_LIMIT, NODE_LIMIT_LIMITED = 2_000, 50
PRICE_STEPS = 14
PRICE_ROUNDS = 2
RELATIVE_DUST = 1e-9  # rounding of sums; differences below it are no differences

Progress = Callable[[str, float, float, int], None]  # phase, best cost, bound, double sweeps so far


def solve(
    problem: Problem,
    *,
    axes_of_labels: Sequence[NDArray[np.int64]] | None = None,
    gap: float = 1e-3,
    seconds: float | None = None,
    progress: Progress | None = None,
    trail: Trail | None = None,
) -> Solution:
    """The cheapest choice found and a bound; stops at cost - bound <= gap cost, or after `seconds`.

    `trail` is given the proof of the bound, as far as sweeps proved it: what branching adds is not in it.
    """
    start = time.monotonic()
    deadline = np.inf if seconds is None else start + seconds
    if not problem.operators:
        return Solution(np.zeros(0, np.int64), 0.0, 0.0, "gap", 0)
    limit = problem.memory_limit
    early = deadline if seconds is None or np.isinf(limit) else start + seconds / 2  # the rest is for fitting
    unlimited = dataclasses.replace(problem, memory_limit=np.inf)
    free = _Search(unlimited, axes_of_labels, gap, early, progress, trail)
    free.most_memory = limit
    solution = free.run()
    if problem.memory(solution.choice) <= limit:
        return solution
    return _Limited(problem, free, deadline).run()


# --- plans from messages ------------------------------------------------------------------------------------


def _read_costs(unit: Unit, payable: Mapping[FanKey, Floats]) -> Floats:
    """What each strategy's reads cost at the prices `payable[fan][column]`; one operator pays a copy once."""
    total = np.zeros(len(unit.kept))
    for j, read in enumerate(unit.reads):
        if read.fan.key not in payable:
            continue
        term = payable[read.fan.key][read.groups.index]
        for earlier in unit.reads[:j]:
            if earlier.fan is read.fan:
                term = np.where(earlier.groups.index == read.groups.index, 0.0, term)
        total += term
    return total


def decode(dual: Dual, forward: bool) -> Ints:
    """Choose in pass order: true prices behind, messages ahead. Good after a pass the other way."""
    payable: dict[FanKey, Floats] = {}  # of fans whose producer has chosen
    wanted = {key: np.zeros(len(fan.columns), dtype=bool) for key, fan in dual.fans.items()}
    local = np.zeros(len(dual.units), dtype=np.int64)
    order = range(len(dual.units)) if forward else reversed(range(len(dual.units)))
    for u in order:
        unit = dual.units[u]
        estimate = unit.cost + _read_costs(unit, payable)
        for made in unit.made:
            fan, ahead = made.fan, made.ahead(forward)
            estimate += fan.price[:, wanted[fan.key]].sum(1)[unit.out.index]
            if len(fan.x[ahead]):
                fan.pull_x(dual.work, 0.0)
                estimate += fan.x[ahead].sum(0)[unit.out.index]
        for read in unit.reads:
            if read.later == forward:
                read.fan.pull_y(read.k, dual.work, 0.0)
                estimate += read.fan.y[read.k][read.groups.index]
        s = local[u] = np.argmin(estimate)
        for made in unit.made:
            fan = made.fan
            payable[fan.key] = np.where(wanted[fan.key], 0.0, fan.price[unit.out.index[s]])
        for read in unit.reads:
            wanted[read.fan.key][read.groups.index[s]] = True
            if read.fan.key in payable:
                payable[read.fan.key][read.groups.index[s]] = 0.0
    return local


class _Place:
    """A complete choice with each fan's label and copies, so that one operator's moves can be priced."""

    def __init__(self, dual: Dual, local: Ints) -> None:
        self.dual, self.local = dual, local.copy()
        self.label: dict[FanKey, int] = {}
        self.readers = {key: np.zeros(len(fan.columns), dtype=np.int64) for key, fan in dual.fans.items()}
        self.memory = 0.0
        for unit, s in zip(dual.units, local, strict=True):
            self._put(unit, s, 1)

    def _put(self, unit: Unit, s: int, times: int) -> None:
        self.memory += times * float(unit.memory[s])
        for made in unit.made:
            self.label[made.fan.key] = unit.out.index[s]
        for read in unit.reads:
            self.readers[read.fan.key][read.groups.index[s]] += times

    def moves(self, u: int, cost: Floats) -> Floats:
        """The cost of everything that operator u's strategy touches, for each strategy."""
        unit = self.dual.units[u]
        total = cost.copy()
        for made in unit.made:
            read = self.readers[made.fan.key] > 0
            total += made.fan.price[:, read].sum(1)[unit.out.index]
        payable = {}
        for read in unit.reads:
            self.readers[read.fan.key][read.groups.index[self.local[u]]] -= 1
        for read in unit.reads:
            others = self.readers[read.fan.key] > 0
            payable[read.fan.key] = np.where(others, 0.0, read.fan.price[self.label[read.fan.key]])
        for read in unit.reads:
            self.readers[read.fan.key][read.groups.index[self.local[u]]] += 1
        return total + _read_costs(unit, payable)

    def move(self, u: int, s: int) -> None:
        """Let operator u use strategy s."""
        self._put(self.dual.units[u], self.local[u], -1)
        self._put(self.dual.units[u], s, 1)
        self.local[u] = s


def descend(
    dual: Dual, local: Ints, nu: float | None = None, limit: float = np.inf, rounds: int = 30
) -> Ints:
    """Improve cost + nu memory (the dual's nu by default) by single-operator moves that stay within the limit.

    An operator is looked at again when one that it shares a tensor with has moved, or memory was freed.
    """
    place = _Place(dual, local)
    costs = [unit.cost if nu is None else unit.price + nu * unit.memory for unit in dual.units]
    open_ = np.array([len(unit.kept) > 1 for unit in dual.units])
    waiting, refused = open_.copy(), np.zeros(len(open_), dtype=bool)
    for _ in range(rounds):
        for u in map(int, np.flatnonzero(waiting)):
            waiting[u] = False
            unit, now = dual.units[u], place.local[u]
            total = place.moves(u, costs[u])
            current = total[now]
            if limit < np.inf:
                heavy = place.memory - unit.memory[now] + unit.memory > limit
                refused[u] = heavy.any()
                total = np.where(heavy, np.inf, total)
            s = int(np.argmin(total))
            if total[s] < current - 1e-12 * abs(current):
                place.move(u, s)
                waiting[dual.problem.neighbours[u]] = True
                if unit.memory[s] < unit.memory[now]:
                    waiting |= refused
        waiting &= open_
        if not waiting.any():
            break
    return place.local


# --- the driver ---------------------------------------------------------------------------------------------


class _Search:
    """The search at one memory price nu; `best` fits in memory, `plan` is the best at the price nu."""

    def __init__(
        self,
        problem: Problem,
        axes: Sequence[NDArray[np.int64]] | None,
        gap: float,
        deadline: float,
        progress: Progress | None,
        trail: Trail | None = None,
    ) -> None:
        self.problem, self.axes, self.gap = problem, axes, gap
        self.deadline, self.progress, self.trail = deadline, progress, trail
        self.tables = PriceTables()
        self.nu, self.sweeps = 0.0, 0
        self.best: Ints | None = None
        self.best_cost, self.bound = np.inf, -np.inf
        self.value_bound = -np.inf  # of cost + nu memory
        self.most_memory = np.inf  # no use in looking on once the cheapest plan holds more
        self.dearest = _dearest(problem)
        self.plan: Ints | None = None
        self.plan_value = np.inf
        self.frontier: list[tuple[float, float, Ints]] = []  # (cost, memory, choice), none dominates another
        self._offered: set[bytes] = set()  # decoded choices already descended from, at this nu
        self._codes: dict[tuple[int, tuple[int, ...]], Ints] = {}

    # -- plans

    def record(self, choice: Ints) -> bool:
        """Keep a choice if it is the best that fits or the best at this price; say whether the latter."""
        cost = self.problem.cost(choice)
        if not np.isfinite(cost):
            return False
        memory = self.problem.memory(choice)
        if not any(c <= cost and m <= memory for c, m, _ in self.frontier):
            self.frontier = [f for f in self.frontier if f[0] < cost or f[1] < memory]
            self.frontier.append((cost, memory, choice.copy()))
        if memory <= self.problem.memory_limit and cost < self.best_cost:
            self.best, self.best_cost = choice.copy(), cost
        value = cost + self.nu * memory
        better = value < self.plan_value - RELATIVE_DUST * abs(self.plan_value)
        if better or self.plan is None:
            self.plan, self.plan_value = choice.copy(), value
            return True
        return False

    def offer(self, dual: Dual, local: Ints) -> bool:
        """Descend from a decoded choice and record it; say whether it is the best at this price."""
        key = dual.globally(local).tobytes()
        if key in self._offered:
            return False
        self._offered.add(key)
        return self.record(dual.globally(descend(dual, local)))

    def fit(self, dual: Dual) -> None:
        """With a memory limit: the best plan at this price, brought down to the limit, or up to it."""
        if np.isinf(self.problem.memory_limit) or self.plan is None or not self._kept(dual, self.plan):
            return
        local = dual.locally(self.plan)
        for dearer in (1.05, 1.15, 1.4, 2.0, 4.0, 16.0):
            if self.problem.memory(dual.globally(local)) <= self.problem.memory_limit:
                break
            local = descend(dual, local, self.nu * dearer)
        self.record(dual.globally(descend(dual, local, 0.0, self.problem.memory_limit)))

    @staticmethod
    def _kept(dual: Dual, choice: Ints) -> bool:
        return all(s in kept for s, kept in zip(choice, dual.keep, strict=True))

    # -- axis search

    def _agreeing(self, keep: Sequence[Ints], plan: Ints, free: tuple[int, ...]) -> list[Ints]:
        """The kept strategies that leave and read what the plan does on every axis that is not free."""
        result = []
        for operator, kept, s in zip(self.problem.operators, keep, plan, strict=True):
            fits = np.ones(len(kept), dtype=bool)
            columns = [(t, operator.reads[:, a]) for a, t in enumerate(operator.arcs)]
            if operator.output is not None:
                columns.append((operator.output, operator.out))
            for t, labels in columns:
                code = self._frozen_code(t, free)
                if labels[s] != ABSENT:
                    mine = labels[kept]
                    fits &= (code[mine] == code[labels[s]]) | (mine == ABSENT)
            result.append(kept[fits])
        return result

    def _frozen_code(self, t: int, free: tuple[int, ...]) -> Ints:
        """One number per label for its codes on the frozen axes."""
        assert self.axes is not None
        codes = self.axes[t]
        key = (id(codes), free)
        if key not in self._codes:
            frozen = np.delete(np.asarray(codes), free, axis=1)
            self._codes[key] = np.unique(frozen, axis=0, return_inverse=True)[1].reshape(-1)
        return self._codes[key]

    def axis_search(self, dual: Dual) -> None:
        """Improve the plan with one mesh axis free, then two, until nothing helps."""
        if self.axes is None or not self.problem.tensors:
            return
        count = np.asarray(self.axes[0]).shape[1]
        for size in (1, 2):
            neighbourhoods = list(itertools.combinations(range(count), size)) if size < count else []
            since = 0
            while neighbourhoods and since < len(neighbourhoods) and not self.late():
                assert self.plan is not None  # whoever searches around a plan has recorded one
                free = neighbourhoods[0]
                neighbourhoods = [*neighbourhoods[1:], free]
                since = 0 if self.improve(dual, self._agreeing(dual.keep, self.plan, free)) else since + 1
                if since == 0 and len(neighbourhoods) == 1:
                    break

    def improve(self, dual: Dual, keep: list[Ints], sweeps: int = 4) -> bool:
        """Look for a better plan among `keep`, which holds the plan."""
        before = self.plan_value
        if not all(map(len, keep)):  # the plan itself was pruned: it does not fit in memory
            return False
        small = Dual(self.problem, keep, dual.dear, self.nu, self.tables)
        for _ in range(sweeps):
            small.forward()
            self.offer(small, decode(small, forward=False))
            small.backward()
            self.offer(small, decode(small, forward=True))
            if small.bound() >= self.plan_value * (1 - 1e-6):
                break
        return self.plan_value < before

    def merge(self, dual: Dual) -> None:
        """The exact program over the strategies of known plans and those that the bound likes best."""
        if dual.pairs() <= TINY_PAIRS:  # all of them go into the exact program next
            return
        value, bounds = dual.strategy_bounds()
        known = np.array([choice for _, _, choice in self._near_the_limit()])
        most = MERGED_PAIRS if np.isinf(self.problem.memory_limit) else MOST_PAIRS_LIMITED
        keep = [np.unique(column) for column in known.T]
        for part in MERGED_SLACKS:
            slack = part * (self.worth_keeping() - value)
            wider = [
                np.union1d(mine, kept[b <= value + slack])
                for mine, kept, b in zip(keep, dual.keep, bounds, strict=True)
            ]
            if pair_count(self.problem, wider) > most:
                break
            keep = wider
        if pair_count(self.problem, keep) <= most:
            answer = self.program(keep)
            if answer.choice is not None:
                self.record(answer.choice)

    def _near_the_limit(self, most: int = 12) -> list[tuple[float, float, Ints]]:
        """The known plans of the least value at the present price, the best that fits among them."""
        assert self.best is not None  # the smallest choice fits
        ranked = sorted(self.frontier, key=lambda f: (f[0] + self.nu * f[1], f[1]))[: most - 1]
        return [*ranked, (self.best_cost, 0.0, self.best)]

    # -- bounds

    def late(self) -> bool:
        """Is the time up?"""
        return time.monotonic() > self.deadline

    def closed(self) -> bool:
        """Is the gap small enough?"""
        return self.best is not None and self.best_cost - self.bound <= self.gap * abs(self.best_cost)

    def lift(self, bound: float, dual: Dual | None = None) -> None:
        """A proved bound on all choices not yet known to cost more than the best; `dual` proves it."""
        self.bound = max(self.bound, bound)
        if self.trail is not None and dual is not None and bound > self.trail.bound:
            self.trail.bounded(snapshot(dual), bound)

    def all_strategies(self) -> Dual:
        """No messages yet, nothing pruned."""
        keep = [np.flatnonzero(np.isfinite(o.cost)) for o in self.problem.operators]
        if empty := [o.name for o, k in zip(self.problem.operators, keep, strict=True) if not len(k)]:
            raise Infeasible(f"operator {empty[0]!r} has no strategy of finite cost")
        if self.trail is not None:
            self.trail.restart()
        return Dual(self.problem, keep, 2 * self.dearest, self.nu, self.tables)

    def start(self) -> Dual:
        """All strategies, no messages, and a first plan that prices missing conversions."""
        dual = self.all_strategies()
        self.offer(dual, decode(dual, forward=True))
        if self.plan is not None:
            self.axis_search(dual)
            dual = dual.restrict(dual.keep, self.dear())
        return dual

    def dear(self) -> float:
        """The price of a missing conversion: just above the best plan."""
        return self.plan_value * (1 + 1e-3)

    def double_sweep(self, dual: Dual, temperature: float = 0.0) -> None:
        """Forward and backward."""
        dual.forward(temperature)
        dual.backward(temperature)
        self.sweeps += 1

    def probe(self, dual: Dual, soft: bool) -> Dual:
        """One hard double sweep with plans, bound and pruning; a soft phase keeps its own messages."""
        trial = dual.copy() if soft else dual
        trial.forward()
        found = self.offer(trial, decode(trial, forward=False))
        trial.backward()
        self.sweeps += 1
        found |= self.offer(trial, decode(trial, forward=True))
        if found:
            self.axis_search(trial)
            self.fit(trial)
        return self.prune(trial, dual)

    def credit(self) -> float:
        """What the memory limit is worth at the present price: bounds on the cost are bounds on the value less it."""
        return self.nu * self.problem.memory_limit if self.nu else 0.0

    def worth_keeping(self) -> float:
        """A strategy whose choices all have a higher value than this cannot be in a better plan that fits."""
        worst = self.best_cost if self.best is not None else self.dearest
        return worst + self.credit() + RELATIVE_DUST * max(abs(worst), self.credit())

    def prune(self, trial: Dual, dual: Dual) -> Dual:
        """Drop strategies that `trial` proves dearer than the best plan; returns `dual` over the rest."""
        self.value_bound, bounds = trial.strategy_bounds()
        self.lift(max(float(b.min()) for b in bounds) - self.credit(), trial)
        worth = self.worth_keeping()
        keep = [kept[b <= worth] for kept, b in zip(trial.keep, bounds, strict=True)]
        if self.progress:
            self.progress("probe", self.best_cost, min(self.bound, self.best_cost), self.sweeps)
        if any(not len(k) for k in keep):  # every choice costs at least the best plan
            return dual
        before, after = sum(map(len, dual.keep)), sum(map(len, keep))
        if not (after < 0.95 * before or after < before <= TINY_PAIRS):
            return dual
        if self.trail is not None:
            self.trail.pruned(snapshot(trial))
        return dual.restrict(keep)

    def finish(self, dual: Dual, most_pairs: int) -> bool:
        """The exact program over the survivors, if small enough; says whether it ran."""
        if dual.pairs() > most_pairs:
            return False
        answer = self.program(dual.keep)
        if answer.choice is not None:
            self.record(answer.choice)
        self.lift(min(answer.bound, self.best_cost))
        return True

    def program(self, keep: Sequence[Ints]) -> Answer:
        """The exact program over some strategies, within nodes and time."""
        nodes = NODE_LIMIT if np.isinf(self.problem.memory_limit) else NODE_LIMIT_LIMITED
        seconds = self.seconds_left()
        return solve_program(self.problem, keep, gap=self.gap / 4, node_limit=nodes, seconds=seconds)

    def seconds_left(self) -> float | None:
        """What the deadline leaves, None without one."""
        return None if np.isinf(self.deadline) else max(self.deadline - time.monotonic(), 0.1)

    def run(self) -> Solution:
        """The driver of the module header."""
        stopped, dual = self.ascend(self.start())
        if not stopped and self.best is not None:
            for _ in range(MERGES):
                before = self.best_cost
                self.merge(dual)
                if self.closed() or self.best_cost >= before:
                    break
            dual = self.probe(dual, soft=True)  # once more, against the plan that was merged last
            stopped = "gap" if self.closed() else ""
        return self.solution(stopped or self.last_resort(dual, MOST_PAIRS))

    def last_resort(self, dual: Dual, most_pairs: int) -> str:
        """The exact program over more survivors than one would like; returns what stopped the search."""
        return "survivors" if self.finish(dual, most_pairs) else "exhausted"

    def ascend(self, dual: Dual) -> tuple[str, Dual]:
        """Sweep, probe and prune; returns what stopped it ("" if nothing did) and the survivors."""
        for _ in range(HARD_SWEEPS - 1):
            self.double_sweep(dual)
        dual = self.probe(dual, soft=False)
        left, still = self.best_cost - self.bound, 0
        for temperatures in TEMPERATURES.reshape(-1, SOFT_SWEEPS):
            if stopped := self._stopped(dual):
                return stopped, dual
            if self._tight() or still == STILL_PROBES:
                break
            scale = max(self.value_bound, 0.0) / len(dual.units)
            for temperature in temperatures:
                self.double_sweep(dual, temperature * scale)
            dual = self.probe(dual, soft=True)
            before, left = left, self.best_cost - self.bound
            still = 0 if left < before else still + 1
        return self._stopped(dual), dual

    def _tight(self) -> bool:
        """With a price on memory: is only the price's own gap left, which sweeps cannot close?"""
        return self.nu > 0 and self.value_bound >= self.plan_value * (1 - self.gap / 4)

    def _stopped(self, dual: Dual) -> str:
        if self.closed():
            return "gap"
        if self.best is not None and self.problem.memory(self.best) > self.most_memory:
            return "memory"
        if self.late():
            return "seconds"
        return "survivors" if self.finish(dual, TINY_PAIRS) else ""

    def solution(self, stopped_by: str) -> Solution:
        """Recompute the cost and close the books."""
        if self.best is None:
            raise Infeasible("no choice was found whose conversions all exist")
        cost = self.problem.cost(self.best)
        if abs(cost - self.best_cost) > RELATIVE_DUST * abs(cost):
            raise AssertionError(f"the plan costs {cost}, the search said {self.best_cost}")
        if self.bound > cost * (1 + 1e-6) + 1e-300:
            raise AssertionError(f"bound {self.bound} above the plan's cost {cost}")
        return Solution(self.best, cost, min(self.bound, cost), stopped_by, self.sweeps)


def _dearest(problem: Problem) -> float:
    """No legal choice costs more."""
    total = sum(float(np.abs(o.cost[np.isfinite(o.cost)]).max(initial=0.0)) for o in problem.operators)
    highest: dict[int, float] = {}
    for (t, _), readers in problem.fans.items():
        d = problem.tensors[t].conversion
        if id(d) not in highest:
            highest[id(d)] = float(d[np.isfinite(d)].max(initial=0.0))
        total += highest[id(d)] * len(readers)
    return total + 1e-300


# --- memory -------------------------------------------------------------------------------------------------


class _Limited:
    """The search under a memory limit M: max over nu of B(nu) - nu M, and the best plan that fits.

    With exact plans, the best nu is where the lines cost + nu memory of two of them meet, one below M and one
    above, and no plan lies below that point (secant). Plans and bounds sharpen each other in a few rounds.
    """

    def __init__(self, problem: Problem, free: _Search, deadline: float) -> None:
        self.problem = problem
        self.search = _Search(problem, free.axes, free.gap, deadline, free.progress, free.trail)
        self.search.tables, self.search.sweeps = free.tables, free.sweeps
        self.search.bound, self.search.frontier = free.bound, free.frontier

    def run(self) -> Solution:
        """Price memory, ascend at that price, fit plans into the limit; again while that moves the price."""
        search, stopped = self.search, ""
        dual = self._start()
        for _ in range(PRICE_ROUNDS):
            dual = self._price(dual)
            search.merge(dual)
            meeting = search.plan_value
            stopped, dual = search.ascend(dual)
            if stopped or search.plan_value >= meeting * (1 - search.gap):
                break
        if not stopped:
            search.merge(dual)
            dual = search.probe(dual, soft=True)  # once more, against the plan that was fitted last
            stopped = "gap" if search.closed() else search.last_resort(dual, MOST_PAIRS_LIMITED)
        return search.solution(stopped)

    def _start(self) -> Dual:
        """All strategies, and one plan that fits."""
        smallest = self._smallest()
        dual = self.search.all_strategies()
        for choice in (smallest, *(choice for _, _, choice in list(self.search.frontier))):
            self.search.record(choice)
        assert self.search.best is not None  # the smallest choice fits
        for choice in (smallest, self.search.best):
            fitted = descend(dual, dual.locally(choice), 0.0, self.problem.memory_limit)
            self.search.record(dual.globally(fitted))
        return dual

    def _smallest(self) -> Ints:
        """The choice that holds the fewest bytes, or Infeasible."""
        seen: dict[int, Floats] = {}
        for t in self.problem.tensors:
            seen.setdefault(id(t.conversion), np.where(np.isfinite(t.conversion), 0.0, np.inf))
        problem = Problem(
            tuple(dataclasses.replace(t, conversion=seen[id(t.conversion)]) for t in self.problem.tensors),
            tuple(
                dataclasses.replace(o, cost=np.where(np.isfinite(o.cost), o.memory, np.inf))
                for o in self.problem.operators
            ),
        )
        search = _Search(problem, self.search.axes, 0.0, self.search.deadline, None)
        solution = search.run()
        if self.problem.memory(solution.choice) > self.problem.memory_limit:
            raise Infeasible(
                f"the memory limit is {self.problem.memory_limit:.0f} bytes; the smallest plan found holds "
                f"{solution.cost:.0f}, and none holds less than {solution.bound:.0f}",
                solution.cost,
            )
        return solution.choice

    def _meeting(self) -> float:
        """The price at which the cheapest known plan changes from one above the limit to one that fits."""
        limit, frontier = self.problem.memory_limit, self.search.frontier
        if all(f[1] <= limit for f in frontier):  # one that fits is as cheap as any known
            return 0.0
        over = min((f for f in frontier if f[1] > limit), key=lambda f: f[:2])
        under = min((f for f in frontier if f[1] <= limit), key=lambda f: f[:2])
        for _ in frontier:
            nu = (under[0] - over[0]) / (over[1] - under[1])
            lowest = min(frontier, key=lambda f: (f[0] + nu * f[1], f[1]))
            if lowest[0] + nu * lowest[1] >= (over[0] + nu * over[1]) * (1 - 1e-9):
                break
            over, under = (lowest, under) if lowest[1] > limit else (over, lowest)
        return nu

    def _reprice(self, dual: Dual, nu: float) -> Dual:
        """Set the price of a byte; the known plans are compared again at it."""
        search = self.search
        search.nu, search.plan, search.plan_value, search.value_bound = nu, None, np.inf, -np.inf
        search._offered.clear()
        for _, _, choice in list(search.frontier):
            search.record(choice)
        dual.price_memory(nu)
        return dual.restrict(dual.keep, search.dear())

    def _price(self, dual: Dual) -> Dual:
        """Follow the meeting point until no plan lies below it."""
        search = self.search
        for _ in range(PRICE_STEPS):
            dual = self._reprice(dual, self._meeting())
            meeting = search.plan_value
            self._look(dual)
            search.value_bound = dual.bound()
            search.lift(search.value_bound - search.credit(), dual)
            if search.plan_value >= meeting * (1 - search.gap / 8) or search.closed() or search.late():
                break
        return dual

    def _look(self, dual: Dual, sweeps: int = 3) -> None:
        """Plans at this price."""
        search = self.search
        for _ in range(sweeps):
            dual.forward()
            search.offer(dual, decode(dual, forward=False))
            dual.backward()
            search.offer(dual, decode(dual, forward=True))
            search.sweeps += 1
        search.axis_search(dual)
        search.fit(dual)
