"""Sequential dual ascent: messages whose every state is a proved lower bound on an extraction problem.

In: a Problem, the strategies each operator keeps, a price nu on memory, and `dear`, the price of a missing
conversion (any number keeps the bound valid; just above the best plan is best).  Out: bounds, never a plan.
A *fan* is a tensor with its consumers of one phase, who share copies: f = (t, phase). Its consumer arc k carries
x[p], y[q] and a share lam[p, q] >= 0 of the price, sum_k lam_k <= d_t. A tensor has a fan per phase that reads it.

    theta_o(s) = c_o(s) + nu m_o(s) + sum_out x_a[p(s)] + sum_in y_a[q_a(s)]      Dual.theta
    B = sum_o min theta_o + sum_a min(lam_a - x_a - y_a)                          Dual.bound
    visiting operator o in pass order:                                            Dual._visit
      out arcs  x <- min_q (lam - y)                                              Fan.pull_x
      re-split  lam <- min(lam, max(0, x + y)), rest of d in equal parts          Fan.resplit, pull_x again
      in arcs   y <- min_p (lam - x)                                              Fan.pull_y
      arcs whose other end comes later in the pass, also from the producer of an  Dual._visit
                updated state: message -= gamma min {theta(s) : label},
                gamma = 1 / max(arcs with earlier operators, arcs with later ones)
    soft sweep at temperature T: min -> -T log sum exp(-. / T)                    the `temperature` arguments
    B(s) = B - min theta_o - its arcs' minima + theta_o(s) + min over the rows and columns that s selects
                                                                                  Dual.strategy_bounds

A hard sweep never lowers B, in whatever order it visits the operators. B(s) bounds every choice that contains s:
s may go once B(s) exceeds a plan. One-consumer fans have lam = d, shared between all fans with equal tables. With a
memory limit M the bound on the cost is B - nu M. Missing conversions cost `dear` to every consumer in full (their
sum is inf).
Rejected: fixed shares (stall 2 % low); subgradient steps; simplex duals (degenerate).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .problem import Operator, Problem, priced_with_absent

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NOT_OFFERED = -1e30  # the message of a label that this consumer cannot read: never the least, never priced


class PriceTables:
    """Price tables restricted to labels, one object per distinct (conversion, rows, columns)."""

    def __init__(self) -> None:
        self._whole: dict[int, tuple[Floats, Floats]] = {}
        self._parts: dict[tuple[int, bytes, bytes], Floats] = {}

    def fresh(self) -> PriceTables:
        """The same whole tables, no parts: parts live as long as the labels on offer."""
        twin = PriceTables()
        twin._whole = self._whole
        return twin

    def get(self, conversion: Floats, rows: Ints, columns: Ints) -> Floats:
        """`conversion[rows][:, columns]`, with the lines for ABSENT; inf where there is no conversion."""
        if id(conversion) not in self._whole:  # the conversion is kept alive, so that its id stays its own
            self._whole[id(conversion)] = (conversion, priced_with_absent(conversion))
        key = (id(conversion), rows.tobytes(), columns.tobytes())
        if key not in self._parts:
            self._parts[key] = self._whole[id(conversion)][1][np.ix_(rows, columns)]
        return self._parts[key]


class Groups:
    """Strategies grouped by a label: `least(values)[i]` is the minimum over the i-th label present."""

    def __init__(self, index: Ints) -> None:
        self.index = index
        self.order = np.argsort(index, kind="stable")
        self.present, self.starts = np.unique(index[self.order], return_index=True)
        self._one_each = len(self.present) == len(index)
        self._member = np.repeat(np.arange(len(self.present)), np.diff(np.append(self.starts, len(index))))

    def least(self, values: Floats, temperature: float) -> Floats:
        """Minimum by label, soft at a positive temperature."""
        ordered = values[self.order]
        if self._one_each:
            return ordered
        least = np.minimum.reduceat(ordered, self.starts)
        if temperature > 0:
            weights = np.exp((least[self._member] - ordered) / temperature)
            least -= temperature * np.log(np.add.reduceat(weights, self.starts))
        return least


FanKey = tuple[int, int]  # (tensor, phase)


class Fan:
    """A tensor read by n >= 1 arcs of one phase: its price table over the labels on offer, its arcs' messages."""

    def __init__(self, key: FanKey, rows: Ints, reads: Sequence[Ints], price: Floats, dear: float) -> None:
        self.key = key
        self.rows, self.columns = rows, np.unique(np.concatenate(reads))
        self.true_price = price
        blocked = np.isinf(price)
        self.blocked = blocked if blocked.any() else None
        self.price = np.where(blocked, dear, price) if self.blocked is not None else price
        self.dear = dear
        n = len(reads)
        offered = np.array([np.isin(self.columns, read) for read in reads])
        self.missing = None if offered.all() else ~offered
        self.share = (offered / offered.sum(0))[:, None, :]
        self.x = np.zeros((n, len(rows)))
        self.y = np.where(offered, 0.0, _NOT_OFFERED)
        self.lam = self.price[None] if n == 1 else self.price * self.share
        if n > 1 and self.blocked is not None:
            self.lam[:, self.blocked] = dear

    @property
    def n(self) -> int:
        """The number of consumer arcs."""
        return len(self.x)

    def slice_from(self, old: Fan) -> None:
        """Take the messages of the same tensor with more labels."""
        p, q = np.searchsorted(old.rows, self.rows), np.searchsorted(old.columns, self.columns)
        self.x = old.x[:, p]
        self.y = np.where(self.y == _NOT_OFFERED, self.y, old.y[:, q])
        if self.n > 1:
            self.lam = old.lam[:, p[:, None], q[None, :]]

    def pull_x(self, work: Workspace, temperature: float) -> None:
        """x <- min_q (lam - y): what each produced label costs downstream."""
        gap = np.subtract(self.lam, self.y[:, None, :], out=work.like(self.lam))
        self.x = _least(gap, 2, temperature)

    def resplit(self, work: Workspace) -> None:
        """Give the price that a consumer does not need to those who read the copy too."""
        need = np.add(self.x[:, :, None], self.y[:, None, :], out=work.like(self.lam))
        np.maximum(need, 0.0, out=need)
        np.minimum(self.lam, need, out=self.lam)
        rest = self.price - self.lam.sum(0)
        np.maximum(rest, 0.0, out=rest)
        self.lam += np.multiply(rest, self.share, out=need)
        if self.blocked is not None:
            self.lam[:, self.blocked] = self.dear

    def pull_y(self, k: int, work: Workspace, temperature: float) -> None:
        """y <- min_p (lam - x) on consumer arc k: what each read label costs upstream."""
        table = self.lam[k]
        gap = np.subtract(table, self.x[k][:, None], out=work.like(table))
        self.y[k] = _least(gap, 0, temperature)
        if self.missing is not None:
            self.y[k][self.missing[k]] = _NOT_OFFERED

    def left(self, work: Workspace) -> Floats:
        """lam - x - y of all arcs, in scratch memory."""
        gap = np.subtract(self.lam, self.y[:, None, :], out=work.like(self.lam))
        return np.subtract(gap, self.x[:, :, None], out=gap)


