"""Exact answers for small problems: a 0/1 program for HiGHS, its relaxation, and plain enumeration.

Variables: x[o, s] in {0, 1}; for each consumer arc c of tensor t a flow mu_c[p, q] >= 0; for each fan f, the
consumers of t in one phase, r_f[p, q] >= 0. The order of operators plays no part, so state needs no care.

    sum_s x[o, s] = 1                                                    _choose_one
    sum_q mu_c[p, q] = sum {x[producer, s] : out = p}                    _marginals
    sum_p mu_c[p, q] = sum {x[consumer, s] : reads = q}                  _marginals
    r_f[p, q] >= mu_c[p, q]   (a copy is paid once in a phase)           _copies
    sum x[o, s] memory[o, s] <= memory_limit                             _memory_row
    minimise sum x cost + sum r d     (mu d where f has one consumer)

A pair without a conversion has no mu. Both marginals per arc keep the relaxation tight; aggregating the
consumers of a fan, or ordering variables, do not (bounds 6 % low or worse). Nothing here is shared
with the dual ascent.
`keep` limits each operator to some of its strategies: that is the last step of the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix

from .problem import Infeasible, Problem, priced_with_absent

_STOPPED = (
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kSolutionLimit,  # also the node limit
    highspy.HighsModelStatus.kIterationLimit,
)
_OBJECTIVE_SCALE = 1000.0  # HiGHS's tolerances are absolute: costs are scaled to about this


@dataclass
class _Program:
    """Columns and rows of the 0/1 program as they are added."""

    cost: list[NDArray[np.float64]] = field(default_factory=list)
    integral: list[NDArray[np.bool_]] = field(default_factory=list)
    low: list[NDArray[np.float64]] = field(default_factory=list)
    high: list[NDArray[np.float64]] = field(default_factory=list)
    entries: list[tuple[NDArray, NDArray, NDArray]] = field(default_factory=list)
    columns: int = 0
    rows: int = 0

    def add_columns(self, cost: NDArray[np.float64], integral: bool = False) -> NDArray[np.int64]:
        self.cost.append(np.asarray(cost, float))
        self.integral.append(np.full(len(cost), integral))
        self.columns += len(cost)
        return np.arange(self.columns - len(cost), self.columns)

    def add_rows(self, count: int, low: float, high: float) -> NDArray[np.int64]:
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def put(self, rows: NDArray, columns: NDArray, value: float | NDArray) -> None:
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(value, float), rows.shape)))


@dataclass(frozen=True)
class Answer:
    """What HiGHS said: a choice (None if it found none) and a bound on every choice among those kept."""

    choice: NDArray[np.int64] | None
    bound: float
    proved: bool


def optimum(problem: Problem) -> tuple[NDArray[np.int64], float]:
    """The cheapest choice that fits, and its cost."""
    answer = solve_program(problem)
    if not answer.proved:
        raise RuntimeError("HiGHS stopped before it had proved an optimum")
    if answer.choice is None:
        raise Infeasible("no choice has all its conversions and fits in memory")
    return answer.choice, problem.cost(answer.choice)


def lp_bound(problem: Problem) -> float:
    """The optimum of the relaxation in which strategies may be mixed."""
    return solve_program(problem, relaxed=True).bound


def brute_force(problem: Problem, most: int = 1_000_000) -> tuple[NDArray[np.int64] | None, float]:
    """The cheapest choice that fits by trying all of them; (None, inf) if there is none."""
    sizes = [len(o.cost) for o in problem.operators]
    if np.prod([float(n) for n in sizes]) > most:
        raise ValueError(f"{sizes} strategies make more than {most} choices")
    best, best_cost = None, np.inf
    for choice in itertools.product(*map(range, sizes)):
        array = np.array(choice, dtype=np.int64)
        if problem.memory(array) <= problem.memory_limit and (cost := problem.cost(array)) < best_cost:
            best, best_cost = array, cost
    return best, best_cost


def pair_count(problem: Problem, keep: Sequence[NDArray[np.int64]]) -> int:
    """How many (arc, p, q) the 0/1 program would have: its size."""
    total = 0
    made = zip(problem.operators, keep, strict=True)
    labels = {operator.output: len(np.unique(operator.out[kept])) for operator, kept in made}
    for operator, kept in zip(problem.operators, keep, strict=True):
        total += sum(labels[t] * len(np.unique(operator.reads[kept, a])) for a, t in enumerate(operator.arcs))
    return total


def solve_program(
    problem: Problem,
    keep: Sequence[NDArray[np.int64]] | None = None,
    *,
    relaxed: bool = False,
    gap: float = 0.0,
    node_limit: int | None = None,
    seconds: float | None = None,
) -> Answer:
    """Build the program over the kept strategies and let HiGHS solve it (one thread, fixed seed)."""
    if keep is None:
        keep = [np.arange(len(o.cost)) for o in problem.operators]
    keep = [k[np.isfinite(o.cost[k])] for o, k in zip(problem.operators, keep, strict=True)]
    program = _Program()
    x = [program.add_columns(o.cost[k], integral=True) for o, k in zip(problem.operators, keep, strict=True)]
    _choose_one(program, x)
    tables: dict[int, NDArray[np.float64]] = {}
    for fan in problem.fans:
        conversion = problem.tensors[fan[0]].conversion
        if id(conversion) not in tables:
            tables[id(conversion)] = priced_with_absent(conversion)
        _flows(program, problem, keep, x, fan, tables[id(conversion)])
    if np.isfinite(problem.memory_limit):
        _memory_row(program, problem, keep, x)
    highs, scale = _highs(program, len(x), relaxed)
    options = {"mip_rel_gap": max(gap, 1e-9), "mip_max_nodes": node_limit, "time_limit": seconds}
    for name, value in options.items():
        if value is not None:
            highs.setOptionValue(name, value)
    highs.run()
    return _answer(highs, scale, x, keep, relaxed)


def _choose_one(program: _Program, x: list[NDArray[np.int64]]) -> None:
    rows = program.add_rows(len(x), 1.0, 1.0)
    for row, columns in zip(rows, x, strict=True):
        program.put(np.full(len(columns), row), columns, 1.0)


def _memory_row(
    program: _Program, problem: Problem, keep: Sequence[NDArray[np.int64]], x: list[NDArray[np.int64]]
) -> None:
    """Bytes relative to the limit, so that HiGHS's absolute tolerance is one part in a million of it."""
    unit = problem.memory_limit or max(float(np.abs(o.memory).max()) for o in problem.operators) or 1.0
    row = program.add_rows(1, -highspy.kHighsInf, problem.memory_limit / unit)
    for operator, kept, columns in zip(problem.operators, keep, x, strict=True):
        program.put(np.broadcast_to(row, len(columns)), columns, operator.memory[kept] / unit)


