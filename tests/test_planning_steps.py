"""Plans of training steps: state keeps its layout, copies are made again in each phase, memory follows both."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import numpy as np
import parallegg
import pytest
from parallegg.extract.emit import emit
from parallegg.extract.hardware import load_hardware
from parallegg.extract.memory import held_at, memory_use
from parallegg.extract.planner import make_plan, prepare
from parallegg.extract.referee import optimum
from parallegg.extract.sampling import random_choice
from parallegg.extract.search import solve
from parallegg.mesh import Mesh, Replicate, Shard
from parallegg.planfile import Plan, load, save
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.graph import Graph, Roles
from parallegg.rules import load_rules

MESH = Mesh.parse("data=4")
ROLES = Roles(
    dict.fromkeys(("h", "y"), 0)
    | dict.fromkeys(("e", "gv", "vt", "eh", "xt", "gu", "ht"), 1)
    | dict.fromkeys(("new.u", "new.v", "new.m"), 2),
    (("u", "new.u"), ("v", "new.v"), ("m", "new.m")),
)


def step(tokens: int = 512, width: int = 64) -> Graph:
    """y = (x u) v towards t; v learns with momentum m, u without."""
    f = "float32"
    whole, square = TensorType((tokens, width), f), TensorType((width, width), f)
    types = dict.fromkeys(("x", "t", "h", "y", "e", "eh"), whole)
    types |= dict.fromkeys(("u", "v", "m", "gv", "gu", "vt", "new.u", "new.v", "new.m"), square)
    types |= {name: TensorType((width, tokens), f) for name in ("xt", "ht")}
    program = [
        ("h", "MatMul", ("x", "u")),
        ("y", "MatMul", ("h", "v")),
        ("e", "Sub", ("y", "t")),
        ("ht", "Transpose", ("h",)),
        ("gv", "MatMul", ("ht", "e")),
        ("vt", "Transpose", ("v",)),
        ("eh", "MatMul", ("e", "vt")),
        ("xt", "Transpose", ("x",)),
        ("gu", "MatMul", ("xt", "eh")),
        ("new.m", "Add", ("m", "gv")),
        ("new.v", "Sub", ("v", "new.m")),
        ("new.u", "Sub", ("u", "gu")),
    ]
    nodes = [
        Node(name, op, operands, (name,), {"perm": (1, 0)} if op == "Transpose" else {})
        for name, op, operands in program
    ]
    outputs = ("y", "new.u", "new.v", "new.m")
    return Graph("step", tuple(nodes), ("x", "t", "m"), ("u", "v"), {}, outputs, types)


def prepared(graph: Graph, mesh: Mesh = MESH, **options):
    return prepare(graph, mesh, load_hardware("cpu"), book=load_rules(), roles=ROLES, **options)


@functools.cache
def sharded_state() -> Plan:
    """u, v and m kept in quarters, the batch split: as in ZeRO."""
    pins = {name: (Shard(0),) for name in ("u", "v", "m", "x", "t", "y")}
    return make_plan(step(4096), MESH, load_hardware("cpu"), roles=ROLES, pins=pins).plan


def test_state_ends_in_the_layout_in_which_it_began(tmp_path: Path):
    plan = sharded_state()
    ports = {port.name: port for port in (*plan.inputs, *plan.outputs)}
    assert plan.state == ROLES.state
    assert all(ports[old].layout == ports[new].layout == (Shard(0),) for old, new in plan.state)
    save(plan, tmp_path / "step.onnx")
    assert load(tmp_path / "step.onnx") == plan


def test_a_weight_is_gathered_again_in_the_backward_pass():
    plan = sharded_state()
    gathers = Counter(node.inputs[0] for node in plan.nodes if node.op == "AllGather")
    assert gathers["u@S0"] == 1  # only the forward pass reads u
    assert gathers["v@S0"] + gathers["vt@S1"] == 2
    scatters = [node for node in plan.nodes if node.op == "ReduceScatter"]
    assert len(scatters) == 2  # the gradients, straight into the layout of state


def test_copies_of_phases_have_names_of_their_own():
    """Where v is made whole, the backward pass does so again under another name."""
    model = prepared(step(4096), pins={"v": (Shard(0),)})
    index = [tensor.name for tensor in model.problem.tensors].index
    wanted = {"y": "v", "vt": "v"}  # reader -> whose copy it reads replicated
    whole = model.space.layouts[model.types["v"]].index((Replicate(),))
    operators = []
    for operator in model.problem.operators:
        if operator.name in wanted:
            read = operator.reads[:, operator.arcs.index(index(wanted[operator.name]))]
            operator = dataclasses.replace(operator, cost=np.where(read == whole, operator.cost, np.inf))
        operators.append(operator)
    problem = dataclasses.replace(model.problem, operators=tuple(operators))
    plan, _ = emit(model, solve(problem).choice)
    assert {"v@R", "v@R~1"} <= set(plan.types)
    reads = {node.name.split("#")[0]: node.inputs for node in plan.nodes}
    assert "v@R" in reads["y"]
    assert "v@R~1" in reads["vt"]


@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
def test_the_search_agrees_with_the_exact_program(mesh: str):
    problem = prepared(step(64, 16), Mesh.parse(mesh)).problem
    found = solve(problem, gap=0.0)
    _, best = optimum(problem)
    assert found.bound <= best * (1 + 1e-9) <= found.cost * (1 + 2e-9)
    assert found.gap <= 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_computes_the_same_step(seed: int):
    graph = step(8, 4)
    model = prepared(graph, Mesh.parse("a=2,b=2"))
    choice = random_choice(model.problem, np.random.default_rng(seed))
    plan, _ = emit(model, choice)
    assert len({name for node in plan.nodes for name in node.outputs}) == sum(
        len(node.outputs) for node in plan.nodes
    )
    assert parallegg.verify(graph, plan).verdict == "tested"


def test_what_later_phases_read_is_kept_in_any_layout():
    model = prepared(step())
    held = {o.name for o in model.problem.operators if o.memory.any()}
    assert held == {"x", "t", "m", "u", "v", "h kept", "y kept", "gv kept", "gu kept"}
    for name in ("h", "gv"):
        keeper = model.problem.operators[model.keeper[name]]
        layouts = model.space.layouts[model.types[name]]
        local = [model.mesh.local_shape(model.types[name].shape, layout) for layout in layouts]
        assert keeper.memory.tolist() == [4 * rows * columns for rows, columns in local]
        assert (keeper.reads[:, 0] == keeper.out).all()


def test_a_copy_that_is_kept_serves_both_passes_and_is_dropped_where_memory_is_short():
    """h must be whole for y and for its transpose: one gather if it may be kept whole, two if not."""

    def gathers(memory_bytes: int | None) -> int:
        pins = {name: (Shard(0),) for name in ("x", "t", "y", "v", "m")} | {"u": (Replicate(),)}
        model = prepared(step(4096), pins=pins)
        whole = model.space.layouts[model.types["h"]].index((Replicate(),))
        operators = list(model.problem.operators)
        for reader in ("y", "ht"):
            operator = operators[i := model.maker[reader]]
            cost = np.where(operator.reads[:, 0] == whole, operator.cost, np.inf)
            operators[i] = dataclasses.replace(operator, cost=cost)
        operator = operators[i := model.maker["h"]]
        cost = np.where(operator.out == whole, np.inf, operator.cost)
        operators[i] = dataclasses.replace(operator, cost=cost)
        problem = dataclasses.replace(model.problem, operators=tuple(operators))
        free = solve(problem).choice
        if memory_bytes is not None:
            problem = dataclasses.replace(problem, memory_limit=problem.memory(free) - memory_bytes)
        plan, _ = emit(model, solve(problem).choice)
        return sum(node.op == "AllGather" and node.inputs[0].startswith("h@") for node in plan.nodes)

    assert gathers(None) == 1
    assert gathers(3 * 4096 * 64 * 4 // 4) == 2


def test_the_next_value_takes_the_place_of_the_old():
    plan = sharded_state()
    loose = dataclasses.replace(plan, state=())
    assert memory_use(plan).peak <= memory_use(loose).peak
    sizes = {name: type_.bytes for name, type_ in plan.types.items()}
    # Without the batch, nothing but state and one next value is alive when the last of it is made.
    width = 4096
    types = {name: TensorType((width,), "float32") for name in ("u", "v", "new.u", "new.v")}
    names = [("u", "new.u"), ("v", "new.v")]
    nodes = tuple(Node(new, "Neg", (old,), (new,), {}) for old, new in names)
    whole = {p.name: p for p in plan.inputs}["u"]
    port = lambda name, kind: dataclasses.replace(  # noqa: E731
        whole, name=name, kind=kind, type=types[name], layout=(Replicate(),), local=name
    )
    small = Plan(
        MESH,
        tuple(port(old, "parameter") for old, _ in names),
        tuple(port(new, "output") for _, new in names),
        nodes,
        types,
        state=tuple(names),
    )
    assert memory_use(small).peak == 3 * 4 * width
    assert memory_use(dataclasses.replace(small, state=())).peak == 4 * 4 * width
    assert sizes["u@S0"] == 64 * 64


@pytest.mark.parametrize("seed", range(3))
def test_no_moment_is_said_to_hold_more_than_the_peak(seed: int):
    model = prepared(step(8, 4), Mesh.parse("a=2,b=2"))
    choice = random_choice(model.problem, np.random.default_rng(seed))
    peak = memory_use(emit(model, choice)[0]).peak
    held = [held_at(model, part.tensor).memory(choice) for part in model.parts]
    assert max(held) <= peak
    assert max(held) >= 0.6 * peak  # and not much less


def test_a_limit_is_kept_with_an_honest_bound():
    graph = step(512, 64)
    free = make_plan(graph, MESH, load_hardware("cpu"), roles=ROLES)
    peak = memory_use(free.plan).peak
    tight = make_plan(graph, MESH, load_hardware("cpu"), roles=ROLES, memory_bytes=peak - 1)
    assert memory_use(tight.plan).peak < peak
    assert free.report["bound_s"] <= tight.report["bound_s"] * (1 + 1e-9)
    assert free.report["cost_s"] <= tight.report["cost_s"] * (1 + 1e-9)


BAD = {
    "no leaf": ((("h", "new.u"),), "state 'h' is no input or weight of step"),
    "no output": ((("u", "h"),), "state 'u': its next value 'h' is no output of step"),
    "type": ((("u", "y"),), "state 'u' is .*, its next value 'y' is"),
    "twice": ((("u", "new.u"), ("v", "new.u")), "state 'v' with the next value 'new.u': one of them is"),
}


@pytest.mark.parametrize(("state", "message"), BAD.values(), ids=BAD.keys())
def test_bad_state_is_refused(state: tuple[tuple[str, str], ...], message: str):
    with pytest.raises(UserError, match=message):
        prepare(step(), MESH, load_hardware("cpu"), book=load_rules(), roles=Roles(ROLES.phases, state))


def test_pins_of_state_are_one():
    assert sharded_state().state  # a pin of u alone decides on new.u
    both = {"u": (Shard(0),), "new.u": (Shard(1),)}
    with pytest.raises(UserError, match=r"'u' is pinned to S0, its next value 'new\.u' to S1"):
        prepared(step(), pins=both)
    model = prepared(step(), pins={"new.u": (Shard(1),)})
    plan, _ = emit(model, solve(model.problem).choice)
    assert {p.name: p.layout for p in plan.inputs}["u"] == (Shard(1),)
