"""The ONNX reader: canonical graphs compute what the models compute, and every refusal names its place.

Oracle: ONNX Runtime without optimizations on the model as it is, against the canonical graph written back as
ONNX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test import __file__ as onnx_backend_test
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.graph import Graph, tensor_source
from parallegg.rewrite.onnx_reader import load
from parallegg.rewrite.operators import OWN
from parallegg.tests.models import OTHERS
from parallegg.tests.onnx_export import export, random_inputs, run, session

DATA = Path(__file__).parent / "data"
LIGHT = Path(onnx_backend_test).parent / "data" / "light"
F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name, shape, dtype=F32):
    return helper.make_tensor_value_info(name, dtype, shape)


def tensors(values):
    return [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


def save(path, nodes, inputs, outputs, weights=None, opset=17, ir=8, **extra):
    """Write a model; `weights` become initializers."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors(weights or {}), **extra)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    path.write_bytes(model.SerializeToString())
    return path


def ints(*values):
    return np.asarray(values, np.int64)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def canonical(path, inputs, shapes=None):
    graph = load(path, shapes)
    return graph, run(graph, inputs, tensor_source(graph))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- real models

MODELS = {
    "gpt2.dynamo": None,
    "gpt2.legacy_dyn": {"input_ids": (8, 16)},
    "bert.dynamo": None,
    "llama.dynamo": None,
    "llama.legacy_dyn": {"input_ids": (8, 16), "attention_mask": (8, 16)},
    "resnet50.legacy": None,
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name):
    path = DATA / f"{name}.onnx"
    graph = load(path, MODELS[name])
    inputs = random_inputs(graph, seed=0)
    if "b" in inputs:  # the attention mask of the models exported by dynamo
        inputs["b"] = np.ones_like(inputs["b"])
    assert_same(run(graph, inputs, tensor_source(graph)), session(str(path)).run(None, inputs))


@pytest.mark.parametrize("sample", OTHERS, ids=lambda sample: sample.name)
def test_other_models(sample):
    graph = sample.graph()
    inputs = random_inputs(graph, seed=0, high=sample.high)
    assert_same(run(graph, inputs, tensor_source(graph)), session(str(sample.path)).run(None, inputs))


@pytest.mark.parametrize("name", sorted(path.stem for path in LIGHT.glob("*.onnx")))
def test_models_without_weights(name):
    graph = load(LIGHT / f"{name}.onnx")
    assert graph.parameters and not graph.constants
    assert all(graph.types[name].floating for name in graph.parameters)


def test_light_model_computes_the_same():
    path = LIGHT / "light_shufflenet.onnx"
    graph = load(path)
    inputs = random_inputs(graph, seed=0)
    assert_same(run(graph, inputs, tensor_source(graph)), session(str(path)).run(None, inputs))


def test_symbolic_gpt2_is_as_small_as_the_static_one():
    static, symbolic = (
        load(DATA / f"gpt2.{name}.onnx", MODELS[f"gpt2.{name}"]) for name in ("dynamo", "legacy_dyn")
    )
    assert len(symbolic.nodes) < 1.2 * len(static.nodes)
    assert max(value.size for value in symbolic.constants.values()) == 16 * 16  # the causal mask


# -------------------------------------------------------------------------------- one operator at a time


def attention():
    shape = (2, 4, 6, 8)
    return (
        "Attention",
        {"is_causal": 1},
        {"Q": floats(*shape), "K": floats(*shape), "V": floats(*shape)},
        {},
        23,
    )


