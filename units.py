"""Quantities as people read and write them.

    human_bytes(12_500_000)     "12.5 MB": decimal units, as data sheets use them
    human_seconds(0.0125)       "12.5 ms"
    parse_bytes("512 MiB")      536870912
UserError for anything else than a positive size.
"""

from __future__ import annotations

import math
import re

from .program import UserError

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("I", 1024))
    for power, prefix in enumerate("KMGTP", 1)
}


def human_bytes(count: float) -> str:
    exponent = 0 if count < 1000 else min(int(math.log10(count) // 3), 5)
    return f"{count / 1000**exponent:.4g} {['B', 'kB', 'MB', 'GB', 'TB', 'PB'][exponent]}"


def human_seconds(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    exponent = min(0, max(-4, math.floor(math.log10(seconds) / 3)))
    return f"{seconds * 1000.0**-exponent:.4g} {['s', 'ms', 'µs', 'ns', 'ps'][-exponent]}"


def parse_bytes(text: str) -> int:
    """`80GB`, `512 MiB` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise UserError(f"{text!r}: expected a size such as 80GB, 512MiB or a number of bytes")
    count = int(float(match[1]) * UNITS[match[2].upper()])
    if count < 1:
        raise UserError(f"{text!r}: the size must be positive")
    return count
