"""Small models that the tests of the command line write, and a way to call it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(path: Path, nodes, inputs, outputs, weights=(), *, opset=17, domains=()) -> Path:
    """An ONNX file; `inputs` and `outputs` are (name, shape) or (name, shape, element type)."""
    infos = [
        [
            helper.make_tensor_value_info(name, *(kind or [TensorProto.FLOAT]), shape)
            for name, shape, *kind in ports
        ]
        for ports in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights]
    graph = helper.make_graph(nodes, path.stem, *infos, initializers)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in domains)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


def mlp(path: Path, *, hidden: int = 1024, batch: int | str = 64) -> Path:
    """Softmax(relu(x a) b): 256 features, 16 classes."""
    a, b = mlp_weights(hidden)
    weights = [("a", a), ("b", b)]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["z"], "second"),
        helper.make_node("Softmax", ["z"], ["y"], "softmax", axis=-1),
    ]
    return save(path, nodes, [("x", [batch, 256])], [("y", [batch, 16])], weights)


def mlp_weights(hidden: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((256, hidden), np.float32) / 16
    return first, rng.standard_normal((hidden, 16), np.float32) / 32


def mlp_result(x: np.ndarray) -> np.ndarray:
    """What the model of `mlp` computes, by NumPy."""
    a, b = mlp_weights()
    z = np.maximum(x @ a, 0) @ b
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def unknown_operator(path: Path) -> Path:
    node = helper.make_node("Frobnicate", ["x"], ["y"], "frob", domain="my.ops")
    return save(path, [node], [("x", [4, 4])], [("y", [4, 4])], domains=["my.ops"])


def data_dependent(path: Path) -> Path:
    node = helper.make_node("NonZero", ["x"], ["y"], "where")
    return save(path, [node], [("x", [4, 4])], [("y", [2, None], TensorProto.INT64)])


def external_weights(path: Path) -> Path:
    """The model of `mlp` with its weights in another file, which is then deleted."""
    model = onnx.load(mlp(path))
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="weights.bin",
        size_threshold=0,
    )
    (path.parent / "weights.bin").unlink()
    return path


def two_heads(path: Path) -> Path:
    """y = x a and z = x b: a loss on one gives no gradient to the weight of the other."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["y"], "first"),
        helper.make_node("MatMul", ["x", "b"], ["z"], "second"),
    ]
    weights = [("a", np.ones((8, 6), np.float32)), ("b", np.ones((8, 5), np.float32))]
    return save(path, nodes, [("x", [4, 8])], [("y", [4, 6]), ("z", [4, 5])], weights)


def with_labels(path: Path, *, type_: int = TensorProto.INT64, shape: tuple[int, ...] = (4,)) -> Path:
    """y = x a, and an input of labels."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["y"], "first"),
        helper.make_node("Identity", ["labels"], ["same"], "same"),
    ]
    ports = [("x", [4, 8]), ("labels", list(shape), type_)], [("y", [4, 6]), ("same", list(shape), type_)]
    return save(path, nodes, *ports, [("a", np.ones((8, 6), np.float32))])


def without_gradient(path: Path) -> Path:
    """A loss of indices."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["y"], "first"),
        helper.make_node("ArgMax", ["y"], ["best"], "best", axis=1, keepdims=0),
        helper.make_node("Cast", ["best"], ["number"], "number", to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["number"], ["loss"], "loss", keepdims=0),
    ]
    return save(path, nodes, [("x", [4, 8])], [("loss", [])], [("a", np.ones((8, 6), np.float32))])


def root(path: Path) -> Path:
    """y = sqrt(x a): where that is 0, its gradient is infinite."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("Sqrt", ["h"], ["y"], "root"),
    ]
    return save(path, nodes, [("x", [4, 8])], [("y", [4, 6])], [("a", np.ones((8, 6), np.float32))])


def given_step(path: Path, *, shape: tuple[int, ...] = (8, 6)) -> Path:
    """A step of p.a, whose next value is of another shape if its own is not (8, 6)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "first"),
        helper.make_node("ReduceSum", ["y"], ["loss"], "loss", keepdims=0),
        helper.make_node("Transpose", ["x"], ["xt"], "turned", perm=[1, 0]),
        helper.make_node("MatMul", ["xt", "y"], ["new.a"], "update"),
        helper.make_node("Identity", ["p.a"], ["old"], "old"),
    ]
    ports = [("x", [4, 8]), ("p.a", list(shape))], [("loss", []), ("new.a", [8, 6]), ("old", list(shape))]
    return save(path, nodes, *ports, [("w", np.ones((8, 6), np.float32))])