class Workspace:
    """Scratch memory that stays in cache."""

    def __init__(self, size: int) -> None:
        self._flat = np.empty(size)

    def like(self, table: Floats) -> Floats:
        return self._flat[: table.size].reshape(table.shape)


def _least(gap: Floats, axis: int, temperature: float) -> Floats:
    """Minimum along an axis, soft at a positive temperature; `gap` is scratch and is destroyed."""
    least = gap.min(axis)
    if temperature > 0:
        np.subtract(np.expand_dims(least, axis), gap, out=gap)
        np.divide(gap, temperature, out=gap)
        np.maximum(gap, -80.0, out=gap)
        weights = np.exp(gap.astype(np.float32))  # any message keeps the bound valid, so speed counts
        least -= temperature * np.log(weights.sum(axis))
    return least


@dataclass
class Read:
    """One arc seen from its consumer: consumer arc k of a fan, and which column each strategy reads."""

    fan: Fan
    k: int
    groups: Groups
    later: bool  # its producer comes after this consumer, which is state


@dataclass
class Made:
    """The output seen from its producer: one fan, whose first `early` readers come before it (they are state)."""

    fan: Fan
    early: int

    def ahead(self, forward: bool) -> slice:
        """The arcs whose consumers come later in a pass."""
        return slice(self.early, None) if forward else slice(self.early)


