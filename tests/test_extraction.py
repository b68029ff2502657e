"""The extractor against enumeration, the exact program and its own promises, on random graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from parallegg.extract.dual import Dual
from parallegg.extract.problem import ABSENT, Infeasible, Operator, Problem, Tensor
from parallegg.extract.referee import brute_force, lp_bound, optimum
from parallegg.extract.sampling import random_choice
from parallegg.extract.search import solve

SEEDS = st.integers(0, 2**32 - 1)
DUST = 1e-9


def _table(rng: np.random.Generator, labels: int, whole: bool, missing: bool) -> np.ndarray:
    table = rng.integers(0, 6, (labels, labels)).astype(float) if whole else rng.random((labels, labels)) * 3
    if missing:
        table[rng.random((labels, labels)) < 0.3] = np.inf
    np.fill_diagonal(table, 0.0)
    return table


def _operator(rng: np.random.Generator, i: int, tensors: list[Tensor], whole: bool, absent: bool) -> Operator:
    """An operator that reads 0-3 of the tensors so far (perhaps one twice); appends its output, if any."""
    arcs = [int(t) for t in rng.integers(0, len(tensors), rng.integers(0, 4))] if tensors else []
    lowest, count = (ABSENT if absent else 0), int(rng.integers(1, 5))
    columns = [rng.integers(lowest, len(tensors[t].conversion), count) for t in arcs]
    reads = np.array(columns, np.int32).reshape(len(arcs), count).T
    output, out = None, np.zeros(count, np.int32)
    if i == 0 or rng.random() > 0.15:
        output = len(tensors)
        labels = int(rng.integers(1, 5))
        out = rng.integers(lowest if rng.random() < 0.5 else 0, labels, count).astype(np.int32)
        tensors.append(Tensor(f"t{i}", np.zeros((labels, labels))))
    cost = rng.integers(0, 6, count).astype(float) if whole else rng.random(count) * 3
    memory = rng.integers(0, 6, count).astype(float)
    return Operator(f"o{i}", output, tuple(arcs), out, reads, cost, memory)


def _in_phases(rng: np.random.Generator, operators: list[Operator]) -> list[Operator]:
    """Every operator reads in one of three phases, mostly in order."""
    phases = rng.integers(0, 3, len(operators))
    phases = np.sort(phases) if rng.random() < 0.7 else phases
    return [dataclasses.replace(o, phase=int(phase)) for o, phase in zip(operators, phases, strict=True)]


def _with_state(rng: np.random.Generator, operators: list[Operator], tensors: list[Tensor]) -> list[Operator]:
    """Leaves become state where another tensor has all their labels: mostly one made later."""
    result = list(operators)
    for i, leaf in enumerate(operators):
        fitting = [
            t
            for t, tensor in enumerate(tensors)
            if t != leaf.output and len(tensor.conversion) > leaf.out.max()
        ]
        if leaf.output is not None and not leaf.arcs and fitting and rng.random() < 0.95:
            result[i] = dataclasses.replace(
                leaf,
                arcs=(int(rng.choice(fitting[-2:])),),
                reads=leaf.out[:, None],
                phase=int(rng.integers(3)),
            )
    return result


def random_problem(seed: int) -> Problem:
    """Up to 8 operators; some with ties, missing conversions, absent labels, shared tables, a memory limit.

    Half of them are training steps: operators of several phases, and leaves that read what is made later.
    """
    rng = np.random.default_rng(seed)
    whole, missing, absent, limited = rng.random(4) < (0.5, 0.4, 0.3, 0.4)
    tensors: list[Tensor] = []
    operators = [_operator(rng, i, tensors, whole, absent) for i in range(rng.integers(1, 9))]
    tables: dict[int, np.ndarray] = {}
    for t, tensor in enumerate(tensors):
        labels = len(tensor.conversion)
        if labels not in tables or rng.random() < 0.5:
            tables[labels] = _table(rng, labels, whole, missing)
        tensors[t] = Tensor(tensor.name, tables[labels])
    limit = np.inf
    if limited:
        low, high = (sum(f(o.memory) for o in operators) for f in (min, max))
        limit = float(np.floor(low + (high - low) * rng.random() * 0.6))
    if rng.random() < 0.5:
        operators = _with_state(rng, _in_phases(rng, operators), tensors)
    return Problem(tuple(tensors), tuple(operators), limit)


def small_problem(seed: int, most: int = 4_000) -> Problem:
    """A random problem with few enough choices to try them all in a test."""
    drawn = (random_problem(seed + attempt) for attempt in itertools.count())
    return next(p for p in drawn if np.prod([float(len(o.cost)) for o in p.operators]) <= most)


def grid_problem(sizes: tuple[int, ...], length: int, seed: int) -> tuple[Problem, list[np.ndarray]]:
    """A chain with skip connections whose labels are products of 4 codes per mesh axis, with those codes."""
    rng = np.random.default_rng(seed)
    codes = np.array(list(itertools.product(range(4), repeat=len(sizes))))
    step = [_table(rng, 4, False, False) * n for n in sizes]
    table = sum(step[axis][codes[:, None, axis], codes[None, :, axis]] for axis in range(len(sizes)))
    tensors, operators = [], []
    for i in range(length):
        arcs = tuple(t for t in (i - 1, i - 3) if t >= 0)
        per_axis = [rng.integers(0, 4, (5, 1 + len(arcs))) for _ in sizes]
        rows = list(itertools.product(range(5), repeat=len(sizes)))
        label = np.zeros((len(rows), 1 + len(arcs)), np.int32)
        for axis in range(len(sizes)):
            label = label * 4 + per_axis[axis][[row[axis] for row in rows]]
        cost, memory = rng.random(len(rows)), rng.integers(1, 9, len(rows)).astype(float)
        tensors.append(Tensor(f"t{i}", table))
        operators.append(Operator(f"o{i}", i, arcs, label[:, 0], label[:, 1:], cost, memory))
    return Problem(tuple(tensors), tuple(operators)), [codes] * length


def _everything(problem: Problem) -> list[np.ndarray]:
    return [np.arange(len(o.cost)) for o in problem.operators]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(SEEDS)
def test_the_optimum_is_found_and_proved(seed):
    note(f"seed {seed}")
    problem = small_problem(seed)
    _, cheapest = brute_force(problem)
    if np.isinf(cheapest):
        with pytest.raises(Infeasible):
            solve(problem, gap=0.0)
        return
    solution = solve(problem, gap=0.0)
    assert problem.memory(solution.choice) <= problem.memory_limit
    assert problem.cost(solution.choice) == solution.cost
    assert solution.bound <= cheapest * (1 + DUST) + DUST
    assert solution.cost == pytest.approx(cheapest, rel=DUST, abs=DUST)
    assert solution.bound <= solution.cost
    assert solution.gap <= 1e-6


@settings(max_examples=160, deadline=None, derandomize=True)
@given(SEEDS)
def test_the_referee_agrees_with_enumeration(seed):
    note(f"seed {seed}")
    problem = small_problem(seed)
    _, cheapest = brute_force(problem)
    if np.isinf(cheapest):
        with pytest.raises(Infeasible):
            optimum(problem)
        return
    choice, cost = optimum(problem)
    assert cost == problem.cost(choice) == pytest.approx(cheapest, rel=1e-6, abs=1e-6)
    assert lp_bound(problem) <= cheapest * (1 + 1e-6) + 1e-6


def test_the_random_problems_cover_what_they_should():
    seen = Counter()
    for seed in range(500):
        problem = random_problem(seed)
        seen["limited"] += np.isfinite(problem.memory_limit)
        seen["missing"] += any(np.isinf(t.conversion).any() for t in problem.tensors)
        seen["not computed"] += any((o.out == ABSENT).any() for o in problem.operators)
        seen["not read"] += any((o.reads == ABSENT).any() for o in problem.operators)
        seen["read twice"] += any(len(set(o.arcs)) < len(o.arcs) for o in problem.operators)
        seen["sink"] += any(o.output is None for o in problem.operators)
        seen["unread"] += any(not readers for readers in problem.consumers())
        seen["three readers"] += any(len(readers) >= 3 for readers in problem.consumers())
        seen["one label"] += any(len(t.conversion) == 1 for t in problem.tensors)
        state = [o for o in problem.operators if len(o.arcs) == 1 and _reads_ahead(problem, o)]
        seen["state"] += bool(state)
        seen["state with a limit"] += bool(state) and np.isfinite(problem.memory_limit)
        seen["state absent"] += any((o.out == ABSENT).any() for o in state)
        seen["two states"] += len(state) >= 2
        phases = Counter(t for t, _ in problem.fans)
        seen["two phases"] += max(phases.values(), default=0) >= 2
        seen["two of a phase"] += any(
            len(readers) >= 2 and phases[t] >= 2 for (t, _), readers in problem.fans.items()
        )
    assert min(seen.values()) >= 20 and len(seen) == 15, seen


def _reads_ahead(problem: Problem, operator: Operator) -> bool:
    return any(problem.producers[t] > problem.operators.index(operator) for t in operator.arcs)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SEEDS)
def test_hard_sweeps_never_lower_the_bound(seed):
    note(f"seed {seed}")
    problem = random_problem(seed)
    dual = Dual(problem, _everything(problem), dear=50.0, nu=0.1)
    before = dual.bound()
    for _ in range(8):
        for half in (dual.forward, dual.backward):
            half()
            after = dual.bound()
            assert after >= before - DUST * (1 + abs(before))
            before = after


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SEEDS, st.booleans())
def test_every_bound_holds(seed, soft):
    """B, and B(s) for each strategy of a choice, are below the choice: so pruning keeps every better plan."""
    note(f"seed {seed}")
    problem = dataclasses.replace(small_problem(seed), memory_limit=np.inf)
    choice, cheapest = brute_force(problem)
    if choice is None:
        return
    dual = Dual(problem, _everything(problem), dear=cheapest * 1.001 + 0.01)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        dual.forward(0.3 if soft else 0.0)
        dual.backward(0.3 if soft else 0.0)
        bound, bounds = dual.strategy_bounds()
        assert bound == pytest.approx(dual.bound(), rel=DUST, abs=DUST)
        for plan in (choice, random_choice(problem, rng)):
            cost = problem.cost(plan) * (1 + DUST) + DUST
            assert bound <= cost
            assert all(b[s] <= cost for b, s in zip(bounds, plan, strict=True))
        for fan in dual.fans.values():
            assert (fan.lam >= 0).all()
            total = np.where(np.isinf(fan.true_price), 0.0, fan.lam.sum(0))
            assert (total <= np.where(np.isinf(fan.true_price), 0.0, fan.true_price) + DUST).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_restriction_keeps_messages_and_bounds(seed):
    note(f"seed {seed}")
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    dual = Dual(problem, _everything(problem), dear=50.0)
    dual.forward()
    keep = [np.sort(rng.choice(k, rng.integers(1, len(k) + 1), replace=False)) for k in dual.keep]
    smaller = dual.restrict(keep)
    assert smaller.bound() >= dual.bound() - DUST * (1 + abs(dual.bound()))
    for unit, kept, whole in zip(smaller.units, keep, dual.units, strict=True):
        assert smaller.theta(unit) == pytest.approx(dual.theta(whole)[kept], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 4), (2, 3, 4)])
def test_axes_of_labels_lead_to_the_exact_answer(sizes, seed):
    problem, codes = grid_problem(sizes, 10 if len(sizes) == 2 else 6, seed)
    solution = solve(problem, axes_of_labels=codes)
    assert solution.gap <= 1e-3
    if len(sizes) == 2:
        assert solution.bound * (1 - DUST) <= optimum(problem)[1] <= solution.cost * (1 + 1e-6)


def as_step(problem: Problem) -> Problem:
    """The grid's chain in three phases, its first operator as state that reads the last tensor."""
    last = len(problem.tensors) - 1
    first, *others = problem.operators
    operators = [dataclasses.replace(first, arcs=(last,), reads=first.out[:, None], phase=2)]
    operators += [dataclasses.replace(o, phase=3 * i // last) for i, o in enumerate(others)]
    return dataclasses.replace(problem, operators=tuple(operators))


@pytest.mark.parametrize("seed", range(3))
def test_state_and_phases_lead_to_the_exact_answer(seed):
    problem, codes = grid_problem((2, 4), 8, seed)
    problem = as_step(problem)
    assert max(Counter(t for t, _ in problem.fans).values()) == 2
    solution = solve(problem, axes_of_labels=codes)
    assert solution.gap <= 1e-3
    assert solution.bound * (1 - DUST) <= optimum(problem)[1] <= solution.cost * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_memory_limits_on_larger_graphs_keep_an_honest_gap(seed):
    problem, codes = grid_problem((2, 4), 9, seed)
    free = solve(problem, axes_of_labels=codes)
    low = sum(o.memory.min() for o in problem.operators)
    limit = low + 0.4 * (problem.memory(free.choice) - low)
    problem = dataclasses.replace(problem, memory_limit=limit)
    solution = solve(problem, axes_of_labels=codes)
    _, cheapest = optimum(problem)
    assert problem.memory(solution.choice) <= limit
    assert solution.bound <= cheapest * (1 + 1e-6)
    assert cheapest <= solution.cost * (1 + 1e-6)
    assert solution.gap <= 0.05


def test_an_impossible_limit_names_the_smallest_possible_one():
    problem, _ = grid_problem((2, 4), 8, 0)
    low = sum(float(o.memory.min()) for o in problem.operators)
    with pytest.raises(Infeasible) as refused:
        solve(dataclasses.replace(problem, memory_limit=low - 1))
    assert refused.value.smallest_memory == low  # every conversion exists here
    assert solve(dataclasses.replace(problem, memory_limit=low)).cost > 0


def test_free_problems_have_no_gap():
    problem, codes = grid_problem((2, 4), 6, 0)
    gratis = Problem(
        tuple(Tensor(t.name, np.zeros_like(t.conversion)) for t in problem.tensors),
        tuple(dataclasses.replace(o, cost=np.zeros_like(o.cost)) for o in problem.operators),
    )
    solution = solve(gratis, axes_of_labels=codes, gap=0.0)
    assert (solution.cost, solution.bound, solution.gap) == (0.0, 0.0, 0.0)


def test_the_same_problem_gives_the_same_solution():
    for limit in (np.inf, 20.0):
        problem, codes = grid_problem((2, 4), 8, 1)
        problem = dataclasses.replace(problem, memory_limit=limit)
        one, two = (solve(problem, axes_of_labels=codes) for _ in range(2))
        assert one.choice.tolist() == two.choice.tolist()
        assert (one.cost, one.bound, one.sweeps, one.stopped_by) == (
            two.cost,
            two.bound,
            two.sweeps,
            two.stopped_by,
        )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SEEDS)
def test_random_choices_are_legal(seed):
    note(f"seed {seed}")
    problem = dataclasses.replace(small_problem(seed), memory_limit=np.inf)
    if brute_force(problem)[0] is None:
        with pytest.raises(Infeasible):
            random_choice(problem, np.random.default_rng(seed))
        return
    one, two = (random_choice(problem, np.random.default_rng(seed)) for _ in range(2))
    assert np.isfinite(problem.cost(one))
    assert one.tolist() == two.tolist()


def test_random_choices_can_be_steered_to_every_strategy():
    problem, _ = grid_problem((2, 4), 8, 3)
    rng, unseen = np.random.default_rng(0), [np.ones(len(o.cost)) for o in problem.operators]
    rounds = 0
    while any(weights.any() for weights in unseen):
        for weights, s in zip(unseen, random_choice(problem, rng, unseen), strict=True):
            weights[s] = 0.0
        rounds += 1
    assert rounds == max(len(o.cost) for o in problem.operators)


def test_malformed_problems_are_refused():
    one = np.zeros(1, np.int32)
    maker = Operator("make", 0, (), one, np.zeros((1, 0), np.int32), np.ones(1), np.ones(1))
    reader = Operator("read", None, (0,), one, np.zeros((1, 1), np.int32), np.ones(1), np.ones(1))
    tensor = Tensor("t", np.zeros((1, 1)))
    assert Problem((tensor,), (maker, reader)).cost(np.zeros(2, np.int64)) == 2.0
    with pytest.raises(ValueError, match=r"'read' reads .'t'. before"):
        Problem((tensor,), (reader, maker))
    unordered = dataclasses.replace(reader, output=1)  # a leaf reading tensor 0, but not as its own label
    with pytest.raises(ValueError, match=r"'read' reads .'t'. before"):
        Problem((tensor, Tensor("u", np.zeros((2, 2)))), (dataclasses.replace(unordered, out=one + 1), maker))
    state = dataclasses.replace(unordered, name="state")
    assert Problem((tensor, tensor), (state, maker)).producers == [1, 0]
    with pytest.raises(ValueError, match="'state' reads its own output 't'"):
        Problem((tensor,), (dataclasses.replace(state, output=0),))
    with pytest.raises(ValueError, match="two producers"):
        Problem((tensor,), (maker, maker))
    with pytest.raises(ValueError, match="no producer"):
        Problem((tensor, tensor), (maker,))
    with pytest.raises(ValueError, match="operator 'read': 1 costs and 2 arcs"):
        dataclasses.replace(reader, arcs=(0, 0))
