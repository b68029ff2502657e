"""Losses in canonical nodes that split along any dimension, the classes (a vocabulary) among them.

In: tensors of a builder, by `Terms`.  Out: the loss.
  negative_log_likelihood()   -log p[label], (1 - s) of it and s of the mean over the classes with smoothing s
  weighted_mean()             sum w l / sum w over the valid labels; 0, not NaN, if there are none
  mean_squared_error()        mean (y - label)**2
The label's class is found by comparing with a constant range, not by GatherElements: what follows is elementwise
and a sum, so classes may be sharded, and the gradient needs no scatter.  A label that is neither a class nor
`ignore_index` picks nothing, but counts in the mean.
"""

from __future__ import annotations

import numpy as np

from .builder import Terms


def negative_log_likelihood(
    t: Terms, logp: str, labels: str, axis: int, *, smoothing: float = 0.0, label: str = ""
) -> str:
    """One loss per label, from log-probabilities with the classes along `axis`."""
    picked = _at_labels(t, logp, labels, axis, "picked")
    if not smoothing:
        return t.emit("Neg", picked, label=label)
    dtype, classes = t.dtype_of(logp), t.shape_of(logp)[axis]
    total = t.emit("ReduceSum", logp, label="all_classes", axes=(axis,), keepdims=0)
    hard = t.emit("Mul", picked, t.constant(smoothing - 1, dtype), label="hard")
    soft = t.emit("Mul", total, t.constant(smoothing / classes, dtype), label="soft")
    return t.emit("Sub", hard, soft, label=label)


def label_weights(t: Terms, weight: str, labels: str, shape: tuple[int, ...], axis: int) -> str:
    """The weight of every label's class."""
    (classes,) = t.shape_of(weight)
    column = t.reshape(weight, (classes, *(1,) * (len(shape) - axis - 1)), label="weights")
    return _at_labels(t, column, labels, axis, "weight", rank=len(shape))


def _at_labels(t: Terms, data: str, labels: str, axis: int, label: str, rank: int | None = None) -> str:
    """data[.., labels, ..] along `axis`, 0 where the label is no class."""
    rank = len(t.shape_of(data)) if rank is None else rank
    along = len(t.shape_of(data)) - rank + axis  # data may lack leading dimensions
    size, where = t.shape_of(data)[along], t.shape_of(labels)
    classes = np.arange(size).reshape(-1, *(1,) * (rank - axis - 1))
    column = t.reshape(labels, (*where[:axis], 1, *where[axis:]), label="labels")
    hit = t.emit("Equal", column, t.constant(classes, t.dtype_of(labels), "classes"), label="is_label")
    chosen = t.emit("Where", hit, data, t.constant(0, t.dtype_of(data), "zero"), label=f"{label}/only")
    return t.emit("ReduceSum", chosen, label=label, axes=(axis,), keepdims=0)


def valid_labels(t: Terms, labels: str, ignore_index: int) -> str:
    ignored = t.emit("Equal", labels, t.constant(ignore_index, t.dtype_of(labels), "ignore"), label="ignored")
    return t.emit("Not", ignored, label="valid")


def only_valid(t: Terms, x: str, valid: str | None, label: str) -> str:
    """x, 0 where the label is ignored."""
    return t.emit("Where", valid, x, t.constant(0, t.dtype_of(x), "zero"), label=label) if valid else x


def weighted_mean(t: Terms, losses: str, weights: str | None, valid: str | None, label: str = "") -> str:
    """Over all labels; `losses` are not yet weighted."""
    axes, dtype = tuple(range(len(t.shape_of(losses)))), t.dtype_of(losses)
    if weights is not None:
        counts = only_valid(t, weights, valid, "counts")
        losses = t.emit("Mul", losses, weights, label="weighted")
    elif valid is not None:
        counts = t.emit("Cast", valid, label="counts", to=dtype)
    else:
        return t.emit("ReduceMean", losses, label=label, axes=axes, keepdims=0)
    total = t.emit("ReduceSum", only_valid(t, losses, valid, "kept"), label="sum", axes=axes, keepdims=0)
    count = t.emit("ReduceSum", counts, label="count", axes=axes, keepdims=0)
    nothing = t.emit("Equal", count, t.constant(0, dtype, "zero"), label="nothing")
    divisor = t.emit("Where", nothing, t.constant(1, dtype, "one"), count, label="divisor")
    return t.emit("Div", total, divisor, label=label)


def mean_squared_error(t: Terms, found: str, labels: str, label: str = "") -> str:
    error = t.emit("Sub", found, labels, label="error")
    square = t.emit("Mul", error, error, label="square")
    axes = tuple(range(len(t.shape_of(square))))
    return t.emit("ReduceMean", square, label=label, axes=axes, keepdims=0)
