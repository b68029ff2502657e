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

from dataclasses import dataclass

from ..mesh import Mesh
from ..program import COLLECTIVE_DOMAIN, TensorType
from ..rewrite.collectives import COMMUNICATING
from ..rewrite.operators import flops
from ..rewrite.terms import RESULT, Head, adjoint_of, decode
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


def traffic(op: str, attributes, operand: TensorType, mesh: Mesh) -> Traffic | None:
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
    if adjoint := adjoint_of(head):
        return max(
            _adjoint_seconds(adjoint, operands, result, hardware), moved / hardware.memory_bytes_per_second
        ) + (hardware.launch_seconds)
    moving = moved / hardware.memory_bytes_per_second
    if domain == COLLECTIVE_DOMAIN:
        return moving + hardware.launch_seconds
    attributes.pop(RESULT, None)
    work = flops(op, attributes, operands)
    # Elementwise work never reaches the matrix units' rate; memory traffic is what bounds it.
    computing = hardware.compute_seconds(work, result.dtype) if op in _MATRIX else 0.0
    return max(computing, moving) + hardware.launch_seconds


def _adjoint_seconds(
    adjoint, operands: tuple[TensorType, ...], result: TensorType, hardware: Hardware
) -> float:
    """A product's adjoint by one operand is a product of the same work."""
    _, operand, shape, of = adjoint
    op, attributes, domain = decode(of)
    if op not in _MATRIX or domain:
        return 0.0
    own = list(operands[:-1])
    if shape is not None:
        own.insert(operand, result)
    return hardware.compute_seconds(flops(op, attributes, tuple(own)), result.dtype)
