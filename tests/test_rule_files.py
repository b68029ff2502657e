"""Rule files: what the loader accepts, what it refuses and with which words (tests/rules/refused/NAME.txt)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallegg.program import UserError
from parallegg.rules import load_rules, shipped_files
from parallegg.rules.loader import MAX_FILE_BYTES
from parallegg.rules.sexpr import MAX_DEPTH, SyntaxProblem, read

FOLDER = Path(__file__).parent / "rules"


@pytest.mark.parametrize("path", sorted((FOLDER / "refused").glob("*.egg")), ids=lambda p: p.stem)
def test_a_bad_rule_file_is_refused_in_one_line(path: Path):
    with pytest.raises(UserError) as error:
        load_rules([path])
    assert str(error.value) == f"{path.parent}/{path.with_suffix('.txt').read_text().strip()}"


@pytest.mark.parametrize("path", sorted((FOLDER / "accepted").glob("*.egg")), ids=lambda p: p.stem)
def test_a_good_rule_file_is_accepted(path: Path):
    known = set(load_rules().rules)
    assert set(load_rules([path]).rules) > known


TWINS = {
    "algebra": '(rewrite (Unary "Abs" (Unary "Neg" x)) (Unary "Abs" x) :ruleset algebra :name "unary-shard")',
    "parallel": "(rewrite (At ax (Partial) (Unary f x)) (Unary f (At ax (Partial) x)) :ruleset parallel"
    ' :name "unary-shard")',
    "analysis": '(rule ((= 1 1)) ((divides "a" x 0)) :ruleset analysis :name "unary-shard")',
    "two of analysis": "(relation r (i64))\n"
    + '(rule ((r x)) ((r 1)) :ruleset analysis :name "unary-shard")\n' * 2,
}


@pytest.mark.parametrize("text", TWINS.values(), ids=list(TWINS))
def test_a_rule_name_is_taken_once(text: str, tmp_path: Path):
    twin = tmp_path / "twin.egg"
    twin.write_text(text)
    with pytest.raises(UserError, match="the rule name 'unary-shard' is taken by"):
        load_rules([twin])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b" " * (MAX_FILE_BYTES + 1), "a rule file may have"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "r.egg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rules([path])


def test_a_device_without_end_is_refused():
    with pytest.raises(UserError, match="a rule file may have"):
        load_rules(["/dev/zero"])


def test_deep_nesting_is_refused_without_recursion(tmp_path: Path):
    path = tmp_path / "deep.egg"
    path.write_text("(" * 100_000)
    with pytest.raises(UserError, match=f"deep.egg:1:{MAX_DEPTH + 1}: lists are nested more than"):
        load_rules([path])


def test_every_shipped_rule_has_a_name_of_its_own():
    rules = load_rules().rules
    assert len(shipped_files()) > 5
    assert all(name == rule.name for name, rule in rules.items())


ATOMS = st.sampled_from(["a", "(Shard 0)"[1:6], "1", "-2.5", '"text (with) ;"', ":name"])
FORMS = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4).map(lambda xs: f"({' '.join(xs)})"), max_leaves=20
)


@given(st.lists(FORMS, max_size=5))
@settings(max_examples=200, deadline=None)
def test_reading_keeps_every_form_and_its_place(forms: list[str]):
    text = "\n; comment (\n".join(forms)
    found = read(text)
    assert [form.text for form in found] == forms
    lines = text.split("\n")
    for form in found:
        assert lines[form.line - 1][form.column - 1 :].startswith(form.text.split("\n")[0])


@given(st.text(alphabet='()"; a\\\n', max_size=60))
@settings(max_examples=300, deadline=None)
def test_reading_any_text_ends_in_forms_or_one_problem(text: str):
    try:
        for form in read(text):
            assert form.text in text
    except SyntaxProblem as problem:
        assert 1 <= problem.line <= text.count("\n") + 1
