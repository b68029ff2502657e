"""Training under a plan: trajectories against one device, state, the command line, what goes wrong."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import optax
import parallegg
import pytest
from parallegg import cli, schedules
from parallegg.builders import gpt, write
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.planfile import to_bytes
from parallegg.program import UserError
from parallegg.report import describe
from parallegg.rewrite.graph import tensor_source
from parallegg.rules import load_rules
from parallegg.runtime.devices import ensure_devices
from parallegg.runtime.training import CompiledStep, NonFinite

from .trajectories import check_three_steps, double

_spec = importlib.util.spec_from_file_location("cli_models", Path(__file__).parent / "cli_models.py")
assert _spec and _spec.loader
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

BATCH, CONTEXT, WORDS = 4, 6, 24
GPT = {"layers": 2, "width": 12, "heads": 2, "vocabulary": WORDS, "context": CONTEXT, "batch": BATCH}
CNN = (
    Path(__file__).parent / "data" / "cnn_train_loss.legacy.onnx"
)  # BatchNormalization and Dropout in training mode
TRAIN = ["--train", "--loss", "mse:y"]  # of the multi-layer perceptron


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """GPT and a perceptron with its data: 10 examples, batches of 4."""
    ensure_devices(8)
    folder = tmp_path_factory.mktemp("training")
    write(gpt(**GPT), folder / "gpt.onnx")
    models.mlp(folder / "mlp.onnx", hidden=32, batch=4)
    batch = perceptron_batch(10)
    np.savez(folder / "data.npz", x=batch["x"], labels=batch["labels"])
    return folder


@pytest.fixture(scope="module")
def planned(folder) -> Path:
    """The perceptron's plan on data=2,model=2, as the command line writes it."""
    target = folder / "mlp.plan.onnx"
    model = str(folder / "mlp.onnx")
    assert cli.main(["plan", model, *TRAIN, "--mesh", "data=2,model=2", "-o", str(target)]) == cli.GOOD
    return target


def perceptron_batch(examples: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((examples, 256), np.float32),
        "labels": np.eye(16, dtype=np.float32)[rng.integers(0, 16, examples)],
    }


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Of GPT."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, WORDS, (count, BATCH, CONTEXT + 1))
    return [{"input_ids": w[:, :-1], "labels": w[:, 1:]} for w in words]


# ------------------------------------------------------------------------------------------------ trajectories


@pytest.mark.parametrize(
    ("model", "mesh"), [("gpt", "data=2,model=3"), ("mlp", "data=2,model=2"), ("mlp", "data=4,model=2")]
)
def test_three_steps_equal_those_of_one_device(folder, model, mesh):
    graph = parallegg.load(folder / f"{model}.onnx")
    if model == "gpt":
        # The gradient of a key's bias is zero but for rounding, which Adam divides by epsilon: not by 1e-8 here.
        optimizer = parallegg.AdamW(weight_decay=0.1, epsilon=1e-5)
        fed, loss = batches(3), parallegg.LossSpec("cross-entropy", "logits")
        step = parallegg.training_step(graph, loss=loss, optimizer=optimizer, clip_norm=1.0, frozen=["*wpe*"])
    else:
        fed, optimizer = [double(perceptron_batch())] * 3, parallegg.SGD(momentum=0.9)
        step = parallegg.training_step(graph, loss=parallegg.LossSpec("mse", "y"), optimizer=optimizer)
    check_three_steps(step, parallegg.plan(step, mesh).plan, fed)


@pytest.mark.parametrize("mesh", ["data=2,model=4", pytest.param("data=2,model=2", marks=pytest.mark.sweep)])
def test_three_steps_in_training_mode_equal_those_of_one_device(mesh):
    """A net with batch statistics, running averages and a Dropout; its bias before the statistics learns nothing."""
    graph = parallegg.load(CNN, {"x": (4, 3, 8, 8), "t": (4,)})
    optimizer = parallegg.SGD(momentum=0.9)
    step = parallegg.training_step(graph, loss="loss", optimizer=optimizer, frozen=["c.bias"])
    assert {"b.running_mean", "b.running_var"} < {name for name, _ in step.state}
    rng = np.random.default_rng(0)
    fed = [{"x": rng.standard_normal((4, 3, 8, 8)), "t": rng.integers(0, 10, 4)} for _ in range(3)]
    cheapest = parallegg.plan(step, mesh).plan
    roles = step.roles
    prepared = prepare(step.graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules(), roles=roles)
    drawn = random_plan(prepared, random_choice(prepared.problem, np.random.default_rng(0)))
    assert any(t.shape[0] == 2 for name, t in drawn.types.items() if "/centred@" in name)
    for plan in (cheapest, dataclasses.replace(drawn, metadata=cheapest.metadata)):
        check_three_steps(step, plan, fed)


