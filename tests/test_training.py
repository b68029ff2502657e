"""Training steps: what `training_step` writes, run on one device and fed back, is what optax computes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallegg import builders
from parallegg.program import TensorType, UserError
from parallegg.rewrite.builder import Builder
from parallegg.rewrite.graph import Graph, tensor_source
from parallegg.rewrite.onnx_reader import load
from parallegg.rewrite.optimizers import SGD, Adam, AdamW
from parallegg.rewrite.training import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    LossSpec,
    TrainingStep,
    as_training_step,
    training_step,
)
from parallegg.runtime.lowering import QUICK, evaluate, flat_program
from parallegg.runtime.operators import exact_types

DATA = Path(__file__).parent / "data"
SHAPES = {"first.weight": (5, 7), "first.shift": (7,), "norm.scale": (1, 7), "second.weight": (7, 4)}
CROSS_ENTROPY = LossSpec("cross-entropy", "logits")


def model(dtype: str = "float64", outputs: tuple[str, ...] = ("logits",)) -> Graph:
    """logits = (tanh(x w + b) * scale) v, and some scalars beside it; `unused` reaches only `mean`."""
    b = Builder(reserved=set())
    b.input("x", TensorType((6, 5), dtype))
    for name, shape in SHAPES.items() | {("unused", (3,))}:
        b.weight(name, TensorType(shape, dtype))
    h = b.emit("MatMul", ("x", "first.weight"), {}, "first")[0]
    h = b.emit("Add", (h, "first.shift"), {}, "biased")[0]
    h = b.emit("Mul", (b.emit("Tanh", (h,), {}, "tanh")[0], "norm.scale"), {}, "scaled")[0]
    b.emit("MatMul", (h, "second.weight"), {}, "logits")
    b.emit("Mul", ("logits", "logits"), {}, "squares")
    b.emit("ReduceMean", ("squares",), {"axes": (0, 1), "keepdims": 0}, "mean_square")
    b.emit("ReduceMean", ("unused",), {"axes": (0,), "keepdims": 0}, "mean")
    b.emit("ArgMax", ("logits",), {"axis": 1, "keepdims": 0, "select_last_index": 0}, "guess")
    return b.finish("model", {name: name for name in outputs}, None)


def reference(weights, x):
    h = jnp.tanh(x @ weights["first.weight"] + weights["first.shift"]) * weights["norm.scale"]
    return h @ weights["second.weight"]


def weights(dtype: str = "float64", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def batches(count: int, dtype: str = "float64", seed: int = 1):
    """Inputs, and labels of which the first batches ignore some."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        labels = rng.integers(0, 4, 6)
        labels[: i % 4] = -100
        yield {"x": rng.standard_normal((6, 5)).astype(dtype), "labels": labels}


def rate(i: int) -> np.float32:
    """A schedule whose values are exact in float32."""
    return np.float32((40 - i) / 256)


def run(step: TrainingStep, start: dict[str, np.ndarray], feeds, outputs=()) -> list[dict[str, np.ndarray]]:
    """All outputs of every step, each fed with the state of the one before."""
    graph, history = step.graph, []
    program = flat_program(graph.nodes, (*graph.outputs, *outputs), compiler_options=QUICK)
    state = {
        name: start[name] if step.initial[name] == "parameter" else zeros(graph.types[name])
        for name, _ in step.state
    }
    for i, batch in enumerate(feeds):
        scalars = {step.learning_rate: rate(i), step.step: np.int64(i)}
        values = program(graph.constants | start | state | batch | scalars)
        state = {name: values[new] for name, new in step.state}
        history.append(values)
    return history


def zeros(kind: TensorType) -> np.ndarray:
    return np.zeros(kind.shape, kind.dtype)


def cross_entropy(logits, labels, smoothing=0.0):
    valid = labels != -100
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), smoothing)
    each = optax.softmax_cross_entropy(logits, targets)
    return jnp.sum(jnp.where(valid, each, 0)) / jnp.maximum(jnp.sum(valid), 1)


# ------------------------------------------------------------------------------------- trajectories

MATRICES = {"first.weight": True, "second.weight": True, "first.shift": False, "norm.scale": False}


