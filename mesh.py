"""Mesh axes and placements.

A `Mesh` is an ordered list of named device axes (`data=2, model=4`). A tensor's `Layout` holds one
placement per axis, in mesh order, applied by nesting: an earlier axis splits first, a later axis splits
what the earlier ones left (so a dimension split by two axes has the earlier axis outermost).

    Shard(d)     dimension d is split evenly over the axis
    Replicate()  every coordinate holds all of it
    Partial()    the sum over the axis's coordinates is the value
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .program import UserError

MOST_DEVICES = 2**31 - 1


@dataclass(frozen=True, order=True)
class Shard:
    """Dimension `dim` is split evenly over the axis."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, order=True)
class Replicate:
    """Every coordinate of the axis holds all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Partial:
    """The sum over the coordinates of the axis is the value."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial
Layout = tuple[Placement, ...]


def parse_placement(text: str) -> Placement:
    """`S0`, `R` or `P`, as `str(placement)` writes them."""
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    if re.fullmatch(r"S\d+", text):
        return Shard(int(text[1:]))
    raise UserError(f"placement {text!r}: expected R, P or S<dimension>, such as S0")


def format_layout(layout: Layout) -> str:
    """`S0,R`: one placement per mesh axis, in mesh order."""
    return ",".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    return tuple(parse_placement(part) for part in text.split(",")) if text else ()


@dataclass(frozen=True)
class Axis:
    """A named mesh axis of `size` devices."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Named device axes in order; `Mesh.parse("data=2,model=4")`."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for axis in self.axes:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", axis.name):
                raise UserError(
                    f"mesh axis {axis.name!r}: a name is a letter followed by letters, digits or _"
                )
            if axis.size < 1:
                raise UserError(f"mesh axis {axis.name!r}: size {axis.size} is not positive")
        if self.size > MOST_DEVICES:
            raise UserError(f"mesh {self}: {self.size} devices are more than {MOST_DEVICES}")
        if len(set(names)) != len(names):
            raise UserError(f"mesh {self}: an axis name appears twice")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        axes = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(-?\d+)\s*", part)
            if not match:
                raise UserError(f"mesh {text!r}: expected NAME=SIZE[,NAME=SIZE…], such as data=2,model=4")
            axes.append(Axis(match[1], int(match[2])))
        return cls(tuple(axes))

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """Shape of one device's part; raises ValueError where an axis does not divide what it splits."""
        if len(layout) != len(self.axes):
            raise ValueError(f"layout {format_layout(layout)} has {len(layout)} placements for mesh {self}")
        local = list(shape)
        for axis, placement in zip(self.axes, layout, strict=True):
            if isinstance(placement, Shard):
                if placement.dim >= len(local):
                    raise ValueError(
                        f"{placement} on axis {axis.name!r}: the shape {shape} has no such dimension"
                    )
                if local[placement.dim] % axis.size:
                    raise ValueError(
                        f"{placement} on axis {axis.name!r}: {axis.size} does not divide {local[placement.dim]}"
                    )
                local[placement.dim] //= axis.size
        return tuple(local)

    def replicated(self) -> Layout:
        return (Replicate(),) * len(self.axes)


ONE_DEVICE = Mesh(())
