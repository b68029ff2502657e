"""Built models: what ONNX Runtime computes from them, what they are without weights, and the command line."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from parallegg import builders
from parallegg.program import UserError
from parallegg.rewrite.graph import tensor_source
from parallegg.rewrite.onnx_reader import load
from parallegg.runtime.lowering import QUICK, evaluate

SMALL = {"layers": 2, "width": 24, "heads": 6, "vocabulary": 40, "context": 10, "batch": 3}
MODELS = {
    "gpt": (builders.gpt, {}),
    "gpt in heads": (builders.gpt, {"qkv": "separate", "ffn": 20}),
    "llama": (builders.llama, {"kv_heads": 2, "ffn": 20}),
    "llama without groups": (builders.llama, {"kv_heads": 6, "ffn": 20}),
    "moe": (builders.moe, {"kv_heads": 2, "ffn": 20, "experts": 4}),
    "moe of one": (builders.moe, {"kv_heads": 2, "ffn": 20, "experts": 4, "chosen": 1}),
    "moe that overflows": (
        builders.moe,
        {"kv_heads": 3, "ffn": 20, "experts": 5, "chosen": 3, "capacity_factor": 0.7},
    ),
}


def build(name: str, **sizes) -> onnx.ModelProto:
    function, own = MODELS[name]
    return function(**{**SMALL, **own, **sizes})


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SMALL["vocabulary"], (SMALL["batch"], SMALL["context"]))


def runtime(model: onnx.ModelProto, ids: np.ndarray, *names: str) -> list[np.ndarray]:
    """Outputs, or any tensors, by ONNX Runtime without optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = ort.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(list(names) or None, {"input_ids": ids})


