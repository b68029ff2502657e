"""The package as it is installed: every folder and data file is listed; it runs from any folder."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_PACKAGES = {"tests", "benchmarks", "examples", "docs", "build", "dist", "run"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = SETTINGS["tool"]["setuptools"]


def package_files() -> list[Path]:
    """Code and data of the package, relative to the root."""
    found = []
    for pattern in ("*.py", "*.egg", "*.toml", "py.typed"):
        for path in ROOT.rglob(pattern):
            parts = path.relative_to(ROOT).parts
            hidden = any(part.startswith((".", "__py")) or part.endswith(".egg-info") for part in parts)
            if not hidden and parts[0] not in NOT_PACKAGES and parts != ("pyproject.toml",):
                found.append(path.relative_to(ROOT))
    return sorted(found)


def test_every_folder_is_a_listed_package():
    folders = {".".join(("parallegg", *path.parent.parts)) for path in package_files()}
    assert folders == set(SETUPTOOLS["packages"])


def test_every_data_file_is_listed():
    for path in package_files():
        if path.suffix != ".py":
            package = ".".join(("parallegg", *path.parent.parts))
            patterns = SETUPTOOLS["package-data"].get(package, [])
            assert any(fnmatch(path.name, pattern) for pattern in patterns), f"{path} is not in package-data"


def test_version_is_the_project_s():
    import parallegg

    assert SETTINGS["project"]["version"] == parallegg.__version__


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "parallegg"], [Path(sys.executable).with_name("parallegg")]]
)
def test_it_runs_from_another_folder(command, tmp_path):
    done = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("parallegg ")


@pytest.mark.sweep
def test_a_wheel_has_every_file(tmp_path):
    """Built from a copy: setuptools would take over what an older build/ holds."""
    source = tmp_path / "source"
    for path in [*package_files(), *map(Path, ("pyproject.toml", "README.md", "LICENSE"))]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("parallegg-*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == {f"parallegg/{path.as_posix()}" for path in package_files()}
