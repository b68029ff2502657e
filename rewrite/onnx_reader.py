"""Read an ONNX file as a `Graph` with static shapes.

In: a path and, for symbolic or overridden inputs, shapes.  Out: a Graph of canonical operators; weights stay
in the file.  One pass in the file's order:
  input types     shapes given, then symbols bound by them              _InputTypes
  each node       canonical operators by its opset (normalise), folding what follows from constants (builder)
  If              the branch its constant condition takes, inlined              _branch
  no row          the operator's ONNX function body, if it has one, inlined     _function
  outputs         compared with the declared types
`value_info` is never read: every type is inferred again, so an overridden shape leaves nothing stale.
Every failure is a UserError: file, node, expected, found, remedy.
Missing: Loop, Scan, custom domains, sparse initializers; see normalise for operators.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from ..program import TensorType, UserError
from .builder import Builder
from .functions import function_body
from .graph import Graph, fill_value
from .model_file import dtype_name, has_data, read_model, tensor_type, tensor_value
from .normalise import Call, lookup

STANDARD_DOMAINS = ("", "ai.onnx")


def load(path: str | Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Graph:
    """The model's graph; `shapes` fixes inputs' shapes, symbolic ones among them."""
    path = Path(path)
    return _Reader(path, read_model(path), _plain_shapes(path, shapes or {})).read()


def _plain_shapes(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shapes with sizes of Python's own kind, which NumPy's are not."""
    try:
        return {name: tuple(map(operator.index, shape)) for name, shape in shapes.items()}
    except TypeError:
        raise UserError(f"{path}: shapes {dict(shapes)}: a shape is a sequence of whole numbers") from None


@dataclass
class _Scope:
    """What ONNX names mean where nodes are read: the main graph (depth 0) or an inlined body."""

    names: dict[str, str]  # ONNX name -> tensor of the builder; "" for an optional operand left out
    prefix: str  # put before the names of tensors and nodes
    depth: int
    opset: int


