"""Training from the command line: the loop, with metrics as JSON lines and a progress bar.

    run = Run(compiled, state)
    run.train(batches, steps, rate, writers)    on any error run.state is the state after the last good step
    metrics_file(path, finished), bar(steps)    writers: where every step's metrics go
    finished_steps(values, name)                of a state that was written
Batches are those of batches.py, rates those of schedules.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .batches import Batch, examples_of, tokens_of
from .console import say
from .program import UserError
from .schedules import Schedule

if TYPE_CHECKING:
    from .runtime.training import CompiledStep, State

Write = Callable[[Mapping[str, Any]], None]  # takes the metrics of a step
FIRST_WAIT, LAST_WAIT = 1.0, 60.0  # seconds between two plain lines, where there is no terminal; it doubles


@dataclass
class Run:
    """A training run: its state is always the last good one; `first` and `last` are metrics of its steps."""

    compiled: CompiledStep
    state: State
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None

    @property
    def finished(self) -> int:
        """Steps, with those of runs before."""
        return self.state[self.compiled.count]

    @property
    def keeps(self) -> bool:
        """Is its state worth writing: after a step, and not of a step that was interrupted when it had used it up?"""
        used = (getattr(value, "is_deleted", bool)() for value in self.state.values())
        return self.first is not None and not any(used)

    def train(
        self, batches: Iterator[Batch], steps: int, rate: Schedule | None, writers: Sequence[Write]
    ) -> None:
        """Do the steps; an error or an interrupt leaves the state after the last good one."""
        with _stop_after_step() as stop:
            for _ in range(steps):
                metrics = self._step(batches, rate)
                for write in writers:
                    write(metrics)
                if stop():
                    raise KeyboardInterrupt

    def _step(self, batches: Iterator[Batch], rate: Schedule | None) -> dict[str, Any]:
        inputs = self.compiled.batch
        start = time.monotonic()
        try:
            self.state, found = self.compiled.step(self.state, next(batches), rate)
        except UserError as error:
            self.state = getattr(error, "state", self.state)
            raise
        seconds = time.monotonic() - start
        self.last = {
            "step": self.finished,
            "loss": found["loss"],
            "learning_rate": found.get("learning_rate"),
            "seconds": seconds,
            "examples_per_s": examples_of(inputs) / seconds,
        }
        if tokens := tokens_of(inputs):
            self.last["tokens_per_s"] = tokens / seconds
        self.first = self.first or self.last
        return self.last


@contextlib.contextmanager
def _stop_after_step() -> Iterator[Callable[[], bool]]:
    """Whether somebody asks to stop: a step that is interrupted in the middle has used up its state.

    Asked a second time, it stops at once.
    """
    asked = False

    def ask(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        say("stopping after this step; once more stops at once")

    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield lambda: asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finished_steps(values: Mapping[str, np.ndarray], name: str) -> int:
    """The entry `name` of a state's values; 0 where it has none."""
    count = values.get(name, np.zeros((), np.int64))
    if count.shape or count.dtype.kind not in "iu" or count < 0:
        raise UserError(f"state {name!r}: expected the number of finished steps, found {count}")
    return int(count)


@contextlib.contextmanager
def metrics_file(path: Path | None, finished: int) -> Iterator[Write]:
    """Writes metrics as JSON lines, each when it is there; those of the `finished` steps that are there stay."""
    if path is None:
        yield lambda _: None
        return
    kept = _lines_until(path, finished)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(kept)

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield write


def _lines_until(path: Path, finished: int) -> list[str]:
    if not finished or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [line for line in lines if json.loads(line)["step"] <= finished]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: cannot be continued: it has lines that are no metrics") from None


@contextlib.contextmanager
def bar(steps: int) -> Iterator[Write]:
    """A bar on a terminal; plain lines, few, elsewhere."""

    def text(line: Mapping[str, Any]) -> str:
        speed = f", {line['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in line else ""
        return f"loss {line['loss']:.4g}, {line['seconds']:.3g} s a step{speed}"

    if not sys.stderr.isatty():
        due, wait = 0.0, FIRST_WAIT

        def tell(line: Mapping[str, Any]) -> None:
            nonlocal due, wait
            if time.monotonic() >= due:
                due, wait = time.monotonic() + wait, min(2 * wait, LAST_WAIT)
                say(f"step {line['step']}: {text(line)}")

        yield tell
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps)
        yield lambda line: progress.update(task, advance=1, description=text(line))
