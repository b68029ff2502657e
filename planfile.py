"""The plan and its file: the explicit per-device program as extended ONNX (docs/plan-format.md).

    save(plan, path)   one `.onnx` file, byte-identical for equal plans; written to a temporary name and renamed
    load(path)         the same plan; UserError in one line for a file that is damaged, foreign or of another version

Collectives are nodes of the domain `parallegg` (version DOMAIN_VERSION), whose schemas are registered with
`onnx.defs`, so that ONNX's own checker reads plans. Mesh, layouts and the report are in `metadata_props`.
Weights are never in the file; folded constants are, up to the size that the planner chose.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from .mesh import Layout, Mesh, format_layout, parse_layout
from .program import COLLECTIVE_DOMAIN, Node, TensorType, UserError

FORMAT_VERSION = 1
DOMAIN_VERSION = 1
OPSET = 23
IR_VERSION = 10
PREFIX = "parallegg."


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
    `axis`, and `dim`, `to_dim` or `reduction` where they apply. `inputs` and `outputs` say how logical tensors are laid
    out. `constants` holds values by logical name (ports of kind "constant") or by local name (the program's scalars).
    `state` pairs inputs and parameters with the outputs that are their values in the next step, in the same layout.
    `kept` are the tensors of the program that one phase of a training step leaves for later ones.
    `derivation` says of every node what it computes and by which rules (verification/certificate.py).
    """

    mesh: Mesh
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    state: tuple[tuple[str, str], ...] = ()
    kept: tuple[str, ...] = ()
    derivation: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_ports()
        self._check_nodes()
        self._check_state()

    def _check_ports(self) -> None:
        for port in (*self.inputs, *self.outputs):
            local = TensorType(self.mesh.local_shape(port.type.shape, port.layout), port.type.dtype)
            if self.types.get(port.local) != local:
                raise ValueError(
                    f"{port.kind} {port.name!r} as {format_layout(port.layout)} is {local}, but {port.local!r} is "
                    f"{self.types.get(port.local)}"
                )

    def _check_nodes(self) -> None:
        known = {port.local for port in self.inputs} | set(self.constants)
        for node in self.nodes:
            missing = [name for name in node.inputs if name not in known]
            if missing:
                raise ValueError(f"node {node.name!r} reads {missing[0]!r}, which nothing before it computes")
            untyped = [name for name in node.outputs if name not in self.types or name in known]
            if untyped:
                raise ValueError(
                    f"node {node.name!r} writes {untyped[0]!r}, which has no type or is written twice"
                )
            known.update(node.outputs)
        for port in self.outputs:
            if port.local not in known:
                raise ValueError(f"output {port.name!r} reads {port.local!r}, which nothing computes")

    def _check_state(self) -> None:
        old = {port.name: port for port in self.inputs if port.kind != "constant"}
        new = {port.name: port for port in self.outputs}
        for name, following in self.state:
            if name not in old or following not in new:
                raise ValueError(f"state {name!r} and {following!r} are no input and output")
            if (old[name].type, old[name].layout) != (new[following].type, new[following].layout):
                raise ValueError(f"state {name!r} and its next value {following!r} differ in type or layout")


# ------------------------------------------------------------------------------------------------ schemas


@dataclass(frozen=True)
class _Schema:
    doc: str
    attributes: tuple[tuple[str, str], ...] = ()
    operands: int | None = 1  # None: any number, of any types
    result: str = "T0"  # the element type of the first operand, or a type of its own


