"""The JAX function of every canonical operator: `JAX[name](attributes, *arrays) -> array or tuple of arrays`.

In: arrays of static shape and the node's attributes (`rewrite/operators.py` lists both; ONNX names and
meaning; sizes and axes are attributes, axes are non-negative, an absent attribute has ONNX's default).
Out: arrays of the element type ONNX gives. Products use the highest precision of the hardware.
`exact_types()` must surround tracing, placing and running: without it JAX halves int64 and float64.
float16 and bfloat16 normalisations compute in float32, as ONNX's `stash_type` says.
Undefined, as in ONNX: integer division by zero, casts out of range. An index out of range gathers NaN (in
integers a sentinel) and scatters nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Attributes = Mapping[str, Any]
Function = Callable[..., Any]


def exact_types():
    """Context in which int64 and float64 are what they say, whatever the host program configured."""
    return jax.enable_x64(True)


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# ---------------------------------------------------------------- elementwise


def like(x: jax.Array, value: float) -> jax.Array:
    return jnp.asarray(value, x.dtype)


def clip(a: Attributes, x: jax.Array) -> jax.Array:
    """The maximum is applied last: with min > max everything is max."""
    if "min" in a:
        x = jnp.maximum(x, like(x, a["min"]))
    return jnp.minimum(x, like(x, a["max"])) if "max" in a else x


def is_infinite(a: Attributes, x: jax.Array) -> jax.Array:
    negative = jnp.isneginf(x) & bool(a.get("detect_negative", 1))
    return negative | (jnp.isposinf(x) & bool(a.get("detect_positive", 1)))


def gelu(a: Attributes, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=a.get("approximate", "none") == "tanh")


def selu(a: Attributes, x: jax.Array) -> jax.Array:
    alpha, gamma = a.get("alpha", 1.67326319217681884765625), a.get("gamma", 1.05070102214813232421875)
    return gamma * jnp.where(x > 0, x, alpha * expm1_below_zero(x))


def celu(a: Attributes, x: jax.Array) -> jax.Array:
    alpha = a.get("alpha", 1.0)
    return jnp.where(x > 0, x, alpha * expm1_below_zero(x / alpha))


def expm1_below_zero(x: jax.Array) -> jax.Array:
    """exp(x) - 1 where x < 0; the other branch is cut off before it overflows, for the gradient's sake."""
    return jnp.expm1(jnp.minimum(x, 0))


def hard_sigmoid(x: jax.Array, alpha: float, beta: float) -> jax.Array:
    return jnp.clip(alpha * x + beta, 0, 1)


def divide(a: Attributes, x: jax.Array, y: jax.Array) -> jax.Array:
    return x / y if is_float(x) else lax.div(*jnp.broadcast_arrays(x, y))  # lax.div truncates toward zero


def power(a: Attributes, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y).astype(x.dtype)  # the exponent may have another type