def decay(amount):
    return optax.add_decayed_weights(amount, mask=MATRICES)


TRAJECTORIES = {
    "sgd": (SGD(), {}, lambda r: optax.sgd(r)),
    "momentum": (SGD(momentum=0.9), {}, lambda r: optax.sgd(r, momentum=0.9)),
    "nesterov": (SGD(momentum=0.9, nesterov=True), {}, lambda r: optax.sgd(r, momentum=0.9, nesterov=True)),
    "sgd with weight decay": (
        SGD(momentum=0.5, weight_decay=0.1),
        {},
        lambda r: optax.chain(decay(0.1), optax.sgd(r, momentum=0.5)),
    ),
    "adam": (Adam(), {}, lambda r: optax.adam(r)),
    "adam with other betas": (
        Adam(0.8, 0.95, 1e-5, weight_decay=0.1),
        {},
        lambda r: optax.chain(decay(0.1), optax.adam(r, 0.8, 0.95, 1e-5)),
    ),
    "adamw": (AdamW(), {}, lambda r: optax.adamw(r, weight_decay=0.01, mask=MATRICES)),
    "adamw decaying all but two": (
        AdamW(weight_decay=0.3),
        {"no_decay": ["*.weight"]},
        lambda r: optax.adamw(r, weight_decay=0.3, mask={name: not on for name, on in MATRICES.items()}),
    ),
    "clipped sgd": (
        SGD(),
        {"clip_norm": 2.5},
        lambda r: optax.chain(optax.clip_by_global_norm(2.5), optax.sgd(r)),
    ),
    "clipped adamw": (
        AdamW(),
        {"clip_norm": 2.0},
        lambda r: optax.chain(
            optax.clip_by_global_norm(2.0), optax.adamw(r, weight_decay=0.01, mask=MATRICES)
        ),
    ),
}


def optax_trajectory(optimizer, start, feeds, loss):
    """Loss, gradients and weights after every step."""
    with exact_types():
        trained = {name: jnp.asarray(value) for name, value in start.items()}
        transform = optimizer(lambda count: jnp.asarray((40 - count) / 256, jnp.float64))
        state = transform.init(trained)
        for batch in feeds:
            value, gradient = jax.value_and_grad(lambda w, b=batch: loss(w, b))(trained)
            updates, state = transform.update(gradient, state, trained)
            trained = optax.apply_updates(trained, updates)
            yield value, gradient, trained


@pytest.mark.parametrize("case", TRAJECTORIES)
def test_twenty_steps_equal_optax(case):
    optimizer, options, transform = TRAJECTORIES[case]
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=optimizer, **options)
    start, feeds = weights(), list(batches(20))
    found = run(step, start, feeds, step.gradients.values())
    expected = optax_trajectory(
        transform, start, feeds, lambda w, b: cross_entropy(reference(w, b["x"]), b["labels"])
    )
    norms, compared = [], 0
    for values, (loss, gradient, trained) in zip(found, expected, strict=True):
        np.testing.assert_allclose(values["loss"], loss, rtol=1e-11)
        for name in SHAPES:
            np.testing.assert_allclose(values[step.gradients[name]], gradient[name], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(values[f"new.{name}"], trained[name], rtol=1e-9, atol=1e-12)
            compared += 1
        norms.append(np.sqrt(sum(float((g**2).sum()) for g in gradient.values())))
    assert compared == 80
    limit = options.get("clip_norm")
    assert limit is None or min(norms) < limit < max(norms)  # both sides of the clip were met


def test_moments_equal_optax():
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=Adam())
    start, feeds = weights(), list(batches(3))
    values = run(step, start, feeds)[-1]
    with exact_types():
        transform = optax.adam(lambda count: (40 - count) / 256)
        trained = {name: jnp.asarray(value) for name, value in start.items()}
        state = transform.init(trained)
        for batch in feeds:
            gradient = jax.grad(lambda w, b=batch: cross_entropy(reference(w, b["x"]), b["labels"]))(trained)
            updates, state = transform.update(gradient, state, trained)
            trained = optax.apply_updates(trained, updates)
    for name in SHAPES:
        np.testing.assert_allclose(values[f"new.adam.mean.{name}"], state[0].mu[name], rtol=1e-9)
        np.testing.assert_allclose(values[f"new.adam.square.{name}"], state[0].nu[name], rtol=1e-9)


