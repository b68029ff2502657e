"""Every shipped parallel rule: it fires, and what it makes means the same.

Each operator of the zoo is saturated on meshes with one and two axes of unequal sizes; every strategy and every move
that the e-graph offers is executed on a mesh simulated in NumPy and compared with the operator itself. A rule that no
strategy or move rests on fails.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from parallegg.mesh import Mesh, Partial
from parallegg.program import TensorType
from parallegg.rewrite.saturation import saturate
from parallegg.rewrite.space import Space, Step
from parallegg.rules import load_rules

from .simulate import compute, join, run, split
from .zoo import CASES, Case, case, f

MESHES = ["a=3", "a=2,b=3", "a=3,b=2"]


@functools.cache
def space(mesh: str) -> Space:
    kinds = [case.kind for case in CASES]
    types = {type_ for kind in kinds for type_ in (*kind.operands, kind.result)}
    return saturate(kinds, types, Mesh.parse(mesh), load_rules())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_strategy_computes_the_operator(case: Case, mesh: str):
    rng = np.random.default_rng(0)
    grid, found = Mesh.parse(mesh), space(mesh)
    operands = case.operands(rng)
    expected = compute(case.node.op, dict(case.node.attributes), operands)[0]
    strategies = found.strategies[case.kind]
    for strategy in strategies[:: max(1, len(strategies) // 30)]:
        blocks = [
            split(value, found.layouts[type_][label], grid, rng) if label >= 0 else {}
            for value, type_, label in zip(operands, case.kind.operands, strategy.reads, strict=True)
        ]
        layout = found.layouts[case.kind.result][strategy.out]
        value = join(run(strategy.steps, blocks, grid), layout, grid)
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9, err_msg=f"{layout} {strategy}")


@pytest.mark.parametrize("mesh", MESHES)
def test_every_move_keeps_the_value(mesh: str):
    rng = np.random.default_rng(1)
    grid, found, type_ = Mesh.parse(mesh), space(mesh), f(6, 12)
    value = rng.uniform(-1, 1, type_.shape)
    layouts = found.layouts[type_]
    assert found.moves[type_]
    for move in found.moves[type_]:
        blocks = split(value, layouts[move.source], grid, rng)
        moved = join(run([Step(move.head, (~0,))], [blocks], grid), layouts[move.target], grid)
        np.testing.assert_allclose(moved, value, rtol=1e-12, atol=1e-12, err_msg=str(move))


def test_every_shipped_rule_is_used():
    used: dict[str, int] = {}
    for mesh in MESHES:
        for strategies in space(mesh).strategies.values():
            for strategy in strategies:
                for rule in strategy.rules:
                    used[rule] = used.get(rule, 0) + 1
        for moves in space(mesh).moves.values():
            for move in moves:
                for rule in move.rules:
                    used[rule] = used.get(rule, 0) + 1
    unused = [name for name in load_rules().named("parallel") if name not in used]
    assert not unused


@pytest.mark.parametrize(
    ("shape", "mesh", "offered"),
    [
        ((6, 12), "a=2", 4),
        ((6, 12), "a=4", 3),
        ((5, 7), "a=3", 2),
        ((1, 1), "a=2", 2),
        ((6, 12), "a=1", 1),
        ((), "a=2", 2),
        ((0, 6), "a=2", 3),
    ],
)
def test_a_split_is_offered_where_the_axis_divides(shape, mesh, offered):
    type_ = TensorType(shape, "float32")
    found = saturate([], [type_], Mesh.parse(mesh), load_rules())
    assert len(found.layouts[type_]) == offered


def test_every_dimension_of_a_tensor_of_many_is_split():
    """Its last dimension becomes the first of the Transpose: the operator offers what the tensor does."""
    many = case("Transpose", f(2, *(1,) * 9, 3, 2), perm=tuple(reversed(range(12)))).kind
    found = saturate([many], many.operands, Mesh.parse("a=2"), load_rules())
    assert {str(layout[0]) for layout in found.layouts[many.operands[0]]} == {"R", "S0", "S11", "P"}
    reads = {s.reads[0] for s in found.strategies[many] if len(s.steps) == 1}
    assert len(reads) == 4


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_only_floats_are_partial(dtype):
    type_ = TensorType((6, 12), dtype)
    found = saturate([], [type_], Mesh.parse("a=2,b=3"), load_rules())
    assert not any(Partial() in layout for layout in found.layouts[type_])
