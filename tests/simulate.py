"""A mesh in NumPy: every device's block in one array, collectives as array operations.

Independent of the runtime's lowering (only the operators' own functions are shared): a strategy's local steps are run
on every coordinate and the result is put together again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from parallegg.mesh import Layout, Mesh, Partial, Shard
from parallegg.rewrite.operators import OWN
from parallegg.rewrite.space import Step
from parallegg.rewrite.terms import Head, decode
from parallegg.runtime.lowering import cotangent
from parallegg.runtime.operators import JAX, exact_types

Coordinate = tuple[int, ...]
Blocks = dict[Coordinate, np.ndarray]
REDUCE: dict[str, Callable] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def coordinates(mesh: Mesh) -> Iterator[Coordinate]:
    return itertools.product(*(range(axis.size) for axis in mesh))


def split(value: np.ndarray, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Blocks:
    """Each device's part; partial sums are random."""
    blocks: Blocks = {(): value}
    for axis, placement in zip(mesh, layout, strict=True):
        grown: Blocks = {}
        for at, block in blocks.items():
            grown |= {(*at, k): part for k, part in enumerate(_parts(block, placement, axis.size, rng))}
        blocks = grown
    return blocks


def _parts(block: np.ndarray, placement, ways: int, rng: np.random.Generator) -> list[np.ndarray]:
    if isinstance(placement, Shard):
        return np.split(block, ways, placement.dim)
    if isinstance(placement, Partial):
        free = [rng.uniform(-1, 1, block.shape).astype(block.dtype) for _ in range(ways - 1)]
        return [*free, block - sum(free)]
    return [block] * ways


def join(blocks: Blocks, layout: Layout, mesh: Mesh) -> np.ndarray:
    """The logical value; AssertionError where replicas differ."""
    for index in reversed(range(len(layout))):
        shrunk: Blocks = {}
        for at in {at[:index] for at in blocks}:
            parts = [blocks[(*at, k)] for k in range(mesh.axes[index].size)]
            shrunk[at] = _joined(parts, layout[index])
        blocks = shrunk
    return blocks[()]


def _joined(parts: list[np.ndarray], placement) -> np.ndarray:
    if isinstance(placement, Shard):
        return np.concatenate(parts, placement.dim)
    if isinstance(placement, Partial):
        return np.sum(parts, 0)
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], rtol=1e-12, atol=1e-12)
    return parts[0]


def run(steps: Sequence[Step], operands: Sequence[Blocks], mesh: Mesh) -> Blocks:
    """The last step's blocks."""
    results: list[Blocks] = []
    for step in steps:
        results.append(
            run_step(step.head, [results[k] if k >= 0 else operands[~k] for k in step.operands], mesh)
        )
    return results[-1]


def run_step(head: Head, operands: Sequence[Blocks], mesh: Mesh) -> Blocks:
    op, attributes, domain = decode(head)
    adjoint = op in ("Vjp", "Adjoint")
    if adjoint or not domain or op in OWN:
        which = attributes.pop("result", 0)
        done: dict[tuple[int, ...], np.ndarray] = {}  # devices that hold the same arrays compute the same
        blocks = {}
        for at in coordinates(mesh):
            key = tuple(id(operand[at]) for operand in operands)
            if key not in done:
                arrays = [operand[at] for operand in operands]
                done[key] = pulled(attributes, arrays) if adjoint else compute(op, attributes, arrays)[which]
            blocks[at] = done[key]
        return blocks
    x = operands[0]
    if op == "Shift":
        return {at: block + attributes["value"] for at, block in x.items()}
    if op == "GatherOrZero":
        return {at: _gather_or_zero(x[at], operands[1][at], attributes["axis"]) for at in x}
    index = mesh.names.index(attributes["axis"])
    return {at: _collective(op, attributes, x, at, index, mesh) for at in x}


def _collective(op: str, attributes: dict, x: Blocks, at: Coordinate, index: int, mesh: Mesh) -> np.ndarray:
    ways, here = mesh.axes[index].size, at[index]
    group = [x[(*at[:index], k, *at[index + 1 :])] for k in range(ways)]
    dim = attributes.get("dim")
    if op == "AllReduce":
        return REDUCE[attributes["reduction"]](group, axis=0)
    if op == "AllGather":
        return np.concatenate(group, dim)
    if op == "ReduceScatter":
        return np.split(np.sum(group, 0), ways, dim)[here]
    if op == "AllToAll":
        return np.concatenate([np.split(block, ways, attributes["to_dim"])[here] for block in group], dim)
    if op == "LocalSlice":
        return np.split(x[at], ways, dim)[here]
    if op == "Include":
        return x[at] if here == 0 else np.zeros_like(x[at])
    assert op == "LocalIndices", op
    indices, rows = x[at], attributes["rows"]
    wrapped = np.where(indices < 0, indices + rows, indices) if attributes["mode"] == "wrap" else indices
    local = wrapped - here * (rows // ways)
    return np.where((local >= 0) & (local < rows // ways), local, -1)


def _gather_or_zero(rows: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    padded = np.concatenate([rows, np.zeros_like(np.take(rows, [0], axis))], axis)
    return np.take(padded, np.where(indices < 0, rows.shape[axis], indices), axis)


def pulled(attributes: dict, operands: Sequence[np.ndarray]) -> np.ndarray:
    """A Vjp or Adjoint on one device."""
    with exact_types():
        return np.asarray(cotangent(attributes, list(map(jnp.asarray, operands))))


def compute(op: str, attributes: dict, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """An ordinary operator on one device."""
    with exact_types():
        results = JAX[op](attributes, *map(jnp.asarray, operands))
    return tuple(map(np.asarray, results if isinstance(results, tuple) else (results,)))
