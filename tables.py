"""What is said about plans, as tables; the facts are those of report.py.

    plan_tables(facts)          after `show`
    summary_table(facts, ..)    the few lines after `plan`
    compared(plans)             plans side by side
    verdict_lines(found, ..)    what `verify` found, layer by layer
    plain_table, two_columns    the looks of every table
Long lists of tensors are folded: names that differ in numbers between dots or slashes, and agree in all else, are one
row. A weight and its moments are one row, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .units import human_bytes, human_seconds

if TYPE_CHECKING:
    from .verification.layers import Verification

ROWS = 20  # of a table, before `--all`
NUMBERS = re.compile(r"(?<![^./])\d+(?![^./])")

Facts = Mapping[str, Any]


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
    if facts["scheme"] is not None:
        rows.append(("plans allowed", facts["scheme"]))
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
    """After `show`; `rows` bounds the placements that are listed, None lists every tensor by itself."""
    memory = facts["memory"]
    kinds = ("state", "peak") if "state" in memory else ("parameters", "inputs", "peak")
    held = ", ".join(f"{name} {human_bytes(memory[name])}" for name in kinds)
    yield two_columns([("model", str(facts["model"])), *_cost_rows(facts), ("memory a device", held)])
    yield from _collective_tables(facts)
    axes, inputs = list(facts["mesh"]), facts["inputs"]
    held = [port for port in inputs if port["kind"] in ("parameter", "constant")]
    fed = [port for port in inputs if port["kind"] not in ("parameter", "constant", "state")]
    results = [port for port in facts["outputs"] if port["kind"] != "next_state"]
    yield from _placements("inputs and outputs", [*fed, *results], axes, rows)
    yield from _states([port for port in inputs if port["kind"] == "state"], axes, rows)
    yield from _placements("parameters", held, axes, rows)


COMPARED: tuple[tuple[str, Callable[[Facts], float | None], Callable[[float], str]], ...] = (
    ("predicted step", lambda facts: facts["cost_s"], human_seconds),
    ("computing", lambda facts: (facts["breakdown"] or {}).get("compute_s"), human_seconds),
    ("sending", lambda facts: sending_seconds(facts), human_seconds),
    ("sent a device", lambda facts: facts["bytes_sent"], human_bytes),
    ("state a device", lambda facts: facts["memory"].get("state"), human_bytes),
    ("peak memory", lambda facts: facts["memory"]["peak"], human_bytes),
)


def sending_seconds(facts: Facts) -> float | None:
    """Predicted for all collectives."""
    parts = facts["breakdown"]
    return None if parts is None else sum(parts["collectives_s"].values())


def compared(plans: Mapping[str, Facts]) -> Table:
    """Plans by name, side by side; percentages are of the first."""
    table = plain_table("", *plans, right=tuple(plans))
    for title, words in (
        ("model", lambda facts: str(facts["model"])),
        ("plans allowed", lambda facts: facts["scheme"] or "all"),
        ("mesh", lambda facts: human_mesh(facts["mesh"])),
        ("hardware", lambda facts: str(facts["hardware"])),
    ):
        table.add_row(title, *map(words, plans.values()))
    for title, value, words in COMPARED:
        found = [value(facts) for facts in plans.values()]
        if any(found):
            table.add_row(title, *(_against(one, found[0], words) for one in found))
    return table


def _against(value: float | None, first: float | None, words: Callable[[float], str]) -> str:
    if value is None:
        return "unknown"
    if not first or value == first:
        return words(value)
    return f"{words(value)} ({100 * (value / first - 1):+.0f} %)"


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


# ------------------------------------------------------------------------------------------------ placements


def _placements(
    title: str, ports: Sequence[Facts], axes: Sequence[str], rows: int | None
) -> Iterator[Table | str]:
    """Inputs, outputs, parameters: name, kind, type and placement."""
    listed = ports if rows is None else [port for port in ports if not _is_number(port)]
    groups = _folded(listed, _placed, rows)
    counted = any(len(group) > 1 for group in groups)
    table = _table(
        ("name", "kind", *(["count"] if counted else []), "type", "shape", *axes, "local shape"), title
    )
    for group in groups[:rows]:
        port = group[0]
        count = [str(len(group))] if counted else []
        kind = port["kind"].replace("_", " ")
        table.add_row(_name(group), kind, *count, *_kind(port, axes), _shape(port["local_shape"]))
    yield from _with_rest(table, groups, rows, len(ports))


def _states(ports: Sequence[Facts], axes: Sequence[str], rows: int | None) -> Iterator[Table | str]:
    """State: a weight with its moments, and state of other kinds by itself."""
    moments: dict[str, list[Facts]] = {}
    for port in ports:
        if port.get("of"):
            moments.setdefault(port["of"], []).append(port)

    def placed(port: Facts) -> tuple[object, ...]:
        return (*_placed(port), *(_layout(moment) for moment in moments.get(port["name"], ())))

    groups = _folded([port for port in ports if not port.get("of")], placed, rows)
    counted = any(len(group) > 1 for group in groups)
    optional = [*(["count"] if counted else [])], [*(["moments"] if moments else [])]
    roles = {port.get("role") for port in ports}
    named = {"weight": "weights", "moment": "the optimizer's moments", "statistic": "running averages"}
    title = ": ".join(
        filter(None, ("state", ", ".join(words for role, words in named.items() if role in roles)))
    )
    table = _table(("name", *optional[0], "type", "shape", *axes, *optional[1], "a device"), title)
    for group in groups[:rows]:
        port = group[0]
        own = [moment for member in group for moment in moments.get(member["name"], ())]
        count = [str(len(group))] if counted else []
        layouts = [" ".join(dict.fromkeys(_layout(moment) for moment in own))] if moments else []
        held = human_bytes(sum(each["local_bytes"] for each in (*group, *own)))
        table.add_row(_name(group), *count, *_kind(port, axes), *layouts, held)
    yield from _with_rest(table, groups, rows, len(ports) - sum(map(len, moments.values())))


def _table(columns: Sequence[str], title: str) -> Table:
    return plain_table(*columns, title=title, right=("count", "a device"))


def _with_rest(
    table: Table, groups: Sequence[Sequence[Facts]], rows: int | None, everything: int
) -> Iterator[Table | str]:
    """A table, if it has rows, and how many tensors are not in it."""
    if not everything:
        return
    yield ""
    yield table
    if left := everything - sum(map(len, groups[:rows])):
        yield f"… and {left} more (--all)"


def _folded(
    ports: Sequence[Facts], key: Callable[[Facts], tuple[object, ...]], rows: int | None
) -> list[list[Facts]]:
    """The rows: tensors of one key whose names differ in numbers only; each by itself where all are asked for."""
    if rows is None:
        return [[port] for port in ports]
    groups: dict[tuple[object, ...], list[Facts]] = {}
    for port in ports:
        groups.setdefault((NUMBERS.sub("*", port["name"]), *key(port)), []).append(port)
    return list(groups.values())


def _name(group: Sequence[Facts]) -> str:
    return group[0]["name"] if len(group) == 1 else NUMBERS.sub("*", group[0]["name"])


def _placed(port: Facts) -> tuple[object, ...]:
    return port["kind"], port["dtype"], *port["shape"], _layout(port)


def _layout(port: Facts) -> str:
    return ",".join(port["placement"].values())


def _kind(port: Facts, axes: Sequence[str]) -> list[str]:
    return [port["dtype"], _shape(port["shape"]), *(port["placement"][axis] for axis in axes)]


def _is_number(port: Facts) -> bool:
    """A constant of one element, which says little."""
    return port["kind"] == "constant" and not port["shape"]


def verdict_lines(found: Verification, seed: int, seconds: float) -> Iterator[str]:
    """The verdict, then a line for each layer; where it is bad, the first bad node or tensor."""
    yield f"{found.verdict}: {found.reason} (seed {seed}, {human_seconds(seconds)})"
    yield f"  plan     {found.plan.verdict}: {found.plan.reason}"
    yield f"  numbers  {found.numbers.verdict}: {found.numbers.reason}"
    if found.bound is not None:
        proved = f"proved within {human_gap(found.bound.gap)}" if found.bound.holds else "refuted"
        yield f"  bound    {proved}: {found.bound.reason}"
    if found.first_divergence is not None:
        yield f"first tensor that differs: {found.first_divergence}"
