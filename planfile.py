"""The plan and its file format (docs/plan-format.md): see `Plan`, `save`, `load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .mesh import Layout, Mesh
from .program import Node, TensorType


@dataclass(frozen=True)
class Port:
    """An input or output of the plan's program.

    `kind` is "input" (the user feeds it), "parameter" (a weight read from the model file), "constant"
    (a value folded while planning) or "output". `type` is the logical (global) type.
    """

    name: str
    kind: str
    type: TensorType
    layout: Layout
    local: str  # the program's tensor that holds this device's part


@dataclass(frozen=True)
class Plan:
    """The explicit per-device program over a mesh.

    `nodes` compute on local shapes (`types`); collectives are nodes of the domain `parallegg` with the attributes
    `axis`, and `dim`, `to_dim` or `reduction` where they apply. `inputs` and `outputs` say how logical tensors are laid out.
    """

    mesh: Mesh
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