@functools.cache
def compiled_perceptron(path: Path, plan: Path) -> CompiledStep:
    return parallegg.compile(parallegg.load_plan(plan), path)


def test_a_state_continues_where_it_was(folder, planned):
    compiled, batch = compiled_perceptron(folder / "mlp.onnx", planned), perceptron_batch()
    state = compiled.init()
    for _ in range(3):
        state, _ = compiled.step(state, batch, learning_rate=0.01)
    again = compiled.init(compiled.state_dict(state))
    assert again[compiled.count] == 3
    assert compiled.step(again, batch, 0.01)[1] == compiled.step(state, batch, 0.01)[1]


def test_a_used_state_says_so(folder, planned):
    compiled, batch = compiled_perceptron(folder / "mlp.onnx", planned), perceptron_batch()
    state = compiled.init()
    compiled.step(state, batch, 0.1)
    with pytest.raises(UserError, match="a step has used it up; go on with the state that it returned"):
        compiled.step(state, batch, 0.1)


def test_equal_steps_give_equal_plans_and_plans_name_their_model(folder, planned):
    graph = parallegg.load(folder / "mlp.onnx")
    loss = parallegg.LossSpec("mse", "y")
    step = parallegg.training_step(graph, loss=loss, optimizer=parallegg.AdamW())
    assert to_bytes(parallegg.plan(step, "data=2,model=2").plan) == planned.read_bytes()
    plan = parallegg.load_plan(planned)
    assert plan.metadata["training"]["recipe"]["optimizer"]["name"] == "AdamW"
    models.mlp(folder / "other.onnx", hidden=64, batch=4)
    with pytest.raises(UserError, match="the plan was made for another model"):
        parallegg.compile(plan, folder / "other.onnx")
    forward = parallegg.plan(graph, "data=2").plan
    with pytest.raises(UserError, match="the plan is of no training step"):
        parallegg.compile(forward, graph)


# ------------------------------------------------------------------------------------------------ bad input


def test_a_wrong_batch_is_one_line(folder, planned):
    compiled = compiled_perceptron(folder / "mlp.onnx", planned)
    state, good = compiled.init(), perceptron_batch()
    for change, text in (
        ({"labels": good["labels"][:3]}, r"input 'labels': expected float32\[4,16\], found float32\[3,16\]"),
        (
            {"labels": good["labels"].astype(np.int32)},
            r"'labels': expected float32\[4,16\], found int32\[4,16\]",
        ),
        ({"z": good["labels"]}, "batch: the plan has no input 'z'; it has x, labels"),
    ):
        with pytest.raises(UserError, match=text):
            compiled.step(state, good | change, 0.1)
    split = parallegg.training_step(
        parallegg.load(folder / "mlp.onnx"), loss=parallegg.LossSpec("mse", "y"), optimizer=parallegg.SGD()
    )
    plan = parallegg.plan(split, "data=2,model=2", scheme="data-parallel").plan
    with pytest.raises(UserError, match=r"'x': .*; 3 examples cannot be split over data=2 and model=2"):
        parallegg.compile(plan, split.graph).check_batch({name: array[:3] for name, array in good.items()})
    with pytest.raises(UserError, match=r"'x': .*; the plan takes 4 examples at a time"):
        parallegg.compile(plan, split.graph).check_batch(
            {name: np.tile(x, (2, 1)) for name, x in good.items()}
        )
    with pytest.raises(UserError, match="batch: input 'labels' is missing"):
        compiled.step(state, {"x": good["x"]}, 0.1)
    with pytest.raises(UserError, match="learning_rate: missing"):
        compiled.step(state, good)
    compiled.step(state, good, 0.1)  # nothing was lost


