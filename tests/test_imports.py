"""Who may import whom, and that planning starts no JAX."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module or folder -> what of ours it may import (besides its own folder). What is not named here is the surface:
# the Python API, the command line and what they print.
MAY_IMPORT = {
    "program": set(),
    "units": {"program"},
    "mesh": {"program"},
    "planfile": {"mesh", "program"},
    "rules": {"mesh", "program"},
    "rewrite": {"mesh", "program", "rules"},
    "extract": {"mesh", "program", "units", "rules", "rewrite", "planfile"},
    "runtime": {"mesh", "program", "planfile", "rewrite.operators"},  # knows no e-graph
    "verification": {"mesh", "program", "rules", "rewrite", "planfile"},
    "verification.numbers": {"mesh", "program", "rules", "rewrite", "planfile", "runtime"},
    "verification.certificate": set(),  # the judges never see the planner
    "verification.bound": set(),
}
SURFACE = {
    "__init__", "__main__", "arrays", "batches", "builders", "cli", "console", "models", "options", "report",
    "schedules", "tables", "train",
}  # fmt: skip
WITHOUT_JAX = ("program", "mesh", "planfile", "rules", "rewrite", "extract")


def modules() -> list[tuple[str, Path]]:
    """`rewrite.terms` and its file, for every module of the package."""
    listed = [*ROOT.glob("*.py")]
    for folder in MAY_IMPORT:
        listed += (ROOT / folder).rglob("*.py")
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in sorted(listed)]


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules of ours that a module imports anywhere, also inside functions."""
    folder = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            target = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield ".".join(target) if node.module else ".".join([*base, alias.name])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "parallegg":
            yield (node.module or "").removeprefix("parallegg").lstrip(".") or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "parallegg":
                    yield alias.name.removeprefix("parallegg").lstrip(".") or "__init__"


def owner(name: str) -> str | None:
    """The most specific entry of the table that a module belongs to."""
    parts = name.split(".")
    entries = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((entry for entry in entries if entry in MAY_IMPORT), None)


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_run_one_way(name, path):
    entry = owner(name)
    if entry is None:
        assert name in SURFACE, f"{name} is neither in MAY_IMPORT nor part of the surface"
        return
    allowed = MAY_IMPORT[entry] | {entry.split(".")[0] if MAY_IMPORT[entry] or "." not in entry else entry}
    for target in imported(name, path):
        permitted = any(target == one or target.startswith(f"{one}.") for one in allowed)
        assert permitted, f"{name} imports {target}; it may import {sorted(allowed)}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_planning_names_no_jax(name, path):
    if name.split(".")[0] not in WITHOUT_JAX:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not any(module.split(".")[0] in ("jax", "jaxlib") for module in found), f"{name} imports JAX"


PLANNING = """
import sys
import parallegg, parallegg.cli
sys.path.insert(0, {tests!r})
import cli_models
graph = parallegg.load(cli_models.mlp(__import__("pathlib").Path("mlp.onnx")))
parallegg.save(parallegg.plan(graph, "data=2").plan, "mlp.plan.onnx")
assert parallegg.cli.main(["show", "mlp.plan.onnx"]) == 0
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib"))
assert not loaded, loaded
"""


def test_planning_starts_no_jax(tmp_path):
    code = PLANNING.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
