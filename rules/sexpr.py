"""S-expressions with places: enough of a reader to know what a rule file says before egglog sees it.

`read(text)` gives the top-level forms. Every `Form` is an atom (`items is None`) or a list, and knows its line,
its column and its text. Nesting is bounded, so a hostile file costs no more than its length.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 200
_TOKEN = re.compile(r'\s+|;[^\n]*|(?P<open>\()|(?P<close>\))|(?P<atom>"(?:[^"\\]|\\.)*"|[^\s();"]+)', re.S)


class SyntaxProblem(Exception):
    """Where and why a text is no sequence of s-expressions."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.column, self.reason = line, column, reason


@dataclass(frozen=True)
class Form:
    """An atom (`items is None`) or a parenthesised list, at a line and column (from 1)."""

    text: str
    line: int
    column: int
    items: tuple[Form, ...] | None = None

    @property
    def is_list(self) -> bool:
        return self.items is not None

    @property
    def children(self) -> tuple[Form, ...]:
        """The items of a list; an atom has none."""
        return self.items or ()

    @property
    def head(self) -> str:
        """The first atom of a list, or the empty string."""
        return self.items[0].text if self.items and not self.items[0].is_list else ""

    def walk(self) -> Iterator[Form]:
        """This form and every form inside it, outermost first."""
        yield self
        for item in self.children:
            yield from item.walk()

    def option(self, key: str) -> Form | None:
        """The form that follows the keyword `key` in this list."""
        pairs = itertools.pairwise(self.children)
        return next((value for keyword, value in pairs if keyword.text == key), None)


def read(text: str) -> list[Form]:
    """The top-level forms of `text`; raises SyntaxProblem at the first place that is not one."""
    top: list[Form] = []
    open_lists: list[tuple[int, int, int, list[Form]]] = []  # offset, line, column, items so far
    position, line, line_start = 0, 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        column = position - line_start + 1
        if not match:
            raise SyntaxProblem(line, column, "a string is not closed")
        current = open_lists[-1][3] if open_lists else top
        if match["open"]:
            if len(open_lists) >= MAX_DEPTH:
                raise SyntaxProblem(line, column, f"lists are nested more than {MAX_DEPTH} deep")
            open_lists.append((position, line, column, []))
        elif match["close"]:
            if not open_lists:
                raise SyntaxProblem(line, column, "')' closes nothing")
            start, at_line, at_column, items = open_lists.pop()
            outer = open_lists[-1][3] if open_lists else top
            outer.append(Form(text[start : match.end()], at_line, at_column, tuple(items)))
        elif match["atom"]:
            current.append(Form(match["atom"], line, column))
        newlines = text.count("\n", position, match.end())
        if newlines:
            line += newlines
            line_start = text.rindex("\n", position, match.end()) + 1
        position = match.end()
    if open_lists:
        _, at_line, at_column, _ = open_lists[-1]
        raise SyntaxProblem(at_line, at_column, "'(' is not closed")
    return top
