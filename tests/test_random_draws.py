"""Random masks: functions of site, seed, step and index, with the right probability, the same however they are split.

No runtime draws the same numbers, so ONNX Runtime can judge only how many elements are dropped and how the rest is
scaled; splitmix64 itself has published numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.planfile import load as load_plan
from parallegg.planfile import save as save_plan
from parallegg.planfile import to_bytes
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.builder import Builder, Terms
from parallegg.rewrite.graph import Graph
from parallegg.rewrite.onnx_reader import load
from parallegg.rewrite.optimizers import SGD, Adam
from parallegg.rewrite.random_draws import random_mask
from parallegg.rewrite.training import as_training_step, rebuilt, training_step
from parallegg.rules import load_rules
from parallegg.runtime.lowering import evaluate
from parallegg.runtime.operators import JAX, exact_types
from parallegg.verification.numbers import Original, compare

from .cli_models import save
from .onnx_export import session

RATIO = 0.3


def mask(shape: tuple[int, ...], ratio: float = RATIO, seed: int = 0, site: int = 1) -> np.ndarray:
    """What the `site`-th draw of a model gives."""
    builder = Builder(reserved=set())
    for _ in range(site):
        name = random_mask(Terms(builder, "drop"), shape, ratio, seed, "mask")
    graph = builder.finish("m", {"y": name}, None)
    return evaluate(graph.nodes, graph.constants, ["y"])["y"]


# ------------------------------------------------------------------------------------------------ the numbers


def test_keys_are_splitmix64s_numbers():
    """The published first numbers of the generator that starts at 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    with exact_types():
        found = JAX["RandomKey"]({}, np.int64(1234567), np.arange(4))
    assert np.asarray(found).view(np.uint64).tolist() == published


def test_the_threshold_is_met_from_above():
    key, index = np.array([5]), np.array([3])
    with exact_types():
        (number,) = np.asarray(JAX["RandomKey"]({}, key, index)).view(np.uint64).tolist()
        thresholds = [(number >> 11) + more for more in (-1, 0, 1)]
        drawn = [bool(JAX["RandomMask"]({"threshold": t}, key, index)[0]) for t in thresholds]
    assert drawn == [True, True, False]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(200_000,), (400, 500), (8, 5, 50, 100)])
def test_as_many_are_dropped_as_the_ratio_says(shape, ratio):
    """Within five standard deviations, in the whole and along every index of every dimension."""
    dropped = ~mask(shape, ratio)
    for d in range(-1, len(shape)):
        share = dropped.mean() if d < 0 else dropped.mean(tuple(e for e in range(len(shape)) if e != d))
        count = dropped.size if d < 0 else dropped.size // shape[d]
        if count > 1000:
            np.testing.assert_allclose(share, ratio, rtol=0, atol=5 * np.sqrt(ratio * (1 - ratio) / count))


@pytest.mark.parametrize("distance", [(0, 1), (1, 0), (1, 1), (0, 64), (128, 0)])
def test_neighbours_are_independent(distance):
    drawn = mask((512, 512), 0.5).astype(float) - 0.5
    moved = np.roll(drawn, distance, (0, 1))
    assert abs((drawn * moved).mean()) < 0.25 * 5 / 512


DIFFERENT = {"another site": {"site": 2}, "another seed": {"seed": 1}}


@pytest.mark.parametrize("what", DIFFERENT)
def test_sites_and_seeds_are_independent(what):
    agree = (mask((512, 512), 0.5) == mask((512, 512), 0.5, **DIFFERENT[what])).mean()
    assert abs(agree - 0.5) < 0.5 * 5 / 512


@settings(max_examples=20, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), seed=st.integers(-(2**63), 2**63 - 1))
def test_a_mask_has_its_shape_and_is_the_same_again(shape, seed):
    first = mask(shape, seed=seed)
    assert first.shape == shape and first.dtype == bool
    assert np.array_equal(first, mask(shape, seed=seed))


# ------------------------------------------------------------------------------------------------ Dropout

SHAPE = (60, 30)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32) + 9
ON, OFF, THIRD = np.bool_(True), np.bool_(False), np.float32(RATIO)


