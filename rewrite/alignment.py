"""Which dimension feeds which: pure functions of shapes, loaded into the e-graph as facts before an axis is placed.

broadcast_reads(out, operand)    numpy broadcasting: output dimension -> operand dimension, or None where it is repeated
reshaped(before, after)    Reshape: (c, d) such that shards of c stay together as shards of d
surviving(rank, axes, keepdims)   reduction: (c, d) for the dimensions that are kept
"""

from __future__ import annotations

Shape = tuple[int, ...]


def broadcast_reads(out: Shape, operand: Shape) -> list[tuple[int, int | None]]:
    """(output dimension, operand dimension or None if the operand repeats along it), where the sizes agree."""
    offset = len(out) - len(operand)
    pairs: list[tuple[int, int | None]] = []
    for d, size in enumerate(out):
        c = d - offset
        if c < 0 or (operand[c] == 1 and size != 1):
            pairs.append((d, None))
        elif operand[c] == size:
            pairs.append((d, c))
    return pairs


def reshaped(before: Shape, after: Shape) -> list[tuple[int, int]]:
    """Leading dimensions of the groups that a Reshape splits or merges; empty tensors have none.

    Row-major order keeps the blocks of a group's first dimension (of size above 1) contiguous on both sides, so a
    split of one by any common divisor is a split of the other.
    """
    if 0 in before or 0 in after:
        return []
    pairs = []
    c = d = 0
    while c < len(before) and d < len(after):
        if before[c] == 1:
            c += 1
        elif after[d] == 1:
            d += 1
        else:
            pairs.append((c, d))
            left, right = before[c], after[d]
            c, d = c + 1, d + 1
            while left != right:
                if left < right:
                    left, c = left * before[c], c + 1
                else:
                    right, d = right * after[d], d + 1
    return pairs


def surviving(rank: int, axes: tuple[int, ...], keepdims: int) -> list[tuple[int, int]]:
    """(input dimension, output dimension) of the dimensions that a reduction keeps."""
    kept = [c for c in range(rank) if c not in axes]
    return [(c, c if keepdims else d) for d, c in enumerate(kept)]