@dataclass
class Unit:
    """One operator with the strategies it keeps (`kept` are their numbers in the problem)."""

    kept: Ints
    price: Floats
    memory: Floats
    cost: Floats  # price + nu memory
    out: Groups
    made: list[Made]  # one for each phase that reads the output
    reads: list[Read]
    gamma: float = 1.0


class Dual:
    """The messages of a problem restricted to `keep`; see the module header."""

    def __init__(
        self,
        problem: Problem,
        keep: Sequence[Ints],
        dear: float,
        nu: float = 0.0,
        tables: PriceTables | None = None,
    ) -> None:
        self.problem, self.keep, self.dear, self.nu = problem, list(keep), dear, nu
        self.tables = PriceTables() if tables is None else tables.fresh()
        self.fans: dict[FanKey, Fan] = self._fans()
        self.work = Workspace(max((fan.lam.size for fan in self.fans.values()), default=1))
        self.units = [self._unit(o, operator) for o, operator in enumerate(problem.operators)]

    def _fans(self) -> dict[FanKey, Fan]:
        operators, fans = self.problem.operators, {}
        for key, readers in self.problem.fans.items():
            maker = self.problem.producers[key[0]]
            rows = np.unique(operators[maker].out[self.keep[maker]]).astype(np.int64)
            reads = [np.unique(operators[r].reads[self.keep[r], a]).astype(np.int64) for r, a in readers]
            columns = np.unique(np.concatenate(reads))
            price = self.tables.get(self.problem.tensors[key[0]].conversion, rows, columns)
            fans[key] = Fan(key, rows, reads, price, self.dear)
        self._share_filled(fans)
        return fans

    @staticmethod
    def _share_filled(fans: dict[FanKey, Fan]) -> None:
        """Equal tables stay one object also after their missing conversions were priced."""
        filled: dict[int, Floats] = {}
        for fan in fans.values():
            fan.price = filled.setdefault(id(fan.true_price), fan.price)
            if fan.n == 1:
                fan.lam = fan.price[None]

    def _unit(self, o: int, operator: Operator) -> Unit:
        problem, kept = self.problem, self.keep[o]
        out = Groups(np.unique(operator.out[kept], return_inverse=True)[1].reshape(-1))
        made = [
            Made(self.fans[key], sum(r < o for r, _ in problem.fans[key]))
            for key in problem.fans_of(operator.output)
        ]
        reads = []
        for a, t in enumerate(operator.arcs):
            key = (t, operator.phase)
            index = np.searchsorted(self.fans[key].columns, operator.reads[kept, a])
            k, later = problem.fans[key].index((o, a)), problem.producers[t] > o
            reads.append(Read(self.fans[key], k, Groups(index), later))
        price, memory = operator.cost[kept], operator.memory[kept]
        after = sum(m.fan.n - m.early for m in made) + sum(read.later for read in reads)
        before = sum(m.early for m in made) + sum(not read.later for read in reads)
        cost = price + self.nu * memory if self.nu else price
        return Unit(kept, price, memory, cost, out, made, reads, 1.0 / max(before, after, 1))

    def price_memory(self, nu: float) -> None:
        """Change the price of memory (per byte); the messages stay valid."""
        self.nu = nu
        for unit in self.units:
            unit.cost = unit.price + nu * unit.memory if nu else unit.price

    def restrict(self, keep: Sequence[Ints], dear: float | None = None) -> Dual:
        """The same messages over fewer strategies."""
        smaller = Dual(self.problem, keep, self.dear if dear is None else dear, self.nu, self.tables)
        for key, fan in smaller.fans.items():
            fan.slice_from(self.fans[key])
            if fan.n > 1 and fan.blocked is not None:
                fan.lam[:, fan.blocked] = fan.dear
        return smaller

    def copy(self) -> Dual:
        """Messages of its own over the same tables."""
        twin = copy.copy(self)
        twin.fans = {key: copy.copy(fan) for key, fan in self.fans.items()}
        for fan in twin.fans.values():
            fan.y = fan.y.copy()
            fan.x = fan.x.copy()
            if fan.n > 1:
                fan.lam = fan.lam.copy()
        twin.units = [copy.copy(unit) for unit in self.units]
        for unit in twin.units:
            unit.made = [replace(m, fan=twin.fans[m.fan.key]) for m in unit.made]
            unit.reads = [replace(read, fan=twin.fans[read.fan.key]) for read in unit.reads]
        return twin

    def globally(self, local: Ints) -> Ints:
        """The problem's numbers of strategies chosen among those kept."""
        return np.array([kept[s] for kept, s in zip(self.keep, local, strict=True)], dtype=np.int64)

    def locally(self, choice: Ints) -> Ints:
        """The reverse; every chosen strategy must be kept."""
        local = [int(np.searchsorted(kept, s)) for kept, s in zip(self.keep, choice, strict=True)]
        assert all(kept[i] == s for kept, i, s in zip(self.keep, local, choice, strict=True))
        return np.array(local, dtype=np.int64)

    def pairs(self) -> int:
        """The number of (arc, p, q) on offer."""
        return sum(len(fan.rows) * int((fan.share > 0).sum()) for fan in self.fans.values())

    def theta(self, unit: Unit) -> Floats:
        """Reparametrised costs of an operator's strategies."""
        theta = unit.cost.copy()
        for made in unit.made:
            theta += made.fan.x.sum(0)[unit.out.index]
        for read in unit.reads:
            theta += read.fan.y[read.k][read.groups.index]
        return theta

    def forward(self, temperature: float = 0.0) -> None:
        """One pass in the problem's order."""
        for unit in self.units:
            self._visit(unit, True, temperature)

    def backward(self, temperature: float = 0.0) -> None:
        """One pass against it."""
        for unit in reversed(self.units):
            self._visit(unit, False, temperature)

    def _visit(self, unit: Unit, forward: bool, temperature: float) -> None:
        for made in unit.made:
            made.fan.pull_x(self.work, temperature)
            if made.fan.n > 1:
                made.fan.resplit(self.work)
                made.fan.pull_x(self.work, temperature)
        for read in unit.reads:
            read.fan.pull_y(read.k, self.work, temperature)
        theta, gamma = self.theta(unit), unit.gamma
        for made in unit.made:
            ahead = made.fan.x[made.ahead(forward)]
            if len(ahead):
                ahead -= gamma * unit.out.least(theta, temperature / gamma)
        for read in unit.reads:
            if read.later == forward:
                read.fan.y[read.k][read.groups.present] -= gamma * read.groups.least(
                    theta, temperature / gamma
                )

    def bound(self) -> float:
        """B: no choice of kept strategies has a smaller cost + nu memory."""
        total = sum(float(self.theta(unit).min()) for unit in self.units)
        return total + sum(float(fan.left(self.work).min((1, 2)).sum()) for fan in self.fans.values())

    def strategy_bounds(self) -> tuple[float, list[Floats]]:
        """B, and for each operator's strategies the bound B(s) on choices that contain them."""
        rows, columns, least = {}, {}, {}
        for key, fan in self.fans.items():
            left = fan.left(self.work)
            rows[key], columns[key] = left.min(2), left.min(1)
            least[key] = rows[key].min(1)
        thetas = [self.theta(unit) for unit in self.units]
        bound = sum(float(theta.min()) for theta in thetas) + sum(
            float(value.sum()) for value in least.values()
        )
        bounds = []
        for unit, theta in zip(self.units, thetas, strict=True):
            rise = theta - theta.min()
            for made in unit.made:
                key = made.fan.key
                rise += (rows[key] - least[key][:, None]).sum(0)[unit.out.index]
            for read in unit.reads:
                key = read.fan.key
                rise += (columns[key][read.k] - least[key][read.k])[read.groups.index]
            bounds.append(bound + rise)
        return bound, bounds
