"""Every example in README.md, docs/ and examples/: commands are run, code is run, output is compared.

A document is run from top to bottom in one folder. `console` blocks hold commands (`$ parallegg …` or
`$ python examples/…`) and what they print; `python` blocks are run; a line `<!-- file: NAME -->` above a block makes it
a file, `<!-- output -->` makes it the output of the block before. Numbers may differ (times, costs); a line `...`
stands for any lines.
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from parallegg.cli import main
from parallegg.models import resolve
from parallegg.runtime.devices import ensure_devices

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e-?\d+)?")
UNIT = re.compile(r"# ([munpµ]?s|[kMGT]?B)\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(document, tmp_path, monkeypatch, capsys):
    ensure_devices(8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "squeezenet.onnx").write_bytes(resolve("onnx:light_squeezenet").read_bytes())
    printed = ""
    for mark, language, text in _blocks(document):
        if mark and mark.startswith("file: "):
            (tmp_path / mark.removeprefix("file: ")).write_text(text)
        elif mark == "output":
            _compare(text, printed)
        elif language == "console":
            for command, expected in _commands(text):
                _run(command, monkeypatch)
                out, err = capsys.readouterr()
                errors = "".join(line for line in err.splitlines(True) if line.startswith("error: "))
                _compare(expected, out + errors)
        elif language == "python":
            exec(compile(text, str(document), "exec"), {"__name__": "example"})
            printed = capsys.readouterr().out
        else:
            assert language == "lisp", f"{document.name}: a {language!r} block that is not tested: {text}"


def _run(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if command[0] == "parallegg":
        main(command[1:])
        return
    assert command[0] == "python", command
    monkeypatch.setattr("sys.argv", command[1:])
    monkeypatch.syspath_prepend(str(Path(command[1]).parent))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(command[1], run_name="__main__")
    assert done.value.code == 0


def _blocks(document: Path) -> Iterator[tuple[str | None, str, str]]:
    for match in BLOCK.finditer(document.read_text(encoding="utf-8")):
        yield match["mark"], match["language"], match["text"]


def _commands(text: str) -> Iterator[tuple[list[str], str]]:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        yield shlex.split(command), expected


def _compare(expected: str, found: str) -> None:
    pattern = "\n".join(".*" if line == "..." else re.escape(_loose(line)) for line in expected.splitlines())
    loose = "\n".join(map(_loose, found.splitlines()))
    assert re.fullmatch(pattern, loose, re.S), f"expected:\n{expected}\nfound:\n{found}"


def _loose(line: str) -> str:
    """Without what depends on the machine: numbers, their units, the padding of columns."""
    return UNIT.sub("#", re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip())


def test_lisp_examples_load(tmp_path):
    """Rules shown in the documentation are accepted by the loader."""
    from parallegg.rules import load_rules

    for document in DOCUMENTS:
        for i, (mark, language, text) in enumerate(_blocks(document)):
            if language == "lisp" and mark != "file: bad.egg":
                path = tmp_path / f"{document.stem}{i}.egg"
                path.write_text(text)
                assert load_rules([path]).rules


def test_documents_link_to_files_that_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), (document.name, target)
