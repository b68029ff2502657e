"""The planner: a graph, a mesh and a hardware profile in; a plan with cost, bound and memory out.

    kinds -> saturated space (in a worker) -> extraction problem -> solution -> program -> metadata
`prepare` stops after the problem (the sampler and the tests draw other choices from it); `make_plan` goes to the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mesh import Layout, Mesh, Shard
from ..planfile import Plan
from ..program import Node, UserError
from ..rewrite.graph import Graph, Roles
from ..rewrite.kinds import applications
from ..rewrite.worker import rewrite_in_worker, saturate_in_worker
from ..rules import RuleBook, load_rules
from ..units import human_bytes
from .build import Model, build
from .emit import collective_table, emit
from .hardware import Hardware
from .memory import Memory, held_at, held_at_the_turn, memory_use
from .problem import Infeasible, Problem, Solution
from .schemes import restricted
from .search import solve
from .trail import Trail, certificate, problem_digest

GAP = 1e-3  # the search stops when it has proved this
MEMORY_ROUNDS = 6
ALGEBRA_NODES, ALGEBRA_SECONDS = (
    100_000,
    60.0,
)  # it sees the whole graph, so rules that grow it are stopped early

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Limits of one planning run; counts, not seconds, so that the same input gives the same plan."""

    node_limit: int = 2_000_000
    saturation_seconds: float = 600.0
    search_seconds: float | None = None
    gap: float = GAP
    certify: bool = False  # keep the proof of the bound


class DoesNotFit(UserError):
    """No plan fits in the device memory (exit code 1)."""


@dataclass(frozen=True)
class Planned:
    """A plan with the report that `plan --json` prints, and the proof of its bound if that was asked for."""

    plan: Plan
    report: Mapping[str, Any]
    warnings: tuple[str, ...]
    certificate: bytes | None = None


def make_plan(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    book: RuleBook | None = None,
    memory_bytes: int | None = None,
    pins: Mapping[str, Layout] | None = None,
    roles: Roles | None = None,
    scheme: str | None = None,
    options: Options | None = None,
    progress: Progress = lambda _: None,
) -> Planned:
    """The cheapest plan found, its proved bound, and what it holds and sends.

    `memory_bytes` bounds what one device holds at once (default: the profile's memory); raises DoesNotFit with the
    smallest limit known to be feasible. `roles` are those of a training step's nodes and leaves; `scheme` allows only
    the plans of schemes.py's scheme of that name.
    """
    options = options or Options()
    book = book or load_rules()
    start = time.monotonic()
    model = prepare(
        graph, mesh, hardware, book=book, pins=pins, roles=roles, options=options, progress=progress
    )
    if scheme is not None:
        model = restricted(model, scheme)
    searching = time.monotonic()
    limit = hardware.memory_bytes if memory_bytes is None else memory_bytes
    found = _within(model, limit, options, progress)
    solution, memory = found.solution, found.memory
    report = _report(
        model, solution, memory, hardware, limit, searching - start, time.monotonic() - searching
    )
    metadata = _metadata(model, solution, memory, hardware, book, found.rules)
    if scheme is not None:
        report["scheme"] = metadata["scheme"] = scheme
    proof = None
    if options.certify:
        problem, trail = found.proof
        proof = _certificate(problem, solution, trail)
        proved = {
            "bound_problem": problem_digest(problem),
            "certified_bound_s": min(trail.bound, solution.cost),
        }
        metadata, report = metadata | proved, report | proved
    plan = replace(found.plan, metadata=metadata)
    report["collectives"] = collective_table(plan)
    return Planned(plan, report, tuple(_idle_axes(model)), proof)


def _certificate(problem: Problem, solution: Solution, trail: Trail) -> bytes:
    try:
        return certificate(problem, solution.choice, trail)
    except ValueError as error:
        raise UserError(f"there is no certificate of the bound: {error}") from None


def prepare(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    book: RuleBook,
    pins: Mapping[str, Layout] | None = None,
    roles: Roles | None = None,
    options: Options | None = None,
    progress: Progress = lambda _: None,
) -> Model:
    """Saturate the graph's operators and state the extraction problem."""
    options, roles = options or Options(), roles or Roles()
    parts, types = applications(graph)
    parts, types, algebra_stopped_by = rewrite_in_worker(
        parts,
        types,
        list(graph.leaves),
        graph.outputs,
        book,
        node_limit=min(options.node_limit, ALGEBRA_NODES),
        seconds=min(options.saturation_seconds, ALGEBRA_SECONDS),
    )
    kinds = list(dict.fromkeys(part.kind for part in parts))
    used = dict.fromkeys([*(types[name] for name in graph.leaves), *(types[part.tensor] for part in parts)])
    progress(f"saturating {len(kinds)} kinds of {len(parts)} operators")
    space = saturate_in_worker(
        kinds,
        used,
        mesh,
        book,
        node_limit=options.node_limit,
        seconds=options.saturation_seconds,
        progress=progress,
    )
    if space.saturated and algebra_stopped_by != "fixpoint":
        space = replace(space, stopped_by=algebra_stopped_by)
    progress("pricing strategies")
    return build(
        graph, parts, types, space, mesh, hardware, pins=pins, phases=roles.phases, state=roles.state
    )


@dataclass(frozen=True)
class _Found:
    """A solution that fits, its program, and the search that proved its bound."""

    solution: Solution
    plan: Plan
    rules: frozenset[str]
    memory: Memory
    proof: tuple[Problem, Trail]


