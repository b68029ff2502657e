"""Rule files: read, checked against an allow-list, and completed into one egglog program.

In: paths of `*.egg` files. Out: a `RuleBook` (rules by name, operator constructors, program text).
A rule file is data: it may declare constructors, relations and functions, state facts of its relations, and give
named rules in a published ruleset. Everything else is refused with file, line and the offending text.

What the loader adds to each operator constructor `Op`:
  replicate-Op   (At ax (Replicate) (Op x ..)) = (Op (At ax (Replicate) x) ..)   any operator can run whole
  level-Op       an operator's value has the level of its operands
  Op-by          which rule made an e-node, so that a plan can name the rules it rests on
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..program import UserError
from .sexpr import Form, SyntaxProblem, read

FOLDER = Path(__file__).parent
VOCABULARY = FOLDER / "vocabulary.egg"
RULESETS = ("algebra", "parallel", "gradient")
MAX_FILE_BYTES = 4 << 20
NOT_OPERATORS = frozenset({"Leaf", "At", "Number", "Gradient"})


@dataclass(frozen=True)
class Rule:
    """One named rule: its ruleset, where it stands, and the comment above it."""

    name: str
    ruleset: str
    place: str  # file:line
    text: str


@dataclass(frozen=True)
class Constructor:
    """A term constructor: its name and the sorts of its arguments."""

    name: str
    sorts: tuple[str, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        """Positions of the tensor arguments."""
        return tuple(i for i, sort in enumerate(self.sorts) if sort == "Tensor")


@dataclass(frozen=True)
class RuleBook:
    """Everything the engine needs to know of the rules: one program and what is in it."""

    files: tuple[str, ...]
    rules: Mapping[str, Rule]
    constructors: Mapping[str, Constructor]
    statements: tuple[tuple[str, str], ...]  # (rule name or "", egglog text), declarations first
    facts: tuple[str, ...]  # what rule files state of their relations, such as (linear "Neg")
    digest: str

    @property
    def program(self) -> str:
        """The egglog program, to be included once."""
        return "\n".join(text for _, text in self.statements) + "\n"

    def without(self, name: str) -> RuleBook:
        """The same book lacking one rule."""
        rules = {k: v for k, v in self.rules.items() if k != name}
        return replace(self, rules=rules, statements=tuple(s for s in self.statements if s[0] != name))

    @property
    def operators(self) -> list[Constructor]:
        """Constructors of operators and collectives: all but leaves and placements."""
        return [c for c in self.constructors.values() if c.name not in NOT_OPERATORS]

    def named(self, ruleset: str) -> list[str]:
        """Names of the rules of a ruleset, in file order."""
        return [rule.name for rule in self.rules.values() if rule.ruleset == ruleset]


def shipped_files() -> list[Path]:
    """The rule files that come with the package, the vocabulary first."""
    return [VOCABULARY, *sorted(p for p in FOLDER.rglob("*.egg") if p != VOCABULARY)]


def load_rules(extra: Sequence[str | Path] = (), *, only: Iterable[str | Path] | None = None) -> RuleBook:
    """The shipped rules (or the files `only`, with the vocabulary) and the user's `extra` files.

    Raises UserError at the first file that is unreadable or says something it may not.
    """
    paths = shipped_files() if only is None else [VOCABULARY, *map(Path, only)]
    book = _Builder()
    for path in [*paths, *map(Path, extra)]:
        book.add(path, trusted=path == VOCABULARY)
    built = book.build()  # names are compared here, where egglog would panic
    if extra:
        _typecheck(load_rules(only=only), built, [Path(path) for path in extra])
    return built


def _typecheck(known: RuleBook, built: RuleBook, extra: Sequence[Path]) -> None:
    """Let egglog read the user's files as they are, so that what it refuses is named by file and line.

    Then the whole: a name that they declare may be a variable of a shipped rule.
    """
    from egglog.bindings import EGraph  # planning with the shipped rules alone needs it in the worker only

    def include(egraph: EGraph, path: Path, place: Path) -> None:
        try:
            egraph.run_program(*egraph.parse_program(f'(include "{path.as_posix()}")'))
        except BaseException as error:  # egglog panics with a class of its own, derived from BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise UserError(_located(place, str(error))) from None

    with tempfile.TemporaryDirectory() as folder:
        egraph = EGraph()
        for name, book in (("known", known), ("together", built)):
            (Path(folder) / f"{name}.egg").write_text(book.program, encoding="utf-8")
        include(egraph, Path(folder) / "known.egg", VOCABULARY)
        for path in extra:
            include(egraph, path, path)
        try:
            include(EGraph(), Path(folder) / "together.egg", Path("together"))
        except UserError as error:
            _, _, reason = str(error).rpartition("together.egg: ")
            raise UserError(f"{', '.join(map(str, extra))}: beside the shipped rules: {reason}") from None


def _located(path: Path, message: str) -> str:
    """egglog's `In 3:5-9 of my.egg: (text) reason` as `my.egg:3:5: reason: (text)`."""
    flat = re.sub(r"\s+", " ", message).strip()
    match = re.match(r"In (\d+):(\d+)-\S+ of [^:]+: (.*)", flat)
    return f"{path}:{match[1]}:{match[2]}: {match[3]}" if match else f"{path}: {flat}"


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # a device may have no end, and says that its size is 0
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UserError(f"{path}: a rule file may have {MAX_FILE_BYTES} bytes; this one has more")
        return data.decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _excerpt(form: Form) -> str:
    flat = re.sub(r"\s+", " ", form.text)
    return flat if len(flat) <= 80 else flat[:77] + "..."


