"""The operator table against ONNX itself: every row's inferred types, and every kernel's values.

`CASES` draws attributes and operand types for each row of an ONNX operator. The node is run by ONNX Runtime: its
result must have the inferred type, and the NumPy kernel, where there is one, must equal it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallegg.program import Node, TensorType
from parallegg.rewrite.evaluate import KERNELS, evaluate
from parallegg.rewrite.graph import Graph
from parallegg.rewrite.operators import OPERATORS, OWN, flops, infer
from parallegg.tests.onnx_export import export, session

SIZES = st.integers(1, 4)


def f32(*shape):
    return TensorType(tuple(shape), "float32")


def i64(*shape):
    return TensorType(tuple(shape), "int64")


def shapes(least=0, most=4):
    return st.lists(SIZES, min_size=least, max_size=most).map(tuple)


@st.composite
def broadcastable(draw, count):
    """`count` shapes that broadcast together."""
    full = draw(shapes())
    out = []
    for _ in range(count):
        cut = full[draw(st.integers(0, len(full))) :]
        out.append(tuple(1 if draw(st.booleans()) else size for size in cut))
    return out


@st.composite
def unary(draw, dtype="float32", attributes=None):
    return attributes or {}, (TensorType(draw(shapes()), dtype),)


@st.composite
def binary(draw, dtypes=("float32", "int64"), attributes=None):
    dtype = draw(st.sampled_from(dtypes))
    return attributes or {}, tuple(TensorType(shape, dtype) for shape in draw(broadcastable(2)))


@st.composite
def where(draw):
    c, a, b = draw(broadcastable(3))
    return {}, (TensorType(c, "bool"), f32(*a), f32(*b))


@st.composite
def prelu(draw):
    shape = draw(shapes(1))
    slope = tuple(
        1 if draw(st.booleans()) else size for size in shape[draw(st.integers(0, len(shape) - 1)) :]
    )
    return {}, (f32(*shape), f32(*slope))


@st.composite
def matmul(draw):
    batch_a, batch_b = draw(broadcastable(2))
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    a = (k,) if draw(st.booleans()) else (*batch_a, m, k)
    b = (k,) if draw(st.booleans()) else (*batch_b, k, n)
    return {}, (f32(*a), f32(*b))


@st.composite
def gemm(draw):
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    ta, tb = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    return {"transA": ta, "transB": tb}, (f32(*((k, m) if ta else (m, k))), f32(*((n, k) if tb else (k, n))))


@st.composite
def einsum(draw):
    a, b, c = draw(SIZES), draw(SIZES), draw(SIZES)
    equation, kinds = draw(
        st.sampled_from(
            [
                ("ij,jk->ik", (f32(a, b), f32(b, c))),
                ("ij,jk", (f32(a, b), f32(b, c))),
                ("...ij,...jk->...ik", (f32(2, a, b), f32(2, b, c))),
                ("ii->i", (f32(a, a),)),
                ("abc->", (f32(a, b, c),)),
                ("a,b,c->cab", (f32(a), f32(b), f32(c))),
            ]
        )
    )
    return {"equation": equation}, kinds


@st.composite
def window(draw, n, kernel):
    strides = tuple(draw(st.integers(1, 3)) for _ in range(n))
    pads = tuple(draw(st.integers(0, k - 1)) for k in kernel * 2)
    return {"strides": strides, "pads": pads, "dilations": (1,) * n}


@st.composite
def conv(draw):
    n, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(n))
    x = f32(draw(SIZES), group * draw(SIZES), *(draw(st.integers(3, 7)) for _ in range(n)))
    w = f32(group * draw(SIZES), x.shape[1] // group, *kernel)
    return {"group": group, **draw(window(n, kernel))}, (x, w)


@st.composite
def conv_transpose(draw):
    n = 2
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(n))
    x = f32(draw(SIZES), draw(SIZES), *(draw(st.integers(3, 5)) for _ in range(n)))
    attributes = draw(window(n, kernel)) | {"group": 1, "output_padding": (0,) * n}
    return attributes, (x, f32(x.shape[1], draw(SIZES), *kernel))


@st.composite
def pool(draw, **extra):
    n = 2
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(n))
    x = f32(draw(SIZES), draw(SIZES), *(draw(st.integers(4, 7)) for _ in range(n)))
    return {
        "kernel_shape": kernel,
        **draw(window(n, kernel)),
        "ceil_mode": draw(st.integers(0, 1)),
        **extra,
    }, (x,)


@st.composite
def reduce(draw):
    shape = draw(shapes(1))
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1)))))
    return {"axes": axes, "keepdims": draw(st.integers(0, 1))}, (f32(*shape),)


@st.composite
def along(draw, operands=1, dtype="float32", **attributes):
    shape = draw(shapes(1))
    axis = draw(st.integers(0, len(shape) - 1))
    extra = (f32(*shape[axis:]),) * (operands - 1)
    drawn = {name: draw(value) for name, value in attributes.items()}
    return {"axis": axis, **drawn}, (TensorType(shape, dtype), *extra)


@st.composite
def channels(draw, operands, **attributes):
    x = f32(draw(SIZES), 2 * draw(SIZES), draw(SIZES), draw(SIZES))
    return attributes, (x, *(f32(x.shape[1]),) * operands)


@st.composite
def gather(draw):
    shape = draw(shapes(1))
    return {"axis": draw(st.integers(0, len(shape) - 1))}, (f32(*shape), i64(*draw(shapes(0, 2))))


@st.composite
def elements(draw, scatter=False):
    shape = draw(shapes(1, 3))
    indices = tuple(draw(st.integers(1, size)) for size in shape)
    data = (f32(*shape), i64(*indices))
    attributes = {"axis": draw(st.integers(0, len(shape) - 1))}
    return (attributes | {"reduction": "add"}, (*data, f32(*indices))) if scatter else (attributes, data)


@st.composite
def gather_nd(draw):
    shape = draw(shapes(2, 4))
    batch = draw(st.integers(0, 1))
    depth = draw(st.integers(1, len(shape) - batch))
    return {"batch_dims": batch}, (f32(*shape), i64(*shape[:batch], *draw(shapes(0, 2)), depth))


@st.composite
def scatter_nd(draw):
    shape, lead = draw(shapes(1, 3)), draw(shapes(1, 2))
    depth = draw(st.integers(1, len(shape)))
    return {"reduction": "add"}, (f32(*shape), i64(*lead, depth), f32(*lead, *shape[depth:]))


@st.composite
def one_hot(draw):
    shape = draw(shapes(1, 3))
    return {"axis": draw(st.integers(0, len(shape))), "depth": draw(SIZES)}, (i64(*shape), f32(2))


@st.composite
def transpose(draw):
    shape = draw(shapes(1))
    return {"perm": tuple(draw(st.permutations(range(len(shape)))))}, (f32(*shape),)


@st.composite
def reshape(draw):
    shape = draw(shapes())
    return {"shape": (*reversed(shape), 1)}, (f32(*shape),)


@st.composite
def expand(draw):
    a, b = draw(broadcastable(2))
    return {"shape": np.broadcast_shapes(a, b)}, (f32(*a),)


@st.composite
def concat(draw):
    shape = draw(shapes(1))
    axis = draw(st.integers(0, len(shape) - 1))
    parts = [(*shape[:axis], draw(SIZES), *shape[axis + 1 :]) for _ in range(draw(st.integers(1, 3)))]
    return {"axis": axis}, tuple(f32(*part) for part in parts)


@st.composite
def slice_(draw):
    shape = draw(shapes(1))
    starts, ends, steps = [], [], []
    for size in shape:
        step = draw(st.sampled_from((-2, -1, 1, 2)))
        starts.append(draw(st.integers(0, size if step > 0 else size - 1)))
        below = [-size - 1, *range(size)]
        ends.append(draw(st.integers(starts[-1], size) if step > 0 else st.sampled_from(below)))
        steps.append(step)
    return {"starts": tuple(starts), "ends": tuple(ends), "steps": tuple(steps)}, (f32(*shape),)


@st.composite
def pad(draw):
    shape = tuple(size + 1 for size in draw(shapes(1, 3)))
    mode = draw(st.sampled_from(("constant", "edge", "reflect", "wrap")))
    pads = tuple(draw(st.integers(0, 1)) for _ in range(2 * len(shape)))
    return {"pads": pads, "mode": mode, "value": 2.0 if mode == "constant" else 0.0}, (f32(*shape),)


@st.composite
def tile(draw):
    shape = draw(shapes(1, 3))
    return {"repeats": tuple(draw(st.integers(1, 3)) for _ in shape)}, (f32(*shape),)


@st.composite
def trilu(draw):
    return {"upper": draw(st.integers(0, 1)), "k": draw(st.integers(-3, 3))}, (f32(*draw(shapes(2))),)


@st.composite
def top_k(draw):
    shape = draw(shapes(1))
    axis = draw(st.integers(0, len(shape) - 1))
    return {"axis": axis, "k": draw(st.integers(1, shape[axis])), "largest": 1, "sorted": 1}, (f32(*shape),)


PLAIN = (
    "Abs", "Neg", "Sign", "Relu", "Reciprocal", "Floor", "Ceil", "Round", "Sqrt", "Softsign", "HardSwish",
    "Exp", "Log", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Sigmoid", "Erf",
    "Softplus",
    "Mish",
    "IsNaN",
)  # fmt: skip
FLAG = st.integers(0, 1)
ARG = along(keepdims=FLAG, select_last_index=FLAG)
CASES = {
    **dict.fromkeys(PLAIN, unary()),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min"), binary()),
    **dict.fromkeys(("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal"), binary()),
    **dict.fromkeys(("And", "Or", "Xor"), binary(("bool",))),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"), reduce()),
    "Not": unary("bool"),
    "Gelu": unary(attributes={"approximate": "tanh"}),
    "LeakyRelu": unary(attributes={"alpha": 0.5}),
    "ThresholdedRelu": unary(attributes={"alpha": 0.5}),
    "Elu": unary(attributes={"alpha": 0.5}),
    "Celu": unary(attributes={"alpha": 0.5}),
    "Selu": unary(attributes={"alpha": 0.5, "gamma": 2.0}),
    "HardSigmoid": unary(attributes={"alpha": 0.5, "beta": 0.25}),
    "IsInf": unary(attributes={"detect_negative": 1, "detect_positive": 0}),
    "Clip": unary(attributes={"min": 0.5, "max": 1.5}),
    "Cast": unary(attributes={"to": "int32"}),
    "Pow": binary(("float32",)),
    "Mod": binary(("int64",), {"fmod": 0}),
    "PRelu": prelu(),
    "Where": where(),
    "MatMul": matmul(),
    "Gemm": gemm(),
    "Einsum": einsum(),
    "Conv": conv(),
    "ConvTranspose": conv_transpose(),
    "MaxPool": pool(),
    "AveragePool": pool(count_include_pad=0),
    "Softmax": along(),
    "LogSoftmax": along(),
    "LayerNormalization": along(2, epsilon=st.just(0.5)),
    "RMSNormalization": along(2, epsilon=st.just(0.5)),
    "BatchNormalization": channels(4, epsilon=0.5),
    "InstanceNormalization": channels(2, epsilon=0.5),
    "GroupNormalization": channels(2, epsilon=0.5, num_groups=2),
    "LRN": channels(0, alpha=0.5, beta=0.75, bias=1.0, size=3),
    "Gather": gather(),
    "GatherElements": elements(),
    "GatherND": gather_nd(),
    "ScatterElements": elements(scatter=True),
    "ScatterND": scatter_nd(),
    "OneHot": one_hot(),
    "Transpose": transpose(),
    "Reshape": reshape(),
    "Expand": expand(),
    "Concat": concat(),
    "Slice": slice_(),
    "Pad": pad(),
    "Tile": tile(),
    "CumSum": along(exclusive=FLAG, reverse=FLAG),
    "Trilu": trilu(),
    "ArgMax": ARG,
    "ArgMin": ARG,
    "TopK": top_k(),
}


def operand(kind: TensorType, rng, indices: bool):
    """Positive values, so that logarithms and roots exist; indices are 0, -1 for the others to be reached."""
    if kind.dtype == "bool":
        return np.asarray(rng.integers(0, 2, kind.shape), bool)
    if kind.dtype == "int64":
        return np.asarray(rng.integers(*((-1, 1) if indices else (1, 9)), kind.shape))
    return np.asarray(rng.integers(1, 8, kind.shape) / 8, np.float32)


def reference(op, attributes, kinds, results, values):
    names = tuple(f"x{i}" for i in range(len(kinds)))
    outputs = tuple(f"y{i}" for i in range(len(results)))
    types = dict(zip((*names, *outputs), (*kinds, *results), strict=True))
    graph = Graph("case", (Node("n", op, names, outputs, attributes),), names, (), {}, outputs, types)
    feeds = dict(zip(names, values, strict=True))
    return session(export(graph)).run(None, feeds)


def test_every_row_has_a_case():
    assert set(CASES) == set(OPERATORS) - OWN


@pytest.mark.parametrize("op", sorted(CASES))
def test_inferred_types_and_kernels(op):
    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(case=CASES[op])
    def check(case):
        attributes, kinds = case
        results = infer(op, attributes, kinds)
        indices = op in ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot")
        rng = np.random.default_rng(0)
        values = [operand(kind, rng, indices) for kind in kinds]
        expected = reference(op, attributes, kinds, results, values)
        assert [TensorType(y.shape, str(y.dtype)) for y in map(np.asarray, expected)] == list(results)
        assert flops(op, attributes, kinds) >= 0
        if op in KERNELS:
            for found, y in zip(evaluate(op, attributes, values), expected, strict=True):
                assert str(found.dtype) == str(np.asarray(y).dtype)
                np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)

    check()


REFUSED = [
    ("RandomKey", {}, (f32(), i64(2)), "key and index must be int64, got float32[] and int64[2]"),
    ("Add", {}, (f32(2, 3), f32(2)), "do not broadcast"),
    ("Add", {}, (f32(2), i64(2)), "different element types: float32, int64"),
    ("Add", {}, (f32(2),), "Add takes 2 operands, got 1"),
    ("Not", {}, (f32(2),), "element type float32 is not allowed"),
    ("Softmax", {}, (f32(2),), "Softmax needs the attribute 'axis'"),
    ("Softmax", {"axis": 2}, (f32(2),), "axis 2 is out of range for 1 dimensions"),
    ("Relu", {"alpha": 1.0}, (f32(2),), "Relu has no attribute 'alpha'"),
    ("Frobnicate", {}, (f32(2),), "Frobnicate is not a canonical operator"),
    ("MatMul", {}, (f32(2, 3), f32(2, 3)), "inner sizes differ"),
    ("Reshape", {"shape": (3, 2)}, (f32(5),), "cannot reshape float32[5] of 5 elements to (3, 2)"),
    ("Reshape", {"shape": (-1,)}, (f32(5),), "is not static"),
    ("Pad", {"pads": (-1, 0), "mode": "constant", "value": 0.0}, (f32(5),), "crop by a Slice"),
    ("Slice", {"starts": (6,), "ends": (6,), "steps": (1,)}, (f32(5),), "lie outside"),
    ("Concat", {"axis": 0}, (f32(2, 3), f32(2, 4)), "differ beside axis 0"),
    ("ReduceSum", {"axes": (1, 0), "keepdims": 1}, (f32(2, 3),), "not sorted"),
]


@pytest.mark.parametrize(("op", "attributes", "kinds", "message"), REFUSED)
def test_misfits_are_named(op, attributes, kinds, message):
    with pytest.raises(ValueError) as error:
        infer(op, attributes, kinds)
    assert message in str(error.value)


WORK = [
    ("MatMul", {}, (f32(5, 2, 3), f32(3, 4)), 2 * 5 * 2 * 3 * 4),
    ("Gemm", {"transA": 1, "transB": 0}, (f32(3, 2), f32(3, 4)), 2 * 2 * 3 * 4),
    (
        "Conv",
        {"group": 2, "strides": (1, 1), "pads": (0,) * 4, "dilations": (1, 1)},
        (f32(1, 4, 5, 5), f32(6, 2, 3, 3)),
        2 * (6 * 3 * 3) * (2 * 3 * 3),
    ),
    ("Einsum", {"equation": "ij,jk->ik"}, (f32(2, 3), f32(3, 4)), 2 * 2 * 3 * 4),
    ("Transpose", {"perm": (1, 0)}, (f32(2, 3),), 0),
    ("ReduceSum", {"axes": (0,), "keepdims": 0}, (f32(2, 3),), 6),
]


@pytest.mark.parametrize(("op", "attributes", "kinds", "count"), WORK)
def test_work(op, attributes, kinds, count):
    assert flops(op, attributes, kinds) == count
