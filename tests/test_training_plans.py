"""Plans of training steps: the shared torch-made steps equal torch's stored results, and send what is predicted."""

from __future__ import annotations

import numpy as np
import parallegg
import pytest
from parallegg.extract.emit import collective_table
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import make_plan, prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.rewrite.graph import tensor_source
from parallegg.rewrite.optimizers import SGD
from parallegg.rewrite.training import as_training_step, training_step
from parallegg.rules import load_rules
from parallegg.runtime.lowering import QUICK, lower
from parallegg.runtime.stablehlo import collectives
from parallegg.verification.numbers import Original, compare

from .models import CNN_TRAIN_LOSS, DATA

STEPS = [
    pytest.param(name, mesh, id=f"{name} {mesh}", marks=() if name in ("mlp", "cnn") else pytest.mark.sweep)
    for name in ("mlp", "cnn", "gpt2", "llama")
    for mesh in ("data=2,model=2", "data=2,model=4")
]


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_a_given_training_step_equals_torchs(name: str, mesh: str):
    graph = parallegg.load(DATA / f"{name}.trainstep.onnx")
    stored = np.load(DATA / f"{name}.trainstep.npz")
    step = as_training_step(graph, "p.{} -> new.{}")
    roles = step.roles
    plan = make_plan(step.graph, Mesh.parse(mesh), load_hardware("cpu"), roles=roles).plan
    executable = lower(plan, compiler_options=QUICK)
    predicted = {(r["kind"], r["axis"]): (r["count"], r["payload_bytes"]) for r in collective_table(plan)}
    assert collectives(executable.stablehlo(), plan.mesh) == predicted
    inputs = {name: stored[f"in:{name}"] for name in step.graph.inputs}
    found = executable.run(executable.place(inputs, tensor_source(step.graph)), check_replicas=True)
    assert {"loss"} < set(found)
    for output, value in found.items():
        expected = stored[f"out:{output}"]
        scale = float(np.max(np.abs(expected), initial=1e-30))
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5 * scale, err_msg=output)
    layouts = {port.name: port.layout for port in (*plan.inputs, *plan.outputs)}
    assert all(layouts[old] == layouts[new] for old, new in step.state)


@pytest.mark.parametrize("mesh", ["data=2,model=2", pytest.param("data=2,model=4", marks=pytest.mark.sweep)])
def test_a_step_of_a_net_in_training_mode(mesh: str):
    """Batch statistics, running averages and a Dropout: the cheapest plan, and one that splits the batch."""
    step = training_step(CNN_TRAIN_LOSS.graph(), loss="loss", optimizer=SGD())
    grid, roles = Mesh.parse(mesh), step.roles
    planned = make_plan(step.graph, grid, load_hardware("cpu"), roles=roles)
    assert planned.report["saturated"] and float(str(planned.report["gap"])) <= 1e-2
    model = prepare(step.graph, grid, load_hardware("cpu"), book=load_rules(), roles=roles)
    other = random_plan(model, random_choice(model.problem, np.random.default_rng(0)))
    assert any(type_.shape[0] == 1 for name, type_ in other.types.items() if "/centred@" in name)
    original = Original(step.graph, tensor_source(step.graph))
    for plan in (planned.plan, other):
        predicted = {(r["kind"], r["axis"]): (r["count"], r["payload_bytes"]) for r in collective_table(plan)}
        assert collectives(lower(plan, compiler_options=QUICK).stablehlo(), grid) == predicted
        assert compare(step.graph, plan, original=original).verdict == "tested"


def test_a_given_training_step_is_verified():
    graph = parallegg.load(DATA / "mlp.trainstep.onnx")
    step = as_training_step(graph, "p.{} -> new.{}")
    roles = step.roles
    plan = make_plan(step.graph, Mesh.parse("data=4,model=2"), load_hardware("h100"), roles=roles).plan
    assert compare(step.graph, plan).verdict == "tested"
