"""Saturation in a process of its own, which can be killed: egglog has no time limit and no memory limit.

`saturate_in_worker(...)` takes and gives what `saturation.saturate` does, `rewrite_in_worker(...)` what
`algebra.rewrite` does. The child is `python -m` this module; it reads a pickled request from standard input and
answers with pickled messages on standard output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..mesh import Mesh
from ..program import TensorType, UserError
from ..rules import RuleBook
from .algebra import rewrite
from .kinds import Application
from .saturation import saturate
from .space import Kind, Space

GRACE_SECONDS = 20.0  # between asking the worker to stop and killing it


class WorkerFailed(UserError):
    """The worker was stopped by its time limit, or died (of memory, usually)."""


def saturate_in_worker(
    kinds: Sequence[Kind],
    types: Iterable[TensorType],
    mesh: Mesh,
    book: RuleBook,
    *,
    node_limit: int,
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Space:
    """`saturate`, in a child process that is killed when it does not answer in time."""
    arguments = (list(kinds), list(types), mesh, book)
    return _ask("saturate", arguments, {"node_limit": node_limit, "seconds": seconds}, seconds, progress)


def rewrite_in_worker(
    parts: Sequence[Application],
    types: Mapping[str, TensorType],
    leaves: Sequence[str],
    outputs: Sequence[str],
    book: RuleBook,
    *,
    node_limit: int,
    seconds: float,
) -> tuple[list[Application], dict[str, TensorType], str]:
    """`rewrite`, likewise; where no rule is one of algebra there is nothing to do, and no child."""
    if not book.named("algebra"):
        return list(parts), dict(types), "fixpoint"
    arguments = (list(parts), dict(types), list(leaves), list(outputs), book)
    return _ask("rewrite", arguments, {"node_limit": node_limit, "seconds": seconds}, seconds)


def _ask(
    task: str,
    arguments: tuple,
    limits: Mapping[str, float],
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Any:
    command = [sys.executable, "-m", "parallegg.rewrite.worker"]
    request = pickle.dumps((task, arguments, limits))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        killer = threading.Timer(min(seconds + GRACE_SECONDS, threading.TIMEOUT_MAX), child.kill)
        killer.start()
        try:
            return _converse(child, request, progress, seconds)
        finally:
            killer.cancel()
            child.kill()


def _converse(
    child: subprocess.Popen[bytes], request: bytes, progress: Callable[[str], None], seconds: float
) -> Any:
    stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
    assert stdin and stdout and stderr
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.append(stderr.read()), daemon=True)
    reader.start()
    with contextlib.suppress(BrokenPipeError):
        stdin.write(request)
        stdin.close()
    while True:
        try:
            tag, value = pickle.load(stdout)
        except EOFError:
            code = child.wait()
            reader.join(timeout=1)
            if code < 0:  # killed, or aborted where memory could not be had
                raise WorkerFailed(
                    f"saturation was stopped after {seconds:.0f} s or ran out of memory; "
                    "fewer rules, a smaller mesh or a lower node limit help"
                ) from None
            raise RuntimeError(
                f"the saturation worker failed:\n{b''.join(errors).decode(errors='replace')}"
            ) from None
        if tag == "progress":
            progress(value)
        elif tag == "error":
            raise value
        else:
            return value


def _serve() -> None:
    # Whatever a library prints must not end up between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_memory()
    task, arguments, limits = pickle.load(sys.stdin.buffer)

    def send(tag: str, value: object) -> None:
        pickle.dump((tag, value), out, protocol=pickle.HIGHEST_PROTOCOL)
        out.flush()

    try:
        if task == "rewrite":
            found = rewrite(*arguments, **limits)
        else:
            found = saturate(*arguments, **limits, progress=lambda text: send("progress", text))
    except UserError as error:
        send("error", error)
    except MemoryError:
        os.abort()  # as the Rust side ends then
    else:
        send("found", found)


def _limit_memory() -> None:
    """Three quarters of the machine's, so that rules without end stop this process and no other."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    most = max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * 3, 4 << 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *known]), hard))


if __name__ == "__main__":
    _serve()