class _Reader:
    """One model on its way into a Builder."""

    def __init__(self, path: Path, model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path, self.model, self.shapes = path, model, shapes
        self.opset = next((o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS), 1)
        names = {name for node in model.graph.node for name in node.output}
        self.builder = Builder(reserved=names)
        self.depth: dict[str, int] = {}  # how deep in inlined bodies a tensor got its name
        self.count = 0
        self.stored = {tensor.name for tensor in model.graph.initializer}

    def read(self) -> Graph:
        graph = self.model.graph
        scope = {tensor: tensor for tensor in self._leaves(graph)}
        self.depth = dict.fromkeys(scope, 0)
        self._walk(graph.node, _Scope(scope, "", 0, self.opset))
        outputs = {}
        for output in graph.output:
            if output.name not in scope:
                raise UserError(f"{self.path}: output {output.name!r} is made by no node")
            outputs[output.name] = scope[output.name]
            self._compare(output, self.builder.types[scope[output.name]])
        try:
            return self.builder.finish(graph.name or self.path.stem, outputs, self.path)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from error

    # ------------------------------------------------------------------------------------------- leaves

    def _leaves(self, graph: onnx.GraphProto) -> list[str]:
        """Declare initializers and inputs."""
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise UserError(
                f"{self.path}: initializer {name!r} is sparse, which is not supported: store it dense"
            )
        for tensor in graph.initializer:
            self._initializer(tensor)
        inputs = [value for value in graph.input if value.name not in self.stored]
        for name, kind in _InputTypes(self.path, inputs, self.shapes).types().items():
            self.builder.input(name, kind)
        return list(self.builder.types)

    def _initializer(self, tensor: onnx.TensorProto) -> None:
        """A float tensor of several elements is a weight; another's value is read when it is needed."""
        try:
            kind = tensor_type(tensor)
        except ValueError as error:
            raise UserError(f"{self.path}: initializer {tensor.name!r}: {error}") from error

        def read() -> np.ndarray:
            return tensor_value(tensor, self.path)

        if kind.floating and (kind.size > 1 or not has_data(tensor, self.path)):
            self.builder.weight(tensor.name, kind, read)
        else:
            self.builder.stored(tensor.name, kind, read)

    def _filled_weight(self, node: onnx.NodeProto, scope: _Scope) -> bool:
        """A float ConstantOfShape over a stored shape stands for a weight, in models stripped of theirs."""
        if node.op_type != "ConstantOfShape" or not node.input or node.input[0] not in self.stored:
            return False
        shape = self.builder.known(scope.names[node.input[0]])
        if shape is None or shape.min(initial=0) < 0:
            return False
        try:
            fill = fill_value(node)
            kind = TensorType(tuple(map(int, shape.reshape(-1))), fill.dtype.name)
        except (ValueError, TypeError):
            return False  # said when the node is read
        if not kind.floating or kind.size <= 1:
            return False
        name = node.output[0]
        self.builder.weight(name, kind)
        scope.names[name] = name
        self.depth[name] = 0
        return True

    # -------------------------------------------------------------------------------------------- nodes

    def _walk(self, nodes: Iterable[onnx.NodeProto], scope: _Scope) -> None:
        """Add nodes in order."""
        for node in nodes:
            if scope.depth == 0 and self._filled_weight(node, scope):
                continue
            name = scope.prefix + (node.name or f"{node.op_type}_{self.count}")
            self.count += 1
            before = len(self.builder.nodes)
            results = self._convert(node, name, scope)
            for output, tensor in zip(node.output, results, strict=False):
                if output:
                    scope.names[output] = self._name(tensor, scope.prefix + output, before, scope.depth)

    def _name(self, tensor: str, wanted: str, before: int, depth: int) -> str:
        """Rename a tensor that this node made; one that was there before keeps its name."""
        if self.depth.get(tensor, depth + 1) <= depth:
            return tensor
        if depth or wanted in self.builder.types:
            wanted = self.builder.fresh(wanted)
        self.builder.rename(tensor, wanted, since=before)
        self.depth[wanted] = depth
        return wanted

    def _convert(self, node: onnx.NodeProto, name: str, scope: _Scope) -> tuple[str, ...]:
        """The tensors that are the node's outputs."""
        where = f"{self.path}, node {name!r} ({node.op_type})"
        for tensor in node.input:
            if tensor and tensor not in scope.names:
                raise UserError(f"{where}: operand {tensor!r} is made by nothing before it")
        inputs = [scope.names[tensor] if tensor else "" for tensor in node.input]
        call = Call(self.builder, node, name, inputs, scope.opset)
        standard = node.domain in STANDARD_DOMAINS
        try:
            if standard and node.op_type == "If":
                return self._branch(call, scope)
            normalise = lookup(node.op_type, scope.opset) if standard else None
            results = normalise(call) if normalise else self._function(call, scope, where)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
            raise UserError(f"{where}: {_text(error)}{self._hint(error)}") from error
        return (results,) if isinstance(results, str) else results

    def _hint(self, error: Exception) -> str:
        """Given shapes often meet sizes that the exporter wrote into the graph."""
        if not self.shapes or not re.search(r"reshape|broadcast|differ|fit", str(error)):
            return ""
        given = ", ".join(
            f"--shape {name}={'x'.join(map(str, shape))}" for name, shape in self.shapes.items()
        )
        return f" (a size fixed in the graph may contradict {given}: export it with that dimension symbolic)"

    # ------------------------------------------------------------------------------------ inlined bodies

    def _branch(self, call: Call, scope: _Scope) -> tuple[str, ...]:
        """The outputs of the branch an If takes; the other branch is not even looked at."""
        taken = bool(call.static(0, "the condition").reshape(-1)[0])
        body = call.attribute("then_branch" if taken else "else_branch")
        inner = _Scope(dict(scope.names), f"{call.name}/", scope.depth + 1, scope.opset)
        for tensor in body.initializer:
            value = tensor_value(tensor, self.path)
            inner.names[tensor.name] = self.builder.constant(value, f"{call.name}/{tensor.name}")
        self._walk(body.node, inner)
        return tuple(inner.names[output.name] for output in body.output)

    def _function(self, call: Call, scope: _Scope, where: str) -> tuple[str, ...]:
        """The outputs of an operator without a row, by its ONNX function body."""
        domain = call.node.domain or "ai.onnx"
        versions = {o.domain: o.version for o in self.model.opset_import}
        version = scope.opset if domain == "ai.onnx" else versions.get(domain, 0)
        found = function_body(call, version)
        if found is None:
            raise UserError(
                f"{where}: no rule knows operator {call.node.op_type!r} of domain {domain!r}, opset {version}"
                "; add it by a rule file (--rules) and its Python function (--operators)"
            )
        body, opset = found
        operands = [*call.inputs, *[""] * len(body.input)]
        names = dict(zip(body.input, operands, strict=False))
        inner = _Scope(names, f"{call.name}/", scope.depth + 1, opset)
        self._walk(body.node, inner)
        return tuple(inner.names[output] if call.wants(i) else "" for i, output in enumerate(body.output))

    # ------------------------------------------------------------------------------------------- outputs

    def _compare(self, output: onnx.ValueInfoProto, found: TensorType) -> None:
        """The declared type must be the inferred one; sizes may be stale where the user overrode a shape."""
        declared = output.type.tensor_type
        name = _dtype_label(declared.elem_type)
        if declared.elem_type and name != found.dtype:
            raise UserError(
                f"{self.path}: output {output.name!r} is declared {name}, but its nodes make {found}"
            )
        if self.shapes or not declared.HasField("shape"):
            return
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
        fits = len(sizes) == found.rank and all(
            s in (None, n) for s, n in zip(sizes, found.shape, strict=True)
        )
        if not fits:
            text = "x".join("?" if size is None else str(size) for size in sizes)
            raise UserError(
                f"{self.path}: output {output.name!r} is declared {text}, but its nodes make {found}"
            )


class _InputTypes:
    """Static types of the inputs from the declared ones and the shapes given."""

    def __init__(
        self, path: Path, inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.path, self.inputs, self.shapes = path, inputs, shapes
        self.symbols: dict[str, tuple[int, str]] = {}  # symbol -> its size and the input that fixed it

    def types(self) -> dict[str, TensorType]:
        names = [value.name for value in self.inputs]
        for name in self.shapes:
            if name not in names:
                raise UserError(
                    f"{self.path}: --shape {name}=…: no such input; the inputs are {', '.join(names)}"
                )
        for value in self.inputs:
            if value.name in self.shapes:
                self._bind(value)
        dtypes = {value.name: self._dtype(value) for value in self.inputs}
        return {value.name: self._type(value, dtypes[value.name]) for value in self.inputs}

    def _type(self, value: onnx.ValueInfoProto, dtype: str) -> TensorType:
        shape = self._shape(value)
        try:
            return TensorType(shape, dtype)
        except ValueError as error:
            raise UserError(f"{self.path}: input {value.name!r}: {error}") from error

    def _dtype(self, value: onnx.ValueInfoProto) -> str:
        if not value.type.HasField("tensor_type"):
            kind = value.type.WhichOneof("value") or "nothing"
            raise UserError(
                f"{self.path}: input {value.name!r} is declared as {kind}, only tensors are supported"
            )
        try:
            return dtype_name(value.type.tensor_type.elem_type)
        except ValueError as error:
            raise UserError(f"{self.path}: input {value.name!r}: {error}") from error

    def _bind(self, value: onnx.ValueInfoProto) -> None:
        """Check a given shape and remember what its symbols are."""
        shape, where = self.shapes[value.name], f"{self.path}: --shape {value.name}="
        where += "x".join(map(str, shape))
        if any(size < 1 for size in shape):
            raise UserError(f"{where}: every size must be positive")
        if not value.type.tensor_type.HasField("shape"):
            return
        dims = value.type.tensor_type.shape.dim
        if len(dims) != len(shape):
            raise UserError(
                f"{where}: the input has {len(dims)} dimensions, {_declared(value)}, not {len(shape)}"
            )
        for dim, size in zip(dims, shape, strict=True):
            if dim.dim_param:
                known, other = self.symbols.setdefault(dim.dim_param, (size, value.name))
                if known != size:
                    raise UserError(
                        f"{where}: dimension {dim.dim_param!r} is {known} in input {other!r}, not {size}"
                    )

    def _shape(self, value: onnx.ValueInfoProto) -> tuple[int, ...]:
        if value.name in self.shapes:
            return self.shapes[value.name]
        if not value.type.tensor_type.HasField("shape"):
            raise UserError(
                f"{self.path}: input {value.name!r} has no shape: give one by --shape {value.name}=8x128"
            )
        sizes = []
        for position, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param in self.symbols:
                sizes.append(self.symbols[dim.dim_param][0])
            elif dim.HasField("dim_value"):
                sizes.append(self._positive(value, position, dim.dim_value))
            else:
                self._open(value, position, dim.dim_param)
        return tuple(sizes)

    def _positive(self, value: onnx.ValueInfoProto, position: int, size: int) -> int:
        if size < 1:
            where = f"{self.path}: input {value.name!r}: dimension {position}"
            raise UserError(
                f"{where} has size {size}, which is not positive: "
                f"give another by --shape {value.name}={_example(value)}"
            )
        return size

    def _open(self, value: onnx.ValueInfoProto, position: int, symbol: str) -> None:
        which = f"{symbol!r}" if symbol else str(position)
        raise UserError(
            f"{self.path}: dimension {which} of input {value.name!r}, {_declared(value)}, is open: "
            f"fix it, for example by --shape {value.name}={_example(value)}"
        )


def _dtype_label(elem_type: int) -> str:
    try:
        return dtype_name(elem_type)
    except ValueError:
        return f"element type {elem_type}"


def _declared(value: onnx.ValueInfoProto) -> str:
    dims = value.type.tensor_type.shape.dim
    return (
        "["
        + ", ".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims)
        + "]"
    )


def _example(value: onnx.ValueInfoProto) -> str:
    """A shape to type: declared sizes, and 8, 128, 128, ... for the open ones."""
    sizes = []
    for dim in value.type.tensor_type.shape.dim:
        fixed = dim.HasField("dim_value") and dim.dim_value > 0
        sizes.append(dim.dim_value if fixed else 128 if sizes else 8)
    return "x".join(map(str, sizes))


def _text(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
