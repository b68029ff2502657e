"""The rule discipline: merges that careless rules or a careless engine would make do not happen here.

Each case is a known counterexample: algebra on local shapes, a sharded result of replicated operands, operators without
operands, random operators without identity; and rules that contradict the shipped ones, which must be blamed by name.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import parallegg
import pytest
from onnx import TensorProto, helper
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare
from parallegg.mesh import Mesh, Partial, Replicate, Shard
from parallegg.program import UserError
from parallegg.rewrite.saturation import saturate
from parallegg.rewrite.space import Kind, RuleConflict
from parallegg.rewrite.worker import WorkerFailed
from parallegg.rules import load_rules
from parallegg.runtime.lowering import evaluate

from .simulate import compute, join, run, split
from .zoo import CASES, case, f

FOLDER = Path(__file__).parent / "rules"
DATA = Mesh.parse("data=2")


def strategies(kind: Kind, book=None):
    """(result placement, operand placements, operators) of every strategy on data=2."""
    types = {*kind.operands, kind.result}
    space = saturate([kind], types, DATA, book or load_rules())
    return [
        (
            space.layouts[kind.result][s.out][0],
            tuple(space.layouts[t][r][0] for t, r in zip(kind.operands, s.reads, strict=True)),
            [step.head.constructor for step in s.steps],
        )
        for s in space.strategies[kind]
    ]


def model(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple],
    outputs: dict[str, tuple],
    opset: int = 17,
) -> Path:
    """A float model in a file."""
    info = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.items()]
        for ports in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "m", info[0], info[1])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def sums(path: Path, rows: int) -> Path:
    """Per-sample and total sums of x [rows, 4]."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "one"], ["u"], keepdims=1),
        helper.make_node("ReduceSum", ["x", "both"], ["t"], keepdims=1),
    ]
    model(path, nodes, {"x": (rows, 4)}, {"u": (rows, 1), "t": (1, 1)})
    proto = onnx.load(path)
    proto.graph.initializer.extend(
        [
            helper.make_tensor("one", TensorProto.INT64, [1], [1]),
            helper.make_tensor("both", TensorProto.INT64, [2], [0, 1]),
        ]
    )
    onnx.save(proto, path)
    return path


def test_algebra_does_not_fire_on_local_shapes(tmp_path: Path):
    """Summing over {0, 1} is summing over 1 where dimension 0 has size 1; on two devices [2, 4] has such shards."""
    book = load_rules([FOLDER / "accepted" / "reduce.egg"])
    graph = parallegg.load(sums(tmp_path / "m.onnx", rows=2))
    prepared = prepare(graph, DATA, load_hardware("cpu"), book=book)
    assert [len(part.ways) for part in prepared.parts] == [1, 1]
    total = case("ReduceSum", f(2, 4), axes=(0, 1), keepdims=1).kind
    per_sample = case("ReduceSum", f(2, 4), axes=(1,), keepdims=1).kind
    assert (Shard(0), (Shard(1),), ["Reduce"]) not in strategies(per_sample, book)
    assert (Partial(), (Shard(0),), ["Reduce"]) in strategies(total, book)


def test_algebra_fires_on_logical_shapes_and_its_placements_follow(tmp_path: Path):
    book = load_rules([FOLDER / "accepted" / "reduce.egg"])
    graph = parallegg.load(sums(tmp_path / "m.onnx", rows=1))
    prepared = prepare(graph, DATA, load_hardware("cpu"), book=book)
    heads = [way.kind.head for part in prepared.parts for way in part.ways]
    assert {head.attributes[1] for head in heads if head.constructor == "Reduce"} == {(1,), (0, 1)}
    planned = parallegg.plan(graph, DATA, rules=[FOLDER / "accepted" / "reduce.egg"])
    assert parallegg.verify(graph, planned.plan).verdict == "tested"


def test_replicated_operands_give_no_sharded_result():
    """Expand [8] of a replicated scalar must not be Expand [8] sharded in two: its local size would be 4."""
    for size in (8, 4):
        found = strategies(case("Expand", f(1, 1), shape=(size, 1)).kind)
        assert [out for out, reads, _ in found if reads == (Replicate(),)] == [Replicate()]


