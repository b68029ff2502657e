"""Parallel rules of operators' adjoints, derived from the operators' own.

For every operator constructor `Op` two more:
  (Vjp-Op i attributes.. operands.. g)            the cotangent of operand i, given that of the result, g
  (Adjoint-Op i shape attributes.. others.. g)    the same where Op is linear in operand i, which is then not read:
                                                  `shape` is its (local) shape, `others` the remaining operands
A parallel rule  (At ax q (Op x..)) = (Op (At ax p x)..)  says that each coordinate computes its part of the result from
its parts of the operands. Transposing that statement gives the adjoint's rule, with p the placement of operand i:

    q          p           reads g as   leaves the cotangent as
    Shard d    Shard c     Shard d      Shard c       parts of the result depend on parts of the operand
    Shard d    Replicate   Shard d      Partial       every part of the result depends on all of it
    Partial    Shard c     Replicate    Shard c
    Partial    Replicate   Replicate    Partial
    Partial    Partial     Replicate    Replicate     linear in the operand

These are the facts `cotangent`; no operator needs a parallel rule for its gradient. Rules that put steps between an
operator and its operands (a softmax across shards) have no derived rule, unless operand i itself is merely placed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from .loader import Constructor, Rule, RuleBook, as_rules, declared, generated
from .sexpr import Form, read

VJP, ADJOINT = "Vjp-", "Adjoint-"
MOST_DIMENSIONS = 8
# What no gradient passes through: collectives, which are placed only after gradients were taken, and index arithmetic.
_NO_ADJOINT = frozenset(
    {"AllReduce", "AllGather", "ReduceScatter", "AllToAll", "LocalSlice", "Include", "LocalIndices", "Shift"}
)


def with_adjoints(book: RuleBook, only: Collection[tuple[str, int]]) -> RuleBook:
    """The book with the adjoints in `only`, such as ("Adjoint-MatMul", 1) for operand 1, and their parallel rules."""
    names = {name for name, _ in only}
    operators = [c for c in book.operators if c.name not in _NO_ADJOINT and c.operands]
    added = [c for of in operators for c in (vjp_constructor(of), adjoint_constructor(of)) if c.name in names]
    if not added:
        return book
    statements: list[tuple[str, str]] = [("", text) for c in added for text in declared(c)]
    statements += [("", "(relation cotangent (Placement Placement Placement Placement))"), *_cotangents()]
    rules = dict(book.rules)
    derived = [pair for c in added for pair in (*generated(c), *_partial_cotangent(c))]
    for name in book.named("parallel"):
        for form in as_rules(read(book.rules[name].text)[0]):
            derived += _derived(form, name, {c.name: c for c in operators}, only)
    for name, text in derived:
        statements.append((name, text))
        if name:
            rules[name] = Rule(name, "parallel", "derived", text)
    constructors = {**book.constructors, **{c.name: c for c in added}}
    return replace(book, rules=rules, constructors=constructors, statements=(*book.statements, *statements))


def vjp_constructor(of: Constructor) -> Constructor:
    return Constructor(VJP + of.name, ("i64", *of.sorts, "Tensor"))


def adjoint_constructor(of: Constructor) -> Constructor:
    attributes = [sort for sort in of.sorts if sort != "Tensor"]
    return Constructor(ADJOINT + of.name, ("i64", "Ints", *attributes, *["Tensor"] * len(of.operands)))


def _cotangents() -> list[tuple[str, str]]:
    """The table of the module's header: result, operand, reading of g, cotangent."""
    rows = [
        ("(Partial)", "(Replicate)", "(Replicate)", "(Partial)"),
        ("(Partial)", "(Partial)", "(Replicate)", "(Replicate)"),
    ]
    shards = [f"(Shard {d})" for d in range(MOST_DIMENSIONS)]
    rows += [(d, "(Replicate)", d, "(Partial)") for d in shards]
    rows += [(d, c, d, c) for d in shards for c in shards]
    rows += [("(Partial)", c, "(Replicate)", c) for c in shards]
    return [("", f"(cotangent {' '.join(row)})") for row in rows]


def _partial_cotangent(constructor: Constructor) -> list[tuple[str, str]]:
    """An adjoint is linear in g, its last operand."""
    variables = [f"v{i}" for i in range(len(constructor.sorts))]
    last = len(variables) - 1
    placed = [
        f"(At ax ({'Partial' if i == last else 'Replicate'}) {v})" if i in constructor.operands else v
        for i, v in enumerate(variables)
    ]
    name = f"partial-{constructor.name}"
    return [
        (
            name,
            f"(rule ((= made (At ax (Partial) ({constructor.name} {' '.join(variables)})))) "
            f"((union made ({constructor.name} {' '.join(placed)})) "
            f'({constructor.name}-by "{name}" {" ".join(placed)})) '
            f':ruleset parallel :name "{name}")',
        )
    ]