def test_a_loss_that_is_not_finite_leaves_the_state(folder, planned):
    compiled = compiled_perceptron(folder / "mlp.onnx", planned)
    first = second = perceptron_batch()
    state, _ = compiled.step(compiled.init(), first, 0.01)
    before = compiled.state_dict(state)
    name = "b"
    broken = before | {name: np.full_like(before[name], np.nan)}
    with pytest.raises(NonFinite, match=f"step 2: the loss is nan; the first .* is '{name}'") as caught:
        compiled.step(compiled.init(broken), second, 0.01)
    kept = compiled.state_dict(caught.value.state)
    assert all(np.array_equal(kept[key], broken[key], equal_nan=True) for key in broken)
    huge = before | {name: np.full_like(before[name], 3e38)}
    with pytest.raises(NonFinite, match=r"step 2: the loss is nan; the first .* is 'z@") as caught:
        compiled.step(compiled.init(huge), second, 0.01)
    kept = compiled.state_dict(caught.value.state)
    assert all(np.array_equal(kept[key], huge[key]) for key in huge)


@pytest.mark.parametrize("pin", ["R,R", "S0,S1"])
def test_gradients_that_are_not_finite_leave_the_state(pin, tmp_path):
    """On every device, also those whose part of the gradient is finite; the loss is finite."""
    ensure_devices(8)
    graph = parallegg.load(models.root(tmp_path / "root.onnx"))
    loss = parallegg.LossSpec("mse", "y")
    step = parallegg.training_step(graph, loss=loss, optimizer=parallegg.AdamW())
    compiled = parallegg.compile(parallegg.plan(step, "data=2,model=2", pins={"a": pin}).plan, graph)
    batch = {"x": np.ones((4, 8), np.float32), "labels": np.zeros((4, 6), np.float32)}
    before = compiled.state_dict(compiled.init())
    before["a"] = before["a"] * (np.arange(6) > 0)  # the first column of x a is 0
    with pytest.raises(
        NonFinite, match=r"step 1: the loss is \d.*, its update is not finite; the first .* is"
    ) as caught:
        compiled.step(compiled.init(before), batch, 0.01)
    kept = compiled.state_dict(caught.value.state)
    assert all(np.array_equal(kept[name], before[name]) for name in before)


# ------------------------------------------------------------------------------------------------ the command line


def train(folder: Path, planned: Path, *more: str) -> int:
    model, data = str(folder / "mlp.onnx"), str(folder / "data.npz")
    return cli.main(["train", str(planned), "--model", model, "--data", data, *more])


def test_train_writes_state_and_metrics(folder, planned, tmp_path, capsys):
    state, metrics = tmp_path / "state.npz", tmp_path / "metrics.jsonl"
    paths = ["-o", str(state), "--metrics", str(metrics)]
    assert train(folder, planned, "--steps", "4", "--repeat", *paths, "--json") == cli.GOOD
    report = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert report["loss"] == lines[-1]["loss"]
    assert {"loss", "seconds", "examples_per_s"} <= set(lines[0])
    with np.load(state) as arrays:
        assert arrays["step"] == 4
        assert arrays["a"].shape == arrays["adam.mean.a"].shape == (256, 32)
    again = ["--repeat", "--resume", str(state)]
    assert train(folder, planned, "--steps", "1", *again, *paths) == cli.GOOD
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "state.npz"]


def test_the_loss_falls(folder, tmp_path):
    """A plan of GPT for 20 steps, all on the command line."""
    model, plan, metrics = str(folder / "gpt.onnx"), str(tmp_path / "plan.onnx"), tmp_path / "metrics.jsonl"
    wanted = ["--train", "--loss", "cross-entropy:logits", "--clip-norm", "1"]
    assert cli.main(["plan", model, *wanted, "--mesh", "data=4", "-o", plan]) == cli.GOOD
    ids = np.add.outer(np.arange(8), np.arange(CONTEXT + 1)) % WORDS
    np.savez(tmp_path / "data.npz", input_ids=ids[:, :-1], labels=ids[:, 1:])
    more = ["--data", str(tmp_path / "data.npz"), "--steps", "20", "--repeat", "--learning-rate", "0.01"]
    paths = ["--metrics", str(metrics), "-o", str(tmp_path / "state.npz")]
    assert cli.main(["train", plan, "--model", model, *more, *paths]) == cli.GOOD
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
    assert "tokens_per_s" in metrics.read_text()


