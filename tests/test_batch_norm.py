"""BatchNormalization in training mode: what ONNX Runtime computes, running averages as state, plans over the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import parallegg
import pytest
from onnx import TensorProto, helper
from parallegg.extract.emit import collective_table
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh, Shard
from parallegg.program import UserError
from parallegg.rewrite.graph import Graph, tensor_source
from parallegg.rewrite.onnx_reader import load
from parallegg.rewrite.optimizers import SGD
from parallegg.rewrite.training import FORWARD, LossSpec, TrainingStep, training_step
from parallegg.rules import load_rules
from parallegg.runtime.lowering import evaluate
from parallegg.verification.numbers import Original, compare

from .cli_models import save
from .onnx_export import run, session

OPERANDS = ["x", "scale", "bias", "mean", "var"]
RESULTS = ["y", "new_mean", "new_var", "saved_mean", "saved_var"]
STATISTICS = ("scale", "bias", "mean", "var")


def values(channels: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Scale, bias, mean and variance."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(channels).astype(np.float32) for name in STATISTICS}
    return drawn | {"var": np.abs(drawn["var"]) + 0.5}


def alone(
    path: Path, shape: tuple[int, ...], results: list[str], opset: int, fed: bool = False, **attributes
) -> Path:
    """One BatchNormalization; its statistics are weights, or `fed`."""
    if opset >= 14:
        attributes = {"training_mode": 1, **attributes}
    node = helper.make_node("BatchNormalization", OPERANDS, results, "bn", **attributes)
    channels = (shape[1],)
    inputs = [(name, shape if name == "x" else channels) for name in (OPERANDS if fed else OPERANDS[:1])]
    outputs = [(name, shape if name == "y" else channels) for name in results]
    return save(path, [node], inputs, outputs, [] if fed else list(values(shape[1]).items()), opset=opset)


def drawn(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 3 + 1


CASES = {
    "opset 15": ((2, 4, 6, 5), 15, 3, {"epsilon": 0.01, "momentum": 0.8}),
    "opset 14, defaults": ((3, 4, 5), 14, 3, {}),
    "no spatial dimension": ((6, 4), 15, 3, {"momentum": 0.25}),
    "three spatial dimensions": ((2, 3, 2, 3, 2), 15, 3, {}),
    "opset 9, five results": ((2, 4, 6, 5), 9, 5, {"momentum": 0.8}),
    "opset 7, five results": ((2, 4, 6, 5), 7, 5, {"epsilon": 0.01}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_mode_is_onnxruntimes(name: str, tmp_path: Path):
    shape, opset, count, attributes = CASES[name]
    path = alone(tmp_path / "m.onnx", shape, RESULTS[:count], opset, **attributes)
    graph, x = load(path), {"x": drawn(shape)}
    expected = session(str(path)).run(None, x)[
        :4
    ]  # the fifth result is one of cuDNN's there: not the variance
    for found, theirs in zip(run(graph, x, tensor_source(graph)), expected, strict=False):
        np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("opset", [1, 6, 7, 13])
def test_older_operators_give_the_statistics_too(opset: int, tmp_path: Path):
    """By the formulas of the specification, whose later text says that the variance is the population's."""
    old = {"is_test": 0} if opset < 7 else {}
    graph = load(alone(tmp_path / "m.onnx", (3, 4, 5), RESULTS, opset, momentum=0.75, epsilon=0.5, **old))
    x, given = drawn((3, 4, 5)), values(4)
    found = dict(zip(RESULTS, run(graph, {"x": x}, tensor_source(graph)), strict=True))
    mean, var = x.mean((0, 2)), x.var((0, 2))
    normal = (x - mean[:, None]) / np.sqrt(var + 0.5)[:, None]
    expected = {
        "y": normal * given["scale"][:, None] + given["bias"][:, None],
        "new_mean": 0.75 * given["mean"] + 0.25 * mean,
        "new_var": 0.75 * given["var"] + 0.25 * var,
        "saved_mean": mean,
        "saved_var": var,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_half_precision_is_measured_in_float32(tmp_path: Path):
    """The mean of 1024 values near 1000 does not survive a sum in float16."""
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", half, (16, 2, 32))]
    inputs += [
        helper.make_tensor_value_info(n, half if n in ("scale", "bias") else single, (2,)) for n in STATISTICS
    ]
    outputs = [helper.make_tensor_value_info("y", half, None)]
    outputs += [helper.make_tensor_value_info(name, single, None) for name in RESULTS[1:3]]
    node = helper.make_node("BatchNormalization", OPERANDS, RESULTS[:3], training_mode=1)
    graph = helper.make_graph([node], "half", inputs, outputs)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8),
        tmp_path / "m.onnx",
    )
    x = (np.random.default_rng(0).standard_normal((16, 2, 32)) * 8 + 1000).astype(np.float16)
    given = values(2)
    fed = {"x": x, **given, **{name: given[name].astype(np.float16) for name in ("scale", "bias")}}
    graph = load(tmp_path / "m.onnx")
    found = evaluate(graph.nodes, graph.constants | fed, graph.outputs)
    wide = x.astype(np.float64)
    normal = (wide - wide.mean((0, 2))[:, None]) / wide.std((0, 2))[:, None]
    expected = normal * given["scale"][:, None] + given["bias"][:, None]
    assert {name: found[name].dtype.name for name in RESULTS[:3]} == dict(
        zip(RESULTS, ("float16", "float32", "float32"), strict=False)
    )
    np.testing.assert_allclose(found["y"], expected, rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(found["new_var"], 0.9 * given["var"] + 0.1 * wide.var((0, 2)), rtol=1e-4)


REFUSED = {
    "per activation": (
        9,
        RESULTS,
        {"spatial": 0},
        r"BatchNormalization per activation \(spatial=0\) is not supported",
    ),
    "training without results": (6, RESULTS[:1], {}, "is_test is not set, so this is training mode"),
    "results without training": (
        15,
        RESULTS[:3],
        {"training_mode": 0},
        "statistics are results in training mode only",
    ),
    "results in test mode": (6, RESULTS, {"is_test": 1}, "statistics are results in training mode only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_clear_is_refused(name: str, tmp_path: Path):
    opset, results, attributes, text = REFUSED[name]
    with pytest.raises(UserError, match=rf"m\.onnx, node 'bn' \(BatchNormalization\): {text}"):
        load(alone(tmp_path / "m.onnx", (2, 4, 6), results, opset, **attributes))


def test_statistics_of_the_wrong_size_are_refused(tmp_path: Path):
    node = helper.make_node("BatchNormalization", OPERANDS, RESULTS[:1], "bn", training_mode=1)
    path = save(tmp_path / "m.onnx", [node], [("x", (2, 4, 6))], [("y", (2, 4, 6))], list(values(3).items()))
    with pytest.raises(UserError, match=r"node 'bn' .*: scale, bias, mean and variance need \(4,\)"):
        load(path)


# ------------------------------------------------------------------------------------------------ running averages


def test_averages_that_nobody_reads_leave_the_graph_but_are_known(tmp_path: Path):
    node = helper.make_node("BatchNormalization", OPERANDS, RESULTS[:3], "bn", training_mode=1, momentum=0.75)
    shape = (2, 4, 6)
    graph = load(save(tmp_path / "m.onnx", [node], [("x", shape)], [("y", shape)], list(values(4).items())))
    assert graph.parameters == ("scale", "bias")
    assert [(s.name, s.type.shape, s.momentum) for s in graph.statistics] == [
        ("mean", (4,), 0.75),
        ("var", (4,), 0.75),
    ]
    found = evaluate(
        graph.nodes, graph.constants | values(4) | {"x": drawn(shape)}, [s.measured for s in graph.statistics]
    )
    mean, var = found.values()
    np.testing.assert_allclose(mean, drawn(shape).mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(var, drawn(shape).var((0, 2)), rtol=1e-5)


def test_averages_that_are_fed_are_no_statistics_of_the_file(tmp_path: Path):
    graph = load(alone(tmp_path / "m.onnx", (2, 4, 6), RESULTS[:3], 15, fed=True))
    assert not graph.statistics and set(graph.inputs) == set(OPERANDS)


def network(
    path: Path,
    *,
    batch: int = 6,
    width: int = 12,
    size: int = 2,
    layers: int = 1,
    shared: bool = False,
    results: bool = False,
) -> Graph:
    """Layers of convolution c, BatchNormalization n (all of the same statistics if `shared`) and Relu, then the mean
    over space: y [batch, width] of images x."""
    rng, last, weights, nodes = np.random.default_rng(3), "x", {}, []
    for i in range(layers):
        end = str(i) if i else ""
        own = {name: name if shared else name + end for name in STATISTICS}
        given = values(width, i)
        weights |= {own[name]: given[name] for name in STATISTICS}
        weights[f"w{end}"] = rng.standard_normal((width, width if i else 3, 1, 1), np.float32)
        operands, new = [f"c{end}", *own.values()], [f"n{end}", f"new_mean{end}", f"new_var{end}"]
        nodes += [
            helper.make_node("Conv", [last, f"w{end}"], [f"c{end}"], f"conv{end}"),
            helper.make_node("BatchNormalization", operands, new, f"bn{end}", training_mode=1),
            helper.make_node("Relu", [f"n{end}"], [f"r{end}"], f"relu{end}"),
        ]
        last = f"r{end}"
    nodes.append(helper.make_node("ReduceMean", [last], ["y"], "pool", axes=[2, 3], keepdims=0))
    outputs = [("y", (batch, width)), *((name, (width,)) for name in ("new_mean", "new_var") if results)]
    return load(save(path, nodes, [("x", (batch, 3, size, size))], outputs, list(weights.items())))


def stepped(graph: Graph, **options) -> TrainingStep:
    return training_step(graph, loss=LossSpec("mse", "y"), optimizer=SGD(), **options)


def three_steps(step: TrainingStep, start: dict[str, np.ndarray], feeds: list[dict[str, np.ndarray]]):
    """The state after every step."""
    state = {name: start[name] for name, _ in step.state}
    for batch in feeds:
        fed = step.graph.constants | start | state | batch | {"learning_rate": np.float32(0.1)}
        found = evaluate(step.graph.nodes, fed, step.graph.outputs)
        state = {name: found[new] for name, new in step.state}
        yield state


def images(count: int, batch: int = 6, width: int = 12) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    return [
        {
            "x": rng.standard_normal((batch, 3, 2, 2)).astype(np.float32) + i,
            "labels": rng.standard_normal((batch, width)).astype(np.float32),
        }
        for i in range(count)
    ]


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    value = tensor_source(graph)
    return {name: value(name) for name in (*graph.parameters, *(s.name for s in graph.statistics))}


@pytest.mark.parametrize("results", [False, True], ids=["results unused", "results are outputs"])
def test_running_averages_are_state_of_a_training_step(results: bool, tmp_path: Path):
    graph = network(tmp_path / "m.onnx", results=results)
    step = stepped(graph)
    assert dict(step.state) == {name: f"new.{name}" for name in ("w", *STATISTICS)}
    assert set(step.initial.values()) == {"parameter"} and set(step.gradients) == {"w", "scale", "bias"}
    assert step.frozen == () and step.warnings == ()
    maker = {tensor: node.name for node in step.graph.nodes for tensor in node.outputs}
    assert {step.phases[maker[new]] for old, new in step.state if old in ("mean", "var")} == {FORWARD}
    start = weights_of(graph)
    mean, var, w = start["mean"], start["var"], start["w"]
    for batch, state in zip(images(3), three_steps(step, start, images(3)), strict=True):
        c = np.einsum("nchw,dc->ndhw", batch["x"], w[:, :, 0, 0])
        mean, var = 0.9 * mean + 0.1 * c.mean((0, 2, 3)), 0.9 * var + 0.1 * c.var((0, 2, 3))
        np.testing.assert_allclose(state["mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state["var"], var, rtol=1e-4, atol=1e-5)
        assert np.abs(state["w"] - w).max() > 1e-6
        w = state["w"]


def test_a_layer_that_is_used_twice_averages_in_turn(tmp_path: Path):
    graph = network(tmp_path / "m.onnx", layers=2, shared=True)
    assert [s.name for s in graph.statistics] == ["mean", "var", "mean", "var"]
    step, start = stepped(graph), weights_of(graph)
    assert len(step.state) == 6
    fed = step.graph.constants | start | images(1)[0] | {"learning_rate": np.float32(0)}
    found = evaluate(step.graph.nodes, fed, ["c", "c1", "new.mean"])
    expected = start["mean"]
    for tensor in ("c", "c1"):
        expected = 0.9 * expected + 0.1 * found[tensor].mean((0, 2, 3))
    np.testing.assert_allclose(found["new.mean"], expected, rtol=1e-4, atol=1e-6)


def test_averages_may_be_frozen(tmp_path: Path):
    step = stepped(network(tmp_path / "m.onnx"), frozen=["mean", "scale"])
    assert {name for name, _ in step.state} == {"w", "bias", "var"}
    assert step.frozen == ("scale",) and step.warnings == () and "mean" not in step.graph.types


def test_averages_that_the_loss_does_not_need_stay_and_are_named(tmp_path: Path):
    shape = (2, 4, 6)
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["z"]),
        helper.make_node("BatchNormalization", ["z", *STATISTICS], RESULTS[:3], "bn", training_mode=1),
    ]
    weights = [("w", drawn((6,))), *values(4).items()]
    graph = load(save(tmp_path / "m.onnx", nodes, [("x", shape)], [("y", shape), ("z", shape)], weights))
    step = training_step(graph, loss=LossSpec("mse", "z"), optimizer=SGD())
    assert dict(step.state) == {"w": "new.w"}
    assert step.warnings[-1] == "loss 'loss' does not depend on what 'var' averages: it stays as it is"


def test_averages_stay_in_float32_beside_bfloat16(tmp_path: Path):
    step = stepped(network(tmp_path / "m.onnx"), compute_dtype="bfloat16")
    types = step.graph.types
    assert types["c"].dtype == "bfloat16"
    assert types["new.mean"].dtype == types["new.var"].dtype == types["bn/variance"].dtype == "float32"


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("mesh", ["a=2,b=3", pytest.param("a=3,b=2", marks=pytest.mark.sweep)])
def test_random_plans_measure_the_whole_batch(mesh: str, tmp_path: Path):
    """Split by batch, by channels and by both: outputs, gradients and averages are those of one device."""
    step = stepped(network(tmp_path / "m.onnx"))
    roles = step.roles
    model = prepare(step.graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules(), roles=roles)
    original, layouts = Original(step.graph, None), set()
    for seed in range(8):
        plan = random_plan(model, random_choice(model.problem, np.random.default_rng(seed)))
        verdict = compare(step.graph, plan, original=original, seed=seed)
        assert verdict.verdict == "tested" and verdict.tensors_checked == 6, (seed, verdict)
        layouts |= {name.rpartition("@")[2] for name in plan.types if name.startswith("bn/centred@")}
    assert any("S0" in layout for layout in layouts) and any("S1" in layout for layout in layouts)


def test_a_batch_is_split_at_the_price_of_its_statistics(tmp_path: Path):
    """Data parallelism: what is sent for a layer is a few numbers for every channel, not the images."""
    graph = network(tmp_path / "m.onnx", batch=64, width=64, size=64, layers=2)
    planned = parallegg.plan(stepped(graph), "data=8")
    types, layouts = planned.plan.types, {p.name: p.layout for p in planned.plan.inputs}
    assert layouts["x"] == (Shard(0),) and planned.report["gap"] <= 1e-2
    assert types["bn1/centred@S0"].shape == (8, 64, 64, 64)
    sent = sum(row["bytes"] for row in collective_table(planned.plan))
    parameters = sum(types[p.local].bytes for p in planned.plan.inputs if p.kind == "parameter")
    assert 0 < sent < 20 * parameters < types["bn1/centred@S0"].bytes / 2
    assert planned.report["memory_bytes"] < 12 * types["bn1/centred@S0"].bytes
