"""The command line: plan, show, compare, run, train, verify, models, rules.

    main(argv)   runs one command; gives the exit code
                 0 good, 1 refuted or infeasible, 2 bad input or a loss that is not finite, 3 internal error, 4 unknown
Results go to standard output (with --json: one JSON document), everything else to standard error. A user's mistake is
one line, `error: ...`, found before anything is written; an internal error is one paragraph and a traceback in a file.
JAX is imported by `run`, `train` and `verify` only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from . import (
    DoesNotFit,
    Edited,
    Graph,
    Mesh,
    Options,
    Plan,
    UserError,
    __version__,
    load_hardware,
    load_plan,
    load_rules,
    planned_graph,
    planned_shapes,
)
from . import compile as compile_plan
from . import load as load_model
from . import plan as make_plan
from . import run as run_plan
from . import save as save_plan
from . import verify as verify_plan
from .arrays import draw_inputs, read_arrays, read_inputs, write_arrays
from .batches import open_data
from .console import Spinner, echo, echo_json, say
from .models import resolve, samples
from .options import (
    Rates,
    Wanted,
    check_output,
    check_pins,
    parse_memory,
    parse_pins,
    parse_shapes,
    training_step_of,
)
from .planfile import whole_file
from .report import describe, verdict_facts
from .tables import ROWS, compared, plain_table, plan_tables, summary_table, verdict_lines
from .train import Run, bar, finished_steps, metrics_file
from .units import human_bytes, human_seconds

GOOD, REFUTED, BAD_INPUT, INTERNAL, UNKNOWN = range(5)
INTERRUPTED = 130  # as shells have it
VERDICTS = {"proved": GOOD, "tested": GOOD, "refuted": REFUTED, "unknown": UNKNOWN}
REPORT_TO = "the project's issue tracker"

app = typer.Typer(
    help="Plan, run and verify an ONNX model on many devices.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
rules_app = typer.Typer(help="Rule files.", rich_markup_mode=None)
app.add_typer(rules_app, name="rules")

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file or a sample: onnx:light_resnet50.")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


# ------------------------------------------------------------------------------------------------ entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments or ["--help"], prog_name="parallegg", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else GOOD
    except UserError as error:
        say(f"error: {' '.join(str(error).splitlines())}")
        return REFUTED if isinstance(error, DoesNotFit) else BAD_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return GOOD
    except MemoryError:
        say("error: there is not enough memory for this")
        return BAD_INPUT
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # such as a name that is too long
            say(f"error: {error.filename}: {error.strerror}")
            return BAD_INPUT
        if hasattr(error, "format_message"):  # a usage error of Typer's, in whichever version of Click it has
            return _usage(error)
        return _internal(error, debug="--debug" in arguments)


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context else ""
    say(f"error: {error.format_message()}{where}")
    return BAD_INPUT


def _internal(error: Exception, *, debug: bool) -> int:
    """Say what happened and how to report it."""
    text = "".join(traceback.format_exception(error))
    if debug:
        place = "above"
        sys.stderr.write(text)
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="parallegg-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"parallegg {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}")
        place = f"in {file.name}"
    say(
        f"internal error: {type(error).__name__}: {' '.join(str(error).split())[:300]}. This is a fault of parallegg,"
        f" not of your input. The traceback is {place}; please report it with the command and, if you can, the model to"
        f" {REPORT_TO}."
    )
    return INTERNAL


# ------------------------------------------------------------------------------------------------ what is named


def _hardware_name(name: str) -> str:
    if name != "auto":
        return name
    from .runtime.devices import detect_hardware  # imports no JAX: it asks a child process

    found = detect_hardware()
    say(f"hardware: {found}")
    return found


def _devices(plan: Plan) -> None:
    """Start JAX with enough devices for the plan, and say which."""
    from .runtime.devices import ensure_devices

    say(f"devices: {ensure_devices(plan.mesh.size)}")


@contextlib.contextmanager
def _named(path: Path | None) -> Iterator[None]:
    """A mistake in a file names it."""
    try:
        yield
    except UserError as error:
        raise error if path is None else UserError(f"{path}: {error}") from None


def _load(model: str, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """The model's graph; a mistake names the model as the user did."""
    path = resolve(model)
    try:
        return load_model(path, shapes)
    except UserError as error:
        raise UserError(str(error).replace(str(path), model)) from None


