"""Train a small GPT on the docstrings of Python's standard library, on eight devices of this machine.

    python examples/train_gpt.py --layers 2 --width 64 --steps 200

Builds the model as ONNX, plans its training step, trains under the plan in a loop of its own, and fails if the loss has
not fallen. Without accelerators the devices are virtual. All of it is ordinary use of the package: copy what you need.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import parallegg
from docstrings import batches
from parallegg.builders import gpt, write

VOCABULARY = 128  # the bytes of ASCII
FALLEN = 0.8  # of the first losses; random guessing stays at ln(128)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, said in (
        ("layers", 2, "transformer blocks"),
        ("width", 64, "of every token's vector"),
        ("heads", 8, "of attention"),
        ("context", 64, "tokens of an example"),
        ("batch", 16, "examples of a step"),
        ("steps", 200, "of training"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{said} (default: {default})")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest (default: 0.003)")
    parser.add_argument("--mesh", default="data=2,model=4", help="default: data=2,model=4")
    parser.add_argument("--hardware", default="cpu", help="what to plan for (default: cpu)")
    parser.add_argument(
        "--folder", type=Path, default=Path("run"), help="for the model and the plan (default: run)"
    )
    return parser.parse_args()


def plan(model: Path, mesh: str, hardware: str) -> parallegg.Plan:
    """The model's training step, planned."""
    step = parallegg.training_step(
        parallegg.load(model),
        loss=parallegg.LossSpec("cross-entropy", "logits"),
        optimizer=parallegg.AdamW(weight_decay=0.1),
        clip_norm=1.0,
    )
    planned = parallegg.plan(step, mesh, hardware=hardware)
    report = planned.report
    print(
        f"planned for {mesh}: {report['cost_s']:.3g} s a step, at most {report['gap']:.1%} above the best plan, "
        f"{report['memory_bytes']:,} bytes a device"
    )
    return planned.plan


def train(training, data, steps: int, peak: float) -> list[float]:
    """The losses of all steps."""
    rate = parallegg.schedules.cosine(peak, steps, warmup=steps // 10, final=peak / 10)
    training.prepare()  # compiles, so that the first step takes no longer than the others
    state, losses = training.init(), []
    for number in range(1, steps + 1):
        start = time.monotonic()
        state, metrics = training.step(state, next(data), rate)
        losses.append(metrics["loss"])
        if number in (1, steps) or number % max(steps // 10, 1) == 0:
            print(f"step {number:4}: loss {losses[-1]:.3f}, {time.monotonic() - start:.3f} s", flush=True)
    return losses


def main() -> int:
    chosen = options()
    chosen.folder.mkdir(exist_ok=True)
    sizes = {name: getattr(chosen, name) for name in ("layers", "width", "heads", "context", "batch")}
    model = write(gpt(**sizes, vocabulary=VOCABULARY), chosen.folder / "gpt.onnx")
    planned = plan(model, chosen.mesh, chosen.hardware)
    parallegg.save(planned, chosen.folder / "gpt.plan.onnx")
    training = parallegg.compile(planned, model)
    shapes = {name: type_.shape for name, type_ in training.batch.items()}
    losses = train(training, batches(shapes), chosen.steps, chosen.learning_rate)
    few = max(chosen.steps // 20, 1)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    assert last < FALLEN * first, f"the loss has not fallen: {first:.3f} at first, {last:.3f} at last"
    print(f"the loss fell from {first:.3f} to {last:.3f}; model and plan are in {chosen.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
