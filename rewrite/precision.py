"""Mixed precision: the same graph, computing in bfloat16 from float32 weights.

In: a forward graph whose only output is its loss.  Out: that graph with Casts.  Weights, constants and inputs stay
float32 and are cast where they are used, so that gradients and updates reach the float32 weights.
  matrix products (PRODUCTS)                  bfloat16
  what follows the last product: the loss     float32
  exponentials, powers, sums, and what reads
  measured statistics (WIDE)                  float32
  rows gathered from a weight                 gathered in float32, then cast: its gradient adds up in float32
  any other node                              float32 if an operand made by a node is, else bfloat16
The other normalisations are computed in float32 inside (see runtime/operators.py).
"""

from __future__ import annotations

import numpy as np

from ..program import Node, TensorType, UserError
from .graph import Graph
from .operators import infer

PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"})
WIDE = frozenset(
    {
        "Softmax",
        "LogSoftmax",
        "Exp",
        "Log",
        "Pow",
        "ReduceSum",
        "ReduceMean",
        "ReduceProd",
        "CumSum",
        "BatchNormalization",
    }
)
GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})


def lowered(graph: Graph, dtype: str) -> Graph:
    if dtype != "bfloat16":
        raise UserError(
            f"compute_dtype {dtype!r}: only 'bfloat16' is supported (float16 would need loss scaling)"
        )
    return _Lowering(graph, dtype).run()


class _Lowering:
    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        self.types = {name: graph.types[name] for name in graph.leaves}
        self.constants = dict(graph.constants)
        self.nodes: list[Node] = []
        self.casts: dict[tuple[str, str], str] = {}
        self.free = set(graph.leaves)  # tensors that come in the type that is asked for

    def run(self) -> Graph:
        graph = self.graph
        final = _after_products(graph)
        for node in graph.nodes:
            self._node(node, node.name in final)
        (loss,) = graph.outputs
        outputs = (self._as(loss, graph.types[loss].dtype),)
        read = {tensor for node in self.nodes for tensor in node.inputs}
        constants = {name: value for name, value in self.constants.items() if name in read}
        types = {name: t for name, t in self.types.items() if name in constants or name not in self.constants}
        return Graph(
            graph.name, tuple(self.nodes), graph.inputs, graph.parameters, constants, outputs, types, graph.source,
            graph.statistics,
        )  # fmt: skip

    def _node(self, node: Node, final: bool) -> None:
        types = self.graph.types
        wanted = self._dtype(node, final)
        inputs = tuple(
            self._as(x, wanted) if wanted and types[x].dtype == "float32" else x for x in node.inputs
        )
        results = infer(node.op, node.attributes, tuple(self.types[x] for x in inputs))
        self.types |= dict(zip(node.outputs, results, strict=True))
        self.nodes.append(Node(node.name, node.op, inputs, node.outputs, node.attributes, node.domain))

    def _dtype(self, node: Node, final: bool) -> str | None:
        """What the node computes in; None for operands as they are."""
        floats = [x for x in node.inputs if self.graph.types[x].dtype == "float32"]
        if not floats or node.op == "Cast":
            return None
        if node.op in PRODUCTS:
            return self.low
        if final or node.op in WIDE:
            return "float32"
        if node.op in GATHERS and node.inputs[0] in self.free:
            self.free.update(node.outputs)
            return "float32"
        made = [x for x in floats if x not in self.free]
        return "float32" if any(self.types[x].dtype == "float32" for x in made) else self.low

    def _as(self, tensor: str, dtype: str) -> str:
        """The tensor, or its cast."""
        if self.types[tensor].dtype == dtype:
            return tensor
        if (tensor, dtype) not in self.casts:
            name = f"{tensor}/{dtype}"
            while name in self.types or name in self.graph.types:
                name += "_2"
            self.casts[tensor, dtype] = name
            self.types[name] = TensorType(self.types[tensor].shape, dtype)
            if tensor in self.constants:
                self.constants[name] = _cast(self.constants[tensor], dtype)
            else:
                self.nodes.append(Node(name, "Cast", (tensor,), (name,), {"to": dtype}))
        return self.casts[tensor, dtype]


def _after_products(graph: Graph) -> set[str]:
    """Nodes that no product depends on."""
    feeding: set[str] = set()
    after = set()
    for node in reversed(graph.nodes):
        if node.op in PRODUCTS or not feeding.isdisjoint(node.outputs):
            feeding.update(node.inputs)
        else:
            after.add(node.name)
    return after


def _cast(value: np.ndarray, dtype: str) -> np.ndarray:
    """Finite values stay finite: the lowest float32, common in masks, would become -inf."""
    result = value.astype(np.dtype(dtype))
    largest = np.asarray(3.3895314e38, np.dtype(dtype))
    broken = np.isinf(result.astype(np.float32)) & np.isfinite(value)
    return np.where(broken, np.copysign(largest.astype(np.float32), value).astype(np.dtype(dtype)), result)