_SCHEMAS = {
    "AllReduce": _Schema(
        "Every coordinate of the mesh axis gets the reduction (sum, mean, max, min) of the operands.",
        (("axis", "STRING"), ("reduction", "STRING")),
    ),
    "AllGather": _Schema(
        "Blocks of dimension dim, in coordinate order, put together.", (("axis", "STRING"), ("dim", "INT"))
    ),
    "ReduceScatter": _Schema(
        "Each coordinate gets its block of dimension dim of the sum of the operands.",
        (("axis", "STRING"), ("dim", "INT")),
    ),
    "AllToAll": _Schema(
        "Blocks of dimension dim become whole; dimension to_dim is split instead.",
        (("axis", "STRING"), ("dim", "INT"), ("to_dim", "INT")),
    ),
    "LocalSlice": _Schema(
        "This coordinate's block of dimension dim of a replicated operand.",
        (("axis", "STRING"), ("dim", "INT")),
    ),
    "Include": _Schema(
        "The operand on coordinate 0 of the mesh axis, zeros elsewhere.", (("axis", "STRING"),)
    ),
    "LocalIndices": _Schema(
        "Indices into `rows` rows as indices into this coordinate's block of them; -1 where the row is elsewhere. "
        "mode wrap: a negative index counts from the end; mode zero: it means elsewhere already.",
        (("axis", "STRING"), ("rows", "INT"), ("mode", "STRING")),
    ),
    "Vjp": _Schema(
        "The cotangent of an operand of the operator `of` (`attributes` as JSON), given its operands and, last, the "
        "cotangent of its result.",
        (("of", "STRING"), ("attributes", "STRING"), ("operand", "INT")),
        operands=None,
    ),
    "Adjoint": _Schema(
        "Vjp of an operator that is linear in the operand, which is left out; `shape` is its shape.",
        (("of", "STRING"), ("attributes", "STRING"), ("operand", "INT"), ("shape", "INTS")),
        operands=None,
    ),
    "RandomKey": _Schema(
        "A key for every index, from a key: number `index` of the generator splitmix64.", operands=2
    ),
    "RandomMask": _Schema(
        "Number `index` of splitmix64 from a key, without its lower 11 bits: whether it reaches the threshold.",
        (("threshold", "INT"),),
        operands=2,
        result="tensor(bool)",
    ),
    "GatherOrZero": _Schema("ONNX Gather, but a negative index gives zeros.", (("axis", "INT"),), operands=2),
}