# ------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_ignores_and_smooths(smoothing):
    spec = LossSpec("cross-entropy", "logits", label_smoothing=smoothing)
    step = training_step(model(), loss=spec, optimizer=SGD())
    assert step.batch == ("x", "labels")
    start, feeds = weights(), list(batches(4))
    expected = optax_trajectory(
        optax.sgd, start, feeds, lambda w, b: cross_entropy(reference(w, b["x"]), b["labels"], smoothing)
    )
    for values, (loss, _, _) in zip(run(step, start, feeds), expected, strict=True):
        np.testing.assert_allclose(values["loss"], loss, rtol=1e-11)


def test_without_a_valid_label_nothing_is_lost_nor_learnt():
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=SGD())
    start = weights()
    batch = next(batches(1)) | {"labels": np.full(6, -100)}
    (values,) = run(step, start, [batch])
    assert values["loss"] == 0
    for name in SHAPES:
        np.testing.assert_array_equal(values[f"new.{name}"], start[name])


def test_another_ignored_index_may_be_a_class():
    spec = LossSpec("cross-entropy", "logits", ignore_index=2)
    step = training_step(model(), loss=spec, optimizer=SGD())
    batch = next(batches(1)) | {"labels": np.array([0, 1, 2, 2, 3, 3])}
    (values,) = run(step, weights(), [batch])
    with exact_types():
        labels = np.where(batch["labels"] == 2, -100, batch["labels"])
        expected = cross_entropy(reference(weights(), batch["x"]), labels)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-12)


def test_logits_may_have_more_dimensions():
    b = Builder(reserved=set())
    b.input("x", TensorType((2, 3, 4), "float64"))
    b.weight("w", TensorType((4, 5), "float64"))
    b.emit("MatMul", ("x", "w"), {}, "y")
    graph = b.finish("m", {"y": "y"}, None)
    step = training_step(graph, loss=LossSpec("cross-entropy", "y", label="next"), optimizer=SGD())
    assert step.graph.types["next"] == TensorType((2, 3), "int64")
    rng = np.random.default_rng(0)
    x, w, labels = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5)), rng.integers(0, 5, (2, 3))
    (values,) = run(step, {"w": w}, [{"x": x, "next": labels}])
    with exact_types():
        np.testing.assert_allclose(values["loss"], cross_entropy(x @ w, labels), rtol=1e-12)


def test_mean_squared_error():
    step = training_step(model(), loss=LossSpec("mse", "logits", label="target"), optimizer=SGD())
    assert step.graph.types["target"] == TensorType((6, 4), "float64")
    start, rng = weights(), np.random.default_rng(2)
    feeds = [{"x": rng.standard_normal((6, 5)), "target": rng.standard_normal((6, 4))} for _ in range(3)]
    expected = optax_trajectory(
        optax.sgd, start, feeds, lambda w, b: jnp.mean((reference(w, b["x"]) - b["target"]) ** 2)
    )
    for values, (loss, _, trained) in zip(run(step, start, feeds), expected, strict=True):
        np.testing.assert_allclose(values["loss"], loss, rtol=1e-11)
        np.testing.assert_allclose(values["new.first.shift"], trained["first.shift"], rtol=1e-9)


def test_the_model_s_own_loss():
    step = training_step(model(outputs=("logits", "mean_square")), loss="mean_square", optimizer=SGD())
    assert step.loss == "mean_square" == step.graph.outputs[0]
    assert step.batch == ("x",)
    start, feeds = weights(), [{"x": b["x"]} for b in batches(2)]
    expected = optax_trajectory(optax.sgd, start, feeds, lambda w, b: jnp.mean(reference(w, b["x"]) ** 2))
    for values, (loss, _, _) in zip(run(step, start, feeds), expected, strict=True):
        np.testing.assert_allclose(values["mean_square"], loss, rtol=1e-11)


