"""Plans of real models: the cheapest and random legal ones, executed on eight devices.

For each model and mesh: the printed gap, bytes predicted and counted in the lowered StableHLO, outputs equal to ONNX
Runtime's, and the float64 comparison with random weights. Random plans are drawn from the saturated e-graph, not near
the cheapest; together they must execute every shipped parallel rule and every collective. `make test` runs a part,
`make test-all` everything.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import parallegg
import pytest
from onnx import numpy_helper
from parallegg import planfile
from parallegg.extract.build import Model
from parallegg.extract.emit import collective_table
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.planfile import Plan
from parallegg.rewrite.graph import tensor_source
from parallegg.rules import load_rules
from parallegg.runtime.lowering import QUICK, Executable, as_float64, lower, widest_array
from parallegg.runtime.stablehlo import collectives
from parallegg.verification.numbers import Original, compare

from . import onnx_export
from .models import CNN_TRAIN_LOSS, MESHES, OTHERS, SAMPLES, Sample, zoo_graph

RANDOM_PLANS = 20
COLLECTIVES = {
    "AllReduce sum", "AllReduce mean", "AllReduce max", "AllReduce min", "AllGather", "ReduceScatter", "AllToAll",
    "LocalSlice", "Include", "LocalIndices", "GatherOrZero", "RandomKey", "RandomMask",
}  # fmt: skip
SQUARE = "data=2,model=2"
PAIRS = [
    *((sample, mesh) for sample in SAMPLES for mesh in MESHES if mesh != SQUARE),
    *((sample, SQUARE) for sample in OTHERS),
]
# Each model once and each mesh at least once; the rest is the sweep's.
FEW = [(SAMPLES[i], list(MESHES)[j]) for i, j in ((0, 0), (1, 3), (2, 1), (3, 2), (4, 0), (5, 1), (6, 0))]


def pairs(some: Sequence[tuple[Sample, str]]) -> list:
    return [
        pytest.param(
            sample,
            mesh,
            id=f"{sample.name} {mesh}",
            marks=() if (sample, mesh) in some else pytest.mark.sweep,
        )
        for sample, mesh in PAIRS
    ]


@functools.lru_cache(maxsize=1)
def prepared(sample: Sample, mesh: str) -> Model:
    return prepare(sample.graph(), MESHES[mesh], load_hardware("cpu"), book=load_rules())


@functools.lru_cache(maxsize=1)
def original(sample: Sample) -> Original:
    graph = sample.graph()
    return Original(graph, tensor_source(graph))


def predicted(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    return {(r["kind"], r["axis"]): (r["count"], r["payload_bytes"]) for r in collective_table(plan)}


@functools.cache
def reference(sample: Sample) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Random inputs and ONNX Runtime's outputs of the original file."""
    graph = sample.graph()
    inputs = onnx_export.random_inputs(graph, seed=0, high=sample.high)
    return inputs, onnx_export.run(graph, inputs, tensor_source(graph))


@pytest.mark.parametrize(("sample", "mesh"), pairs(FEW))
def test_the_cheapest_plan(sample: Sample, mesh: str):
    graph = sample.graph()
    planned = parallegg.plan(graph, MESHES[mesh])
    assert planned.report["saturated"]
    assert planned.report["bound_s"] <= planned.report["cost_s"] * (1 + 1e-9)
    assert planned.report["gap"] <= (1e-2 if len(MESHES[mesh]) > 2 else 1e-3)
    executable = lower(planned.plan, compiler_options=QUICK)
    assert collectives(executable.stablehlo(), MESHES[mesh]) == predicted(planned.plan)
    inputs, expected = reference(sample)
    equal(
        executable.run(executable.place(inputs, tensor_source(graph)), check_replicas=True), sample, expected
    )
    assert compare(graph, planned.plan, original=original(sample)).verdict == "tested"


def test_batch_statistics_of_a_plan_are_onnxruntimes(tmp_path: Path):
    """The convolutional net in training mode, with a Dropout that drops nothing: random drops are nobody else's."""
    model = onnx.load(CNN_TRAIN_LOSS.path)
    (drop,) = (node for node in model.graph.node if node.op_type == "Dropout")
    (ratio,) = (node for node in model.graph.node if node.output[0] == drop.input[1])
    ratio.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0)))
    onnx.save(model, tmp_path / "m.onnx")
    sample = replace(CNN_TRAIN_LOSS, path=tmp_path / "m.onnx")
    inputs = onnx_export.random_inputs(sample.graph(), seed=0, high=sample.high)
    expected = onnx_export.session(str(sample.path)).run(None, inputs)
    prepared = prepare(sample.graph(), Mesh.parse(SQUARE), load_hardware("cpu"), book=load_rules())
    for seed in range(4):  # the cheapest plan does not split so small a net
        plan = random_plan(prepared, random_choice(prepared.problem, np.random.default_rng(seed)))
        program = lower(plan, compiler_options=QUICK)
        arrays = program.place(inputs, tensor_source(sample.graph()))
        equal(program.run(arrays, check_replicas=True), sample, expected)


