"""Every JAX operator against onnxruntime (optimizations off) and onnx.reference, on one-node models.

`CASES` holds (operator, canonical attributes, inputs); `to_onnx` turns attributes back into ONNX operands.
Where one of the two cannot run a model the other decides; known faults of either are listed below.
Float cases run in float32 and float64; the types of all floating types are compared with the operator's row.
"""

from __future__ import annotations

import math
import warnings

import jax
import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from parallegg.program import TensorType
from parallegg.rewrite.operators import OPERATORS, OWN, infer
from parallegg.runtime.operators import JAX, exact_types

OPSET = 23
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape).astype("float32")


def unit(*shape):
    return rng.uniform(-0.95, 0.95, shape).astype("float32")


def positive(*shape):
    return rng.uniform(0.1, 3, shape).astype("float32")


def integers(low, high, *shape, dtype="int64"):
    return rng.integers(low, high, shape).astype(dtype)


def bits(*shape):
    return rng.integers(0, 2, shape).astype(bool)


SPECIAL = np.array([0.0, -0.0, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan], "float32")
TIES = np.array([[3, 1, 3, 2, 1], [0, 0, 0, 0, 0], [-1, 2, 2, -1, 2]], "float32")
X = normal(3, 4, 5)
IMAGE = normal(2, 4, 7, 8)


def window(*kernel, strides=None, pads=None, dilations=None, **more):
    n = len(kernel)
    return {
        "kernel_shape": kernel,
        "strides": strides or (1,) * n,
        "pads": pads or (0,) * (2 * n),
        "dilations": dilations or (1,) * n,
        "ceil_mode": 0,
        **more,
    }


def convolution(group=1, strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), **more):
    return {"group": group, "strides": strides, "pads": pads, "dilations": dilations, **more}


def cut(starts, ends, steps):
    return {"starts": starts, "ends": ends, "steps": steps}


UNARY = [
    *((op, {}, [normal(3, 5)]) for op in (
        "Abs", "Neg", "Exp", "Reciprocal", "Floor", "Ceil", "Sign", "Sin", "Cos", "Tan", "Atan", "Sinh",
        "Cosh", "Tanh", "Sigmoid", "Relu", "Erf", "Softplus", "Softsign", "HardSwish", "Mish")),
    *((op, {}, [positive(3, 5)]) for op in ("Log", "Sqrt")),
    *((op, {}, [unit(3, 5)]) for op in ("Asin", "Acos")),
    *((op, {}, [SPECIAL])
      for op in ("Round", "IsNaN", "Abs", "Sign", "Relu", "Sqrt", "Floor", "Tanh", "Sigmoid")),
    *((op, {}, [integers(-5, 5, 6)]) for op in ("Abs", "Neg", "Sign")),
    ("Relu", {}, [integers(-5, 5, 6, dtype="int32")]),
    ("Not", {}, [bits(7)]),
    ("Gelu", {"approximate": "none"}, [normal(9)]),
    ("Gelu", {"approximate": "tanh"}, [normal(9)]),
    ("LeakyRelu", {"alpha": 0.1}, [normal(9)]),
    ("Elu", {"alpha": 0.7}, [normal(9)]),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, [3 * normal(9)]),
    ("Selu", {"alpha": 1.5, "gamma": 1.1}, [normal(9)]),
    ("Selu", {}, [normal(9)]),
    ("Celu", {"alpha": 0.7}, [normal(9)]),
    ("ThresholdedRelu", {"alpha": 0.5}, [normal(9)]),
    ("Clip", {"min": -0.5, "max": 0.5}, [normal(9)]),
    ("Clip", {"max": 0.5}, [normal(9)]),
    ("Clip", {"min": -0.5}, [normal(9)]),
    ("Clip", {"min": 2.0, "max": 1.0}, [normal(9)]),
    ("Clip", {"min": -2, "max": 2}, [integers(-9, 9, 9)]),
    ("IsInf", {"detect_negative": 1, "detect_positive": 1}, [SPECIAL]),
    ("IsInf", {"detect_negative": 0, "detect_positive": 1}, [SPECIAL]),
    ("IsInf", {"detect_negative": 1, "detect_positive": 0}, [SPECIAL]),
    *(("Cast", {"to": to}, [np.array([-2.7, -0.5, 0.0, 0.5, 2.7], "float32")])
      for to in ("int32", "int64", "bool", "float64", "float32", "float16", "int8")),
    *(("Cast", {"to": to}, [bits(6)]) for to in ("float32", "int64", "float64")),
    ("Cast", {"to": "bool"}, [np.array([np.nan, 0.0, -0.0, 1e-30], "float32")]),
    ("Cast", {"to": "float32"}, [integers(-(2**40), 2**40, 6)]),
    ("Cast", {"to": "int32"}, [integers(-9, 9, 6)]),
]  # fmt: skip