@pytest.mark.sweep
def test_a_net_in_training_mode_trains(tmp_path):
    """Its own loss; what is averaged is saved with the weights."""
    plan, data, state = (str(tmp_path / name) for name in ("plan.onnx", "data.npz", "state.npz"))
    assert (
        cli.main(["plan", str(CNN), "--train", "--loss", "loss", "--mesh", "data=2,model=2", "-o", plan])
        == cli.GOOD
    )
    assert cli.main(["verify", str(CNN), plan]) == cli.GOOD
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    np.savez(data, x=x, t=np.array([3, 7]))
    options = ["--steps", "20", "--repeat", "--learning-rate", "0.01", "--metrics", str(tmp_path / "m.jsonl")]
    assert cli.main(["train", plan, "--model", str(CNN), "--data", data, *options, "-o", state]) == cli.GOOD
    losses = [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]
    graph = parallegg.load(CNN)
    shown = describe(parallegg.load_plan(plan))["inputs"]
    averages = {port["name"] for port in shown if port.get("role") == "statistic"}
    assert averages == {statistic.name for statistic in graph.statistics}
    with np.load(state) as saved:
        for statistic in graph.statistics:
            assert np.abs(saved[statistic.name] - tensor_source(graph)(statistic.name)).min() > 1e-4


def test_verify_knows_training_plans(folder, planned, capsys):
    assert cli.main(["verify", str(folder / "mlp.onnx"), str(planned)]) == cli.GOOD
    assert capsys.readouterr().out.startswith("tested")


def test_show_tells_state_from_what_is_fed(planned, capsys):
    assert cli.main(["show", str(planned), "--json"]) == cli.GOOD
    facts = json.loads(capsys.readouterr().out)
    inputs = {port["name"]: port for port in facts["inputs"]}
    kinds = {name: port["kind"] for name, port in inputs.items() if port["kind"] != "constant"}
    moments = [f"adam.{kind}.{weight}" for weight in "ab" for kind in ("mean", "square")]
    state = dict.fromkeys([*moments, "a", "b"], "state")
    assert kinds == {
        "x": "input", "labels": "input", "learning_rate": "learning_rate", "step": "step", **state
    }  # fmt: skip
    assert (inputs["a"]["role"], inputs["adam.mean.a"]["role"]) == ("weight", "moment")
    assert inputs["adam.square.b"]["of"] == "b"
    assert facts["memory"]["state"] == sum(inputs[name]["local_bytes"] for name in state)
    outputs = {port["name"]: (port["kind"], port.get("of")) for port in facts["outputs"]}
    assert outputs["loss"] == ("loss", None) and outputs["new.a"] == ("next_state", "a")


def test_show_has_a_row_for_a_weight_and_its_moments(planned, capsys):
    assert cli.main(["show", str(planned)]) == cli.GOOD
    out = capsys.readouterr().out
    tables = {table.splitlines()[0]: table for table in out.split("\n\n")}
    state = tables["state: weights, the optimizer's moments"].splitlines()
    assert [line.split()[0] for line in state[2:]] == ["a", "b"]
    assert "adam" not in out and "new." not in out
    fed = [line.split()[0] for line in tables["inputs and outputs"].splitlines()[2:]]
    assert fed == ["x", "labels", "learning_rate", "step", "loss"]
    assert "memory a device   state " in out


