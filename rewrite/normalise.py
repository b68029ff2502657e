"""From ONNX operators of any opset to canonical ones: one small function per operator and behaviour.

In: a `Call`, one ONNX node whose operands have static types.  Out: the tensors that are its outputs, made by
`call.emit`.  `lookup` takes the greatest reviewed `since` that is at most the model's opset; an opset that
changes nothing needs no row.  An operator without a row may still be a function of others (see functions).
A ValueError says what does not fit; the reader adds file and node.
Missing: pooling indices, Resize but by whole factors (nearest), recurrent networks, Loop and Scan, quantisation,
sequences, strings, random operators but Dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..program import TensorType
from .builder import FOLD_BYTES, Builder, Terms
from .graph import fill_value
from .losses import label_weights, negative_log_likelihood, only_valid, valid_labels, weighted_mean
from .model_file import dtype_name
from .operators import broadcast, need
from .random_draws import random_mask
from .statistics import normalised, running

REQUIRED = object()


class Call(Terms):
    """One ONNX node on the way into the graph: typed access to its operands and attributes."""

    def __init__(
        self, builder: Builder, node: onnx.NodeProto, name: str, inputs: Sequence[str], opset: int
    ) -> None:
        super().__init__(builder, name)
        self.node, self.opset = node, opset
        self.inputs = tuple(inputs)  # tensor names, "" where an optional operand is left out
        self.attributes = {a.name: a for a in node.attribute}

    def attribute(self, name: str, default: Any = REQUIRED) -> Any:
        """The attribute's value (strings decoded, lists as tuples)."""
        if name not in self.attributes:
            need(default is not REQUIRED, f"the attribute {name!r} is missing")
            return default
        value = helper.get_attribute_value(self.attributes[name])
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    def has(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] != ""

    def __getitem__(self, i: int) -> str:
        need(self.has(i), f"operand {i} is missing")
        return self.inputs[i]

    def type(self, i: int) -> TensorType:
        return self.builder.types[self[i]]

    def wants(self, i: int) -> bool:
        """Whether the node's i-th output is used under a name."""
        return i < len(self.node.output) and self.node.output[i] != ""

    def static(self, i: int, what: str) -> np.ndarray:
        """The value of an operand that must be known when planning."""
        value = self.builder.static(self[i])
        if value is None:
            raise ValueError(
                f"{what} depends on data (tensor {self[i]!r}); shapes must be known before running"
            )
        return value

    def ints(self, i: int, what: str) -> tuple[int, ...]:
        return tuple(int(v) for v in self.static(i, what).reshape(-1))

    def setting(self, name: str, i: int, since: int, default: Any = None) -> tuple[int, ...] | None:
        """Integers that are the attribute `name` before opset `since` and operand `i` from then on."""
        if self.opset < since:
            value = self.attribute(name, default)
            return (value,) if isinstance(value, int) else value
        return self.ints(i, name) if self.has(i) else default

    def axis(self, axis: int, rank: int) -> int:
        need(-rank <= axis < rank, f"axis {axis} is out of range for {rank} dimensions")
        return axis % rank if rank else 0


Normaliser = Callable[[Call], Any]
NORMALISERS: dict[str, list[tuple[int, Normaliser]]] = {}


def onnx_op(*names: str, since: int = 1) -> Callable[[Normaliser], Normaliser]:
    """Register a function for operators of the standard domain from opset `since` on."""

    def register(function: Normaliser) -> Normaliser:
        for name in names:
            rows = NORMALISERS.setdefault(name, [])
            rows.append((since, function))
            rows.sort(key=lambda row: row[0])
        return function

    return register


def lookup(op: str, opset: int) -> Normaliser | None:
    """The reviewed behaviour of `op` at `opset`, if there is one."""
    found = None
    for since, function in NORMALISERS.get(op, ()):
        if since <= opset:
            found = function
    return found


def _single(value: float) -> float:
    """ONNX attributes are float32."""
    return float(np.float32(value))


# ---------------------------------------------------------------------------------------- elementwise

UNARY = (
    "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Tan",
    "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Sigmoid", "Relu", "Erf", "Softplus", "Softsign",
    "Not", "IsNaN", "HardSwish", "Mish",
)  # fmt: skip
PARAMETRIC: dict[str, dict[str, Any]] = {  # attributes with their defaults
    "Gelu": {"approximate": "none"},
    "LeakyRelu": {"alpha": 0.01},
    "Elu": {"alpha": 1.0},
    "Celu": {"alpha": 1.0},
    "ThresholdedRelu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "Selu": {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    "IsInf": {"detect_negative": 1, "detect_positive": 1},
}
BROADCASTING = ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor", "Equal", "Less", "Greater")


@onnx_op(*UNARY)
def _unary(call: Call) -> str:
    return call.emit(call.node.op_type, call[0])


@onnx_op(*PARAMETRIC)
def _parametric(call: Call) -> str:
    defaults = PARAMETRIC[call.node.op_type]
    values = {n: call.attribute(n, _single(d) if isinstance(d, float) else d) for n, d in defaults.items()}
    return call.emit(call.node.op_type, call[0], **values)


@onnx_op("Selu")
def _selu_1(call: Call) -> str:
    alpha, gamma = call.attribute("alpha", _single(1.6732)), call.attribute("gamma", _single(1.0507))
    return call.emit("Selu", call[0], alpha=alpha, gamma=gamma)


onnx_op("Selu", since=6)(_parametric)


@onnx_op(*BROADCASTING, since=7)
@onnx_op("LessOrEqual", "GreaterOrEqual", "PRelu", since=7)
def _binary(call: Call) -> str:
    return call.emit(call.node.op_type, call[0], call[1])


def _aligned(call: Call) -> str:
    """Operand B of an old binary operator: `axis` says which dimension of A its first one meets."""
    a, b = call.type(0), call.type(1)
    if not call.attribute("broadcast", 0):
        need(
            a.shape == b.shape,
            f"shapes {a.shape} and {b.shape} differ and the attribute 'broadcast' is not set",
        )
        return call[1]
    axis = call.axis(call.attribute("axis", a.rank - b.rank), max(a.rank, 1)) if b.rank else a.rank
    trailing = a.rank - axis - b.rank
    need(trailing >= 0, f"shape {b.shape} at axis {axis} does not fit {a.shape}")
    return call.reshape(call[1], (*b.shape, *(1,) * trailing), label="align")


