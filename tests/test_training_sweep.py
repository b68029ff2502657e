"""Three training steps under many plans equal one device's: cheapest, short of memory, and drawn at random."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import parallegg
import pytest
from parallegg.builders import gpt, write
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.planfile import from_bytes, to_bytes
from parallegg.rules import load_rules
from parallegg.runtime.devices import ensure_devices

from .trajectories import check_three_steps, double

# Sizes that all axes divide, unequal axes, and a batch that is no multiple of the sequence.
BATCH, CONTEXT, WORDS = 6, 8, 24
MESHES = ("data=2,model=3", "data=3,model=2", "data=2,seq=2,model=2", "model=4,data=2", "data=6")
DRAWN = 6


def gpt_step(folder: Path) -> tuple[parallegg.TrainingStep, list[dict[str, np.ndarray]]]:
    """One block; its keys' bias has a gradient of zero but for rounding, hence epsilon."""
    sizes = {"width": 12, "heads": 6, "vocabulary": WORDS, "context": CONTEXT, "batch": BATCH}
    write(gpt(layers=1, **sizes), folder / "gpt.onnx")
    step = parallegg.training_step(
        parallegg.load(folder / "gpt.onnx"),
        loss=parallegg.LossSpec("cross-entropy", "logits"),
        optimizer=parallegg.AdamW(weight_decay=0.1, epsilon=1e-5),
        clip_norm=1.0,
    )
    words = np.random.default_rng(0).integers(0, WORDS, (3, BATCH, CONTEXT + 1))
    labels = np.where(np.arange(CONTEXT) < CONTEXT - 2, words[:, :, 1:], -100)  # not all of them count
    return step, [{"input_ids": w[:, :-1], "labels": t} for w, t in zip(words, labels, strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MESHES)
def test_three_steps_of_any_plan_equal_those_of_one_device(mesh: str, tmp_path: Path):
    """The cheapest plan, one that holds less, and random legal ones: eight a mesh."""
    step, fed = gpt_step(tmp_path)
    cheapest = parallegg.plan(step, mesh)
    assert cheapest.report["gap"] <= 1e-2
    ensure_devices(cheapest.plan.mesh.size)
    least = int(0.8 * cheapest.report["memory_bytes"])
    plans = [cheapest.plan, parallegg.plan(step, mesh, memory_bytes=least).plan]
    roles = step.roles
    model = prepare(step.graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules(), roles=roles)
    for seed in range(DRAWN):
        drawn = random_plan(model, random_choice(model.problem, np.random.default_rng(seed)))
        plans.append(dataclasses.replace(drawn, metadata=cheapest.plan.metadata))
    for plan in plans:
        check_three_steps(step, from_bytes(to_bytes(plan)), list(map(double, fed)))