LONG = np.array([2**62 + 1, -(2**53) - 1, 7, -7], "int64")

BINARY = [
    *((op, {}, [normal(3, 1, 5), normal(4, 1)]) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    *((op, {}, [integers(-9, 9, 3, 4), integers(1, 5, 4)])
      for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    *((op, {}, [LONG, np.array([3, 3, -2, 2])]) for op in ("Add", "Sub", "Div", "Mod")),
    ("Div", {}, [integers(-9, 9, 3, 4, dtype="int32"), np.array([-3, 2, 5, -1], "int32")]),
    ("Max", {}, [SPECIAL, np.zeros(8, "float32")]),
    ("Min", {}, [np.ones(8, "float32"), SPECIAL]),
    ("Pow", {}, [positive(3, 4), normal(4)]),
    ("Pow", {}, [normal(3, 4), np.array(2, "int64")]),
    ("Pow", {}, [normal(3, 4), np.array(3.0, "float32")]),
    ("Pow", {}, [integers(-4, 4, 5), np.array(3, "int64")]),
    ("Mod", {"fmod": 0}, [integers(-9, 9, 8), np.array([3, -3, 2, -2, 5, -5, 7, -7])]),
    ("Mod", {"fmod": 1}, [integers(-9, 9, 8), np.array([3, -3, 2, -2, 5, -5, 7, -7])]),
    ("Mod", {"fmod": 1}, [3 * normal(8), positive(8)]),
    *((op, {}, [bits(3, 1), bits(4)]) for op in ("And", "Or", "Xor", "Equal")),
    *((op, {}, [TIES[:, :, None], TIES[0]]) for op in (
        "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")),
    ("Less", {}, [LONG, LONG + 1]),
    ("PRelu", {}, [normal(2, 3, 4), normal(3, 1)]),
    ("Where", {}, [bits(3, 1), normal(3, 4), normal(4)]),
    ("Where", {}, [bits(3, 4), LONG, LONG[::-1].copy()]),
]  # fmt: skip

PRODUCTS = [
    ("MatMul", {}, [normal(3, 4), normal(4, 5)]),
    ("MatMul", {}, [normal(2, 1, 3, 4), normal(5, 4, 6)]),
    ("MatMul", {}, [normal(4), normal(4, 5)]),
    ("MatMul", {}, [normal(2, 3, 4), normal(4)]),
    ("MatMul", {}, [integers(-9, 9, 3, 4), integers(-9, 9, 4, 2)]),
    *(("Gemm", {"transA": a, "transB": b}, [normal(*(4, 3) if a else (3, 4)),
        normal(*(5, 4) if b else (4, 5))])
      for a in (0, 1) for b in (0, 1)),
    ("Conv", convolution(), [IMAGE, normal(6, 4, 3, 2)]),
    ("Conv", convolution(2, (2, 1), (1, 0, 2, 3), (1, 2)), [IMAGE, normal(6, 2, 3, 2)]),
    ("Conv", convolution(4), [IMAGE, normal(8, 1, 3, 3)]),
    ("Conv", {"group": 1, "strides": (2,), "pads": (1, 2), "dilations": (2,)}, [X, normal(2, 4, 3)]),
    ("Conv", {"group": 1, "strides": (1,) * 3, "pads": (0,) * 6, "dilations": (1,) * 3},
     [normal(1, 2, 4, 4, 3), normal(3, 2, 2, 2, 2)]),
    ("ConvTranspose", convolution(output_padding=(0, 0)), [IMAGE, normal(4, 3, 3, 2)]),
    ("ConvTranspose", convolution(2, (3, 2), (1, 0, 2, 1), (1, 2), output_padding=(1, 0)),
     [IMAGE, normal(4, 3, 3, 2)]),
    ("ConvTranspose", {"group": 1, "strides": (2,), "pads": (3, 3), "dilations": (1,),
      "output_padding": (1,)},
     [X, normal(4, 2, 3)]),
    ("Einsum", {"equation": "bij, bjk -> bik"}, [normal(2, 3, 4), normal(2, 4, 5)]),
    ("Einsum", {"equation": "...ij->...ji"}, [normal(2, 3, 4)]),
    ("Einsum", {"equation": "i,j"}, [normal(3), normal(4)]),
    ("Einsum", {"equation": "ij,j,k->ik"}, [normal(3, 4), normal(4), normal(2)]),
]  # fmt: skip

POOLS = [
    ("MaxPool", window(3, 2), [IMAGE]),
    ("MaxPool", window(3, 2, strides=(2, 3), pads=(1, 0, 1, 1)), [IMAGE]),
    ("MaxPool", window(3, 3, strides=(2, 2), pads=(0, 1, 1, 1), ceil_mode=1), [IMAGE]),
    ("MaxPool", window(1, 1, strides=(2, 2), ceil_mode=1), [normal(1, 1, 2, 2)]),
    ("MaxPool", window(2, 2, dilations=(2, 3)), [IMAGE]),
    ("MaxPool", window(3, pads=(1, 1)), [X]),
    ("AveragePool", window(3, 2, count_include_pad=0), [IMAGE]),
    *(("AveragePool", window(3, 2, strides=(2, 3), pads=(1, 0, 1, 1), count_include_pad=c, ceil_mode=m),
       [IMAGE])
      for c in (0, 1) for m in (0, 1)),
    ("AveragePool", window(3, 3, strides=(2, 2), ceil_mode=1, count_include_pad=1), [normal(1, 1, 4, 4)]),
    ("AveragePool", window(2, 2, dilations=(2, 2), pads=(1,) * 4, count_include_pad=0), [IMAGE]),
]  # fmt: skip

CHANNELS = [normal(4), normal(4)]

REDUCTIONS = [
    *((op, {"axes": axes, "keepdims": keep}, [X])
      for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
      for axes, keep in (((1,), 1), ((0, 2), 0))),
    *((op, {"axes": (1,), "keepdims": 0}, [integers(-5, 5, 3, 4, dtype=dtype)])
      for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd") for dtype in ("int32", "int64")),
    *((op, {"axes": (1,), "keepdims": 0}, [normal(3, 0)]) for op in ("ReduceSum", "ReduceMax", "ReduceMin")),
    *((op, {"axis": axis}, [X]) for op in ("Softmax", "LogSoftmax") for axis in (0, 2)),
    ("Softmax", {"axis": 1}, [np.array([[-np.inf, -np.inf], [-np.inf, 1.0]], "float32")]),
    ("LayerNormalization", {"axis": 2, "epsilon": 1e-2}, [X, normal(5)]),
    ("LayerNormalization", {"axis": 1, "epsilon": 1e-5}, [X, normal(4, 5)]),
    ("RMSNormalization", {"axis": 2, "epsilon": 1e-2}, [X, normal(5)]),
    ("RMSNormalization", {"axis": 1, "epsilon": 1e-5}, [X, normal(4, 5)]),
    ("BatchNormalization", {"epsilon": 1e-2}, [IMAGE, *CHANNELS, normal(4), positive(4)]),
    ("BatchNormalization", {"epsilon": 1e-2}, [normal(3, 4), *CHANNELS, normal(4), positive(4)]),
    ("InstanceNormalization", {"epsilon": 1e-2}, [IMAGE, *CHANNELS]),
    ("GroupNormalization", {"epsilon": 1e-2, "num_groups": 2}, [IMAGE, *CHANNELS]),
    ("LRN", {"alpha": 0.2, "beta": 0.6, "bias": 1.3, "size": 3}, [IMAGE]),
    *((op, {"axis": 1, "keepdims": keep, "select_last_index": last}, [TIES])
      for op in ("ArgMax", "ArgMin") for keep in (0, 1) for last in (0, 1)),
    *(("TopK", {"k": 3, "axis": axis, "largest": large, "sorted": 1}, [TIES])
      for axis in (0, 1) for large in (0, 1)),
    ("TopK", {"k": 2, "axis": 0, "largest": 0, "sorted": 1}, [np.array([5, -(2**63), 3, -(2**63)])]),
]  # fmt: skip

ROWS = np.array([[0, -1, 2], [1, 1, -2]])

INDEXING = [
    ("Gather", {"axis": 0}, [X, ROWS]),
    ("Gather", {"axis": 2}, [X, ROWS.astype("int32")]),
    ("Gather", {"axis": 1}, [X, np.array(-1)]),
    ("Gather", {"axis": 0}, [bits(3, 4), ROWS]),
    ("GatherElements", {"axis": 1}, [X, integers(-4, 4, 3, 6, 5)]),
    ("GatherElements", {"axis": 0}, [X, integers(-3, 3, 2, 4, 1)]),
    ("GatherND", {"batch_dims": 0}, [X, np.array([[0, -1], [2, 1], [-3, 0]])]),
    ("GatherND", {"batch_dims": 1}, [X, integers(-4, 4, 3, 2, 1)]),
    ("GatherND", {"batch_dims": 0}, [X, integers(0, 3, 2, 2, 3)]),
    ("ScatterElements", {"axis": 1, "reduction": "none"}, [X, np.array([[[1]], [[-1]], [[0]]]),
      normal(3, 1, 1)]),
    *(("ScatterElements", {"axis": 0, "reduction": reduction}, [X, integers(-3, 3, 2, 3, 4), normal(2, 3, 4)])
      for reduction in ("add", "mul", "max", "min")),
    ("ScatterND", {"reduction": "none"}, [X, np.array([[0], [-1]]), normal(2, 4, 5)]),
    *(("ScatterND", {"reduction": reduction}, [X, np.array([[0, 1], [-1, 2], [0, 1]]), normal(3, 5)])
      for reduction in ("add", "mul", "max", "min")),
    *(("OneHot", {"axis": axis, "depth": 4}, [np.array([[0, -1, 3], [4, -4, -5]]),
        np.array([-1.0, 2.0], "float32")])
      for axis in (0, 1, 2)),
    ("OneHot", {"axis": 1, "depth": 3}, [np.array([0, 2]), np.array([0, 1])]),
]  # fmt: skip

MOVEMENT = [
    ("Transpose", {"perm": (2, 0, 1)}, [X]),
    ("Reshape", {"shape": (6, 10)}, [X]),
    ("Reshape", {"shape": (0, 3)}, [normal(3, 0)]),
    ("Expand", {"shape": (2, 3, 4)}, [normal(3, 1)]),
    ("Concat", {"axis": 1}, [X, normal(3, 1, 5), normal(3, 2, 5)]),
    ("Concat", {"axis": 0}, [bits(2), bits(3)]),
    ("Slice", cut((0, 1, 2), (3, 3, 5), (1, 1, 2)), [X]),
    ("Slice", cut((2, 3, 4), (-4, -5, 1), (-1, -2, -3)), [X]),
    ("Slice", cut((0, 2, 0), (3, 2, 5), (1, 1, 1)), [X]),
    ("Pad", {"pads": (1, 0, 2, 0, 3, 1), "mode": "constant", "value": 1.5}, [X]),
    ("Pad", {"pads": (0, 1, 0, 2), "mode": "constant", "value": 7}, [integers(-9, 9, 3, 4)]),
    *(("Pad", {"pads": (1, 0, 2, 0, 3, 1), "mode": mode}, [X]) for mode in ("reflect", "edge", "wrap")),
    ("Pad", {"pads": (-1, 0, 2, 0, -2, 1), "mode": "constant", "value": 1.5}, [X]),
    ("Tile", {"repeats": (2, 1, 3)}, [X]),
    *(("CumSum", {"axis": 1, "exclusive": e, "reverse": r}, [X]) for e in (0, 1) for r in (0, 1)),
    ("CumSum", {"axis": 0, "exclusive": 0, "reverse": 0}, [integers(-9, 9, 5, dtype="int32")]),
    *(("Trilu", {"upper": upper, "k": k}, [X]) for upper in (0, 1) for k in (-1, 0, 2)),
]  # fmt: skip

CASES = [*UNARY, *BINARY, *PRODUCTS, *POOLS, *REDUCTIONS, *INDEXING, *MOVEMENT]

# Attributes that ONNX takes as operands, in order behind the tensors; "like" has the first tensor's type.
OPERANDS = {
    "Clip": {"min": "like", "max": "like"},
    **{f"Reduce{name}": {"axes": "vector"} for name in ("Sum", "Mean", "Max", "Min", "Prod")},
    "Reshape": {"shape": "vector"},
    "Expand": {"shape": "vector"},
    "Slice": {"starts": "vector", "ends": "vector", "axes": "vector", "steps": "vector"},
    "Pad": {"pads": "vector", "value": "like"},
    "Tile": {"repeats": "vector"},
    "CumSum": {"axis": "scalar"},
    "Trilu": {"k": "scalar"},
    "TopK": {"k": "vector"},
}


def to_onnx(op, attributes, arrays):
    """A model of one node with the canonical operator's meaning."""
    attributes = dict(attributes)
    inputs = {f"x{i}": array for i, array in enumerate(arrays)}
    order, constants = list(inputs), {}
    if op == "Slice":
        attributes["axes"] = range(arrays[0].ndim)
    for name, kind in OPERANDS.get(op, {}).items():
        order.append(name if name in attributes else "")
        if name in attributes:
            dtype = arrays[0].dtype if kind == "like" else np.int64
            constants[name] = np.asarray(attributes.pop(name), dtype).reshape(
                (-1,) if kind == "vector" else ()
            )
    if op == "OneHot":
        constants["depth"] = np.asarray(attributes.pop("depth"), np.int64)
        order.insert(1, "depth")
    if op == "Reshape":
        attributes["allowzero"] = 1
    if op == "Cast":
        attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(attributes["to"]))
    outputs = [f"y{i}" for i in range(OPERATORS[op].outputs)]
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    graph = helper.make_graph(
        [helper.make_node(op, order, outputs, **attributes)],
        "one",
        declared,
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True), inputs


def by_ort(model, inputs):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, inputs)


def by_reference(model, inputs):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return onnx.reference.ReferenceEvaluator(model).run(None, inputs)


ORACLES = {"onnxruntime": by_ort, "onnx.reference": by_reference}

# Operators whose float64 result an oracle computes with constants or statistics in float32.
ROUGH = {"Erf", "HardSwish", "Gelu", "GroupNormalization"}
# Operators where onnx.reference differs from the formula in the specification.
REFERENCE_IS_WRONG = {"LRN"}


def run(op, attributes, arrays):
    with exact_types():
        results = jax.jit(lambda *arrays: JAX[op](attributes, *arrays))(*arrays)
        return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,))]


