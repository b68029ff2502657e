"""The canonical operators: one row each, with exact type inference and work.

In: an operator name, static attributes, the operands' `TensorType`s.  Out: the results' types, or ValueError
saying what does not fit.  Names and semantics are ONNX's (newest opset), except that
  sizes, axes and other non-tensor operands are attributes; axes non-negative, sorted; an entry per dimension
  optional operands are gone: Conv, Gemm and LayerNormalization have no bias, Gemm no alpha and beta
  every attribute of `Op.attributes` is present; those of `Op.optional` may be absent (Clip's bounds)
  random draws are RandomKey and RandomMask, which ONNX lacks (see random_draws); in plans they are nodes of the
  domain `parallegg` (OWN)
Conventions: Slice has starts and ends in [0, dim], but with a negative step an end of -dim-1 means "through
index 0".  Pad never crops.  OneHot's depth and TopK's k are attributes.
Work: `flops` counts a multiply and an add as two and a transcendental as TRANSCENDENTAL; moving data is free.
Missing: recurrent networks, resizing, control flow, data-dependent shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..program import TensorType

Attributes = Mapping[str, Any]
Types = tuple[TensorType, ...]
Infer = Callable[[Attributes, Types], Types]
Flops = Callable[[Attributes, Types, Types], int]

TRANSCENDENTAL = 10  # flops charged for one exp, tanh, ...
OWN = frozenset({"RandomKey", "RandomMask"})


@dataclass(frozen=True)
class Op:
    """One canonical operator; `arity` None means one or more operands of one kind."""

    name: str
    arity: int | None
    family: str | None  # "Unary", "Binary", "Reduce", or None: a constructor of its own
    infer: Infer
    flops: Flops
    attributes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    outputs: int = 1


def infer(op: str, attributes: Attributes, types: Types) -> Types:
    """The types of the results of `op`; ValueError where operands or attributes do not fit."""
    row = OPERATORS.get(op)
    if row is None:
        raise ValueError(f"{op} is not a canonical operator")
    if len(types) != row.arity if row.arity is not None else not types:
        raise ValueError(f"{op} takes {row.arity or 'one or more'} operands, got {len(types)}")
    for name in row.attributes:
        if name not in attributes:
            raise ValueError(f"{op} needs the attribute {name!r}")
    if len(attributes) > len(row.attributes):
        unknown = set(attributes) - set(row.attributes) - set(row.optional)
        if unknown:
            raise ValueError(f"{op} has no attribute {sorted(unknown)[0]!r}")
    return row.infer(attributes, types)


def flops(op: str, attributes: Attributes, types: Types) -> int:
    """The work of one application of `op`."""
    return OPERATORS[op].flops(attributes, types, infer(op, attributes, types))


# ---------------------------------------------------------------------------------------------- checks


def need(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy broadcasting of shapes."""
    out: list[int] = []
    for back in range(1, max(map(len, shapes)) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast")
        out.append(sizes.pop() if sizes else 1)
    return tuple(reversed(out))


def _same_dtype(types: Iterable[TensorType]) -> str:
    dtypes = {t.dtype for t in types}
    if len(dtypes) != 1:
        raise ValueError(f"operands have different element types: {', '.join(sorted(dtypes))}")
    return dtypes.pop()


def _need_rank(t: TensorType, least: int, what: str) -> None:
    need(t.rank >= least, f"{what} must have at least {least} dimensions, got {t}")


def _need_axis(axis: int, rank: int) -> None:
    need(0 <= axis < rank, f"axis {axis} is out of range for {rank} dimensions")


def _need_integer(t: TensorType, what: str) -> None:
    need(t.dtype in ("int32", "int64"), f"{what} must be int32 or int64, got {t.dtype}")


def _need_shape(t: TensorType, shape: tuple[int, ...], what: str) -> None:
    need(t.shape == shape, f"{what} must have shape {shape}, got {t.shape}")


def _replace(values: Sequence[int], at: int, *new: int) -> tuple[int, ...]:
    return (*values[:at], *new, *values[at + 1 :])


# ---------------------------------------------------------------------------------------- elementwise

DOMAINS: dict[str, Callable[[str], bool]] = {
    "float": lambda d: TensorType((), d).floating,
    "number": lambda d: d != "bool",
    "bool": lambda d: d == "bool",
    "any": lambda d: True,
}


def _unary(domain: str, result: str | None = None) -> Infer:
    def infer_unary(attributes: Attributes, types: Types) -> Types:
        (x,) = types
        need(DOMAINS[domain](x.dtype), f"element type {x.dtype} is not allowed here")
        return (x if result is None else TensorType(x.shape, result),)

    return infer_unary


def _binary(domain: str, result: str | None = None) -> Infer:
    def infer_binary(attributes: Attributes, types: Types) -> Types:
        dtype = _same_dtype(types)
        need(DOMAINS[domain](dtype), f"element type {dtype} is not allowed here")
        return (TensorType(broadcast(*(t.shape for t in types)), result or dtype),)

    return infer_binary


def _infer_cast(attributes: Attributes, types: Types) -> Types:
    return (TensorType(types[0].shape, attributes["to"]),)


def _infer_pow(attributes: Attributes, types: Types) -> Types:
    base, exponent = types  # the exponent may have its own type
    need(base.dtype != "bool" and exponent.dtype != "bool", "element type bool is not allowed here")
    return (TensorType(broadcast(base.shape, exponent.shape), base.dtype),)


def _infer_prelu(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    x, slope = types
    need(broadcast(x.shape, slope.shape) == x.shape, f"slope {slope.shape} does not broadcast to {x.shape}")
    return (TensorType(x.shape, dtype),)


def _infer_where(attributes: Attributes, types: Types) -> Types:
    condition, a, b = types
    need(condition.dtype == "bool", f"the condition must be bool, got {condition.dtype}")
    return (TensorType(broadcast(*(t.shape for t in types)), _same_dtype((a, b))),)


def _draw(result: str) -> Infer:
    def infer_draw(attributes: Attributes, types: Types) -> Types:
        key, index = types
        need(key.dtype == index.dtype == "int64", f"key and index must be int64, got {key} and {index}")
        return (TensorType(broadcast(key.shape, index.shape), result),)

    return infer_draw


def _per_element(count: int) -> Flops:
    return lambda attributes, types, out: count * out[0].size


def _free(attributes: Attributes, types: Types, out: Types) -> int:
    return 0


# ------------------------------------------------------------------------------------------- products


def _infer_matmul(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    a, b = types
    _need_rank(a, 1, "operand A")
    _need_rank(b, 1, "operand B")
    inner = b.shape[-2] if b.rank > 1 else b.shape[0]
    need(a.shape[-1] == inner, f"inner sizes differ: {a.shape} times {b.shape}")
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    rows = a.shape[-2:-1]
    columns = b.shape[-1:] if b.rank > 1 else ()
    return (TensorType((*batch, *rows, *columns), dtype),)


def _infer_gemm(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    a, b = types
    need(a.rank == 2 and b.rank == 2, f"both operands must be matrices, got {a.shape} and {b.shape}")
    m, k = reversed(a.shape) if attributes["transA"] else a.shape
    k2, n = reversed(b.shape) if attributes["transB"] else b.shape
    need(k == k2, f"inner sizes differ: {k} and {k2}")
    return (TensorType((m, n), dtype),)


def _gemm_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return 2 * out[0].size * types[0].shape[0 if attributes["transA"] else 1]


def _einsum_labels(equation: str, types: Types) -> tuple[dict[str, int], tuple[str, ...], str]:
    """Sizes by label, operand terms and result term of an equation, its ellipses spelled as more labels."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    need(len(terms) == len(types), f"equation {equation!r} names {len(terms)} operands, got {len(types)}")
    extra = [
        t.rank - len(term.replace("...", "")) if "..." in term else 0
        for term, t in zip(terms, types, strict=True)
    ]
    need(min(extra) >= 0, f"equation {equation!r} has more labels than an operand has dimensions")
    greek = "".join(chr(0x391 + 100 + i) for i in range(max(extra)))
    terms = [
        term.replace("...", greek[len(greek) - n :] if n else "")
        for term, n in zip(terms, extra, strict=True)
    ]
    sizes: dict[str, int] = {}
    for term, t in zip(terms, types, strict=True):
        need(len(term) == t.rank, f"equation {equation!r}: term {term!r} does not fit {t}")
        for label, size in zip(term, t.shape, strict=True):
            known = sizes.get(label, 1)
            need(
                known == 1 or size in (1, known),
                f"equation {equation!r}: label {label!r} is {known} and {size}",
            )
            sizes[label] = max(known, size) if size else 0
    if not arrow:
        once = [c for c in "".join(terms) if "".join(terms).count(c) == 1 and c not in greek]
        result = greek + "".join(sorted(once))
    return sizes, tuple(terms), result.replace("...", greek)


def _infer_einsum(attributes: Attributes, types: Types) -> Types:
    sizes, _, result = _einsum_labels(attributes["equation"], types)
    need(
        all(c in sizes for c in result),
        f"equation {attributes['equation']!r}: the result has an unknown label",
    )
    return (TensorType(tuple(sizes[c] for c in result), _same_dtype(types)),)


def _einsum_flops(attributes: Attributes, types: Types, out: Types) -> int:
    sizes, terms, _ = _einsum_labels(attributes["equation"], types)
    return (2 * (len(terms) - 1) or 1) * math.prod(sizes.values())


# ------------------------------------------------------------------------------------ windows (Conv, pools)


def _window(kernel: int, dilation: int) -> int:
    return (kernel - 1) * dilation + 1


def _spatial(attributes: Attributes, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """Output sizes of a sliding window; `ceil_mode` rounds up but starts no window in the end padding."""
    n = len(sizes)
    pads, strides, dilations = attributes["pads"], attributes["strides"], attributes["dilations"]
    need(len(kernel) == n, f"kernel {tuple(kernel)} does not fit {n} spatial dimensions")
    need(
        len(pads) == 2 * n and len(strides) == n and len(dilations) == n,
        f"{n} spatial dimensions need {2 * n} pads",
    )
    out = []
    for d in range(n):
        room = sizes[d] + pads[d] + pads[n + d] - _window(kernel[d], dilations[d])
        need(room >= 0, f"the window does not fit: size {sizes[d]}, kernel {kernel[d]}, pads {tuple(pads)}")
        count = room // strides[d] + 1
        if attributes.get("ceil_mode"):
            count = -(-room // strides[d]) + 1
            count -= (count - 1) * strides[d] >= sizes[d] + pads[d]
        out.append(count)
    return tuple(out)


def _infer_conv(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    x, w = types
    _need_rank(x, 3, "the input")
    need(w.rank == x.rank, f"input {x.shape} and weight {w.shape} have different ranks")
    group = attributes["group"]
    need(x.shape[1] == w.shape[1] * group, f"input {x.shape} and weight {w.shape} do not fit {group} groups")
    need(w.shape[0] % group == 0, f"{group} groups do not divide the weight's {w.shape[0]} outputs")
    spatial = _spatial(attributes, x.shape[2:], w.shape[2:])
    return (TensorType((x.shape[0], w.shape[0], *spatial), dtype),)


def _infer_conv_transpose(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    x, w = types
    _need_rank(x, 3, "the input")
    need(w.rank == x.rank, f"input {x.shape} and weight {w.shape} have different ranks")
    need(x.shape[1] == w.shape[0], f"input {x.shape} and weight {w.shape} differ in channels")
    need(
        w.shape[0] % attributes["group"] == 0,
        f"{attributes['group']} groups do not divide {w.shape[0]} channels",
    )
    n = x.rank - 2
    pads = attributes["pads"]
    spatial = tuple(
        attributes["strides"][d] * (x.shape[2 + d] - 1)
        + attributes["output_padding"][d]
        + _window(w.shape[2 + d], attributes["dilations"][d])
        - pads[d]
        - pads[n + d]
        for d in range(n)
    )
    need(min(spatial) >= 0, f"the output would have size {min(spatial)}")
    return (TensorType((x.shape[0], w.shape[1] * attributes["group"], *spatial), dtype),)


def _infer_pool(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    _need_rank(x, 3, "the input")
    spatial = _spatial(attributes, x.shape[2:], attributes["kernel_shape"])
    return (TensorType((*x.shape[:2], *spatial), x.dtype),)


def _conv_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return 2 * out[0].size * math.prod(types[1].shape[1:])


def _conv_transpose_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return 2 * types[0].size * math.prod(types[1].shape[1:])


def _pool_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return out[0].size * math.prod(attributes["kernel_shape"])


# -------------------------------------------------------------------------- reductions and normalisations


def _infer_reduce(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    axes = attributes["axes"]
    need(tuple(sorted(set(axes))) == tuple(axes), f"axes {axes} are not sorted and distinct")
    for axis in axes:
        _need_axis(axis, x.rank)
    if attributes["keepdims"]:
        shape = tuple(1 if d in axes else size for d, size in enumerate(x.shape))
    else:
        shape = tuple(size for d, size in enumerate(x.shape) if d not in axes)
    return (TensorType(shape, x.dtype),)


def _infer_arg(attributes: Attributes, types: Types) -> Types:
    (reduced,) = _infer_reduce({"axes": (attributes["axis"],), "keepdims": attributes["keepdims"]}, types)
    return (TensorType(reduced.shape, "int64"),)


def _input_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return types[0].size


def _infer_along(attributes: Attributes, types: Types) -> Types:
    _need_axis(attributes["axis"], types[0].rank)
    return (types[0],)


def _infer_layer_norm(attributes: Attributes, types: Types) -> Types:
    x, scale = types
    _need_axis(attributes["axis"], x.rank)
    tail = x.shape[attributes["axis"] :]
    need(broadcast(tail, scale.shape) == tail, f"scale {scale.shape} does not broadcast to {tail}")
    return (TensorType(x.shape, scale.dtype),)


def _infer_channel_norm(attributes: Attributes, types: Types) -> Types:
    x, *channels = types
    _need_rank(x, 2, "the input")
    for t in channels:
        _need_shape(t, x.shape[1:2], "a per-channel operand")
    groups = attributes.get("num_groups", 1)
    need(x.shape[1] % groups == 0, f"{groups} groups do not divide {x.shape[1]} channels")
    return (x,)


# ------------------------------------------------------------------------------------ gather and scatter


def _infer_gather(attributes: Attributes, types: Types) -> Types:
    data, indices = types
    _need_axis(attributes["axis"], data.rank)
    _need_integer(indices, "indices")
    return (TensorType(_replace(data.shape, attributes["axis"], *indices.shape), data.dtype),)


def _need_inside(data: TensorType, indices: TensorType, axis: int) -> None:
    _need_axis(axis, data.rank)
    _need_integer(indices, "indices")
    fits = data.rank == indices.rank and all(
        i <= n for d, (i, n) in enumerate(zip(indices.shape, data.shape, strict=True)) if d != axis
    )
    need(fits, f"indices {indices.shape} do not lie inside data {data.shape} beside axis {axis}")


def _infer_gather_elements(attributes: Attributes, types: Types) -> Types:
    data, indices = types
    _need_inside(data, indices, attributes["axis"])
    return (TensorType(indices.shape, data.dtype),)


def _gather_nd_shape(data: TensorType, indices: TensorType, batch: int) -> tuple[int, ...]:
    _need_integer(indices, "indices")
    _need_rank(indices, batch + 1, "indices")
    need(
        data.shape[:batch] == indices.shape[:batch], f"the first {batch} sizes of {data} and {indices} differ"
    )
    depth = indices.shape[-1]
    need(batch + depth <= data.rank, f"indices of length {depth} do not fit data {data.shape}")
    return (*indices.shape[:-1], *data.shape[batch + depth :])


def _infer_gather_nd(attributes: Attributes, types: Types) -> Types:
    data, indices = types
    return (TensorType(_gather_nd_shape(data, indices, attributes["batch_dims"]), data.dtype),)


def _need_reduction(attributes: Attributes) -> None:
    known = ("none", "add", "mul", "max", "min")
    need(
        attributes["reduction"] in known,
        f"reduction {attributes['reduction']!r} is not one of {', '.join(known)}",
    )


def _infer_scatter_elements(attributes: Attributes, types: Types) -> Types:
    data, indices, updates = types
    _need_inside(data, indices, attributes["axis"])
    _need_reduction(attributes)
    _need_shape(updates, indices.shape, "updates")
    _same_dtype((data, updates))
    return (data,)


def _infer_scatter_nd(attributes: Attributes, types: Types) -> Types:
    data, indices, updates = types
    _need_reduction(attributes)
    _need_shape(updates, _gather_nd_shape(data, indices, 0), "updates")
    _same_dtype((data, updates))
    return (data,)


def _scatter_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return 0 if attributes["reduction"] == "none" else types[2].size


def _infer_one_hot(attributes: Attributes, types: Types) -> Types:
    indices, values = types
    axis, depth = attributes["axis"], attributes["depth"]
    _need_shape(values, (2,), "values (off, on)")
    need(0 <= axis <= indices.rank, f"axis {axis} is out of range for {indices.rank + 1} dimensions")
    need(depth >= 0, f"depth {depth} is negative")
    return (TensorType((*indices.shape[:axis], depth, *indices.shape[axis:]), values.dtype),)


# ------------------------------------------------------------------------------------------- movement


def _infer_transpose(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    perm = attributes["perm"]
    need(sorted(perm) == list(range(x.rank)), f"perm {perm} is no permutation of {x.rank} dimensions")
    return (TensorType(tuple(x.shape[d] for d in perm), x.dtype),)


def _infer_reshape(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    shape = tuple(attributes["shape"])
    need(all(size >= 0 for size in shape), f"shape {shape} is not static")
    need(math.prod(shape) == x.size, f"cannot reshape {x} of {x.size} elements to {shape}")
    return (TensorType(shape, x.dtype),)


def _infer_expand(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    shape = tuple(attributes["shape"])
    need(broadcast(x.shape, shape) == shape, f"{x.shape} does not broadcast to {shape}")
    return (TensorType(shape, x.dtype),)


def _infer_concat(attributes: Attributes, types: Types) -> Types:
    dtype = _same_dtype(types)
    axis, first = attributes["axis"], types[0]
    _need_axis(axis, first.rank)
    for t in types[1:]:
        same = t.rank == first.rank and _replace(t.shape, axis) == _replace(first.shape, axis)
        need(same, f"{first.shape} and {t.shape} differ beside axis {axis}")
    return (TensorType(_replace(first.shape, axis, sum(t.shape[axis] for t in types)), dtype),)


def slice_length(size: int, start: int, end: int, step: int) -> int:
    """How many elements a canonical slice of one dimension of `size` takes."""
    if step > 0:
        return max(0, -(-(end - start) // step))
    last = -1 if end == -size - 1 else end
    return max(0, -(-(start - last) // -step))


def _infer_slice(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    starts, ends, steps = attributes["starts"], attributes["ends"], attributes["steps"]
    need(
        len(starts) == len(ends) == len(steps) == x.rank,
        f"a slice of {x} needs {x.rank} starts, ends and steps",
    )
    need(all(steps), "a step is zero")
    need(
        all(0 <= s <= n for s, n in zip(starts, x.shape, strict=True)),
        f"starts {starts} lie outside {x.shape}",
    )
    inside = all(e <= n and (e >= 0 or e == -n - 1) for e, n in zip(ends, x.shape, strict=True))
    need(inside, f"ends {ends} lie outside {x.shape}")
    shape = tuple(slice_length(*bounds) for bounds in zip(x.shape, starts, ends, steps, strict=True))
    return (TensorType(shape, x.dtype),)


def _infer_pad(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    pads = attributes["pads"]
    need(len(pads) == 2 * x.rank, f"{x} needs {2 * x.rank} pads, got {len(pads)}")
    need(all(p >= 0 for p in pads), f"pads {pads} are negative: crop by a Slice")
    modes = ("constant", "edge", "reflect", "wrap")
    need(attributes["mode"] in modes, f"mode {attributes['mode']!r} is not one of {', '.join(modes)}")
    return (TensorType(tuple(pads[d] + n + pads[x.rank + d] for d, n in enumerate(x.shape)), x.dtype),)


def _infer_tile(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    repeats = attributes["repeats"]
    need(len(repeats) == x.rank and all(r >= 0 for r in repeats), f"repeats {repeats} do not fit {x}")
    return (TensorType(tuple(n * r for n, r in zip(x.shape, repeats, strict=True)), x.dtype),)


def _infer_trilu(attributes: Attributes, types: Types) -> Types:
    _need_rank(types[0], 2, "the operand")
    return (types[0],)


def _infer_top_k(attributes: Attributes, types: Types) -> Types:
    (x,) = types
    axis, k = attributes["axis"], attributes["k"]
    _need_axis(axis, x.rank)
    need(0 <= k <= x.shape[axis], f"k = {k} of {x.shape[axis]} elements")
    shape = _replace(x.shape, axis, k)
    return TensorType(shape, x.dtype), TensorType(shape, "int64")


def _top_k_flops(attributes: Attributes, types: Types, out: Types) -> int:
    return types[0].size * max(1, types[0].shape[attributes["axis"]].bit_length())


# ---------------------------------------------------------------------------------------- the table

_UNARY_ROWS = {  # name: (element types, flops per element)
    "Abs": ("number", 1), "Neg": ("number", 1), "Sign": ("number", 1), "Relu": ("number", 1),
    "Reciprocal": ("float", 1), "Floor": ("float", 1), "Ceil": ("float", 1), "Round": ("float", 1),
    "Sqrt": ("float", 1), "Softsign": ("float", 3), "HardSwish": ("float", 4), "Not": ("bool", 1),
} | dict.fromkeys(
    ("Exp", "Log", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Sigmoid", "Erf",
     "Softplus", "Mish"),
    ("float", TRANSCENDENTAL),
)  # fmt: skip

_PARAMETRIC_ROWS = {  # name: (attributes, flops per element)
    "Gelu": (("approximate",), TRANSCENDENTAL), "LeakyRelu": (("alpha",), 2),
    "ThresholdedRelu": (("alpha",), 1),
    "Elu": (("alpha",), TRANSCENDENTAL), "Celu": (("alpha",), TRANSCENDENTAL),
    "Selu": (("alpha", "gamma"), TRANSCENDENTAL), "HardSigmoid": (("alpha", "beta"), 4),
}  # fmt: skip

_BINARY_ROWS = {  # name: (element types, result type or None for the operands')
    "Add": ("number", None), "Sub": ("number", None), "Mul": ("number", None), "Div": ("number", None),
    "Max": ("number", None), "Min": ("number", None),
    "And": ("bool", None), "Or": ("bool", None), "Xor": ("bool", None),
    "Equal": ("any", "bool"), "Less": ("number", "bool"), "Greater": ("number", "bool"),
    "LessOrEqual": ("number", "bool"), "GreaterOrEqual": ("number", "bool"),
}  # fmt: skip

_WINDOW = ("strides", "pads", "dilations")


def _rows() -> Iterable[Op]:
    for name, (domain, count) in _UNARY_ROWS.items():
        yield Op(name, 1, "Unary", _unary(domain), _per_element(count))
    for name, (attributes, count) in _PARAMETRIC_ROWS.items():
        yield Op(name, 1, "Unary", _unary("float"), _per_element(count), attributes)
    for name, (domain, result) in _BINARY_ROWS.items():
        yield Op(name, 2, "Binary", _binary(domain, result), _per_element(1))
    for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        yield Op(name, 1, "Reduce", _infer_reduce, _input_flops, ("axes", "keepdims"))
    softmax = _per_element(3 + TRANSCENDENTAL)
    norm, pool = ("axis", "epsilon"), ("kernel_shape", *_WINDOW, "ceil_mode")
    arg = ("axis", "keepdims", "select_last_index")
    yield from (
        Op("IsNaN", 1, "Unary", _unary("float", "bool"), _per_element(1)),
        Op("IsInf", 1, "Unary", _unary("float", "bool"), _per_element(1),
           ("detect_negative", "detect_positive")),
        Op("Clip", 1, "Unary", _unary("number"), _per_element(2), (), ("min", "max")),
        Op("Cast", 1, "Unary", _infer_cast, _per_element(1), ("to",)),
        Op("Pow", 2, "Binary", _infer_pow, _per_element(TRANSCENDENTAL)),
        Op("Mod", 2, "Binary", _binary("number"), _per_element(1), ("fmod",)),
        Op("PRelu", 2, "Binary", _infer_prelu, _per_element(2)),
        Op("RandomKey", 2, "Binary", _draw("int64"), _per_element(TRANSCENDENTAL)),
        Op("RandomMask", 2, "Binary", _draw("bool"), _per_element(TRANSCENDENTAL), ("threshold",)),
        Op("Where", 3, None, _infer_where, _per_element(1)),
        Op("MatMul", 2, None, _infer_matmul, lambda a, t, out: 2 * out[0].size * t[0].shape[-1]),
        Op("Gemm", 2, None, _infer_gemm, _gemm_flops, ("transA", "transB")),
        Op("Einsum", None, None, _infer_einsum, _einsum_flops, ("equation",)),
        Op("Conv", 2, None, _infer_conv, _conv_flops, ("group", *_WINDOW)),
        Op("ConvTranspose", 2, None, _infer_conv_transpose, _conv_transpose_flops,
           ("group", *_WINDOW, "output_padding")),
        Op("MaxPool", 1, None, _infer_pool, _pool_flops, pool),
        Op("AveragePool", 1, None, _infer_pool, _pool_flops, (*pool, "count_include_pad")),
        Op("Softmax", 1, None, _infer_along, softmax, ("axis",)),
        Op("LogSoftmax", 1, None, _infer_along, softmax, ("axis",)),
        Op("LayerNormalization", 2, None, _infer_layer_norm, _per_element(7), norm),
        Op("RMSNormalization", 2, None, _infer_layer_norm, _per_element(4), norm),
        Op("BatchNormalization", 5, None, _infer_channel_norm, _per_element(4), ("epsilon",)),
        Op("InstanceNormalization", 3, None, _infer_channel_norm, _per_element(8), ("epsilon",)),
        Op("GroupNormalization", 3, None, _infer_channel_norm, _per_element(8), ("epsilon", "num_groups")),
        Op("LRN", 1, None, _infer_channel_norm,
           lambda a, t, out: out[0].size * (2 * a["size"] + TRANSCENDENTAL),
           ("alpha", "beta", "bias", "size")),
        Op("Gather", 2, None, _infer_gather, _free, ("axis",)),
        Op("GatherElements", 2, None, _infer_gather_elements, _free, ("axis",)),
        Op("GatherND", 2, None, _infer_gather_nd, _free, ("batch_dims",)),
        Op("ScatterElements", 3, None, _infer_scatter_elements, _scatter_flops, ("axis", "reduction")),
        Op("ScatterND", 3, None, _infer_scatter_nd, _scatter_flops, ("reduction",)),
        Op("OneHot", 2, None, _infer_one_hot, _free, ("axis", "depth")),
        Op("Transpose", 1, None, _infer_transpose, _free, ("perm",)),
        Op("Reshape", 1, None, _infer_reshape, _free, ("shape",)),
        Op("Expand", 1, None, _infer_expand, _free, ("shape",)),
        Op("Concat", None, None, _infer_concat, _free, ("axis",)),
        Op("Slice", 1, None, _infer_slice, _free, ("starts", "ends", "steps")),
        Op("Pad", 1, None, _infer_pad, _free, ("pads", "mode", "value")),
        Op("Tile", 1, None, _infer_tile, _free, ("repeats",)),
        Op("CumSum", 1, None, _infer_along, _input_flops, ("axis", "exclusive", "reverse")),
        Op("Trilu", 1, None, _infer_trilu, _free, ("upper", "k")),
        Op("ArgMax", 1, None, _infer_arg, _input_flops, arg),
        Op("ArgMin", 1, None, _infer_arg, _input_flops, arg),
        Op("TopK", 1, None, _infer_top_k, _top_k_flops, ("k", "axis", "largest", "sorted"), outputs=2),
    )  # fmt: skip


OPERATORS: dict[str, Op] = {row.name: row for row in _rows()}
