"""The certificate of a bound: what the search proved, checked without it, and every corruption found out."""

from __future__ import annotations

import io
import json

import numpy as np
import parallegg
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parallegg.extract.problem import Infeasible, Problem
from parallegg.extract.referee import optimum
from parallegg.extract.search import solve
from parallegg.extract.trail import Trail, certificate, problem_digest
from parallegg.verification.bound import check_bound, read_arrays

from .cli_models import mlp
from .test_extraction import SEEDS, random_problem

DUST = 1e-8


def certified(seed: int) -> tuple[Problem, bytes]:
    """A random problem with the certificate of its search; skips what has no solution."""
    problem, trail = random_problem(seed), Trail()
    try:
        solution = solve(problem, trail=trail)
    except Infeasible:
        assume(False)
    return problem, certificate(problem, solution.choice, trail)


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def with_meta(arrays: dict[str, np.ndarray], **changes: object) -> dict[str, np.ndarray]:
    meta = {**json.loads(arrays["meta"].tobytes()), **changes}
    return {**arrays, "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}


@settings(max_examples=50)
@given(SEEDS)
def test_what_the_search_proved_is_accepted_and_true(seed):
    problem, data = certified(seed)
    found = check_bound(data)
    assert found.holds, found.reason
    assert found.problem == problem_digest(problem)
    best = optimum(problem)[1]
    assert found.bound is not None and found.bound <= best + DUST * max(1.0, best)


@settings(max_examples=30)
@given(SEEDS, st.floats(1e-4, 10.0))
def test_a_bound_above_the_best_choice_is_never_accepted(seed, more):
    problem, data = certified(seed)
    best = optimum(problem)[1]
    claim = best + more * max(best, 1.0)
    found = check_bound(packed(with_meta(read_arrays(data), bound=claim)))
    assert not found.holds


def corrupted(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One number of one array changed, dropped or repeated."""
    name = sorted(arrays)[rng.integers(len(arrays))]
    array = arrays[name].copy()
    if not len(array) or rng.random() < 0.1:
        array = np.concatenate([array, np.zeros(1, array.dtype)]) if rng.random() < 0.5 else array[:-1]
    else:
        at = rng.integers(len(array))
        if array.dtype.kind == "f":
            array[at] = rng.choice(
                [0.0, -1.0, 1e30, np.inf, -np.inf, np.nan, 2 * array[at], array[at] + rng.normal()]
            )
        else:
            array[at] = rng.integers(0, 256) if array.dtype.itemsize == 1 else rng.integers(-3, 9)
    return {**arrays, name: array}


def is_true(found, problem: Problem) -> bool:
    """An accepted certificate of the same problem claims nothing false."""
    best = optimum(problem)[1]
    return found.problem != problem_digest(problem) or found.bound <= best + DUST * max(1.0, abs(best))


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_corrupted_numbers_are_found_or_change_nothing(count):
    rng = np.random.default_rng(count)
    made: list[tuple[Problem, dict[str, np.ndarray]]] = []
    for seed in range(60):
        problem, trail = random_problem(seed), Trail()
        try:
            solution = solve(problem, trail=trail)
        except Infeasible:
            continue
        made.append((problem, read_arrays(certificate(problem, solution.choice, trail))))
    refused = 0
    for _ in range(count):
        problem, arrays = made[rng.integers(len(made))]
        found = check_bound(packed(corrupted(arrays, rng)))
        refused += not found.holds
        assert not found.holds or is_true(found, problem)
    assert refused > 0.4 * count


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_corrupted_bytes_never_crash_the_checker(count):
    rng = np.random.default_rng(count)
    trail, problem = Trail(), random_problem(4)
    data = certificate(problem, solve(problem, trail=trail).choice, trail)
    for _ in range(count):
        changed = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 5)):
            changed[at] = rng.integers(256)
        if rng.random() < 0.2:
            del changed[rng.integers(len(changed)) :]
        found = check_bound(bytes(changed))
        assert not found.holds or is_true(found, problem)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "damaged"),
        (b"PK\x03\x04" + bytes(100), "damaged"),
        (packed({"meta": np.frombuffer(b"[" * 100_000, np.uint8)}), "no JSON"),
        (packed({"meta": np.frombuffer(b"{}", np.uint8)}), "format"),
        (packed({"other": np.zeros(3)}), "no meaning"),
        (packed({"choice": np.zeros((2, 2), np.int32)}), "rank 2"),
        (packed({"choice": np.zeros(2)}), "not <i4"),
    ],
    ids=["empty", "no zip", "deep meta", "no format", "unknown array", "matrix", "floats"],
)
def test_what_is_no_certificate_is_named(data, says):
    found = check_bound(data)
    assert not found.holds
    assert says in found.reason


def test_a_plan_comes_with_a_certificate_that_is_its_own(tmp_path):
    graph = parallegg.load(mlp(tmp_path / "mlp.onnx"))
    options = parallegg.Options(certify=True)
    planned = parallegg.plan(graph, "data=2,model=2", options=options)
    other = parallegg.plan(graph, "data=4", options=options)
    assert planned.certificate is not None and other.certificate is not None

    own = check_bound(planned.certificate, planned.plan.metadata)
    assert own.holds, own.reason
    assert own.bound == pytest.approx(planned.report["certified_bound_s"])
    foreign = check_bound(other.certificate, planned.plan.metadata)
    assert not foreign.holds and "another plan" in foreign.reason


def test_the_same_search_writes_the_same_certificate(tmp_path):
    graph = parallegg.load(mlp(tmp_path / "mlp.onnx"))
    first, second = (
        parallegg.plan(graph, "data=2,model=2", options=parallegg.Options(certify=True)) for _ in range(2)
    )
    assert first.certificate == second.certificate


def test_a_memory_limit_is_part_of_the_proof(tmp_path):
    graph = parallegg.load(mlp(tmp_path / "mlp.onnx"))
    free = parallegg.plan(graph, "data=2,model=2")
    limit = int(free.report["memory_bytes"] * 0.8)
    tight = parallegg.plan(
        graph, "data=2,model=2", memory_bytes=limit, options=parallegg.Options(certify=True)
    )
    assert tight.certificate is not None
    found = check_bound(tight.certificate, tight.plan.metadata)
    assert found.holds, found.reason
    assert found.memory_limit == limit