@pytest.mark.parametrize("case_", CASES, ids=lambda c: c.name)
def test_only_replicated_results_read_only_replicated_operands(case_):
    for out, reads, constructors in strategies(case_.kind):
        if all(placement == Replicate() for placement in reads):
            assert out == Replicate() or "LocalSlice" in constructors


def test_an_operator_without_operands_is_refused_by_name(tmp_path: Path):
    """A bare zero would be every placement of itself at once."""
    rules = tmp_path / "zero.egg"
    rules.write_text(
        "(constructor Zeros (Ints) Tensor)\n"
        '(rule ((= y (Binary "Sub" a a)) (= s (shape a))) ((union y (Zeros s))) :ruleset algebra :name "sub-self")'
    )
    nodes = [helper.make_node("Sub", ["x", "x"], ["y"])]
    path = model(tmp_path / "m.onnx", nodes, {"x": (4, 2)}, {"y": (4, 2)})
    with pytest.raises(UserError, match="Zeros"):
        parallegg.plan(path, "data=2", rules=[rules])


def test_two_dropouts_of_one_input_are_two_values(tmp_path: Path):
    """One term cannot be both: each site has a key of its own, and both are one kind of operator."""
    nodes = [
        helper.make_node(
            "Constant", [], ["on"], value=helper.make_tensor("on", TensorProto.BOOL, [], [True])
        ),
        helper.make_node(
            "Constant", [], ["half"], value=helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])
        ),
        *(helper.make_node("Dropout", ["x", "half", "on"], [name], seed=7) for name in ("a", "b")),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    graph = parallegg.load(model(tmp_path / "m.onnx", nodes, {"x": (64, 2)}, {"y": (64, 2)}))
    parts = prepare(graph, DATA, load_hardware("cpu"), book=load_rules()).parts
    masks = [part.ways[0] for part in parts if "RandomMask" in str(part.ways[0].kind.head)]
    assert len(masks) == 2 and len({way.kind for way in masks}) == 1
    (y,) = evaluate(graph.nodes, graph.constants | {"x": np.ones((64, 2), np.float32)}, ["y"]).values()
    assert {-2.0, 0.0, 2.0} == set(y.reshape(-1).tolist())