def test_a_label_may_be_an_input_of_the_model():
    graph = model()
    inputs = {**graph.types, "y": TensorType((6,), "int32")}
    graph = Graph("m", graph.nodes, ("x", "y"), graph.parameters, {}, graph.outputs, inputs)
    step = training_step(graph, loss=LossSpec("cross-entropy", "logits", label="y"), optimizer=SGD())
    assert step.batch == ("x", "y")


# ---------------------------------------------------------------------------------- what a step is


def test_a_step_names_its_parts():
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=AdamW(), frozen=["norm.*"])
    graph = step.graph
    trained = {"first.weight", "first.shift", "second.weight"}
    assert set(step.gradients) == trained
    assert step.frozen == ("norm.scale",)
    assert set(graph.parameters) == set(SHAPES)
    assert graph.outputs == ("loss", *(new for _, new in step.state))
    assert {(name, new) for name, new in step.state} == {
        (f"{kind}{name}", f"new.{kind}{name}")
        for name in trained
        for kind in ("", "adam.mean.", "adam.square.")
    }
    assert {name for name, start in step.initial.items() if start == "parameter"} == trained
    assert all(graph.types[name] == graph.types[new] for name, new in step.state)
    assert graph.types["learning_rate"] == TensorType((), "float32")
    assert graph.types["step"] == TensorType((), "int64")
    assert set(graph.inputs) == {"x", "labels", "learning_rate", "step"} | {
        name for name, start in step.initial.items() if start == "zeros"
    }


def test_phases_follow_each_other():
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=Adam(), clip_norm=1.0)
    maker = {tensor: node.name for node in step.graph.nodes for tensor in node.outputs}
    for node in step.graph.nodes:
        for tensor in node.inputs:
            assert tensor not in maker or step.phases[maker[tensor]] <= step.phases[node.name]
    assert set(step.phases.values()) == {FORWARD, BACKWARD, OPTIMIZER}
    assert step.phases[maker[step.loss]] == FORWARD
    assert all(step.phases[maker[g]] == BACKWARD for g in step.gradients.values())
    assert all(step.phases[maker[new]] == OPTIMIZER for _, new in step.state)


def test_sgd_counts_no_steps():
    step = training_step(model(), loss=CROSS_ENTROPY, optimizer=SGD())
    assert step.step is None and "step" not in step.graph.inputs


def test_frozen_weights_change_nothing_else():
    start, feeds = weights(), list(batches(1))
    (free,) = run(training_step(model(), loss=CROSS_ENTROPY, optimizer=SGD()), start, feeds)
    (held,) = run(
        training_step(model(), loss=CROSS_ENTROPY, optimizer=SGD(), frozen=["first.*"]), start, feeds
    )
    assert "new.first.weight" not in held
    np.testing.assert_allclose(held["new.second.weight"], free["new.second.weight"], rtol=1e-13)


def test_names_that_the_model_has_are_not_taken():
    graph = model(outputs=("logits", "mean_square"))
    types = {("learning_rate" if k == "x" else k): v for k, v in graph.types.items()}
    nodes = tuple(
        n if "x" not in n.inputs else type(n)(n.name, n.op, ("learning_rate", n.inputs[1]), n.outputs)
        for n in graph.nodes
    )
    graph = Graph("m", nodes, ("learning_rate",), graph.parameters, {}, graph.outputs, types)
    step = training_step(graph, loss="mean_square", optimizer=SGD())
    assert step.batch == ("learning_rate",) and step.learning_rate == "learning_rate_2"


def test_statistics_of_batch_normalisation_are_not_trained():
    b = Builder(reserved=set())
    b.input("x", TensorType((2, 3, 4), "float64"))
    for name in ("scale", "bias", "running_mean", "running_var"):
        b.weight(name, TensorType((3,), "float64"))
    operands = ("x", "scale", "bias", "running_mean", "running_var")
    b.emit("BatchNormalization", operands, {"epsilon": 1e-5}, "y")
    step = training_step(b.finish("m", {"y": "y"}, None), loss=LossSpec("mse", "y"), optimizer=SGD())
    assert step.frozen == ("running_mean", "running_var")
    assert set(step.gradients) == {"scale", "bias"}


# --------------------------------------------------------------------------------- mixed precision


