"""Training from the command line: what --train asks for, batches from a file, the loop with its progress bar.

step = training_step_of(graph, wanted)           the step that the options of `plan --train` describe
batches = Batches(path, arrays, compiled)        consecutive slices of the planned batch size
state = train(compiled, batches, ...)            metrics as JSON lines; NonFinite carries the last good state
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .program import TensorType, UserError
from .rewrite.graph import Graph
from .rewrite.optimizers import SGD, Adam, AdamW, Optimizer
from .rewrite.training import LossSpec, TrainingStep, as_training_step, training_step

if TYPE_CHECKING:
    from .runtime.training import CompiledStep, State

Tell = Callable[[str], None]
QUIET_SECONDS = 10.0  # between two plain lines, where there is no terminal


@dataclass(frozen=True)
class Wanted:
    """The options of `plan --train` as they were given; None is the default."""

    loss: str | None = None
    label: str | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    freeze: Sequence[str] | None = None
    no_decay: Sequence[str] | None = None
    bf16: bool | None = None
    state: Sequence[str] | None = None

    def given(self) -> list[str]:
        """The options' names."""
        return [
            f"--{name.replace('_', '-')}"
            for name, value in vars(self).items()
            if value not in (None, [], False)
        ]

    def refuse(self) -> None:
        """Without --train."""
        if self.given():
            raise UserError(f"{self.given()[0]}: only with --train")


def training_step_of(graph: Graph, wanted: Wanted) -> TrainingStep:
    """The training step that the options describe."""
    if wanted.state:
        others = [name for name in wanted.given() if name not in ("--state", "--loss")]
        if others:
            raise UserError(f"{others[0]}: not with --state, the model is a training step already")
        return as_training_step(graph, list(wanted.state), loss=wanted.loss or "loss")
    if wanted.loss is None:
        raise UserError(
            "--train: give the loss by --loss, one of the model's outputs or cross-entropy:OUTPUT or mse:OUTPUT; "
            f"it has {', '.join(graph.outputs)}"
        )
    return training_step(
        graph,
        loss=_loss(wanted.loss, wanted.label, graph),
        optimizer=_optimizer(wanted),
        clip_norm=wanted.clip_norm,
        frozen=list(wanted.freeze or ()),
        no_decay=list(wanted.no_decay) if wanted.no_decay else None,
        compute_dtype="bfloat16" if wanted.bf16 else None,
    )


def _loss(text: str, label: str | None, graph: Graph) -> str | LossSpec:
    kind, colon, output = text.partition(":")
    if text in graph.outputs or not colon:
        if label is not None:
            raise UserError(f"--label {label}: only with --loss cross-entropy:OUTPUT or mse:OUTPUT")
        return text
    return LossSpec(kind, output, label or "labels")


def _optimizer(wanted: Wanted) -> Optimizer:
    name = wanted.optimizer or "adamw"
    if name not in ("adamw", "adam", "sgd"):
        raise UserError(f"--optimizer {name!r}: expected adamw, adam or sgd")
    if wanted.momentum is not None and name != "sgd":
        raise UserError("--momentum: only with --optimizer sgd")
    decay: dict[str, Any] = {} if wanted.weight_decay is None else {"weight_decay": wanted.weight_decay}
    if name == "sgd":
        return SGD(momentum=wanted.momentum or 0.0, **decay)
    return AdamW(**decay) if name == "adamw" else Adam(**decay)


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
