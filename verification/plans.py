"""Layer 2 of verification: what every tensor of a plan is, rule by rule.

    derive(graph, plan, book, state)       the derivation that a plan carries (docs/plan-format.md), found by search
    check_plan(graph, plan, book, state)   a `PlanFinding`: the derivation replayed or, where there is none or it does
                                           not hold (an edited plan, one made by others), searched for

Searching is bounded by the rules: for the node at hand, the logical operator over the tensors that it reads, or over
those at the far end of nodes that mean nothing by themselves (a softmax across shards), is placed axis by axis by the
rules that know it, the operands' layouts being known. What the plan calls a tensor, `h@S0,R`, says what to try first
and nothing else. Everything found is established by the same steps as in the replay (verification/certificate.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..planfile import Plan, to_bytes
from ..rewrite.graph import Graph
from ..rewrite.kinds import applications
from ..rewrite.terms import adjoints_in
from ..rules import RuleBook, with_adjoints
from .certificate import (
    FORMAT,
    PARTIAL,
    REPLICATE,
    Checker,
    Finding,
    Label,
    Layout,
    Malformed,
    Node,
    Pick,
    Placement,
    Program,
    Refuted,
    Rules,
    Term,
    Unsupported,
    check,
    format_layout,
    local_type,
    parse_layout,
    read_program,
)
from .logical import logical_bytes

State = tuple[tuple[str, str], ...]
MOST_LAYOUTS = 4096  # of one tensor, to try


@dataclass(frozen=True)
class PlanFinding:
    """`verdict` is "derived", "refuted" (an output is another tensor, or in another layout) or "unknown".

    `suspects` are the nodes, in order, that are not what they are called or nothing known at all.
    """

    verdict: str
    reason: str
    rules: tuple[str, ...] = ()
    node: str | None = None
    expected: str | None = None
    found: str | None = None
    suspects: tuple[str, ...] = ()


def rule_texts(graph: Graph, book: RuleBook) -> tuple[dict[str, str], list[str]]:
    """The parallel rules for a graph's operators by name, and the facts of the relations that rule files declare."""
    parts, _ = applications(graph)
    book = with_adjoints(book, adjoints_in(part.kind.head for part in parts))
    texts = {name: book.rules[name].text for name in book.named("parallel")}
    return texts, list(book.facts)


def derive(graph: Graph, plan: Plan, book: RuleBook, state: State = ()) -> Mapping[str, Any] | None:
    """The derivation of a plan; None if a node is not reached by the rules."""
    search = _search(graph, plan, book, state)
    try:
        search.run()
    except (Refuted, Malformed, Unsupported):
        return None
    return search.derivation()


def check_plan(graph: Graph, plan: Plan, book: RuleBook, state: State = ()) -> PlanFinding:
    """Replay the plan's derivation; where it does not hold, search for another."""
    logical = logical_bytes(graph, state)
    replayed = check(logical, to_bytes(plan)) if plan.derivation else None
    if replayed and replayed.holds:
        if foreign := _foreign(plan, graph, book):
            reason = (
                f"derived by rules that are not here ({', '.join(foreign)}); name their files with --rules"
            )
            return PlanFinding("unknown", reason, replayed.rules)
        return PlanFinding("derived", replayed.reason, replayed.rules)
    search = _search(graph, plan, book, state)
    try:
        search.run()
    except Refuted as refuted:
        return _failed("refuted", refuted.finding, replayed, search)
    except (Malformed, Unsupported) as error:
        return _failed("unknown", Finding(False, str(error)), replayed, search)
    return PlanFinding(
        "derived",
        f"{len(plan.nodes)} nodes derived by {len(search.rules)} rules",
        tuple(sorted(search.rules)),
    )


def _foreign(plan: Plan, graph: Graph, book: RuleBook) -> list[str]:
    """The rules and facts that a derivation brings along and that the book does not have, word for word."""
    texts, facts = rule_texts(graph, book)
    assert plan.derivation
    rules = [name for name, text in plan.derivation["rules"].items() if texts.get(name) != text]
    return rules or sorted(set(plan.derivation["facts"]) - set(facts))


def _failed(verdict: str, finding: Finding, replayed: Finding | None, search: Search) -> PlanFinding:
    """Of a derivation that does not hold the first bad node is known exactly; else it is the first suspect."""
    suspects = tuple(search.suspects())
    if replayed and not replayed.holds and replayed.node:
        suspects = tuple(dict.fromkeys((replayed.node, *suspects)))
        finding = replayed
    elif suspects and not finding.node:
        finding = replace(finding, node=suspects[0])
    if search.unlabelled:
        verdict = "unknown"
    suspects = suspects or ((finding.node,) if finding.node else ())
    return PlanFinding(verdict, finding.reason, (), finding.node, finding.expected, finding.found, suspects)


