"""Known schemes emerge: what a training step sends is what the textbook says, to the byte (docs/hand-plans.md).

n devices, P bytes of weights, A bytes of one activation. Ring formulas, per device. Where bytes are to decide, the
hardware has no latencies: small norms' gradients and the loss itself cost a collective each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import parallegg
import pytest
from onnx import helper
from parallegg.extract.hardware import Hardware, Link, load_hardware
from parallegg.rewrite.graph import Graph

from .blocks import block, feed_forward

WIDTH, HEADS, SEQUENCE = 1024, 16, 512
NORM = 4 * WIDTH  # bytes of a normalisation's scale
BLOCK = 12 * WIDTH * WIDTH * 4  # of a block's matrices


def scalar(*sizes: int) -> int:
    """The loss, summed over axes of these sizes."""
    return sum(2 * (n - 1) * 4 // n for n in sizes)


def ring(n: int, passes: int, size: int) -> int:
    """`passes` halves of an all-reduce of `size` bytes."""
    return passes * (n - 1) * size // n


def without_latencies() -> Hardware:
    h100 = load_hardware("h100")
    return replace(h100, link=Link(0.0, h100.link.bytes_per_second), launch_seconds=0.0)


def step_of(graph: Graph) -> parallegg.TrainingStep:
    """AdamW on the mean squared error of y."""
    loss = parallegg.LossSpec("mse", "y")
    return parallegg.training_step(graph, loss=loss, optimizer=parallegg.AdamW())


def transformer_block(path: Path, batch: int) -> parallegg.TrainingStep:
    """Learned positions, attention, feed-forward; the positions make the block's input have a gradient, too."""
    nodes = []

    def op(kind: str, inputs: list[str], output: str, **attributes) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    x = op("Add", ["x", "positions"], "embedded")
    y = op("LayerNormalization", [x, "norm1"], "n1", axis=-1)
    perm = {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}
    q, k, v = (
        op(
            "Transpose",
            [op("Reshape", [op("MatMul", [y, f"w{n}"], n), "heads"], f"{n}_heads")],
            f"{n}_t",
            perm=p,
        )
        for n, p in perm.items()
    )
    scores = op("Mul", [op("MatMul", [q, k], "products"), "scale"], "scores")
    y = op("MatMul", [op("Softmax", [scores], "chances", axis=-1), v], "mixed")
    y = op("Reshape", [op("Transpose", [y], "by_token", perm=[0, 2, 1, 3]), "joined"], "attention")
    x = op("Add", [x, op("MatMul", [y, "wo"], "projected")], "residual")
    y = op("LayerNormalization", [x, "norm2"], "n2", axis=-1)
    y = op("MatMul", [op("Gelu", [op("MatMul", [y, "up"], "wide")], "active"), "down"], "narrow")
    op("Add", [x, y], "y")
    square, wide = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    weights = {"positions": (SEQUENCE, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    weights |= dict.fromkeys(("wq", "wk", "wv", "wo"), square) | {"up": wide, "down": wide[::-1]}
    size = WIDTH // HEADS
    constants = {
        "heads": np.array([0, 0, HEADS, size]),
        "joined": np.array([0, 0, WIDTH]),
        "scale": np.array(size**-0.5, np.float32),
    }
    return step_of(block(path, nodes, (batch, SEQUENCE, WIDTH), weights, constants))


def normalised_feed_forward(path: Path, layers: int, tokens: int) -> parallegg.TrainingStep:
    nodes, weights = feed_forward("h", layers, WIDTH)
    norm = helper.make_node("LayerNormalization", ["x", "norm"], ["h"], axis=-1)
    return step_of(block(path, [norm, *nodes], (tokens, WIDTH), {"norm": (WIDTH,)} | weights))


def planned(step: parallegg.TrainingStep, mesh: str, **options) -> tuple[int, parallegg.Planned]:
    found = parallegg.plan(step, mesh, **options)
    return sum(row["bytes"] for row in found.report["collectives"]), found


def test_many_examples_give_data_parallelism(tmp_path: Path):
    """2 (n-1)/n P; the gradients' ReduceScatter and the new weights' AllGather leave the moments sharded."""
    step = transformer_block(tmp_path / "m.onnx", batch=512)
    sent, found = planned(step, "data=8", hardware="h100")
    whole = sum(step.graph.types[name].bytes for name in step.graph.parameters)
    assert sent == ring(8, 2, whole) + scalar(8)
    assert found.report["gap"] <= 1e-3


@pytest.mark.sweep
def test_weights_that_do_not_fit_are_gathered_in_both_passes(tmp_path: Path):
    """3 (n-1)/n P (ZeRO-3, FSDP); the norm's scale is not read in the backward pass, hence 2 (n-1)/n of it."""
    layers = 3
    step = normalised_feed_forward(tmp_path / "m.onnx", layers, tokens=8192)
    sent, found = planned(step, "data=8", hardware="h100", memory_bytes=201_400_000)
    assert sent == ring(8, 3, layers * 8 * WIDTH * WIDTH * 4) + ring(8, 2, NORM) + scalar(8)
    assert found.report["gap"] <= 1e-2
    state = {port.name: port.layout for port in found.plan.inputs if port.name.startswith(("up", "down"))}
    assert all(layout != (parallegg.Replicate(),) for layout in state.values())


@pytest.mark.sweep
def test_few_tokens_give_megatron(tmp_path: Path):
    """Four all-reduces of the activation a block, or as many halves: 8 (t-1)/t A, and nothing else."""
    step = transformer_block(tmp_path / "m.onnx", batch=1)
    sent, found = planned(step, "model=8", hardware="h100")
    assert sent == ring(8, 8, SEQUENCE * WIDTH * 4)
    assert found.report["gap"] <= 1e-3


def test_sequence_sharding_sends_the_same_bytes(tmp_path: Path):
    """Between the products everything is split by tokens: halves of all-reduces, and the norms' gradients."""
    step = transformer_block(tmp_path / "m.onnx", batch=1)
    sent, found = planned(step, "model=8", hardware=without_latencies())
    assert sent == ring(8, 8, SEQUENCE * WIDTH * 4) + 2 * ring(8, 2, NORM) + scalar(8)
    assert found.report["gap"] <= 1e-3
    shapes = {name: type_.shape for name, type_ in found.plan.types.items()}
    assert shapes["residual@S1"] == (1, SEQUENCE // 8, WIDTH)


@pytest.mark.sweep
def test_data_times_tensor(tmp_path: Path):
    """d = 2, t = 4: 8 (t-1)/t A/d between the columns and rows, 2 (d-1)/d P/t for the gradients."""
    d, t = 2, 4
    step = transformer_block(tmp_path / "m.onnx", batch=d)
    sent, found = planned(step, f"data={d},model={t}", hardware=without_latencies())
    activation, positions = SEQUENCE * WIDTH * 4, SEQUENCE * WIDTH * 4  # of one of the d groups
    norms = 2 * (ring(t, 2, NORM) + ring(d, 2, NORM // t))
    assert sent == math.fsum(
        (ring(t, 8, activation), ring(d, 2, (BLOCK + positions) // t), norms, scalar(d, t))
    )
    assert found.report["gap"] <= 1e-2
