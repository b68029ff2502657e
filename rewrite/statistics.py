"""Batch normalisation in training mode: what is measured over a batch, and the running averages of it.

In: a tensor x [N, C, ...] of a builder, by `Terms`.  Out: canonical reductions and elementwise nodes.
  normalised()    y = (x - mean) scale / sqrt(variance + epsilon) + bias, with the mean and the (population) variance
                  of every channel over the whole batch
  running()       momentum old + (1 - momentum) measured
Being reductions, the statistics are those of the whole batch however a plan splits it.  float16 and bfloat16 are
measured in float32, as ONNX says.
"""

from __future__ import annotations

from .builder import Terms


def normalised(t: Terms, x: str, scale: str, bias: str, epsilon: float) -> tuple[str, str, str]:
    """The normalised tensor, the mean and the variance of every channel."""
    stored, shape = t.dtype_of(x), t.shape_of(x)
    dtype = "float32" if stored in ("float16", "bfloat16") else stored
    over = {"axes": tuple(d for d in range(len(shape)) if d != 1), "keepdims": 0}

    def column(tensor: str, label: str) -> str:
        """A value for every channel, to be broadcast."""
        wide = t.emit("Cast", tensor, label=f"{label}/wide", to=dtype)
        return t.reshape(wide, (shape[1], *(1,) * (len(shape) - 2)), label=f"{label}/column")

    wide = t.emit("Cast", x, label="wide", to=dtype)
    mean = t.emit("ReduceMean", wide, label="mean", **over)
    centred = t.emit("Sub", wide, column(mean, "mean"), label="centred")
    variance = t.emit("ReduceMean", t.emit("Mul", centred, centred, label="square"), label="variance", **over)
    shifted = t.emit("Add", variance, t.constant(epsilon, dtype, "epsilon"), label="shifted")
    deviation = t.emit("Sqrt", shifted, label="deviation")
    factor = t.emit("Div", column(scale, "scale"), column(deviation, "deviation"), label="factor")
    y = t.emit(
        "Add", t.emit("Mul", centred, factor, label="scaled"), column(bias, "bias"), label="normalised"
    )
    return t.emit("Cast", y, to=stored), mean, variance


def running(t: Terms, old: str, measured: str, momentum: float, label: str = "") -> str:
    """The running average after one more batch, of the type of `old`."""
    dtype = t.dtype_of(old)

    def part(weight: float, x: str, name: str) -> str:
        factor = t.constant(weight, dtype, name)
        return t.emit("Mul", factor, x, label=f"{label}/{name}" if label else name)

    fresh = t.emit("Cast", measured, label=f"{label}/measured" if label else "measured", to=dtype)
    return t.emit("Add", part(momentum, old, "kept"), part(1 - momentum, fresh, "fresh"), label=label)
