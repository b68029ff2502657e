"""A logical graph: canonical nodes over named, statically typed tensors.

In: what a reader or a rewrite produced.  Out: a validated `Graph` with a digest, and its weights' values on
demand.  A tensor is exactly one of: an input (fed at every step), a parameter (a float weight in the model
file), a constant (a value the graph carries: folded masks, scalars, integer tables), a node's output.
`digest` covers nodes, types and constants, not weights' values nor names of the graph and file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from ..program import Node, TensorType, UserError
from .model_file import read_model, tensor_value


@dataclass(frozen=True)
class Statistic:
    """A weight of the file that holds a running average: momentum w + (1 - momentum) measured, at every training step.

    `measured` is a tensor of the graph.  The weight itself is none of the graph's parameters unless a node reads it.
    """

    name: str
    type: TensorType
    measured: str
    momentum: float


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in topological order with everything they read; checks itself when built."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    constants: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    types: dict[str, TensorType]
    source: Path | None = None
    statistics: tuple[Statistic, ...] = ()
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "digest", _digest(self))

    @property
    def leaves(self) -> Iterator[str]:
        """Inputs, parameters and constants, in this order."""
        yield from (name for name, _ in self.ports)

    @property
    def ports(self) -> Iterator[tuple[str, str]]:
        """The leaves, each with its kind: input, parameter or constant."""
        yield from ((name, "input") for name in self.inputs)
        yield from ((name, "parameter") for name in self.parameters)
        yield from ((name, "constant") for name in self.constants)

    def _check(self) -> None:
        defined: set[str] = set()
        for tensor in self.leaves:
            self._define(tensor, defined)
        for name, value in self.constants.items():
            found = TensorType(value.shape, str(value.dtype))
            if found != self.types[name]:
                raise ValueError(f"constant {name!r} is {found}, its type says {self.types[name]}")
        node_names: set[str] = set()
        for node in self.nodes:
            if node.name in node_names:
                raise ValueError(f"two nodes are named {node.name!r}")
            node_names.add(node.name)
            for tensor in node.inputs:
                if tensor not in defined:
                    raise ValueError(f"node {node.name!r} reads {tensor!r}, which nothing before it defines")
            for tensor in node.outputs:
                self._define(tensor, defined)
        for tensor in self.outputs:
            if tensor not in defined:
                raise ValueError(f"output {tensor!r} is not defined")
        for statistic in self.statistics:
            if statistic.measured not in defined:
                raise ValueError(f"what {statistic.name!r} averages, {statistic.measured!r}, is not defined")

    def _define(self, tensor: str, defined: set[str]) -> None:
        if tensor in defined:
            raise ValueError(f"tensor {tensor!r} is defined twice")
        if tensor not in self.types:
            raise ValueError(f"tensor {tensor!r} has no type")
        defined.add(tensor)


@dataclass(frozen=True)
class Roles:
    """What makes a graph a training step.

    `phases`: a node's name to 0 (forward), 1 (backward) or 2 (optimizer).  `state`: pairs of a leaf and the output
    that is its value in the next step.
    """

    phases: Mapping[str, int] = field(default_factory=dict)
    state: tuple[tuple[str, str], ...] = ()


def _digest(graph: Graph) -> str:
    """SHA-256 of the canonical content, the same under any hash seed."""
    content = {
        "nodes": [
            [n.name, n.domain, n.op, n.inputs, n.outputs, sorted(n.attributes.items())] for n in graph.nodes
        ],
        "inputs": graph.inputs,
        "parameters": graph.parameters,
        "outputs": graph.outputs,
        "types": sorted((name, t.dtype, t.shape) for name, t in graph.types.items()),
    }
    hasher = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode())
    for name in sorted(graph.constants):
        hasher.update(name.encode())
        hasher.update(np.ascontiguousarray(graph.constants[name]).tobytes())
    return hasher.hexdigest()


def tensor_source(graph: Graph) -> Callable[[str], np.ndarray]:
    """A function from a parameter's or constant's name to its value, read from the model file when asked."""
    if graph.source is None:
        return _constant_source(graph)
    path = graph.source

    @cache
    def file() -> tuple[dict[str, onnx.TensorProto], dict[str, onnx.NodeProto]]:
        model = read_model(path)
        fills = {node.output[0]: node for node in model.graph.node if node.op_type == "ConstantOfShape"}
        return {tensor.name: tensor for tensor in model.graph.initializer}, fills

    def value(name: str) -> np.ndarray:
        if name in graph.constants:
            return graph.constants[name]
        stored, fills = file()
        if name in stored:
            return tensor_value(stored[name], path)
        if name in fills:
            t = graph.types[name]
            return np.full(t.shape, fill_value(fills[name]), dtype=np.dtype(t.dtype))
        raise UserError(f"{path}: no weight is named {name!r}; has the file changed since it was planned?")

    return value


def _constant_source(graph: Graph) -> Callable[[str], np.ndarray]:
    def value(name: str) -> np.ndarray:
        if name not in graph.constants:
            raise UserError(f"graph {graph.name!r}: {name!r} has no value, the graph came from no file")
        return graph.constants[name]

    return value


def fill_value(node: onnx.NodeProto) -> np.ndarray:
    """The value a ConstantOfShape node repeats, as a 0-d array (float32 zero unless it says otherwise)."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return numpy_helper.to_array(attribute.t).reshape(())
    return np.zeros((), np.float32)
