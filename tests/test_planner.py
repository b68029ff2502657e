"""The planner on small blocks: known schemes emerge, bounds hold against the exact program, limits are kept."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import parallegg
import pytest
from onnx import helper
from parallegg.extract import hardware
from parallegg.extract.hardware import load_hardware, profile_names
from parallegg.extract.memory import memory_use
from parallegg.extract.planner import prepare
from parallegg.extract.referee import lp_bound, optimum
from parallegg.extract.search import solve
from parallegg.mesh import Mesh, Replicate, Shard
from parallegg.rewrite.graph import Graph
from parallegg.rules import load_rules

from .blocks import block, feed_forward
from .models import DATA


def mlp(path: Path, tokens: int = 256, width: int = 1024, layers: int = 1) -> Graph:
    nodes, weights = feed_forward("x", layers, width)
    return block(path, nodes, (tokens, width), weights)


def attention(path: Path) -> Graph:
    """One head group of self-attention with a residual: consumers share tensors in several ways."""
    node = helper.make_node
    nodes = [
        node("LayerNormalization", ["x", "g"], ["n"], axis=-1),
        node("MatMul", ["n", "wq"], ["q"]),
        node("MatMul", ["n", "wk"], ["k"]),
        node("MatMul", ["n", "wv"], ["v"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Softmax", ["s"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["o"]),
        node("MatMul", ["o", "wo"], ["m"]),
        node("Add", ["x", "m"], ["y"]),
    ]
    return block(path, nodes, (4, 16, 32), {"g": (32,), **dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32))})


@pytest.mark.parametrize("hardware", ["cpu", "a100", "h100"])
@pytest.mark.parametrize("layers", [1, 2])
def test_weights_too_big_for_a_device_give_megatron(layers: int, hardware: str, tmp_path: Path):
    """Columns then rows, one AllReduce a block (Shoeybi et al. 2019)."""
    graph = mlp(tmp_path / "mlp.onnx", layers=layers)
    planned = parallegg.plan(graph, "model=8", hardware=hardware, memory_bytes=layers * (8 << 20))
    layouts = {port.name: port.layout for port in planned.plan.inputs}
    for i in range(layers):
        assert layouts[f"up{i}"] == (Shard(1),)
        assert layouts[f"down{i}"] == (Shard(0),)
    assert layouts["x"] == (Replicate(),)
    activation = 256 * 1024 * 4
    rows = {row["kind"]: row for row in planned.report["collectives"]}
    assert sum(row["bytes"] for row in rows.values()) == layers * 2 * 7 * activation // 8
    assert set(rows) in (
        {"AllReduce"},
        {"ReduceScatter", "AllGather"},
        {"AllReduce", "ReduceScatter", "AllGather"},
    )
    assert planned.report["memory_bytes"] <= layers * (8 << 20)


def test_plenty_of_memory_and_little_weight_give_data_parallelism(tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx", tokens=4096, width=128)
    planned = parallegg.plan(graph, "data=8", hardware="h100", pins={"x": "S0", "y": "S0"})
    assert planned.report["collectives"] == []
    assert {p.name: p.layout for p in planned.plan.inputs} == {
        "x": (Shard(0),),
        "up0": (Replicate(),),
        "down0": (Replicate(),),
    }


@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2", "a=4,b=2"])
@pytest.mark.parametrize("make", [mlp, attention])
@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_bound_optimum_plan(make, mesh: str, hardware: str, tmp_path: Path):
    """bound <= optimum <= plan, and the linear relaxation lies between bound and optimum's neighbourhood."""
    graph = make(tmp_path / "m.onnx", **({"tokens": 64, "width": 64} if make is mlp else {}))
    problem = prepare(graph, Mesh.parse(mesh), load_hardware(hardware), book=load_rules()).problem
    found = solve(problem, gap=0.0)
    _, best = optimum(problem)
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.cost * (1 + 1e-9)
    assert found.gap <= 1e-3
    assert lp_bound(problem) <= best * (1 + 1e-6)
    assert problem.cost(found.choice) == pytest.approx(found.cost, rel=1e-12)