X = floats(2, 3, 4)
IMAGE = floats(2, 4, 6, 6)
# Operator, attributes, fed operands, stored operands, opset.
SINGLE = {
    "softmax-flattens": ("Softmax", {"axis": 1}, {"x": X}, {}, 11),
    "softmax-default-axis": ("Softmax", {}, {"x": X}, {}, 9),
    "log-softmax": ("LogSoftmax", {"axis": 1}, {"x": X}, {}, 13),
    "hardmax-flattens": ("Hardmax", {}, {"x": X}, {}, 11),
    "hardmax": ("Hardmax", {"axis": 1}, {"x": X}, {}, 13),
    "clip-6": ("Clip", {"min": -0.5, "max": 0.25}, {"x": X}, {}, 6),
    "clip-crossed": ("Clip", {}, {"x": X}, {"low": np.float32(1), "high": np.float32(-1)}, 13),
    "clip-high": ("Clip", {}, {"x": X}, {"": None, "high": np.float32(0)}, 13),
    "unsqueeze-attribute": ("Unsqueeze", {"axes": [0, -1]}, {"x": X}, {}, 11),
    "unsqueeze-operand": ("Unsqueeze", {}, {"x": X}, {"axes": ints(-1, 1)}, 13),
    "squeeze": ("Squeeze", {}, {"x": floats(1, 3, 1)}, {}, 13),
    "sum-attribute": ("ReduceSum", {"axes": [-1], "keepdims": 0}, {"x": X}, {}, 11),
    "sum-operand": ("ReduceSum", {}, {"x": X}, {"axes": ints(1)}, 13),
    "sum-noop": ("ReduceSum", {"noop_with_empty_axes": 1}, {"x": X}, {}, 13),
    "mean-operand": ("ReduceMean", {"keepdims": 0}, {"x": X}, {"axes": ints(0, 2)}, 18),
    "l2": ("ReduceL2", {"axes": [1]}, {"x": X}, {}, 13),
    "log-sum-exp": ("ReduceLogSumExp", {"axes": [1], "keepdims": 0}, {"x": X}, {}, 13),
    "gemm": ("Gemm", {"alpha": 0.5, "beta": 2.0, "transB": 1}, {"a": floats(3, 4)},
             {"b": floats(5, 4), "c": floats(5)}, 13),
    "conv-bias-same": ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2], "group": 2}, {"x": IMAGE},
                       {"w": floats(6, 2, 3, 3), "b": floats(6)}, 11),
    "conv-transpose": ("ConvTranspose", {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]},
                       {"x": IMAGE}, {"w": floats(4, 3, 3, 3), "b": floats(3)}, 11),
    "max-pool-ceil": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
                      {"x": IMAGE}, {}, 12),
    "average-pool": ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
                     {"x": IMAGE}, {}, 11),
    "global-pool": ("GlobalAveragePool", {}, {"x": IMAGE}, {}, 9),
    "batch-norm-7": ("BatchNormalization", {"epsilon": 0.01}, {"x": IMAGE},
                     {"s": floats(4), "b": floats(4), "m": floats(4), "v": np.abs(floats(4))}, 7),
    "layer-norm": ("LayerNormalization", {"axis": -2}, {"x": X}, {"s": floats(3, 4), "b": floats(3, 4)}, 17),
    "group-norm-18": ("GroupNormalization", {"num_groups": 2}, {"x": IMAGE},
                      {"s": floats(2), "b": floats(2)}, 18),
    "group-norm-21": ("GroupNormalization", {"num_groups": 2}, {"x": IMAGE},
                      {"s": floats(4), "b": floats(4)}, 21),
    "mean-variance": ("MeanVarianceNormalization", {}, {"x": IMAGE}, {}, 18),
    "lrn": ("LRN", {"size": 3}, {"x": IMAGE}, {}, 13),
    "slice-attributes": ("Slice", {"starts": [1], "ends": [2**31 - 1], "axes": [-1]}, {"x": X}, {}, 9),
    "slice-back": ("Slice", {}, {"x": X}, {"starts": ints(-1, 3), "ends": ints(-(2**40), 0),
                                           "axes": ints(1, 2), "steps": ints(-1, -2)}, 13),
    "slice-empty": ("Slice", {}, {"x": X}, {"starts": ints(2), "ends": ints(1)}, 13),
    "pad-crops": ("Pad", {}, {"x": X}, {"pads": ints(0, -1, 2, 1, 0, -1), "value": np.float32(7)}, 13),
    "pad-axes": ("Pad", {"mode": "edge"}, {"x": X}, {"pads": ints(1, 2), "": None, "axes": ints(-1)}, 18),
    "pad-integers": ("Pad", {}, {"x": ints(1, 2)}, {"pads": ints(1, 2), "value": ints(2**63 - 1)[0]}, 13),
    "expand-both-ways": ("Expand", {}, {"x": floats(3, 1)}, {"shape": ints(2, 1, 4)}, 13),
    "reshape-copies": ("Reshape", {}, {"x": X}, {"shape": ints(0, -1)}, 13),
    "flatten": ("Flatten", {"axis": -1}, {"x": X}, {}, 13),
    "tile": ("Tile", {}, {"x": X}, {"repeats": ints(2, 1, 3)}, 13),
    "sum-many": ("Sum", {}, {"a": X, "b": floats(3, 1), "c": floats(4)}, {}, 13),
    "mean-many": ("Mean", {}, {"a": X, "b": floats(3, 1), "c": floats(4)}, {}, 13),
    "pow-integer": ("Pow", {}, {"x": X}, {"e": ints(2)}, 13),
    "int-div": ("Div", {}, {"a": ints(7, -7, 7, -7), "b": ints(2, 2, -2, -2)}, {}, 14),
    "gather-negative": ("Gather", {"axis": -1}, {"x": X}, {"i": ints(-1, 0)}, 13),
    "one-hot": ("OneHot", {"axis": 1}, {"i": ints(1, -1, 7)}, {"depth": ints(3)[0], "values": floats(2)}, 11),
    "depth-to-space": ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, {"x": IMAGE}, {}, 13),
    "space-to-depth": ("SpaceToDepth", {"blocksize": 2}, {"x": IMAGE}, {}, 13),
    "upsample": ("Upsample", {}, {"x": IMAGE}, {"scales": np.asarray([1, 1, 2, 3], np.float32)}, 9),
    "resize": ("Resize", {}, {"x": IMAGE}, {"": None, " ": None, "sizes": ints(2, 4, 12, 18)}, 13),
    "cast-like": ("CastLike", {}, {"x": X}, {"like": ints(1)}, 15),
    "hard-swish": ("HardSwish", {}, {"x": X}, {}, 14),
    "selu-6": ("Selu", {}, {"x": X}, {}, 6),
    "einsum": ("Einsum", {"equation": "a b c , d c -> a d b"}, {"x": X, "z": floats(5, 4)}, {}, 12),
    "attention": attention(),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_operator(name, tmp_path):
    op, attributes, fed, stored, opset = SINGLE[name]
    operands = [operand.strip() for operand in (*fed, *stored)]
    node = helper.make_node(op, operands, ["y"], "n", **attributes)
    inputs = [info(k, v.shape, helper.np_dtype_to_tensor_dtype(v.dtype)) for k, v in fed.items()]
    weights = {k: v for k, v in stored.items() if v is not None}
    path = save(tmp_path / "m.onnx", [node], inputs, [onnx.ValueInfoProto(name="y")], weights, opset)
    typed = onnx.shape_inference.infer_shapes(onnx.load(path))
    if not typed.graph.output[0].type.HasField("tensor_type"):
        typed.graph.output[0].CopyFrom(info("y", None))
    path.write_bytes(typed.SerializeToString())
    _, found = canonical(path, fed)
    assert_same(found, session(str(path)).run(None, fed))


