"""What the command line prints.

    say(text)            a line on standard error
    echo(*parts)         tables and lines on standard output
    echo_json(value)     one JSON document there
    Spinner(text)        what is being done, on standard error
On a terminal progress is seen at once, elsewhere there are few lines of it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

QUIET_SECONDS, REPEAT_SECONDS = 2.0, 10.0  # of progress in plain lines: the first, and between two


def say(text: str) -> None:
    """A line on standard error, as it is."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def echo(*parts: Table | str) -> None:
    """Tables and lines on standard output: folded to a terminal's width, whole elsewhere."""
    width = None if sys.stdout.isatty() else 1000
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def echo_json(value: Any) -> None:
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """Without infinities and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Spinner:
    """A spinner on a terminal; plain lines, few and late, elsewhere."""

    def __init__(self, first: str) -> None:
        self.start = self.said = time.monotonic()
        self.quiet = QUIET_SECONDS
        self.status = Console(stderr=True, markup=False).status(first) if sys.stderr.isatty() else None

    def __call__(self, text: str) -> None:
        if self.status is not None:
            self.status.update(text)
        elif time.monotonic() - self.said > self.quiet:
            self.said, self.quiet = time.monotonic(), REPEAT_SECONDS
            say(f"{time.monotonic() - self.start:5.0f} s  {text}")

    def __enter__(self) -> Spinner:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is not None:
            self.status.stop()