def test_mixed_precision_keeps_weights_moments_and_loss_in_float32():
    step = training_step(model("float32"), loss=CROSS_ENTROPY, optimizer=Adam(), compute_dtype="bfloat16")
    types = step.graph.types
    assert types[step.loss].dtype == "float32"
    assert all(types[name].dtype == types[new].dtype == "float32" for name, new in step.state)
    assert all(types[g].dtype == "float32" for g in step.gradients.values())
    products = [n for n in step.graph.nodes if n.op in ("MatMul", "Gemm") and step.phases[n.name] == FORWARD]
    assert products and all(types[n.outputs[0]].dtype == "bfloat16" for n in products)
    assert all(types[n.inputs[0]].dtype == "float32" for n in step.graph.nodes if n.op == "LogSoftmax")


def test_mixed_precision_stays_near_float32():
    start, feeds = weights("float32"), list(batches(5, "float32"))
    results = []
    for dtype in (None, "bfloat16"):
        step = training_step(model("float32"), loss=CROSS_ENTROPY, optimizer=SGD(), compute_dtype=dtype)
        results.append([float(values["loss"]) for values in run(step, start, feeds)])
    plain, mixed = results
    assert plain != mixed
    np.testing.assert_allclose(mixed, plain, rtol=3e-2)


@pytest.mark.parametrize("build", [builders.gpt, builders.llama, builders.moe])
def test_every_gradient_of_a_model_in_bfloat16_points_where_it_does_in_float32(build, tmp_path):
    sizes = {"layers": 1, "width": 32, "heads": 4, "vocabulary": 40, "context": 12, "batch": 3, "ffn": 48}
    sizes |= {"kv_heads": 2} if build is not builders.gpt else {}
    sizes |= (
        {"experts": 4, "chosen": 4} if build is builders.moe else {}
    )  # else a rounding changes the choice
    graph = load(builders.write(build(**sizes), tmp_path / "m.onnx"))
    value, rng = tensor_source(graph), np.random.default_rng(0)
    leaves = {name: value(name) for name in graph.parameters}
    leaves |= {name: rng.integers(0, 40, (3, 12)) for name in ("input_ids", "labels")}
    found = []
    for dtype in (None, "bfloat16"):
        step = training_step(graph, loss=CROSS_ENTROPY, optimizer=SGD(), compute_dtype=dtype)
        names = ("loss", *step.gradients.values())
        values = evaluate(step.graph.nodes, step.graph.constants | leaves, names, compiler_options=QUICK)
        found.append({"loss": values["loss"]} | {name: values[g] for name, g in step.gradients.items()})
    plain, mixed = found
    assert set(plain) == set(mixed) == {"loss", *graph.parameters}
    np.testing.assert_allclose(mixed["loss"], plain["loss"], rtol=1e-2)
    for name in graph.parameters:
        a, b = plain[name].reshape(-1), mixed[name].reshape(-1)
        assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b), name


def test_rows_of_a_table_are_gathered_in_float32_and_go_on_in_bfloat16():
    b = Builder(reserved=set())
    b.input("ids", TensorType((6,), "int64"))
    b.weight("table", TensorType((9, 4), "float32"))
    b.weight("scale", TensorType((4,), "float32"))
    rows = b.emit("Gather", ("table", "ids"), {"axis": 0}, "rows")[0]
    b.weight("w", TensorType((4, 4), "float32"))
    b.emit("MatMul", (b.emit("Mul", (rows, "scale"), {}, "scaled")[0], "w"), {}, "y")
    graph = b.finish("m", {"y": "y"}, None)
    step = training_step(graph, loss=LossSpec("mse", "y"), optimizer=SGD(), compute_dtype="bfloat16")
    assert {name: step.graph.types[name].dtype for name in ("rows", "scaled", "y")} == {
        "rows": "float32",
        "scaled": "bfloat16",
        "y": "bfloat16",
    }


