"""The numeric comparison: agreement, mutated plans with the tensor where they go wrong, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallegg.mesh import Mesh, parse_layout
from parallegg.planfile import Plan, Port
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.graph import Graph
from parallegg.rewrite.operators import infer
from parallegg.verification.numbers import Original, Uses, compare

MESH = Mesh.parse("data=2,model=4")


def graph_of(leaves, nodes, outputs, parameters=(), constants=()):
    """`leaves`: type by name of inputs and parameters; `nodes`: (output, op, inputs, attributes)."""
    constants = dict(constants)
    types = {name: TensorType(tuple(shape), dtype) for name, (dtype, *shape) in leaves.items()}
    types |= {name: TensorType(value.shape, str(value.dtype)) for name, value in constants.items()}
    built = []
    for output, op, inputs, attributes in nodes:
        built.append(Node(f"make {output}", op, inputs, (output,), attributes))
        (types[output],) = infer(op, attributes, tuple(types[name] for name in inputs))
    inputs = tuple(name for name in leaves if name not in parameters)
    return Graph("test", tuple(built), inputs, tuple(parameters), constants, tuple(outputs), types)


SUM = {"axes": (1,), "keepdims": 0}

EMBEDDING = graph_of(
    {"ids": ("int64", 4, 6), "table": ("float32", 12, 8), "w": ("float32", 8, 8)},
    [
        ("e", "Gather", ("table", "ids"), {"axis": 0}),
        ("h", "MatMul", ("e", "w"), {}),
        ("r", "Relu", ("h",), {}),
        ("y", "ReduceSum", ("r",), SUM),
    ],
    ["y"],
    parameters=("table", "w"),
)

STEPS = [  # output, operator, inputs, attributes, local shape; batch over data, table rows and w columns over model
    ("i", "LocalIndices", ("ids@S0,R",), {"axis": "model", "rows": 12, "mode": "wrap"}, "int64", (2, 6)),
    ("e@S0,P", "GatherOrZero", ("table@R,S0", "i"), {"axis": 0}, "float32", (2, 6, 8)),
    ("e@S0,R", "AllReduce", ("e@S0,P",), {"axis": "model", "reduction": "sum"}, "float32", (2, 6, 8)),
    ("h@S0,S2", "MatMul", ("e@S0,R", "w@R,S1"), {}, "float32", (2, 6, 2)),
    ("r@S0,S2", "Relu", ("h@S0,S2",), {}, "float32", (2, 6, 2)),
    ("y@S0,S1", "ReduceSum", ("r@S0,S2",), SUM, "float32", (2, 2)),
    ("y@S0,S1>y@S0,R", "Relu", ("y@S0,S1",), {}, "float32", (2, 2)),  # a copy on its way
    ("y@S0,R", "AllGather", ("y@S0,S1>y@S0,R",), {"axis": "model", "dim": 1}, "float32", (2, 8)),
]
OWN = {"LocalIndices", "GatherOrZero", "AllReduce", "AllGather"}


def port(name, kind, layout):
    return Port(name, kind, EMBEDDING.types[name], parse_layout(layout), f"{name}@{layout}")


def plan_of(steps):
    inputs = port("ids", "input", "S0,R"), port("table", "parameter", "R,S0"), port("w", "parameter", "R,S1")
    types = {p.local: TensorType(MESH.local_shape(p.type.shape, p.layout), p.type.dtype) for p in inputs}
    types |= {step[0]: TensorType(step[5], step[4]) for step in steps}
    nodes = [
        Node(f"make {output}", op, reads, (output,), attributes, "parallegg" if op in OWN else "")
        for output, op, reads, attributes, _, _ in steps
    ]
    return Plan(MESH, inputs, (port("y", "output", "S0,R"),), tuple(nodes), types)


def mutated(output, **changes):
    plan = plan_of(STEPS)
    return replace(
        plan, nodes=tuple(replace(n, **changes) if n.outputs == (output,) else n for n in plan.nodes)
    )


def test_a_correct_plan_is_tested_and_the_verdict_depends_on_the_seed_alone():
    found = compare(EMBEDDING, plan_of(STEPS), seed=3)
    assert (found.verdict, found.first_divergence, found.tensors_checked) == ("tested", None, 1)
    assert found == compare(EMBEDDING, plan_of(STEPS), seed=3)


@pytest.mark.parametrize(
    "output, changes",
    [
        ("e@S0,R", {"attributes": {"axis": "model", "reduction": "max"}}),
        ("e@S0,R", {"attributes": {"axis": "data", "reduction": "sum"}}),
        ("h@S0,S2", {"inputs": ("e@S0,P", "w@R,S1")}),
        ("y@S0,S1", {"op": "ReduceMean"}),
        ("y@S0,S1>y@S0,R", {"op": "Neg"}),
        ("y@S0,R", {"op": "Tile", "domain": "", "attributes": {"repeats": (1, 4)}}),
    ],
    ids=["reduction", "axis", "no all-reduce", "mean", "copy", "no all-gather"],
)
def test_a_wrong_plan_is_refuted_where_it_goes_wrong(output, changes):
    found = compare(EMBEDDING, mutated(output, **changes))
    assert (found.verdict, found.first_divergence) == ("refuted", output), found.reason


def test_a_plan_that_does_not_run_or_lacks_an_output_is_refuted():
    broken = mutated("r@S0,S2", op="NoSuchOperator")
    assert "the plan does not run" in compare(EMBEDDING, broken).reason
    plan = plan_of(STEPS)
    renamed = replace(plan, outputs=(replace(plan.outputs[0], name="z"),))
    found = compare(EMBEDDING, renamed)
    assert (found.verdict, found.reason) == ("refuted", "output 'y': the plan has no such output")


def replicated(graph):
    """The graph as a plan in which every device does everything."""
    names = {name: f"{name}@R,R" for name in graph.types}
    kinds = dict.fromkeys(graph.inputs, "input") | dict.fromkeys(graph.parameters, "parameter")
    kinds |= dict.fromkeys(graph.constants, "constant")

    def whole(name, kind):
        return Port(name, kind, graph.types[name], MESH.replicated(), names[name])

    nodes = (
        replace(n, inputs=tuple(map(names.get, n.inputs)), outputs=tuple(map(names.get, n.outputs)))
        for n in graph.nodes
    )
    inputs = tuple(whole(name, kind) for name, kind in kinds.items())
    outputs = tuple(whole(name, "output") for name in graph.outputs)
    types = {names[name]: type for name, type in graph.types.items()}
    return Plan(MESH, inputs, outputs, tuple(nodes), types, graph.constants)


def verdict(graph):
    return compare(graph, replicated(graph))


def test_an_output_that_does_not_react_is_unknown():
    graph = graph_of(
        {"x": ("float32", 4)},
        [("r", "Abs", ("x",), {}), ("y", "Greater", ("r", "low"), {})],
        ["y"],
        constants={"low": np.float32([-1])},
    )
    found = verdict(graph)
    assert (found.verdict, found.reason) == (
        "unknown",
        "output 'y': the same in 3 draws of inputs and weights",
    )


def test_an_output_that_is_never_finite_is_unknown():
    graph = graph_of(
        {"x": ("float32", 4)},
        [("a", "Exp", ("x",), {}), ("n", "Neg", ("a",), {}), ("y", "Log", ("n",), {})],
        ["y"],
    )
    found = verdict(graph)
    assert (found.verdict, found.reason) == (
        "unknown",
        "output 'y': not finite in 4 draws of inputs and weights",
    )


def test_an_output_of_constants_alone_need_not_react():
    graph = graph_of(
        {"x": ("float32", 4)},
        [("y", "Neg", ("x",), {}), ("c", "Neg", ("one",), {})],
        ["y", "c"],
        constants={"one": np.ones(3, "float32")},
    )
    assert verdict(graph).verdict == "tested"


@pytest.mark.parametrize("there", [True, False])
def test_an_integer_weight_is_read_where_it_is_there(there):
    graph = graph_of(
        {"rows": ("int64", 3), "table": ("float32", 5, 4)},
        [("y", "Gather", ("table", "rows"), {"axis": 0})],
        ["y"],
        parameters=("rows", "table"),
    )

    def source(name):
        assert name == "rows", "floating weights are drawn"
        if there:
            return np.array([4, 4, 0])
        raise UserError("its file is missing")

    values = Original(graph, source).values(0)[0]
    assert not there or values["rows"].tolist() == [4, 4, 0]
    assert compare(graph, replicated(graph), source=source).verdict == "tested"


def test_leaves_are_drawn_for_their_use():
    graph = graph_of(
        {
            "ids": ("int32", 50, 4), "label": ("int64", 50), "mask": ("int64", 50, 4), "keep": ("bool", 50, 4),
            "count": ("int64", 50), "v": ("float32", 9, 3), "m": ("float32", 9, 3),
        },
        [
            ("wide", "Cast", ("ids",), {"to": "int64"}),
            ("flat", "Reshape", ("wide",), {"shape": (200,)}),
            ("moved", "Add", ("flat", "two"), {}),
            ("rows", "Gather", ("m", "moved"), {"axis": 0}),
            ("hot", "OneHot", ("label", "values"), {"axis": 1, "depth": 5}),
            ("on", "Cast", ("mask",), {"to": "bool"}),
            ("both", "And", ("on", "keep"), {}),
            ("scaled", "Mul", ("v", "half"), {}),
            ("root", "Sqrt", ("scaled",), {}),
            ("y", "Div", ("m", "root"), {}),
            ("more", "Add", ("count", "count"), {}),
        ],
        ["rows", "hot", "both", "y", "more"],
        constants={"two": np.array(2), "values": np.float32([0, 1]), "half": np.float32(0.5)},
    )  # fmt: skip
    assert Uses.of(graph).ranges == {"ids": (0, 7), "label": (0, 5)}
    drawn = Original(graph, None).draw(np.random.default_rng(0), positive=False)
    assert drawn["ids"].dtype == np.int32 and set(drawn["ids"].flat) == set(range(7))
    assert set(drawn["label"].flat) == set(range(5)) and set(drawn["count"].flat) == set(range(4))
    for name in ("mask", "keep"):
        assert set(drawn[name].flat) == {0, 1} and drawn[name][:, 0].all(), name
    assert drawn["v"].min() > 0 > drawn["m"].min() and drawn["m"].dtype == np.float64
    assert compare(graph, replicated(graph)).verdict == "tested"
