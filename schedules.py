"""Learning rates by step.

    rate = cosine(1e-3, steps=1000, warmup=100)            a function: finished steps -> learning rate
    state, metrics = training.step(state, batch, rate)
During the `warmup` the rate rises in equal parts, so that step `warmup` (from 0) is the first one with the peak; linear
and cosine then fall to `final` at step `steps`, where they stay.  Optax's schedules are such functions, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .program import UserError

Schedule = Callable[[int], float]


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """The same rate at every step."""
    return _schedule(peak, warmup, lambda step: peak)


def linear(peak: float, steps: int, *, warmup: int = 0, final: float = 0.0) -> Schedule:
    """A straight line from `peak` to `final`."""
    return _falling(peak, steps, warmup, final, lambda done: 1 - done)


def cosine(peak: float, steps: int, *, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a period of a cosine from `peak` to `final`."""
    return _falling(peak, steps, warmup, final, lambda done: (1 + math.cos(math.pi * done)) / 2)


SCHEDULES: dict[str, Callable[..., Schedule]] = {"constant": constant, "linear": linear, "cosine": cosine}


def _falling(peak: float, steps: int, warmup: int, final: float, left: Callable[[float], float]) -> Schedule:
    """`left` maps how much of the way is done to how much of the height is left, both in [0, 1]."""
    if steps <= warmup:
        raise UserError(f"schedule: a warmup of {warmup} steps leaves none of {steps}")
    _rate("final", final)

    def after_warmup(step: int) -> float:
        height = left(min((step - warmup) / (steps - warmup), 1.0))
        return peak * height + final * (1 - height)  # exact at both ends

    return _schedule(peak, warmup, after_warmup)


def _schedule(peak: float, warmup: int, after_warmup: Schedule) -> Schedule:
    _rate("peak", peak)
    if warmup < 0:
        raise UserError(f"schedule: warmup is {warmup}, expected a number of steps")

    def rate(step: int) -> float:
        return peak * (step + 1) / (warmup + 1) if step < warmup else after_warmup(step)

    return rate


def _rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"schedule: {name} is {value}, expected a learning rate of at least 0")
