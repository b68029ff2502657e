"""Between nodes and terms: how a canonical node is written in the e-graph, and read back.

A term is a constructor of the rule files with its attributes first. `encode(node)` gives constructor and attributes;
`decode(constructor, attributes)` gives operator, attributes and domain again. Families (Unary, Binary, Reduce, Pool)
carry the operator's name as first attribute; attributes that no rule looks at travel in the same string as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..mesh import Placement, Shard
from ..program import COLLECTIVE_DOMAIN, Node, TensorType, UserError
from .operators import OPERATORS, OWN

VJP, ADJOINT = "Vjp", "Adjoint"  # nodes that compute the cotangent of an operand (rules/adjoints.py)
RESULT = "result"  # attribute of a term: which result of an operator with several

Value = int | float | str | tuple[int, ...]


class Head(NamedTuple):
    """A constructor with its attributes: a term without its operands."""

    constructor: str
    attributes: tuple[Value, ...] = ()


@dataclass(frozen=True)
class _Form:
    """How one operator is written: constructor, attribute names in order, domain of the plan's node."""

    constructor: str
    attributes: tuple[str, ...] = ()
    domain: str = ""
    rest: bool = False  # whether the remaining attributes travel as one JSON string, after the named ones


_FORMS: dict[str, _Form] = {
    "Where": _Form("Where"),
    "Cast": _Form("Cast", ("to",)),
    "MatMul": _Form("MatMul"),
    "Gemm": _Form("Gemm", ("transA", "transB")),
    "Conv": _Form("Conv", ("group",), rest=True),
    "Softmax": _Form("Softmax", ("axis",)),
    "LogSoftmax": _Form("LogSoftmax", ("axis",)),
    "LayerNormalization": _Form("LayerNormalization", ("axis", "epsilon")),
    "RMSNormalization": _Form("RMSNormalization", ("axis", "epsilon")),
    "BatchNormalization": _Form("BatchNormalization", ("epsilon",)),
    "GatherElements": _Form("GatherElements", ("axis",)),
    "GatherND": _Form("GatherND", ("batch_dims",)),
    "Transpose": _Form("Transpose", ("perm",)),
    "Reshape": _Form("Reshape", ("shape",)),
    "Expand": _Form("Expand", ("shape",)),
    "Concat": _Form("Concat", ("axis",)),
    "Slice": _Form("Slice", ("starts", "ends", "steps")),
    "AllReduce": _Form("AllReduce", ("axis", "reduction"), COLLECTIVE_DOMAIN),
    "AllGather": _Form("AllGather", ("axis", "dim"), COLLECTIVE_DOMAIN),
    "ReduceScatter": _Form("ReduceScatter", ("axis", "dim"), COLLECTIVE_DOMAIN),
    "AllToAll": _Form("AllToAll", ("axis", "dim", "to_dim"), COLLECTIVE_DOMAIN),
    "LocalSlice": _Form("LocalSlice", ("axis", "dim"), COLLECTIVE_DOMAIN),
    "Include": _Form("Include", ("axis",), COLLECTIVE_DOMAIN),
    "LocalIndices": _Form("LocalIndices", ("axis", "rows", "mode"), COLLECTIVE_DOMAIN),
    "Shift": _Form("Shift", ("value",), COLLECTIVE_DOMAIN),
}
_POOLS = frozenset({"MaxPool", "AveragePool"})
_OF_CONSTRUCTOR = {form.constructor: (op, form) for op, form in _FORMS.items()}


def encode(node: Node) -> Head:
    """The head of a canonical node's term."""
    if node.op in (VJP, ADJOINT):
        operands = node.inputs[:-1] if node.op == VJP else node.inputs
        of = encode(
            Node(
                node.name,
                node.attributes["of"],
                operands,
                node.outputs,
                _parsed(node.attributes["attributes"]),
            )
        )
        first = (node.attributes["operand"], *((node.attributes["shape"],) if node.op == ADJOINT else ()))
        return Head(f"{node.op}-{of.constructor}", (*first, *of.attributes))
    op, attributes = node.op, dict(node.attributes)
    if op == "Gather":
        return Head("Gather", ("wrap", int(attributes["axis"])))
    if form := _FORMS.get(op):
        values = [attributes.pop(name) for name in form.attributes]
        if form.rest:
            values.append(_json(attributes))
        return Head(form.constructor, tuple(map(_plain, values)))
    family = "Pool" if op in _POOLS else OPERATORS[op].family
    if family == "Reduce":
        return Head(
            "Reduce", (op.removeprefix("Reduce"), tuple(attributes["axes"]), int(attributes["keepdims"]))
        )
    label = op if not attributes else f"{op} {_json(attributes)}"
    if family is None:
        if not 1 <= len(node.inputs) <= 3:
            raise UserError(
                f"node {node.name!r} ({op}): {len(node.inputs)} operands; an operator without own rules has 1 to 3"
            )
        family = f"Opaque{len(node.inputs)}"
    return Head(family, (label,))


