"""Optimizers as terms: from a weight, its gradient and its moments to their new values.

    SGD     g' = g + d w;  m' = c m + g';  w' = w - r m'          (Nesterov: w - r (g' + c m'))
    Adam    m' = a m + (1-a) g;  v' = b v + (1-b) g**2;  w' = w - r m^ / (sqrt(v^) + e), ^ the bias correction
    AdamW   the same, with w (1 - r d) for w: decay that the moments do not see
r is the learning rate, d the weight decay.  Moments start at zero.  Equal to optax (tests/test_training.py).
What is the same for every weight is computed once, in float64 (`scalars`): 1 - b**t loses five digits in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..program import UserError
from .builder import Terms

Moments = Sequence[tuple[Terms, str]]  # for each: what writes its new value, and the old one


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise UserError(f"optimizer: {text}")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent; weight decay is added to the gradient."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    counts_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _need(0 <= self.momentum < 1, f"momentum must lie in [0, 1), got {self.momentum}")
        _need(self.momentum > 0 or not self.nesterov, "nesterov needs a momentum above 0")
        _need(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("sgd.momentum",) if self.momentum else ()

    def scalars(self, t: Terms, rate: str, step: str | None, dtype: str) -> tuple[str, ...]:
        return (t.emit("Cast", rate, label="rate", to=dtype),)

    def update(
        self, t: Terms, weight: str, gradient: str, moments: Moments, scalars: Sequence[str], decay: bool
    ) -> tuple[str, tuple[str, ...]]:
        """The weight's new value, named after `t`, and the new moments, named after their terms."""
        (rate,) = scalars
        if decay and self.weight_decay:
            gradient = _blend(t, gradient, self.weight_decay, weight, "decay")
        new = ()
        if self.momentum:
            ((to, old),) = moments
            new = (_blend(to, gradient, self.momentum, old),)
            gradient = _blend(t, gradient, self.momentum, new[0], "nesterov") if self.nesterov else new[0]
        return t.emit("Sub", weight, t.emit("Mul", rate, gradient, label="step")), new


@dataclass(frozen=True)
class Adam:
    """Adam; weight decay is added to the gradient (L2 regularisation)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    counts_steps: ClassVar[bool] = True
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            _need(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")
        _need(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}")
        _need(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("adam.mean", "adam.square")

    def scalars(self, t: Terms, rate: str, step: str | None, dtype: str) -> tuple[str, ...]:
        """r / (1 - a**t), 1 / sqrt(1 - b**t) and 1 - r d; `step` counts the finished steps, so t is one more."""
        assert step is not None

        def number(value: float, label: str) -> str:
            return t.constant(value, "float64", label)

        one = number(1, "one")
        count = t.emit("Add", t.emit("Cast", step, label="done", to="float64"), one, label="count")
        r = t.emit("Cast", rate, label="rate", to="float64")
        rest = [
            t.emit("Sub", one, t.emit("Pow", number(beta, "beta"), count, label="power"), label="correction")
            for beta in (self.beta1, self.beta2)
        ]
        size = t.emit("Div", r, rest[0], label="size")
        scale = t.emit("Reciprocal", t.emit("Sqrt", rest[1], label="root"), label="scale")
        results = [size, scale]
        if self.decoupled and self.weight_decay:
            lost = t.emit("Mul", r, number(self.weight_decay, "weight_decay"), label="lost")
            results.append(t.emit("Sub", one, lost, label="keep"))
        return tuple(t.emit("Cast", x, label=f"{x}/{dtype}", to=dtype) for x in results)

    def update(
        self, t: Terms, weight: str, gradient: str, moments: Moments, scalars: Sequence[str], decay: bool
    ) -> tuple[str, tuple[str, ...]]:
        """The weight's new value, named after `t`, and the new moments, named after their terms."""
        dtype = t.dtype_of(weight)
        if decay and self.weight_decay and not self.decoupled:
            gradient = _blend(t, gradient, self.weight_decay, weight, "decay")
        square = t.emit("Mul", gradient, gradient, label="square")
        first, second = (
            _blend(to, _times(to, 1 - beta, x, "fresh"), beta, old)
            for beta, x, (to, old) in zip((self.beta1, self.beta2), (gradient, square), moments, strict=True)
        )
        size, scale, *keep = scalars
        root = t.emit("Mul", t.emit("Sqrt", second, label="root"), scale, label="deviation")
        divisor = t.emit("Add", root, t.constant(self.epsilon, dtype, "epsilon"), label="divisor")
        change = t.emit("Mul", size, t.emit("Div", first, divisor, label="direction"), label="step")
        if decay and keep:
            weight = t.emit("Mul", keep[0], weight, label="kept")
        return t.emit("Sub", weight, change), (first, second)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 0.01
    decoupled: ClassVar[bool] = True


Optimizer = SGD | Adam


def _times(t: Terms, factor: float, x: str, label: str) -> str:
    return t.emit("Mul", t.constant(factor, t.dtype_of(x), "factor"), x, label=label)


def _blend(t: Terms, x: str, factor: float, y: str, label: str = "") -> str:
    """x + factor y"""
    return t.emit("Add", x, _times(t, factor, y, f"{label}/scaled" if label else "scaled"), label=label)


def clipped(t: Terms, gradients: Mapping[str, str], limit: float) -> dict[str, str]:
    """Every weight's gradient, scaled so that the norm of all of them together is at most `limit`."""
    dtypes = {t.dtype_of(gradient) for gradient in gradients.values()}
    dtype = "float64" if "float64" in dtypes else "float32"
    each = {weight: Terms(t.builder, f"{t.name}/{weight}") for weight in gradients}
    total = ""
    for weight, gradient in gradients.items():
        part = _square_sum(each[weight], gradient, dtype)
        total = each[weight].emit("Add", total, part, label="total") if total else part
    bound = t.constant(limit, dtype, "limit")
    larger = t.emit("Max", t.emit("Sqrt", total, label="norm"), bound, label="larger")
    scale = t.emit("Div", bound, larger, label="scale")
    scales = {d: t.emit("Cast", scale, label=f"scale/{d}", to=d) for d in sorted(dtypes)}
    return {
        weight: each[weight].emit("Mul", gradient, scales[t.dtype_of(gradient)])
        for weight, gradient in gradients.items()
    }


def _square_sum(t: Terms, x: str, dtype: str) -> str:
    wide = t.emit("Cast", x, label="wide", to=dtype)
    square = t.emit("Mul", wide, wide, label="square")
    axes = tuple(range(len(t.shape_of(square))))
    return t.emit("ReduceSum", square, label="sum", axes=axes, keepdims=0) if axes else square
