"""What a plan's steps cost: seconds of computing and moving, bytes of every collective.

    compute     max(flops / rate, bytes read and written / memory bandwidth) + launch          step_seconds()
    collective  ring formulas (Thakur et al. 2005) on the actual local bytes, n = axis size     traffic()
                  AllReduce      2 (n-1)/n of the operand        2 (n-1) latencies
                  AllGather      (n-1) times the operand           (n-1) latencies
                  ReduceScatter  (n-1)/n of the operand            (n-1) latencies
                  AllToAll       (n-1)/n of the operand            (n-1) latencies
Reshape, LocalSlice and the numbering of copies cost nothing but FREE_SECONDS, which keeps plans free of idle detours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..mesh import Mesh
from ..program import COLLECTIVE_DOMAIN, TensorType
from ..rewrite.collectives import COMMUNICATING
from ..rewrite.operators import flops
from ..rewrite.terms import Head, adjoint_of, decode
from .hardware import Hardware

FREE_SECONDS = 1e-12
_FREE = frozenset({"Reshape", "LocalSlice"})
_MATRIX = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})


@dataclass(frozen=True)
class Traffic:
    """One collective: `sent` bytes per device by the ring formulas, `payload` bytes of its operand."""

    kind: str
    axis: str
    sent: int
    payload: int
    latencies: int


def traffic(op: str, attributes: Mapping[str, Any], operand: TensorType, mesh: Mesh) -> Traffic | None:
    """What a collective sends; None for an operator that sends nothing."""
    if op not in COMMUNICATING:
        return None
    axis = attributes["axis"]
    n, payload = mesh[axis].size, operand.bytes
    if op == "AllReduce":
        return Traffic(op, axis, 2 * (n - 1) * payload // n, payload, 2 * (n - 1))
    if op == "AllGather":
        return Traffic(op, axis, (n - 1) * payload, payload, n - 1)
    return Traffic(op, axis, (n - 1) * payload // n, payload, n - 1)


def step_seconds(
    head: Head, operands: tuple[TensorType, ...], result: TensorType, mesh: Mesh, hardware: Hardware
) -> float:
    """Time of one local step or collective."""
    op, attributes, domain = decode(head)
    if op in _FREE:
        return FREE_SECONDS
    if domain == COLLECTIVE_DOMAIN and (sends := traffic(op, attributes, operands[0], mesh)):
        link = hardware.axis_link(sends.axis)
        return sends.latencies * link.latency_seconds + sends.sent / link.bytes_per_second
    moved = sum(t.bytes for t in operands) + result.bytes
    computing = hardware.compute_seconds(_matrix_flops(head, operands, result), result.dtype)
    return max(computing, moved / hardware.memory_bytes_per_second) + hardware.launch_seconds


def _matrix_flops(head: Head, operands: tuple[TensorType, ...], result: TensorType) -> int:
    """Work of the matrix units; other work never reaches their rate, memory traffic is what bounds it."""
    if adjoint := adjoint_of(head):  # a product's by one operand is a product of the same work
        _, operand, shape, head = adjoint
        operands = operands[:-1]
        if shape is not None:
            operands = (*operands[:operand], result, *operands[operand:])
    op, attributes, domain = decode(head)
    return flops(op, attributes, operands) if op in _MATRIX and not domain else 0
