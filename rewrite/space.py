"""What saturation finds: kinds of operators, their strategies, and the moves between layouts of a tensor type."""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh import Layout
from ..program import TensorType, UserError
from .terms import Head, leaf, term


@dataclass(frozen=True)
class Kind:
    """An operator up to its operands' identity: what it does to operands of these types."""

    head: Head
    operands: tuple[TensorType, ...]
    result: TensorType

    @property
    def text(self) -> str:
        return term(self.head, tuple(leaf(i, type_) for i, type_ in enumerate(self.operands)))


@dataclass(frozen=True)
class Step:
    """One local operation of a strategy; an operand is ~i for the kind's operand i, or an earlier step's index."""

    head: Head
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Strategy:
    """Local steps (the last is the result) that read operands and leave the result in given layouts."""

    out: int
    reads: tuple[int, ...]
    steps: tuple[Step, ...]
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Move:
    """A collective from one layout of a tensor to another."""

    source: int
    target: int
    head: Head
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """All that the saturated e-graph offers; layouts and strategies in a canonical order."""

    layouts: dict[TensorType, tuple[Layout, ...]]
    moves: dict[TensorType, tuple[Move, ...]]
    strategies: dict[Kind, tuple[Strategy, ...]]
    enodes: int
    eclasses: int
    stopped_by: str  # "fixpoint", "nodes" or "time"

    @property
    def saturated(self) -> bool:
        return self.stopped_by == "fixpoint"


class RuleConflict(UserError):
    """Saturation found that a rule is wrong; `rules` are those that made the offending e-nodes."""

    def __init__(self, problem: str, rules: tuple[str, ...] = ()) -> None:
        super().__init__(problem, rules)
        self.problem, self.rules = problem, rules

    def __str__(self) -> str:
        blame = f"rule {' or '.join(self.rules)}: " if self.rules else ""
        return f"{blame}{self.problem}"