def decode(head: Head) -> tuple[str, dict[str, Any], str]:
    """(operator, attributes, domain) of a term's head; KeyError for a constructor that no operator has."""
    constructor, values = head.constructor, head.attributes
    if found := adjoint_of(head):
        op, operand, shape, of = found
        own, attributes, _ = decode(of)
        return op, adjoint_attributes(own, attributes, operand, shape), COLLECTIVE_DOMAIN
    if constructor == "Gather":
        mode, axis = values
        return (
            ("Gather", {"axis": axis}, "")
            if mode == "wrap"
            else ("GatherOrZero", {"axis": axis}, COLLECTIVE_DOMAIN)
        )
    if constructor == "Reduce":
        name, axes, keepdims = values
        return f"Reduce{name}", {"axes": axes, "keepdims": keepdims}, ""
    if found := _OF_CONSTRUCTOR.get(constructor):
        op, form = found
        attributes: dict[str, Any] = dict(zip(form.attributes, values, strict=False))
        if form.rest:
            attributes |= _parsed(str(values[-1]))
        return op, attributes, form.domain
    if constructor in ("Unary", "Binary", "Pool") or constructor.startswith("Opaque"):
        op, _, rest = str(values[0]).partition(" ")
        return op, _parsed(rest or "{}"), COLLECTIVE_DOMAIN if op in OWN else ""
    raise KeyError(constructor)


def adjoint_of(head: Head) -> tuple[str, int, tuple[int, ...] | None, Head] | None:
    """(Vjp or Adjoint, operand, its shape if it is not read, the operator's head) of an adjoint's term."""
    op, dash, constructor = head.constructor.partition("-")
    if op not in (VJP, ADJOINT) or not dash:
        return None
    operand, *rest = head.attributes
    shape = rest.pop(0) if op == ADJOINT else None
    assert isinstance(operand, int) and (shape is None or isinstance(shape, tuple))
    return op, operand, shape, Head(constructor, tuple(rest))


def adjoints_in(heads: Iterable[Head]) -> set[tuple[str, int]]:
    """(constructor, operand) of the adjoints among some heads."""
    return {(head.constructor, found[1]) for head in heads if (found := adjoint_of(head))}


def adjoint_attributes(
    of: str, attributes: Mapping[str, Any], operand: int, shape: tuple[int, ...] | None
) -> dict[str, Any]:
    """The attributes of a Vjp or Adjoint node of the operator `of`."""
    own: dict[str, Any] = {"of": of, "attributes": _json(attributes), "operand": operand}
    return own if shape is None else {**own, "shape": shape}


def write(value: Value) -> str:
    """An attribute as egglog text."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"(vec-of {' '.join(map(str, value))})"
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".en") else text + ".0"
    return str(value)


def write_placement(placement: Placement) -> str:
    return f"(Shard {placement.dim})" if isinstance(placement, Shard) else f"({type(placement).__name__})"


def term(head: Head, operands: tuple[str, ...]) -> str:
    """The egglog text of a term."""
    return f"({' '.join([head.constructor, *map(write, head.attributes), *operands])})"


def leaf(position: int, type_: TensorType) -> str:
    """The egglog text of an operator's operand: only its element type and shape matter."""
    return f'(Leaf {position} "{type_.dtype}" {write(type_.shape)})'


def _json(attributes: Mapping[str, Any]) -> str:
    return json.dumps({k: attributes[k] for k in sorted(attributes)}, separators=(",", ":"))


def _parsed(text: str) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}


def _plain(value: Any) -> Value:
    return tuple(value) if isinstance(value, list) else value
