"""Schemes: the extraction problem restricted to one well-known way to use the devices, to compare plans with.

    restricted(model, "data-parallel")      the same problem with the choices outside of the scheme priced at infinity

data-parallel: every device holds all state and weights and its part of the batch, which is dimension 0 of what is fed,
split over all axes. Nothing is sent but sums of partial results (gradients, means over the batch), and what the outputs
need to be whole.
The plan under a scheme is priced, emitted, run and verified as any other; its bound is over the plans of the scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..mesh import Layout, Partial, Placement, Replicate, Shard, format_layout
from ..program import UserError
from .build import Model
from .problem import ABSENT, Operator, Problem

Mask = NDArray[np.bool_]


def restricted(model: Model, scheme: str) -> Model:
    """The model whose problem allows the plans of the scheme only."""
    if scheme not in SCHEMES:
        raise UserError(f"scheme {scheme!r}: expected one of {', '.join(SCHEMES)}")
    return replace(model, problem=SCHEMES[scheme](model))


def _data_parallel(model: Model) -> Problem:
    problem = _with_summing_only(model)
    wanted = {name: model.mesh.replicated() for name in model.graph.parameters}
    wanted |= {name: model.mesh.replicated() for name, _ in model.state}
    wanted |= {name: _split(model, name) for name in model.graph.inputs if name not in wanted}
    allowed = [_in_layout(model, o, wanted[o.name]) if o.name in wanted else None for o in problem.operators]
    operators = tuple(map(_limited, problem.operators, allowed))
    return _reachable(model, replace(problem, operators=operators))


def _split(model: Model, name: str) -> Layout:
    """What is fed, split over all axes along dimension 0; a scalar is whole."""
    type_, mesh = model.types[name], model.mesh
    if not type_.rank:
        return mesh.replicated()
    if type_.shape[0] % mesh.size:
        raise UserError(
            f"data-parallel: the {type_.shape[0]} examples of input {name!r} cannot be split over "
            f"{mesh.size} devices (mesh {mesh})"
        )
    return (Shard(0),) * len(mesh)


def _in_layout(model: Model, leaf: Operator, layout: Layout) -> Mask:
    """Which strategies leave a leaf in that layout."""
    mask = np.array([model.layout(leaf.name, label) == layout for label in leaf.out])
    if not mask.any():
        raise UserError(
            f"data-parallel: {leaf.name!r} is pinned, but the scheme needs {format_layout(layout)}"
        )
    return mask


def _with_summing_only(model: Model) -> Problem:
    """The problem in which nothing is sent but sums, and outputs in any way."""
    problem = model.problem
    returned = {t for o in problem.operators if o.output is None for t in o.arcs}
    sums = {  # tensors of one type share their table
        id(c.seconds): np.where(_sums(c.layouts), c.seconds, np.inf) for c in model.conversions.values()
    }
    tensors = [
        t if i in returned else replace(t, conversion=sums[id(t.conversion)])
        for i, t in enumerate(problem.tensors)
    ]
    return replace(problem, tensors=tuple(tensors))


def _sums(layouts: Sequence[Layout]) -> Mask:
    """Between which layouts only sums of partial results are sent; a device may take a part of what it has."""

    def follows(p: Placement, q: Placement) -> bool:
        return p == q or (p == Partial() and q == Replicate()) or (p == Replicate() and isinstance(q, Shard))

    return np.array(
        [[all(map(follows, before, after)) for after in layouts] for before in layouts], dtype=bool
    )


def _reachable(model: Model, problem: Problem) -> Problem:
    """Without the strategies that read what no allowed strategy before them leaves."""
    have: list[Mask] = [np.zeros(len(t.conversion), bool) for t in problem.tensors]
    state, operators = {name for name, _ in model.state}, []
    for operator in problem.operators:
        good = np.isfinite(operator.cost)
        if operator.name not in state:  # whose next value is made later
            good &= _readable(operator, have)
            _require(good, operator)
        if operator.output is not None:
            made = operator.out[good]
            finite = np.isfinite(problem.tensors[operator.output].conversion)
            have[operator.output] = np.any(finite[made[made != ABSENT]], axis=0, keepdims=False)
        operators.append(_limited(operator, good))
    for operator in operators:
        if operator.name in state:
            _require(np.isfinite(operator.cost) & _readable(operator, have), operator)
    return replace(problem, operators=tuple(operators))


def _readable(operator: Operator, have: Sequence[Mask]) -> Mask:
    """Which strategies read only what there is."""
    good = np.ones(len(operator.out), bool)
    for a, t in enumerate(operator.arcs):
        labels = operator.reads[:, a]
        good &= (labels == ABSENT) | have[t][labels]
    return good


def _require(good: Mask, operator: Operator) -> None:
    if not good.any():
        raise UserError(
            f"data-parallel: {operator.name!r} cannot be computed from parts of the batch by sums alone"
        )


def _limited(operator: Operator, allowed: Mask | None) -> Operator:
    return operator if allowed is None else replace(operator, cost=np.where(allowed, operator.cost, np.inf))


SCHEMES: dict[str, Callable[[Model], Problem]] = {"data-parallel": _data_parallel}