@dataclass(frozen=True)
class _Pushed:
    """A rule (At ax q (Op before..)) = (Op after..) taken apart; texts of the arguments and conditions."""

    operator: Constructor
    axis: str
    result: str  # q
    before: tuple[str, ...]
    after: tuple[Form, ...]
    conditions: str
    lets: str


def _derived(
    rule: Form, name: str, operators: dict[str, Constructor], only: Collection[tuple[str, int]]
) -> Iterator[tuple[str, str]]:
    pushed = _pushed(rule, operators)
    if pushed is None or pushed.result == "(Replicate)":  # every operator has that rule for itself
        return
    positions = pushed.operator.operands
    for operand, position in enumerate(positions):
        placed = pushed.after[position]
        if placed.head != "At" or placed.children[3].text != pushed.before[position]:
            continue
        if any("At" not in (inner.head for inner in pushed.after[other].walk()) for other in positions):
            continue
        placement = placed.children[2]
        if (VJP + pushed.operator.name, operand) in only:
            yield _vjp_rule(pushed, operand, placement, name)
        if (ADJOINT + pushed.operator.name, operand) in only:
            yield from _adjoint_rules(pushed, operand, placement, name)


def _pushed(rule: Form, operators: dict[str, Constructor]) -> _Pushed | None:
    """The parts of a rule of this form, or None: the match may be inline or name the operator's class."""
    conditions, actions = rule.children[1:3]
    unions = [a for a in actions.children if a.head == "union"]
    named = {
        c.children[1].text: c.children[2]
        for c in conditions.children
        if c.head == "=" and len(c.children) == 3
    }
    for variable, term in named.items():
        if term.head != "At" or len(unions) != 1 or unions[0].children[1].text != variable:
            continue
        _, axis, result, inner = term.children
        match = named.get(inner.text, inner)
        after = unions[0].children[2]
        operator = operators.get(match.head)
        if operator is None or after.head != match.head or len(match.children) != len(operator.sorts) + 1:
            continue
        lets = " ".join(a.text for a in actions.children if a.head == "let")
        before = tuple(argument.text for argument in match.children[1:])
        return _Pushed(
            operator, axis.text, result.text, before, after.children[1:], conditions.text[1:-1], lets
        )
    return None


# Variables of the derived rules start with `of-`, so that they meet none of the rule they come from.


def _vjp_rule(pushed: _Pushed, operand: int, placement: Form, name: str) -> tuple[str, str]:
    own = VJP + pushed.operator.name
    label = f"{name}-vjp-{operand}"
    after = " ".join(form.text for form in pushed.after)
    made = f"({own} {operand} {after} (At {pushed.axis} of-q of-y))"
    match = f"({own} {operand} {' '.join(pushed.before)} of-y)"
    return label, _rule(label, pushed, placement.text, match, made, own)


def _adjoint_rules(pushed: _Pushed, operand: int, placement: Form, name: str) -> Iterator[tuple[str, str]]:
    """One rule for a sharded operand, whose local size must be set, one for a whole one (a literal needs one)."""
    own = ADJOINT + pushed.operator.name
    position = pushed.operator.operands[operand]
    others = [p for p in pushed.operator.operands if p != position]
    attributes = [i for i in range(len(pushed.before)) if i not in pushed.operator.operands]
    order = [*attributes, *others]
    before = " ".join(pushed.before[i] for i in order)
    after = " ".join(pushed.after[i].text for i in order)
    literal = placement.head if placement.items is not None else ""
    for kind in ("shard", "whole"):
        if literal and (literal == "Shard") != (kind == "shard"):
            continue
        size, conditions = "of-size", ""
        if kind == "shard":
            size = "(vec-set of-size of-cut (/ (vec-get of-size of-cut) of-n))"
            conditions = f"(= (Shard of-cut) {placement.text}) (= of-n (axis-size {pushed.axis}))"
        elif not literal:
            conditions = f"(= (Replicate) {placement.text})"
        # The operand is not read: only its shape tells which application of the operator is meant.
        whole = f"({pushed.operator.name} {' '.join(pushed.before)})"
        conditions += f" (= of-size (shape {pushed.before[position]})) (= (shape of-y) (shape {whole}))"
        label = f"{name}-adjoint-{operand}" + ("" if literal else f"-{kind}")
        match = f"({own} {operand} of-size {before} of-y)"
        made = f"({own} {operand} {size} {after} (At {pushed.axis} of-q of-y))"
        yield label, _rule(label, pushed, placement.text, match, made, own, conditions)


def _rule(
    label: str, pushed: _Pushed, placement: str, match: str, made: str, own: str, extra: str = ""
) -> str:
    conditions = (
        f"{pushed.conditions} (= of-term {match}) (cotangent {pushed.result} {placement} of-q of-p) "
        f"(= of-made (At {pushed.axis} of-p of-term)) {extra}"
    )
    record = f'({own}-by "{label}" {re.sub(f"^.{re.escape(own)} ", "", made)}'
    actions = f"{pushed.lets} (union of-made {made}) {record}"
    return f'(rule ({conditions}) ({actions}) :ruleset parallel :name "{label}")'