class _Builder:
    """Collects the commands of rule files; each command is checked by the method `_<command>`."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.rules: dict[str, Rule] = {}
        self.constructors: dict[str, Constructor] = {}
        self.relations: set[str] = set()  # those that may be stated at top level
        self.facts: list[str] = []
        self.declarations: list[str] = []
        self.statements: list[tuple[str, str]] = []  # facts and rules; they may use what any file declares
        self.pending: list[tuple[Path, Form, bool]] = []
        self.hash = hashlib.sha256()

    def add(self, path: Path, *, trusted: bool) -> None:
        text = _text(path)
        self.hash.update(text.encode())
        try:
            forms = read(text)
        except SyntaxProblem as problem:
            raise UserError(f"{path}:{problem.line}:{problem.column}: {problem.reason}") from None
        self.files.append(str(path))
        for form in forms:
            self._command(path, form, trusted)

    def build(self) -> RuleBook:
        for path, form, trusted in self.pending:
            self._rule(path, form, trusted)
        for constructor in self.constructors.values():
            if constructor.name not in NOT_OPERATORS:
                self._generate(constructor)
        statements = (*(("", text) for text in self.declarations), *self.statements)
        return RuleBook(
            tuple(self.files),
            self.rules,
            self.constructors,
            statements,
            tuple(self.facts),
            self.hash.hexdigest(),
        )

    def _generate(self, constructor: Constructor) -> None:
        for name, text in generated(constructor):
            self.statements.append((name, text))
            if name:
                self.rules[name] = Rule(name, "parallel", "generated", text)

    def _command(self, path: Path, form: Form, trusted: bool) -> None:
        if not form.is_list:
            raise _refused(path, form, "expected a parenthesised command")
        if not trusted:
            for inner in form.walk():  # egglog's Python primitives run code: a rule file is data
                if not inner.is_list and inner.text.startswith("py-"):
                    raise _refused(path, inner, "a rule file is data and runs no Python")
        if form.head == "constructor":
            self._constructor(path, form)
        elif form.head in ("relation", "function"):
            self._relation(path, form)
        elif form.head in ("rewrite", "birewrite", "rule"):
            self.pending.append((path, form, trusted))
        elif form.head in self.relations:
            if any(item.is_list for item in form.children):
                raise _refused(path, form, "a fact at top level has plain arguments: strings and numbers")
            self.statements.append(("", form.text))
            self.facts.append(form.text)
        elif trusted and form.head in ("datatype", "sort", "ruleset"):
            self.declarations.append(form.text)
        else:
            allowed = (
                "constructor, relation, function, rewrite, birewrite, rule and facts of declared relations"
            )
            raise _refused(path, form, f"'{form.head}' is not allowed in a rule file; it may hold {allowed}")

    def _constructor(self, path: Path, form: Form) -> None:
        items = form.children
        if len(items) < 4 or not items[2].is_list or items[3].text != "Tensor":
            raise _refused(path, form, "expected (constructor Name (Sort ...) Tensor)")
        name = items[1].text
        if name in self.constructors:
            raise _refused(path, form, f"the operator {name!r} is declared already")
        constructor = Constructor(name, tuple(item.text for item in items[2].children))
        unknown = [
            sort
            for sort in constructor.sorts
            if sort not in ("Tensor", "Ints", "i64", "f64", "String", "Placement")
        ]
        if unknown:
            raise _refused(
                path,
                form,
                f"unknown sort {unknown[0]!r}; a constructor takes Tensor, Ints, i64, f64 or String",
            )
        if not constructor.operands and name not in NOT_OPERATORS:
            # A bare term would be every placement of itself: constants are leaves, with values.
            raise _refused(path, form, f"the operator {name!r} has no Tensor operand")
        self.constructors[name] = constructor
        self.declarations.append(form.text)
        if name not in NOT_OPERATORS:
            self.declarations.append(_provenance_relation(constructor))

    def _relation(self, path: Path, form: Form) -> None:
        items = form.children
        if len(items) < 3 or not items[2].is_list:
            raise _refused(path, form, f"expected ({form.head} name (Sort ...) ...)")
        self.declarations.append(form.text)
        if form.head == "relation":
            self.relations.add(items[1].text)

    def _rule(self, path: Path, form: Form, trusted: bool) -> None:
        name, ruleset = (self._option(path, form, key) for key in (":name", ":ruleset"))
        if name in self.rules:
            raise _refused(path, form, f"the rule name {name!r} is taken by {self.rules[name].place}")
        if not trusted:
            _check_actions(path, form, str(ruleset))
        if not trusted and ruleset not in RULESETS:
            if ruleset == "analysis" and form.head == "rule":
                self.rules[name] = Rule(name, ruleset, f"{path}:{form.line}", form.text)
                self.statements.append((name, form.text))
                return
            raise _refused(path, form, f"ruleset {ruleset!r} is not one of {', '.join(RULESETS)}")
        if not trusted:
            self.rules[name] = Rule(name, ruleset, f"{path}:{form.line}", form.text)
        if ruleset not in ("parallel", "algebra"):
            self.statements.append((name, form.text))
            return
        if form.head == "birewrite" and ruleset == "parallel":
            raise _refused(path, form, "a parallel rule has one direction: use rewrite")
        for rule in as_rules(form):
            problems = _undisciplined(rule, self.constructors) if ruleset == "parallel" else _unplaced(rule)
            for problem in problems:
                raise _refused(path, form, problem)
            self.statements.append((name, _with_provenance(rule, name, self.constructors)))

    def _option(self, path: Path, form: Form, key: str) -> str:
        value = form.option(key)
        if value is None or value.is_list:
            raise _refused(path, form, f"a rule needs {key}")
        return value.text.strip('"')


def generated(constructor: Constructor) -> list[tuple[str, str]]:
    """The rules that every operator has, as (rule name or "", egglog text)."""
    if not constructor.operands:
        return []
    name, first = constructor.name, constructor.operands[0]
    variables = [f"v{i}" for i in range(len(constructor.sorts))]
    term = f"({name} {' '.join(variables)})"
    placed = " ".join(
        f"(At ax (Replicate) {v})" if i in constructor.operands else v for i, v in enumerate(variables)
    )
    rule = f"replicate-{name}"
    return [
        (
            "",
            f"(rule ((= y {term}) (= l (level v{first}))) ((set (level y) l)) "
            f':ruleset analysis :name "level-{name}")',
        ),
        (
            rule,
            f"(rule ((= made (At ax (Replicate) {term}))) ((union made ({name} {placed})) "
            f'({name}-by "{rule}" {placed})) :ruleset parallel :name "{rule}")',
        ),
    ]


def declared(constructor: Constructor) -> list[str]:
    """An operator's declaration and its record of which rule made which e-node."""
    declaration = f"(constructor {constructor.name} ({' '.join(constructor.sorts)}) Tensor)"
    return [declaration, _provenance_relation(constructor)]


