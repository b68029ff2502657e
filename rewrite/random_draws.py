"""Random masks that are functions of a site, a step and every element's index: a shard's mask is the shard of the mask.

In: a shape and a ratio, by `Terms`.  Out: canonical nodes over constants, which split like any elementwise operator:
  RandomKey(key, index)     a key for every index, from a key for all of them (int64, broadcast)
  RandomMask(key, index)    true with probability 1 - threshold / 2**53
  random_mask()             RandomKey along every dimension but the last, RandomMask along the last
  draw_anew()               in a training step the count of finished steps enters the key of every site
Both hash by splitmix64 (runtime/operators.py): index i of a key gives the generator's i-th number.  A site, one Dropout
of a model, has a key of its own: two Dropouts of one tensor are two masks.  Nothing here is ever folded: operators of
one kind differ in their constants alone, and a mask that is known could not change from step to step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .builder import Builder, Terms
from .operators import OWN

UNIT = 2**53  # a draw is one of so many numbers


def random_mask(t: Terms, shape: Sequence[int], ratio: float, seed: int, label: str) -> str:
    """Booleans, each false with probability `ratio`; the same for the same seed at the same site of a model."""
    key = t.constant(_site_key(seed, t.builder.next_site()), "int64", f"{label}/key")
    indices = [
        t.constant(np.arange(size).reshape(-1, *(1,) * (len(shape) - 1 - d)), "int64", f"{label}/index{d}")
        for d, size in enumerate(shape)
    ]
    *leading, last = indices or [t.constant(0, "int64", f"{label}/index")]
    for d, index in enumerate(leading):
        key = t.emit("RandomKey", key, index, label=f"{label}/keys{d}")
    return t.emit("RandomMask", key, last, label=label, threshold=round(ratio * UNIT))


def _site_key(seed: int, site: int) -> int:
    digest = hashlib.sha256(f"{seed}/{site}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def draw_anew(builder: Builder, step: str) -> None:
    """Let every site's key depend on the scalar `step`."""
    fresh: dict[str, str] = {}
    nodes, builder.nodes = builder.nodes, []
    for node in nodes:
        key = node.inputs[0] if node.op in OWN else ""
        if builder.known(key) is not None:
            if key not in fresh:
                fresh[key] = builder.emit("RandomKey", (key, step), {}, builder.fresh(f"{key}/step"))[0]
            node = replace(node, inputs=(fresh[key], *node.inputs[1:]))
        builder.nodes.append(node)


def draws(builder: Builder) -> bool:
    return any(node.op in OWN for node in builder.nodes)
