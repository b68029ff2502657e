"""Predicted peak memory against what XLA says: arguments + outputs - aliased + temporaries, within 15 %."""

from __future__ import annotations

from pathlib import Path

import parallegg
import pytest
from parallegg.builders import gpt, write
from parallegg.extract.memory import memory_use
from parallegg.planfile import Plan
from parallegg.runtime.devices import ensure_devices
from parallegg.runtime.lowering import Executable

from .models import DATA

TOLERANCE = 0.15


def xla_bytes(plan: Plan) -> int:
    """Of one device, state donated."""
    ensure_devices(plan.mesh.size)
    executable = Executable(plan, donate=[name for name, _ in plan.state])
    found = executable.compiled.memory_analysis()
    assert found is not None
    arguments = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return arguments + found.temp_size_in_bytes


def gpt_step(folder: Path) -> parallegg.TrainingStep:
    sizes = {"width": 64, "heads": 4, "vocabulary": 256, "context": 128, "batch": 32}
    write(gpt(layers=2, **sizes), folder / "gpt.onnx")
    graph = parallegg.load(folder / "gpt.onnx")
    loss = parallegg.LossSpec("cross-entropy", "logits")
    return parallegg.training_step(graph, loss=loss, optimizer=parallegg.AdamW())


def resnet_step(_: Path) -> parallegg.TrainingStep:
    graph = parallegg.load(DATA / "resnet50.legacy.onnx", {"pixel_values": (64, 3, 128, 128)})
    loss = parallegg.LossSpec("cross-entropy", "logits")
    return parallegg.training_step(graph, loss=loss, optimizer=parallegg.SGD(momentum=0.9))


@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (gpt_step, "data-parallel"),
        pytest.param(gpt_step, None, marks=pytest.mark.sweep),
        pytest.param(resnet_step, "data-parallel", marks=pytest.mark.sweep),
        pytest.param(resnet_step, None, marks=pytest.mark.sweep),
    ],
)
def test_predicted_peak_memory_is_near_xlas(make, scheme: str | None, tmp_path: Path, record_property):
    plan = parallegg.plan(make(tmp_path), "data=8", scheme=scheme).plan
    predicted, real = memory_use(plan), xla_bytes(plan)
    assert predicted.peak > 3 * (predicted.parameters + predicted.inputs)  # activations are what counts
    record_property("table", f"{make.__name__} {scheme}: predicted {predicted.peak}, XLA {real}\n")
    assert abs(predicted.peak / real - 1) <= TOLERANCE