def _within(model: Model, limit: int, options: Options, progress: Progress) -> _Found:
    """Solve with what is held at one moment bounded by `limit`: first the end of the forward pass, then the peak.

    Whatever fits fits at every moment, so the greatest bound holds. What the row of a moment does not count is known
    once the program is: the excess tightens the limit, a few times, with no word on the bound.
    """
    problem, moment = held_at_the_turn(model), None
    budgets: dict[str | None, float] = {}
    bound, needed = -np.inf, np.inf
    proof = problem, Trail()
    for _ in range(MEMORY_ROUNDS):
        budget = budgets.setdefault(moment, float(limit))
        limited, trail = replace(problem, memory_limit=budget), Trail()
        try:
            solution = _solve(model, limited, options, progress, trail if options.certify else None)
        except Infeasible as refused:
            if budget == limit:
                raise _does_not_fit(model, limit, refused) from None
            break
        if budget == limit:
            bound = max(bound, solution.bound)
            proof = max(proof, (limited, trail), key=lambda one: one[1].bound)
        plan, rules = emit(model, solution.choice)
        memory = memory_use(plan)
        if memory.peak <= limit:
            return _Found(replace(solution, bound=min(bound, solution.cost)), plan, rules, memory, proof)
        needed = min(needed, memory.peak)
        peak = _tensor_of(model, plan.nodes[memory.moment]) if memory.moment >= 0 else None
        if peak is not None and peak not in budgets:
            problem, moment = held_at(model, peak), peak
            continue
        held = problem.memory(solution.choice)
        budgets[moment] = min(budget, held) - max(1.0, min(memory.peak - limit, 0.5 * held))
        if budgets[moment] <= 0:
            break
    raise DoesNotFit(
        f"no plan found that holds at most {_bytes(limit)} a device; the smallest one needs {_bytes(int(needed))}"
    )


def _tensor_of(model: Model, node: Node) -> str | None:
    """What a node of the program helps to compute; None for an output's copies."""
    origin = node.name.rpartition("#")[0]
    if origin.startswith("keep ") and origin.removeprefix("keep ") in model.maker:
        return origin.removeprefix("keep ")
    return next((p.tensor for p in model.parts if any(w.node == origin for w in p.ways)), None)


def _solve(
    model: Model, problem: Problem, options: Options, progress: Progress, trail: Trail | None
) -> Solution:
    def tell(phase: str, cost: float, bound: float, sweeps: int) -> None:
        progress(f"{phase}: cost {cost:.4g} s, bound {bound:.4g} s, {sweeps} sweeps")

    return solve(
        problem,
        axes_of_labels=[axes.astype(np.int64) for axes in model.label_axes],
        gap=options.gap,
        seconds=options.search_seconds,
        progress=tell,
        trail=trail,
    )


def _does_not_fit(model: Model, limit: int, problem: Infeasible) -> DoesNotFit:
    smallest = problem.smallest_memory
    held = (
        "inputs, weights and what waits for the backward pass"
        if model.last_phase
        else "inputs and weights alone"
    )
    hint = "" if smallest is None else f"; {held} need {_bytes(int(smallest))}"
    return DoesNotFit(f"no plan holds at most {_bytes(limit)} a device{hint}")


def _bytes(count: int) -> str:
    return f"{human_bytes(count)} ({count} bytes)"


def _outcome(model: Model, solution: Solution, memory: Memory, hardware: Hardware) -> dict[str, Any]:
    """What both the report and the plan file say."""
    space = model.space
    return {
        "model": model.graph.name,
        "hardware": hardware.name,
        "cost_s": solution.cost,
        "bound_s": solution.bound,
        "gap": solution.gap,
        "saturated": space.saturated,
        "stopped_by": solution.stopped_by if space.saturated else space.stopped_by,
        "memory_bytes": memory.peak,
    }


def _report(
    model: Model,
    solution: Solution,
    memory: Memory,
    hardware: Hardware,
    limit: int,
    saturation_s: float,
    search_s: float,
) -> dict[str, Any]:
    space = model.space
    return {
        **_outcome(model, solution, memory, hardware),
        "mesh": str(model.mesh),
        "saturation_s": saturation_s,
        "search_s": search_s,
        "parameter_bytes": memory.parameters,
        "memory_limit_bytes": limit,
        "operators": len(model.parts),
        "kinds": len(model.offers),
        "enodes": space.enodes,
        "eclasses": space.eclasses,
    }


def _metadata(
    model: Model,
    solution: Solution,
    memory: Memory,
    hardware: Hardware,
    book: RuleBook,
    rules: frozenset[str],
) -> dict[str, Any]:
    """What the plan file keeps: nothing that depends on the clock."""
    return {
        **_outcome(model, solution, memory, hardware),
        "model_digest": model.graph.digest,
        "rules_digest": book.digest,
        "rules": sorted(rules),
    }


def _idle_axes(model: Model) -> list[str]:
    """Axes that can split no tensor of the model."""
    idle = []
    for i, axis in enumerate(model.mesh):
        offered = any(isinstance(layout[i], Shard) for ls in model.space.layouts.values() for layout in ls)
        if axis.size > 1 and not offered:
            idle.append(
                f"mesh axis {axis.name!r} of size {axis.size} divides no dimension of any tensor: it splits nothing"
            )
    return idle


def random_plan(model: Model, choice: NDArray[np.int64]) -> Plan:
    """The plan of any legal choice, without cost or bound."""
    plan, rules = emit(model, choice)
    metadata = {"model": model.graph.name, "model_digest": model.graph.digest, "rules": sorted(rules)}
    return replace(plan, metadata=metadata)