def test_show_folds_layers_unless_all_are_asked_for(folder, tmp_path, capsys):
    step = parallegg.training_step(
        parallegg.load(folder / "gpt.onnx"),
        loss=parallegg.LossSpec("cross-entropy", "logits"),
        optimizer=parallegg.SGD(),
    )
    parallegg.save(parallegg.plan(step, "data=1").plan, tmp_path / "plan.onnx")
    assert cli.main(["show", str(tmp_path / "plan.onnx")]) == cli.GOOD
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "mlp.c_fc.weight" in line]
    assert row.split()[:4] == ["transformer.h.*.mlp.c_fc.weight", "2", "float32", "12x48"]
    assert cli.main(["show", str(tmp_path / "plan.onnx"), "--all"]) == cli.GOOD
    rows = [line for line in capsys.readouterr().out.splitlines() if "mlp.c_fc.weight" in line]
    assert [row.split()[0] for row in rows] == [f"transformer.h.{i}.mlp.c_fc.weight" for i in range(2)]


def test_mistakes_in_training_are_one_line(folder, planned, tmp_path, capsys):
    def error(*arguments: str) -> str:
        assert train(folder, planned, *arguments, "-o", str(tmp_path / "s.npz")) == cli.BAD_INPUT
        err = capsys.readouterr().err
        return next(line for line in err.splitlines() if line.startswith("error: "))

    assert "data ends early: 10 examples are enough for 2 steps of 4, step 3 has none" in error(
        "--steps", "3"
    )
    np.savez(tmp_path / "short.npz", x=np.zeros((8, 256), np.float32))
    assert "input 'labels' is missing" in error("--steps", "1", "--data", str(tmp_path / "short.npz"))
    np.savez(tmp_path / "odd.npz", x=np.zeros((8, 5), np.float32), labels=np.zeros((8, 16), np.float32))
    text = error("--steps", "1", "--data", str(tmp_path / "odd.npz"))
    assert "input 'x': expected float32[n,256] in batches of 4, found float32[8,5]" in text
    assert not (tmp_path / "s.npz").exists()


BATCHES = """
import itertools
import numpy as np

def batches():
    rng = np.random.default_rng(0)
    while True:
        x = rng.standard_normal((4, 256), np.float32)
        yield {"x": x, "labels": np.eye(16, dtype=np.float32)[rng.integers(0, 16, 4)]}

def two():
    return itertools.islice(batches(), 2)

def changed(**change):
    yield from two()
    yield next(batches()) | change

def infinite():
    return changed(x=np.full((4, 256), np.inf, np.float32))

def smaller():
    return changed(labels=np.zeros((3, 16), np.float32))

def integers():
    return changed(labels=np.zeros((4, 16), np.int64))

def fails():
    yield from two()
    raise OSError("disk is gone")
"""


@pytest.fixture(scope="module")
def functions(folder) -> Path:
    path = folder / "functions.py"
    path.write_text(BATCHES)
    return path


def test_a_resumed_run_is_the_uninterrupted_one(folder, planned, functions, tmp_path):
    """Weights, moments, learning rates and batches: as if it had not stopped."""
    fed = [
        "--data",
        f"{functions}:batches",
        "--learning-rate",
        "0.01",
        "--schedule",
        "cosine",
        "--warmup",
        "2",
    ]
    whole, parts = (
        ["-o", str(tmp_path / f"{name}.npz"), "--metrics", str(tmp_path / f"{name}.jsonl"), *fed]
        for name in ("whole", "parts")
    )
    assert train(folder, planned, *whole, "--steps", "5") == cli.GOOD
    assert train(folder, planned, *parts, "--steps", "2", "--schedule-steps", "5") == cli.GOOD
    assert train(folder, planned, *parts, "--steps", "3", "--resume", str(tmp_path / "parts.npz")) == cli.GOOD
    with np.load(tmp_path / "whole.npz") as one, np.load(tmp_path / "parts.npz") as other:
        assert set(one) == set(other)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    ones, others = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    for key in ("step", "loss", "learning_rate"):
        assert [line[key] for line in ones] == [line[key] for line in others]
    assert ones[2]["learning_rate"] == 0.01 > ones[4]["learning_rate"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("two", "functions.py:two: data ends early, after 2 batches; --repeat starts again"),
        ("fails", r"functions.py:\d+: OSError: disk is gone"),
        (
            "smaller",
            r"functions.py:smaller: batch 3: input 'labels': expected float32\[4,16\], found float32\[3,16\]",
        ),
        ("integers", r"functions.py:integers: batch 3: input 'labels': .* found int64\[4,16\]"),
        ("infinite", "step 3: the loss is nan; the first tensor that is not finite is 'x'"),
    ],
)
def test_what_stops_a_run_keeps_the_last_good_state(
    function, text, folder, planned, functions, tmp_path, capsys
):
    kept, good = tmp_path / "kept.npz", tmp_path / "good.npz"
    assert train(folder, planned, "--data", f"{functions}:two", "--steps", "2", "-o", str(good)) == cli.GOOD
    capsys.readouterr()
    more = ["--data", f"{functions}:{function}", "--steps", "5", "-o", str(kept)]
    assert train(folder, planned, *more) == cli.BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(f"{text}.*; the state after 2 steps is in {re.escape(str(kept))}$", line), line
    with np.load(kept) as one, np.load(good) as other:
        assert all(np.array_equal(one[name], other[name]) for name in other)