def modulo(a: Attributes, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.fmod(x, y) if a.get("fmod", 0) else jnp.mod(x, y)


def cast(a: Attributes, x: jax.Array) -> jax.Array:
    return x.astype(jnp.dtype(a["to"]))


def splitmix(key: jax.Array, index: jax.Array) -> jax.Array:
    """The number `index` of the generator splitmix64 (Steele, Lea, Flood 2014) that starts at `key`, as uint64."""
    z = key.astype(jnp.uint64) + (index.astype(jnp.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> 31)


def random_key(a: Attributes, key: jax.Array, index: jax.Array) -> jax.Array:
    return splitmix(key, index).astype(jnp.int64)


def random_mask(a: Attributes, key: jax.Array, index: jax.Array) -> jax.Array:
    """The upper 53 bits, as numbers in [0, 2**53), against the threshold."""
    return (splitmix(key, index) >> 11) >= np.uint64(a["threshold"])


def plain(function: Function) -> Function:
    """An operator without attributes."""
    return lambda a, *arrays: function(*arrays)


ELEMENTWISE: dict[str, Function] = {
    "Abs": plain(jnp.abs),
    "Neg": plain(jnp.negative),
    "Exp": plain(jnp.exp),
    "Log": plain(jnp.log),
    "Sqrt": plain(jnp.sqrt),
    "Reciprocal": plain(lambda x: 1 / x),
    "Floor": plain(jnp.floor),
    "Ceil": plain(jnp.ceil),
    "Round": plain(jnp.round),  # half to even
    "Sign": plain(jnp.sign),
    "Sin": plain(jnp.sin),
    "Cos": plain(jnp.cos),
    "Tan": plain(jnp.tan),
    "Asin": plain(jnp.arcsin),
    "Acos": plain(jnp.arccos),
    "Atan": plain(jnp.arctan),
    "Sinh": plain(jnp.sinh),
    "Cosh": plain(jnp.cosh),
    "Tanh": plain(jnp.tanh),
    "Sigmoid": plain(jax.nn.sigmoid),
    "Relu": plain(lambda x: jnp.maximum(x, like(x, 0))),
    "Erf": plain(lax.erf),
    "Softplus": plain(jax.nn.softplus),
    "Softsign": plain(jax.nn.soft_sign),
    "Not": plain(jnp.logical_not),
    "IsNaN": plain(jnp.isnan),
    "HardSwish": plain(lambda x: x * hard_sigmoid(x, 1 / 6, 0.5)),
    "Mish": plain(lambda x: x * jnp.tanh(jax.nn.softplus(x))),
    "Gelu": gelu,
    "LeakyRelu": lambda a, x: jnp.where(x < 0, a.get("alpha", 0.01) * x, x),
    "Elu": lambda a, x: jnp.where(x < 0, a.get("alpha", 1.0) * expm1_below_zero(x), x),
    "HardSigmoid": lambda a, x: hard_sigmoid(x, a.get("alpha", 0.2), a.get("beta", 0.5)),
    "Selu": selu,
    "Celu": celu,
    "ThresholdedRelu": lambda a, x: jnp.where(x > a.get("alpha", 1.0), x, like(x, 0)),
    "Clip": clip,
    "IsInf": is_infinite,
    "Cast": cast,
    "Add": plain(jnp.add),
    "Sub": plain(jnp.subtract),
    "Mul": plain(jnp.multiply),
    "Div": divide,
    "Pow": power,
    "Max": plain(jnp.maximum),
    "Min": plain(jnp.minimum),
    "Mod": modulo,
    "And": plain(jnp.logical_and),
    "Or": plain(jnp.logical_or),
    "Xor": plain(jnp.logical_xor),
    "Equal": plain(jnp.equal),
    "Less": plain(jnp.less),
    "Greater": plain(jnp.greater),
    "LessOrEqual": plain(jnp.less_equal),
    "GreaterOrEqual": plain(jnp.greater_equal),
    "RandomKey": random_key,
    "RandomMask": random_mask,
    "PRelu": plain(lambda x, slope: jnp.where(x < 0, slope * x, x)),
    "Where": plain(jnp.where),
}


# ---------------------------------------------------------------- products and convolutions


def gemm(a: Attributes, x: jax.Array, y: jax.Array) -> jax.Array:
    x = x.T if a.get("transA", 0) else x
    y = y.T if a.get("transB", 0) else y
    return matmul({}, x, y)


def matmul(a: Attributes, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def spatial(a: Attributes, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Strides, dilations and (begin, end) pads per spatial dimension (ONNX: begins, then ends)."""
    pads = tuple(a.get("pads", (0,) * (2 * rank)))
    strides, dilations = (tuple(a.get(key, (1,) * rank)) for key in ("strides", "dilations"))
    return strides, dilations, list(zip(pads[:rank], pads[rank:], strict=True))


def convolve(x: jax.Array, w: jax.Array, group: int, **geometry: Any) -> jax.Array:
    order = tuple(range(x.ndim))
    return lax.conv_general_dilated(
        x,
        w,
        dimension_numbers=lax.ConvDimensionNumbers(order, order, order),
        feature_group_count=group,
        precision=lax.Precision.HIGHEST,
        **geometry,
    )


def conv(a: Attributes, x: jax.Array, w: jax.Array) -> jax.Array:
    strides, dilations, pads = spatial(a, x.ndim - 2)
    return convolve(x, w, a.get("group", 1), window_strides=strides, padding=pads, rhs_dilation=dilations)


def conv_transpose(a: Attributes, x: jax.Array, w: jax.Array) -> jax.Array:
    """The adjoint of `conv`: x spread by the strides meets the flipped kernel, channels exchanged."""
    rank = x.ndim - 2
    strides, dilations, pads = spatial(a, rank)
    group, kernel = a.get("group", 1), w.shape[2:]
    extra = a.get("output_padding", (0,) * rank)
    reach = [dilation * (size - 1) for dilation, size in zip(dilations, kernel, strict=True)]
    padding = [(r - begin, r - end + more) for r, (begin, end), more in zip(reach, pads, extra, strict=True)]
    w = w.reshape(group, w.shape[0] // group, w.shape[1], *kernel).swapaxes(1, 2)
    w = jnp.flip(w.reshape(-1, w.shape[2], *kernel), range(2, 2 + rank))
    return convolve(
        x, w, group, window_strides=(1,) * rank, padding=padding, lhs_dilation=strides, rhs_dilation=dilations
    )


# ---------------------------------------------------------------- pooling


def pool_window(a: Attributes, shape: tuple[int, ...]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Arguments of `reduce_window`, and the pads the model asks for (`ceil_mode` may add more at the end)."""
    kernel = tuple(a["kernel_shape"])
    strides, dilations, pads = spatial(a, len(kernel))
    padding = []
    for size, k, stride, dilation, (begin, end) in zip(shape, kernel, strides, dilations, pads, strict=True):
        span = dilation * (k - 1) + 1
        steps, rest = divmod(size + begin + end - span, stride)
        # A window that would start in the end padding is dropped.
        more = bool(a.get("ceil_mode", 0) and rest and (steps + 1) * stride < size + begin)
        padding.append((begin, end + (stride - rest if more else 0)))
    window = {
        "window_dimensions": (1, 1, *kernel),
        "window_strides": (1, 1, *strides),
        "window_dilation": (1, 1, *dilations),
        "padding": [(0, 0), (0, 0), *padding],
    }
    return window, pads


def max_pool(a: Attributes, x: jax.Array) -> jax.Array:
    """With a derivative of its own: XLA:CPU would hold four index tables of x's size for it."""
    window, _ = pool_window(a, x.shape[2:])

    @jax.custom_vjp
    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, np.asarray(lowest(x.dtype), x.dtype), lax.max, **window)

    def forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y = pooled(x)
        return y, (x, y)

    def backward(known: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array]:
        return (first_greatest(window, *known, cotangent),)

    pooled.defvjp(forward, backward)
    return pooled(x)


def first_greatest(window: Mapping[str, Any], x: jax.Array, y: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Of every window, its cotangent at the first cell that holds its maximum y, summed over the windows."""
    edges = [(begin, end, 0) for begin, end in window["padding"]]
    padded = lax.pad(x, np.asarray(lowest(x.dtype), x.dtype), edges)
    strides, nothing = window["window_strides"], np.asarray(0, x.dtype)
    taken, total = jnp.zeros(y.shape, bool), jnp.zeros(padded.shape, x.dtype)
    for cell in np.ndindex(*window["window_dimensions"]):
        starts = [i * dilation for i, dilation in zip(cell, window["window_dilation"], strict=True)]
        ends = [
            start + (size - 1) * stride + 1
            for start, size, stride in zip(starts, y.shape, strides, strict=True)
        ]
        hit = (lax.slice(padded, starts, ends, strides) == y) & ~taken
        taken |= hit
        spread = [
            (start, size - end, stride - 1)
            for start, end, size, stride in zip(starts, ends, padded.shape, strides, strict=True)
        ]
        total += lax.pad(jnp.where(hit, cotangent, 0), nothing, spread)
    return lax.pad(total, nothing, [(-begin, -end, 0) for begin, end, _ in edges])


def average_pool(a: Attributes, x: jax.Array) -> jax.Array:
    window, pads = pool_window(a, x.shape[2:])
    total = lax.reduce_window(x, np.asarray(0, x.dtype), lax.add, **window)
    counts = np.ones(())
    for axis, (begin, end) in enumerate(pads, start=2):
        kernel, stride, dilation = (
            window[f"window_{key}"][axis] for key in ("dimensions", "strides", "dilation")
        )
        cells = stride * np.arange(total.shape[axis])[:, None] + dilation * np.arange(kernel)
        size = x.shape[axis]
        low, high = (0, begin + size + end) if a.get("count_include_pad", 0) else (begin, begin + size)
        counts = counts[..., None] * ((low <= cells) & (cells < high)).sum(1)
    return total / jnp.asarray(counts, x.dtype)


# ---------------------------------------------------------------- reductions and normalisations


def reduction(function: Function, empty: Callable[[np.dtype], Any] | None = None) -> Function:
    """`empty` gives the value of a maximum or minimum over nothing."""

    def reduce(a: Attributes, x: jax.Array) -> jax.Array:
        axes = tuple(a["axes"]) if "axes" in a else tuple(range(x.ndim))
        over_nothing = empty and 0 in [x.shape[axis] for axis in axes]
        options = {"initial": empty(x.dtype)} if empty and over_nothing else {}
        return function(x, axis=axes, keepdims=bool(a.get("keepdims", 1)), **options).astype(x.dtype)

    return reduce


def lowest(dtype: np.dtype) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def highest(dtype: np.dtype) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max


def widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def standardise(x: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    centred = x - jnp.mean(x, axes, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred * centred, axes, keepdims=True) + epsilon)


def layer_normalization(a: Attributes, x: jax.Array, scale: jax.Array) -> jax.Array:
    axes = tuple(range(a.get("axis", -1) % x.ndim, x.ndim))
    return standardise(widen(x), axes, a.get("epsilon", 1e-5)).astype(x.dtype) * scale


def rms_normalization(a: Attributes, x: jax.Array, scale: jax.Array) -> jax.Array:
    axes = tuple(range(a.get("axis", -1) % x.ndim, x.ndim))
    wide = widen(x)
    size = jnp.sqrt(jnp.mean(wide * wide, axes, keepdims=True) + a.get("epsilon", 1e-5))
    return (wide / size).astype(x.dtype) * scale


def per_channel(x: jax.Array, *vectors: jax.Array) -> list[jax.Array]:
    """Vectors over the channels (dimension 1) in the shape that broadcasts against x."""
    return [vector.reshape(-1, *(1,) * (x.ndim - 2)) for vector in vectors]


def batch_normalization(a: Attributes, x: jax.Array, *statistics: jax.Array) -> jax.Array:
    scale, bias, mean, variance = per_channel(x, *map(widen, statistics))
    y = (widen(x) - mean) / jnp.sqrt(variance + a.get("epsilon", 1e-5)) * scale + bias
    return y.astype(x.dtype)


def instance_normalization(a: Attributes, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    scale, bias = per_channel(x, scale, bias)
    normal = standardise(widen(x), tuple(range(2, x.ndim)), a.get("epsilon", 1e-5))
    return normal.astype(x.dtype) * scale + bias


def group_normalization(a: Attributes, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Scale and bias are per channel (opset 21 and later)."""
    grouped = widen(x).reshape(x.shape[0], a["num_groups"], -1)
    scale, bias = per_channel(x, scale, bias)
    normal = standardise(grouped, (2,), a.get("epsilon", 1e-5))
    return normal.reshape(x.shape).astype(x.dtype) * scale + bias


def local_response_normalization(a: Attributes, x: jax.Array) -> jax.Array:
    size = a["size"]
    before = (size - 1) // 2
    padding = [(0, 0), (before, size - 1 - before)] + [(0, 0)] * (x.ndim - 2)
    window = (1, size) + (1,) * (x.ndim - 2)
    squares = lax.reduce_window(x * x, np.asarray(0, x.dtype), lax.add, window, (1,) * x.ndim, padding)
    return x / (a.get("bias", 1.0) + a.get("alpha", 1e-4) / size * squares) ** a.get("beta", 0.75)


# ---------------------------------------------------------------- indexing


def from_start(indices: jax.Array, size: int) -> jax.Array:
    """Negative indices count from the end."""
    return jnp.where(indices < 0, indices + size, indices)


def gather(a: Attributes, x: jax.Array, indices: jax.Array) -> jax.Array:
    axis = a.get("axis", 0)
    return jnp.take(x, from_start(indices, x.shape[axis]), axis, mode="fill")


def gather_elements(a: Attributes, x: jax.Array, indices: jax.Array) -> jax.Array:
    axis = a.get("axis", 0)
    kept = [slice(None) if d == axis else slice(size) for d, size in enumerate(indices.shape)]
    return jnp.take_along_axis(x[tuple(kept)], from_start(indices, x.shape[axis]), axis, mode="fill")


def coordinates(indices: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Index tuples of the last dimension, one array per indexed dimension."""
    return tuple(from_start(indices[..., d], shape[d]) for d in range(indices.shape[-1]))


def gather_nd(a: Attributes, x: jax.Array, indices: jax.Array) -> jax.Array:
    def pick(x: jax.Array, indices: jax.Array) -> jax.Array:
        return x.at[coordinates(indices, x.shape)].get(mode="fill")

    for _ in range(a.get("batch_dims", 0)):
        pick = jax.vmap(pick)
    return pick(x, indices)


SCATTER = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


def scatter(a: Attributes, x: jax.Array, where: tuple[jax.Array, ...], updates: jax.Array) -> jax.Array:
    return getattr(x.at[where], SCATTER[a.get("reduction", "none")])(updates, mode="drop")


def scatter_elements(a: Attributes, x: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    axis = a.get("axis", 0)
    where = list(jnp.indices(indices.shape, sparse=True))
    where[axis] = from_start(indices, x.shape[axis])
    return scatter(a, x, tuple(where), updates)


def scatter_nd(a: Attributes, x: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    return scatter(a, x, coordinates(indices, x.shape), updates)


def one_hot(a: Attributes, indices: jax.Array, values: jax.Array) -> jax.Array:
    """`values` holds (off, on); an index outside [-depth, depth) is all off."""
    axis = a.get("axis", -1) % (indices.ndim + 1)
    classes = jnp.expand_dims(jnp.arange(a["depth"]), [d for d in range(indices.ndim + 1) if d != axis])
    return jnp.where(jnp.expand_dims(from_start(indices, a["depth"]), axis) == classes, values[1], values[0])


def arg_extreme(function: Function) -> Function:
    def apply(a: Attributes, x: jax.Array) -> jax.Array:
        axis, keep = a.get("axis", 0), bool(a.get("keepdims", 1))
        if a.get("select_last_index", 0):
            found = x.shape[axis] - 1 - function(jnp.flip(x, axis), axis, keepdims=keep)
        else:
            found = function(x, axis, keepdims=keep)
        return found.astype(jnp.int64)

    return apply


def top_k(a: Attributes, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorted, equal elements by rising index; `sorted=0` permits any order, so this one too."""
    axis = a.get("axis", -1) % x.ndim
    order = jnp.argsort(x, axis, stable=True, descending=bool(a.get("largest", 1)))
    chosen = lax.slice_in_dim(order, 0, a["k"], axis=axis)
    return jnp.take_along_axis(x, chosen, axis), chosen.astype(jnp.int64)


# ---------------------------------------------------------------- movement


def slice_(a: Attributes, x: jax.Array) -> jax.Array:
    steps = a.get("steps", (1,) * x.ndim)
    return x[tuple(slice(*bounds) for bounds in zip(a["starts"], a["ends"], steps, strict=True))]


def pad(a: Attributes, x: jax.Array) -> jax.Array:
    """Negative pads crop, before anything is added."""
    pads, mode = np.reshape(a["pads"], (2, x.ndim)), a.get("mode", "constant")
    cropped, grown = np.maximum(-pads, 0), np.maximum(pads, 0)
    x = lax.slice(x, cropped[0], x.shape - cropped[1])
    options = {"constant_values": like(x, a.get("value", 0))} if mode == "constant" else {}
    return jnp.pad(x, grown.T, mode, **options)


def cumulative_sum(a: Attributes, x: jax.Array) -> jax.Array:
    axis, reverse = a.get("axis", 0), bool(a.get("reverse", 0))
    if a.get("exclusive", 0):
        size = x.shape[axis]
        shift = [(0, 0)] * x.ndim
        shift[axis] = (0, 1) if reverse else (1, 0)
        x = lax.slice_in_dim(jnp.pad(x, shift), int(reverse), size + int(reverse), axis=axis)
    return lax.cumsum(x, axis, reverse)


def triangle(a: Attributes, x: jax.Array) -> jax.Array:
    return (jnp.triu if a.get("upper", 1) else jnp.tril)(x, a.get("k", 0))


def expand(a: Attributes, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(a["shape"])))


def einsum(a: Attributes, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(a["equation"], *operands, precision=lax.Precision.HIGHEST).astype(operands[0].dtype)


JAX: dict[str, Function] = ELEMENTWISE | {
    "MatMul": matmul,
    "Gemm": gemm,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "ReduceSum": reduction(jnp.sum),
    "ReduceMean": reduction(jnp.mean),
    "ReduceProd": reduction(jnp.prod),
    "ReduceMax": reduction(jnp.max, lowest),
    "ReduceMin": reduction(jnp.min, highest),
    "Softmax": lambda a, x: jax.nn.softmax(x, a.get("axis", -1)),
    "LogSoftmax": lambda a, x: jax.nn.log_softmax(x, a.get("axis", -1)),
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LRN": local_response_normalization,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "ArgMax": arg_extreme(jnp.argmax),
    "ArgMin": arg_extreme(jnp.argmin),
    "TopK": top_k,
    "Transpose": lambda a, x: jnp.transpose(x, a.get("perm")),
    "Reshape": lambda a, x: x.reshape(tuple(a["shape"])),
    "Expand": expand,
    "Concat": lambda a, *xs: lax.concatenate(xs, a["axis"]),
    "Slice": slice_,
    "Pad": pad,
    "Tile": lambda a, x: jnp.tile(x, tuple(a["repeats"])),
    "CumSum": cumulative_sum,
    "Trilu": triangle,
    "Einsum": einsum,
}
