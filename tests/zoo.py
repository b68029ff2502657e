"""One small application of every operator that the shipped rules speak of, with shapes that unequal axes divide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from parallegg.program import Node, TensorType
from parallegg.rewrite.operators import infer
from parallegg.rewrite.space import Kind
from parallegg.rewrite.terms import encode


@dataclass(frozen=True)
class Case:
    """A kind with its node; `indices` maps an operand to the exclusive bound of its integers."""

    name: str
    node: Node
    kind: Kind
    indices: dict[int, int]

    def operands(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Random operands: floats away from zero and positive where a root or a quotient needs it."""
        values = []
        for i, type_ in enumerate(self.kind.operands):
            if i in self.indices:
                bound = self.indices[i]
                values.append(rng.integers(-bound, bound, type_.shape).astype(type_.dtype))
            elif type_.dtype == "bool":
                values.append(rng.integers(0, 2, type_.shape).astype(bool))
            else:
                values.append(rng.uniform(0.5, 2.0, type_.shape).astype(type_.dtype))
        return values


def f(*shape: int) -> TensorType:
    return TensorType(shape, "float64")


def i(*shape: int) -> TensorType:
    return TensorType(shape, "int64")


def case(
    op: str, *operands: TensorType, name: str = "", indices: dict[int, int] | None = None, **attributes
) -> Case:
    node = Node(op, op, tuple(f"x{k}" for k in range(len(operands))), ("y",), attributes)
    result = infer(op, attributes, operands)[0]
    return Case(name or op, node, Kind(encode(node), operands, result), indices or {})


WINDOW = {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1)}

CASES = [
    case("Relu", f(6, 12)),
    case("Neg", f(6, 12)),
    case("Cast", f(6, 12), to="float32"),
    case("Add", f(6, 12), f(12)),
    case("Sub", f(6, 1, 12), f(6, 12), name="Sub broadcasting both ways"),
    case("Mul", f(6, 12), f(6, 12)),
    case("Div", f(6, 12), f(6, 1)),
    case("Pow", f(6, 12), f()),
    case("Where", TensorType((6, 1), "bool"), f(6, 12), f(12)),
    case("MatMul", f(6, 12), f(12, 6)),
    case("MatMul", f(12, 6, 4, 6), f(6, 6, 5), name="MatMul of stacks"),
    case("MatMul", f(6, 4, 6), f(12, 6, 6, 5), name="MatMul by stacks"),
    case("MatMul", f(6, 12), f(12), name="MatMul with a vector"),
    case("Gemm", f(12, 6), f(6, 12), transA=1, transB=1),
    case("Gemm", f(6, 12), f(12, 6), transA=0, transB=0, name="Gemm plain"),
    case("Conv", f(6, 12, 5, 5), f(6, 12, 3, 3), group=1, **WINDOW),
    case("Conv", f(6, 12, 5, 5), f(18, 2, 3, 3), group=6, **WINDOW, name="Conv in groups"),
    case("MaxPool", f(6, 12, 6, 6), kernel_shape=(2, 2), ceil_mode=0, **{**WINDOW, "strides": (2, 2)}),
    case("ReduceSum", f(6, 12, 4), axes=(1,), keepdims=1),
    case("ReduceMean", f(6, 12, 4), axes=(1, 2), keepdims=0),
    case("ReduceMean", i(6, 12), axes=(1,), keepdims=1, name="ReduceMean of integers", indices={0: 99}),
    case("ReduceMax", f(6, 12), axes=(0,), keepdims=0),
    case("ReduceMin", f(6, 12), axes=(1,), keepdims=0),
    case("ReduceProd", f(6, 12), axes=(0,), keepdims=1),
    case("Softmax", f(6, 12), axis=1),
    case("LogSoftmax", f(6, 12), axis=1),
    case("LayerNormalization", f(6, 4, 12), f(12), axis=2, epsilon=1e-5),
    case("RMSNormalization", f(6, 12), f(12), axis=1, epsilon=1e-5),
    case("LayerNormalization", f(6, 12), f(1), axis=1, epsilon=1e-5, name="LayerNormalization, one scale"),
    case("LayerNormalization", f(6, 12), f(), axis=1, epsilon=1e-5, name="LayerNormalization, scalar scale"),
    case("RMSNormalization", f(6, 12), f(1), axis=1, epsilon=1e-5, name="RMSNormalization, one scale"),
    case(
        "RMSNormalization",
        TensorType((6, 12), "float32"),
        f(12),
        axis=1,
        epsilon=1e-5,
        name="RMS of two types",
    ),
    case("BatchNormalization", f(6, 12, 6), f(12), f(12), f(12), f(12), epsilon=1e-5),
    case("Transpose", f(6, 4, 12), perm=(2, 0, 1)),
    case("Reshape", f(6, 12), shape=(6, 3, 4), name="Reshape splitting"),
    case("Reshape", f(6, 12, 2), shape=(72, 2), name="Reshape merging"),
    case("Expand", f(6, 1), shape=(12, 6, 12)),
    case("Concat", f(6, 12), f(6, 5), axis=1),
    case("Slice", f(6, 12, 8), starts=(0, 0, 1), ends=(6, 12, 7), steps=(1, 1, 2)),
    case("Gather", f(12, 6), i(6, 5), axis=0, indices={1: 12}),
    case("Gather", f(6, 12, 6), i(6), axis=1, indices={1: 12}, name="Gather inside"),
    case("GatherElements", f(6, 12), i(6, 12), axis=1, indices={1: 12}),
    case("GatherND", f(6, 12, 6), i(6, 1), batch_dims=0, indices={1: 6}),
    case("GatherND", f(6, 12, 5), i(6, 4, 1), batch_dims=1, indices={1: 12}, name="GatherND in batches"),
    case("RandomKey", i(6, 1), i(12), indices={0: 99, 1: 12}),
    case("RandomMask", i(6, 12, 1), i(4), indices={0: 99, 1: 12}, threshold=2**52),
    case("CumSum", f(6, 12), axis=0, exclusive=0, reverse=0),
    case("ScatterND", f(6, 2), i(3, 1), f(3, 2), reduction="add", indices={1: 6}),
    case("Einsum", f(6, 2), f(2, 3), equation="ij,jk->ik"),
    case("InstanceNormalization", f(6, 2, 3), f(2), f(2), epsilon=1e-5),
]
