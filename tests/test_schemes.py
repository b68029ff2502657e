"""Plans of a scheme: what plain data parallelism places, sends and costs, and what it cannot do."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import onnx
import parallegg
import pytest
from onnx import TensorProto, helper, numpy_helper
from parallegg import cli
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare
from parallegg.extract.schemes import restricted
from parallegg.mesh import Mesh, Replicate, Shard
from parallegg.program import UserError
from parallegg.rules import load_rules
from parallegg.runtime.devices import ensure_devices

WEIGHTS = {"a": (16, 24), "b": (24, 6)}


def perceptron(path: Path, *, batch: int = 16, last: str = "Softmax", axis: int = -1) -> Path:
    """last(relu(x a) b)"""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in WEIGHTS.items()
    ]
    end = {"axis": axis} if last == "Softmax" else {}
    operands = ["z", "axis"] if last == "CumSum" else ["z"]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["z"], "second"),
        helper.make_node(last, operands, ["y"], "last", **end),
    ]
    ports = (("x", [batch, 16]), ("y", [batch, 6]))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports]
    weights.append(numpy_helper.from_array(np.int64(axis), "axis"))
    graph = helper.make_graph(nodes, "perceptron", infos[:1], infos[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> parallegg.TrainingStep:
    ensure_devices(8)
    graph = parallegg.load(perceptron(tmp_path_factory.mktemp("scheme") / "perceptron.onnx"))
    loss = parallegg.LossSpec("mse", "y")
    return parallegg.training_step(graph, loss=loss, optimizer=parallegg.AdamW())


@pytest.fixture(scope="module")
def planned(step):
    """Plans of the step by mesh and scheme."""
    return functools.cache(lambda mesh, scheme=None: parallegg.plan(step, mesh, scheme=scheme))


@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2", "a=2,b=2,c=2"])
def test_state_is_whole_and_the_batch_is_split(mesh, planned):
    plan = planned(mesh, "data-parallel").plan
    layouts = {port.name: port.layout for port in plan.inputs}
    axes = len(plan.mesh)
    assert {layouts[name] for name, _ in plan.state} == {(Replicate(),) * axes}
    assert {layouts[name] for name in ("x", "labels")} == {(Shard(0),) * axes}
    assert plan.metadata["scheme"] == "data-parallel"


def test_it_sends_the_gradients_and_the_loss(planned):
    (row,) = planned("data=4", "data-parallel").report["collectives"]
    payload = sum(4 * math.prod(shape) for shape in WEIGHTS.values()) + 4
    assert row == {
        "kind": "AllReduce", "axis": "data", "count": 3, "payload_bytes": payload, "bytes": 3 * payload // 2
    }  # fmt: skip


def test_a_ring_over_two_axes_sends_as_much_as_over_one(planned):
    """As a reduce-scatter, an all-reduce of what is left and an all-gather."""
    rows = planned("data=2,model=2", "data-parallel").report["collectives"]
    (flat,) = planned("data=4", "data-parallel").report["collectives"]
    assert not {row["kind"] for row in rows} - {"AllReduce", "ReduceScatter", "AllGather"}
    assert sum(row["bytes"] for row in rows) == pytest.approx(flat["bytes"], rel=1e-3)


@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2"])
def test_it_is_one_of_all_plans(mesh, planned):
    """So it costs at least what is proved for those, and what is proved for it is no more than it costs."""
    scheme, every = planned(mesh, "data-parallel").report, planned(mesh).report
    assert every["bound_s"] <= scheme["cost_s"] * (1 + 1e-9)
    assert scheme["bound_s"] <= scheme["cost_s"]


def test_it_computes_the_same(step, planned):
    assert parallegg.verify(step.graph, planned("data=2,model=2", "data-parallel").plan).verdict == "tested"


def test_every_choice_that_is_left_keeps_to_it(step):
    """No strategy of finite cost reads a layout that is reached by sending something else than sums."""
    book, roles = load_rules(), step.roles
    model = prepare(step.graph, Mesh.parse("data=4"), load_hardware("cpu"), book=book, roles=roles)
    problem = restricted(model, "data-parallel").problem
    by_name = {operator.name: operator for operator in problem.operators}
    for name in ("h", "r", "z", "y"):
        operator = by_name[name]
        left = {model.layout(name, int(label)) for label in operator.out[np.isfinite(operator.cost)]}
        assert left == {(Shard(0),)}, name


def test_inference_gathers_its_outputs(tmp_path):
    model = perceptron(tmp_path / "p.onnx")
    (row,) = parallegg.plan(model, "data=4", scheme="data-parallel").report["collectives"]
    assert (row["kind"], row["count"]) == ("AllGather", 1)


@pytest.mark.parametrize(
    ("options", "mesh", "pins", "text"),
    [
        ({"batch": 6}, "data=2,model=2", {}, "the 6 examples of input 'x' cannot be split over 4 devices"),
        ({}, "data=2", {"a": "S0"}, "'a' is pinned, but the scheme needs R"),
        ({}, "data=2", {"x": "R"}, "'x' is pinned, but the scheme needs S0"),
        ({"last": "CumSum", "axis": 0}, "data=2", {}, "'y' cannot be computed from parts of the batch by sums alone"),
    ],
)  # fmt: skip
def test_what_is_not_data_parallel_is_one_line(options, mesh, pins, text, tmp_path):
    with pytest.raises(UserError, match=f"data-parallel: {text}"):
        parallegg.plan(perceptron(tmp_path / "p.onnx", **options), mesh, scheme="data-parallel", pins=pins)


def test_unknown_schemes_are_one_line(tmp_path):
    with pytest.raises(UserError, match="scheme 'zero': expected one of data-parallel"):
        parallegg.plan(perceptron(tmp_path / "p.onnx"), "data=2", scheme="zero")


# ------------------------------------------------------------------------------------------------ side by side


@pytest.fixture
def plans(planned, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    parallegg.save(planned("data=2,model=2").plan, "best.plan.onnx")
    parallegg.save(planned("data=2,model=2", "data-parallel").plan, "dp.plan.onnx")


def test_plans_are_compared_side_by_side(plans, capsys):
    assert cli.main(["compare", "best.plan.onnx", "dp.plan.onnx", "--json"]) == cli.GOOD
    best, other = json.loads(capsys.readouterr().out)
    assert (best["plan"], best["scheme"], other["scheme"]) == ("best.plan.onnx", None, "data-parallel")
    assert cli.main(["compare", "best.plan.onnx", "dp.plan.onnx"]) == cli.GOOD
    out = capsys.readouterr().out
    rows = {line.split("   ")[0]: line for line in out.splitlines()}
    assert "data-parallel" in rows["plans allowed"]
    more = 100 * (other["cost_s"] / best["cost_s"] - 1)
    assert f"({more:+.0f} %)" in rows["predicted step"]
    assert rows["peak memory"].count("%") == 1


def test_compare_refuses_what_is_no_plan(plans, capsys):
    assert cli.main(["compare", "best.plan.onnx", "none.onnx"]) == cli.BAD_INPUT
    assert capsys.readouterr().err == "error: none.onnx: cannot be read: No such file or directory\n"