WRONG = {  # left side, right side
    "expand-forgets-size": ("(Shard d) (Expand s x)", "(Expand s (At ax (Replicate) x))"),
    "replicated-is-partial": ("(Partial) (Unary f x)", "(Unary f (At ax (Replicate) x))"),
    "sum-without-reduce": ('(Replicate) (Reduce "Sum" a k x)', '(Reduce "Sum" a k (At ax (Partial) x))'),
    "rows-are-columns": ("(Shard 1) (MatMul a b)", "(MatMul (At ax (Shard 0) a) (At ax (Replicate) b))"),
    "product-of-partials": (
        '(Shard d) (Binary "Mul" a b)',
        '(Binary "Mul" (At ax (Shard d) a) (At ax (Partial) b))',
    ),
    "gather-forgets-mask": (
        "(Partial) (Gather m c x i)",
        "(Gather m c (At ax (Replicate) x) (At ax (Replicate) i))",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_contradicts_the_others_is_named(name: str, tmp_path: Path):
    rules = tmp_path / "wrong.egg"
    left, right = WRONG[name]
    rules.write_text(f'; wrong\n(rewrite (At ax {left}) {right} :ruleset parallel :name "{name}")')
    kinds = [
        c.kind
        for c in CASES
        if c.name in ("Relu", "Mul", "MatMul", "ReduceSum", "Expand", "Gather", "Softmax")
    ]
    types = {t for kind in kinds for t in (*kind.operands, kind.result)}
    with pytest.raises(RuleConflict) as error:
        saturate(kinds, types, DATA, load_rules([rules]))
    assert name in str(error.value)
    assert f"{rules}:2" in str(error.value)
    assert "unary-shard" not in str(error.value)


ENDLESS = {
    "algebra": '(rewrite (Unary "Relu" x) (Unary "Relu" (Shift 0.0 x)) :ruleset algebra :name "endless")',
    "analysis": "(relation tally (i64))\n(tally 0)\n"
    '(rule ((tally n1)) ((tally (+ n1 1))) :ruleset analysis :name "endless")',
    "both": "(relation couple (i64 i64))\n(couple 0 1)\n(couple 1 0)\n(rule ((couple a1 b1) (couple a2 b2))"
    ' ((couple (+ a1 a2) (+ b1 b2))) :ruleset algebra :name "endless")',
}


@pytest.mark.parametrize("ruleset", ENDLESS)
def test_rules_without_end_are_stopped(ruleset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the time limit between two rounds, with a plan from what there is; within a round by ending the worker."""
    monkeypatch.setattr("parallegg.rewrite.worker.GRACE_SECONDS", 2.0)
    rules = tmp_path / "endless.egg"
    rules.write_text(ENDLESS[ruleset])
    path = model(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": (4, 2)}, {"y": (4, 2)})
    options = parallegg.Options(saturation_seconds=2.0)
    start = time.monotonic()
    try:
        planned = parallegg.plan(path, DATA, rules=[rules], options=options)
        assert planned.report["stopped_by"] == "time" and not planned.report["saturated"]
    except WorkerFailed as error:
        assert "saturation was stopped after 2 s" in str(error)
    assert time.monotonic() - start < 30


def test_a_rule_that_splits_an_operand_unevenly_is_named(tmp_path: Path):
    """Whether an operand's dimension can be split is for the rule to ask: here a scale of one element."""
    rules = tmp_path / "uneven.egg"
    rules.write_text(
        "(rewrite (At ax (Shard 1) (LayerNormalization 1 eps x w))\n"
        "         (LayerNormalization 1 eps (At ax (Shard 1) x) (At ax (Shard 0) w))\n"
        '         :ruleset parallel :name "uneven")'
    )
    kind = case("LayerNormalization", f(6, 12), f(1), axis=1, epsilon=1e-5).kind
    with pytest.raises(RuleConflict, match=r"uneven .*float64.1. is placed as S0"):
        saturate([kind], {*kind.operands}, DATA, load_rules([rules]))


def test_a_right_rule_of_a_user_is_used(tmp_path: Path):
    book = load_rules([FOLDER / "accepted" / "cumsum.egg"])
    kind = case("CumSum", f(6, 12), axis=0, exclusive=0, reverse=0).kind
    assert (Shard(1), (Shard(1),), ["Opaque1"]) in strategies(kind, book)
    assert (Shard(0), (Shard(0),), ["Opaque1"]) not in strategies(kind, book)


def test_joint_search_uses_algebra_and_keeps_the_bound(tmp_path: Path):
    """x (w1 w2) is cheaper than (x w1) w2 here; the bound is of the joint search."""
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["h"]), helper.make_node("MatMul", ["h", "w2"], ["y"])]
    path = model(tmp_path / "m.onnx", nodes, {"x": (64, 64), "w1": (64, 256), "w2": (256, 4)}, {"y": (64, 4)})
    plain = parallegg.plan(path, "data=2,model=2")
    joint = parallegg.plan(path, "data=2,model=2", rules=[FOLDER / "accepted" / "associate.egg"])
    assert joint.report["cost_s"] < plain.report["cost_s"]
    assert joint.report["gap"] <= 1e-3
    assert "matmul-associates" in joint.plan.metadata["rules"]
    assert parallegg.verify(path, joint.plan).verdict == "tested"


def test_strategies_with_a_users_algebra_still_mean_the_same():
    book = load_rules([FOLDER / "accepted" / "reduce.egg"])
    rng = np.random.default_rng(3)
    total = case("ReduceSum", f(2, 4), axes=(0, 1), keepdims=1)
    space = saturate([total.kind], {f(2, 4), f(1, 1)}, DATA, book)
    value = rng.uniform(-1, 1, (2, 4))
    for strategy in space.strategies[total.kind]:
        blocks = split(value, space.layouts[f(2, 4)][strategy.reads[0]], DATA, rng)
        result = join(run(strategy.steps, [blocks], DATA), space.layouts[f(1, 1)][strategy.out], DATA)
        np.testing.assert_allclose(result, compute("ReduceSum", {"axes": (0, 1), "keepdims": 1}, [value])[0])