def _search(graph: Graph, plan: Plan, book: RuleBook, state: State) -> Search:
    texts, facts = rule_texts(graph, book)
    bare = replace(plan, derivation=None)
    logical = read_program(logical_bytes(graph, state))
    return Search(logical, read_program(to_bytes(bare)), Rules(texts, facts, logical_axes(plan)))


def logical_axes(plan: Plan) -> list[tuple[str, int]]:
    return [(axis.name, axis.size) for axis in plan.mesh]


class Search(Checker):
    """Labels for every node of a plan without a derivation."""

    def __init__(self, logical: Program, plan: Program, book: Rules) -> None:
        super().__init__(logical, plan)
        self.book = book
        self.entries: list[list[Any]] = [[] for _ in plan.nodes]
        self.choices: dict[str, int] = {}
        self.kept: list[list[list[str]]] = []
        self.inner: set[str] = set()  # tensors inside a program that is labelled
        self.unlabelled: list[int] = []  # nodes without a label, which nothing labelled is made of
        self._found: dict[Any, list[tuple[Term, tuple[Layout, ...], list[list[str]]]]] = {}
        self._readers: dict[frozenset[str], list[str]] = {}
        for node in logical.nodes:
            for tensor in node.outputs:
                self._readers.setdefault(frozenset(node.inputs), []).append(tensor)

    def run(self) -> None:
        """Label what can be; Refuted at the first input or output that is not the model's."""
        wrong: list[Refuted] = []
        for port in self.plan.inputs:
            try:
                self.port(port)
            except Refuted as refuted:
                wrong.append(refuted)
        for i, node in enumerate(self.plan.nodes):
            for k, output in enumerate(node.outputs):
                if found := self.of_output(node, output):
                    label, names, program = found
                    self.label(output, label)
                    self._note(output, program)
                    self.rules.update(name.partition("#")[0] for axis in names for name in axis)
                    self.entries[i].append([label[0], k, format_layout(label[1]), self._number(names)])
        for i, node in enumerate(self.plan.nodes):
            if not any(name in self.labels or name in self.inner for name in node.outputs):
                self.unlabelled.append(i)
        if wrong:
            raise wrong[0]
        self.outputs()

    def derivation(self) -> Mapping[str, Any]:
        """What `certificate.Replay` replays."""
        rules = {name: self.book.texts[name] for name in sorted(self.rules)}
        facts = [_stated(relation, row) for relation, rows in sorted(self.book.facts.items()) for row in rows]
        return {
            "version": FORMAT,
            "rules": rules,
            "facts": facts,
            "choices": self.kept,
            "nodes": self.entries,
        }

    def suspects(self) -> Iterator[str]:
        """Nodes that are not what they are called."""
        for i, node in enumerate(self.plan.nodes):
            for output in node.outputs:
                called, label = self.called(output), self.labels.get(output)
                if (called and label != called) or (i in self.unlabelled and not called):
                    yield node.name
                    break

    def called(self, tensor: str) -> Label | None:
        """What a tensor's name says: `h@S0,R`, with `~1` behind a second copy."""
        name, _, rest = tensor.rpartition("@")
        try:
            layout = parse_layout(rest.partition("~")[0])
        except Malformed:
            return None
        return (name, layout) if name in self.logical.types and len(layout) == len(self.mesh) else None

    # -------------------------------------------------------------------------------- one node

    def of_output(self, node: Node, output: str) -> tuple[Label, list[list[str]], Term] | None:
        """What a node computes, the choices that say so, and its program."""
        moved = self.labels.get(node.inputs[0]) if len(node.inputs) == 1 else None
        if moved:
            for target in self._targets(output, moved):
                for program, names in self.conversion_of(moved[0], moved[1], target, self._all):
                    if self.same(output, program, {0: moved}):
                        return (moved[0], target), names, program
        leaves = self._leaves(node)
        if leaves is None:
            return None
        for label in self._candidates(output, leaves):
            term, operands = self.logical.term(label[0])
            for reads in self._reads(operands, leaves, node):
                for program, layouts, names in self._programs_of(term, label[1], reads):
                    read = {k: (operands[k], layout) for k, layout in enumerate(layouts)}
                    if self.same(output, program, read):
                        return label, names, program
        return None

    def _targets(self, output: str, moved: Label) -> Iterator[Layout]:
        """Layouts that one collective can reach, that of the tensor's name first."""
        called = self.called(output)
        tried = [called[1]] if called and called[0] == moved[0] else []
        rank = len(self.logical.types[moved[0]].shape)
        for i in range(len(self.mesh)):
            for placement in _placements(rank):
                if placement != moved[1][i]:
                    tried.append((*moved[1][:i], placement, *moved[1][i + 1 :]))
        yield from dict.fromkeys(tried)

    def _leaves(self, node: Node) -> dict[str, Label] | None:
        """The labelled tensors that a node is made of, through nodes without a label; None if there are others."""
        found: dict[str, Label] = {}
        todo = list(node.inputs)
        while todo:
            tensor = todo.pop()
            if tensor in self.labels:
                found[tensor] = self.labels[tensor]
            elif tensor in self.plan.made_by:
                todo += self.plan.nodes[self.plan.made_by[tensor]].inputs
            elif tensor not in self.plan.stored:
                return None
        return found

    def _candidates(self, output: str, leaves: Mapping[str, Label]) -> Iterator[Label]:
        """What might be computed of these tensors: what the name says, then any layout that fits the local type."""
        tensors = self._readers.get(frozenset(label[0] for label in leaves.values()), [])
        called = self.called(output)
        if called and called[0] in tensors:
            yield called
        local = self.plan.types.get(output)
        for tensor in sorted(tensors, key=lambda t: not (called and t == called[0])):
            type_ = self.logical.types[tensor]
            layouts = itertools.product(*[list(_placements(len(type_.shape)))] * len(self.mesh))
            for layout in itertools.islice(layouts, MOST_LAYOUTS):
                fits = local_type(type_, self.mesh, layout)
                if fits is not None and (local is None or fits == local) and (tensor, layout) != called:
                    yield tensor, layout

    def _reads(
        self, operands: Sequence[str], leaves: Mapping[str, Label], node: Node
    ) -> Iterator[dict[int, Layout]]:
        """How the operands are read: as the node reads them or, through other nodes, in any of the labels there are."""
        direct = [self.labels.get(name) for name in node.inputs]
        if [label and label[0] for label in direct] == list(operands):
            yield {k: label[1] for k, label in enumerate(direct) if label}
            return
        ways = [
            [label[1] for label in dict.fromkeys(leaves.values()) if label[0] == name] for name in operands
        ]
        for layouts in itertools.product(*ways):
            yield dict(enumerate(layouts))

    def _programs_of(
        self, term: Term, layout: Layout, reads: dict[int, Layout]
    ) -> list[tuple[Term, tuple[Layout, ...], list[list[str]]]]:
        key = (term, layout, tuple(sorted(reads.items())))
        if key not in self._found:
            self._found[key] = list(self.program_of(term, layout, self._all, reads))
        return self._found[key]

    def _all(self, axis: int) -> Pick:
        """Every rule that places a term, in the order of the rule files."""

        def pick(term: Term, axis: str, placement: Placement) -> Iterator[tuple[str, Term]]:
            names = self.book.moving if term.head == "Leaf" else self.book.of_head.get(term.head, ())
            for name in names:
                try:
                    made = self.book.expand(name, axis, placement, term)
                except Unsupported as error:
                    self.book.skipped[name] = str(error)
                    continue
                for k, result in enumerate(made):
                    yield (f"{name}#{k}" if k else name), result

        return pick

    def _note(self, tensor: str, program: Term) -> None:
        """The nodes inside a program have their meaning from it."""
        if program.head == "Leaf":
            return
        self.inner.add(tensor)
        for name, operand in zip(
            self.plan.nodes[self.plan.made_by[tensor]].inputs, program.operands, strict=False
        ):
            self._note(name, operand)

    def _number(self, names: list[list[str]]) -> int:
        number = self.choices.setdefault(repr(names), len(self.kept))
        if number == len(self.kept):
            self.kept.append(names)
        return number


def _placements(rank: int) -> Iterator[Placement]:
    yield from (REPLICATE, PARTIAL)
    yield from (("Shard", d) for d in range(rank))


def _stated(relation: str, row: Sequence[Any]) -> str:
    """A fact as rule files state it."""
    items = [f'"{item}"' if isinstance(item, str) else str(item) for item in row]
    return f"({' '.join([relation, *items])})"
