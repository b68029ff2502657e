"""Text that every Python has: the docstrings of its standard library, as batches of bytes to learn.

    text()              some 600 kB of English about Python, in ASCII
    batches(shapes)     endless random pieces of it: input_ids, and labels that are one byte further

Needs nothing but NumPy, so that it serves as data for the command line as well: --data examples/docstrings.py:batches
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MODULES = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "codecs", "collections", "configparser", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email.message", "enum", "fileinput",
    "fractions", "functools", "gettext", "glob", "heapq", "hmac", "html", "http.client", "inspect", "io", "ipaddress",
    "itertools", "json", "locale", "logging", "math", "mimetypes", "numbers", "operator", "os", "pathlib", "pickle",
    "platform", "pprint", "queue", "random", "re", "sched", "secrets", "selectors", "shelve", "shlex", "shutil",
    "socket", "statistics", "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time",
    "tokenize", "trace", "traceback", "types", "unittest", "urllib.parse", "uuid", "weakref", "zipfile",
)  # fmt: skip


def text() -> bytes:
    """What the modules, their functions and classes, and the methods of those say of themselves."""
    said: dict[str, None] = {}  # in order, each once
    for name in MODULES:
        module = importlib.import_module(name)
        for thing in (module, *_members(module)):
            said.update(dict.fromkeys(filter(None, map(inspect.getdoc, (thing, *_members(thing))))))
    return "\n\n".join(said).encode("ascii", "ignore")


def _members(thing: object) -> list[Any]:
    """Public functions and classes of a module or class, by name."""
    if not (inspect.ismodule(thing) or inspect.isclass(thing)):
        return []
    named = sorted((name, value) for name, value in vars(thing).items() if not name.startswith("_"))
    return [value for _, value in named if inspect.isroutine(value) or inspect.isclass(value)]


def batches(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the shape that input_ids has."""
    examples, context = shapes["input_ids"]
    data, rng = np.frombuffer(text(), np.uint8).astype(np.int64), np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - context, examples)
        pieces = data[starts[:, None] + np.arange(context + 1)]
        yield {"input_ids": pieces[:, :-1], "labels": pieces[:, 1:]}
