"""Learning rates by step: against optax, at their ends, and what is refused."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallegg.program import UserError
from parallegg.schedules import SCHEDULES, constant, cosine, linear

STEPS, WARMUP, PEAK, FINAL = 20, 5, 0.01, 0.001
AFTER_WARMUP = {  # optax's schedules of the steps after the warmup
    "constant": lambda left: optax.constant_schedule(PEAK),
    "linear": lambda left: optax.linear_schedule(PEAK, FINAL, left),
    "cosine": lambda left: optax.cosine_decay_schedule(PEAK, left, alpha=FINAL / PEAK),
}


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_optaxs(name, warmup):
    ours = (
        constant(PEAK, warmup=warmup)
        if name == "constant"
        else SCHEDULES[name](PEAK, STEPS, warmup=warmup, final=FINAL)
    )
    rising = optax.linear_schedule(PEAK / (warmup + 1), PEAK, warmup)
    theirs = optax.join_schedules([rising, AFTER_WARMUP[name](STEPS - warmup)], [warmup])
    found = [ours(step) for step in range(STEPS + 3)]
    assert found == pytest.approx([float(theirs(step)) for step in range(STEPS + 3)], rel=1e-5)


@given(
    st.sampled_from([linear, cosine]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 30),
    st.integers(1, 30),
)
def test_a_falling_schedule_rises_to_its_peak_and_goes_to_its_end(kind, peak, final, warmup, falling):
    steps = warmup + falling
    rates = [kind(peak, steps, warmup=warmup, final=final)(step) for step in range(steps + 2)]
    assert rates[warmup] == peak
    assert rates[-2:] == [final, final]
    assert np.all(np.diff(rates[: warmup + 1]) >= 0)
    assert np.all(np.diff(rates[warmup:]) * np.sign(final - peak) >= -1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: cosine(1e-3, 10, warmup=10), "a warmup of 10 steps leaves none of 10"),
        (lambda: linear(1e-3, 0), "a warmup of 0 steps leaves none of 0"),
        (lambda: constant(float("nan")), "peak is nan"),
        (lambda: linear(1e-3, 10, final=-1.0), "final is -1.0"),
        (lambda: constant(1e-3, warmup=-1), "warmup is -1"),
    ],
)
def test_what_is_no_schedule_is_refused(make, text):
    with pytest.raises(UserError, match=text):
        make()
