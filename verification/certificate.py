"""The plan checker: replays the derivation that a plan carries, with the standard library and ONNX's protobuf alone.

    check(logical, plan) -> Finding

In: two serialized ONNX models, the logical graph (a plan for one device, as `verification.logical` writes it) and
the plan. Out: whether every tensor of the plan is what its derivation says, a logical tensor in a layout, and whether
the plan's outputs and state are the logical graph's; if not, the first bad node with the expected and the found.

What it rests on: the rules' texts, which are in the derivation (the caller looks up what is known of them, by name and
text), this file, and the logical graph. No search, one pass: a node's rules say what its operands have to be.

    label        (logical tensor, layout): what a tensor of the plan stands for
    program      a term over leaves; at level 0 one operator, or the tensor itself where a collective moves it
    choice       the names of the rules that place every step of a program on one axis, from the result down
    derivation   rules, facts, the distinct lists of choices (one per axis), and for each node of the plan the labels
                 of what it computes with the numbers of their choices; none inside a program

An axis is placed after the other. Placing `(Op x ..)` as `(At axis placement (Op x ..))` by a rule gives a program
of the next level: its `(At ..)` of leaves say how the operands are read, its `(At ..)` of steps are placed in turn.
After the last axis the program has to be the nodes of the plan, attribute by attribute.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Union

from onnx.onnx_ml_pb2 import AttributeProto, ModelProto, TensorProto

FORMAT = 1
MOST_RANK = 8  # the table of cotangents ends there
MOST_MATCHES = 64  # of one rule and one term


class Malformed(Exception):
    """A file or a derivation does not have the form that it must have."""


class Unsupported(Exception):
    """A rule uses what this checker does not know."""


# ------------------------------------------------------------------------------------------------ values


@dataclass(frozen=True)
class Type:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})

Placement = tuple[Any, ...]  # ("Shard", d), ("Replicate",) or ("Partial",)
Layout = tuple[Placement, ...]
Label = tuple[str, Layout]
REPLICATE: Placement = ("Replicate",)
PARTIAL: Placement = ("Partial",)
Axis = tuple[str, int]  # name and size


def parse_layout(text: str) -> Layout:
    """`S0,R,P` as placements, one for each axis."""
    return tuple(map(_parse_placement, text.split(","))) if text else ()


def _parse_placement(text: str) -> Placement:
    if text in ("R", "P"):
        return REPLICATE if text == "R" else PARTIAL
    if re.fullmatch(r"S\d{1,3}", text):
        return ("Shard", int(text[1:]))
    raise Malformed(f"{text!r} is no placement")


def format_layout(layout: Layout) -> str:
    return ",".join(f"S{p[1]}" if p[0] == "Shard" else p[0][0] for p in layout)


def placed_type(type_: Type, size: int, placement: Placement) -> Type | None:
    """The local type after placing on an axis of that size; None where the placement is not on offer."""
    if placement[0] != "Shard":
        return None if placement == PARTIAL and type_.dtype not in FLOATING else type_
    d = placement[1]
    if not 0 <= d < len(type_.shape) or type_.shape[d] % size:
        return None
    return Type((*type_.shape[:d], type_.shape[d] // size, *type_.shape[d + 1 :]), type_.dtype)


def local_type(type_: Type, mesh: Sequence[Axis], layout: Layout) -> Type | None:
    """The local type in a layout; None if an axis does not divide what it splits."""
    local: Type | None = type_
    for (_, size), placement in zip(mesh, layout, strict=True):
        local = local and placed_type(local, size, placement)
    return local


@dataclass(frozen=True)
class Term:
    """An operator over operands; a leaf `("Leaf", (i,), ())`; a placed term `("At", (axis, placement), (term,))`."""

    head: str
    attributes: tuple[Any, ...]
    operands: tuple[Term, ...]
    type: Type

    def __hash__(
        self,
    ) -> int:  # terms share their subterms: without a memory, hashing them would take forever
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.head, self.attributes, self.operands, self.type))
            object.__setattr__(self, "_hash", known)
        return known


def leaf(index: int, type_: Type) -> Term:
    return Term("Leaf", (index,), (), type_)


# ------------------------------------------------------------------------------------------------ s-expressions


@dataclass(frozen=True)
class Text:
    """A quoted string of a rule; symbols are plain `str`."""

    value: str


Form = Union[str, Text, int, float, tuple["Form", ...]]  # noqa: UP007 - recursive
_TOKEN = re.compile(
    r'\s+|;[^\n]*|(?P<open>\()|(?P<close>\))|(?P<text>"(?:[^"\\]|\\.)*")|(?P<atom>[^\s();"]+)', re.S
)
MOST_TEXT, MOST_DEPTH = 1 << 20, 200


def read(text: str) -> list[Form]:
    """The forms of a text; Malformed where it is none."""
    if len(text) > MOST_TEXT:
        raise Malformed("a rule is too long")
    stack: list[list[Form]] = [[]]
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise Malformed(f"no s-expression at {text[position : position + 20]!r}")
        if match["open"]:
            stack.append([])
            if len(stack) > MOST_DEPTH:
                raise Malformed("a rule is nested too deep")
        elif match["close"]:
            if len(stack) == 1:
                raise Malformed("')' closes nothing")
            done = tuple(stack.pop())
            stack[-1].append(done)
        elif match["text"]:
            stack[-1].append(Text(json.loads(match["text"])))
        elif match["atom"]:
            stack[-1].append(_atom(match["atom"]))
        position = match.end()
    if len(stack) > 1:
        raise Malformed("'(' is not closed")
    return stack[0]


def _atom(text: str) -> Form:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return float(text)
    return text


def _head(form: Form) -> str:
    return form[0] if isinstance(form, tuple) and form and isinstance(form[0], str) else ""


# ------------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class Rule:
    """Conditions under which `target`, a class `(At axis placement term)`, is `result`; `lets` name parts of it."""

    name: str
    conditions: tuple[Form, ...]
    target: str
    lets: tuple[tuple[str, Form], ...]
    result: Form

    @property
    def operators(self) -> frozenset[str]:
        """Heads of the terms that the target may place; none: it moves a tensor, whatever computed it."""
        terms = {
            c[1]: c[2] for c in self.conditions if _head(c) == "=" and isinstance(c, tuple) and len(c) == 3
        }
        at = terms.get(self.target)
        inner = at[3] if isinstance(at, tuple) and len(at) == 4 and at[0] == "At" else ""
        inner = terms.get(inner, inner) if isinstance(inner, str) else inner
        return frozenset({_head(inner)} - {""})


def parse(text: str) -> list[Rule]:
    """The rules of one `(rewrite ..)`, `(birewrite ..)` or `(rule ..)`: one, or two for a birewrite."""
    forms = read(text)
    form = forms[0] if len(forms) == 1 else None
    if not isinstance(form, tuple) or len(form) < 3:
        raise Malformed("expected one rule")
    options = {k: v for k, v in itertools.pairwise(form) if isinstance(k, str) and k.startswith(":")}
    name = options.get(":name")
    if not isinstance(name, Text):
        raise Malformed("a rule needs a name")
    when = options.get(":when", ())
    if form[0] in ("rewrite", "birewrite") and isinstance(when, tuple):
        forward = Rule(name.value, (("=", "made", form[1]), *when), "made", (), form[2])
        back = Rule(f"{name.value}-back", (("=", "made", form[2]), *when), "made", (), form[1])
        return [forward, back] if form[0] == "birewrite" else [forward]
    if form[0] != "rule" or not isinstance(form[1], tuple) or not isinstance(form[2], tuple):
        raise Malformed(f"{_head(form)!r} is no rule")
    unions = [a for a in form[2] if _head(a) == "union" and isinstance(a, tuple) and len(a) == 3]
    if len(unions) != 1 or not isinstance(unions[0][1], str):
        raise Unsupported(f"rule {name.value}: expected one (union variable term)")
    lets = [(str(a[1]), a[2]) for a in form[2] if _head(a) == "let" and isinstance(a, tuple) and len(a) == 3]
    return [Rule(name.value, form[1], unions[0][1], tuple(lets), unions[0][2])]


# ------------------------------------------------------------------------------------------------ facts about shapes


def reads(out: tuple[int, ...], operand: tuple[int, ...]) -> Iterator[tuple[int, Placement]]:
    """NumPy's broadcasting: how an operand is read when dimension d of the result is sharded."""
    for d, size in enumerate(out):
        c = d - (len(out) - len(operand))
        if c < 0 or (operand[c] == 1 and size != 1):
            yield d, REPLICATE
        elif operand[c] == size:
            yield d, ("Shard", c)