def _model_of(model: str, plan: Plan) -> Graph:
    """The model, or its training step, in the plan's shapes; refuses a model that is not the plan's."""
    graph = _load(model, planned_shapes(plan))
    with _about(model):
        return planned_graph(plan, graph)


@contextlib.contextmanager
def _about(model: str) -> Iterator[None]:
    """A mistake that a model does not fit its plan names the model."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(model) else f"{model}: {text}") from None


# ------------------------------------------------------------------------------------------------ commands


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"parallegg {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an internal error.")] = False,
) -> None:
    """Plan, run and verify an ONNX model on many devices."""


@app.command()
def plan(
    model: ModelArgument,
    mesh: Annotated[str, typer.Option(help="Axes and their sizes: data=2,model=4.")],
    shape: Annotated[
        list[str] | None, typer.Option(help="Shape of an input: x=8x3x224x224. Repeatable.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="A profile's name, a TOML file, or auto (asks JAX).")] = "cpu",
    memory: Annotated[
        str | None, typer.Option(help="Limit a device: 80GB, 512MiB. Default: the profile's.")
    ] = None,
    rules: Annotated[list[Path] | None, typer.Option(help="A rule file to add. Repeatable.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="Placement of a tensor: logits=S0,R. Repeatable.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Only plans of this kind, to compare with: data-parallel.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: MODEL's stem + .plan.onnx.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(min=0, help="Seconds for the search.")] = None,
    node_limit: Annotated[int | None, typer.Option(min=1, help="E-nodes for saturation.")] = None,
    bound_certificate: Annotated[
        Path | None, typer.Option(help="Write the proof of the bound here; verify checks it.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan the model's training step.")] = False,
    loss: Annotated[
        str | None, typer.Option(help="A scalar output, or cross-entropy:OUTPUT or mse:OUTPUT.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The loss's input of labels. Default: labels.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw (default), adam or sgd.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of the optimizer; not of biases, norms.")
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Bound the norm of all gradients.")] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(help="Weights not to train: 'embedding.*'. Repeatable.")
    ] = None,
    no_decay: Annotated[
        list[str] | None, typer.Option(help="Weights without decay, instead of the default. Repeatable.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 with float32 weights.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(help="MODEL is a training step already: 'p.{} -> new.{}'. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Find the cheapest plan and write it."""
    start = time.monotonic()
    parsed_mesh, shapes = Mesh.parse(mesh), parse_shapes(shape or ())
    pins = parse_pins(pin or (), parsed_mesh)
    limit = None if memory is None else parse_memory(memory)
    wanted = Wanted(
        loss, label, optimizer, momentum, weight_decay, clip_norm, freeze, no_decay, bf16 or None, state
    )
    if not train:
        wanted.refuse()
    path = resolve(model)
    target = output or Path(f"{path.stem}.plan.onnx")
    check_output(target)
    if bound_certificate is not None:
        check_output(bound_certificate)
        if bound_certificate.absolute() == target.absolute():
            raise UserError(f"{target}: the plan and the proof of its bound need a file each")
    if target.exists() and path.exists() and target.samefile(path):
        raise UserError(f"{target}: is the model itself; give another --output")
    profile = load_hardware(_hardware_name(hardware))
    load_rules(rules or ())
    with Spinner(f"reading {model}") as progress:
        graph = _load(model, shapes)
        step = training_step_of(graph, wanted) if train else None
        check_pins(pins, step.graph if step else graph, parsed_mesh)
        planned = make_plan(
            step or graph, parsed_mesh, hardware=profile, memory_bytes=limit, rules=rules or (), pins=pins,
            scheme=scheme, options=_options(time_limit, node_limit, bound_certificate is not None), progress=progress,
        )  # fmt: skip
    save_plan(planned.plan, target)
    if bound_certificate is not None and planned.certificate is not None:
        with whole_file(bound_certificate) as file:
            file.write(planned.certificate)
    for warning in planned.warnings:
        say(f"warning: {warning}")
    facts = describe(planned.plan, profile)
    if as_json:
        details = {key: facts[key] for key in ("bytes_sent", "breakdown", "memory")}
        echo_json({"plan": str(target), **planned.report, **details, "warnings": list(planned.warnings)})
        return GOOD
    echo(
        summary_table(facts, planned.report, time.monotonic() - start),
        f"plan written to {target}; check it: parallegg verify {model} {target}",
    )
    return GOOD


