"""Are wrong plans found? Plans of training steps, changed as real systems have been wrong, and what verification says.

    python benchmarks/mutants.py --mutants 2000 --plans 200 -o mutants.json

In: nothing; the models are the builders' GPT, Llama and mixture of experts, each with a loss over tokens of which not
all count, gradient clipping and AdamW, and a convolutional net, on meshes of different sizes, under the cheapest plan
and random ones.  Out: a table of mutants by operator (benchmarks/mutations.py), the survivors in words, and the plans
that are not changed and yet refuted (there should be none).

killed       a layer refutes the mutant
equivalent   the plan layer derives it: it computes the same
survived     neither
stillborn    the change is no well-formed plan; not counted
A killed mutant is *named* when the faulty node, or one that reads what it computes, is one of the first three suspects.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import parallegg
from mutations import OPERATORS, Mutation, mutations
from parallegg import builders
from parallegg.extract.build import Model
from parallegg.extract.hardware import load_hardware
from parallegg.extract.planner import prepare, random_plan
from parallegg.extract.sampling import random_choice
from parallegg.mesh import Mesh
from parallegg.planfile import Plan
from parallegg.rewrite.graph import tensor_source
from parallegg.rules import load_rules
from parallegg.runtime.devices import ensure_devices
from parallegg.verification.numbers import Original, compare
from parallegg.verification.plans import check_plan, derive
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

DEVICES = 12
FIRST = 3  # suspects that count as naming
SIZES = {"layers": 1, "width": 24, "heads": 6, "vocabulary": 36, "context": 12, "batch": 6}
CNN = Path(__file__).parent.parent / "tests" / "data" / "cnn.trainstep.onnx"
MESHES = ("data=2,model=3", "data=3,model=2", "data=2,seq=3,model=2")


@dataclass(frozen=True)
class Record:
    """One mutant, or a plan that is as it was (operator "")."""

    model: str
    mesh: str
    plan: int  # 0 is the cheapest
    operator: str
    what: str
    outcome: str  # "killed", "equivalent", "survived"; "right" or "false alarm" of a plan that is as it was
    layers: tuple[str, ...]  # that say "refuted"
    named: bool
    suspects: tuple[str, ...]
    seconds: float


# ------------------------------------------------------------------------------------------------ models


def _built(make: Callable[..., object], **sizes: int) -> parallegg.TrainingStep:
    with tempfile.TemporaryDirectory() as folder:
        graph = parallegg.load(builders.write(make(**{**SIZES, **sizes}), Path(folder) / "model.onnx"))  # type: ignore[arg-type]
    return parallegg.training_step(
        graph,
        loss=parallegg.LossSpec("cross-entropy", "logits"),
        optimizer=parallegg.AdamW(weight_decay=0.1, epsilon=1e-5),
        clip_norm=1.0,
    )


MODELS: dict[str, Callable[[], parallegg.TrainingStep]] = {
    "gpt2": lambda: _built(builders.gpt),
    "llama": lambda: _built(builders.llama, kv_heads=3, ffn=48),
    "moe": lambda: _built(builders.moe, kv_heads=6, ffn=48, experts=6),
    "cnn": lambda: parallegg.as_training_step(parallegg.load(CNN), "p.{} -> new.{}"),
}


@cache
def _step(model: str) -> tuple[parallegg.TrainingStep, Original]:
    step = MODELS[model]()
    return step, Original(step.graph, tensor_source(step.graph))


@cache
def _prepared(model: str, mesh: str) -> Model:
    step, _ = _step(model)
    return prepare(step.graph, Mesh.parse(mesh), load_hardware("cpu"), book=load_rules(), roles=step.roles)


@cache
def _plan(model: str, mesh: str, number: int) -> Plan:
    """The cheapest plan, or a random legal one, with its derivation."""
    step, _ = _step(model)
    if number == 0:
        return parallegg.plan(step, mesh).plan
    prepared = _prepared(model, mesh)
    plan = random_plan(prepared, random_choice(prepared.problem, np.random.default_rng(number)))
    return replace(plan, derivation=derive(step.graph, plan, load_rules(), step.state))


# ------------------------------------------------------------------------------------------------ judging


@dataclass(frozen=True)
class Job:
    """Some mutants of one plan: `quota` of each operator; or the plan as it is."""

    model: str
    mesh: str
    plan: int
    quota: int


def work(job: Job) -> list[Record]:
    """Draw and judge; deterministic in the job."""
    ensure_devices(DEVICES)
    plan = _plan(job.model, job.mesh, job.plan)
    if not job.quota:
        return [_record(job, None, plan)]
    drawn = random.Random(repr(job))
    return [
        _record(job, mutation, mutant)
        for found in mutations(plan).values()
        for mutation, mutant in _draw(found, job.quota, drawn)
    ]


def _draw(found: list[Mutation], quota: int, drawn: random.Random) -> Iterator[tuple[Mutation, Plan]]:
    """Well-formed mutants, in a random order of spots."""
    left = quota
    for mutation in drawn.sample(found, len(found)):
        if not left:
            return
        try:
            mutant = mutation.make()
        except (ValueError, KeyError, parallegg.UserError):
            continue
        left -= 1
        yield mutation, mutant


def _record(job: Job, mutation: Mutation | None, plan: Plan) -> Record:
    start = time.perf_counter()
    step, original = _step(job.model)
    derived = check_plan(step.graph, plan, load_rules(), step.state)
    refuting = ["plan"] if derived.verdict == "refuted" else []
    if mutation is None or derived.verdict != "derived":
        compared = compare(step.graph, plan, original=original, locate=False)
        refuting += ["numbers"] if compared.verdict == "refuted" else []
    if mutation is None:
        outcome = "false alarm" if refuting or derived.verdict != "derived" else "right"
    else:
        outcome = "killed" if refuting else "equivalent" if derived.verdict == "derived" else "survived"
    return Record(
        *(job.model, job.mesh, job.plan),
        *((mutation.operator, mutation.what) if mutation else ("", derived.reason)),
        outcome=outcome,
        layers=tuple(refuting),
        named=mutation is not None and bool(mutation.faulty & set(derived.suspects[:FIRST])),
        suspects=derived.suspects[:FIRST],
        seconds=time.perf_counter() - start,
    )


# ------------------------------------------------------------------------------------------------ report


def jobs(mutants: int, plans: int) -> list[Job]:
    """Jobs for about so many mutants, over all models, meshes and three plans of each; and for plans as they are."""
    spots = [(model, mesh, plan) for plan in range(3) for model in MODELS for mesh in MESHES]
    quota = -(-mutants // (len(spots) * len(OPERATORS)) * 5 // 4)  # not every plan offers every operator
    per = -(-plans // (len(MODELS) * len(MESHES)))
    right = [Job(model, mesh, plan, 0) for model in MODELS for mesh in MESHES for plan in range(per)]
    return [Job(*spot, max(quota, 1)) for spot in spots][: mutants or 0] + right[:plans]


def tabulate(records: list[Record]) -> Iterator[Table | str]:
    mutants = [r for r in records if r.operator]
    table = Table("operator", "mutants", "killed", "equivalent", "survived", "by plan", "by numbers", "named")
    for operator in (*OPERATORS, "all"):
        of = [r for r in mutants if operator in (r.operator, "all")]
        count = Counter(r.outcome for r in of)
        by = Counter(layer for r in of for layer in r.layers)
        named = sum(r.named for r in of if r.outcome == "killed")
        figures = (
            len(of),
            *(count[k] for k in ("killed", "equivalent", "survived")),
            by["plan"],
            by["numbers"],
        )
        table.add_row(operator, *map(str, figures), f"{named / max(count['killed'], 1):.1%}")
    yield table
    counted = sum(r.outcome != "equivalent" for r in mutants)
    killed = sum(r.outcome == "killed" for r in mutants)
    yield f"killed {killed} of {counted}: {killed / max(counted, 1):.2%}"
    right = [r for r in records if not r.operator]
    yield f"false alarms: {sum(r.outcome == 'false alarm' for r in right)} of {len(right)} plans"
    for r in records:
        if r.outcome in ("survived", "false alarm"):
            where = f"{r.model} {r.mesh}, plan {r.plan}; suspects {', '.join(r.suspects)}"
            yield f"{r.outcome}: {r.operator} {r.what} ({where})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge changed plans, layer by layer.")
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--plans", type=int, default=200, help="plans that are as they were")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="all records as JSON")
    options = parser.parse_args()
    console, records = Console(), []
    todo = jobs(options.mutants, options.plans)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool, Progress(console=console) as bar:
        for found in bar.track(pool.imap_unordered(work, todo), total=len(todo), description="judging"):
            records += found
            if options.output:  # what is there already is not lost when the rest takes too long
                options.output.write_text(json.dumps([asdict(r) for r in records], indent=1))
    records.sort(key=lambda r: (r.model, r.mesh, r.plan, r.operator, r.what))
    for part in tabulate(records):
        console.print(part)


if __name__ == "__main__":
    main()