def test_a_mask_s_lowest_number_stays_finite_in_bfloat16():
    b = Builder(reserved=set())
    b.input("x", TensorType((2, 4), "float32"))
    b.weight("w", TensorType((4, 4), "float32"))
    y = b.emit("MatMul", ("x", "w"), {}, "y")[0]
    mask = b.constant(np.full((2, 4), np.finfo(np.float32).min), "mask")
    masked = b.emit("Add", (y, mask), {}, "masked")[0]
    p = b.emit("Softmax", (masked,), {"axis": 1}, "p")[0]
    z = b.emit("MatMul", (p, "w"), {}, "z")[0]
    graph = b.finish("m", {z: "z"}, None)
    step = training_step(graph, loss=LossSpec("mse", "z"), optimizer=SGD(), compute_dtype="bfloat16")
    rng = np.random.default_rng(0)
    batch = {n: rng.standard_normal((2, 4)).astype("float32") for n in ("x", "labels")}
    (values,) = run(step, {"w": rng.standard_normal((4, 4)).astype("float32")}, [batch])
    assert np.isfinite(values["loss"]) and np.isfinite(values["new.w"]).all()


def test_half_weights_are_updated_in_float32():
    step = training_step(model("bfloat16"), loss=CROSS_ENTROPY, optimizer=Adam())
    types = step.graph.types
    assert types["first.weight"].dtype == types["new.first.weight"].dtype == "bfloat16"
    assert types["adam.mean.first.weight"].dtype == "float32"
    assert types["loss"].dtype == "float32"


# ------------------------------------------------------------------------------------------ refusals

ALL = ("logits", "mean_square", "mean", "guess")
REFUSED = {
    "no such output": ({"loss": "logit"}, "loss: the model has no output 'logit'; it has logits"),
    "no scalar": (
        {"loss": "logits"},
        "loss 'logits' is float64[6,4], not a floating scalar: attach a loss, for example cross-entropy:logits",
    ),
    "loss on no output": (
        {"loss": LossSpec("mse", "y")},
        "loss: the model has no output 'y'; it has logits, mean_square, mean, guess",
    ),
    "integers": (
        {"loss": LossSpec("mse", "guess")},
        "loss mse: output 'guess' is int64[6], not floating",
    ),
    "no classes": (
        {"loss": LossSpec("cross-entropy", "mean")},
        "loss cross-entropy: output 'mean' is float64[], it has no classes",
    ),
    "label of another type": (
        {"loss": LossSpec("cross-entropy", "logits", label="x")},
        "loss cross-entropy:logits: the label input 'x' is float64[6,5], expected int64[6]",
    ),
    "label inside": (
        {"loss": LossSpec("cross-entropy", "logits", label="first.shift")},
        "loss: the label 'first.shift' is a tensor of the model, but no input",
    ),
    "frozen nothing": ({"frozen": ["third.*"]}, "frozen 'third.*': matches no parameter; there are "),
    "frozen all": ({"frozen": ["*"]}, "no parameter to train: all are frozen"),
    "no decay of nothing": ({"no_decay": ["gamma"]}, "no_decay 'gamma': matches no parameter; there are "),
    "strict": (
        {"strict": True, "frozen": ["first.*"]},
        "loss 'loss' gives no gradient to 'unused': freeze what should not be trained",
    ),
    "no gradient at all": (
        {"loss": "mean_square", "frozen": ["first.*", "second.*", "norm.*"]},
        "loss 'mean_square' gives no gradient to 'unused': freeze what should not be trained",
    ),
    "clip": ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
    "float16": (
        {"compute_dtype": "float16"},
        "compute_dtype 'float16': only 'bfloat16' is supported (float16 would need loss scaling)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(case):
    options, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        training_step(model(outputs=ALL), **{"loss": CROSS_ENTROPY, "optimizer": SGD(), **options})
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


def test_a_weight_without_gradient_is_named():
    step = training_step(model(outputs=ALL), loss=CROSS_ENTROPY, optimizer=SGD())
    assert step.warnings == ("parameter 'unused' has no gradient and is not trained",)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(momentum=1.0), "optimizer: momentum must lie in [0, 1), got 1.0"),
        (lambda: SGD(nesterov=True), "optimizer: nesterov needs a momentum above 0"),
        (lambda: AdamW(beta2=-0.1), "optimizer: beta2 must lie in [0, 1), got -0.1"),
        (lambda: Adam(epsilon=0.0), "optimizer: epsilon must be positive, got 0.0"),
        (lambda: LossSpec("hinge", "y"), "loss 'hinge': not known; known are cross-entropy, mse"),
        (lambda: LossSpec("mse", "y", label_smoothing=1.0), "loss: label_smoothing must lie in [0, 1), got 1.0"),
    ],
)  # fmt: skip
def test_settings_are_checked(make, text):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == text


