"""The ONNX file: reading it, and the values of its tensors one at a time.

In: a path.  Out: a `ModelProto` without external data and with local functions inlined (`read_model`),
and the value of one stored tensor (`tensor_value`), whose external data is read by offset, for it alone.
Every failure is a `UserError` naming the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from ..program import ITEM_BYTES, TensorType, UserError


def read_model(path: Path) -> onnx.ModelProto:
    """Parse the file, weights in other files left out; model-local functions are inlined."""
    try:
        if path.is_char_device() or path.is_block_device():  # which may have no end
            raise UserError(f"{path}: cannot be read: it is a device")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError) as error:  # ValueError: bytes that are no UTF-8 where text should be
        raise UserError(f"{path}: not an ONNX file, or a truncated one") from error
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise UserError(
            f"{path}: not an ONNX model, or a truncated one: no IR version, opset or graph output found"
        )
    if not all(isinstance(name, str) for name in _names(model.graph)):
        raise UserError(f"{path}: damaged: a name in it is no UTF-8 text")
    return _inline_functions(model, path) if model.functions else model


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name in a graph; protobuf gives bytes where the file's text is no UTF-8."""
    yield graph.name
    for named in (*graph.initializer, *graph.input, *graph.output):
        yield named.name
    for value in graph.input:
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
            if attribute.HasField("g"):
                yield from _names(attribute.g)


def _inline_functions(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:  # the C++ inliner raises several kinds
        raise UserError(f"{path}: its local functions cannot be inlined: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def dtype_name(elem_type: int) -> str:
    """The element type's name; ValueError when it is not one of ours."""
    try:
        name = str(helper.tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, TypeError, ValueError):
        name = "object"
    if name not in ITEM_BYTES:
        labels = {number: label for label, number in TensorProto.DataType.items()}
        raise ValueError(f"element type {labels.get(elem_type, elem_type)} is not supported")
    return name


def tensor_type(tensor: TensorProto) -> TensorType:
    """The declared type; ValueError when it is not one of ours."""
    if any(size < 0 for size in tensor.dims):
        raise ValueError(f"shape {tuple(tensor.dims)} has a negative size")
    return TensorType(tuple(tensor.dims), dtype_name(tensor.data_type))


def tensor_value(tensor: TensorProto, path: Path) -> np.ndarray:
    """The value of a tensor stored in the model file at `path` or beside it."""
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            return _external_value(tensor, path)
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: tensor {tensor.name!r} is damaged: {_one_line(error)}") from error


def has_data(tensor: TensorProto, path: Path) -> bool:
    """Whether the value can be had: it is in the model file, or its external file exists."""
    return tensor.data_location != TensorProto.EXTERNAL or _external_file(tensor, path)[0].is_file()


def _external_file(tensor: TensorProto, path: Path) -> tuple[Path, int]:
    """File and offset of external data; the file must lie in the model's folder."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    folder = path.resolve().parent
    file = (folder / entries.get("location", "")).resolve()
    if not entries.get("location") or not file.is_relative_to(folder):
        where = entries.get("location", "")
        raise UserError(
            f"{path}: tensor {tensor.name!r} lies in {where!r}, which is outside the model's folder"
        )
    offset = entries.get("offset", "0")
    if not offset.isdigit():
        raise UserError(f"{path}: tensor {tensor.name!r} has the offset {offset!r}, which is no number")
    return file, int(offset)


def _external_value(tensor: TensorProto, path: Path) -> np.ndarray:
    file, offset = _external_file(tensor, path)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = math.prod(tensor.dims)
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(count * dtype.itemsize)
    except OSError as error:
        where = f"{path}: the data of tensor {tensor.name!r} is in {file.name!r}"
        raise UserError(f"{where}, which cannot be read: {error.strerror}") from error
    if len(data) != count * dtype.itemsize:
        raise UserError(
            f"{path}: tensor {tensor.name!r} needs {count * dtype.itemsize} bytes at offset {offset} of "
            f"{file.name!r}, which ends after {len(data)} of them"
        )
    return np.frombuffer(data, dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype).reshape(
        tuple(tensor.dims)
    )
