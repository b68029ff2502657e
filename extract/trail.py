"""How a search proved its bound, step by step, so that others can check it without searching.

In: the duals of a search where it prunes or bounds (`Trail.bounded`, `Trail.pruned`).
Out: `certificate(problem, choice, trail)`, the bytes of an .npz file that verification/bound.py checks.

A *step* holds messages over the strategies kept so far (dual.py). Strategies that are gone in the next step are
those that its messages prove to be in no cheaper plan; the last step proves the bound of all choices over what is
left. The proof of another search of the same problem is a chain of its own.

    problem   tables, menus (distinct lists of strategies), operators with their arcs (problem.py)
    choice    the plan's strategies
    step i    keep (a bit for each strategy of each operator), and for each fan in order x, y and, where the fan has
              several consumers, lam; nu and dear are in `meta`, a JSON text
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dual import Dual, FanKey, Floats, Ints
from .problem import Problem

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Messages:
    """Of one fan: x[arc, p], y[arc, q], and lam[arc, p, q] where several consumers share the price."""

    x: Floats
    y: Floats
    lam: Floats | None


@dataclass(frozen=True, eq=False)
class Step:
    """Messages over the strategies `keep` at the price `nu` of a byte; missing conversions cost `dear`."""

    keep: Sequence[Ints]
    nu: float
    dear: float
    messages: Mapping[FanKey, Messages]


@dataclass
class Trail:
    """The chain of prunings so far, and the shortest proof of the best bound that the chain proves."""

    bound: float = -np.inf
    proof: tuple[Step, ...] = ()
    _chain: list[Step] = field(default_factory=list)

    def restart(self) -> None:
        """All strategies are there again."""
        self._chain = []

    def bounded(self, step: Step, bound: float) -> None:
        """The messages prove that what fits costs at least this."""
        if bound > self.bound:
            self.bound, self.proof = bound, (*self._chain, step)

    def pruned(self, step: Step) -> None:
        """The step's messages prove some strategies too dear, and they are gone."""
        self._chain.append(step)


def snapshot(dual: Dual) -> Step:
    """The messages as they are now."""
    messages = {
        key: Messages(fan.x.copy(), fan.y.copy(), fan.lam.copy() if fan.n > 1 else None)
        for key, fan in dual.fans.items()
    }
    return Step(tuple(dual.keep), dual.nu, dual.dear, messages)


def certificate(problem: Problem, choice: Ints, trail: Trail) -> bytes:
    """The problem, the plan's choice, and the proof of its bound; the same bytes for the same search.

    Raises ValueError if the search proved none: it had no operators to choose for.
    """
    if not trail.proof:
        raise ValueError("the search proved no bound")
    bound = min(trail.bound, problem.cost(choice))
    meta = {
        "format": FORMAT,
        "cost": problem.cost(choice),
        "bound": bound,
        "memory_limit": None if np.isinf(problem.memory_limit) else float(problem.memory_limit),
        "steps": [{"nu": float(step.nu), "dear": float(step.dear)} for step in trail.proof],
    }
    arrays: dict[str, Any] = problem_arrays(problem) | {"choice": np.asarray(choice, np.int32)}
    for i, step in enumerate(trail.proof):
        arrays |= {f"step{i}.{name}": array for name, array in _step_arrays(problem, step).items()}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def problem_digest(problem: Problem) -> str:
    """Names a problem: a plan's file and its certificate are about the same one."""
    digest = hashlib.sha256()
    for name, array in sorted(problem_arrays(problem).items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def problem_arrays(problem: Problem) -> dict[str, NDArray]:
    """A problem as flat arrays; equal price tables and equal lists of strategies are there once."""
    tables: dict[bytes, int] = {}
    menus: dict[tuple[bytes, ...], int] = {}
    table_of = [
        tables.setdefault(np.asarray(t.conversion, np.float64).tobytes(), len(tables))
        for t in problem.tensors
    ]
    menu_of, distinct = [], []
    for o in problem.operators:
        menu = (
            np.asarray(o.out, np.int32),
            np.asarray(o.reads, np.int32),
            np.asarray(o.cost, np.float64),
            np.asarray(o.memory, np.float64),
        )
        number = menus.setdefault(tuple(part.tobytes() for part in menu), len(menus))
        if number == len(distinct):
            distinct.append(menu)
        menu_of.append(number)
    return {
        "tables": np.frombuffer(b"".join(tables), np.float64),
        "table.labels": np.array([round((len(t) / 8) ** 0.5) for t in tables], np.int32),
        "tensor.table": np.array(table_of, np.int32),
        "menu.strategies": np.array([len(menu[2]) for menu in distinct], np.int32),
        "menu.arcs": np.array([menu[1].shape[1] for menu in distinct], np.int32),
        **{
            f"menu.{name}": _flat([menu[i] for menu in distinct], dtype)
            for i, (name, dtype) in enumerate(
                {"out": np.int32, "reads": np.int32, "cost": np.float64, "memory": np.float64}.items()
            )
        },
        "operator.menu": np.array(menu_of, np.int32),
        "operator.output": np.array(
            [-1 if o.output is None else o.output for o in problem.operators], np.int32
        ),
        "operator.phase": np.array([o.phase for o in problem.operators], np.int32),
        "operator.arcs": _flat([np.array(o.arcs, np.int32) for o in problem.operators], np.int32),
    }


def _step_arrays(problem: Problem, step: Step) -> dict[str, NDArray]:
    kept = [np.isin(np.arange(len(o.cost)), k) for o, k in zip(problem.operators, step.keep, strict=True)]
    messages = [step.messages[key] for key in problem.fans]
    return {
        "keep": np.packbits(_flat(kept, np.bool_)),
        "x": _flat([m.x for m in messages], np.float64),
        "y": _flat([m.y for m in messages], np.float64),
        "lam": _flat([m.lam for m in messages if m.lam is not None], np.float64),
    }


def _flat(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.ravel(a).astype(dtype) for a in arrays] or [np.zeros(0, dtype)])