# ------------------------------------------------------------------------------- given training steps

GIVEN = ("mlp", "cnn", "gpt2", "llama")


def given(name: str) -> tuple[TrainingStep, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The step, everything it reads and torch's results."""
    step = as_training_step(load(DATA / f"{name}.trainstep.onnx"), "p.{} -> new.{}")
    value = tensor_source(step.graph)  # exporters store some constants as weights
    stored = np.load(DATA / f"{name}.trainstep.npz")
    feeds = {key[3:]: stored[key] for key in stored if key.startswith("in:")}
    feeds |= {name: value(name) for name in (*step.graph.parameters, *step.graph.constants)}
    return step, feeds, {key[4:]: stored[key] for key in stored if key.startswith("out:")}


@pytest.mark.parametrize("name", GIVEN)
def test_given_steps_equal_torch(name):
    step, feeds, expected = given(name)
    graph = step.graph
    found = evaluate(graph.nodes, feeds, graph.outputs, compiler_options=QUICK)
    assert set(found) == set(expected)
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("name", GIVEN)
def test_given_steps_pair_all_state_and_split_into_phases(name):
    step, _, expected = given(name)
    assert {new for _, new in step.state} == set(expected) - {"loss"}
    assert step.batch == ("in0", "in1")
    assert set(step.initial.values()) == {"input"}  # the file holds no weights
    assert set(step.phases.values()) == {FORWARD, BACKWARD, OPTIMIZER}
    assert set(step.gradients) == {name for name, _ in step.state}
    maker = {tensor: node.name for node in step.graph.nodes for tensor in node.outputs}
    for node in step.graph.nodes:
        for tensor in node.inputs:
            assert tensor not in maker or step.phases[maker[tensor]] <= step.phases[node.name]


def test_inferred_gradients_are_those_of_the_update():
    step, feeds, expected = given("mlp")
    values = evaluate(step.graph.nodes, feeds, step.gradients.values())
    for name, new in step.state:
        change = (feeds[name] - expected[new]).reshape(-1)
        gradient = values[step.gradients[name]].reshape(-1)
        at = np.argmax(np.abs(gradient))
        np.testing.assert_allclose(change, gradient * (change[at] / gradient[at]), rtol=1e-2, atol=1e-6)


GIVEN_REFUSED = {
    "no match": (
        "q.{} -> new.{}",
        "state 'q.{} -> new.{}': matches no input with its output; the inputs are p.0.weight, p.0.bias, p.2.weight, "
        "p.2.bias, p.3.weight, …, the outputs loss, new.0.weight, new.0.bias, new.2.weight, new.2.bias, …",
    ),
    "no pattern": ("p -> new", "state 'p -> new': expected a pattern such as 'p.{} -> new.{}'"),
    "not every output": (
        "p.0.{} -> new.{}",
        "state 'p.0.{} -> new.{}': matches no input with its output; the inputs are p.0.weight",
    ),
    "no input": ({"w": "new.0.bias"}, "state: the model has no input or parameter 'w'"),
    "no output": ({"p.0.bias": "new"}, "state 'p.0.bias': the model has no output 'new'"),
    "another type": (
        {"p.0.bias": "new.0.weight"},
        "state 'p.0.bias' is float32[32], but its new value 'new.0.weight' is float32[32,16]",
    ),
    "twice": (
        {"p.0.bias": "new.0.bias", "p.2.bias": "new.0.bias"},
        "state 'p.2.bias': output 'new.0.bias' is already the new value of 'p.0.bias'",
    ),
    "nothing": ({}, "state: no pair of an input and its new value is given"),
}


@pytest.mark.parametrize("case", GIVEN_REFUSED)
def test_mistaken_pairs_are_one_line(case):
    pairs, text = GIVEN_REFUSED[case]
    with pytest.raises(UserError) as error:
        as_training_step(load(DATA / "mlp.trainstep.onnx"), pairs)
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


def small_step(*outputs: str) -> Graph:
    """Inputs x, w and fixed; outputs a loss and what is named."""
    b = Builder(reserved=set())
    for name in ("x", "w", "fixed"):
        b.input(name, TensorType((3,), "float32"))
    b.emit("Mul", (b.emit("Mul", ("x", "w"), {}, "product")[0], "fixed"), {}, "scaled")
    b.emit("ReduceSum", ("scaled",), {"axes": (0,), "keepdims": 0}, "loss")
    for name in outputs:
        b.emit("Sub", ("w", "x"), {}, name)
    return b.finish("m", {name: name for name in ("loss", *outputs)}, None)


def test_a_bare_pattern_feeds_what_has_no_output():
    step = as_training_step(small_step("new.w"), "{} -> new.{}")
    assert step.state == (("w", "new.w"),)
    assert step.batch == ("x", "fixed") and step.frozen == ()


def test_pairs_may_be_a_mapping_or_several_patterns():
    graph = small_step("new.w", "x'")
    assert as_training_step(graph, {"w": "new.w"}).batch == ("x", "fixed")
    step = as_training_step(graph, ["{} -> new.{}", "{} -> {}'"])
    assert step.state == (("w", "new.w"), ("x", "x'"))


def test_a_new_value_of_nothing_is_named():
    types = {"p.w": TensorType((3,), "float32"), "v": TensorType((3,), "float32")}
    b = Builder(reserved=set())
    for name, kind in types.items():
        b.input(name, kind)
    b.emit("ReduceSum", ("p.w",), {"axes": (0,), "keepdims": 0}, "loss")
    for name in types:
        b.emit("Neg", (name,), {}, f"new.{name.removeprefix('p.')}")
    graph = b.finish("m", {name: name for name in ("loss", "new.w", "new.v")}, None)
    with pytest.raises(UserError) as error:
        as_training_step(graph, "p.{} -> new.{}")
    text = "state 'p.{} -> new.{}': output 'new.v' is the new value of no input or parameter 'p.v'"
    assert str(error.value) == text


def test_what_a_pattern_finds_without_an_output_is_frozen():
    b = Builder(reserved=set())
    for name in ("p.v", "p.w"):
        b.input(name, TensorType((3,), "float32"))
    b.emit("ReduceSum", (b.emit("Mul", ("p.v", "p.w"), {}, "y")[0],), {"axes": (0,), "keepdims": 0}, "loss")
    b.emit("Sub", ("p.w", "p.v"), {}, "new.w")
    step = as_training_step(b.finish("m", {n: n for n in ("loss", "new.w")}, None), "p.{} -> new.{}")
    assert (step.state, step.frozen) == ((("p.w", "new.w"),), ("p.v",))


def test_what_a_backward_node_reads_is_no_update():
    """w - g / |g|: the gradient and its norm come before the update, though the gradient is elementwise, too."""
    b = Builder(reserved=set())
    for name in ("x", "w"):
        b.input(name, TensorType((3,), "float32"))
    b.emit("ReduceSum", (b.emit("Mul", ("x", "w"), {}, "y")[0],), {"axes": (0,), "keepdims": 0}, "loss")
    b.emit("Abs", ("x",), {}, "gradient")
    b.emit("Mul", ("gradient", "gradient"), {}, "square")
    b.emit("ReduceSum", ("square",), {"axes": (0,), "keepdims": 0}, "sum")
    b.emit("Sqrt", ("sum",), {}, "norm")
    b.emit("Sub", ("w", b.emit("Div", ("gradient", "norm"), {}, "change")[0]), {}, "new.w")
    step = as_training_step(b.finish("m", {n: n for n in ("loss", "new.w")}, None), "{} -> new.{}")
    assert step.gradients == {"w": "gradient"}
    assert step.phases == {
        **dict.fromkeys(("y", "loss"), FORWARD),
        **dict.fromkeys(("gradient", "square", "sum"), BACKWARD),
        **dict.fromkeys(("norm", "change", "new.w"), OPTIMIZER),
    }