def test_a_state_is_not_replaced_by_one_without_a_step(folder, planned, functions, tmp_path, capsys):
    state = tmp_path / "state.npz"
    state.write_text("something dear")
    more = ["--data", f"{functions}:infinite", "--skip", "2", "--steps", "1", "-o", str(state)]
    assert train(folder, planned, *more) == cli.BAD_INPUT
    assert "step 1: the loss is nan" in (err := capsys.readouterr().err) and "no state is written" in err
    assert state.read_text() == "something dear"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_step(number, folder, planned, functions, tmp_path, capsys, monkeypatch):
    """Without the wait the step would have used up the state."""

    def interrupt(self, *arguments):
        os.kill(os.getpid(), number)
        return step(self, *arguments)

    step = CompiledStep.step
    monkeypatch.setattr(CompiledStep, "step", interrupt)
    state = tmp_path / "state.npz"
    more = ["--data", f"{functions}:batches", "--steps", "9", "-o", str(state)]
    assert train(folder, planned, *more) == cli.INTERRUPTED
    assert capsys.readouterr().err.endswith(f"interrupted; the state after 1 step is in {state}\n")
    with np.load(state) as arrays:
        assert arrays["step"] == 1


def test_a_learning_rate_may_be_a_function_of_finished_steps(folder, planned):
    compiled, batch = compiled_perceptron(folder / "mlp.onnx", planned), perceptron_batch()
    for rate in (schedules.linear(0.02, 4), optax.linear_schedule(0.02, 0.0, 4)):
        state, found = compiled.init(), []
        for _ in range(2):
            state, metrics = compiled.step(state, batch, rate)
            found.append(metrics["learning_rate"])
        assert found == pytest.approx([0.02, 0.015])
    same, _ = compiled.step(compiled.init(), batch, 0.02)
    same, _ = compiled.step(same, batch, 0.015)
    for name, value in compiled.state_dict(state).items():
        assert np.array_equal(value, compiled.state_dict(same)[name])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--schedule", "wave"], "--schedule 'wave': expected constant, linear, cosine"),
        (["--schedule", "cosine", "--warmup", "3"], "schedule: a warmup of 3 steps leaves none of 3"),
        (["--schedule-steps", "9"], "--schedule-steps: only with --schedule linear or cosine"),
        (["--final-learning-rate", "0"], "--final-learning-rate: only with --schedule linear or cosine"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--learning-rate", "inf"], "schedule: peak is inf"),
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--resume", "data.npz"], "data.npz: state 'x': the plan has no such state; it has a, b"),
        (["--resume", "partly.npz"], "partly.npz: state 'b': missing, expected float32[32,16]"),
        (["--resume", "narrow.npz"], "narrow.npz: parameter 'a': expected float32[256,32], found float32[256,3]"),
        (["--resume", "count.npz"], "count.npz: state 'step': expected the number of finished steps, found [1. 2.]"),
        (["--metrics", "text.txt", "--resume", "state.npz"], "text.txt: cannot be continued"),
    ],
)  # fmt: skip
def test_wrong_options_of_train_are_one_line(arguments, text, folder, planned, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled = compiled_perceptron(folder / "mlp.onnx", planned)
    state = compiled.state_dict(compiled.init()) | {"step": np.int64(1)}
    np.savez("state.npz", **state)
    np.savez("partly.npz", a=state["a"])
    np.savez("narrow.npz", **state | {"a": state["a"][:, :3]})
    np.savez("count.npz", **state | {"step": np.array([1.0, 2.0])})
    Path("text.txt").write_text("notes\n")
    np.savez("data.npz", x=np.zeros(1))
    assert train(folder, planned, "--steps", "3", "--repeat", *arguments, "-o", "new.npz") == cli.BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert text in line
    assert not Path("new.npz").exists() and Path("text.txt").read_text() == "notes\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--train"], "--train: give the loss by --loss"),
        (["--loss", "mse:y"], "--loss: only with --train"),
        (["--train", "--loss", "y"], "not a floating scalar"),
        (["--train", "--loss", "huber:y"], "loss 'huber'"),
        ([*TRAIN, "--optimizer", "lion"], "--optimizer 'lion': expected adamw, adam or sgd"),
        ([*TRAIN, "--momentum", "0.9"], "--momentum: only with --optimizer sgd"),
        ([*TRAIN, "--freeze", "nothing*"], "frozen 'nothing*': matches no parameter"),
    ],
)
def test_mistakes_in_planning_are_one_line(folder, tmp_path, capsys, arguments, text):
    model = str(folder / "mlp.onnx")
    target = str(tmp_path / "plan.onnx")
    assert cli.main(["plan", model, "--mesh", "data=2", "-o", target, *arguments]) == cli.BAD_INPUT
    assert text in capsys.readouterr().err


