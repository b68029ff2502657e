"""Function bodies of ONNX operators that are defined by other operators.

In: a `Call` without a row in normalise.  Out: the nodes of its body with the call's attributes filled in, and
the opset they are written in, which may be older than the model's.  onnx.inliner does the same for whole
models, but leaves out attributes that have their default and fails on optional operands that are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import defs, helper

from .normalise import Call

MAX_OPSET = defs.onnx_opset_version()  # schemas of later opsets are not installed


def function_body(call: Call, opset: int) -> tuple[onnx.FunctionProto, int] | None:
    """The body of the operator of its domain's `opset`, and the standard opset it is written in.

    None if the operator is no function of others.
    """
    domain = "" if call.node.domain == "ai.onnx" else call.node.domain
    try:
        schema = defs.get_schema(call.node.op_type, min(opset, MAX_OPSET) if domain == "" else opset, domain)
    except defs.SchemaError:
        return None
    body = _body(schema, call, opset)
    if body is None:
        return None
    defaults = {a.name: a for a in body.attribute_proto} | {
        name: a.default_value for name, a in schema.attributes.items() if a.default_value.name
    }
    _fill_attributes(body.node, defaults | call.attributes)
    return body, next((o.version for o in body.opset_import if o.domain in ("", "ai.onnx")), call.opset)


def _body(schema: Any, call: Call, opset: int) -> onnx.FunctionProto | None:
    # The schema is Any: onnx's stubs lag behind its functions by opset.
    body = onnx.FunctionProto()
    if versions := [v for v in schema.function_opset_versions if v <= opset]:
        body.ParseFromString(schema.get_function_with_opset_version(max(versions)))
        return body
    if versions := [v for v in schema.context_dependent_function_opset_versions if v <= opset]:
        types = [_type_proto(call, i) for i in range(len(call.inputs))]
        node = call.node.SerializeToString()
        try:
            data = schema.get_context_dependent_function_with_opset_version(max(versions), node, types)
        except RuntimeError as error:  # raised by C++ for operands its builder cannot handle
            raise ValueError(f"its ONNX function body cannot be built: {error}") from error
        body.ParseFromString(data)
        return body if body.node else None
    return None


def _type_proto(call: Call, i: int) -> bytes:
    if not call.has(i):
        return b""
    kind = call.type(i)
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype))
    return helper.make_tensor_type_proto(dtype, kind.shape).SerializeToString()


def _fill_attributes(nodes, values: dict[str, onnx.AttributeProto]) -> None:
    """Replace references to the function's attributes by their values; one without a value is left out."""
    for node in nodes:
        references = [a for a in node.attribute if a.ref_attr_name]
        kept = [a for a in node.attribute if not a.ref_attr_name]
        for reference in references:
            if reference.ref_attr_name in values:
                value = onnx.AttributeProto()
                value.CopyFrom(values[reference.ref_attr_name])
                value.name = reference.name
                kept.append(value)
        if references:
            del node.attribute[:]
            node.attribute.extend(kept)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _fill_attributes(attribute.g.node, values)
