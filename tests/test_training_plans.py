"""Plans of training steps: the shared torch-made steps equal torch's stored results, and send what is predicted."""

from __future__ import annotations

import numpy as np
import parallegg
import pytest
from parallegg.extract.emit import collective_table
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import make_plan
from parallegg.mesh import Mesh
from parallegg.rewrite.graph import Roles, tensor_source
from parallegg.rewrite.training import as_training_step
from parallegg.runtime.lowering import QUICK, lower
from parallegg.runtime.stablehlo import collectives
from parallegg.verification.numbers import compare

from .models import DATA

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
    roles = Roles(step.phases, step.state)
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


def test_a_given_training_step_is_verified():
    graph = parallegg.load(DATA / "mlp.trainstep.onnx")
    step = as_training_step(graph, "p.{} -> new.{}")
    roles = Roles(step.phases, step.state)
    plan = make_plan(step.graph, Mesh.parse("data=4,model=2"), load_hardware("h100"), roles=roles).plan
    assert compare(step.graph, plan).verdict == "tested"