def test_a_limit_that_nothing_meets_names_the_smallest(tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx")
    with pytest.raises(parallegg.DoesNotFit, match=r"1 kB \(1000 bytes\) a device; .* need .* \(\d+ bytes\)"):
        parallegg.plan(graph, "model=8", memory_bytes=1000)


OTHERS = [
    ({"layers": 1}, "another model: this one has no parameter 'up1'"),
    ({"width": 8}, "another model: the plan's parameter 'up0' is"),
    ({"tokens": 16}, "input 'x' is .*: load the model with the plan's shapes, or plan it again"),
]


@pytest.mark.parametrize(("sizes", "message"), OTHERS)
def test_a_plan_for_another_model_or_other_shapes_is_refused(
    sizes: dict[str, int], message: str, tmp_path: Path
):
    own = {"tokens": 8, "width": 4, "layers": 2}
    plan = parallegg.plan(mlp(tmp_path / "own.onnx", **own), "model=2").plan
    with pytest.raises(parallegg.UserError, match=message):
        parallegg.verify(mlp(tmp_path / "other.onnx", **(own | sizes)), plan)


@pytest.mark.parametrize("limit", [6, 8, 12, 40])
def test_a_plan_holds_at_most_its_limit(limit: int, tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx")
    planned = parallegg.plan(graph, "data=2,model=4", memory_bytes=limit << 20)
    assert memory_use(planned.plan).peak == planned.report["memory_bytes"] <= limit << 20
    assert 0 <= planned.report["gap"] < 1


def test_less_memory_never_costs_less(tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx")
    costs = [parallegg.plan(graph, "model=8", memory_bytes=m << 20).report["cost_s"] for m in (8, 12, 64)]
    assert costs == sorted(costs, reverse=True)


def test_pins_are_kept(tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx", tokens=64, width=64)
    planned = parallegg.plan(graph, "data=2,model=4", pins={"y": "S0,S1", "up0": "S1,R"})
    assert {p.name: p.layout for p in planned.plan.outputs} == {"y": (Shard(0), Shard(1))}
    assert {p.name: p.layout for p in planned.plan.inputs}["up0"] == (Shard(1), Replicate())
    assert parallegg.verify(graph, planned.plan).verdict == "tested"


def test_names_of_the_model_are_not_taken_for_what_is_put_in_between(tmp_path: Path):
    """A Concat of three tensors is two of two; whatever the model calls its own tensors, none is confused."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["c/tail1"]),
        helper.make_node("Concat", ["x", "v", "c/tail1"], ["c"], axis=1),
        helper.make_node("MatMul", ["c/tail1", "w"], ["c/tail1_2"]),
        helper.make_node("Concat", ["c", "c/tail1_2", "c/tail1"], ["y"], axis=1),
    ]
    graph = block(tmp_path / "m.onnx", nodes, (4, 4), {"w": (4, 4), "v": (4, 2)})
    planned = parallegg.plan(graph, "a=2")
    assert parallegg.verify(graph, planned.plan).verdict == "tested"


def test_what_is_given_may_be_of_numpy_a_path_or_alone(tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx", tokens=64, width=64)
    again = parallegg.load(tmp_path / "mlp.onnx", {"x": np.array([64, 64])})
    assert again.digest == graph.digest
    rules = tmp_path / "mine.egg"
    rules.write_text("(relation mine (i64))")
    profile = Path(hardware.__file__).parent / "profiles" / "a100.toml"
    planned = parallegg.plan(graph, "a=2", hardware=profile, rules=rules)  # type: ignore[arg-type]
    assert planned.report["hardware"] == load_hardware("a100").name
    with pytest.raises(parallegg.DoesNotFit):
        parallegg.plan(graph, "a=2", memory_bytes=0)


@pytest.mark.parametrize("shape", ["64x64", 64, (64.5, 64), None])
def test_a_shape_that_is_none_is_refused(shape, tmp_path: Path):
    mlp(tmp_path / "mlp.onnx", tokens=64, width=64)
    with pytest.raises(parallegg.UserError, match="whole numbers"):
        parallegg.load(tmp_path / "mlp.onnx", {"x": shape})


@pytest.mark.parametrize("pins", [{"nothing": "R,R"}, {"x": "S5,R"}, {"x": "P,R"}, {"x": "R"}])
def test_impossible_pins_are_refused(pins: dict[str, str], tmp_path: Path):
    graph = mlp(tmp_path / "mlp.onnx", tokens=64, width=64)
    with pytest.raises(parallegg.UserError, match="pinned tensor"):
        parallegg.plan(graph, "data=2,model=4", pins=pins)


def test_profiles_say_where_their_figures_come_from():
    assert {"cpu", "a100", "h100", "h200", "tpu-v5e"} <= set(profile_names())
    for name in profile_names():
        assert len(load_hardware(name).source) > 20


@pytest.mark.sweep
def test_a_model_without_its_weights_is_planned_in_little_memory():
    """Llama 2 7B, 25 GB of absent weights, 64 devices."""
    path = str(DATA / "llama2_7b.stub.onnx")
    code = f"import parallegg; print(parallegg.plan({path!r}, 'data=8,model=8', hardware='h100').report)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'saturated': True" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20  # KiB