def aligned(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Dimensions c, d that lead groups of equal size in row-major order: shards of c are shards of d."""
    if math.prod(before) != math.prod(after) or not math.prod(before):
        return
    c = d = 0
    while c < len(before) and d < len(after):
        if before[c] == 1 or after[d] == 1:
            c, d = (c + 1, d) if before[c] == 1 else (c, d + 1)
            continue
        yield c, d
        left, right = before[c], after[d]
        c, d = c + 1, d + 1
        while left != right:
            if left < right:
                left, c = left * before[c], c + 1
            else:
                right, d = right * after[d], d + 1


def survives(shape: tuple[int, ...], axes: tuple[int, ...], keep: int) -> Iterator[tuple[int, int]]:
    """Dimensions c of the operand of a reduction that become d of its result."""
    kept = [c for c in range(len(shape)) if c not in axes]
    yield from ((c, c if keep else d) for d, c in enumerate(kept))


def cotangents() -> Iterator[tuple[Placement, Placement, Placement, Placement]]:
    """Result, operand, how the result's cotangent is read, how the operand's is left: transposes of a parallel rule."""
    shards: list[Placement] = [("Shard", d) for d in range(MOST_RANK)]
    yield PARTIAL, REPLICATE, REPLICATE, PARTIAL
    yield PARTIAL, PARTIAL, REPLICATE, REPLICATE
    yield from ((d, REPLICATE, d, PARTIAL) for d in shards)
    yield from ((d, c, d, c) for d in shards for c in shards)
    yield from ((PARTIAL, c, REPLICATE, c) for c in shards)


# ------------------------------------------------------------------------------------------------ one rule, one term

Bindings = dict[str, Any]
_MISSING = object()  # the value of what is not bound yet

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if b > 0 and a >= 0 else _undefined(),
    "%": lambda a, b: a % b if b > 0 and a >= 0 else _undefined(),
    "min": min,
    "max": max,
    "vec-of": lambda *items: tuple(items),
    "vec-length": len,
    "vec-get": lambda v, i: v[i] if 0 <= i < len(v) else _undefined(),
    "vec-set": lambda v, i, x: (*v[:i], x, *v[i + 1 :]) if 0 <= i < len(v) else _undefined(),
    "vec-push": lambda v, x: (*v, x),
}
_COMPARISONS: dict[str, Callable[..., bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
    "vec-contains": lambda v, x: x in v,
    "vec-not-contains": lambda v, x: x not in v,
}
_OF_TENSOR: dict[str, Callable[[Type], Any]] = {
    "shape": lambda t: t.shape,
    "rank": lambda t: len(t.shape),
    "dtype": lambda t: t.dtype,
}
_ANALYSES = frozenset({"level", "axis-level"})  # nothing here may depend on them


class _Undefined(Exception):
    """A primitive has no value there; the rule does not apply."""


def _undefined() -> Any:
    raise _Undefined


@dataclass
class Match:
    """The ways in which a rule places `term` on an axis of `mesh`."""

    rule: Rule
    mesh: Mapping[str, int]
    axis: str
    facts: Mapping[str, Sequence[tuple[Any, ...]]]
    known: tuple[Term, ...]  # the term, and for an adjoint the operator it belongs to

    def solve(self, todo: list[Form], bound: Bindings) -> Iterator[Bindings]:
        """Bindings that satisfy all conditions; a condition waits until what it needs is bound."""
        if not todo:
            yield bound
            return
        for i, condition in enumerate(todo):
            try:
                outcomes = self.outcomes(condition, bound)
            except _Undefined:
                return
            if outcomes is not None:
                for outcome in outcomes:
                    yield from self.solve(todo[:i] + todo[i + 1 :], outcome)
                return
        raise Unsupported(f"rule {self.rule.name}: condition {todo[0]} cannot be decided")

    def outcomes(self, condition: Form, bound: Bindings) -> list[Bindings] | None:
        """All ways to satisfy a condition; None while it cannot be decided."""
        head = _head(condition)
        if not head or not isinstance(condition, tuple):
            raise Unsupported(f"rule {self.rule.name}: {condition!r} is no condition")
        if head == "=":
            return self.equal(condition[1:], bound)
        values = [self.value(form, bound) for form in condition[1:]]
        if head in _COMPARISONS:
            if _MISSING in values:
                return None
            return [bound] if _COMPARISONS[head](*values) else []
        rows = self.rows(head, values)
        if rows is None:
            return None
        found = []
        for row in rows:
            if len(row) == len(values):
                found += self.unify_all(condition[1:], row, bound)
        return found

    def rows(self, relation: str, values: list[Any]) -> Iterable[tuple[Any, ...]] | None:
        """The rows of a relation that agree with the values it is computed from; None while those are missing."""
        needed = {"reads": 2, "aligned": 2, "survives": 3, "divides": 2, "floating": 1, "movable": 1}.get(
            relation, 0
        )
        given = values[:needed]
        if _MISSING in given:
            return None
        if relation == "reads":
            return [(*given, d, p) for d, p in reads(*given)]
        if relation == "aligned":
            return [(*given, c, d) for c, d in aligned(*given)]
        if relation == "survives":
            return [(*given, c, d) for c, d in survives(*given)]
        if relation == "divides":
            shape, size = given[1].type.shape, self.mesh[given[0]]
            return [(*given, d) for d, n in enumerate(shape) if size > 1 and n > 0 and n % size == 0]
        if relation == "floating":
            return [(given[0],)] if given[0].type.dtype in FLOATING else []
        if relation == "movable":
            return [(given[0],)]
        if relation == "cotangent":
            return cotangents()
        if relation in self.facts:
            return self.facts[relation]
        raise Unsupported(f"rule {self.rule.name}: the relation {relation!r} has no facts here")

    def equal(self, sides: tuple[Form, ...], bound: Bindings) -> list[Bindings] | None:
        values = [self.value(form, bound) for form in sides]
        given = [v for v in values if v is not _MISSING]
        if given:
            return self.unify_all(sides, [given[0]] * len(sides), bound)
        for form in sides:  # a term that the e-graph would look up
            if isinstance(form, tuple) and (candidates := self.candidates(form, bound)) is not None:
                return [b for term in candidates for b in self.unify_all(sides, [term] * len(sides), bound)]
        return None

    def candidates(self, form: tuple[Form, ...], bound: Bindings) -> list[Term] | None:
        """Terms that a pattern might be, of those that are known to exist."""
        head = _head(form)
        if head == "At" and len(form) == 4:
            inner = self.value(form[3], bound)
            if inner is _MISSING and not isinstance(form[3], tuple):
                return None
            inners = self.known if inner is _MISSING else (inner,)
            return [at for term in inners for at in self.offers(term)]
        if head in _ARITHMETIC or head in _OF_TENSOR or head in ("dim", "axis-size", *_ANALYSES):
            return None
        return list(self.known)

    def offers(self, term: Term) -> Iterator[Term]:
        """Every placement of a term on the axis."""
        shards = [("Shard", d) for d in range(len(term.type.shape))]
        for placement in (REPLICATE, PARTIAL, *shards):
            if at := self.at(self.axis, placement, term):
                yield at

    def at(self, axis: str, placement: Placement, term: Term) -> Term | None:
        type_ = placed_type(term.type, self.mesh[axis], placement)
        return type_ and Term("At", (axis, placement), (term,), type_)

    def unify_all(self, patterns: Sequence[Form], values: Sequence[Any], bound: Bindings) -> list[Bindings]:
        found = [bound]
        for pattern, value in zip(patterns, values, strict=True):
            found = [b for before in found for b in self.unify(pattern, value, before)]
        return found

    def unify(self, pattern: Form, value: Any, bound: Bindings) -> list[Bindings]:
        """The bindings under which a pattern is the value: none or one."""
        if isinstance(pattern, str):
            if pattern not in bound:
                return [{**bound, pattern: value}]
            return [bound] if bound[pattern] == value else []
        if not isinstance(pattern, tuple):
            return [bound] if (pattern.value if isinstance(pattern, Text) else pattern) == value else []
        head, arguments = _head(pattern), pattern[1:]
        if head in ("Shard", "Replicate", "Partial"):
            if not isinstance(value, tuple) or value[:1] != (head,) or len(value) != len(pattern):
                return []
            return self.unify_all(arguments, value[1:], bound)
        if head in _ARITHMETIC or head in _OF_TENSOR or head in ("dim", "axis-size", *_ANALYSES):
            own = self.value(pattern, bound)
            if own is _MISSING:
                raise Unsupported(f"rule {self.rule.name}: {head} of what is not bound")
            return [bound] if own == value else []
        if not isinstance(value, Term) or value.head != head:
            return []
        parts = (*value.attributes, *value.operands)
        return self.unify_all(arguments, parts, bound) if len(parts) == len(arguments) else []

    def value(self, form: Form, bound: Bindings) -> Any:
        """What a form is worth, or _MISSING while it holds what is not bound."""
        if isinstance(form, str):
            return bound.get(form, _MISSING)
        if not isinstance(form, tuple):
            return form.value if isinstance(form, Text) else form
        head = _head(form)
        if head in _ANALYSES:
            raise Unsupported(f"rule {self.rule.name}: {head} is not known here")
        values = [self.value(item, bound) for item in form[1:]]
        if _MISSING in values:
            return _MISSING
        if head in _ARITHMETIC:
            return _ARITHMETIC[head](*values)
        if head in _OF_TENSOR:
            return _OF_TENSOR[head](values[0].type)
        if head == "dim":
            shape, d = values[0].type.shape, values[1]
            return shape[d] if 0 <= d < len(shape) else _undefined()
        if head == "axis-size":
            return self.mesh[values[0]]
        if head in ("Shard", "Replicate", "Partial"):
            return (head, *values)
        if head == "At":
            return self.at(*values) or _undefined()
        return next((term for term in self.known if self.unify(form, term, bound)), _MISSING)

    def build(self, form: Form, bound: Bindings, type_: Type | None = None) -> Any:
        """The result of a rule: terms over placed terms; `type_` is the whole's, those inside are inferred."""
        if not isinstance(form, tuple):
            return self.value(form, bound)
        head = _head(form)
        parts = [self.build(item, bound) for item in form[1:]]
        if any(part is _MISSING for part in parts):
            raise Unsupported(f"rule {self.rule.name}: its result holds what is not bound")
        if head in ("Shard", "Replicate", "Partial"):
            return (head, *parts)
        if head == "At":
            return self.at(*parts) or _undefined()
        if head in _ARITHMETIC or head in _OF_TENSOR or head in ("dim", "axis-size", *_ANALYSES):
            return self.value(
                (head, *(f"?{i}" for i in range(len(parts)))), {f"?{i}": v for i, v in enumerate(parts)}
            )
        operands = tuple(part for part in parts if isinstance(part, Term))
        attributes = tuple(part for part in parts if not isinstance(part, Term))
        type_ = type_ or infer(head, attributes, tuple(o.type for o in operands), self.mesh)
        return Term(head, attributes, operands, type_)


def expansions(
    rule: Rule,
    mesh: Mapping[str, int],
    axis: str,
    placement: Placement,
    term: Term,
    facts: Mapping[str, Sequence[tuple[Any, ...]]],
) -> list[Term]:
    """The terms of the next level that `(At axis placement term)` is by a rule: operators over placed terms.

    `facts` are the rows of the relations that rule files declare, such as {"linear": [("Neg",)]}.
    """
    match = Match(rule, mesh, axis, facts, (term, *_forward(term)))
    goal = match.at(axis, placement, term)
    if goal is None:
        return []
    found: list[Term] = []
    for bound in match.solve(list(rule.conditions), {rule.target: goal}):
        try:
            for name, form in rule.lets:
                bound = {**bound, name: match.build(form, bound)}
            made = match.build(rule.result, bound, goal.type)
        except _Undefined:
            continue
        if isinstance(made, Term) and made not in found:
            found.append(made)
        if len(found) > MOST_MATCHES:
            raise Unsupported(f"rule {rule.name}: more than {MOST_MATCHES} matches of one term")
    return found


def _forward(term: Term) -> Iterator[Term]:
    """The operator that an adjoint belongs to; an operand that it does not read is a leaf of its own."""
    op, dash, head = term.head.partition("-")
    if op not in ("Vjp", "Adjoint") or not dash:
        return
    operand, *attributes = term.attributes
    operands = list(term.operands[:-1])
    if op == "Adjoint":
        shape = attributes.pop(0)
        operands.insert(operand, leaf(-1, Type(tuple(shape), term.type.dtype)))
    yield Term(head, tuple(attributes), tuple(operands), term.operands[-1].type)


# ------------------------------------------------------------------------------------------------ types inside programs


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        several = set(sizes) - {1}
        if len(several) > 1:
            raise _Undefined
        out.append(several.pop() if several else 1)
    return tuple(reversed(out))


def _scaled(type_: Type, dim: int, times: int, parts: int) -> Type:
    if not 0 <= dim < len(type_.shape) or type_.shape[dim] * times % parts:
        raise _Undefined
    return Type((*type_.shape[:dim], type_.shape[dim] * times // parts, *type_.shape[dim + 1 :]), type_.dtype)


_LOGICAL = frozenset({"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor"})


def infer(
    head: str, attributes: tuple[Any, ...], operands: tuple[Type, ...], mesh: Mapping[str, int]
) -> Type:
    """The type of an operator inside a rule's result; Unsupported for those that no rule puts there."""
    x = operands[0] if operands else Type((), "")
    if head in ("AllReduce", "Include", "LocalIndices", "Shift", "Softmax", "LogSoftmax"):
        return x
    if head == "AllGather":
        return _scaled(x, attributes[1], mesh[attributes[0]], 1)
    if head in ("ReduceScatter", "LocalSlice"):
        return _scaled(x, attributes[1], 1, mesh[attributes[0]])
    if head == "AllToAll":
        ways = mesh[attributes[0]]
        return _scaled(_scaled(x, attributes[2], 1, ways), attributes[1], ways, 1)
    if head == "Unary":
        return Type(x.shape, "bool") if attributes[0].split()[0] in ("Not", "IsNaN", "IsInf") else x
    if head == "Binary":
        shape = broadcast(*(t.shape for t in operands))
        return Type(shape, "bool" if attributes[0] in _LOGICAL else x.dtype)
    if head == "Where":
        return Type(broadcast(*(t.shape for t in operands)), operands[1].dtype)
    if head == "Cast":
        return Type(x.shape, attributes[0])
    if head == "Reduce":
        _, axes, keep = attributes
        kept = [1 if d in axes else n for d, n in enumerate(x.shape) if keep or d not in axes]
        return Type(tuple(kept), x.dtype)
    if head == "MatMul" and min(len(t.shape) for t in operands) >= 2:
        a, b = operands
        return Type((*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    if head == "Gather":
        axis, indices = attributes[1], operands[1]
        return Type((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    if head == "Transpose":
        return Type(tuple(x.shape[d] for d in attributes[0]), x.dtype)
    if head in ("Reshape", "Expand"):
        return Type(tuple(attributes[0]), x.dtype)
    raise Unsupported(f"the type of {head} inside a rule's result is not known here")


# ----------------------------------------------------------------------------------------------- programs, axis by axis

Pick = Callable[
    [Term, str, Placement], Iterator[tuple[str, Term]]
]  # ways to place a term: (rule's name, result)
Resolved = tuple[Term, tuple[str, ...]]


def place(
    term: Term, axis: str, placement: Placement, type_: Type, pick: Pick, fixed: Mapping[int, Placement]
) -> Iterator[tuple[Term, list[str], dict[int, Placement]]]:
    """Programs of the next level that a program is on an axis, with the rules' names and how leaves are read.

    Leaves in `fixed` are read that way or not at all.
    """
    goal = Term("At", (axis, placement), (term,), type_)
    for env, names, leaves in _resolve(goal, {}, (), dict(fixed), pick):
        yield env[goal], list(names), leaves


def _resolve(
    at: Term, env: dict[Term, Term], names: tuple[str, ...], leaves: dict[int, Placement], pick: Pick
) -> Iterator[tuple[dict[Term, Term], tuple[str, ...], dict[int, Placement]]]:
    """Ways to compute a placed term; `env` holds those that are computed already."""
    if at in env:
        yield env, names, leaves
        return
    (axis, placement), (inner,) = at.attributes, at.operands
    if inner.head == "Leaf":
        index = inner.attributes[0]
        if index >= 0 and leaves.get(index, placement) == placement:
            yield {**env, at: leaf(index, at.type)}, names, {**leaves, index: placement}
        return
    for name, made in pick(inner, axis, placement):
        for env2, names2, leaves2 in _resolve_all(_placed_in(made), env, (*names, name), leaves, pick):
            yield {**env2, at: _substituted(made, env2)}, names2, leaves2


def _resolve_all(
    ats: Sequence[Term],
    env: dict[Term, Term],
    names: tuple[str, ...],
    leaves: dict[int, Placement],
    pick: Pick,
) -> Iterator[tuple[dict[Term, Term], tuple[str, ...], dict[int, Placement]]]:
    if not ats:
        yield env, names, leaves
        return
    for env2, names2, leaves2 in _resolve(ats[0], env, names, leaves, pick):
        yield from _resolve_all(ats[1:], env2, names2, leaves2, pick)


@cache
def _placed_in(made: Term) -> tuple[Term, ...]:
    """The placed terms that a rule's result reads, each once, in order."""
    if made.head == "At":
        return (made,)
    return tuple(dict.fromkeys(at for operand in made.operands for at in _placed_in(operand)))


def _substituted(made: Term, env: Mapping[Term, Term]) -> Term:
    if made.head == "At":
        return env[made]
    return Term(made.head, made.attributes, tuple(_substituted(o, env) for o in made.operands), made.type)


class Rules:
    """The rules of a derivation, by name, and the facts of their relations."""

    def __init__(self, texts: Mapping[str, str], facts: Iterable[str], mesh: Sequence[Axis]) -> None:
        self.mesh = dict(mesh)
        self.texts = dict(texts)
        self.rules: dict[str, Rule] = {}
        self.of_head: dict[str, list[str]] = {}
        self.moving: list[str] = []
        self.facts: dict[str, list[tuple[Any, ...]]] = {}
        self.skipped: dict[str, str] = {}
        self._memory: dict[tuple[str, str, Placement, Term], list[Term]] = {}
        for name, text in texts.items():
            self._add(name, text)
        for text in facts:
            for form in read(text):
                if not isinstance(form, tuple) or any(isinstance(item, tuple) for item in form):
                    raise Malformed(f"{text!r} is no fact")
                row = tuple(item.value if isinstance(item, Text) else item for item in form[1:])
                self.facts.setdefault(_head(form), []).append(row)

    def _add(self, name: str, text: str) -> None:
        try:
            rules = parse(text)
        except Unsupported as error:
            self.skipped[name] = str(error)
            return
        for rule in rules:
            self.rules[rule.name] = rule
            self.texts.setdefault(rule.name, text)
            for head in rule.operators:
                self.of_head.setdefault(head, []).append(rule.name)
            if not rule.operators:
                self.moving.append(rule.name)

    def expand(self, name: str, axis: str, placement: Placement, term: Term) -> list[Term]:
        """What a rule makes of a placed term; nothing where it does not apply."""
        if name not in self.rules:
            raise Malformed(f"rule {name!r} is not in the derivation")
        key = (name, axis, placement, term)
        if key not in self._memory:
            self._memory[key] = expansions(self.rules[name], self.mesh, axis, placement, term, self.facts)
        return self._memory[key]


# ------------------------------------------------------------------------------------------------ reading programs

_ELEMENT = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
_UNPACK = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "float16": "e", "bool": "?", "int8": "b",
           "uint8": "B", "int16": "h", "uint16": "H", "uint32": "I", "uint64": "Q"}  # fmt: skip
PREFIX = "parallegg."
OWN = "parallegg"

# Operands that say sizes and axes: attributes of the term. "many" numbers, "one" number, "like" one of the first
# operand's type. OneHot's stands second, all others last.
_SIZES = {
    "Reshape": (("shape", "many"),),
    "Expand": (("shape", "many"),),
    "Slice": (("starts", "many"), ("ends", "many"), ("axes", "many"), ("steps", "many")),
    "Tile": (("repeats", "many"),),
    "Pad": (("pads", "many"), ("value", "like")),
    "Clip": (("min", "like"), ("max", "like")),
    "TopK": (("k", "one"),),
    "OneHot": (("depth", "one"),),
    "CumSum": (("axis", "one"),),
    "Trilu": (("k", "one"),),
    **{f"Reduce{name}": (("axes", "many"),) for name in ("Sum", "Mean", "Max", "Min", "Prod")},
}
_IMPLIED = {"allowzero", "noop_with_empty_axes"}

# Constructor and the attributes that it names; "*" stands for the rest, as one text.
_TERMS = {
    "Where": ("Where",),
    "Cast": ("Cast", "to"),
    "MatMul": ("MatMul",),
    "Gemm": ("Gemm", "transA", "transB"),
    "Conv": ("Conv", "group", "*"),
    "Softmax": ("Softmax", "axis"),
    "LogSoftmax": ("LogSoftmax", "axis"),
    "LayerNormalization": ("LayerNormalization", "axis", "epsilon"),
    "RMSNormalization": ("RMSNormalization", "axis", "epsilon"),
    "BatchNormalization": ("BatchNormalization", "epsilon"),
    "GatherElements": ("GatherElements", "axis"),
    "GatherND": ("GatherND", "batch_dims"),
    "Transpose": ("Transpose", "perm"),
    "Reshape": ("Reshape", "shape"),
    "Expand": ("Expand", "shape"),
    "Concat": ("Concat", "axis"),
    "Slice": ("Slice", "starts", "ends", "steps"),
    "AllReduce": ("AllReduce", "axis", "reduction"),
    "AllGather": ("AllGather", "axis", "dim"),
    "ReduceScatter": ("ReduceScatter", "axis", "dim"),
    "AllToAll": ("AllToAll", "axis", "dim", "to_dim"),
    "LocalSlice": ("LocalSlice", "axis", "dim"),
    "Include": ("Include", "axis"),
    "LocalIndices": ("LocalIndices", "axis", "rows", "mode"),
}
_FAMILIES = {
    "Unary": "Abs Neg Sign Relu Reciprocal Floor Ceil Round Sqrt Softsign HardSwish Not Exp Log Sin Cos Tan Asin Acos "
    "Atan Sinh Cosh Tanh Sigmoid Erf Softplus Mish Gelu LeakyRelu ThresholdedRelu Elu Celu Selu HardSigmoid IsNaN "
    "IsInf Clip",
    "Binary": "Add Sub Mul Div Max Min And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual Pow Mod PRelu "
    "RandomKey RandomMask",
    "Pool": "MaxPool AveragePool",
}
_FAMILY = {op: family for family, ops in _FAMILIES.items() for op in ops.split()}


@dataclass(frozen=True)
class Node:
    """One node of a program: its operands are tensors, all else is in `attributes`."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]

    def head(self, output: str) -> tuple[str, tuple[Any, ...]] | None:
        """Constructor and attributes of the term that computes one of its outputs; None if it lacks some."""
        attributes = dict(self.attributes)
        if len(self.outputs) > 1:
            attributes["result"] = self.outputs.index(output)
        try:
            return _encoded(self.op, attributes, len(self.inputs))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def _encoded(op: str, attributes: dict[str, Any], operands: int) -> tuple[str, tuple[Any, ...]]:
    if op in ("Vjp", "Adjoint"):
        own = {
            k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(attributes["attributes"]).items()
        }
        head, values = _encoded(attributes["of"], own, operands if op == "Adjoint" else operands - 1)
        first = (attributes["operand"], *((attributes["shape"],) if op == "Adjoint" else ()))
        return f"{op}-{head}", (*first, *values)
    if op in ("Gather", "GatherOrZero"):
        return "Gather", ("wrap" if op == "Gather" else "zero", attributes["axis"])
    if op in _TERMS:
        constructor, *names = _TERMS[op]
        values = [attributes.pop(name) for name in names if name != "*"]
        return constructor, (*values, *((_text(attributes),) if "*" in names else ()))
    if op.startswith("Reduce") and op in _SIZES:
        return "Reduce", (op.removeprefix("Reduce"), attributes["axes"], attributes["keepdims"])
    label = f"{op} {_text(attributes)}" if attributes else op
    return _FAMILY.get(op, f"Opaque{operands}"), (label,)


def _text(attributes: Mapping[str, Any]) -> str:
    return json.dumps({k: attributes[k] for k in sorted(attributes)}, separators=(",", ":"))


@dataclass(frozen=True)
class Port:
    """An input or output: its logical name, kind and type, its layout, and the program's tensor."""

    name: str
    kind: str
    type: Type
    layout: Layout
    local: str


@dataclass(frozen=True)
class Program:
    """A plan file, read: what `planfile` writes, without trust in it."""

    mesh: tuple[Axis, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, Type]
    stored: Mapping[str, TensorProto]  # constants and numbers in the file
    state: tuple[tuple[str, str], ...]
    derivation: Any
    made_by: dict[str, int] = field(default_factory=dict)  # tensor -> its node


def read_program(data: bytes) -> Program:
    """Read a plan file; Malformed for anything that is none."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
        props = {entry.key: entry.value for entry in model.metadata_props}
        if props.get(f"{PREFIX}version") != str(FORMAT):
            raise Malformed(f"the format version is not {FORMAT}")
        mesh = tuple(_axis(part) for part in props[f"{PREFIX}mesh"].split(",") if part)
        inputs, outputs = (tuple(map(_port, json.loads(props[PREFIX + k]))) for k in ("inputs", "outputs"))
        stored = {t.name: t for t in model.graph.initializer}
        nodes = tuple(_node(proto, stored) for proto in model.graph.node)
        infos = (*model.graph.input, *model.graph.output, *model.graph.value_info)
        types = {
            i.name: _typed(i.type.tensor_type.elem_type, [d.dim_value for d in i.type.tensor_type.shape.dim])
            for i in infos
        }
        state = tuple((str(a), str(b)) for a, b in json.loads(props.get(f"{PREFIX}state", "[]")))
        derivation = json.loads(props.get(f"{PREFIX}derivation", "null"))
    except Malformed:
        raise
    except Exception as error:  # whatever is wrong, it is the file
        raise Malformed(f"{type(error).__name__}: {error}") from None
    names = [axis for axis, _ in mesh]
    if len(set(names)) != len(names):
        raise Malformed("an axis name appears twice")
    program = Program(mesh, inputs, outputs, nodes, types, stored, state, derivation)
    _check_order(program)
    return program


def _axis(text: str) -> Axis:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal() or not 1 <= int(size) < 1 << 31:
        raise Malformed(f"{text!r} is no mesh axis")
    return name, int(size)


def _port(fields: Mapping[str, Any]) -> Port:
    shape = tuple(fields["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in shape) or fields["dtype"] not in _ELEMENT.values():
        raise Malformed(f"port {fields['name']!r} has no type")
    return Port(
        str(fields["name"]),
        str(fields["kind"]),
        Type(shape, fields["dtype"]),
        parse_layout(fields["layout"]),
        str(fields["local"]),
    )


def _typed(code: int, shape: Iterable[int]) -> Type:
    return Type(tuple(shape), _ELEMENT[code])


def numbers(tensor: TensorProto) -> tuple[Any, ...]:
    """The elements of a small stored tensor."""
    kind = _UNPACK[_ELEMENT[tensor.data_type]]
    if not tensor.raw_data and tensor.int64_data:
        return tuple(tensor.int64_data)
    return tuple(item for (item,) in struct.iter_unpack(f"<{kind}", tensor.raw_data))


def _node(proto: Any, stored: Mapping[str, TensorProto]) -> Node:
    attributes = {a.name: _attribute(a) for a in proto.attribute if a.name not in _IMPLIED}
    inputs, op = list(proto.input), proto.op_type
    if proto.domain not in ("", OWN):
        op = f"{proto.domain}.{op}"
    elif op in _SIZES:
        first = 1
        values = [inputs.pop(first) for _ in range(len(_SIZES[op])) if len(inputs) > first]
        for (key, kind), name in zip(_SIZES[op], values, strict=False):
            if name:
                found = numbers(stored[name])
                attributes[key] = found if kind == "many" else found[0]
    if op == "Slice" and attributes.pop("axes") != tuple(range(len(attributes["starts"]))):
        raise Malformed(f"node {proto.name!r}: Slice without an entry for each dimension")
    if op == "Cast":
        attributes["to"] = _ELEMENT[attributes["to"]]
    return Node(proto.name, op, tuple(inputs), tuple(proto.output), tuple(sorted(attributes.items())))


def _attribute(proto: AttributeProto) -> Any:
    kinds = {
        AttributeProto.INT: lambda: proto.i,
        AttributeProto.FLOAT: lambda: proto.f,
        AttributeProto.STRING: lambda: proto.s.decode(),
        AttributeProto.INTS: lambda: tuple(proto.ints),
        AttributeProto.FLOATS: lambda: tuple(proto.floats),
        AttributeProto.STRINGS: lambda: tuple(s.decode() for s in proto.strings),
    }
    if proto.type not in kinds:
        raise Malformed(f"attribute {proto.name!r} has a kind that no plan has")
    return kinds[proto.type]()


def _check_order(program: Program) -> None:
    """Every tensor is defined once, before it is read."""
    known = {port.local for port in program.inputs} | set(program.stored)
    for i, node in enumerate(program.nodes):
        for name in node.inputs:
            if name not in known:
                raise Malformed(f"node {node.name!r} reads {name!r}, which nothing before it computes")
        for name in node.outputs:
            if name in known:
                raise Malformed(f"node {node.name!r} writes {name!r}, which is defined already")
            known.add(name)
            program.made_by[name] = i
    for port in program.outputs:
        if port.local not in known:
            raise Malformed(f"output {port.name!r} reads {port.local!r}, which nothing computes")


# ------------------------------------------------------------------------------------------------ the checker


@dataclass(frozen=True)
class Finding:
    """`holds`, or the first bad node with the reason in words; `rules` are the names of those it rests on."""

    holds: bool
    reason: str
    node: str | None = None
    expected: str | None = None
    found: str | None = None
    rules: tuple[str, ...] = ()
    nodes: int = 0


class Refuted(Exception):
    """A node of the plan is not what the derivation says."""

    def __init__(
        self, reason: str, node: str | None = None, expected: str | None = None, found: str | None = None
    ) -> None:
        super().__init__(reason)
        self.finding = Finding(False, reason, node, expected, found)


def say(label: Label | None) -> str:
    return f"{label[0]} as {format_layout(label[1])}" if label else "nothing known"


class Logical:
    """The logical graph: which operator over which tensors computes a tensor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.types = dict(program.types) | {p.local: p.type for p in program.inputs}
        self.kinds = {p.name: p.kind for p in program.inputs}

    def term(self, tensor: str) -> tuple[Term, tuple[str, ...]]:
        """A tensor's operator over leaves, and the operands' names; refused for what no node computes."""
        i = self.program.made_by.get(tensor)
        if i is None:
            raise Refuted(f"the logical graph computes no {tensor!r}")
        node = self.program.nodes[i]
        if not (found := node.head(tensor)):
            raise Malformed(f"the logical graph's {node.name!r} ({node.op}) lacks attributes")
        head, attributes = found
        leaves = tuple(leaf(k, self.types[name]) for k, name in enumerate(node.inputs))
        return Term(head, attributes, leaves, self.types[tensor]), node.inputs


class Checker:
    """A plan against a logical graph: labels of the plan's tensors, established one after the other."""

    def __init__(self, logical: Program, plan: Program) -> None:
        self.logical, self.plan = Logical(logical), plan
        self.mesh = plan.mesh
        self.labels: dict[str, Label] = {}
        self.rules: set[str] = set()
        self._programs: dict[Any, tuple[Term, tuple[Layout, ...], tuple[str, ...]]] = {}

    # -------------------------------------------------------------------------------- ports

    def port(self, port: Port) -> None:
        """An input is a logical leaf, whole or in shards; a constant that the file holds is the logical one."""
        if port.type != self.logical.types.get(port.name) or port.kind != self.logical.kinds.get(port.name):
            raise Refuted(f"the plan's {port.kind} {port.name!r} ({port.type}) is none of the model's")
        label = (port.name, port.layout)
        if len(port.layout) != len(self.mesh) or PARTIAL in port.layout:
            raise Refuted(f"{port.kind} {port.name!r} cannot be fed as {format_layout(port.layout)}")
        self._check_type(port.local, label, None)
        self._check_stored(port)
        if self.labels.setdefault(port.local, label) != label:
            raise Refuted(f"two inputs are called {port.local!r}")

    def _check_stored(self, port: Port) -> None:
        ours, theirs = (p.stored.get(f"whole:{port.name}") for p in (self.plan, self.logical.program))
        if port.local in self.plan.stored:
            raise Refuted(f"input {port.name!r} has a value of its own in the file")
        if ours is not None and (
            theirs is None
            or ours.SerializeToString(deterministic=True) != theirs.SerializeToString(deterministic=True)
        ):
            raise Refuted(f"constant {port.name!r} has another value than the model's")

    def outputs(self) -> None:
        """Every output and state is the logical one, in the layout that the plan declares."""
        declared = {port.name: port for port in self.plan.outputs}
        for port in self.logical.program.outputs:
            if port.name not in declared:
                raise Refuted(f"the plan lacks the output {port.name!r}")
        for port in self.plan.outputs:
            found = self.labels.get(port.local)
            if found != (self._logical_output(port.name), port.layout) or PARTIAL in port.layout:
                expected = say((port.name, port.layout))
                i = self.plan.made_by.get(port.local)
                node = self.plan.nodes[i].name if i is not None else port.name
                raise Refuted(
                    f"output {port.name!r}: expected {expected}, found {say(found)}",
                    node,
                    expected,
                    say(found),
                )
            if port.type != self.logical.types.get(self._logical_output(port.name)):
                raise Refuted(f"output {port.name!r} is declared as {port.type}")
        self._check_state(declared)

    def _logical_output(self, name: str) -> str:
        found = [port.local for port in self.logical.program.outputs if port.name == name]
        if not found:
            raise Refuted(f"the model has no output {name!r}")
        return found[0]

    def _check_state(self, outputs: Mapping[str, Port]) -> None:
        if sorted(self.plan.state) != sorted(self.logical.program.state):
            raise Refuted(
                "the plan's state is not the training step's: a weight or moment is paired otherwise"
            )
        layouts = {port.name: port.layout for port in self.plan.inputs}
        for old, new in self.plan.state:
            if layouts.get(old) != outputs[new].layout:
                raise Refuted(f"state {old!r} is read and written in different layouts")

    def _check_type(self, tensor: str, label: Label, node: str | None) -> None:
        expected = local_type(self.logical.types[label[0]], self.mesh, label[1])
        if expected is None:
            raise Refuted(f"{say(label)} is no layout of {self.logical.types[label[0]]}", node)
        if tensor in self.plan.types and self.plan.types[tensor] != expected:
            raise Refuted(
                f"{tensor!r} is declared as {self.plan.types[tensor]}, {say(label)} is {expected}", node
            )

    # -------------------------------------------------------------------------------- nodes

    def program_of(
        self, term: Term, layout: Layout, pick: Callable[[int], Pick], fixed: Mapping[int, Layout]
    ) -> Iterator[tuple[Term, tuple[Layout, ...], list[list[str]]]]:
        """Programs that a term is in a layout, with the operands' layouts and the choices, axis by axis.

        Operands in `fixed` are read in those layouts.
        """

        def level(
            i: int, term: Term, leaves: list[dict[int, Placement]], names: list[list[str]]
        ) -> Iterator[Any]:
            if i == len(self.mesh):
                count = max((max(found, default=-1) for found in leaves), default=-1) + 1
                yield (
                    term,
                    tuple(tuple(found.get(k, REPLICATE) for found in leaves) for k in range(count)),
                    names,
                )
                return
            axis, size = self.mesh[i]
            type_ = placed_type(term.type, size, layout[i])
            if type_ is None:
                return
            given = {k: one[i] for k, one in fixed.items()}
            for made, rules, read in place(term, axis, layout[i], type_, pick(i), given):
                yield from level(i + 1, made, [*leaves, read], [*names, rules])

        yield from level(0, term, [], [])

    def conversion_of(
        self, tensor: str, source: Layout, target: Layout, pick: Callable[[int], Pick]
    ) -> Iterator[tuple[Term, list[list[str]]]]:
        """Collectives that move a tensor between layouts that differ on one axis."""
        differing = [i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
        if len(differing) != 1:
            return
        (at,) = differing
        start: Term | None = leaf(0, self.logical.types[tensor])
        for i in range(at):
            type_ = start and placed_type(start.type, self.mesh[i][1], source[i])
            start = type_ and leaf(0, type_)
        if start is None:
            return
        axis = self.mesh[at][0]
        for name, made in pick(at)(start, axis, target[at]):
            if any(p.operands[0] != start or p.attributes[1] != source[at] for p in _placed_in(made)):
                continue
            env = {p: leaf(0, p.type) for p in _placed_in(made)}
            first = _substituted(made, env)

            def level(i: int, term: Term, names: list[list[str]]) -> Iterator[tuple[Term, list[list[str]]]]:
                if i == len(self.mesh):
                    yield term, names
                    return
                type_ = placed_type(term.type, self.mesh[i][1], target[i])
                if type_ is None:
                    return
                for made, rules, _ in place(term, self.mesh[i][0], target[i], type_, pick(i), {0: source[i]}):
                    yield from level(i + 1, made, [*names, rules])

            yield from level(at + 1, first, [[] for _ in range(at)] + [[name]])

    def same(self, tensor: str, term: Term, leaves: Mapping[int, Label]) -> bool:
        """Whether a tensor of the plan is computed by a term whose leaves are tensors of these labels."""
        if term.head == "Leaf":
            return self.labels.get(tensor) == leaves[term.attributes[0]]
        i = self.plan.made_by.get(tensor)
        if i is None:
            return False
        node = self.plan.nodes[i]
        operands = node.inputs
        if term.head == "Shift":
            if node.op != "Add" or not self._is_number(operands[1], term.attributes[0], term.type.dtype):
                return False
            operands = operands[:1]
        elif node.head(tensor) != (term.head, term.attributes):
            return False
        if len(operands) != len(term.operands):
            return False
        if tensor in self.plan.types and self.plan.types[tensor] != term.type:
            return False
        return all(
            self.same(name, operand, leaves) for name, operand in zip(operands, term.operands, strict=True)
        )

    def _is_number(self, name: str, value: float, dtype: str) -> bool:
        stored = self.plan.stored.get(name)
        if stored is None or list(stored.dims) or _ELEMENT.get(stored.data_type) != dtype:
            return False
        if dtype == "bfloat16":
            return stored.raw_data == _bfloat16(value)
        return stored.raw_data == struct.pack(f"<{_UNPACK[dtype]}", value)

    def label(self, tensor: str, label: Label) -> None:
        node = self.plan.nodes[self.plan.made_by[tensor]].name
        self._check_type(tensor, label, node)
        self.labels[tensor] = label


def _bfloat16(value: float) -> bytes:
    """Rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


# ------------------------------------------------------------------------------------------------ replay


class Replay(Checker):
    """The linear pass over a plan with its derivation."""

    def __init__(self, logical: Program, plan: Program) -> None:
        super().__init__(logical, plan)
        derivation = plan.derivation
        try:
            if derivation["version"] != FORMAT or len(derivation["nodes"]) != len(plan.nodes):
                raise Malformed("the derivation is of another version or another plan")
            self.choices = [
                [[str(name) for name in axis] for axis in choice] for choice in derivation["choices"]
            ]
            self.entries = derivation["nodes"]
            texts = {str(k): str(v) for k, v in derivation["rules"].items()}
            self.book = Rules(texts, map(str, derivation["facts"]), plan.mesh)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise Malformed(f"no derivation, or a damaged one ({type(error).__name__}: {error})") from None

    def run(self) -> None:
        for port in self.plan.inputs:
            self.port(port)
        for node, entries in zip(self.plan.nodes, self.entries, strict=True):
            if not isinstance(entries, list):
                raise Malformed(f"node {node.name!r}: damaged derivation")
            for entry in entries:
                self.node(node, entry)
        self.outputs()

    def node(self, node: Node, entry: Any) -> None:
        """The end of a program: the node computes what the entry says, by the rules of the entry's choices."""
        try:
            tensor, output, layout, number = (
                str(entry[0]),
                str(node.outputs[entry[1]]),
                parse_layout(entry[2]),
                entry[3],
            )
            choices = self.choices[number]
            if len(layout) != len(self.mesh) or len(choices) != len(self.mesh) or number < 0:
                raise Malformed(f"node {node.name!r}: the derivation is of another mesh")
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise Malformed(f"node {node.name!r}: damaged derivation ({error})") from None
        label = (tensor, layout)
        if tensor not in self.logical.types:
            raise Refuted(f"node {node.name!r}: the model has no tensor {tensor!r}", node.name)
        program, leaves = self._derived(node, label, number)
        if not self.same(output, program, leaves):
            expected = ", ".join(dict.fromkeys(map(say, leaves.values())))
            found = ", ".join(say(self.labels.get(name)) for name in node.inputs)
            raise Refuted(
                f"node {node.name!r} ({node.op}): expected {say(label)}, by {', '.join(self._names(number))} from "
                f"{expected}: {describe(program)}; found {node.op} {dict(node.attributes)} of {found}",
                node.name, say(label), found,
            )  # fmt: skip
        self.label(output, label)

    def _names(self, number: int) -> list[str]:
        return [name.partition("#")[0] for axis in self.choices[number] for name in axis]

    def _derived(self, node: Node, label: Label, number: int) -> tuple[Term, dict[int, Label]]:
        moved = self.labels.get(node.inputs[0]) if len(node.inputs) == 1 else None
        if moved and moved[0] == label[0]:
            key = (self.logical.types[label[0]], moved[1], label[1], number)
            if key not in self._programs:
                found = list(self.conversion_of(label[0], moved[1], label[1], self._picked(number)))
                self._programs[key] = self._only(node, label, [(p, ()) for p, _ in found], number)
            return self._programs[key][0], {0: moved}
        term, operands = self.logical.term(label[0])
        key = (term, label[1], number)
        if key not in self._programs:
            found = [(p, reads) for p, reads, _ in self.program_of(term, label[1], self._picked(number), {})]
            self._programs[key] = self._only(node, label, found, number)
        program, layouts, _ = self._programs[key]
        return program, {i: (operands[i], layout) for i, layout in enumerate(layouts)}

    def _only(
        self, node: Node, label: Label, found: list[tuple[Term, tuple[Layout, ...]]], number: int
    ) -> tuple[Term, tuple[Layout, ...], tuple[str, ...]]:
        names = self._names(number)
        if len(found) != 1:
            raise Refuted(
                f"node {node.name!r} ({node.op}): expected {say(label)}, which does not come of "
                f"{', '.join(names) or 'no rule'}",
                node.name,
                say(label),
            )
        self.rules.update(names)
        return (*found[0], tuple(names))

    def _picked(self, number: int) -> Callable[[int], Pick]:
        """The choices of the derivation, each taken once and in order."""

        def of_axis(i: int) -> Pick:
            names = iter(self.choices[number][i])

            def pick(term: Term, axis: str, placement: Placement) -> Iterator[tuple[str, Term]]:
                choice = next(names, None)
                if choice is None:
                    return
                name, _, variant = choice.partition("#")
                if variant and not variant.isdecimal():
                    raise Malformed(f"{choice!r} is no choice")
                made = self.book.expand(name, axis, placement, term)
                if int(variant or 0) < len(made):
                    yield choice, made[int(variant or 0)]

            return pick

        return of_axis


def describe(term: Term) -> str:
    """A program in one line."""
    if term.head == "Leaf":
        return f"operand {term.attributes[0]}"
    parts = [*map(str, term.attributes), *map(describe, term.operands)]
    return f"{term.head}({', '.join(parts)})"


def check(logical: bytes, plan: bytes) -> Finding:
    """Replay a plan's derivation; never raises for what is in the files."""
    try:
        replay = Replay(read_program(logical), read_program(plan))
        replay.run()
    except Refuted as refuted:
        return refuted.finding
    except (Malformed, Unsupported) as error:
        return Finding(False, str(error))
    except RecursionError:
        return Finding(False, "the derivation is nested too deep")
    rules = tuple(sorted(replay.rules))
    return Finding(
        True,
        f"{len(replay.plan.nodes)} nodes derived by {len(rules)} rules",
        rules=rules,
        nodes=len(replay.plan.nodes),
    )


def rule_digest(text: str) -> str:
    """SHA-256 of a rule's text, blanks apart."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
