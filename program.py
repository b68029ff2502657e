"""The flat program: what term graphs and plans are both made of.

A program is a list of `Node`s in topological order over named tensors, each tensor with a static
`TensorType`. Nodes carry *canonical* operators (see `rewrite/operators.py`): ONNX operators whose
sizes, axes and other non-tensor operands are attributes. Collectives live in the domain `parallegg`.
This module knows nothing of meshes, e-graphs or JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLLECTIVE_DOMAIN = "parallegg"

ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
MOST_BYTES = 2**63 - 1  # sizes are 64-bit integers in the e-graph
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


class UserError(Exception):
    """A mistake in what the user gave: one line naming place, expected, found and remedy (exit code 2)."""


@dataclass(frozen=True)
class TensorType:
    """Static shape and element type (numpy-style name, `bfloat16` included)."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"element type {self.dtype!r} is not supported")
        if self.bytes > MOST_BYTES:
            raise ValueError(f"{self} is too large: it has {self.bytes} bytes")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATING

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Node:
    """One application of an operator: `outputs = op(inputs; attributes)`.

    Attribute values are int, float, str or tuples of those; a missing optional attribute is absent.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""

    @property
    def is_collective(self) -> bool:
        return self.domain == COLLECTIVE_DOMAIN