@functools.cache
def register_schemas() -> None:
    """Make ONNX's checker and shape inference know the domain `parallegg`."""
    parameter = onnx.defs.OpSchema.FormalParameter
    numbers = [
        f"tensor({name})"
        for name in ("bool", "double", "float", "float16", "bfloat16", "int8", "int16", "int32", "int64")
    ]
    for name, schema in _SCHEMAS.items():
        operands = [parameter(f"x{i}", f"T{i}") for i in range(schema.operands or 0)]
        if schema.operands is None:
            many = onnx.defs.OpSchema.FormalParameterOption.Variadic
            operands = [parameter("x", "T0", param_option=many, is_homogeneous=False)]
        types = [(f"T{i}", numbers, "") for i in range(len(operands))]
        attributes = [
            onnx.defs.OpSchema.Attribute(key, getattr(onnx.defs.OpSchema.AttrType, type_), required=True)
            for key, type_ in schema.attributes
        ]
        onnx.defs.register_schema(
            onnx.defs.OpSchema(
                name, COLLECTIVE_DOMAIN, DOMAIN_VERSION, doc=schema.doc, inputs=operands,
                outputs=[parameter("y", schema.result)], type_constraints=types, attributes=attributes,
            )
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ operands

# Canonical attributes that ONNX wants as operands after the node's own, in order. "int64[]" is a vector, "int64" a
# scalar, "int64[1]" a vector of one, "like" a scalar of the first operand's type; absent ones are left out.
_OPERANDS: dict[str, tuple[tuple[str, str], ...]] = {
    "Reshape": (("shape", "int64[]"),),
    "Expand": (("shape", "int64[]"),),
    "Slice": (("starts", "int64[]"), ("ends", "int64[]"), ("axes", "int64[]"), ("steps", "int64[]")),
    "Tile": (("repeats", "int64[]"),),
    "Pad": (("pads", "int64[]"), ("value", "like")),
    "Clip": (("min", "like"), ("max", "like")),
    "TopK": (("k", "int64[1]"),),
    "OneHot": (("depth", "int64"),),
    "CumSum": (("axis", "int64"),),
    "Trilu": (("k", "int64"),),
    **{f"Reduce{name}": (("axes", "int64[]"),) for name in ("Sum", "Mean", "Max", "Min", "Prod")},
}
# Attributes that ONNX needs beside the canonical ones, always with this value.
_FIXED: dict[str, dict[str, Any]] = {
    "Reshape": {"allowzero": 1},
    **{f"Reduce{name}": {"noop_with_empty_axes": 1} for name in ("Sum", "Mean", "Max", "Min", "Prod")},
}


def _operand_value(style: str, value: Any, dtype: str) -> np.ndarray:
    if style == "like":
        return np.asarray(value).astype(numpy_dtype(dtype))
    array = np.asarray(value, np.int64)
    return array.reshape(1) if style == "int64[1]" else array


def _attribute_value(style: str, array: np.ndarray) -> Any:
    return tuple(int(v) for v in array) if style == "int64[]" else array.reshape(-1)[0].item()


def onnx_node(node: Node, types: Mapping[str, TensorType]) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    """A canonical node as an ordinary ONNX node (of opset OPSET), and the initializers that it needs."""
    attributes, inputs, initializers = dict(node.attributes) | _FIXED.get(node.op, {}), list(node.inputs), []
    if node.op == "Slice":
        attributes["axes"] = tuple(range(types[node.inputs[0]].rank))
    if node.op == "Cast":
        attributes["to"] = _elem_type(attributes["to"])
    for key, style in _OPERANDS.get(node.op, ()) if not node.domain else ():
        if key not in attributes:
            inputs.append("")
            continue
        name = f"{node.outputs[0]}:{key}"
        array = _operand_value(style, attributes.pop(key), types[node.inputs[0]].dtype)
        initializers.append(numpy_helper.from_array(array, name))
        inputs.insert(1, name) if node.op == "OneHot" else inputs.append(name)
    while inputs and inputs[-1] == "":
        inputs.pop()
    proto = helper.make_node(node.op, inputs, list(node.outputs), name=node.name, domain=node.domain)
    for key in sorted(attributes):
        proto.attribute.append(
            helper.make_attribute(key, attributes[key], attr_type=_attribute_type(attributes[key]))
        )
    return proto, initializers


def _attribute_type(value: Any) -> int | None:
    """An empty tuple says nothing of its elements; canonical ones hold integers."""
    return onnx.AttributeProto.INTS if value == () else None


def canonical_node(proto: onnx.NodeProto, values: Mapping[str, np.ndarray]) -> Node:
    """The inverse of `onnx_node`; `values` are the file's initializers."""
    attributes = {a.name: _plain(helper.get_attribute_value(a)) for a in proto.attribute}
    for key in _FIXED.get(proto.op_type, {}):
        attributes.pop(key, None)
    inputs = list(proto.input)
    styles = _OPERANDS.get(proto.op_type, ()) if not proto.domain else ()
    if styles:
        first = 1
        extra = [inputs.pop(first) for _ in range(len(styles)) if len(inputs) > first]
        for (key, style), name in zip(styles, extra, strict=False):
            if name:
                attributes[key] = _attribute_value(style, values[name])
    if proto.op_type == "Slice":
        del attributes["axes"]
    if proto.op_type == "Cast":
        attributes["to"] = str(helper.tensor_dtype_to_np_dtype(attributes["to"]))
    return Node(proto.name, proto.op_type, tuple(inputs), tuple(proto.output), attributes, proto.domain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return (
        tuple(value)
        if isinstance(value, (list, tuple)) or (hasattr(value, "__len__") and not isinstance(value, str))
        else value
    )


# ------------------------------------------------------------------------------------------------ saving


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when it is whole; on any error nothing of it stays."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.close()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def save(plan: Plan, path: str | Path) -> None:
    """Write the plan; the file appears whole or not at all."""
    path = Path(path)
    data = to_bytes(plan)
    if path.exists() and not path.is_file():  # the file would take the place of a device or a pipe
        raise UserError(f"{path}: cannot be written: it is no file")
    try:
        with whole_file(path) as file:
            file.write(data)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def to_bytes(plan: Plan) -> bytes:
    """The plan as a serialized ONNX model: equal plans give equal bytes."""
    model = _model(plan)
    props = {
        "version": str(FORMAT_VERSION),
        "mesh": str(plan.mesh),
        "inputs": _compact([_port_fields(port) for port in plan.inputs]),
        "outputs": _compact([_port_fields(port) for port in plan.outputs]),
        "report": _compact(plan.metadata),
    }
    if plan.state:
        props["state"] = _compact(plan.state)
    if plan.kept:
        props["kept"] = _compact(plan.kept)
    if plan.derivation:
        props["derivation"] = _compact(plan.derivation)
    for key in sorted(props):
        model.metadata_props.add(key=PREFIX + key, value=props[key])
    model.metadata_props.add(key=f"{PREFIX}digest", value=_digest(model))
    return model.SerializeToString(deterministic=True)


def _model(plan: Plan) -> onnx.ModelProto:
    register_schemas()
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    for node in plan.nodes:
        proto, extra = onnx_node(node, plan.types)
        nodes.append(proto)
        initializers += extra
    embedded = {port.local: port.name for port in plan.inputs if port.kind == "constant"}
    initializers += [
        numpy_helper.from_array(
            np.ascontiguousarray(plan.constants[name]).reshape(plan.constants[name].shape),
            _constant_name(name, plan),
        )
        for name in plan.constants
    ]
    ports = {port.local for port in (*plan.inputs, *plan.outputs)} | set(embedded)
    infos = [
        value_info(name, type_)
        for name, type_ in plan.types.items()
        if name not in ports and name not in plan.constants
    ]
    graph = helper.make_graph(
        nodes,
        str(plan.metadata.get("model", "plan")),
        [value_info(port.local, plan.types[port.local]) for port in plan.inputs],
        [value_info(port.local, plan.types[port.local]) for port in _distinct(plan.outputs)],
        initializers,
        value_info=infos,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(COLLECTIVE_DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, producer_name="parallegg", opset_imports=opsets, ir_version=IR_VERSION)


def _constant_name(name: str, plan: Plan) -> str:
    """A whole constant that ports cut up is stored beside them; a scalar is an ordinary initializer."""
    return (
        f"whole:{name}"
        if any(port.name == name and port.kind == "constant" for port in plan.inputs)
        else name
    )


def _distinct(ports: tuple[Port, ...]) -> list[Port]:
    return list({port.local: port for port in ports}.values())


def _port_fields(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "kind": port.kind,
        "dtype": port.type.dtype,
        "shape": list(port.type.shape),
        "layout": format_layout(port.layout),
        "local": port.local,
    }


def value_info(name: str, type_: TensorType) -> onnx.ValueInfoProto:
    """A tensor's name and type as ONNX has them."""
    return helper.make_tensor_value_info(name, _elem_type(type_.dtype), type_.shape)


@functools.cache
def _elem_type(dtype: str) -> int:
    if dtype == "bfloat16":
        return onnx.TensorProto.BFLOAT16
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's type of that name, bfloat16 included."""
    return helper.tensor_dtype_to_np_dtype(_elem_type(dtype))


def as_planned(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array, which a file may have as float32 because NumPy's files have no bfloat16."""
    return array.astype(numpy_dtype(dtype)) if dtype == "bfloat16" and array.dtype == np.float32 else array


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(model: onnx.ModelProto) -> str:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


# ------------------------------------------------------------------------------------------------ loading


class Edited(UserError):
    """A plan's content does not match its digest: the file is damaged, or somebody changed the plan."""


def load(path: str | Path, *, edited: bool = False) -> Plan:
    """Read a plan; checks its version, mesh, names and shapes, and its digest unless it may have been edited."""
    path = Path(path)
    try:
        if path.is_char_device() or path.is_block_device():  # which may have no end
            raise UserError(f"{path}: cannot be read: it is a device")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return from_bytes(data, edited=edited)
    except UserError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is not a consistent plan: {error}") from None


def from_bytes(data: bytes, *, edited: bool = False) -> Plan:
    """The plan in a serialized model; UserError or ValueError says what is wrong with it."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise UserError("is no ONNX file, or is damaged") from None
    props = {p.key: p.value for p in model.metadata_props}
    version = props.get(f"{PREFIX}version")
    if version is None:
        raise UserError("is no plan: an ONNX model without parallegg's metadata (or a damaged file)")
    if version != str(FORMAT_VERSION):
        raise UserError(f"has plan format version {version}; this version reads {FORMAT_VERSION}")
    if not edited:
        _check_digest(model, props.get(f"{PREFIX}digest"))
    inputs, outputs = (tuple(map(_port, json.loads(props[PREFIX + key]))) for key in ("inputs", "outputs"))
    initializers = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = tuple(canonical_node(proto, initializers) for proto in model.graph.node)
    read = {name for node in nodes for name in node.inputs}
    constants = {
        name.removeprefix("whole:"): v
        for name, v in initializers.items()
        if name.startswith("whole:") or name in read
    }
    infos = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    types = {info.name: _type(info) for info in infos}
    types |= {name: TensorType(v.shape, str(v.dtype)) for name, v in initializers.items() if name in read}
    mesh = Mesh.parse(props[f"{PREFIX}mesh"])
    report = _report(props[f"{PREFIX}report"])
    state = tuple((name, new) for name, new in json.loads(props.get(f"{PREFIX}state", "[]")))
    kept = tuple(map(str, json.loads(props.get(f"{PREFIX}kept", "[]"))))
    derivation = json.loads(props.get(f"{PREFIX}derivation", "null"))
    return Plan(mesh, inputs, outputs, nodes, types, constants, report, state, kept, derivation)


def _check_digest(model: onnx.ModelProto, digest: str | None) -> None:
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.metadata_props[:]
    bare.metadata_props.extend(p for p in model.metadata_props if p.key != f"{PREFIX}digest")
    if digest != _digest(bare):
        raise Edited("is damaged or was edited: its content does not match its digest")


def _report(text: str) -> dict[str, Any]:
    """The report, whose figures are figures."""
    report = json.loads(text)
    if not isinstance(report, dict):
        raise ValueError("its report is no JSON object")
    for key in ("cost_s", "bound_s", "gap"):
        value = report.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{key} is {value!r} in its report")
    return report


def _port(fields: Mapping[str, Any]) -> Port:
    type_ = TensorType(tuple(fields["shape"]), fields["dtype"])
    return Port(fields["name"], fields["kind"], type_, parse_layout(fields["layout"]), fields["local"])


def _type(info: onnx.ValueInfoProto) -> TensorType:
    tensor = info.type.tensor_type
    dtype = (
        "bfloat16"
        if tensor.elem_type == onnx.TensorProto.BFLOAT16
        else str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    )
    return TensorType(tuple(d.dim_value for d in tensor.shape.dim), dtype)


def check_model(plan: Plan, digest: str, types: Mapping[str, TensorType]) -> None:
    """Refuse a plan that was made for another model or other shapes; `types` are the model's, by logical name."""
    planned = plan.metadata.get("model_digest")
    if planned == digest:
        return
    ports = (*plan.inputs, *plan.outputs)
    for port in ports:
        if port.name not in types:
            raise UserError(f"the plan was made for another model: this one has no {port.kind} {port.name!r}")
    # A weight of another shape means another model, whatever is fed to it.
    order = {"parameter": 0, "input": 1}
    differing = [port for port in ports if types[port.name] != port.type]
    for port in sorted(differing, key=lambda port: order.get(port.kind, 2)):
        found = f"the plan's {port.kind} {port.name!r} is {port.type}, this model's is {types[port.name]}"
        if port.kind == "input":
            raise UserError(f"{found}: load the model with the plan's shapes, or plan it again")
        raise UserError(f"the plan was made for another model: {found}")
    if planned is not None:
        raise UserError("the plan was made for another model: the tensors are the same, the operators differ")