def _provenance_relation(constructor: Constructor) -> str:
    return f"(relation {constructor.name}-by (String {' '.join(constructor.sorts)}))"


def _check_actions(path: Path, form: Form, ruleset: str) -> None:
    """A rule adds: equalities in the rulesets of rewriting, facts in all. It takes nothing away and stops nothing."""
    if form.head != "rule" or len(form.children) < 3:
        return
    refused = {"delete", "subsume", "panic", "extract"} | ({"union"} if ruleset == "analysis" else set())
    for action in form.children[2].children:
        if action.head in refused:
            raise _refused(path, action, f"'{action.head}' is no action of a rule in ruleset {ruleset}")


def _refused(path: Path, form: Form, reason: str) -> UserError:
    return UserError(f"{path}:{form.line}:{form.column}: {reason}: {_excerpt(form)}")


def as_rules(form: Form) -> list[Form]:
    """(rewrite L R :when (C ..) ..) as (rule ((= made L) C ..) ((union made R)) ..); a birewrite N as N and N-back."""
    if form.head == "rule":
        return [form]
    left, right = form.children[1:3]
    when, name, ruleset = (form.option(key) for key in (":when", ":name", ":ruleset"))
    assert name and ruleset  # a rule without them was refused
    conditions = " ".join(item.text for item in when.children) if when else ""
    label = name.text.strip('"')

    def rule(a: Form, b: Form, label: str) -> Form:
        options = f':ruleset {ruleset.text} :name "{label}"'
        return read(f"(rule ((= made {a.text}) {conditions}) ((union made {b.text})) {options})")[0]

    forward = [rule(left, right, label)]
    return [*forward, rule(right, left, f"{label}-back")] if form.head == "birewrite" else forward