CROSS_ENTROPY = ("--loss", "cross-entropy:y")
WRONG_STEPS = {
    "a weight without gradient": (models.two_heads, {}, CROSS_ENTROPY, "gives no gradient to 'b': freeze what"),
    "no weight with gradient": (models.without_gradient, {}, ("--loss", "loss"), "gives no gradient to 'a'"),
    "labels of another type": (
        models.with_labels,
        {"type_": models.TensorProto.FLOAT},
        CROSS_ENTROPY,
        "the label input 'labels' is float32[4], expected int64[4]",
    ),
    "labels of another shape": (
        models.with_labels,
        {"shape": (3,)},
        CROSS_ENTROPY,
        "the label input 'labels' is int64[3], expected int64[4]",
    ),
    "labels that are no input": (
        models.two_heads,
        {},
        (*CROSS_ENTROPY, "--label", "a"),
        "the label 'a' is a tensor of the model, but no input",
    ),
    "no such output": (models.two_heads, {}, ("--loss", "mse:q"), "no output 'q'; it has y, z"),
    "a loss that is no scalar": (models.two_heads, {}, ("--loss", "y"), "'y' is float32[4,6], not a floating scalar"),
    "state of another shape": (
        models.given_step,
        {"shape": (8, 5)},
        ("--state", "p.{} -> new.{}"),
        "state 'p.a' is float32[8,5], but its new value 'new.a' is float32[8,6]",
    ),
    "state without a pair": (
        models.given_step,
        {},
        ("--state", "q.{} -> new.{}"),
        "state 'q.{} -> new.{}': matches no input with its output; the inputs are x, p.a",
    ),
    "state that is no pattern": (models.given_step, {}, ("--state", "p.a"), "expected a pattern such as"),
    "a batch that the mesh does not divide": (
        models.two_heads,
        {},
        (*CROSS_ENTROPY, "--freeze", "b", "--shape", "x=3x8", "--pin", "x=S0"),
        "--pin x=S0: S0 on axis 'data': 2 does not divide 3",
    ),
    "a batch that is not for every device": (
        models.two_heads,
        {},
        (*CROSS_ENTROPY, "--freeze", "b", "--shape", "x=3x8", "--scheme", "data-parallel"),
        "data-parallel: the 3 examples of input 'x' cannot be split over 2 devices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_wrong_training_steps_are_one_line(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, options, arguments, text = WRONG_STEPS[case]
    make(Path("m.onnx"), **options)
    assert cli.main(["plan", "m.onnx", "--train", "--mesh", "data=2", *arguments]) == cli.BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("error: ") and text in line
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