def agree(found, expected, tolerance):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{found.shape} and {expected.dtype}{expected.shape}"
    if found.dtype.kind != "f":
        return "" if np.array_equal(found, expected) else f"{found} and {expected}"
    same = np.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if same else f"{found} and {expected}"


def stored(value):
    """What a model file keeps of a float attribute."""
    return float(np.float32(value)) if isinstance(value, float) else value


def answers(op, attributes, arrays):
    """(oracle, results) of every oracle that can run the operator on these types."""
    model, inputs = to_onnx(op, attributes, arrays)
    for name, oracle in ORACLES.items():
        if name == "onnx.reference" and op in REFERENCE_IS_WRONG:
            continue
        try:
            yield name, oracle(model, inputs)
        except Exception:  # not implemented there; a case that nobody answers fails below
            continue


def check(op, attributes, arrays, tolerance):
    expected = list(answers(op, attributes, arrays))
    found = run(op, attributes, arrays)
    assert expected, "no oracle has this operator"
    for oracle, results in expected:
        for mine, theirs in zip(found, results, strict=True):
            difference = agree(mine, np.asarray(theirs), tolerance)
            assert not difference, f"{op} {attributes} against {oracle}: {difference}"


def name_of(case):
    op, attributes, arrays = case
    return f"{op}-{'-'.join(str(v) for v in attributes.values())}-{arrays[0].dtype}".replace(" ", "")


