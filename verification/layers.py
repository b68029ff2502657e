"""The three layers of verification together: the rules that a plan rests on, the plan's derivation, and numbers.

verify(graph, plan, book, state) -> Verification

proved    every tensor of the plan is derived by rules, and those are proved
tested    the plan's numbers agree with the model's, and nothing speaks against it
refuted   an output differs, or is derived in a layout other than the declared one; or the bound's certificate fails
unknown   the numbers say nothing, and the derivation does not hold or rests on rules that are merely tested
"""

from __future__ import annotations

from dataclasses import dataclass

from ..planfile import Plan
from ..rewrite.graph import Graph, tensor_source
from ..rules import RuleBook
from .bound import BoundFinding, check_bound
from .numbers import Comparison, compare
from .plans import PlanFinding, State, check_plan


@dataclass(frozen=True)
class Verification:
    """The verdict with what each layer says; `first_divergence` is the first bad node or tensor that is known."""

    verdict: str
    reason: str
    plan: PlanFinding
    numbers: Comparison
    bound: BoundFinding | None = None  # of the certificate, if one was given

    @property
    def first_divergence(self) -> str | None:
        return self.numbers.first_divergence or (
            None if self.verdict in ("proved", "tested") else self.plan.node
        )


def verify(
    graph: Graph,
    plan: Plan,
    book: RuleBook,
    state: State = (),
    *,
    seed: int = 0,
    bound_certificate: bytes | None = None,
) -> Verification:
    """Check a plan against the graph that it was made of; `state` is the training step's, if it is one."""
    derived = check_plan(graph, plan, book, state)
    numbers = compare(graph, plan, seed=seed, source=tensor_source(graph))
    bound = None if bound_certificate is None else check_bound(bound_certificate, plan.metadata)
    return Verification(*_verdict(derived, numbers, bound), derived, numbers, bound)


def _verdict(plan: PlanFinding, numbers: Comparison, bound: BoundFinding | None) -> tuple[str, str]:
    if numbers.verdict == "refuted":
        return "refuted", numbers.reason
    if plan.verdict == "refuted":
        return "refuted", plan.reason
    if bound is not None and not bound.holds:
        return "refuted", bound.reason
    return numbers.verdict, numbers.reason