def _flows(
    program: _Program,
    problem: Problem,
    keep: Sequence[NDArray[np.int64]],
    x: list[NDArray[np.int64]],
    fan: tuple[int, int],
    table: NDArray[np.float64],
) -> None:
    """All arcs of a (tensor, phase): a flow per arc and, with several consumers, the copies they share."""
    maker, readers = problem.producers[fan[0]], problem.fans[fan]
    out = problem.operators[maker].out[keep[maker]]
    copies: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for o, a in readers:
        read = problem.operators[o].reads[keep[o], a]
        p_labels, q_labels = np.unique(out), np.unique(read)
        p, q = np.nonzero(np.isfinite(table[np.ix_(p_labels, q_labels)]))
        price = table[p_labels[p], q_labels[q]]
        mu = program.add_columns(price if len(readers) == 1 else np.zeros(len(p)))
        _marginals(program, mu, p, np.searchsorted(p_labels, out), x[maker], len(p_labels))
        _marginals(program, mu, q, np.searchsorted(q_labels, read), x[o], len(q_labels))
        if len(readers) > 1:
            for column, pair, cost in zip(mu, zip(p_labels[p], q_labels[q], strict=True), price, strict=True):
                if cost > 0:
                    copies.setdefault(pair, []).append((column, cost))
    _copies(program, copies)


def _marginals(
    program: _Program, mu: NDArray, label: NDArray, strategy_label: NDArray, x: NDArray, labels: int
) -> None:
    rows = program.add_rows(labels, 0.0, 0.0)
    program.put(rows[label], mu, 1.0)
    program.put(rows[strategy_label], x, -1.0)


def _copies(program: _Program, copies: dict[tuple[int, int], list[tuple[int, float]]]) -> None:
    users = list(copies.values())
    r = program.add_columns(np.array([user[0][1] for user in users]))
    of = np.array([i for i, user in enumerate(users) for _ in user], dtype=np.int64)
    mu = np.array([column for user in users for column, _ in user], dtype=np.int64)
    rows = program.add_rows(len(mu), 0.0, highspy.kHighsInf)
    program.put(rows, r[of], 1.0)
    program.put(rows, mu, -1.0)


def _lp(program: _Program, scale: float, relaxed: bool) -> highspy.HighsLp:
    rows, columns, values = (np.concatenate(part) for part in zip(*program.entries, strict=True))
    matrix = coo_matrix((values, (rows, columns)), shape=(program.rows, program.columns)).tocsc()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = program.columns, program.rows
    lp.col_cost_ = np.concatenate(program.cost) * scale
    lp.col_lower_ = np.zeros(program.columns)
    lp.col_upper_ = np.ones(program.columns)  # implied by the rows; without it presolve was seen not to end
    lp.row_lower_, lp.row_upper_ = np.concatenate(program.low), np.concatenate(program.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.asarray(matrix.indptr, np.int32)
    lp.a_matrix_.index_ = np.asarray(matrix.indices, np.int32)
    lp.a_matrix_.value_ = np.asarray(matrix.data, np.float64)
    if not relaxed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(flag)] for flag in np.concatenate(program.integral)]
    return lp


def _highs(program: _Program, operators: int, relaxed: bool) -> tuple[highspy.Highs, float]:
    """The loaded solver, and what costs were multiplied with."""
    typical = sum(float(np.abs(cost).min()) for cost in program.cost[:operators])
    largest = max(float(np.abs(cost).max(initial=0.0)) for cost in program.cost)
    scale = _OBJECTIVE_SCALE / (typical if typical > 1e-9 * largest else largest or 1.0)
    highs = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, "mip_abs_gap": 1e-7}.items():
        highs.setOptionValue(name, value)
    highs.passModel(_lp(program, scale, relaxed))
    return highs, scale


def _answer(
    highs: highspy.Highs,
    scale: float,
    x: list[NDArray[np.int64]],
    keep: Sequence[NDArray[np.int64]],
    relaxed: bool,
) -> Answer:
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf, True)
    proved = status == highspy.HighsModelStatus.kOptimal
    if not proved and status not in _STOPPED:
        return Answer(None, -np.inf, False)
    if relaxed:
        return Answer(None, info.objective_function_value / scale if proved else -np.inf, proved)
    values = np.array(highs.getSolution().col_value)
    if info.primal_solution_status != highspy.kSolutionStatusFeasible or not len(values):
        return Answer(None, info.mip_dual_bound / scale, False)
    chosen = [k[int(np.argmax(values[columns]))] for k, columns in zip(keep, x, strict=True)]
    return Answer(np.array(chosen, dtype=np.int64), info.mip_dual_bound / scale, proved)
