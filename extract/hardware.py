"""Hardware profiles: what one device computes, holds and sends per second. Read from `profiles/*.toml`.

[compute]  flops_per_second by element type (dense matrix units), `efficiency` reached by large work, and
           `half_work`: the flops at which half of it is reached; `launch_seconds` per operator
[memory]   bytes, bytes_per_second
[link]     latency_seconds and bytes_per_second (one direction) between neighbours of a mesh axis;
           [links.NAME] overrides them for the axis NAME
source     where the figures come from
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..program import UserError

FOLDER = Path(__file__).parent / "profiles"
MOST = 1e30  # of any figure; beyond, sums of seconds would not be finite


@dataclass(frozen=True)
class Link:
    """The connection between neighbours along a mesh axis."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Hardware:
    """One device of a homogeneous machine; see the module's header for the fields."""

    name: str
    source: str
    flops_per_second: Mapping[str, float]
    efficiency: float
    half_work: float
    launch_seconds: float
    memory_bytes: int
    memory_bytes_per_second: float
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)

    def axis_link(self, axis: str) -> Link:
        return self.links.get(axis, self.link)

    def compute_seconds(self, flops: float, dtype: str) -> float:
        """Time of `flops` operations on the matrix units; other element types run at the float32 rate."""
        if flops <= 0:
            return 0.0
        peak = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        return (flops + self.half_work) / (peak * self.efficiency)


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name: str | Path) -> Hardware:
    """A shipped profile by name, or a profile file; UserError says what is missing."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise UserError(f"hardware {str(name)!r}: neither a file nor one of {', '.join(profile_names())}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        compute, memory = data["compute"], data["memory"]
        _ = compute["flops_per_second"]["float32"]  # what other element types fall back on
        return Hardware(
            name=str(data.get("name", path.stem)),
            source=str(data["source"]),
            flops_per_second={k: _positive(v) for k, v in compute["flops_per_second"].items()},
            efficiency=_positive(compute["efficiency"]),
            half_work=_at_least_zero(compute["half_work"]),
            launch_seconds=_at_least_zero(compute["launch_seconds"]),
            memory_bytes=int(_positive(memory["bytes"])),
            memory_bytes_per_second=_positive(memory["bytes_per_second"]),
            link=_link(data["link"]),
            links={axis: _link(entry) for axis, entry in data.get("links", {}).items()},
        )
    except OSError as error:
        raise UserError(f"hardware profile {path}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"hardware profile {path}: {error.args[0]!r} is missing") from None
    except (tomllib.TOMLDecodeError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"hardware profile {path}: {error}") from None


def _link(data: Mapping[str, float]) -> Link:
    return Link(_at_least_zero(data["latency_seconds"]), _positive(data["bytes_per_second"]))


def _positive(value: float) -> float:
    if not 1 / MOST < float(value) < MOST:
        raise ValueError(f"{value!r} is not a positive number, or an absurd one")
    return float(value)


def _at_least_zero(value: float) -> float:
    return 0.0 if float(value) == 0 else _positive(value)
