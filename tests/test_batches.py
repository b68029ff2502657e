"""Batches for training: slices of arrays, what functions yield, and what goes wrong in them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from parallegg.batches import examples_of, open_data, tokens_of
from parallegg.program import TensorType, UserError

INPUTS = {
    "ids": TensorType((2, 3), "int64"),
    "x": TensorType((4, 2), "float32"),
    "t": TensorType((), "float32"),
}
FUNCTIONS = """
import dataclasses
import neighbour

@dataclasses.dataclass
class Batch:
    number: "int"

def three():
    for number in range(3):
        yield {"ids": [[Batch(number).number] * 3] * 2, "x": neighbour.x(number), "t": number}

def shapes(shapes):
    yield {name: number for number, name in enumerate(shapes.values())}

def fails():
    yield {}
    neighbour.fail()

def exits():
    raise SystemExit(3)

def none():
    return iter(())

def pairs():
    yield [("ids", 1)]

def ragged():
    yield {"ids": [[1], [1, 2]]}

def needs(rows):
    yield {}

def number():
    return 3

text = "abc"
"""
NEIGHBOUR = """
def x(number):
    return [[number] * 2] * 4

def fail():
    raise OSError("the disk\\nis gone")
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "neighbour", raising=False)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    path = tmp_path / "data.py"
    path.write_text(FUNCTIONS)
    return path


def unchecked(batch, what):
    pass


def opened(path: Path, function: str = "", check=unchecked):
    return open_data(f"{path}:{function}" if function else str(path), INPUTS, check)


def numbers(data, skip: int, repeat: bool, count: int) -> list[int]:
    """What the first batches hold in their first element."""
    return [int(batch["ids"][0, 0]) for batch in itertools.islice(data.batches(skip, repeat), count)]


def columns(examples: int) -> dict[str, np.ndarray]:
    """Arrays whose batches hold their number."""
    ids = np.repeat(np.arange(examples)[:, None] // 2, 3, 1)
    x = np.repeat(np.arange(2 * examples)[:, None] // 4, 2, 1).astype(np.float32)
    return {"ids": ids, "x": x, "t": np.float32(0.5)}


def test_arrays_are_sliced_in_order(tmp_path):
    np.savez(tmp_path / "d.npz", **columns(6))
    data = opened(tmp_path / "d.npz")
    batches = list(itertools.islice(data.batches(0, False), 3))
    for number, batch in enumerate(batches):
        assert {name: array.shape for name, array in batch.items()} == {
            name: type_.shape for name, type_ in INPUTS.items()
        }
        assert (batch["ids"] == number).all() and (batch["x"] == number).all() and batch["t"] == 0.5


@pytest.mark.parametrize("kind", ["arrays", "function"])
def test_batches_can_be_left_out_and_begin_again(kind, file, tmp_path):
    np.savez(tmp_path / "d.npz", **columns(6))
    data = opened(tmp_path / "d.npz") if kind == "arrays" else opened(file, "three")
    assert numbers(data, 0, False, 3) == [0, 1, 2]
    assert numbers(data, 2, True, 5) == [2, 0, 1, 2, 0]
    assert numbers(data, 7, True, 2) == [1, 2]
    with pytest.raises(UserError, match="data ends early, after 3 batches"):
        numbers(data, 1, False, 3)


def test_arrays_that_do_not_suffice_are_refused_at_once(tmp_path):
    np.savez(tmp_path / "d.npz", **columns(6))
    data = opened(tmp_path / "d.npz")
    data.require(3, 1, 0, False)
    data.require(300, 1, 0, True)
    with pytest.raises(
        UserError, match=r"6 examples are enough for 3 steps of 2, step 4 has none; --repeat starts again"
    ):
        data.require(4, 1, 0, False)
    with pytest.raises(
        UserError, match=r"for 1 step of 2 without the first 2 batches \(--skip\), step 4 has none"
    ):
        data.require(2, 3, 2, False)
    np.savez(tmp_path / "d.npz", **columns(1))
    with pytest.raises(UserError, match="1 examples are no batch of 2"):
        opened(tmp_path / "d.npz").require(1, 1, 0, True)


def test_a_function_may_ask_for_the_shapes(file):
    found = next(opened(file, "shapes").batches(0, False))
    assert {name: array.item() for name, array in found.items()} == {(2, 3): 0, (4, 2): 1, (): 2}


def test_a_batch_is_checked_under_its_name(file):
    def refuse(batch, what):
        raise UserError(f"{what}: {sorted(batch)}")

    with pytest.raises(UserError, match=r"data\.py:three: batch 2: \['ids', 't', 'x'\]"):
        next(opened(file, "three", refuse).batches(1, False))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("fails", r"data\.py:18: OSError: the disk is gone"),
        ("exits", r"data\.py:21: SystemExit: 3"),
        ("none", r"data\.py:none: data ends early, it yields no batch"),
        ("pairs", r"data\.py:pairs: batch 1: found a list, expected a dict of arrays"),
        ("ragged", r"data\.py:ragged: batch 1: input 'ids' is no array"),
        ("needs", r"data\.py: TypeError: needs\(\) missing 1 required"),
        ("number", r"data\.py: TypeError: 'int' object is not iterable"),
    ],
)
def test_what_goes_wrong_in_a_function_is_one_line(function, text, file):
    batches = opened(file, function).batches(0, True)
    with pytest.raises(UserError, match=text) as caught:
        list(itertools.islice(batches, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def batches(:", r"bad\.py:1: SyntaxError: invalid syntax"),
        ("\nimport no_such_module", r"bad\.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def other(): pass\ndef _own(): pass", r"bad\.py: has no function 'batches'; it has other$"),
        ("batches = 'abc'", r"bad\.py: 'batches' is of type str, expected a function"),
        (None, r"bad\.py: cannot be read: No such file"),
    ],
)
def test_a_file_without_batches_is_one_line(content, text, tmp_path):
    path = tmp_path / "bad.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=text):
        opened(path, "batches")


def test_a_python_file_needs_a_function(file):
    with pytest.raises(UserError, match=r"Expected .*data\.py:FUNCTION"):
        opened(file)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": None}, r"input 'ids' is missing, expected int64\[n,3\] in batches of 2"),
        ({"q": np.zeros(2)}, "the plan has no input 'q'; it has ids, x, t"),
        ({"x": np.zeros((6, 2), np.float32)}, "'ids' has 6 examples, but 'x' has 6"),
        ({"x": np.zeros((12, 2))}, r"'x': expected float32\[n,2\] in batches of 4, found float64\[12,2\]"),
        ({"t": np.zeros(1, np.float32)}, r"'t': expected float32\[\], found float32\[1\]"),
    ],
)
def test_wrong_arrays_are_one_line(change, text, tmp_path):
    arrays = {name: array for name, array in (columns(6) | change).items() if array is not None}
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UserError, match=rf"d\.npz: .*{text}"):
        opened(tmp_path / "d.npz")


def test_float32_is_taken_for_bfloat16(tmp_path):
    np.savez(tmp_path / "d.npz", h=np.ones((4, 2), np.float32))
    data = open_data(str(tmp_path / "d.npz"), {"h": TensorType((2, 2), "bfloat16")}, unchecked)
    assert str(next(data.batches(0, False))["h"].dtype) == "bfloat16"


def test_examples_and_tokens_are_counted():
    assert (examples_of(INPUTS), tokens_of(INPUTS)) == (2, 6)
    assert (examples_of({"t": INPUTS["t"]}), tokens_of({"x": INPUTS["x"]})) == (1, None)
