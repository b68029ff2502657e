"""ONNX losses become nodes that may be split along every dimension; their values are ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from parallegg.program import UserError
from parallegg.rewrite.onnx_reader import load
from parallegg.runtime.lowering import evaluate

from .cli_models import save

SHAPES = {"x": (3, 5, 2, 4), "t": (3, 2, 4), "w": (5,)}


def loss_model(path, op, *, weights=False, log_prob=False, **attributes):
    inputs = [("x", SHAPES["x"]), ("t", SHAPES["t"], TensorProto.INT64)]
    inputs += [("w", SHAPES["w"])] if weights else []
    outputs = [("y", SHAPES["t"] if attributes.get("reduction") == "none" else [])]
    outputs += [("logp", SHAPES["x"])] if log_prob else []
    names = [[name for name, *_ in ports] for ports in (inputs, outputs)]
    return save(path, [helper.make_node(op, *names, "loss", **attributes)], inputs, outputs)


def feeds(ignored: int | None, weights: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = {
        "x": rng.standard_normal(SHAPES["x"], np.float32),
        "t": rng.integers(0, 5, SHAPES["t"]),
        "w": rng.uniform(0.1, 2, SHAPES["w"]).astype(np.float32),
    }
    if ignored is not None:
        values["t"][1, 0] = ignored
    return values if weights else {name: values[name] for name in ("x", "t")}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_it_equals_onnx_runtime(op, weights, ignored, reduction, tmp_path):
    settings = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    both = op.startswith("Softmax")
    path = loss_model(tmp_path / "m.onnx", op, weights=weights, log_prob=both, **settings)
    graph, values = load(path), feeds(ignored, weights)
    found = evaluate(graph.nodes, graph.constants | values, graph.outputs)
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, values)
    for name, value in zip(graph.outputs, expected, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_no_dimension_is_moved_merged_or_gathered_from(tmp_path):
    path = loss_model(tmp_path / "m.onnx", "SoftmaxCrossEntropyLoss", weights=True, ignore_index=-1)
    graph = load(path)
    assert {"Transpose", "GatherElements", "Gather"}.isdisjoint(node.op for node in graph.nodes)
    moved = [node for node in graph.nodes if node.op == "Reshape"]
    assert all(np.prod(graph.types[node.inputs[0]].shape) in (5, 24) for node in moved)  # weights and labels


def test_the_mean_over_no_label_is_zero(tmp_path):
    path = loss_model(tmp_path / "m.onnx", "SoftmaxCrossEntropyLoss", ignore_index=-1)
    graph = load(path)
    values = feeds(None, False) | {"t": np.full(SHAPES["t"], -1)}
    assert evaluate(graph.nodes, graph.constants | values, graph.outputs)["y"] == 0


def test_labels_of_another_shape_are_refused(tmp_path):
    inputs = [("x", (3, 5)), ("t", (3, 5), TensorProto.INT64)]
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "t"], ["y"], "loss")
    with pytest.raises(UserError) as error:
        load(save(tmp_path / "m.onnx", [node], inputs, [("y", [])]))
    text = "node 'loss' (SoftmaxCrossEntropyLoss): labels of float32[3,5] must have shape (3,), got (3, 5)"
    assert str(error.value).endswith(text)