def test_old_broadcast_is_aligned_by_axis(tmp_path):
    node = helper.make_node("Add", ["x", "b"], ["y"], broadcast=1, axis=1)
    path = save(
        tmp_path / "m.onnx", [node], [info("x", (2, 3, 4)), info("b", (3,))], [info("y", (2, 3, 4))], opset=6
    )
    inputs = {"x": X, "b": floats(3)}
    _, (y,) = canonical(path, inputs)
    np.testing.assert_allclose(y, X + inputs["b"].reshape(3, 1))


def test_split_gives_slices(tmp_path):
    nodes = [helper.make_node("Split", ["x"], ["a", "b", "c"], "cut", axis=-1, num_outputs=3)]
    outputs = [info("a", (2, 3)), info("b", (2, 3)), info("c", (2, 1))]
    path = save(tmp_path / "m.onnx", nodes, [info("x", (2, 7))], outputs, opset=18)
    graph, found = canonical(path, {"x": floats(2, 7)})
    assert [node.name for node in graph.nodes] == ["cut/0", "cut/1", "cut/2"]
    assert_same(found, np.split(floats(2, 7), (3, 6), axis=1))


def test_if_takes_the_constant_branch_and_captures(tmp_path):
    then = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["z"])], "then", [], [info("z", (2, 3))])
    ill = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["z"])], "else", [], [info("z", (2, 3))])
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["rows"]),
        helper.make_node("Equal", ["rows", "two"], ["c"]),
        helper.make_node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=ill),
    ]
    weights = {"w": floats(3), "zero": ints(0)[0], "two": ints(2)[0]}
    path = save(tmp_path / "m.onnx", nodes, [info("x", ("n", 3))], [info("y", ("n", 3))], weights)
    graph, (y,) = canonical(path, {"x": floats(2, 3)}, {"x": (2, 3)})
    assert [node.op for node in graph.nodes] == ["Mul"]
    np.testing.assert_allclose(y, floats(2, 3) * weights["w"])