def _options(seconds: float | None, nodes: int | None, certify: bool) -> Options:
    given: dict[str, Any] = {"certify": certify}
    if seconds is not None:
        given |= {"search_seconds": seconds, "saturation_seconds": max(seconds, 1.0)}
    if nodes is not None:
        given["node_limit"] = nodes
    return Options(**given)


@app.command()
def show(
    plan: PlanArgument,
    everything: Annotated[bool, typer.Option("--all", help="List every placement.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Say what a plan does: cost, collectives, memory, placements."""
    facts = _facts(plan)
    if as_json:
        echo_json({"plan": str(plan), **facts})
        return GOOD
    echo(*plan_tables(facts, None if everything else ROWS))
    return GOOD


@app.command()
def compare(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN", help="Plan files.")],
    as_json: JsonOption = False,
) -> int:
    """Show plans side by side: predicted time, what is sent, what is held."""
    found = {str(path): _facts(path) for path in plans}
    if as_json:
        left_out = ("inputs", "outputs", "rules")
        kept = [
            {"plan": name, **{key: value for key, value in facts.items() if key not in left_out}}
            for name, facts in found.items()
        ]
        echo_json(kept)
        return GOOD
    echo(compared(found))
    return GOOD


def _facts(path: Path) -> dict[str, Any]:
    """What there is to say about a plan file."""
    loaded = load_plan(path)
    try:
        return describe(loaded)
    except (KeyError, IndexError, TypeError, ValueError) as error:  # somebody edited its program
        raise UserError(f"{path}: is not a consistent plan: {type(error).__name__}: {error}") from None


@app.command()
def run(
    plan: PlanArgument,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model that was planned: it has the weights.")
    ],
    inputs: Annotated[Path | None, typer.Option(help="An .npz file with one array for every input.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Draw the inputs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of --random.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="An .npz file to write.")] = None,
) -> int:
    """Run a plan once on this machine's devices."""
    if random == (inputs is not None):
        raise UserError("run: give the inputs by --inputs FILE.npz, or draw them by --random")
    if output is not None:
        check_output(output)
    loaded = load_plan(plan)
    graph = _model_of(model, loaded)
    feeds = read_inputs(inputs, loaded) if inputs is not None else None
    _devices(loaded)
    start = time.monotonic()
    with Spinner("running") as progress:
        if feeds is None:
            feeds = draw_inputs(graph, loaded, seed)
        progress("compiling and running")
        results = run_plan(loaded, graph, feeds)
    table = plain_table("output", "type", "least", "mean", "greatest", right=("least", "mean", "greatest"))
    for name, array in results.items():
        type_ = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        numbers = np.asarray(array, np.float64)
        spread = [numbers.min(), numbers.mean(), numbers.max()] if numbers.size else []
        table.add_row(name, type_, *(f"{number:.4g}" for number in spread))
    echo(table, f"ran on {loaded.mesh} in {human_seconds(time.monotonic() - start)}, compilation included")
    if output is not None:
        write_arrays(output, results)
        echo(f"outputs written to {output}")
    return GOOD


@app.command()
def train(
    plan: PlanArgument,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model that was planned: it has the weights.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="An .npz file with all examples of every input along dimension 0, or FILE.py:FUNCTION, "
            "which yields dicts of arrays (the file is run).",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="How many to do.")],
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="The highest of the schedule. Default: 0.001.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of the learning rate: constant (default), linear or cosine.")
    ] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps in which the rate rises.")] = None,
    schedule_steps: Annotated[
        int | None, typer.Option(min=1, help="When the rate has fallen. Default: with the last step.")
    ] = None,
    final_learning_rate: Annotated[
        float | None, typer.Option(min=0, help="To which the rate falls. Default: 0.")
    ] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Start the data again at its end.")] = False,
    skip: Annotated[
        int | None, typer.Option(min=0, help="Batches to leave out. Default: those of the resumed steps.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from a state that was written before.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: PLAN's stem + .state.npz.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write a JSON line for every step; --resume adds to them.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Train a model under a plan; weights and moments are written at the end."""
    target = output or Path(f"{plan.stem}.state.npz")
    for path in (target, metrics):
        if path is not None:
            check_output(path)
    given = Rates(learning_rate, schedule, warmup, schedule_steps, final_learning_rate)
    loaded = load_plan(plan)
    graph = _model_of(model, loaded)
    before = None if resume is None else read_arrays(resume)
    _devices(loaded)
    compiled = compile_plan(loaded, graph)
    with _named(resume):
        done = finished_steps(before or {}, compiled.count)
    rate = given.rates(done + steps, compiled.learning_rate)
    source = open_data(data, compiled.batch, compiled.check_batch)
    skipped = done if skip is None else skip
    source.require(steps, done + 1, skipped, repeat)
    with Spinner("placing weights") as progress:
        with _named(resume):
            training = Run(compiled, compiled.init(before))
        progress("compiling")
        compiled.prepare()
    start, failure = time.monotonic(), None
    try:
        with metrics_file(metrics, done) as write, bar(steps) as show_step:
            training.train(source.batches(skipped, repeat), steps, rate, [write, show_step])
    except (UserError, KeyboardInterrupt) as error:
        failure = error
    finally:  # also after an error of ours
        if training.keeps:
            write_arrays(target, compiled.state_dict(training.state))
    if failure is not None:
        return _stopped(failure, training, target)
    first, last, seconds = training.first, training.last, time.monotonic() - start
    assert first and last
    if as_json:
        echo_json({"plan": str(plan), "state": str(target), **last, "total_seconds": seconds})
        return GOOD
    before_it = f" (step {first['step']}: {first['loss']:.4g})" if steps > 1 else ""
    echo(
        f"{_steps(steps)} on {loaded.mesh} in {human_seconds(seconds)}, after compiling",
        f"loss {last['loss']:.4g} at step {last['step']}{before_it}",
        f"state written to {target}",
    )
    return GOOD


def _stopped(failure: UserError | KeyboardInterrupt, training: Run, target: Path) -> int:
    """Say why training stopped, and where its state is."""
    kept = f"the state after {_steps(training.finished)} is in {target}"
    interrupted = isinstance(failure, KeyboardInterrupt)
    why = "interrupted" if interrupted else f"error: {' '.join(str(failure).splitlines())}"
    say(f"{why}; {kept if training.keeps else 'no state is written'}")
    return INTERRUPTED if interrupted else BAD_INPUT


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


@app.command()
def verify(
    model: ModelArgument,
    plan: PlanArgument,
    rules: Annotated[
        list[Path] | None, typer.Option(help="A rule file that the plan was made with. Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs and weights that are drawn.")] = 0,
    bound_certificate: Annotated[
        Path | None, typer.Option(help="The proof of the bound, from plan --bound-certificate.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check a plan against its model: its rules, its derivation, and its numbers."""
    loaded = _as_it_is(plan)
    proof = None if bound_certificate is None else _read_file(bound_certificate)
    graph = _load(model, planned_shapes(loaded))
    start = time.monotonic()
    with Spinner("deriving the plan; running it and the model in float64"), _about(model):
        found = verify_plan(graph, loaded, rules=rules or (), seed=seed, bound_certificate=proof)
    if as_json:
        echo_json({"model": model, "plan": str(plan), **verdict_facts(found)})
    else:
        echo(*verdict_lines(found, seed, time.monotonic() - start))
    return VERDICTS[found.verdict]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _as_it_is(path: Path) -> Plan:
    """A plan to be judged, also one that somebody changed."""
    try:
        return load_plan(path)
    except Edited as error:
        say(f"warning: {error}; it is judged as it is")
        return load_plan(path, edited=True)


@app.command()
def models(as_json: JsonOption = False) -> int:
    """List the sample models of this installation."""
    found = samples()
    if as_json:
        echo_json([{**asdict(s), "path": str(s.path), "inputs": dict(s.inputs)} for s in found])
        return GOOD
    table = plain_table("name", "file", "operators", "inputs", right=("file", "operators"))
    for sample in found:
        inputs = ", ".join(f"{name}={shape}" for name, shape in sample.inputs)
        table.add_row(sample.name, human_bytes(sample.file_bytes), str(sample.operators), inputs)
    echo(table)
    return GOOD


@rules_app.command("list")
def list_rules(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Rule files to add.")] = None,
    as_json: JsonOption = False,
) -> int:
    """List rules by name, with where they stand; refuses a file with a mistake."""
    book = load_rules(files or ())
    if as_json:
        echo_json(
            [{"name": r.name, "ruleset": r.ruleset, "place": _place(r.place)} for r in book.rules.values()]
        )
        return GOOD
    table = plain_table("rule", "ruleset", "place")
    for rule in book.rules.values():
        table.add_row(rule.name, rule.ruleset, _place(rule.place))
    echo(table)
    return GOOD


def _place(place: str) -> str:
    """A shipped file by its place in the package, the same on every machine."""
    return place.removeprefix(f"{Path(__file__).parent}{os.sep}")
