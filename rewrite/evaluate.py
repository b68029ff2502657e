"""NumPy kernels of the canonical operators that occur in constant subgraphs: shapes, masks, position tables.

In: attributes and operand values.  Out: the result, or a tuple of results.  `KERNELS` has no row for an
operator that is never worth folding (convolutions, normalisations): such a node simply stays in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .operators import Attributes

Array = np.ndarray
Kernel = Callable[..., Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _as_x(function: Callable[[Array], Array]) -> Kernel:
    """A kernel of one operand whose result has the operand's element type."""
    return lambda a, x: np.asarray(function(x)).astype(x.dtype, copy=False)


def _divide(a: Attributes, x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.divide(x, y).astype(x.dtype, copy=False)
    if not y.all():
        raise ValueError("a constant integer is divided by zero")
    quotient = np.floor_divide(x, y)  # ONNX truncates toward zero
    return (quotient + ((quotient < 0) & (quotient * y != x))).astype(x.dtype, copy=False)


def _mod(a: Attributes, x: Array, y: Array) -> Array:
    if x.dtype.kind in "iu" and not y.all():
        raise ValueError("a constant integer is taken modulo zero")
    return np.fmod(x, y) if a["fmod"] else np.mod(x, y)


def _is_inf(a: Attributes, x: Array) -> Array:
    return (np.isposinf(x) & bool(a["detect_positive"])) | (np.isneginf(x) & bool(a["detect_negative"]))


def _clip(a: Attributes, x: Array) -> Array:
    if "min" in a:
        x = np.maximum(x, np.asarray(a["min"], x.dtype))
    return np.minimum(x, np.asarray(a["max"], x.dtype)) if "max" in a else x


def _reduce(function: Callable[..., Array]) -> Kernel:
    return lambda a, x: np.asarray(
        function(x, axis=tuple(a["axes"]), keepdims=bool(a["keepdims"])).astype(x.dtype, copy=False)
    )


def _mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if x.dtype.kind == "f":
        return np.mean(x, axis=axis, keepdims=keepdims)
    count = math.prod(x.shape[d] for d in axis)
    return _divide({}, np.sum(x, axis=axis, keepdims=keepdims), np.asarray(count, x.dtype))


def _indices(indices: Array, size: int) -> Array:
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise ValueError(f"a constant index lies outside the {size} elements")
    return np.where(indices < 0, indices + size, indices)


def _gather(a: Attributes, data: Array, indices: Array) -> Array:
    return np.take(data, _indices(indices, data.shape[a["axis"]]), axis=a["axis"])


def _elements_index(data: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    """The positions that indices beside `axis` name; they may cover less than the data."""
    index: list[Any] = list(np.indices(indices.shape))
    index[axis] = _indices(indices, data.shape[axis])
    return tuple(index)


def _gather_elements(a: Attributes, data: Array, indices: Array) -> Array:
    return data[_elements_index(data, indices, a["axis"])]


def _nd_index(data: Array, indices: Array) -> tuple[Array, ...]:
    return tuple(_indices(indices[..., d], data.shape[d]) for d in range(indices.shape[-1]))


def _gather_nd(a: Attributes, data: Array, indices: Array) -> Array:
    batch = data.shape[: a["batch_dims"]]
    if not batch:
        return data[_nd_index(data, indices)]
    parts = [data[at][_nd_index(data[at], indices[at])] for at in np.ndindex(*batch)]
    return np.stack(parts).reshape(*batch, *parts[0].shape) if parts else np.zeros((*batch, 0), data.dtype)


_SCATTER = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter_nd(a: Attributes, data: Array, indices: Array, updates: Array) -> Array:
    out = data.copy()
    if a["reduction"] == "none":
        out[_nd_index(data, indices)] = updates
    else:
        _SCATTER[a["reduction"]].at(out, _nd_index(data, indices), updates)
    return out


def _scatter_elements(a: Attributes, data: Array, indices: Array, updates: Array) -> Array:
    out, index = data.copy(), _elements_index(data, indices, a["axis"])
    if a["reduction"] == "none":
        out[index] = updates
    else:
        _SCATTER[a["reduction"]].at(out, index, updates)
    return out


def _slice(a: Attributes, x: Array) -> Array:
    def one(size: int, start: int, end: int, step: int) -> slice:
        if step < 0 and start == size:
            start = size - 1
        return slice(start, None if step < 0 and end == -size - 1 else end, step)

    bounds = zip(x.shape, a["starts"], a["ends"], a["steps"], strict=True)
    return x[tuple(one(*b) for b in bounds)]


def _pad(a: Attributes, x: Array) -> Array:
    width = [(a["pads"][d], a["pads"][x.ndim + d]) for d in range(x.ndim)]
    if a["mode"] == "constant":
        return np.pad(x, width, constant_values=np.asarray(a["value"]).astype(x.dtype))
    return np.pad(x, width, mode=a["mode"])


def _cumsum(a: Attributes, x: Array) -> Array:
    axis = a["axis"]
    x = np.flip(x, axis) if a["reverse"] else x
    out = np.cumsum(x, axis=axis, dtype=x.dtype)
    if a["exclusive"]:
        out = out - x
    return np.flip(out, axis) if a["reverse"] else out


def _arg(function: Callable[..., Array]) -> Kernel:
    def kernel(a: Attributes, x: Array) -> Array:
        axis = a["axis"]
        if a["select_last_index"]:
            found = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis)
        else:
            found = function(x, axis=axis)
        return np.expand_dims(found, axis) if a["keepdims"] else found

    return kernel


def _one_hot(a: Attributes, indices: Array, values: Array) -> Array:
    depth = a["depth"]
    where = np.where(indices < 0, indices + depth, indices)
    hit = np.expand_dims(where, a["axis"]) == np.arange(depth).reshape(
        (-1,) + (1,) * (indices.ndim - a["axis"])
    )
    return np.where(hit, values[1], values[0])


def _softmax(a: Attributes, x: Array) -> Array:
    e = np.exp(x - x.max(axis=a["axis"], keepdims=True))
    return (e / e.sum(axis=a["axis"], keepdims=True)).astype(x.dtype, copy=False)


KERNELS: dict[str, Kernel] = {
    **{name: _as_x(getattr(np, name.lower())) for name in (
        "Abs", "Exp", "Log", "Sqrt", "Floor", "Ceil", "Sign", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh")},
    "Neg": _as_x(np.negative),
    "Round": _as_x(np.rint),
    "Reciprocal": _as_x(np.reciprocal),
    "Asin": _as_x(np.arcsin),
    "Acos": _as_x(np.arccos),
    "Atan": _as_x(np.arctan),
    "Erf": _as_x(_erf),
    "Sigmoid": _as_x(lambda x: 1 / (1 + np.exp(-x))),
    "Relu": _as_x(lambda x: np.maximum(x, 0)),
    "Not": lambda a, x: ~x,
    "IsNaN": lambda a, x: np.isnan(x),
    "IsInf": _is_inf,
    "Clip": _clip,
    "Cast": lambda a, x: x.astype(np.dtype(a["to"])),
    "Add": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "Div": _divide,
    "Pow": lambda a, x, y: np.power(x, y).astype(x.dtype, copy=False) if (
        x.dtype.kind not in "iu" or y.dtype.kind not in "iu" or (y >= 0).all()
    ) else np.power(x.astype(np.float64), y).astype(x.dtype),
    "Mod": _mod,
    "Max": lambda a, x, y: np.maximum(x, y),
    "Min": lambda a, x, y: np.minimum(x, y),
    "And": lambda a, x, y: x & y,
    "Or": lambda a, x, y: x | y,
    "Xor": lambda a, x, y: x ^ y,
    "Equal": lambda a, x, y: x == y,
    "Less": lambda a, x, y: x < y,
    "Greater": lambda a, x, y: x > y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "Where": lambda a, c, x, y: np.where(c, x, y),
    "MatMul": lambda a, x, y: np.matmul(x, y),
    "ReduceSum": _reduce(np.sum),
    "ReduceMean": _reduce(_mean),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "Softmax": _softmax,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    "Transpose": lambda a, x: np.transpose(x, a["perm"]),
    "Reshape": lambda a, x: x.reshape(a["shape"]),
    "Expand": lambda a, x: np.broadcast_to(x, a["shape"]),
    "Concat": lambda a, *xs: np.concatenate(xs, axis=a["axis"]),
    "Slice": _slice,
    "Pad": _pad,
    "Tile": lambda a, x: np.tile(x, a["repeats"]),
    "CumSum": _cumsum,
    "Trilu": lambda a, x: (np.triu if a["upper"] else np.tril)(x, a["k"]),
    "ArgMax": _arg(np.argmax),
    "ArgMin": _arg(np.argmin),
}  # fmt: skip


def evaluate(op: str, attributes: Attributes, operands: list[Array]) -> tuple[Array, ...]:
    """The results of a canonical operator that has a kernel."""
    with np.errstate(all="ignore"):
        result = KERNELS[op](attributes, *operands)
    return result if isinstance(result, tuple) else (np.asarray(result),)