def in_type(arrays, dtype):
    return [x.astype(dtype) if x.dtype == "float32" else x for x in arrays]


FLOAT_CASES = [case for case in CASES if case[2][0].dtype == "float32"]
NO_DOUBLES = {"LRN", "ConvTranspose"}  # no oracle has these (of several groups) in float64


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_against_onnx(case):
    op, attributes, arrays = case
    check(op, {name: stored(value) for name, value in attributes.items()}, arrays, 2e-5)


@pytest.mark.parametrize("case", [case for case in FLOAT_CASES if case[0] not in NO_DOUBLES], ids=name_of)
def test_against_onnx_in_float64(case):
    op, attributes, arrays = case
    attributes = {name: stored(value) for name, value in attributes.items()}
    check(op, attributes, in_type(arrays, "float64"), 1e-7 if op in ROUGH else 1e-12)


@pytest.mark.parametrize("case", [case for case in FLOAT_CASES if case[0] in NO_DOUBLES], ids=name_of)
def test_float64_agrees_with_float32(case):
    op, attributes, arrays = case
    (single,), (double,) = (run(op, attributes, in_type(arrays, dtype)) for dtype in ("float32", "float64"))
    assert double.dtype == "float64"
    np.testing.assert_allclose(single, double, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_types_are_those_of_the_operator_row(case):
    """In every floating type: no silent promotion, and integers as ONNX has them."""
    op, attributes, arrays = case
    attributes = {"alpha": 1.0, "gamma": 1.0, "fmod": 0, "value": 0.0, **attributes}
    allowed = {*OPERATORS[op].attributes, *OPERATORS[op].optional}
    attributes = {name: value for name, value in attributes.items() if name in allowed}
    if any(pad < 0 for pad in attributes.get("pads", ())):
        pytest.skip("canonical pads do not crop")
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        with exact_types():
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_type(arrays, jax.numpy.dtype(dtype))]
            results = jax.eval_shape(lambda *xs: JAX[op](attributes, *xs), *inputs)
        found = [TensorType(x.shape, str(x.dtype)) for x in jax.tree.leaves(results)]
        types = tuple(TensorType(x.shape, str(x.dtype)) for x in inputs)
        assert found == list(infer(op, attributes, types))


def test_every_row_has_a_function_and_every_function_a_row():
    assert JAX.keys() == OPERATORS.keys()


def test_every_function_has_a_case():
    assert {op for op, _, _ in CASES} == JAX.keys() - OWN  # what ONNX lacks: tests/test_random_draws.py


def test_erf_in_float64():
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(run("Erf", {}, [x])[0], [math.erf(v) for v in x], rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lrn_sums_squares_over_neighbouring_channels(size):
    """onnxruntime refuses even sizes: the specification's formula."""
    x = normal(2, 5, 3).astype("float64")
    squares = np.zeros_like(x)
    for c in range(5):
        low, high = max(0, c - (size - 1) // 2), min(4, c + -(-(size - 1) // 2))
        squares[:, c] = (x[:, low : high + 1] ** 2).sum(1)
    expected = x / (1.3 + 0.2 / size * squares) ** 0.6
    found = run("LRN", {"alpha": 0.2, "beta": 0.6, "bias": 1.3, "size": size}, [x])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
