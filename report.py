"""What a person or a program reads about a plan.

    describe(plan)          everything that `show --json` prints, recomputed from the plan's program
    plan_tables(facts)      the same as tables
    summary_table(facts)    the few lines after `plan`
The metadata's cost and bound are the planner's word; collectives, memory and the breakdown of the time are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from .extract.cost import step_seconds, traffic
from .extract.emit import collective_table, memory_use
from .extract.hardware import Hardware, load_hardware, profile_names
from .planfile import Plan, Port
from .program import Node
from .rewrite.terms import Head, encode
from .units import human_bytes, human_seconds

ROWS = 12  # of a table, before `--all`
REPORTED = (
    "model",
    "hardware",
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
    facts["bytes_sent"] = sum(row["bytes"] for row in collectives if isinstance(row["bytes"], int))
    facts["memory"] = {"parameters": memory.parameters, "inputs": memory.inputs, "peak": memory.peak}
    facts["inputs"] = [_port(plan, port) for port in plan.inputs]
    facts["outputs"] = [_port(plan, port) for port in plan.outputs]
    return facts


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


# ------------------------------------------------------------------------------------------------ words


def human_gap(gap: float | None) -> str:
    """In percent; what is left by rounding is nothing."""
    return "unknown" if gap is None else f"{100 * gap if gap > 1e-9 else 0:.2g} %"


def human_mesh(mesh: Mapping[str, int]) -> str:
    return (
        f"{' x '.join(f'{name}={size}' for name, size in mesh.items())} ({math.prod(mesh.values())} devices)"
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# ------------------------------------------------------------------------------------------------ tables


def plain_table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns named in `right` hold numbers."""
    table = Table(
        box=None, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 3, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", header_style="dim")
    return table


def two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _cost_rows(facts: Facts) -> list[tuple[str, str]]:
    rows = [("mesh", human_mesh(facts["mesh"]))]
    if facts["cost_s"] is not None:
        rows.append(("predicted step", f"{human_seconds(facts['cost_s'])} on {facts['hardware']}"))
    if facts["bound_s"] is not None:
        over = "" if facts["saturated"] else f", saturation stopped by {facts['stopped_by']}"
        rows.append(
            ("proved bound", f"{human_seconds(facts['bound_s'])} (gap {human_gap(facts['gap'])}{over})")
        )
    if (parts := facts["breakdown"]) is not None:
        axes = "".join(f" + {name} {human_seconds(s)}" for name, s in parts["collectives_s"].items())
        rows.append(("made of", f"computing {human_seconds(parts['compute_s'])}{axes}"))
    return rows


def summary_table(facts: Facts, report: Mapping[str, Any], seconds: float) -> Table:
    """After `plan`."""
    memory = f"{human_bytes(facts['memory']['peak'])} of {human_bytes(report['memory_limit_bytes'])} a device"
    space = (
        f"{report['enodes']:,} e-nodes, {report['eclasses']:,} e-classes for {report['operators']} operators"
    )
    return two_columns(
        [
            *_cost_rows(facts),
            ("memory", memory),
            ("sent", f"{human_bytes(facts['bytes_sent'])} a device and step"),
            ("searched", f"{space}, {human_seconds(seconds)}"),
        ]
    )


def plan_tables(facts: Facts, rows: int | None = ROWS) -> Iterator[Table | str]:
    """After `show`; `rows` bounds the placements that are listed."""
    memory = facts["memory"]
    held = ", ".join(f"{name} {human_bytes(memory[name])}" for name in ("parameters", "inputs", "peak"))
    yield two_columns([("model", str(facts["model"])), *_cost_rows(facts), ("memory a device", held)])
    yield from _collective_tables(facts)
    for title, ports in (
        ("inputs and outputs", [*_of_kind(facts["inputs"], "input"), *facts["outputs"]]),
        ("parameters", [*_of_kind(facts["inputs"], "parameter"), *_of_kind(facts["inputs"], "constant")]),
    ):
        if ports:
            yield ""
            yield _placement_table(title, ports, list(facts["mesh"]), rows)
            if rows is not None and len(ports) > rows:
                yield f"… and {len(ports) - rows} more (--all)"


def _of_kind(ports: Sequence[Facts], kind: str) -> list[Facts]:
    return [port for port in ports if port["kind"] == kind]


def _collective_tables(facts: Facts) -> Iterator[Table | str]:
    yield ""
    if not facts["collectives"]:
        yield "no collectives: nothing is sent"
        return
    table = plain_table(
        "kind", "axis", "count", "sent a device", "payload",
        title="collectives", right=("count", "sent a device", "payload"),
    )  # fmt: skip
    for row in facts["collectives"]:
        sizes = (human_bytes(row["bytes"]), human_bytes(row["payload_bytes"]))
        table.add_row(row["kind"], row["axis"], str(row["count"]), *sizes)
    yield table


def _placement_table(title: str, ports: Sequence[Facts], axes: Sequence[str], rows: int | None) -> Table:
    table = plain_table("name", "kind", "type", "shape", *axes, "local shape", title=title)
    for port in ports[:rows]:
        shapes = _shape(port["shape"]), _shape(port["local_shape"])
        table.add_row(
            port["name"],
            port["kind"],
            port["dtype"],
            shapes[0],
            *(port["placement"][a] for a in axes),
            shapes[1],
        )
    return table