def test_local_functions_are_inlined(tmp_path):
    opset = [helper.make_opsetid("", 17)]
    body = [helper.make_node("Mul", ["a", "a"], ["b"]), helper.make_node("Relu", ["b"], ["c"])]
    function = helper.make_function("mine", "SquareRelu", ["a"], ["c"], body, opset)
    call = helper.make_node("SquareRelu", ["x"], ["y"], "call", domain="mine")
    graph = helper.make_graph([call], "g", [info("x", (2,))], [info("y", (2,))])
    opsets = [*opset, helper.make_opsetid("mine", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert [node.op for node in load(tmp_path / "m.onnx").nodes] == ["Mul", "Relu"]


HUGE = 2**62
# The operator, its stored operand: sizes that no e-graph and no device can hold.
TOO_LARGE = {
    "tile": ("Tile", ints(4)),
    "pad": ("Pad", ints(HUGE, HUGE)),
    "expand": ("Expand", ints(2**40, 2**40, 4)),
    "filled": ("ConstantOfShape", ints(2**40, 2**40)),
    "filled below zero": ("ConstantOfShape", ints(-2, -3)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_beyond_reason_are_refused_by_name(name, tmp_path):
    op, operand = TOO_LARGE[name]
    fed = [] if op == "ConstantOfShape" else ["x"]
    nodes = [helper.make_node(op, [*fed, "s"], ["y"], "grow"), helper.make_node("Relu", ["y"], ["z"])]
    size = HUGE // 4 if op == "Tile" else 4
    path = save(tmp_path / "m.onnx", nodes, [info("x", (size,))], [info("z", None)], {"s": operand})
    with pytest.raises(UserError, match=r"m\.onnx, node 'grow'"):
        load(path)
    path = save(tmp_path / "m.onnx", nodes[1:], [info("y", (HUGE, 8))], [info("z", None)], {})
    with pytest.raises(UserError, match=r"input 'y': .* is too large"):
        load(path)


# ------------------------------------------------------------------------------------ the backend suite

# Cases of operators without a row, of data-dependent operands, of types we lack are refused; the rest must agree.
BACKEND_PASSES = 817
# onnx.reference sizes these pools wrongly; ONNX Runtime agrees with us.
REFERENCE_LIMITS = {"test_maxpool_2d_same_upper", "test_maxpool_2d_same_lower"}


def backend_graph(model, values, path):
    """The graph of a backend case; operands that must be static are stored where feeding them is refused."""
    refusal = None
    for stored in (lambda v: False, lambda v: v.dtype.kind in "iub" or v.size <= 1, lambda v: True):
        baked = onnx.ModelProto()
        baked.CopyFrom(model)
        pairs = list(zip((value.name for value in model.graph.input), values, strict=False))
        later = [(name, v) for name, v in pairs[1:] if isinstance(v, np.ndarray) and stored(v)]
        baked.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in later)
        path.write_bytes(baked.SerializeToString())
        try:
            return load(path)
        except UserError as error:
            refusal = error
    raise refusal


def close(found, expected):
    for a, b in zip(found, expected, strict=False):
        a, tolerance = np.asarray(a), 1e-3 if b.dtype.itemsize > 2 else 2e-2
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = (a, b) if b.dtype.kind == "b" else (a.astype(np.float64), b.astype(np.float64))
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance / 100, equal_nan=True)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_backend_suite(tmp_path):
    from onnx.backend.test.loader import load_model_tests
    from onnx.reference import ReferenceEvaluator

    passed, failed = 0, []
    for case in load_model_tests(kind="node"):
        if case.model is None or case.data_sets is None or "_expanded" in case.name:
            continue
        inputs, outputs = case.data_sets[0]
        if not all(isinstance(value, np.ndarray) for value in (*inputs, *outputs)):
            continue
        try:
            graph = backend_graph(case.model, inputs, tmp_path / "m.onnx")
        except UserError:
            continue
        if any(node.op in OWN for node in graph.nodes):
            continue  # no two libraries draw the same numbers
        feeds = {value.name: v for value, v in zip(case.model.graph.input, inputs, strict=False)}
        feeds = {name: feeds[name] for name in graph.inputs}
        weight = tensor_source(graph)
        feeds |= {name: np.asarray(weight(name)) for name in (*graph.parameters, *graph.constants)}
        try:
            close(ReferenceEvaluator(export(graph)).run(None, feeds), outputs)
            passed += 1
        except Exception as error:
            failed.append((case.name, " ".join(str(error).split())[:100]))
    assert {name for name, _ in failed} <= REFERENCE_LIMITS, failed
    assert passed >= BACKEND_PASSES


# -------------------------------------------------------------------------------- parameters and outputs


def test_tied_weights_stay_one_parameter(tmp_path):
    nodes = [
        helper.make_node("Identity", ["w"], ["tied"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Transpose", ["tied"], ["t"]),
        helper.make_node("MatMul", ["h", "t"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, [info("x", (2, 3))], [info("y", (2, 3))], {"w": floats(3, 4)})
    graph, _ = canonical(path, {"x": floats(2, 3)})
    assert graph.parameters == ("w",)
    assert [node.op for node in graph.nodes] == ["MatMul", "Transpose", "MatMul"]  # weights are not folded


def test_constants_are_folded_and_merged(tmp_path):
    nodes = [
        *(helper.make_node("Constant", [], [f"c{i}"], value_float=2.0) for i in (0, 1)),
        helper.make_node("Mul", ["x", "c0"], ["a"]),
        helper.make_node("Mul", ["a", "c1"], ["y"]),
    ]
    graph = load(save(tmp_path / "m.onnx", nodes, [info("x", (2,))], [info("y", (2,))]))
    assert list(graph.constants) == ["c0"]


def test_outputs_keep_their_names(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Identity", ["h"], ["y"]),
        helper.make_node("Identity", ["h"], ["z"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Identity", ["w"], ["weight"]),
    ]
    outputs = [info(name, (2,)) for name in ("y", "z", "same", "weight")]
    path = save(tmp_path / "m.onnx", nodes, [info("x", (2,))], outputs, {"w": floats(2)})
    graph, found = canonical(path, {"x": floats(2)})
    assert graph.outputs == ("y", "z", "same", "weight")
    assert_same(found, session(str(path)).run(None, {"x": floats(2)}))


def test_initializers_listed_as_inputs(tmp_path):
    node = helper.make_node("Add", ["x", "w"], ["y"])
    inputs = [info("x", (2,)), info("w", (2,))]
    graph = load(
        save(tmp_path / "m.onnx", [node], inputs, [info("y", (2,))], {"w": floats(2)}, opset=9, ir=3)
    )
    assert (graph.inputs, graph.parameters) == (("x",), ("w",))


def external(tmp_path, location="weights.bin"):
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        [info("x", (3,))],
        [info("y", (3,))],
        {"w": floats(3)},
    )
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "8"), ("length", "12")):
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_read_by_offset(tmp_path):
    path = external(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x" * 8 + floats(3).tobytes())
    np.testing.assert_array_equal(tensor_source(load(path))("w"), floats(3))


@pytest.mark.parametrize(
    ("location", "content", "message"),
    [
        (
            "weights.bin",
            None,
            "the data of tensor 'w' is in 'weights.bin', which cannot be read: No such file",
        ),
        (
            "weights.bin",
            b"12345678abcd",
            "needs 12 bytes at offset 8 of 'weights.bin', which ends after 4 of them",
        ),
        ("../weights.bin", None, "outside the model's folder"),
    ],
)
def test_missing_external_data(tmp_path, location, content, message):
    path = external(tmp_path, location)
    if content:
        (tmp_path / location).write_bytes(content)
    with pytest.raises(UserError) as error:
        tensor_source(load(path))("w")
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------ shapes


def test_one_shape_fixes_a_symbol_everywhere():
    graph = load(DATA / "gpt2.legacy_dyn.onnx", {"input_ids": (4, 8)})
    assert graph.types["attention_mask"].shape == (4, 8)
    assert graph.types["logits"] == TensorType((4, 8, 256), "float32")


def test_a_static_size_can_be_overridden(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"])
    stale = [info("y", (2, 3))]
    path = save(tmp_path / "m.onnx", [node], [info("x", (2, 3))], [info("y", (2, 3))], value_info=stale)
    assert load(path, {"x": (6, 3)}).types["y"].shape == (6, 3)


GPT2 = DATA / "gpt2.legacy_dyn.onnx"
SHAPES = [
    (GPT2, {}, "dimension 'batch' of input 'input_ids', [batch, seq], is open: fix it, for example by "
               "--shape input_ids=8x128"),
    (GPT2, {"ids": (2, 3)}, "--shape ids=…: no such input; the inputs are input_ids, attention_mask"),
    (GPT2, {"input_ids": (2,)}, "--shape input_ids=2: the input has 2 dimensions, [batch, seq], not 1"),
    (GPT2, {"input_ids": (2, 0)}, "--shape input_ids=2x0: every size must be positive"),
    (GPT2, {"input_ids": (2, -1)}, "--shape input_ids=2x-1: every size must be positive"),
    (GPT2, {"input_ids": (2, 8), "attention_mask": (3, 8)},
     "dimension 'batch' is 2 in input 'input_ids', not 3"),
    (DATA / "gpt2.dynamo.onnx", {"a": (4, 16)}, "a size fixed in the graph may contradict --shape a=4x16"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "shapes", "message"), SHAPES)
def test_refused_shapes(path, shapes, message):
    with pytest.raises(UserError) as error:
        load(path, shapes)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------- refused models


def node(op, inputs=("x",), outputs=("y",), **attributes):
    return helper.make_node(op, list(inputs), list(outputs), "here", **attributes)


REFUSED = {
    "data-dependent": (node("NonZero"), "node 'here' (NonZero): the output's shape depends on data"),
    "shape-from-data": (node("Reshape", ("x", "s")), "shape depends on data (tensor 's')"),
    "unknown": (
        node("LSTM", ("x", "w", "w")),
        "no rule knows operator 'LSTM' of domain 'ai.onnx', opset 17; add it",
    ),
    "custom": (
        node("Foo", domain="my.domain"),
        "no rule knows operator 'Foo' of domain 'my.domain', opset 0",
    ),
    "training-mode": (
        node("Dropout", ("x", "", "flag")),
        "node 'here' (Dropout): training_mode depends on data (tensor 'flag')",
    ),
    "undefined": (node("Relu", ("nothing",)), "operand 'nothing' is made by nothing before it"),
    "misfit": (node("Add", ("x", "five")), "shapes (3, 3) and (5,) do not broadcast"),
    "attribute": (node("Concat"), "node 'here' (Concat): the attribute 'axis' is missing"),
    "operand": (node("MatMul"), "node 'here' (MatMul): operand 1 is missing"),
    "condition": (node("If", ("flag",)), "node 'here' (If): the condition depends on data (tensor 'flag')"),
    "wrong-type": (node("Concat", axis="a"), "node 'here' (Concat): "),
    "float8": (node("Cast", to=TensorProto.FLOAT8E4M3FN), "element type FLOAT8E4M3FN is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_nodes(name, tmp_path):
    one, message = REFUSED[name]
    inputs = [info("x", (3, 3)), info("s", (2,), I64), info("flag", (), BOOL)]
    weights = {"w": floats(3), "five": floats(5)}
    path = save(tmp_path / "m.onnx", [one], inputs, [onnx.ValueInfoProto(name="y")], weights)
    with pytest.raises(UserError) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_declared_output_must_agree(tmp_path):
    path = save(tmp_path / "m.onnx", [node("Relu")], [info("x", (2, 3))], [info("y", (2, 4))])
    with pytest.raises(UserError, match=r"output 'y' is declared 2x4, but its nodes make float32\[2,3\]"):
        load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello world", b"\x00" * 100, np.random.default_rng(0).bytes(100), "truncated"],
    ids=["empty", "text", "zeros", "noise", "truncated"],
)
def test_not_a_model(content, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes((DATA / "bert.dynamo.onnx").read_bytes()[:-1000] if content == "truncated" else content)
    with pytest.raises(UserError, match="truncated"):
        load(path)


def test_names_must_be_text(tmp_path):
    path = save(tmp_path / "m.onnx", [node("Relu")], [info("x", (2,))], [info("y", (2,))])
    path.write_bytes(path.read_bytes().replace(b"here", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(UserError, match=r"m\.onnx: damaged: a name in it is no UTF-8 text"):
        load(path)


def test_mutated_models_are_read_or_refused(tmp_path):
    """Whatever a model says, the answer is a graph or a UserError in one line."""
    original = onnx.load(DATA / "gpt2.legacy_dyn.onnx")
    rng = np.random.default_rng(0)
    names = [output for one in original.graph.node for output in one.output]
    for _ in range(60):
        model = onnx.ModelProto()
        model.CopyFrom(original)
        one = model.graph.node[rng.integers(len(model.graph.node))]
        match rng.integers(4):
            case 0:
                one.op_type = model.graph.node[rng.integers(len(model.graph.node))].op_type
            case 1:
                one.input.append(names[rng.integers(len(names))])
            case 2:
                del one.input[:1]
            case 3:
                del one.attribute[:1]
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        try:
            load(tmp_path / "m.onnx", {"input_ids": (2, 8)})
        except UserError as error:
            assert "m.onnx" in str(error) and "\n" not in str(error)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.onnx: cannot be read: No such file"):
        load(tmp_path / "none.onnx")


# ---------------------------------------------------------------------------------------------- the graph


def test_digest_is_the_same_under_any_hash_seed():
    path = str(DATA / "gpt2.dynamo.onnx")
    code = f"from parallegg.rewrite.onnx_reader import load; print(load({path!r}).digest)"

    def digest(seed):
        env = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("2") != ""


X3 = TensorType((3,), "float32")
RELU = Node("n", "Relu", ("x",), ("y",))
BROKEN = [
    ((RELU, RELU), {"x": X3, "y": X3}, "two nodes are named 'n'|'y' is defined twice"),
    ((RELU,), {"x": X3}, "tensor 'y' has no type"),
    ((Node("n", "Relu", ("z",), ("y",)),), {"x": X3, "y": X3}, "reads 'z', which nothing before it defines"),
    ((), {"x": X3}, "output 'y' is not defined"),
]


@pytest.mark.parametrize(("nodes", "types", "message"), BROKEN)
def test_a_graph_checks_itself(nodes, types, message):
    with pytest.raises(ValueError, match=message):
        Graph("g", nodes, ("x",), (), {}, ("y",), types)