def _unplaced(rule: Form) -> Iterable[str]:
    """Why an algebra rule cannot be one: algebra knows no placements and runs before any."""
    if any(form.head == "At" for form in rule.walk()):
        yield "an algebra rule knows no placements: a rule with At belongs to the ruleset parallel"


def _undisciplined(rule: Form, constructors: Mapping[str, Constructor]) -> Iterable[str]:
    """Why a parallel rule cannot be right: it must unite a placed value with operators over placed operands."""
    conditions, actions = rule.children[1:3]
    placed = {a.text for c in conditions.children for a, _ in _equated(c, "At")}
    if not any(f.head == "At" for f in conditions.walk()):
        yield "a parallel rule matches (At axis placement operator)"
    named = placed | set(_lets(actions))
    for form in actions.walk():
        constructor = constructors.get(form.head)
        if constructor is None or form.head == "At" or len(form.children) != len(constructor.sorts) + 1:
            continue
        for position in constructor.operands:
            operand = form.children[position + 1]
            if not operand.is_list and operand.text not in named:
                name = operand.text
                yield f"operand {name!r} of {form.head} is not placed: write (At axis placement {name})"


def _lets(actions: Form) -> dict[str, Form]:
    """What the actions of a rule name: (let name term)."""
    lets = [a.children for a in actions.children if a.head == "let" and len(a.children) == 3]
    return {name.text: term for _, name, term in lets}


def _equated(condition: Form, head: str) -> list[tuple[Form, Form]]:
    """(variable, term) pairs of a condition (= variable (head ..)), either way round."""
    items = condition.children
    if condition.head != "=" or len(items) != 3:
        return []
    return [(a, b) for a, b in (items[1:], items[:0:-1]) if not a.is_list and b.head == head]


def _with_provenance(rule: Form, name: str, constructors: Mapping[str, Constructor]) -> str:
    """The rule, also recording that it made the e-node it unites."""
    conditions, actions = rule.children[1:3]
    lets = _lets(actions)
    records = []
    for action in actions.children:
        if action.head != "union" or len(action.children) != 3:
            continue
        root = action.children[2]
        while not root.is_list and root.text in lets:
            root = lets[root.text]
        if root.head in constructors and root.head != "At":
            arguments = " ".join(item.text for item in root.children[1:])
            records.append(f'({root.head}-by "{name}" {arguments})')
    options = " ".join(f"{key} {value.text}" for key in (":ruleset", ":name") if (value := rule.option(key)))
    body = " ".join(action.text for action in actions.children)
    return f"(rule {conditions.text} ({body} {' '.join(records)}) {options})"
