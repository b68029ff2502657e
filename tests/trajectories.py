"""Training steps under a plan against one device, in float64: loss, gradients, state, on every replica."""

from __future__ import annotations

import re

import numpy as np
import parallegg
import pytest
from parallegg.mesh import parse_layout
from parallegg.rewrite.graph import tensor_source
from parallegg.runtime.lowering import (
    QUICK,
    as_float64,
    assemble,
    flat_program,
    require_equal_replicas,
    widest_array,
    widest_node,
)
from parallegg.runtime.training import CompiledStep

RTOL = 1e-10


def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: widest_array(value) for name, value in batch.items()}


def steps_of_one_device(step: parallegg.TrainingStep, source, fed):
    """The loss, the gradients and the state after every step, by the graph in float64."""
    nodes = tuple(map(widest_node, step.graph.nodes))
    tensors = dict.fromkeys((*step.graph.outputs, *step.gradients.values()))
    alone = flat_program(nodes, tensors, compiler_options=QUICK)
    leaves = {name: widest_array(source(name)) for name in (*step.graph.parameters, *step.graph.constants)}
    for name, kind in step.initial.items():
        if kind == "zeros":
            leaves[name] = np.zeros(step.graph.types[name].shape)
    for number, batch in enumerate(fed):
        feeds = {"learning_rate": np.float64(0.01), "step": np.int64(number)}
        found = alone(leaves | feeds | batch)
        state = {old: found[new] for old, new in step.state}
        leaves |= state
        yield float(found[step.loss]), {name: found[name] for name in step.gradients.values()}, state


def check_three_steps(step: parallegg.TrainingStep, plan: parallegg.Plan, fed) -> None:
    """Loss and state, on every replica, are those of one device; every weight that is trained has moved."""
    plan, source = as_float64(plan), tensor_source(step.graph)
    compiled = CompiledStep(plan, lambda name: widest_array(source(name)), compiler_options=QUICK)
    state = compiled.init()
    for batch, (loss, gradients, expected) in zip(fed, steps_of_one_device(step, source, fed), strict=True):
        if state[compiled.count] == 0:
            check_gradients(compiled, state, batch, gradients)
        state, metrics = compiled.step(state, batch, learning_rate=0.01)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-10)
        for name, _ in step.state:
            require_equal_replicas(name, state[name])
        for name, value in compiled.state_dict(state).items():
            if name != compiled.count:
                assert close(value, expected[name]), (state[compiled.count], name)
    assert state[compiled.count] == len(fed) == 3
    moved = [name for name in step.initial if step.initial[name] == "parameter"]
    for name in moved:
        assert state[name].sharding.mesh.size == plan.mesh.size
        assert np.abs(expected[name] - source(name)).max() > 0


def check_gradients(compiled: CompiledStep, state, batch, expected: dict[str, np.ndarray]) -> None:
    """The gradients before the optimizer, in every layout in which the plan has them."""
    plan, executable = compiled.plan, compiled.executable
    local = {
        name: found[1]
        for name in plan.types
        if (found := re.fullmatch(r"(.*)@[^@>/~]+", name)) and found[1] in expected
    }
    assert set(local.values()) == set(expected)
    scalars = {compiled.learning_rate: np.float64(0.01), compiled.count: np.int64(0)}
    feeds = compiled.state_dict(state) | scalars | batch
    fed = {port.name: feeds[port.name] for port in plan.inputs if port.kind == "input"}
    blocks = executable.blocks(executable.place(fed, compiled.source), list(local))
    for name, gradient in local.items():
        value, replicas_agree = assemble(blocks[name], parse_layout(name.rpartition("@")[2]))
        assert replicas_agree, name
        assert close(value, expected[gradient]), name


def close(value: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(value - expected).max() <= RTOL * max(np.abs(expected).max(), 1e-30))
