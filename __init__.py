"""parallegg: an ONNX model and a device mesh in, the cheapest proved-correct parallel plan out, running.

    graph = parallegg.load("model.onnx", shapes={"x": (8, 3, 224, 224)})
    planned = parallegg.plan(graph, "data=2,model=4", hardware="h100")
    parallegg.save(planned.plan, "plan.onnx")
    outputs = parallegg.run(planned.plan, graph, {"x": x})
    verdict = parallegg.verify(graph, planned.plan)

Planning never imports JAX; `run` and `verify` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .extract.hardware import Hardware, load_hardware
from .extract.planner import DoesNotFit, Options, Planned, make_plan
from .mesh import Layout, Mesh, Partial, Replicate, Shard, parse_layout
from .planfile import Plan, Port, check_model, save
from .planfile import load as load_plan
from .program import Node, TensorType, UserError
from .rewrite.graph import Graph, tensor_source
from .rewrite.onnx_reader import load
from .rules import load_rules

if TYPE_CHECKING:
    import numpy as np

    from .verification.numbers import Comparison

__version__ = "0.1.0"

__all__ = [
    "DoesNotFit",
    "Graph",
    "Hardware",
    "Layout",
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
    "UserError",
    "load",
    "load_hardware",
    "load_plan",
    "load_rules",
    "plan",
    "run",
    "save",
    "verify",
]


def plan(
    model: Graph | str | Path,
    mesh: Mesh | str,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    hardware: Hardware | str = "cpu",
    memory_bytes: int | None = None,
    rules: Sequence[str | Path] = (),
    pins: Mapping[str, str | Layout] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Planned:
    """Plan a model (a `Graph` or an ONNX file with `shapes`) on a mesh.

    `rules` are further rule files; `pins` fixes layouts by tensor name, such as `{"logits": "S0,R"}`. Raises UserError
    for a mistake in what was given, DoesNotFit when no plan fits in `memory_bytes` a device.
    """
    graph = model if isinstance(model, Graph) else load(model, shapes)
    layouts = {name: parse_layout(pin) if isinstance(pin, str) else pin for name, pin in (pins or {}).items()}
    return make_plan(
        graph,
        Mesh.parse(mesh) if isinstance(mesh, str) else mesh,
        load_hardware(hardware) if isinstance(hardware, str) else hardware,
        book=load_rules(rules),
        memory_bytes=memory_bytes,
        pins=layouts,
        options=options,
        progress=progress,
    )


def run(plan: Plan, model: Graph | str | Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a plan once: inputs by name, weights from the model file, outputs gathered by name."""
    from .runtime.devices import ensure_devices
    from .runtime.lowering import lower

    graph = model if isinstance(model, Graph) else load(model, _shapes(plan))
    check_model(plan, graph.digest, graph.types)
    ensure_devices(plan.mesh.size)
    executable = lower(plan)
    return executable.run(executable.place(inputs, tensor_source(graph)))


def verify(model: Graph | str | Path, plan: Plan, *, seed: int = 0) -> Comparison:
    """Run plan and model in float64 on random inputs and weights and compare every output."""
    from .runtime.devices import ensure_devices
    from .verification.numbers import compare

    graph = model if isinstance(model, Graph) else load(model, _shapes(plan))
    check_model(plan, graph.digest, graph.types)
    ensure_devices(plan.mesh.size)
    return compare(graph, plan, seed=seed, source=tensor_source(graph))


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The input shapes that a plan was made for."""
    return {port.name: port.type.shape for port in plan.inputs if port.kind == "input"}
