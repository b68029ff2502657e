"""Gradients: every rule and every derived adjoint against jax.grad in float64, whole models too; and every parallel
rule of an adjoint, executed on a simulated mesh."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallegg.mesh import Mesh
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.builder import Builder
from parallegg.rewrite.gradients import gradients
from parallegg.rewrite.graph import Graph, tensor_source
from parallegg.rewrite.kinds import applications
from parallegg.rewrite.saturation import saturate
from parallegg.rewrite.space import Kind, Space
from parallegg.rewrite.terms import adjoints_in, decode, encode
from parallegg.rules import load_rules, with_adjoints
from parallegg.runtime.lowering import evaluate, exact_types, run_nodes, widest_array, widest_node
from parallegg.verification.numbers import Original

from .models import CNN_TRAIN_LOSS, OTHERS, SAMPLES, Sample
from .onnx_export import random_inputs
from .simulate import join, run, run_step, split
from .zoo import CASES, Case, case, f, i

UNARY = [
    "Neg",
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Tanh",
    "Sigmoid",
    "Relu",
    "Erf",
    "Sin",
    "Softplus",
    "Abs",
]
BINARY = ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"]
MORE = [
    *(case(op, f(3, 4)) for op in UNARY),
    case("Gelu", f(3, 4), approximate="tanh"),
    *(case(op, f(3, 1, 4), f(2, 4), name=f"{op} broadcast") for op in BINARY),
    case("Mul", f(3, 4), f(), name="Mul by a scalar"),
    case("Where", TensorType((3, 1), "bool"), f(3, 4), f(), name="Where with a scalar"),
    case("ReduceMean", f(3, 4, 2), axes=(0, 2), keepdims=1, name="ReduceMean keeping"),
    case("Concat", f(3, 4), f(3, 1), f(3, 2), axis=1, name="Concat of three"),
    case("Slice", f(6, 5), starts=(5, 0), ends=(-7, 5), steps=(-2, 1), name="Slice backwards"),
    case("AveragePool", f(2, 3, 5, 5), kernel_shape=(2, 2), strides=(2, 2), pads=(0, 0, 1, 1), dilations=(1, 1),
         ceil_mode=0, count_include_pad=0),
    case("Conv", f(2, 4, 7, 6), f(6, 2, 3, 2), group=2, strides=(2, 1), pads=(1, 0, 1, 1), dilations=(1, 2),
         name="Conv in groups with strides"),
    case("Cast", f(3, 4), to="float64", name="Cast to itself"),
    *(case("OneHot", i(4, 3), f(2), axis=axis, depth=5, indices={0: 5}, name=f"OneHot on axis {axis}")
      for axis in (0, 1, 2)),
]  # fmt: skip
# A Cast rounds to float32 whatever the arithmetic; its gradient is a Cast, by rule alone.
OF_ZOO = [c for c in CASES if c.kind.result.dtype == "float64"]
DIFFERENTIABLE = [*OF_ZOO, *MORE]


def alone(case_: Case) -> Graph:
    """The case's operator under a random weighting of its result: loss = sum(w y)."""
    names = tuple(f"x{i}" for i in range(len(case_.kind.operands)))
    types = dict(zip(names, case_.kind.operands, strict=True))
    y = case_.kind.result
    types |= {"y": y, "w": y, "wy": y, "loss": TensorType((), y.dtype)}
    nodes = (
        Node("op", case_.node.op, names, ("y",), case_.node.attributes),
        Node("weight", "Mul", ("w", "y"), ("wy",)),
        Node("sum", "ReduceSum", ("wy",), ("loss",), {"axes": tuple(range(y.rank)), "keepdims": 0}),
    )
    return Graph("one", nodes, (*names, "w"), (), {}, ("loss",), types)


