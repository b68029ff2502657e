"""parallegg: an ONNX model and a device mesh in, the cheapest proved-correct parallel plan out, running.

    graph = parallegg.load("model.onnx", shapes={"x": (8, 3, 224, 224)})
    planned = parallegg.plan(graph, "data=2,model=4", hardware="h100")
    parallegg.save(planned.plan, "plan.onnx")
    outputs = parallegg.run(planned.plan, graph, {"x": x})
    verdict = parallegg.verify(graph, planned.plan)

    step = parallegg.training_step(graph, loss=parallegg.LossSpec("mse", "y"), optimizer=parallegg.AdamW())
    training = parallegg.compile(parallegg.plan(step, "data=4").plan, graph)
    state = training.init()
    rate = parallegg.schedules.cosine(1e-3, steps=1000, warmup=100)                 # or a number
    state, metrics = training.step(state, {"x": x, "labels": labels}, rate)

Planning never imports JAX; `run`, `verify` and `compile` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import schedules
from .extract.hardware import Hardware, load_hardware
from .extract.planner import DoesNotFit, Options, Planned, make_plan
from .mesh import Layout, Mesh, Partial, Replicate, Shard, parse_layout
from .planfile import Edited, Plan, Port, check_model, save
from .planfile import load as load_plan
from .program import Node, TensorType, UserError
from .rewrite.graph import Graph, tensor_source
from .rewrite.onnx_reader import load
from .rewrite.optimizers import SGD, Adam, AdamW
from .rewrite.training import LossSpec, TrainingStep, as_training_step, rebuilt, training_step
from .rules import load_rules
from .verification.plans import derive

if TYPE_CHECKING:
    import numpy as np

    from .runtime.training import CompiledStep
    from .verification.layers import Verification

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "DoesNotFit",
    "Edited",
    "Graph",
    "Hardware",
    "Layout",
    "LossSpec",
    "Mesh",
    "Node",
    "Options",
    "Partial",
    "Plan",
    "Planned",
    "Port",
    "Replicate",
    "Shard",
    "TensorType",
    "TrainingStep",
    "UserError",
    "as_training_step",
    "compile",
    "load",
    "load_hardware",
    "load_plan",
    "load_rules",
    "plan",
    "run",
    "save",
    "schedules",
    "training_step",
    "verify",
]


def plan(
    model: Graph | TrainingStep | str | Path,
    mesh: Mesh | str,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    hardware: Hardware | str | Path = "cpu",
    memory_bytes: int | None = None,
    rules: Sequence[str | Path] = (),
    pins: Mapping[str, str | Layout] | None = None,
    scheme: str | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Planned:
    """Plan a model (a `Graph`, a `TrainingStep` of one, or an ONNX file with `shapes`) on a mesh.

    `rules` are further rule files; `pins` fixes layouts by tensor name, such as `{"logits": "S0,R"}`.
    `scheme="data-parallel"` allows only plans of plain data parallelism, to compare with. Raises UserError for a
    mistake in what was given, DoesNotFit when no plan fits in `memory_bytes` a device.
    """
    if isinstance(model, TrainingStep):
        graph, roles = model.graph, model.roles
    else:
        graph, roles = model if isinstance(model, Graph) else load(model, shapes), None
    layouts = {name: parse_layout(pin) if isinstance(pin, str) else pin for name, pin in (pins or {}).items()}
    book = load_rules([rules] if isinstance(rules, str | Path) else rules)
    planned = make_plan(
        graph,
        Mesh.parse(mesh) if isinstance(mesh, str) else mesh,
        hardware if isinstance(hardware, Hardware) else load_hardware(hardware),
        book=book,
        memory_bytes=memory_bytes,
        pins=layouts,
        roles=roles,
        scheme=scheme,
        options=options,
        progress=progress,
    )
    progress("deriving the plan")
    derivation = derive(graph, planned.plan, book, roles.state if roles else ())
    proved = replace(planned, plan=replace(planned.plan, derivation=derivation))
    if not isinstance(model, TrainingStep):
        return proved
    metadata = {**planned.plan.metadata, "training": _training(model)}
    return replace(
        proved,
        plan=replace(proved.plan, metadata=metadata),
        warnings=(*model.warnings, *planned.warnings),
    )


def _training(step: TrainingStep) -> dict[str, Any]:
    """What a plan keeps of its training step."""
    return {
        "recipe": dict(step.recipe),
        "loss": step.loss,
        "learning_rate": step.learning_rate,
        "step": step.step,
        "initial": dict(step.initial),
        "frozen": list(step.frozen),
        "statistics": _statistics(step),
    }


def _statistics(step: TrainingStep) -> list[str]:
    """The weights that the forward part updates: running averages, which have no gradient."""
    new, phases = dict(step.state), step.phases
    made = {tensor: node.name for node in step.graph.nodes for tensor in node.outputs}
    weights = [name for name, kind in step.initial.items() if kind == "parameter"]
    return [name for name in weights if phases.get(made.get(new[name], "")) == 0]


def run(plan: Plan, model: Graph | str | Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a plan once: inputs by name, weights from the model file, outputs gathered by name."""
    from .runtime.devices import ensure_devices
    from .runtime.lowering import lower

    graph = planned_graph(plan, model)
    ensure_devices(plan.mesh.size)
    executable = lower(plan)
    return executable.run(executable.place(inputs, tensor_source(graph)))


def verify(
    model: Graph | str | Path,
    plan: Plan,
    *,
    rules: Sequence[str | Path] = (),
    seed: int = 0,
    bound_certificate: bytes | None = None,
) -> Verification:
    """Check a plan against its model: derived rule by rule, and compared on random numbers in float64.

    `rules` are the rule files that the plan was made with, beside the shipped ones; `bound_certificate` is what
    `plan(.., options=Options(certify=True)).certificate` holds, the proof of the plan's bound.
    """
    from .runtime.devices import ensure_devices
    from .verification.layers import verify as verify_layers

    graph, state = _planned(plan, model)
    ensure_devices(plan.mesh.size)
    return verify_layers(
        graph, plan, load_rules(rules), state, seed=seed, bound_certificate=bound_certificate
    )


def compile(plan: Plan, model: Graph | str | Path) -> CompiledStep:
    """A plan of a training step, ready to train the model on this machine's devices."""
    from .runtime.devices import ensure_devices
    from .runtime.training import CompiledStep

    graph = planned_graph(plan, model)
    ensure_devices(plan.mesh.size)
    return CompiledStep(plan, tensor_source(graph))


def planned_graph(plan: Plan, model: Graph | str | Path) -> Graph:
    """The graph that a plan was made of: the model, or its training step; refuses another model."""
    return _planned(plan, model)[0]


def _planned(plan: Plan, model: Graph | str | Path) -> tuple[Graph, tuple[tuple[str, str], ...]]:
    """The graph that a plan was made of and, of a training step, its state."""
    recipe = plan.metadata.get("training", {}).get("recipe")
    graph = model if isinstance(model, Graph) else load(model, planned_shapes(plan))
    state = plan.state
    if recipe and graph.digest != plan.metadata.get("model_digest"):
        step = rebuilt(graph, recipe)
        graph, state = step.graph, step.state
    check_model(plan, graph.digest, graph.types)
    return graph, state


def planned_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's inputs that a plan was made for."""
    recipe = plan.metadata.get("training", {}).get("recipe")
    if recipe:
        return {name: tuple(shape) for name, shape in recipe["inputs"].items()}
    return {port.name: port.type.shape for port in plan.inputs if port.kind == "input"}
