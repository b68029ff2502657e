"""The facts about a plan, for people (tables.py) and programs (`show --json`).

    describe(plan)          everything
    breakdown(plan, ..)     predicted seconds of computing and of the collectives of each mesh axis
    verdict_facts(found)    what verification found, layer by layer
    _roles(plan)            in a training step: which input is state, and what kind of it
The metadata's cost and bound are the planner's word; collectives, memory and the breakdown of the time are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .extract.cost import step_seconds, traffic
from .extract.emit import collective_table
from .extract.hardware import Hardware, load_hardware, profile_names
from .extract.memory import memory_use
from .planfile import Plan, Port
from .program import Node
from .rewrite.terms import Head, encode

if TYPE_CHECKING:
    from .verification.layers import Verification

REPORTED = (
    "model",
    "hardware",
    "scheme",
    "cost_s",
    "bound_s",
    "gap",
    "saturated",
    "stopped_by",
    "memory_bytes",
    "rules",
)

Facts = Mapping[str, Any]


def describe(plan: Plan, hardware: Hardware | None = None) -> dict[str, Any]:
    """What the plan is, costs, sends and holds; `hardware` defaults to the profile that the plan names."""
    memory = memory_use(plan)
    collectives = collective_table(plan)
    facts: dict[str, Any] = {key: plan.metadata.get(key) for key in REPORTED}
    facts["mesh"] = {axis.name: axis.size for axis in plan.mesh}
    facts["operators"] = sum(not node.is_collective for node in plan.nodes)
    facts["breakdown"] = breakdown(plan, hardware or _profile(plan))
    facts["collectives"] = collectives
    facts["bytes_sent"] = sum(row["bytes"] for row in collectives)
    facts["memory"] = {"parameters": memory.parameters, "inputs": memory.inputs, "peak": memory.peak}
    roles = _roles(plan)
    facts["inputs"] = [_port(plan, port) | roles.get(port.name, {}) for port in plan.inputs]
    facts["outputs"] = [_port(plan, port) | roles.get(port.name, {}) for port in plan.outputs]
    held = [port["local_bytes"] for port in facts["inputs"] if port["kind"] == "state"]
    if held:
        facts["memory"]["state"] = sum(held)
    return facts


def _roles(plan: Plan) -> dict[str, dict[str, Any]]:
    """What the inputs and outputs of a training step are, beyond inputs and outputs, by name.

    State is a weight, a statistic (the running average of a BatchNormalization), or a moment (of a weight, if its name
    says so); or none of these where the model was a training step.
    """
    training = plan.metadata.get("training", {})
    roles: dict[str, dict[str, Any]] = {
        training.get(name): {"kind": name} for name in ("loss", "learning_rate", "step")
    }
    initial = training.get("initial", {})
    weights = [name for name, _ in plan.state if initial.get(name) == "parameter"]
    for name, new in plan.state:
        roles[name], roles[new] = {"kind": "state"}, {"kind": "next_state", "of": name}
        if name in weights:
            roles[name]["role"] = "statistic" if name in training.get("statistics", ()) else "weight"
        elif initial.get(name) == "zeros":
            owners = [weight for weight in weights if name.endswith(f".{weight}")]
            roles[name] |= {"role": "moment", "of": max(owners, key=len, default=None)}
    return roles


def breakdown(plan: Plan, hardware: Hardware | None) -> dict[str, Any] | None:
    """Predicted seconds of computing, and of the collectives of each mesh axis; None without a profile."""
    if hardware is None:
        return None
    compute, axes = 0.0, dict.fromkeys(plan.mesh.names, 0.0)
    for node in plan.nodes:
        operands = tuple(plan.types[name] for name in node.inputs if name)
        seconds = step_seconds(_head(node), operands, plan.types[node.outputs[0]], plan.mesh, hardware)
        if node.is_collective and (sends := traffic(node.op, node.attributes, operands[0], plan.mesh)):
            axes[sends.axis] += seconds
        else:
            compute += seconds
    return {"compute_s": compute, "collectives_s": axes}


def _head(node: Node) -> Head:
    if node.op == "GatherOrZero":
        return Head("Gather", ("zero", node.attributes["axis"]))
    return encode(node)


def _profile(plan: Plan) -> Hardware | None:
    """The shipped profile that the plan was made for, if it is one."""
    name = str(plan.metadata.get("hardware"))
    return load_hardware(name) if name in profile_names() else None


def _port(plan: Plan, port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "kind": port.kind,
        "dtype": port.type.dtype,
        "shape": list(port.type.shape),
        "placement": dict(zip(plan.mesh.names, map(str, port.layout), strict=True)),
        "local_shape": list(plan.types[port.local].shape),
        "local_bytes": plan.types[port.local].bytes,
    }


def verdict_facts(found: Verification) -> dict[str, Any]:
    """The verdict, and each layer's."""
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "first_divergence": found.first_divergence,
        "tensors_checked": found.numbers.tensors_checked,
        "seed": found.numbers.seed,
        "layers": {
            "plan": asdict(found.plan),
            "numbers": asdict(found.numbers),
            **({} if found.bound is None else {"bound": asdict(found.bound)}),
        },
    }
