"""Check the certificate of a bound: that no choice of strategies costs less, in one pass and without a search.

    check_bound(data, facts) -> BoundFinding    `data` are the bytes of `plan --bound-certificate FILE`, `facts`
                                                what the plan's file says of itself

The certificate states a problem (extract/problem.py), a choice and steps of messages (extract/dual.py). Nothing of the
planner is used here: what is checked, for a step with strategies `keep` and a price nu of a byte, is weak duality.

    lam_k[p, q] >= 0, sum_k lam_k[p, q] <= d[p, q]     of each fan, where d is finite; alone, a consumer pays d
    theta_o(s) = cost + nu memory + sum_out x[p(s)] + sum_in y[q(s)]
    B(s) = theta_o(s) + sum of the other operators' least theta
         + sum_arcs min (lam - x - y), over the pairs with the label that s leaves or reads where it does

Every choice of kept strategies that contains s has cost + nu memory >= B(s). Hence a choice that fits in M bytes costs
at least B(s) - nu M, and the step proves

    dropped strategies     B(s) - nu M >= bound for each that the next step does not keep
    the last step          max_o min_s B(s) - nu M >= bound

The first step keeps every strategy of finite cost. Sums are in float64 with their rounding counted against the claim;
the claim is accepted with a relative slack of `SLACK`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
SLACK = 1e-9
MOST_BYTES = 4 << 30  # unpacked
ROUNDING = 2.0**-48  # of a sum of few terms, relative to their absolute values; generous

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PROBLEM = {
    "tables": "<f8", "table.labels": "<i4", "tensor.table": "<i4",
    "menu.strategies": "<i4", "menu.arcs": "<i4", "menu.out": "<i4", "menu.reads": "<i4",
    "menu.cost": "<f8", "menu.memory": "<f8",
    "operator.menu": "<i4", "operator.output": "<i4", "operator.phase": "<i4", "operator.arcs": "<i4",
}  # fmt: skip
_STEP = {"keep": "|u1", "x": "<f8", "y": "<f8", "lam": "<f8"}


class Malformed(Exception):
    """The file is no certificate."""


class Refuted(Exception):
    """The certificate does not prove what it claims."""


@dataclass(frozen=True)
class BoundFinding:
    """`holds`, or why not; the choice's cost and the bound (seconds) are what was checked, None if nothing was."""

    holds: bool
    reason: str
    cost: float | None = None
    bound: float | None = None
    memory_limit: float | None = None
    problem: str | None = None  # digest

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost, 0 where the cost is 0."""
        if self.cost is None or self.bound is None:
            return None
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.bound) / self.cost)


def check_bound(data: bytes, facts: Mapping[str, Any] | None = None) -> BoundFinding:
    """Check a certificate, with `facts` that it is the one of a plan; never raises for what is in it."""
    try:
        arrays = read_arrays(data)
        meta = _meta(arrays)
        problem = Problem.read(arrays, meta)
        cost, bound = _claims(problem, arrays, meta)
        _prove(problem, arrays, meta["steps"], bound)
        if facts is not None:
            _check_facts(facts, digest(arrays), cost, bound)
    except (Malformed, Refuted) as error:
        return BoundFinding(False, str(error))
    count = len(meta["steps"])
    reason = f"{len(problem.menus)} operators, {count} step{'s' if count > 1 else ''} of messages"
    return BoundFinding(True, reason, cost, bound, meta["memory_limit"], digest(arrays))


def _check_facts(facts: Mapping[str, Any], problem: str, cost: float, bound: float) -> None:
    """The plan names this problem, and claims no more than was proved."""
    if facts.get("bound_problem") != problem:
        raise Refuted("the certificate is of another plan, or the plan was made without one")
    for name, value in (("cost_s", cost), ("certified_bound_s", bound)):
        if not math.isclose(_number(facts.get(name), name), value, rel_tol=SLACK):
            raise Refuted(f"the plan says {name} {facts.get(name)}, the certificate {value:.9g}")


def digest(arrays: Mapping[str, NDArray]) -> str:
    """SHA-256 of a certificate's problem: what the plan that it belongs to names."""
    result = hashlib.sha256()
    for name in sorted(_PROBLEM):
        result.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        result.update(arrays[name].tobytes())
    return result.hexdigest()