@onnx_op(*BROADCASTING)
def _binary_1(call: Call) -> str:
    return call.emit(call.node.op_type, call[0], _aligned(call))


@onnx_op("Pow")
def _pow_1(call: Call) -> str:
    return call.emit("Pow", call[0], _aligned(call))


@onnx_op("Pow", since=7)
def _pow(call: Call) -> str:
    base, exponent = call.type(0), call.type(1)
    power = call[1]
    if base.floating and exponent.dtype != base.dtype:
        power = call.emit("Cast", power, label="exponent", to=base.dtype)
    return call.emit("Pow", call[0], power)


@onnx_op("PRelu")
def _prelu_1(call: Call) -> str:
    x, slope = call.type(0), call.type(1)  # one slope, or one per channel
    if slope.rank == 1 and slope.size > 1 and x.rank > 1:
        aligned = call.reshape(call[1], (slope.size, *(1,) * (x.rank - 2)), label="align")
        return call.emit("PRelu", call[0], aligned)
    return call.emit("PRelu", call[0], call[1])


@onnx_op("Mod")
def _mod(call: Call) -> str:
    fmod = call.attribute("fmod", 0)
    need(
        fmod or not call.type(0).floating or call.opset >= 28, "floating operands need fmod=1 before opset 28"
    )
    return call.emit("Mod", call[0], call[1], fmod=fmod)


@onnx_op("Sum", "Max", "Min")
def _chain(call: Call) -> str:
    op = {"Sum": "Add"}.get(call.node.op_type, call.node.op_type)
    total = call[0]
    for i in range(1, len(call.inputs)):
        label = "" if i == len(call.inputs) - 1 else str(i)
        total = call.emit(op, total, call[i], label=label)
    return total


@onnx_op("Mean")
def _mean(call: Call) -> str:
    total = call[0]
    for i in range(1, len(call.inputs)):
        total = call.emit("Add", total, call[i], label=f"sum{i}")
    count = call.constant(len(call.inputs), call.type(0).dtype, "count")
    return call.emit("Div", total, count)


@onnx_op("Where")
def _where(call: Call) -> str:
    return call.emit("Where", call[0], call[1], call[2])


_LOWEST, _HIGHEST = (float(bound) for bound in (np.finfo(np.float32).min, np.finfo(np.float32).max))


@onnx_op("Clip")
def _clip_1(call: Call) -> str:
    low, high = call.attribute("min", _LOWEST), call.attribute("max", _HIGHEST)
    bounds = {k: v for k, v, default in (("min", low, _LOWEST), ("max", high, _HIGHEST)) if v != default}
    return call.emit("Clip", call[0], **bounds)


@onnx_op("Clip", since=11)
def _clip(call: Call) -> str:
    bounds: dict[str, Any] = {}
    for i, name in ((1, "min"), (2, "max")):
        if call.has(i):
            value = call.builder.known(call[i])
            if value is None:
                return _clip_by_data(call)
            bounds[name] = value.reshape(()).item()
    return call.emit("Clip", call[0], **bounds) if bounds else call[0]


def _clip_by_data(call: Call) -> str:
    x = call.emit("Max", call[0], call[1], label="low") if call.has(1) else call[0]
    return call.emit("Min", x, call[2]) if call.has(2) else x


@onnx_op("Cast")
def _cast_1(call: Call) -> str:
    return call.emit("Cast", call[0], to=dtype_name(TensorProto.DataType.Value(call.attribute("to"))))


@onnx_op("Cast", since=6)
def _cast(call: Call) -> str:
    return call.emit("Cast", call[0], to=dtype_name(call.attribute("to")))


@onnx_op("CastLike")
def _cast_like(call: Call) -> str:
    return call.emit("Cast", call[0], to=call.type(1).dtype)


@onnx_op("Identity")
def _identity(call: Call) -> str:
    return call[0]


@onnx_op("Dropout")
def _dropout_1(call: Call) -> tuple[str, ...]:
    if call.attribute("is_test", 0):
        return _no_dropout(call)
    return _random_dropout(call, call.attribute("ratio", 0.5))


@onnx_op("Dropout", since=7)
def _dropout_7(call: Call) -> tuple[str, ...]:
    return _no_dropout(call)  # nothing tells training


@onnx_op("Dropout", since=12)
def _dropout(call: Call) -> tuple[str, ...]:
    if call.has(2) and call.static(2, "training_mode").any():
        return _random_dropout(call, call.static(1, "ratio").reshape(()).item() if call.has(1) else 0.5)
    return _no_dropout(call)


def _random_dropout(call: Call, ratio: float) -> tuple[str, ...]:
    """Each element with probability `ratio` 0, else divided by 1 - ratio."""
    need(0 <= ratio < 1, f"ratio {ratio:g} does not lie in [0, 1)")
    if ratio == 0:
        return _no_dropout(call)
    x, dtype = call.type(0), call.type(0).dtype
    kept = random_mask(call, x.shape, ratio, call.attribute("seed", 0), "mask")
    scaled = call.emit("Mul", call[0], call.constant(1 / (1 - ratio), dtype, "scale"), label="scaled")
    y = call.emit("Where", kept, scaled, call.constant(0, dtype, "zero"))
    return (y, kept) if call.opset >= 10 else (y, call.emit("Cast", kept, label="mask/wide", to=dtype))


def _no_dropout(call: Call) -> tuple[str, ...]:
    if not call.wants(1):
        return (call[0],)
    x = call.type(0)  # the mask was of the data's type before opset 10
    dtype = "bool" if call.opset >= 10 else x.dtype
    return call[0], call.builder.constant(
        np.broadcast_to(np.ones((), np.dtype(dtype)), x.shape), f"{call.name}/mask"
    )


# ------------------------------------------------------------------------------------------- products


@onnx_op("MatMul")
def _matmul(call: Call) -> str:
    return call.emit("MatMul", call[0], call[1])


