"""What the plan's own operators (domain `parallegg`) do to a local type: collectives and the operators that know their
coordinate. One row each; the runtime implements the same names.

    AllReduce(axis, reduction)        same type on every coordinate: the sum, mean, max or min over the axis
    AllGather(axis, dim)              blocks of `dim` put together
    ReduceScatter(axis, dim)          block of `dim` of the sum over the axis
    AllToAll(axis, dim, to_dim)       `dim` becomes whole, `to_dim` is split
    LocalSlice(axis, dim)             this coordinate's block of `dim`; nothing is sent
    Include(axis)                     the value on coordinate 0, zero elsewhere; nothing is sent
    LocalIndices(axis, rows, mode)    indices into this coordinate's block of `rows` rows, -1 where the row is elsewhere
    GatherOrZero(axis)                ONNX Gather, but a negative index gives zero
    Shift(value)                      x + value
    Vjp(of, operand)                  the cotangent of an operand of the operator `of`, given operands and the result's
    Adjoint(of, operand, shape)       the same where `of` is linear in the operand, which is not read
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..mesh import Mesh
from ..program import COLLECTIVE_DOMAIN, TensorType, UserError
from .operators import OWN, infer
from .terms import ADJOINT, RESULT, VJP, Head, decode

COMMUNICATING = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
MOVES = frozenset({*COMMUNICATING, "LocalSlice", "Include"})  # from one placement to another


def infer_local(head: Head, operands: tuple[TensorType, ...], mesh: Mesh) -> TensorType:
    """The local type of a term over local operands; raises ValueError where it cannot be."""
    try:
        op, attributes, domain = decode(head)
    except KeyError:
        raise UserError(
            f"rule files make terms of {head.constructor}, but no operator is written that way: nothing could run it"
        ) from None
    if domain == COLLECTIVE_DOMAIN and op not in OWN:
        return _infer_own(op, attributes, operands, mesh)
    result = attributes.pop(RESULT, 0)  # which result of an operator with several
    return infer(op, attributes, operands)[result]


def _infer_own(
    op: str, attributes: Mapping[str, Any], operands: tuple[TensorType, ...], mesh: Mesh
) -> TensorType:
    x = operands[0]
    if op == "GatherOrZero":
        return infer("Gather", attributes, operands)[0]
    if op == VJP:
        return operands[attributes["operand"]]
    if op == ADJOINT:
        return TensorType(attributes["shape"], operands[-1].dtype)
    if op in ("AllReduce", "Include", "LocalIndices", "Shift"):
        return x
    ways = mesh[attributes["axis"]].size
    if op == "AllGather":
        return _scaled(x, attributes["dim"], ways, 1)
    if op in ("ReduceScatter", "LocalSlice"):
        return _scaled(x, attributes["dim"], 1, ways)
    if op == "AllToAll":
        return _scaled(_scaled(x, attributes["to_dim"], 1, ways), attributes["dim"], ways, 1)
    raise KeyError(op)


def _scaled(x: TensorType, dim: int, times: int, parts: int) -> TensorType:
    if dim >= x.rank or x.shape[dim] % parts:
        raise ValueError(f"dimension {dim} of {x} does not split in {parts}")
    shape = (*x.shape[:dim], x.shape[dim] * times // parts, *x.shape[dim + 1 :])
    return TensorType(shape, x.dtype)
