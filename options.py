"""What the command line's options say, as values.

    parse_memory, parse_shapes, parse_pins          --memory, --shape, --pin
    check_pins(pins, graph, mesh)                   once the model is known
    check_output(path)                              before any work is done
    training_step_of(graph, wanted)                 the step that the options of `plan --train` describe
    Rates(...).rates(steps, name)                learning rates by step, of the options of `train`
A mistake is one line that names the option.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mesh import Mesh, parse_layout
from .program import UserError
from .rewrite.graph import Graph
from .rewrite.optimizers import SGD, Adam, AdamW, Optimizer
from .rewrite.training import LossSpec, TrainingStep, as_training_step, training_step
from .schedules import SCHEDULES, Schedule, constant
from .units import parse_bytes


def parse_memory(text: str) -> int:
    """`80GB`"""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"--memory {error}") from None


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`x=8x3x224x224` for every input that is named."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        if not equals or not name or not re.fullmatch(r"-?\d+(x-?\d+)*", sizes):
            raise UserError(f"--shape {text!r}: expected INPUT=SIZExSIZE…, such as x=8x3x224x224")
        shape = tuple(map(int, sizes.split("x")))
        if min(shape) < 1:
            raise UserError(f"--shape {text!r}: every size must be positive")
        if name in shapes:
            raise UserError(f"--shape {text!r}: input {name!r} has a shape already")
        shapes[name] = shape
    return shapes


def parse_pins(texts: Sequence[str], mesh: Mesh) -> dict[str, str]:
    """`logits=S0,R` for every tensor that is named."""
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, layout = text.rpartition("=")
        if not equals or not name:
            raise UserError(f"--pin {text!r}: expected TENSOR=PLACEMENT,…, such as logits=S0,R")
        try:
            placements = parse_layout(layout)
        except UserError as error:
            raise UserError(f"--pin {text!r}: {error}") from None
        if len(placements) != len(mesh):
            raise UserError(
                f"--pin {text!r}: expected {len(mesh)} placements, one for each axis of mesh {mesh}"
            )
        if name in pins:
            raise UserError(f"--pin {text!r}: {name!r} is pinned already")
        pins[name] = layout
    return pins


def check_pins(pins: Mapping[str, str], graph: Graph, mesh: Mesh) -> None:
    """Refuse a pin of something else than an input, weight or output, or that its sizes do not allow."""
    known = (*graph.inputs, *graph.parameters, *graph.outputs)
    for name, layout in pins.items():
        if name not in known:
            few = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
            raise UserError(
                f"--pin {name}={layout}: no input, weight or output has this name; there are {few}"
            )
        try:
            mesh.local_shape(graph.types[name].shape, parse_layout(layout))
        except ValueError as error:
            raise UserError(f"--pin {name}={layout}: {error}") from None


def check_output(path: Path) -> None:
    """Refuse a place where nothing can be written, before any work is done."""
    if path.is_dir():
        raise UserError(f"{path}: cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: there is no folder {path.parent}")
    try:
        if path.exists() and not path.is_file():  # a new file would take the place of a device or a pipe
            raise UserError(f"{path}: cannot be written: it is no file")
        if path.exists():
            path.open("ab").close()
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


# ------------------------------------------------------------------------------------------------ plan --train


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

    def refuse(self) -> None:
        """Without --train."""
        for name in _given(self):
            raise UserError(f"{name}: only with --train")


def _given(options: Wanted | Rates) -> list[str]:
    """The names of the options that were given."""
    return [_option(name) for name, value in vars(options).items() if value is not None and value != []]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def training_step_of(graph: Graph, wanted: Wanted) -> TrainingStep:
    """The training step that the options describe."""
    if wanted.state:
        others = [name for name in _given(wanted) if name not in ("--state", "--loss")]
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
        strict=True,  # a weight that stays as it is may be a mistake; --freeze says that it is none
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


# ------------------------------------------------------------------------------------------------ train


@dataclass(frozen=True)
class Rates:
    """The options of `train` about the learning rate as they were given; None is the default."""

    learning_rate: float | None = None
    schedule: str | None = None
    warmup: int | None = None
    schedule_steps: int | None = None
    final_learning_rate: float | None = None

    def rates(self, steps: int, input_: str | None) -> Schedule | None:
        """Rates by step, where the last one is `steps`; None for a training step without such an input."""
        if input_ is None:
            for name in _given(self):
                raise UserError(f"{name}: the plan's training step takes no learning rate")
            return None
        kind, peak = self.schedule or "constant", 1e-3 if self.learning_rate is None else self.learning_rate
        if kind not in SCHEDULES:
            raise UserError(f"--schedule {kind!r}: expected {', '.join(SCHEDULES)}")
        if kind != "constant":
            last = self.schedule_steps or steps
            return SCHEDULES[kind](peak, last, warmup=self.warmup or 0, final=self.final_learning_rate or 0.0)
        for name in ("schedule_steps", "final_learning_rate"):
            if getattr(self, name) is not None:
                raise UserError(f"{_option(name)}: only with --schedule linear or cosine")
        return constant(peak, warmup=self.warmup or 0)