@onnx_op("Gemm")
def _gemm(call: Call) -> str:
    """alpha * A' B' + beta * C as separate nodes."""
    trans_a, trans_b = call.attribute("transA", 0), call.attribute("transB", 0)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if trans_a or trans_b:
        y = call.emit("Gemm", call[0], call[1], transA=trans_a, transB=trans_b)
    else:
        need(call.type(0).rank == 2 == call.type(1).rank, "both operands must be matrices")
        y = call.emit("MatMul", call[0], call[1])
    dtype = call.type(0).dtype
    if alpha != 1:
        y = call.emit("Mul", y, call.constant(alpha, dtype, "alpha"), label="scale")
    if not call.has(2) or beta == 0:
        return y
    c, shape = call[2], call.shape_of(y)
    if beta != 1:
        c = call.emit("Mul", c, call.constant(beta, dtype, "beta"), label="scale_bias")
    need(broadcast(call.shape_of(c), shape) == shape, f"C {call.shape_of(c)} does not broadcast to {shape}")
    return call.emit("Add", y, c, label="bias")


@onnx_op("Einsum")
def _einsum(call: Call) -> str:
    return call.emit("Einsum", *call.inputs, equation=call.attribute("equation").replace(" ", ""))


# ---------------------------------------------------------------------------------- windows: Conv and pools