@pytest.mark.sweep
@pytest.mark.parametrize(("sample", "mesh"), pairs(PAIRS))
def test_random_plans(sample: Sample, mesh: str):
    check_random_plans(
        prepared(sample, mesh), original(sample), RANDOM_PLANS, Counter(), seed=0, sample=sample
    )


def check_random_plans(
    model: Model, original: Original, count: int, used: Counter[str], seed: int, sample: Sample | None = None
) -> None:
    """Draw plans and chains of collectives, preferring rules not used yet; each plan sends what is predicted, survives
    its file, and verifies."""
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        choice = random_choice(model.problem, rng, _prefer(model, used))
        other = {type_: conversions.repriced(rng) for type_, conversions in model.conversions.items()}
        plan = planfile.from_bytes(planfile.to_bytes(random_plan(replace(model, conversions=other), choice)))
        assert collectives(lower(plan).stablehlo(), model.mesh) == predicted(plan)
        program = lower(as_float64(plan), compiler_options=QUICK)
        verdict = compare(model.graph, plan, original=original, seed=number, program=program)
        assert verdict.verdict == "tested", (number, verdict)
        if sample:
            equals_onnxruntime(program, sample)
        used.update(plan.metadata["rules"])
        used.update(_steps(plan))


def equals_onnxruntime(program: Executable, sample: Sample) -> None:
    """The outputs for one set of inputs and the model's own weights."""
    inputs, expected = reference(sample)
    weights = tensor_source(sample.graph())
    fed = {name: widest_array(value) for name, value in inputs.items()}
    found = program.run(program.place(fed, lambda name: widest_array(weights(name))), check_replicas=True)
    equal(found, sample, expected)


def equal(found: dict[str, np.ndarray], sample: Sample, expected: list[np.ndarray]) -> None:
    """Outputs within float32's tolerance of ONNX Runtime's."""
    for name, value in zip(sample.graph().outputs, expected, strict=True):
        scale = float(np.max(np.abs(value), where=np.isfinite(value), initial=1e-30))
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def _prefer(model: Model, used: Counter[str]) -> list[np.ndarray]:
    """Weights of every operator's strategies: those that rest on a rule not executed yet are drawn first."""
    weights = [np.ones(len(operator.cost)) for operator in model.problem.operators]
    for part in model.parts:
        strategies = [s for way in part.ways for s in model.offers[way.kind].strategies]
        fresh = [100.0 if any(rule not in used for rule in s.rules) else 1.0 for s in strategies]
        weights[model.maker[part.tensor]][: len(fresh)] = fresh
    return weights


def _steps(plan: Plan) -> list[str]:
    own = [node for node in plan.nodes if node.is_collective]
    return [
        f"{node.op} {node.attributes['reduction']}" if node.op == "AllReduce" else node.op for node in own
    ]


@pytest.mark.parametrize("meshes", [("a=2,b=3", "a=3,b=2")])
def test_random_plans_execute_every_rule_and_collective(meshes: tuple[str, ...], record_property):
    graph, used = zoo_graph(), Counter()
    expected = set(load_rules().named("parallel")) | COLLECTIVES
    reference = Original(graph, None)
    for seed, mesh in enumerate(meshes):
        model = prepare(graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules())
        check_random_plans(model, reference, 8, used, seed)
    record_property("table", coverage_table(expected, used))
    assert not expected - set(used)


def coverage_table(expected: set[str], used: Counter[str]) -> str:
    width = max(map(len, expected))
    rows = [f"  {name:{width}}  {used[name] or 'UNUSED'}\n" for name in sorted(expected)]
    return "\nexecuted by random plans (rule or collective: plans or steps)\n" + "".join(rows)


def test_the_report_is_json():
    planned = parallegg.plan(SAMPLES[0].graph(), "data=2,model=2")
    fields = json.loads(json.dumps(planned.report))
    promised = "cost_s bound_s gap saturated stopped_by search_s memory_bytes enodes eclasses collectives"
    assert set(promised.split()) <= set(fields)
    assert all(
        set(row) == {"kind", "axis", "count", "bytes", "payload_bytes"} for row in fields["collectives"]
    )
