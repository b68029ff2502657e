"""The examples: their text and batches, and that training which does not work is told. That they run: test_docs.py."""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from parallegg.runtime.devices import ensure_devices

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPES = {"input_ids": (4, 16), "labels": (4, 16)}


@pytest.fixture
def docstrings(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import docstrings

    yield docstrings
    sys.modules.pop("docstrings")


def test_labels_are_the_next_byte_of_the_text(docstrings):
    text = docstrings.text()
    assert len(text) > 100_000 and max(text) < 128
    for batch in itertools.islice(docstrings.batches(SHAPES), 3):
        assert {name: array.shape for name, array in batch.items()} == SHAPES
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            assert bytes([inputs[0], *labels]) in text
            assert np.array_equal(inputs[1:], labels[:-1])


def test_batches_are_the_same_every_time(docstrings):
    one, other = (next(docstrings.batches(SHAPES, seed=3)) for _ in range(2))
    assert np.array_equal(one["input_ids"], other["input_ids"])
    assert not np.array_equal(one["input_ids"], next(docstrings.batches(SHAPES, seed=4))["input_ids"])


def test_a_loss_that_does_not_fall_is_told(docstrings, tmp_path, monkeypatch):
    ensure_devices(8)
    sizes = "--layers 1 --width 8 --heads 2 --context 8 --batch 8 --mesh data=2 --steps 3 --learning-rate 0"
    monkeypatch.setattr("sys.argv", ["train_gpt.py", *sizes.split(), "--folder", str(tmp_path)])
    with pytest.raises(AssertionError, match="the loss has not fallen"):
        runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")