def _window(call: Call, kernel: Sequence[int]) -> dict[str, Any]:
    """strides, pads and dilations, every automatic padding resolved."""
    n = len(kernel)
    sizes = call.type(0).shape[2:]
    need(len(sizes) == n, f"kernel {tuple(kernel)} does not fit the input {call.type(0)}")
    strides, dilations = call.attribute("strides", (1,) * n), call.attribute("dilations", (1,) * n)
    need(len(strides) == n and len(dilations) == n, f"strides and dilations need {n} entries")
    mode = call.attribute("auto_pad", "NOTSET")
    need(all(s > 0 for s in strides), f"strides {strides} are not positive")
    if mode in ("NOTSET", ""):
        pads = call.attribute("pads", (0,) * 2 * n)
    elif mode == "VALID":
        pads = (0,) * 2 * n
    else:
        windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        counts = [-(-size // s) for size, s in zip(sizes, strides, strict=True)]
        total = [
            max(0, (c - 1) * s + w - z) for c, s, w, z in zip(counts, strides, windows, sizes, strict=True)
        ]
        pads = _halves(total, mode)
    return {"strides": strides, "pads": pads, "dilations": dilations}


def _halves(total: Sequence[int], mode: str) -> tuple[int, ...]:
    """Begin and end pads; SAME_UPPER puts the odd one at the end, SAME_LOWER at the beginning."""
    need(mode in ("SAME_UPPER", "SAME_LOWER"), f"auto_pad {mode!r} is not known")
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (*small, *large) if mode == "SAME_UPPER" else (*large, *small)


def _add_channel_bias(call: Call, y: str, bias: int) -> str:
    if not call.has(bias):
        return y
    b = call.type(bias)
    column = call.reshape(call[bias], (b.size, *(1,) * (len(call.shape_of(y)) - 2)), label="bias_column")
    return call.emit("Add", y, column, label="bias")


@onnx_op("Conv")
def _conv(call: Call) -> str:
    kernel = call.type(1).shape[2:]
    declared = call.attribute("kernel_shape", kernel)
    need(declared == kernel, f"kernel_shape {declared} contradicts the weight {call.type(1)}")
    y = call.emit("Conv", call[0], call[1], group=call.attribute("group", 1), **_window(call, kernel))
    return _add_channel_bias(call, y, 2)


@onnx_op("ConvTranspose")
def _conv_transpose(call: Call) -> str:
    kernel, sizes = call.type(1).shape[2:], call.type(0).shape[2:]
    n = len(kernel)
    strides, dilations = call.attribute("strides", (1,) * n), call.attribute("dilations", (1,) * n)
    extra = call.attribute("output_padding", (0,) * n)
    mode = call.attribute("auto_pad", "NOTSET")
    target = call.attribute("output_shape", None)
    if target is None and mode.startswith("SAME"):
        target = tuple(z * s for z, s in zip(sizes, strides, strict=True))
    if target is not None:
        grown = zip(sizes, strides, extra, kernel, dilations, target[-n:], strict=True)
        total = [s * (z - 1) + e + (k - 1) * d + 1 - t for z, s, e, k, d, t in grown]
        # The specification gives NOTSET the same split as SAME_LOWER.
        pads = _halves(total, "SAME_UPPER" if mode == "SAME_UPPER" else "SAME_LOWER")
    else:
        pads = call.attribute("pads", (0,) * 2 * n) if mode in ("NOTSET", "") else (0,) * 2 * n
    window = {"strides": strides, "pads": pads, "dilations": dilations, "output_padding": extra}
    y = call.emit("ConvTranspose", call[0], call[1], group=call.attribute("group", 1), **window)
    return _add_channel_bias(call, y, 2)


def _pool(call: Call) -> dict[str, Any]:
    kernel = call.attribute("kernel_shape")
    automatic = call.attribute("auto_pad", "NOTSET") not in ("NOTSET", "")
    ceil = 0 if automatic else call.attribute("ceil_mode", 0)
    return {"kernel_shape": kernel, **_window(call, kernel), "ceil_mode": ceil}


@onnx_op("MaxPool")
def _max_pool(call: Call) -> str:
    need(not call.wants(1), "the second output (indices) is not supported")
    return call.emit("MaxPool", call[0], **_pool(call))


@onnx_op("AveragePool")
def _average_pool(call: Call) -> str:
    return call.emit(
        "AveragePool", call[0], **_pool(call), count_include_pad=call.attribute("count_include_pad", 0)
    )


@onnx_op("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> str:
    op = "ReduceMean" if call.node.op_type == "GlobalAveragePool" else "ReduceMax"
    return call.emit(op, call[0], axes=tuple(range(2, call.type(0).rank)), keepdims=1)


# -------------------------------------------------------------------------- reductions and normalisations


def _axes(call: Call, since: int) -> tuple[int, ...] | None:
    """The axes to reduce; None when nothing is to be reduced."""
    rank = call.type(0).rank
    axes = call.setting("axes", 1, since)
    if not axes:
        return None if call.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({call.axis(axis, rank) for axis in axes}))


def _reduction(name: str, since: int, compose: Callable[[Call, tuple[int, ...], int], str]) -> None:
    """Register a reduction whose axes are an attribute before opset `since` and an operand from then on."""

    def normaliser(call: Call) -> str:
        axes = _axes(call, since)
        # An empty reduction still applies what the composition does to single elements.
        return compose(call, () if axes is None else axes, call.attribute("keepdims", 1))

    onnx_op(name)(normaliser)


def _plain(op: str) -> Callable[[Call, tuple[int, ...], int], str]:
    def compose(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
        if not axes:
            return call[0]
        if call.type(0).dtype == "bool":  # ReduceMax and ReduceMin since opset 20
            wide = call.emit("Cast", call[0], label="wide", to="int32")
            reduced = call.emit(op, wide, label="reduce", axes=axes, keepdims=keepdims)
            return call.emit("Cast", reduced, to="bool")
        return call.emit(op, call[0], axes=axes, keepdims=keepdims)

    return compose


def _sum(call: Call, x: str, axes: tuple[int, ...], keepdims: int, label: str = "sum") -> str:
    return call.emit("ReduceSum", x, label=label, axes=axes, keepdims=keepdims) if axes else x


def _sum_square(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
    return _sum(call, call.emit("Mul", call[0], call[0], label="square"), axes, keepdims)


def _l1(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
    return _sum(call, call.emit("Abs", call[0], label="abs"), axes, keepdims)


def _l2(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
    return _as_float(call, "Sqrt", _sum_square(call, axes, keepdims))


def _log_sum(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
    return _as_float(call, "Log", _sum(call, call[0], axes, keepdims))


def _log_sum_exp(call: Call, axes: tuple[int, ...], keepdims: int) -> str:
    """max + log sum exp(x - max), with a maximum of -inf replaced by 0."""
    if not axes:
        return call[0]
    top = call.emit("ReduceMax", call[0], label="max", axes=axes, keepdims=1)
    if call.type(0).floating:
        top = call.emit("Clip", top, label="finite", min=_lowest(call.type(0).dtype))
    small = call.emit("Sub", call[0], top, label="shift")
    total = _sum(call, _as_float(call, "Exp", small, "exp"), axes, keepdims)
    if not keepdims:
        top = call.reshape(top, call.shape_of(total), label="squeeze")
    return call.emit("Add", _as_float(call, "Log", total, "log"), top)


def _lowest(dtype: str) -> float:
    """The most negative finite value, or nearly."""
    return {"float16": -65504.0, "bfloat16": -3e38, "float64": float(np.finfo(np.float64).min)}.get(
        dtype, _LOWEST
    )


def _as_float(call: Call, op: str, x: str, label: str = "") -> str:
    """A floating function of a tensor that may be integer: through float64, back by truncation."""
    dtype = call.dtype_of(x)
    if call.builder.types[x].floating:
        return call.emit(op, x, label=label)
    wide = call.emit("Cast", x, label="wide", to="float64")
    return call.emit("Cast", call.emit(op, wide, label=label or op), label="narrow", to=dtype)


for _name in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
    _reduction(_name, 18, _plain(_name))
_reduction("ReduceSum", 13, _plain("ReduceSum"))
_reduction("ReduceSumSquare", 18, _sum_square)
_reduction("ReduceL1", 18, _l1)
_reduction("ReduceL2", 18, _l2)
_reduction("ReduceLogSum", 18, _log_sum)
_reduction("ReduceLogSumExp", 18, _log_sum_exp)


@onnx_op("Softmax", "LogSoftmax", since=13)
def _softmax(call: Call) -> str:
    return call.emit(
        call.node.op_type, call[0], axis=call.axis(call.attribute("axis", -1), call.type(0).rank)
    )


def _flattened(call: Call, apply: Callable[[str, int], str]) -> str:
    """Before opset 13 an axis meant it and all behind it, taken together."""
    x = call.type(0)
    axis = call.axis(call.attribute("axis", 1), x.rank)
    joint = call.reshape(call[0], (*x.shape[:axis], math.prod(x.shape[axis:])), label="flatten")
    return call.reshape(apply(joint, axis), x.shape, label="unflatten")


@onnx_op("Softmax", "LogSoftmax")
def _softmax_1(call: Call) -> str:
    return _flattened(call, lambda x, axis: call.emit(call.node.op_type, x, axis=axis))


def _hardmax_along(call: Call, x: str, axis: int) -> str:
    dtype = call.dtype_of(x)
    best = call.emit("ArgMax", x, label="argmax", axis=axis, keepdims=0, select_last_index=0)
    return call.emit(
        "OneHot", best, call.constant((0, 1), dtype, "values"), axis=axis, depth=call.shape_of(x)[axis]
    )


@onnx_op("Hardmax")
def _hardmax_1(call: Call) -> str:
    return _flattened(call, lambda x, axis: _hardmax_along(call, x, axis))


@onnx_op("Hardmax", since=13)
def _hardmax(call: Call) -> str:
    return _hardmax_along(call, call[0], call.axis(call.attribute("axis", -1), call.type(0).rank))


@onnx_op("LayerNormalization")
def _layer_norm(call: Call) -> tuple[str, ...]:
    x = call.type(0)
    axis = call.axis(call.attribute("axis", -1), x.rank)
    epsilon = call.attribute("epsilon", _single(1e-5))
    y = call.emit("LayerNormalization", call[0], call[1], axis=axis, epsilon=epsilon)
    if call.has(2):
        y = call.emit("Add", y, call[2], label="bias")
    if not (call.wants(1) or call.wants(2)):
        return (y,)
    over = {"axes": tuple(range(axis, x.rank)), "keepdims": 1}
    mean = call.emit("ReduceMean", call[0], label="mean", **over)
    centred = call.emit("Sub", call[0], mean, label="centred")
    variance = call.emit(
        "ReduceMean", call.emit("Mul", centred, centred, label="square"), label="variance", **over
    )
    shifted = call.emit("Add", variance, call.constant(epsilon, x.dtype, "epsilon"), label="shifted")
    return y, mean, call.emit("Reciprocal", call.emit("Sqrt", shifted, label="deviation"), label="inverse")


@onnx_op("RMSNormalization")
def _rms_norm(call: Call) -> str:
    axis = call.axis(call.attribute("axis", -1), call.type(0).rank)
    epsilon = call.attribute("epsilon", _single(1e-5))
    return call.emit("RMSNormalization", call[0], call[1], axis=axis, epsilon=epsilon)


def _batch_norm_inference(call: Call) -> str:
    """By given statistics."""
    need(call.attribute("spatial", 1), "BatchNormalization per activation (spatial=0) is not supported")
    need(not any(call.wants(i) for i in range(1, 5)), "statistics are results in training mode only")
    operands = [call[i] for i in range(5)]
    return call.emit("BatchNormalization", *operands, epsilon=call.attribute("epsilon", _single(1e-5)))


def _batch_norm_training(call: Call) -> tuple[str, ...]:
    """By the batch's own statistics; results are y, both running averages, then (before opset 14) both statistics."""
    need(call.attribute("spatial", 1), "BatchNormalization per activation (spatial=0) is not supported")
    need(call.type(0).rank >= 2, f"the input needs batch and channels, got {call.type(0)}")
    channels = call.type(0).shape[1:2]
    need(
        all(call.type(i).shape == channels for i in range(1, 5)),
        f"scale, bias, mean and variance need {channels}",
    )
    need(call.type(0).size > 0, "an empty batch has no statistics")
    momentum = call.attribute("momentum", _single(0.9))
    y, *measured = normalised(call, call[0], call[1], call[2], call.attribute("epsilon", _single(1e-5)))
    averages = []
    for i, fresh, label in zip((3, 4), measured, ("running_mean", "running_var"), strict=True):
        call.builder.measure(call[i], fresh, momentum)
        averages.append(running(call, call[i], fresh, momentum, label))
    return y, *averages, *measured


@onnx_op("BatchNormalization")
def _batch_norm_1(call: Call) -> str | tuple[str, ...]:
    if call.attribute("is_test", 0):
        return _batch_norm_inference(call)
    text = "is_test is not set, so this is training mode, but the statistics are no results: set it for inference"
    need(any(call.wants(i) for i in range(1, 5)), text)
    return _batch_norm_training(call)


@onnx_op("BatchNormalization", since=7)
def _batch_norm_7(call: Call) -> str | tuple[str, ...]:
    """Training is told by the number of results."""
    training = any(call.wants(i) for i in range(1, 5))
    return _batch_norm_training(call) if training else _batch_norm_inference(call)


@onnx_op("BatchNormalization", since=14)
def _batch_norm(call: Call) -> str | tuple[str, ...]:
    if call.attribute("training_mode", 0):
        return _batch_norm_training(call)
    return _batch_norm_inference(call)


@onnx_op("InstanceNormalization")
def _instance_norm(call: Call) -> str:
    epsilon = call.attribute("epsilon", _single(1e-5))
    return call.emit("InstanceNormalization", call[0], call[1], call[2], epsilon=epsilon)


@onnx_op("GroupNormalization", since=21)
def _group_norm(call: Call) -> str:
    return _group_norm_of(call, call[1], call[2])


@onnx_op("GroupNormalization", since=18)
def _group_norm_18(call: Call) -> str:
    """Scale and bias were per group, not per channel."""
    groups, channels = call.attribute("num_groups"), call.type(0).shape[1]
    need(channels % groups == 0, f"{groups} groups do not divide {channels} channels")
    wide = []
    for i in (1, 2):
        column = call.reshape(call[i], (groups, 1), label=f"column{i}")
        spread = call.emit("Expand", column, label=f"spread{i}", shape=(groups, channels // groups))
        wide.append(call.reshape(spread, (channels,), label=f"channels{i}"))
    return _group_norm_of(call, *wide)


def _group_norm_of(call: Call, scale: str, bias: str) -> str:
    epsilon = call.attribute("epsilon", _single(1e-5))
    groups = call.attribute("num_groups")
    return call.emit("GroupNormalization", call[0], scale, bias, epsilon=epsilon, num_groups=groups)


@onnx_op("LRN")
def _lrn(call: Call) -> str:
    defaults = {"alpha": _single(1e-4), "beta": 0.75, "bias": 1.0}
    values = {name: call.attribute(name, default) for name, default in defaults.items()}
    return call.emit("LRN", call[0], size=call.attribute("size"), **values)


# ---------------------------------------------------------------------------------------------- losses


@onnx_op("SoftmaxCrossEntropyLoss", since=12)
def _softmax_cross_entropy(call: Call) -> tuple[str, ...]:
    need(call.type(0).rank >= 2, f"the scores need batch and classes, got {call.type(0)}")
    logp = call.emit("LogSoftmax", call[0], label="log_prob", axis=1)
    return _label_loss(call, logp), logp


@onnx_op("NegativeLogLikelihoodLoss", since=12)
def _negative_log_likelihood(call: Call) -> str:
    need(call.type(0).rank >= 2, f"the input needs batch and classes, got {call.type(0)}")
    return _label_loss(call, call[0])


def _label_loss(call: Call, logp: str) -> str:
    """The function bodies move the classes last and gather; here every dimension stays, and may be split."""
    scores, labels = call.type(0), call.type(1)
    expected = (scores.shape[0], *scores.shape[2:])
    need(labels.shape == expected, f"labels of {scores} must have shape {expected}, got {labels.shape}")
    weights = label_weights(call, call[2], call[1], scores.shape, 1) if call.has(2) else None
    ignore = call.attribute("ignore_index", None)
    valid = None if ignore is None else valid_labels(call, call[1], ignore)
    how = call.attribute("reduction", "mean")
    need(how in ("none", "sum", "mean"), f"reduction {how!r} is not known")
    losses = negative_log_likelihood(call, logp, call[1], 1, label="each")
    if how == "mean":
        return weighted_mean(call, losses, weights, valid)
    if weights is not None:
        losses = call.emit("Mul", losses, weights, label="weighted")
    losses = only_valid(call, losses, valid, "kept")
    axes = tuple(range(len(expected)))
    return losses if how == "none" else call.emit("ReduceSum", losses, axes=axes, keepdims=0)


# ------------------------------------------------------------------------------------ gather and scatter


@onnx_op("Gather", "GatherElements")
def _gather(call: Call) -> str:
    return call.emit(
        call.node.op_type, call[0], call[1], axis=call.axis(call.attribute("axis", 0), call.type(0).rank)
    )


@onnx_op("GatherND")
def _gather_nd(call: Call) -> str:
    return call.emit("GatherND", call[0], call[1], batch_dims=call.attribute("batch_dims", 0))


@onnx_op("Scatter", "ScatterElements")
def _scatter_elements(call: Call) -> str:
    axis = call.axis(call.attribute("axis", 0), call.type(0).rank)
    reduction = call.attribute("reduction", "none")
    return call.emit("ScatterElements", call[0], call[1], call[2], axis=axis, reduction=reduction)


@onnx_op("ScatterND")
def _scatter_nd(call: Call) -> str:
    return call.emit("ScatterND", call[0], call[1], call[2], reduction=call.attribute("reduction", "none"))


@onnx_op("OneHot")
def _one_hot(call: Call) -> str:
    indices = call.type(0)
    (depth,) = call.ints(1, "depth")
    axis = call.axis(call.attribute("axis", -1), indices.rank + 1)
    where = call.emit("Cast", call[0], label="indices", to="int64") if indices.floating else call[0]
    return call.emit("OneHot", where, call[2], axis=axis, depth=depth)


@onnx_op("ArgMax", "ArgMin")
def _arg(call: Call) -> str:
    axis = call.axis(call.attribute("axis", 0), call.type(0).rank)
    last = call.attribute("select_last_index", 0)
    keep = call.attribute("keepdims", 1)
    return call.emit(call.node.op_type, call[0], axis=axis, keepdims=keep, select_last_index=last)


@onnx_op("TopK")
def _top_k(call: Call) -> tuple[str, ...]:
    k = call.setting("k", 1, since=10)
    if k is None or len(k) != 1:
        raise ValueError("k must be one number")
    axis = call.axis(call.attribute("axis", -1), call.type(0).rank)
    largest, order = call.attribute("largest", 1), call.attribute("sorted", 1)
    return call.emit_all("TopK", call[0], k=k[0], axis=axis, largest=largest, sorted=order)


# ------------------------------------------------------------------------------------------- movement


@onnx_op("Transpose")
def _transpose(call: Call) -> str:
    rank = call.type(0).rank
    return call.emit("Transpose", call[0], perm=call.attribute("perm", tuple(reversed(range(rank)))))


@onnx_op("Reshape")
def _reshape(call: Call) -> str:
    x = call.type(0)
    target = call.setting("shape", 1, since=5)
    need(target is not None, "the target shape is missing")
    shape = list(target or ())
    if not call.attribute("allowzero", 0):
        for d, size in enumerate(shape):
            if size == 0:
                need(d < x.rank, f"shape {tuple(shape)} copies dimension {d}, which {x} lacks")
                shape[d] = x.shape[d]
    if -1 in shape:
        rest = -math.prod(shape)
        need(
            shape.count(-1) == 1 and rest != 0 and x.size % rest == 0,
            f"cannot reshape {x} to {tuple(target or ())}",
        )
        shape[shape.index(-1)] = x.size // rest
    return call.reshape(call[0], shape)


@onnx_op("Flatten")
def _flatten(call: Call) -> str:
    shape = call.type(0).shape
    axis = call.attribute("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    need(0 <= axis <= len(shape), f"axis {axis} is out of range for {len(shape)} dimensions")
    return call.reshape(call[0], (math.prod(shape[:axis]), math.prod(shape[axis:])))


@onnx_op("Squeeze")
def _squeeze(call: Call) -> str:
    x = call.type(0)
    axes = call.setting("axes", 1, since=13)
    if axes is None:
        return call.reshape(call[0], (size for size in x.shape if size != 1))
    gone = {call.axis(axis, x.rank) for axis in axes}
    need(all(x.shape[d] == 1 for d in gone), f"axes {axes} of {x} are not all of size 1")
    return call.reshape(call[0], (size for d, size in enumerate(x.shape) if d not in gone))


@onnx_op("Unsqueeze")
def _unsqueeze(call: Call) -> str:
    x = call.type(0)
    axes = call.setting("axes", 1, since=13)
    need(axes is not None, "the axes are missing")
    rank = x.rank + len(axes or ())
    new = {call.axis(axis, rank) for axis in axes or ()}
    need(len(new) == len(axes or ()), f"axes {axes} repeat one")
    sizes = iter(x.shape)
    return call.reshape(call[0], (1 if d in new else next(sizes) for d in range(rank)))


@onnx_op("Expand")
def _expand(call: Call) -> str:
    return call.emit("Expand", call[0], shape=broadcast(call.type(0).shape, call.ints(1, "the shape")))


@onnx_op("Concat")
def _concat(call: Call) -> str:
    axis = call.attribute("axis", 1 if call.opset < 4 else REQUIRED)
    inputs = [call[i] for i in range(len(call.inputs))]
    return call.emit("Concat", *inputs, axis=call.axis(axis, call.type(0).rank))


@onnx_op("Slice")
def _slice_1(call: Call) -> str:
    starts, ends = call.attribute("starts"), call.attribute("ends")
    return _slice_by(call, starts, ends, call.attribute("axes", None), None)


@onnx_op("Slice", since=10)
def _slice(call: Call) -> str:
    axes = call.ints(3, "axes") if call.has(3) else None
    steps = call.ints(4, "steps") if call.has(4) else None
    return _slice_by(call, call.ints(1, "starts"), call.ints(2, "ends"), axes, steps)


def _slice_by(call: Call, starts, ends, axes, steps) -> str:
    shape = call.type(0).shape
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    need(len(starts) == len(ends) == len(axes) == len(steps), "starts, ends, axes and steps differ in length")
    bounds = [(0, size, 1) for size in shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        need(step != 0, "a step is zero")
        axis = call.axis(axis, len(shape))
        bounds[axis] = slice_bounds(shape[axis], start, end, step)
    return call.emit(
        "Slice", call[0], **dict(zip(("starts", "ends", "steps"), _columns(bounds), strict=True))
    )


def _columns(bounds: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(b[i] for b in bounds) for i in range(3))


def slice_bounds(size: int, start: int, end: int, step: int) -> tuple[int, int, int]:
    """ONNX bounds of one dimension in the canonical convention (see operators)."""
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    if step > 0:
        start = min(max(start, 0), size)
        return start, min(max(end, start), size), step
    if size == 0:
        return 0, 0, step
    start = min(max(start, 0), size - 1)
    end = min(max(end, -1), size - 1)
    return start, -size - 1 if end == -1 else end, step


@onnx_op("Split")
def _split(call: Call) -> tuple[str, ...]:
    x = call.type(0)
    axis = call.axis(call.attribute("axis", 0), x.rank)
    size, parts = x.shape[axis], len(call.node.output)
    sizes = call.setting("split", 1, since=13)
    if sizes is None:
        chunk = -(-size // parts)  # the last part is smaller since opset 18, before that parts are equal
        need(
            size % parts == 0 or call.opset >= 18, f"{size} elements cannot be split into {parts} equal parts"
        )
        sizes = tuple(max(0, min(chunk, size - i * chunk)) for i in range(parts))
    need(
        len(sizes) == parts and sum(sizes) == size,
        f"split {sizes} does not give {parts} parts of {size} elements",
    )
    pieces, begin = [], 0
    for i, length in enumerate(sizes):
        bounds = [(0, n, 1) for n in x.shape]
        bounds[axis] = (begin, begin + length, 1)
        columns = dict(zip(("starts", "ends", "steps"), _columns(bounds), strict=True))
        pieces.append(call.emit("Slice", call[0], label=str(i), **columns))
        begin += length
    return tuple(pieces)


def _pad_by(call: Call, pads: Sequence[int], mode: str, value: float) -> str:
    """Crop where pads are negative, then pad."""
    x, rank = call[0], call.type(0).rank
    need(len(pads) == 2 * rank, f"{call.type(0)} needs {2 * rank} pads, got {len(pads)}")
    shape = call.shape_of(x)
    if min(pads, default=0) < 0:
        bounds = [(max(0, -pads[d]), n - max(0, -pads[rank + d]), 1) for d, n in enumerate(shape)]
        need(all(start <= end for start, end, _ in bounds), f"pads {tuple(pads)} crop more than {shape} has")
        columns = dict(zip(("starts", "ends", "steps"), _columns(bounds), strict=True))
        x = call.emit("Slice", x, label="crop", **columns)
    value = float(value) if call.type(0).floating else int(value)  # a float has no room for every int64
    return call.emit("Pad", x, pads=tuple(max(0, p) for p in pads), mode=mode, value=value)


@onnx_op("Pad")
def _pad_1(call: Call) -> str:
    pads = call.attribute("paddings" if call.opset < 2 else "pads")
    return _pad_by(call, pads, call.attribute("mode", "constant"), call.attribute("value", 0.0))


@onnx_op("Pad", since=11)
def _pad(call: Call) -> str:
    rank = call.type(0).rank
    pads = call.ints(1, "pads")
    value = call.static(2, "constant_value").reshape(()).item() if call.has(2) else 0.0
    if call.has(3):
        axes = call.ints(3, "axes")
        need(len(pads) == 2 * len(axes), f"{len(axes)} axes need {2 * len(axes)} pads, got {len(pads)}")
        full = [0] * 2 * rank
        for i, axis in enumerate(axes):
            axis = call.axis(axis, rank)
            full[axis], full[rank + axis] = pads[i], pads[len(axes) + i]
        pads = tuple(full)
    return _pad_by(call, pads, call.attribute("mode", "constant"), value)


@onnx_op("Tile")
def _tile_1(call: Call) -> str:
    (tiles,), (axis,) = call.ints(1, "tiles"), call.ints(2, "axis")
    rank = call.type(0).rank
    axis = call.axis(axis, rank)
    return call.emit("Tile", call[0], repeats=tuple(tiles if d == axis else 1 for d in range(rank)))


@onnx_op("Tile", since=6)
def _tile(call: Call) -> str:
    return call.emit("Tile", call[0], repeats=call.ints(1, "repeats"))


@onnx_op("CumSum")
def _cumsum(call: Call) -> str:
    (axis,) = call.ints(1, "axis")
    settings = {name: call.attribute(name, 0) for name in ("exclusive", "reverse")}
    return call.emit("CumSum", call[0], axis=call.axis(axis, call.type(0).rank), **settings)


@onnx_op("Trilu")
def _trilu(call: Call) -> str:
    (k,) = call.ints(1, "k") if call.has(1) else (0,)
    return call.emit("Trilu", call[0], upper=call.attribute("upper", 1), k=k)


@onnx_op("DepthToSpace")
def _depth_to_space(call: Call) -> str:
    n, c, h, w = _image(call)
    b = call.attribute("blocksize")
    need(b > 0 and c % (b * b) == 0, f"blocks of {b} x {b} do not divide {c} channels")
    column_first = call.attribute("mode", "DCR") == "DCR"
    split = (n, b, b, c // (b * b), h, w) if column_first else (n, c // (b * b), b, b, h, w)
    x = call.reshape(call[0], split, label="split")
    x = call.emit("Transpose", x, perm=(0, 3, 4, 1, 5, 2) if column_first else (0, 1, 4, 2, 5, 3))
    return call.reshape(x, (n, c // (b * b), h * b, w * b), label="join")


@onnx_op("SpaceToDepth")
def _space_to_depth(call: Call) -> str:
    n, c, h, w = _image(call)
    b = call.attribute("blocksize")
    need(b > 0 and h % b == 0 and w % b == 0, f"blocks of {b} x {b} do not divide {h} x {w}")
    x = call.reshape(call[0], (n, c, h // b, b, w // b, b), label="split")
    column_first = call.attribute("mode", "DCR") == "DCR"  # the other mode exists since opset 28
    x = call.emit("Transpose", x, perm=(0, 3, 5, 1, 2, 4) if column_first else (0, 1, 3, 5, 2, 4))
    return call.reshape(x, (n, c * b * b, h // b, w // b), label="join")


def _image(call: Call) -> tuple[int, ...]:
    need(call.type(0).rank == 4, f"the input must have 4 dimensions, got {call.type(0)}")
    return call.type(0).shape


def _repeat(call: Call, factors: Sequence[float]) -> str:
    """Nearest-neighbour enlargement by whole factors: every element becomes a block."""
    shape = call.type(0).shape
    whole = tuple(round(f) for f in factors)
    exact = len(whole) == len(shape) and all(f >= 1 and f == w for f, w in zip(factors, whole, strict=True))
    need(exact, f"only enlargement by whole factors is supported, got {tuple(factors)}")
    pairs = tuple(zip(shape, whole, strict=True))
    x = call.reshape(
        call[0], (s for size, f in pairs for s in ((size,) if f == 1 else (size, 1))), label="columns"
    )
    x = call.emit(
        "Expand", x, shape=tuple(s for size, f in pairs for s in ((size,) if f == 1 else (size, f)))
    )
    return call.reshape(x, (size * f for size, f in pairs), label="join")


@onnx_op("Upsample", since=7)
def _upsample(call: Call) -> str:
    need(call.attribute("mode", "nearest") == "nearest", "only the mode 'nearest' is supported")
    scales = call.attribute("scales") if call.opset < 9 else call.static(1, "scales").tolist()
    return _repeat(call, scales)


@onnx_op("Resize", since=10)
def _resize_10(call: Call) -> str:
    need(call.attribute("mode", "nearest") == "nearest", "only the mode 'nearest' is supported")
    return _repeat(call, call.static(1, "scales").tolist())


# Pairs of which a whole factor s sends output i to input i // s.
_BLOCKWISE = {
    ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil"), ("asymmetric", "floor"),
    ("pytorch_half_pixel", "round_prefer_floor"), ("pytorch_half_pixel", "round_prefer_ceil"),
}  # fmt: skip


@onnx_op("Resize", since=11)
def _resize(call: Call) -> str:
    need(call.attribute("mode", "nearest") == "nearest", "only the mode 'nearest' is supported")
    need(
        not call.has(1) or call.attribute("coordinate_transformation_mode", "") != "tf_crop_and_resize",
        "no cropping",
    )
    how = call.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = call.attribute("nearest_mode", "round_prefer_floor")
    shape = call.type(0).shape
    axes = [call.axis(axis, len(shape)) for axis in call.attribute("axes", tuple(range(len(shape))))]
    factors = [1.0] * len(shape)
    by_scale = call.has(2) and len(call.static(2, "scales"))
    given = call.static(2, "scales").tolist() if by_scale else call.ints(3, "sizes")
    need(len(given) == len(axes), f"{len(axes)} axes, but {len(given)} scales or sizes")
    for axis, value in zip(axes, given, strict=True):
        factors[axis] = value if by_scale else value / shape[axis]
    need(
        (how, rounding) in _BLOCKWISE or set(factors) == {1.0},
        f"modes {how!r} with {rounding!r} are not supported",
    )
    return _repeat(call, factors)


# ------------------------------------------------------------------------- values from shapes and numbers


def _value(call: Call, array: np.ndarray) -> str:
    TensorType(array.shape, str(array.dtype))  # refuses strings and the like
    return call.builder.constant(array, call.name)


@onnx_op("Constant")
def _constant(call: Call) -> str:
    for name, attribute in call.attributes.items():
        if name == "value":
            dtype_name(attribute.t.data_type)
            return _value(call, numpy_helper.to_array(attribute.t))
        if name in ("value_float", "value_floats"):
            return _value(call, np.asarray(call.attribute(name), np.float32))
        if name in ("value_int", "value_ints"):
            return _value(call, np.asarray(call.attribute(name), np.int64))
        raise ValueError(f"a constant given by {name!r} is not supported")
    raise ValueError("the constant has no value")


@onnx_op("ConstantOfShape")
def _constant_of_shape(call: Call) -> str:
    fill = fill_value(call.node)
    return _value(call, np.broadcast_to(fill, call.ints(0, "the shape")))


@onnx_op("Shape")
def _shape(call: Call) -> str:
    shape = call.type(0).shape
    start, end = call.attribute("start", 0), call.attribute("end", len(shape))
    return _value(call, np.asarray(shape[start:end], np.int64))


@onnx_op("Size")
def _size(call: Call) -> str:
    return _value(call, np.asarray(call.type(0).size, np.int64))


@onnx_op("Range")
def _range(call: Call) -> str:
    start, limit, delta = (call.static(i, what) for i, what in enumerate(("start", "limit", "delta")))
    need(bool(delta.any()), "delta is zero")
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    need(count * start.dtype.itemsize <= FOLD_BYTES, f"the range has {count} elements, too many to fold")
    work = np.dtype(np.float32) if start.dtype.itemsize == 2 and start.dtype.kind not in "iu" else start.dtype
    values = np.arange(count).astype(work) * delta.reshape(()).astype(work) + start.reshape(()).astype(work)
    return _value(call, values.astype(start.dtype))


@onnx_op("EyeLike")
def _eye_like(call: Call) -> str:
    x = call.type(0)
    need(x.rank == 2, f"the input must be a matrix, got {x}")
    need(x.bytes <= FOLD_BYTES, f"{x} is too large to fold")
    dtype = dtype_name(call.attribute("dtype")) if "dtype" in call.attributes else x.dtype
    return _value(call, np.eye(*x.shape, k=call.attribute("k", 0), dtype=np.dtype(dtype)))


@onnx_op("NonZero")
def _non_zero(call: Call) -> str:
    value = call.builder.known(call[0])
    if value is None:
        raise ValueError("the output's shape depends on data; shapes must be known before running")
    return _value(call, np.asarray(np.nonzero(value), np.int64))


for _name in ("Compress", "Unique", "NonMaxSuppression", "StringSplit"):

    @onnx_op(_name)
    def _data_dependent(call: Call) -> str:
        raise ValueError("the output's shape depends on data; shapes must be known before running")