@pytest.mark.parametrize("name", MODELS)
def test_it_agrees_with_onnx_runtime(name, tmp_path):
    model = build(name)
    onnx.checker.check_model(model, full_check=True)
    graph = load(builders.write(model, tmp_path / "m.onnx"))
    value = tensor_source(graph)
    leaves = {name: value(name) for name in (*graph.parameters, *graph.constants)}
    ids = tokens()
    found = evaluate(graph.nodes, leaves | {"input_ids": ids}, graph.outputs, compiler_options=QUICK)
    (expected,) = runtime(model, ids)
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_only_weights_are_parameters(name, tmp_path):
    """Tables, masks and numbers must not be trained."""
    graph = load(builders.write(build(name), tmp_path / "m.onnx"))
    assert all(parameter.endswith((".weight", ".bias")) for parameter in graph.parameters)
    assert graph.inputs == ("input_ids",)


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_the_next(name):
    model, ids = build(name), tokens()
    later = ids.copy()
    later[:, 6:] = (later[:, 6:] + 1) % SMALL["vocabulary"]
    (before,), (after,) = runtime(model, ids), runtime(model, later)
    np.testing.assert_allclose(before[:, :6], after[:, :6], rtol=1e-5, atol=1e-6)
    assert (np.abs(before[:, 6:] - after[:, 6:]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("name", MODELS)
def test_positions_matter(name):
    model = build(name)
    (logits,) = runtime(model, np.broadcast_to(tokens()[:, :1], (3, 10)).copy())
    if name.startswith("gpt"):  # a sequence of one token: only learnt positions tell the places apart
        assert (np.abs(logits[:, 1:] - logits[:, :1]).max(-1) > 1e-3).all()
    (one,), (other,) = runtime(model, tokens()), runtime(model, tokens()[:, [1, 0, *range(2, 10)]])
    assert np.abs(one[:, 2:] - other[:, 2:]).max() > 1e-3


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["moe", "moe of one", "moe that overflows"])
def test_experts_equal_a_loop_over_tokens(name):
    model = build(name, layers=1)
    settings = {"chosen": 2, "capacity_factor": 1.25} | MODELS[name][1]
    prefix = "model/layers/0/"
    x, y = runtime(model, tokens(), f"{prefix}post_attention_layernorm", f"{prefix}moe/combine")
    weight = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    gate, w1, w2, w3 = (
        weight[f"model.layers.0.block_sparse_moe.{part}.weight"]
        for part in ("gate", "experts.w1", "experts.w2", "experts.w3")
    )
    experts, chosen = settings["experts"], settings["chosen"]
    capacity = int(np.ceil(settings["capacity_factor"] * chosen * 10 / experts))
    expected, late = np.zeros_like(y), 0
    for sequence in range(3):
        logits = x[sequence] @ gate
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        order = np.argsort(-chances, axis=-1)[:, :chosen]
        seats = np.zeros(experts, int)
        for token in range(10):
            for e in order[token]:
                seats[e] += 1
                if seats[e] > capacity:
                    late += 1
                    continue
                t = x[sequence, token]
                share = chances[token, e] / chances[token, order[token]].sum()
                expected[sequence, token] += share * ((silu(t @ w1[e]) * (t @ w3[e])) @ w2[e])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert late > 0 or name != "moe that overflows"


@pytest.mark.parametrize("name", MODELS)
def test_without_weights_only_they_are_missing(name, tmp_path):
    full = load(builders.write(build(name), tmp_path / "full.onnx"))
    stub = load(builders.write(build(name, weights="none"), tmp_path / "stub.onnx"))
    assert stub.digest == full.digest
    with pytest.raises(UserError, match="cannot be read"):
        tensor_source(stub)(stub.parameters[0])


def test_weights_depend_on_the_seed_alone():
    a, b, other = (build("gpt", seed=seed).SerializeToString() for seed in (0, 0, 1))
    assert a == b != other


PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_sizes_have_the_published_number_of_weights(name):
    function, sizes = builders.SIZES[name]
    model = function(**sizes, weights="none")
    outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert sum(int(np.prod(tensor.dims)) for tensor in outside) == PARAMETERS[name]
    assert model.ByteSize() < 4e6


def test_a_llama_of_eight_billion_is_built_and_loaded_in_seconds(tmp_path):
    start = time.perf_counter()
    path = builders.write(builders.llama(batch=8, weights="none"), tmp_path / "m.onnx")
    built = time.perf_counter()
    graph = load(path)
    loaded = time.perf_counter()
    assert built - start < 5 and loaded - built < 2
    assert len(graph.parameters) == 2 + 32 * 9 + 1


REFUSED = {
    "heads": (lambda: builders.gpt(heads=7), "heads = 7 does not divide width = 768"),
    "kv heads": (lambda: builders.llama(kv_heads=5), "kv_heads = 5 does not divide heads = 32"),
    "odd size": (
        lambda: builders.llama(width=96, heads=32),
        "2 = 2 does not divide width / heads = 3",
    ),
    "chosen": (lambda: builders.moe(chosen=9), "moe: chosen = 9 of 8 experts"),
    "sizes": (lambda: builders.gpt(layers=0), "layers = 0 is not positive"),
    "qkv": (lambda: builders.gpt(qkv="joint"), "qkv 'joint': expected 'fused' or 'separate'"),
    "weights": (lambda: builders.gpt(weights="zero"), "weights 'zero': expected 'random' or 'none'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_sizes_are_refused(case):
    function, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        function()
    assert str(error.value) == text


def test_the_command_line_writes_a_model(tmp_path):
    command = [sys.executable, "-m", "parallegg.builders", "llama-8b", "--layers", "1", "-o", "m.onnx"]
    subprocess.run(command, cwd=tmp_path, check=True)
    graph = load(tmp_path / "m.onnx")
    assert graph.types["logits"].shape == (1, 8192, 128256)


def test_the_command_line_s_mistakes(tmp_path, capsys):
    assert builders.main(["gpt", "--heads", "5", "-o", str(tmp_path / "m.onnx")]) == 2
    assert capsys.readouterr().err == "error: heads = 5 does not divide width = 768\n"
    small = ["--layers", "1", "--width", "8", "--heads", "2", "--vocabulary", "9", "--context", "4"]
    assert builders.main(["gpt", *small, "-o", str(tmp_path / "none" / "m.onnx")]) == 2
    assert "cannot be written" in capsys.readouterr().err