def compare_with_jax(
    graph: Graph, loss: str, wrt: list[str], leaves: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Assert that every gradient equals jax.grad's of the whole forward; the gradients."""
    backward = gradients(graph, loss, wrt)
    nodes = tuple(map(widest_node, graph.nodes))
    leaves = {name: widest_array(value) for name, value in leaves.items()}
    with exact_types():

        def forward(moving: dict[str, jax.Array]) -> jax.Array:
            values = {name: jnp.asarray(v) for name, v in leaves.items()} | moving
            run_nodes(nodes, values)
            return values[loss]

        expected = jax.grad(forward)({name: jnp.asarray(leaves[name]) for name in wrt})
        values = {name: jnp.asarray(v) for name, v in leaves.items()}
        values |= {name: jnp.asarray(widest_array(v)) for name, v in backward.constants.items()}
        run_nodes((*nodes, *map(widest_node, backward.nodes)), values)
    found = {}
    for name in wrt:
        theirs = np.asarray(expected[name])
        ours = (
            np.asarray(values[backward.gradients[name]])
            if name in backward.gradients
            else np.zeros_like(theirs)
        )
        scale = np.max(np.abs(theirs), initial=0.0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9 * max(scale, 1e-300), err_msg=name)
        found[name] = ours
    return found


@pytest.mark.parametrize("case_", DIFFERENTIABLE, ids=lambda c: c.name)
def test_an_operators_gradient_is_jaxs(case_: Case):
    rng = np.random.default_rng(0)
    operands = case_.operands(rng)
    floats = [i for i, value in enumerate(operands) if value.dtype.kind == "f"]
    graph = alone(case_)
    leaves = {f"x{i}": value for i, value in enumerate(operands)}
    leaves["w"] = rng.uniform(0.5, 2.0, case_.kind.result.shape)
    found = compare_with_jax(graph, "loss", [f"x{i}" for i in floats], leaves)
    assert any(np.any(value != 0) for value in found.values())


@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
@pytest.mark.parametrize(
    "make",
    [
        lambda reduction: case(
            "ScatterElements", f(4), i(2), f(2), axis=0, reduction=reduction, indices={1: 4}
        ),
        lambda reduction: case("ScatterND", f(4), i(2, 1), f(2), reduction=reduction, indices={1: 4}),
    ],
    ids=["ScatterElements", "ScatterND"],
)
def test_a_scatter_that_multiplies_or_takes_extremes_is_refused_by_name(make, reduction):
    with pytest.raises(UserError, match=f"node 'op': Scatter.* with reduction '{reduction}' has no gradient"):
        gradients(alone(make(reduction)), "loss", ["x0", "x2"])


def with_loss(graph: Graph) -> Graph:
    """The mean square of the first output as loss."""
    out = graph.outputs[0]
    type_ = graph.types[out]
    nodes = (
        Node("square", "Mul", (out, out), ("square",)),
        Node("loss", "ReduceMean", ("square",), ("loss",), {"axes": tuple(range(type_.rank)), "keepdims": 0}),
    )
    types = {**graph.types, "square": type_, "loss": TensorType((), type_.dtype)}
    return Graph(
        graph.name,
        (*graph.nodes, *nodes),
        graph.inputs,
        graph.parameters,
        graph.constants,
        ("loss",),
        types,
        graph.source,
    )


WHOLE_MODELS = [
    pytest.param(s, marks=pytest.mark.sweep if s in OTHERS or "legacy_dyn" in s.name else ())
    for s in (*SAMPLES, *OTHERS)
    if s.name not in ("light_resnet50", "bert.legacy")
]


@pytest.mark.parametrize("sample", WHOLE_MODELS, ids=lambda s: s.name)
def test_a_models_gradients_are_jaxs(sample: Sample):
    graph = with_loss(sample.graph())
    leaves = Original(graph, tensor_source(graph)).values(0)[0]
    found = compare_with_jax(graph, "loss", list(graph.parameters), leaves)
    silent = [name for name, value in found.items() if not np.any(value)]
    assert not silent, "a gradient that is zero everywhere compares nothing"


def test_the_gradients_of_a_net_in_training_mode_are_jaxs():
    """Through batch statistics and a Dropout to the model's own loss, by every weight.

    The bias before a BatchNormalization changes nothing: its gradient is zero, here but for rounding.
    """
    graph = CNN_TRAIN_LOSS.graph()
    assert set(graph.parameters) == {f"{layer}.{part}" for layer in "cbf" for part in ("weight", "bias")}
    value = tensor_source(
        graph
    )  # its own weights: by random ones some channels are never positive, nor learnt
    leaves = {name: value(name) for name in graph.parameters} | random_inputs(graph, seed=0, high=10)
    leaves = {name: widest_array(array) for name, array in (leaves | graph.constants).items()}
    found = compare_with_jax(graph, "loss", [name for name in graph.parameters if name != "c.bias"], leaves)
    assert len(found) == 5
    for name, value in found.items():
        assert np.ptp(value) > 0 and np.any(value != 0, axis=tuple(range(1, value.ndim))).all(), name
    zero = gradients(graph, "loss", ["c.bias"])
    nodes = [*map(widest_node, graph.nodes), *map(widest_node, zero.nodes)]
    constants = {name: widest_array(value) for name, value in zero.constants.items()}
    (bias,) = evaluate(nodes, leaves | constants, zero.gradients.values()).values()
    assert np.abs(bias).max() < 1e-12 * np.abs(found["c.weight"]).max()


def chain(*parts: tuple[str, tuple[str, ...], dict], types: dict[str, TensorType]) -> Graph:
    """Nodes named after what they make, over x [6, 4] and the leaves in `types`; the last makes the loss."""
    builder = Builder(reserved=set())
    for name, type_ in types.items():
        builder.input(name, type_)
    for op, (*inputs, output), attributes in parts:
        builder.emit(op, inputs, attributes, output)
    return builder.finish("chain", {"loss": "loss"}, None)


WHOLE = {"axes": (0, 1), "keepdims": 0}
REPEATED = {  # what a mean gives back is the same everywhere
    "through elementwise operators": chain(
        ("Tanh", ("x", "h"), {}), ("Neg", ("h", "n"), {}), ("ReduceMean", ("n", "loss"), WHOLE), types={"x": f(6, 4)}
    ),
    "to a leaf as it is": chain(("Neg", ("x", "n"), {}), ("ReduceMean", ("n", "loss"), WHOLE), types={"x": f(6, 4)}),
    "to a broadcast operand": chain(
        ("Mul", ("x", "w", "h"), {}), ("Add", ("h", "b", "y"), {}), ("ReduceMean", ("y", "loss"), WHOLE),
        types={"x": f(6, 4), "w": f(4), "b": f(6, 1)},
    ),
    "to an operator that reads all of it": chain(
        ("MatMul", ("x", "w", "h"), {}), ("Softmax", ("h", "p"), {"axis": 1}), ("MatMul", ("p", "v", "y"), {}),
        ("ReduceMean", ("y", "loss"), WHOLE), types={"x": f(6, 4), "w": f(4, 5), "v": f(5, 2)},
    ),
    "beside one that is not": chain(
        ("ReduceMean", ("x", "m"), {"axes": (0,), "keepdims": 1}), ("Sub", ("x", "m", "c"), {}),
        ("Mul", ("c", "c", "s"), {}), ("Mul", ("s", "x", "t"), {}), ("ReduceSum", ("t", "loss"), WHOLE),
        types={"x": f(6, 4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_cotangents_that_repeat_are_jaxs(name: str):
    graph, rng = REPEATED[name], np.random.default_rng(0)
    leaves = {x: rng.standard_normal(graph.types[x].shape) for x in graph.inputs}
    found = compare_with_jax(graph, "loss", list(graph.inputs), leaves)
    assert all(np.any(value) for value in found.values())


def test_a_cotangent_is_repeated_only_where_it_must():
    """A replicated value that is repeated cannot be split for nothing: the whole batch would be on every device."""
    whole = {
        name: [n.op for n in gradients(g, "loss", g.inputs).nodes].count("Expand")
        for name, g in REPEATED.items()
    }
    assert whole == {
        "through elementwise operators": 0,
        "to a leaf as it is": 1,
        "to a broadcast operand": 2,  # the leaf x, and what is summed for w and b
        "to an operator that reads all of it": 1,
        "beside one that is not": 0,
    }


def test_both_operands_of_a_square_get_one_product():
    square = chain(("Mul", ("x", "x", "s"), {}), ("ReduceSum", ("s", "loss"), WHOLE), types={"x": f(6, 4)})
    assert [node.op for node in gradients(square, "loss", ["x"]).nodes].count("Mul") == 1


@pytest.mark.parametrize("loss", ["logits", "label"])
def test_a_loss_must_be_a_floating_scalar(loss: str):
    types = {"x": f(3), "logits": f(3), "label": TensorType((), "int64")}
    nodes = (
        Node("a", "Neg", ("x",), ("logits",)),
        Node("b", "ArgMax", ("x",), ("label",), {"axis": 0, "keepdims": 0}),
    )
    graph = Graph("g", nodes, ("x",), (), {}, ("logits", "label"), types)
    with pytest.raises(UserError, match=f"loss '{loss}'"):
        gradients(graph, loss, ["x"])


def test_no_gradient_passes_through_indices():
    types = {"x": f(3), "i": TensorType((), "int64"), "t": f(5), "y": f()}
    nodes = (
        Node("a", "ArgMax", ("x",), ("i",), {"axis": 0, "keepdims": 0, "select_last_index": 0}),
        Node("b", "Gather", ("t", "i"), ("y",), {"axis": 0}),
    )
    graph = Graph("g", nodes, ("x", "t"), (), {}, ("y",), types)
    assert set(gradients(graph, "y", ["x", "t"]).gradients) == {"t"}


# ------------------------------------------------------------------------------------------------ parallel rules


@functools.cache
def adjoints() -> tuple[tuple[Kind, Case], ...]:
    """The adjoint kinds in every case's gradient, by its own function (no gradient rules)."""
    book = load_rules()
    for name in book.named("gradient"):
        book = book.without(name)
    found: dict[Kind, Case] = {}
    for case_ in OF_ZOO:
        floats = [i for i, t in enumerate(case_.kind.operands) if t.dtype == "float64"]
        graph = alone(case_)
        backward = gradients(graph, "loss", [f"x{i}" for i in floats], book=book)
        types = {**graph.types, **backward.types}
        whole = Graph(
            "b", (*graph.nodes, *backward.nodes), graph.inputs, (), dict(backward.constants),
            tuple(backward.gradients.values()), types,
        )  # fmt: skip
        for part in applications(whole)[0]:
            if part.node.startswith("gradient/op/") and part.kind.head.constructor[:3] in ("Vjp", "Adj"):
                found.setdefault(part.kind, case_)
    return tuple(found.items())


@functools.cache
def adjoint_space(mesh: str) -> Space:
    kinds = [kind for kind, _ in adjoints()]
    return saturate(
        kinds, {t for k in kinds for t in (*k.operands, k.result)}, Mesh.parse(mesh), load_rules()
    )


@pytest.mark.parametrize("mesh", ["a=3", pytest.param("a=2,b=3", marks=pytest.mark.sweep)])
def test_every_strategy_of_every_adjoint_computes_it(mesh: str):
    grid, space, rng = Mesh.parse(mesh), adjoint_space(mesh), np.random.default_rng(1)
    for kind, case_ in adjoints():
        operands = adjoint_operands(kind, case_, rng)
        expected = direct(kind, operands)
        strategies = space.strategies[kind]
        assert strategies, kind
        for strategy in strategies[:: max(1, len(strategies) // 6)]:
            blocks = [
                split(value, space.layouts[type_][label], grid, rng)
                for value, type_, label in zip(operands, kind.operands, strategy.reads, strict=True)
            ]
            layout = space.layouts[kind.result][strategy.out]
            value = join(run(strategy.steps, blocks, grid), layout, grid)
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9, err_msg=f"{layout} {strategy}")


def adjoint_operands(kind: Kind, case_: Case, rng: np.random.Generator) -> list[np.ndarray]:
    """The case's operands as far as the adjoint reads them, and a random cotangent."""
    values = case_.operands(rng)
    if kind.head.constructor.startswith("Adjoint"):
        del values[int(kind.head.attributes[0])]
    return [*values, rng.uniform(-1, 1, kind.operands[-1].shape)]


def direct(kind: Kind, operands: list[np.ndarray]) -> np.ndarray:
    one = Mesh.parse("one=1")
    return run_step(kind.head, [{(0,): value} for value in operands], one)[(0,)]


def test_every_derived_rule_is_used():
    used = {
        rule
        for mesh in ("a=3", "a=2,b=3")
        for s in adjoint_space(mesh).strategies.values()
        for x in s
        for rule in x.rules
    }
    book = with_adjoints(load_rules(), adjoints_in(kind.head for kind, _ in adjoints()))
    derived = [name for name in book.named("parallel") if re.search(r"-(vjp|adjoint)-\d", name)]
    assert len(derived) > 50
    # A sum is linear: it has an Adjoint, never a Vjp, though the family's maximum does.
    never = {"reduce-sum-inner-vjp-0", "reduce-partial-vjp-0"}
    assert {name for name in derived if name not in used} == never


def test_an_adjoint_names_its_operator():
    kind = next(kind for kind, _ in adjoints() if kind.head.constructor == "Adjoint-MatMul")
    op, attributes, domain = decode(kind.head)
    assert (op, attributes["of"], domain) == ("Adjoint", "MatMul", "parallegg")


def test_adjoints_of_one_weight_under_several_operands_do_not_mix():
    """An Adjoint does not read its operand: products of other shapes by the same weight are not its operator."""
    matmul = [case("MatMul", f(*a, 12), f(12, 6)) for a in ((6,), (2, 6), (6, 2, 6))]
    kinds = []
    for case_ in matmul:
        backward = gradients(alone(case_), "loss", ["x0", "x1"])
        types = {**alone(case_).types, **backward.types}
        for node in backward.nodes:
            if node.op == "Adjoint":
                kinds.append(Kind(encode(node), tuple(types[n] for n in node.inputs), types[node.outputs[0]]))
    grid, rng = Mesh.parse("a=2,b=3"), np.random.default_rng(2)
    space = saturate(kinds, {t for k in kinds for t in (*k.operands, k.result)}, grid, load_rules())
    for kind in kinds:
        operands = [rng.uniform(-1, 1, t.shape) for t in kind.operands]
        for strategy in space.strategies[kind][::5]:
            blocks = [
                split(value, space.layouts[t][label], grid, rng)
                for value, t, label in zip(operands, kind.operands, strategy.reads, strict=True)
            ]
            value = join(run(strategy.steps, blocks, grid), space.layouts[kind.result][strategy.out], grid)
            np.testing.assert_allclose(value, direct(kind, operands), rtol=1e-9, atol=1e-9)