def dropout(path: Path, *stored: np.generic | None, opset: int = 17, **attributes) -> Graph:
    """y and the mask m of a Dropout of x; `stored` are ratio and training_mode, None where one is left out."""
    names = [
        "x",
        *("" if value is None else name for name, value in zip(("ratio", "on"), stored, strict=False)),
    ]
    node = helper.make_node("Dropout", names, ["y", "m"], "drop", **attributes)
    weights = [(name, np.asarray(value)) for name, value in zip(names[1:], stored, strict=True) if name]
    mask_type = TensorProto.BOOL if opset >= 10 else TensorProto.FLOAT
    return load(
        save(path, [node], [("x", SHAPE)], [("y", SHAPE), ("m", SHAPE, mask_type)], weights, opset=opset)
    )


def outputs(graph: Graph, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    return evaluate(graph.nodes, graph.constants | feeds, graph.outputs)


RANDOM = {  # ratio and training mode, opset and attributes, expected ratio
    "12": ((THIRD, ON), {"opset": 12}, RATIO),
    "13 with a seed": ((THIRD, ON), {"opset": 13, "seed": 5}, RATIO),
    "22": ((THIRD, ON), {"opset": 22}, RATIO),
    "without a ratio": ((None, ON), {}, 0.5),
    "a ratio of another type": ((np.float64(0.25), ON), {}, 0.25),
    "1": ((), {"opset": 1, "ratio": RATIO}, RATIO),
    "6 without a ratio": ((), {"opset": 6, "is_test": 0}, 0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_kept_is_scaled_and_the_mask_says_what_is(name, tmp_path):
    stored, options, ratio = RANDOM[name]
    found = outputs(dropout(tmp_path / "m.onnx", *stored, **options), x=X)
    kept = found["m"] != 0
    assert found["m"].dtype == (bool if options.get("opset", 17) >= 10 else np.float32)
    assert abs(kept.mean() - (1 - ratio)) < 5 * np.sqrt(ratio * (1 - ratio) / X.size)
    np.testing.assert_allclose(found["y"], np.where(kept, X / (1 - ratio), 0), rtol=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_onnxruntime_drops_as_many_and_scales_alike(seed, tmp_path):
    graph = dropout(tmp_path / "m.onnx", THIRD, ON, seed=seed)
    theirs, kept = session(str(tmp_path / "m.onnx")).run(None, {"x": X})
    found = outputs(graph, x=X)
    np.testing.assert_allclose(theirs, np.where(kept, X / (1 - THIRD), 0), rtol=1e-6)
    for a, b in ((found["m"], kept), (found["y"], theirs)):
        assert abs(a.mean() - b.mean()) < 10 * np.sqrt(b.var() / X.size)


IDENTITY = {
    "7": ((), {"opset": 7}),
    "10": ((), {"opset": 10, "ratio": RATIO}),
    "test mode": ((), {"opset": 6, "is_test": 1}),
    "no training mode": ((THIRD,), {}),
    "training mode off": ((THIRD, OFF), {}),
    "ratio 0": ((np.float32(0), ON), {}),
    "attribute 0": ((), {"opset": 6, "ratio": 0.0}),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_nothing_is_dropped(name, tmp_path):
    stored, options = IDENTITY[name]
    graph = dropout(tmp_path / "m.onnx", *stored, **options)
    y, kept = outputs(graph, x=X).values()
    assert [node.op for node in graph.nodes] == ["Reshape", "Reshape"]
    assert np.array_equal(y, X) and (kept == 1).all()


@pytest.mark.parametrize("ratio", [1.0, -0.5, np.nan])
def test_a_ratio_that_is_none_is_refused(ratio, tmp_path):
    with pytest.raises(
        UserError, match=r"m\.onnx, node 'drop' \(Dropout\): ratio \S+ does not lie in \[0, 1\)"
    ):
        dropout(tmp_path / "m.onnx", np.float32(ratio), ON)


# ------------------------------------------------------------------------------------------------ steps


def two_layers(path: Path, *, batch: int = 6, width: int = 12) -> Graph:
    """Two layers with a Dropout each: y [batch, 6] of x [batch, 12], and `loss`, the mean of its squares."""
    rng = np.random.default_rng(1)
    weights = [
        ("a", rng.standard_normal((12, width), np.float32)),
        ("b", rng.standard_normal((width, 6), np.float32)),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Dropout", ["h", "ratio", "on"], ["d"], "first"),
        helper.make_node("MatMul", ["d", "b"], ["z"]),
        helper.make_node("Dropout", ["z", "ratio", "on"], ["y"], "second"),
        helper.make_node("ReduceSumSquare", ["y"], ["loss"], keepdims=0),
    ]
    stored = [*weights, ("ratio", np.asarray(THIRD)), ("on", np.asarray(ON))]
    return load(save(path, nodes, [("x", (batch, 12))], [("y", (batch, 6)), ("loss", ())], stored))


def dropped(step, number: int) -> dict[str, np.ndarray]:
    """The masks of a step."""
    nodes = step.graph.nodes
    names = [node.outputs[0] for node in nodes if node.op == "RandomMask"]
    return evaluate(nodes, step.graph.constants | {"step": np.int64(number)}, names)


@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=["sgd", "adam"])
def test_every_step_drops_others(optimizer, tmp_path):
    step = training_step(two_layers(tmp_path / "m.onnx", batch=60), loss="loss", optimizer=optimizer)
    assert step.step == "step" and step.batch == ("x",)
    first, again, second = dropped(step, 0), dropped(step, 0), dropped(step, 1)
    assert len(first) == 2
    for name, kept in first.items():
        assert np.array_equal(kept, again[name])
        agreeing = (kept == second[name]).mean()
        assert abs(agreeing - (RATIO**2 + (1 - RATIO) ** 2)) < 5 * 0.5 / np.sqrt(kept.size)


def test_a_given_step_drops_others_every_time(tmp_path):
    nodes = [
        helper.make_node("Dropout", ["w", "ratio", "on"], ["d"], "drop"),
        helper.make_node("ReduceSum", ["d"], ["loss"], keepdims=0),
        helper.make_node("Sub", ["w", "d"], ["w'"]),
    ]
    stored = [("ratio", np.asarray(THIRD)), ("on", np.asarray(ON))]
    graph = load(
        save(tmp_path / "m.onnx", nodes, [("w", (50, 40))], [("loss", ()), ("w'", (50, 40))], stored)
    )
    step = as_training_step(graph, "{} -> {}'")
    assert step.step == "step" and step.batch == ()
    ((_, first),) = dropped(step, 0).items()
    ((_, second),) = dropped(step, 1).items()
    assert not np.array_equal(first, second)
    assert rebuilt(graph, step.recipe).graph.digest == step.graph.digest


def test_a_step_without_draws_is_as_it_was():
    graph = Graph("m", (Node("n", "Neg", ("w",), ("loss",)),), ("w",), (), {}, ("loss",), {"w": F, "loss": F})
    assert as_training_step(graph, {"w": "loss"}).graph is graph


F = TensorType((), "float32")


# ------------------------------------------------------------------------------------------------ plans


def prepared(folder: Path, mesh: str):
    graph = two_layers(folder / "m.onnx")
    step = training_step(graph, loss="loss", optimizer=SGD())
    roles = step.roles
    return prepare(step.graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules(), roles=roles)


@pytest.mark.parametrize("mesh", ["a=2,b=3", pytest.param("a=3,b=2", marks=pytest.mark.sweep)])
def test_random_plans_draw_the_same_masks(mesh, tmp_path):
    """Masks are computed split along every dimension, and by several axes; the results do not depend on it."""
    model = prepared(tmp_path, mesh)
    original = Original(model.graph, None)
    layouts = set()
    for seed in range(8):
        plan = random_plan(model, random_choice(model.problem, np.random.default_rng(seed)))
        verdict = compare(model.graph, plan, original=original, seed=seed)
        assert verdict.verdict == "tested", (seed, verdict)
        layouts |= {node.outputs[0].rpartition("@")[2] for node in plan.nodes if node.op == "RandomMask"}
    assert {"S0,S1", "S1,S0"} & layouts and len(layouts) > 4


def test_a_plan_with_a_mask_survives_its_file(tmp_path):
    model = prepared(tmp_path, "a=2,b=3")
    plan = random_plan(model, random_choice(model.problem, np.random.default_rng(0)))
    save_plan(plan, tmp_path / "m.plan.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.plan.onnx"))
    again = load_plan(tmp_path / "m.plan.onnx")
    assert to_bytes(again) == to_bytes(plan)
    drawn = {(n.domain, n.attributes["threshold"]) for n in again.nodes if n.op == "RandomMask"}
    assert drawn == {("parallegg", round(float(THIRD) * 2**53))}