# ------------------------------------------------------------------------------------------------ reading


def read_arrays(data: bytes) -> dict[str, NDArray]:
    """The flat arrays of an .npz file, each as long as its header says."""
    arrays: dict[str, NDArray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
                raise Malformed(f"the certificate unpacks to more than {MOST_BYTES} bytes")
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                arrays[name] = _array(name, archive.read(info))
    except (
        zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, OSError, NotImplementedError,
        RuntimeError, ValueError, OverflowError, MemoryError,
    ) as error:  # fmt: skip
        raise Malformed(f"the certificate is damaged: {error}") from None
    return arrays


def _array(name: str, data: bytes) -> NDArray:
    kind = (
        _PROBLEM.get(name) or _STEP.get(name.rpartition(".")[2]) or {"choice": "<i4", "meta": "|u1"}.get(name)
    )
    if kind is None:
        raise Malformed(f"the certificate holds an array {name!r} that has no meaning")
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise Malformed(f"array {name!r} is in format {version}, not (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, SyntaxError, TypeError, RecursionError) as error:
        raise Malformed(f"array {name!r} has no readable header: {error}") from None
    if dtype.str != kind or len(shape) != 1:
        raise Malformed(f"array {name!r} is {dtype.str} of rank {len(shape)}, not {kind} of rank 1")
    rest = data[file.tell() :]
    if len(rest) != shape[0] * dtype.itemsize:
        raise Malformed(f"array {name!r} holds {len(rest)} bytes, its header says {shape[0]} numbers")
    return np.frombuffer(rest, dtype)


def _meta(arrays: Mapping[str, NDArray]) -> dict[str, Any]:
    """The claims: cost, bound, memory limit and the steps' prices."""
    try:
        meta = json.loads(_get(arrays, "meta").tobytes())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"`meta` is no JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise Malformed(f"`meta` is not of format {FORMAT}")
    steps = meta.get("steps")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        raise Malformed("`meta` names no steps")
    limit = meta.get("memory_limit")
    return {
        "cost": _number(meta.get("cost"), "cost"),
        "bound": _number(meta.get("bound"), "bound"),
        "memory_limit": None if limit is None else _number(limit, "memory_limit"),
        "steps": [(_number(step.get("nu"), "nu"), _number(step.get("dear"), "dear")) for step in steps],
    }


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{name} is {value!r}, not a number")
    try:
        result = float(value)
    except OverflowError:
        raise Malformed(f"{name} is too large") from None
    if not math.isfinite(result):
        raise Malformed(f"{name} is {value!r}, not a finite number")
    return result


def _get(arrays: Mapping[str, NDArray], name: str) -> NDArray:
    if name not in arrays:
        raise Malformed(f"the certificate lacks array {name!r}")
    return arrays[name]


class _Cursor:
    """Takes a flat array apart, piece by piece."""

    def __init__(self, name: str, flat: NDArray) -> None:
        self.name, self.flat, self.at = name, flat, 0

    def take(self, count: int) -> NDArray:
        if count < 0 or self.at + count > len(self.flat):
            raise Malformed(f"array {self.name!r} is too short")
        self.at += count
        return self.flat[self.at - count : self.at]

    def close(self) -> None:
        if self.at != len(self.flat):
            raise Malformed(f"array {self.name!r} is too long")


# ------------------------------------------------------------------------------------------------ the problem


@dataclass(frozen=True, eq=False)
class Menu:
    """Strategies: out[s], reads[s, arc] (labels, -1 for absent), cost[s] (inf: not to be had), memory[s]."""

    out: Ints
    reads: Ints
    cost: Floats
    memory: Floats


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators over tensors; `prices[t]` has a last row and column for the label -1."""

    prices: list[Floats]
    menus: list[Menu]
    outputs: list[int]
    phases: list[int]
    arcs: list[tuple[int, ...]]
    limit: float

    @staticmethod
    def read(arrays: Mapping[str, NDArray], meta: Mapping[str, Any]) -> Problem:
        """The problem of a certificate, all its numbers in range."""
        for name in _PROBLEM:
            _get(arrays, name)
        tables = _tables(arrays)
        of_tensor = arrays["tensor.table"].tolist()
        menus = _menus(arrays)
        of_operator = arrays["operator.menu"].tolist()
        if not all(0 <= i < len(tables) for i in of_tensor) or not all(
            0 <= i < len(menus) for i in of_operator
        ):
            raise Malformed("a tensor's table or an operator's menu is not there")
        outputs, phases = arrays["operator.output"].tolist(), arrays["operator.phase"].tolist()
        if not len(outputs) == len(phases) == len(of_operator) > 0:
            raise Malformed("operators without a menu, an output or a phase")
        flat = _Cursor("operator.arcs", arrays["operator.arcs"])
        arcs = [tuple(flat.take(menus[i].reads.shape[1]).tolist()) for i in of_operator]
        flat.close()
        limit = math.inf if meta["memory_limit"] is None else meta["memory_limit"]
        problem = Problem(
            [tables[i] for i in of_tensor], [menus[i] for i in of_operator], outputs, phases, arcs, limit
        )
        problem._check()
        return problem

    def _check(self) -> None:
        tensors = len(self.prices)
        if sorted(t for t in self.outputs if t >= 0) != list(range(tensors)) or min(self.outputs) < -1:
            raise Malformed("not every tensor has one producer")
        if not all(0 <= t < tensors for arcs in self.arcs for t in arcs):
            raise Malformed("an operator reads a tensor that is not there")
        for o, menu in enumerate(self.menus):
            columns = [(t, menu.reads[:, a]) for a, t in enumerate(self.arcs[o])]
            columns += [(self.outputs[o], menu.out)] if self.outputs[o] >= 0 else []
            for t, labels in columns:
                if labels.min() < -1 or labels.max() >= len(self.prices[t]) - 1:
                    raise Malformed(f"operator {o} has a label that its tensor has not")

    @cached_property
    def fans(self) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(tensor, producer, readers) of each tensor and phase; the readers, (operator, arc), share copies."""
        makers = {t: o for o, t in enumerate(self.outputs) if t >= 0}
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for o, arcs in enumerate(self.arcs):
            for a, t in enumerate(arcs):
                readers.setdefault((t, self.phases[o]), []).append((o, a))
        return [(t, makers[t], readers[t, phase]) for t, phase in sorted(readers)]

    def cost(self, choice: Sequence[int]) -> float:
        """Strategies, and each copy once for all its readers of a phase; inf where a copy cannot be made."""
        terms = [float(menu.cost[s]) for menu, s in zip(self.menus, choice, strict=True)]
        for t, maker, readers in self.fans:
            left = int(self.menus[maker].out[choice[maker]])
            wanted = {int(self.menus[o].reads[choice[o], a]) for o, a in readers}
            terms += [float(self.prices[t][left, label]) for label in wanted]
        return math.fsum(terms) if all(map(math.isfinite, terms)) else math.inf

    def memory(self, choice: Sequence[int]) -> float:
        """Bytes that the choice holds at the moment that the limit is about."""
        return math.fsum(float(menu.memory[s]) for menu, s in zip(self.menus, choice, strict=True))


def _tables(arrays: Mapping[str, NDArray]) -> list[Floats]:
    flat = _Cursor("tables", arrays["tables"])
    result = []
    for labels in arrays["table.labels"].tolist():
        if labels < 1:
            raise Malformed("a table without labels")
        table = np.full((labels + 1, labels + 1), np.inf)
        table[:labels, :labels] = flat.take(labels * labels).reshape(labels, labels)
        table[:, labels] = 0.0  # nothing is copied for who does not read
        if not (table >= 0).all():
            raise Malformed("a copy's price is below 0 or no number")
        result.append(table)
    flat.close()
    return result


def _menus(arrays: Mapping[str, NDArray]) -> list[Menu]:
    flat = {name: _Cursor(name, arrays[f"menu.{name}"]) for name in ("out", "reads", "cost", "memory")}
    counts, arcs = arrays["menu.strategies"].tolist(), arrays["menu.arcs"].tolist()
    if len(counts) != len(arcs) or any(n < 1 for n in counts) or any(a < 0 for a in arcs):
        raise Malformed("a menu without strategies")
    menus = []
    for n, a in zip(counts, arcs, strict=True):
        menu = Menu(
            flat["out"].take(n).astype(np.int64),
            flat["reads"].take(n * a).astype(np.int64).reshape(n, a),
            flat["cost"].take(n),
            flat["memory"].take(n),
        )
        if not (menu.cost > -np.inf).all() or not np.isfinite(menu.memory).all():
            raise Malformed("a strategy's cost or memory is no number")
        menus.append(menu)
    for cursor in flat.values():
        cursor.close()
    return menus


# ------------------------------------------------------------------------------------------------ the proof


def _claims(problem: Problem, arrays: Mapping[str, NDArray], meta: Mapping[str, Any]) -> tuple[float, float]:
    """The choice's cost and the bound, after the choice was priced anew."""
    choice = _get(arrays, "choice").tolist()
    if len(choice) != len(problem.menus):
        raise Malformed(f"the choice names {len(choice)} strategies for {len(problem.menus)} operators")
    if not all(0 <= s < len(menu.cost) for s, menu in zip(choice, problem.menus, strict=True)):
        raise Malformed("the choice names a strategy that is not there")
    cost, claimed, bound = problem.cost(choice), meta["cost"], meta["bound"]
    if not math.isclose(cost, claimed, rel_tol=SLACK):
        raise Refuted(f"the choice costs {cost:.9g} s, not {claimed:.9g} s")
    if problem.memory(choice) > problem.limit * (1 + SLACK):
        raise Refuted(
            f"the choice holds {problem.memory(choice):.0f} bytes, the limit is {problem.limit:.0f}"
        )
    if bound > cost + SLACK * abs(cost):
        raise Refuted(f"the bound {bound:.9g} s is above the choice's cost {cost:.9g} s")
    return cost, bound


def _prove(
    problem: Problem, arrays: Mapping[str, NDArray], prices: Sequence[tuple[float, float]], bound: float
) -> None:
    """All steps; raises Refuted at the first that does not prove its part."""
    steps = len(prices)
    named = {f"step{i}.{part}" for i in range(steps) for part in _STEP}
    if extra := set(arrays) - named - set(_PROBLEM) - {"choice", "meta"}:
        raise Malformed(f"array {min(extra)!r} belongs to no step")
    if bound <= 0 and all((menu.cost >= 0).all() for menu in problem.menus):
        return  # no price is below 0
    kept = [np.isfinite(menu.cost) for menu in problem.menus]
    if not all(k.any() for k in kept):
        raise Malformed("an operator has no strategy of finite cost")
    if not _same(_keep(problem, _get(arrays, "step0.keep")), kept):
        raise Refuted("step 0 does not keep every strategy")
    for i, (nu, dear) in enumerate(prices):
        if nu < 0 or (nu > 0 and math.isinf(problem.limit)):
            raise Refuted(f"step {i} prices memory, which has no limit, or below 0")
        parts = {part: _get(arrays, f"step{i}.{part}") for part in _STEP}
        values = _strategy_bounds(problem, kept, nu, dear, parts, i)
        least = bound - SLACK * abs(bound) + (nu * problem.limit if nu else 0.0)
        if i == steps - 1:
            if max(float(v.min()) for v in values) < least:
                raise Refuted(f"step {i} proves less than the bound {bound:.9g} s")
            return
        following = _keep(problem, _get(arrays, f"step{i + 1}.keep"))
        for o, (before, after, value) in enumerate(zip(kept, following, values, strict=True)):
            if (after & ~before).any() or not after.any():
                raise Refuted(f"step {i + 1} keeps a strategy of operator {o} that was dropped, or none")
            if (value[~after[before]] < least).any():
                raise Refuted(f"step {i} drops a strategy of operator {o} that may be part of a cheaper plan")
        kept = following


def _same(a: Sequence[NDArray], b: Sequence[NDArray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def _keep(problem: Problem, packed: NDArray) -> list[NDArray[np.bool_]]:
    """For each operator, which strategies a step keeps."""
    sizes = [len(menu.cost) for menu in problem.menus]
    if len(packed) != (sum(sizes) + 7) // 8:
        raise Malformed("`keep` has not one bit for each strategy")
    bits = np.unpackbits(packed, count=sum(sizes)).astype(bool)
    return np.split(bits, np.cumsum(sizes)[:-1])


@dataclass(frozen=True, eq=False)
class _Arc:
    """What one arc adds to B(s): its least over all pairs, and over those with a row or a column."""

    least: float
    by_row: Floats
    by_column: Floats
    rounding: float


def _strategy_bounds(
    problem: Problem,
    kept: Sequence[NDArray[np.bool_]],
    nu: float,
    dear: float,
    parts: Mapping[str, NDArray],
    number: int,
) -> list[Floats]:
    """B(s) of the kept strategies of each operator, rounded down."""
    flat = {name: _Cursor(f"step{number}.{name}", parts[name]) for name in ("x", "y", "lam")}
    thetas = [menu.cost[k] + nu * menu.memory[k] for menu, k in zip(problem.menus, kept, strict=True)]
    sizes = [np.abs(theta) for theta in thetas]
    rises = [np.zeros(len(theta)) for theta in thetas]
    totals: list[float] = []
    rounding = 0.0
    for t, maker, readers in problem.fans:
        rows, row_of = np.unique(problem.menus[maker].out[kept[maker]], return_inverse=True)
        reads = [problem.menus[o].reads[kept[o], a] for o, a in readers]
        columns = np.unique(np.concatenate(reads))
        x = _finite(flat["x"].take(len(readers) * len(rows)), number).reshape(len(readers), len(rows))
        y = flat["y"].take(len(readers) * len(columns)).reshape(len(readers), len(columns))
        shares = _shares(problem.prices[t][np.ix_(rows, columns)], len(readers), dear, flat["lam"], number)
        rounding += shares.excess
        for k, (o, _) in enumerate(readers):
            column_of = np.searchsorted(columns, reads[k])
            arc = _arc(shares.lam[k], x[k], _finite(y[k], number, column_of), np.unique(column_of))
            totals.append(arc.least)
            rounding += arc.rounding
            _add(thetas[maker], sizes[maker], rises[maker], x[k], arc.by_row - arc.least, row_of)
            _add(thetas[o], sizes[o], rises[o], y[k], arc.by_column - arc.least, column_of)
    for cursor in flat.values():
        cursor.close()
    rounding += ROUNDING * math.fsum(float(size.max()) for size in sizes)
    least = [float(theta.min()) for theta in thetas]
    bound = math.fsum([*totals, *least]) - rounding
    return [bound + (theta - low) + rise for theta, low, rise in zip(thetas, least, rises, strict=True)]


def _add(theta: Floats, size: Floats, rise: Floats, message: Floats, gain: Floats, label: Ints) -> None:
    """An arc's part in the strategies of one of its ends."""
    theta += message[label]
    size += np.abs(message[label]) + np.abs(gain[label])
    rise += gain[label]


@dataclass(frozen=True, eq=False)
class _Shares:
    """Each consumer's part of the prices, and by how much the parts of a copy may exceed its price."""

    lam: Floats
    excess: float


def _shares(price: Floats, consumers: int, dear: float, flat: _Cursor, number: int) -> _Shares:
    blocked = np.isinf(price)
    if consumers == 1:
        return _Shares(np.where(blocked, dear, price)[None], 0.0)
    lam = _finite(flat.take(consumers * price.size), number).reshape(consumers, *price.shape)
    paid = np.where(blocked, 0.0, lam)
    if (paid < 0).any():
        raise Refuted(f"step {number} lets a consumer pay less than nothing for a copy")
    over = np.maximum(paid.sum(0) * (1 + ROUNDING) - np.where(blocked, 0.0, price), 0.0)
    if (over > SLACK * np.where(blocked, 1.0, price)).any():
        raise Refuted(f"step {number} shares more than the price of a copy")
    return _Shares(np.where(blocked, lam, paid), float(over.max(0).sum()))


def _arc(lam: Floats, x: Floats, y: Floats, offered: Ints) -> _Arc:
    """Minima of lam - x - y over the columns that the consumer offers."""
    left = lam[:, offered] - x[:, None] - y[offered]
    by_column = np.full(lam.shape[1], np.inf)
    by_column[offered] = left.min(0)
    size = np.abs(lam[:, offered]).max() + np.abs(x).max() + np.abs(y[offered]).max()
    return _Arc(float(left.min()), left.min(1), by_column, ROUNDING * float(size))


def _finite(values: Floats, number: int, used: Ints | None = None) -> Floats:
    if not np.isfinite(values if used is None else values[used]).all():
        raise Refuted(f"step {number} has a message that is no finite number")
    return values
