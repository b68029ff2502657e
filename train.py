"""Training from the command line: batches from a file, and the loop with its progress bar.

    Batches(path, arrays, inputs)       consecutive slices of the planned batch size
    Run(compiled, state).train(...)     metrics as JSON lines; its state is always the last good one
Planned steps and options are not here: rewrite/training.py, options.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .program import TensorType, UserError

if TYPE_CHECKING:
    from .runtime.training import CompiledStep, State

Tell = Callable[[str], None]
QUIET_SECONDS = 10.0  # between two plain lines, where there is no terminal


# ------------------------------------------------------------------------------------------------ data


class Batches:
    """Batches of the planned size from whole arrays, first to last; a rest that fills no batch is left out.

    An input without dimensions is the same in every batch.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, np.ndarray], inputs: Mapping[str, TensorType]
    ) -> None:
        self.path, self.inputs = path, inputs
        self.arrays = {name: _checked(path, name, arrays, expected) for name, expected in inputs.items()}
        for name in arrays:
            if name not in inputs:
                raise UserError(f"{path}: the plan has no input {name!r}; it has {', '.join(inputs)}")
        sized = [(name, len(self.arrays[name]), t.shape[0]) for name, t in inputs.items() if t.rank]
        self.examples, self.size, self.count = 1, 1, None  # any number of batches
        for i, (name, examples, size) in enumerate(sized):
            if i == 0:
                self.examples, self.size, self.count = examples, size, examples // size
            elif examples * self.size != self.examples * size:
                raise UserError(
                    f"{path}: input {sized[0][0]!r} has {self.examples} examples, but {name!r} has {examples}"
                )
        wide = [t.shape for t in inputs.values() if t.rank == 2 and not t.floating]
        self.tokens = wide[0][0] * wide[0][1] if wide else None  # of a batch

    def require(self, steps: int, first: int, repeat: bool) -> None:
        """Refuse data that do not suffice, before anything is done."""
        if self.count == 0:
            raise UserError(f"{self.path}: {self.examples} examples are no batch of {self.size}")
        if self.count is not None and steps > self.count and not repeat:
            raise UserError(
                f"{self.path}: data ends early: {self.examples} examples are enough for {self.count} "
                f"{'step' if self.count == 1 else 'steps'} of {self.size}, step {first + self.count} has none; "
                "--repeat starts again"
            )

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        found = {}
        for name, expected in self.inputs.items():
            array = self.arrays[name]
            if expected.rank and self.count:
                size, i = expected.shape[0], step % self.count
                array = array[i * size : (i + 1) * size]
            found[name] = array
        return found


def _checked(path: Path, name: str, arrays: Mapping[str, np.ndarray], expected: TensorType) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"{path}: input {name!r} is missing, expected {_many(expected)}")
    array = arrays[name]
    if expected.dtype == "bfloat16" and array.dtype == np.float32:  # NumPy files have no bfloat16
        from .runtime.training import as_stored

        array = as_stored(array, expected.dtype)
    fits = array.ndim == expected.rank and array.shape[1:] == expected.shape[1:]
    if not fits or str(array.dtype) != expected.dtype:
        found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        raise UserError(f"{path}: input {name!r}: expected {_many(expected)}, found {found}")
    return array


def _many(expected: TensorType) -> str:
    if not expected.rank:
        return str(expected)
    sizes = ",".join(["n", *map(str, expected.shape[1:])])
    return f"{expected.dtype}[{sizes}] in batches of {expected.shape[0]}"


# ------------------------------------------------------------------------------------------------ the loop


@dataclass
class Run:
    """A training run: its state is always the last good one."""

    compiled: CompiledStep
    state: State
    last: dict[str, Any] | None = None  # metrics of the last step

    @property
    def lost(self) -> bool:
        """Interrupted in the middle of a step, which had used up the state."""
        return any(getattr(value, "is_deleted", bool)() for value in self.state.values())

    def train(
        self, batches: Batches, steps: int, learning_rate: float | None, metrics: Path | None, say: Tell
    ) -> None:
        """Do the steps; an error leaves the state of the step before it."""
        first = self.state[self.compiled.count]
        with _writer(metrics) as write, _bar(steps, say) as show:
            for i in range(steps):
                start = time.monotonic()
                try:
                    self.state, found = self.compiled.step(self.state, batches[i], learning_rate)
                except UserError as error:
                    self.state = getattr(error, "state", self.state)
                    raise
                seconds = time.monotonic() - start
                self.last = {
                    "step": first + i + 1,
                    "loss": found["loss"],
                    "learning_rate": learning_rate,
                    "seconds": seconds,
                    "examples_per_s": batches.size / seconds,
                }
                if batches.tokens:
                    self.last["tokens_per_s"] = batches.tokens / seconds
                write(self.last)
                show(self.last)


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Writes metrics as JSON lines, each when it is there."""
    if path is None:
        yield lambda _: None
        return
    with path.open("w", encoding="utf-8") as file:

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield write


@contextlib.contextmanager
def _bar(steps: int, say: Tell) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar on a terminal; plain lines, few, elsewhere."""

    def text(line: Mapping[str, Any]) -> str:
        speed = f", {line['tokens_per_s']:.3g} tokens/s" if "tokens_per_s" in line else ""
        return f"loss {line['loss']:.4g}, {line['seconds']:.3g} s a step{speed}"

    if not sys.stderr.isatty():
        said = 0.0

        def tell(line: Mapping[str, Any]) -> None:
            nonlocal said
            if time.monotonic() - said > QUIET_SECONDS:
                said = time.monotonic()
                say(f"step {line['step']}: {text(line)}")

        yield tell
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps)
        yield lambda line: progress.update(task, advance=1, description=text(line))
