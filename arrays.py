"""Arrays in .npz files: what a plan is fed, and what it gives.

    read_arrays(path)               every array of the file
    read_inputs(path, plan)         those that the plan is fed, checked
    draw_inputs(graph, plan, seed)  random ones instead
    write_arrays(path, arrays)      whole or not at all
NumPy files have no bfloat16: it is kept in them as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .planfile import Plan, as_planned, numpy_dtype, whole_file
from .program import UserError
from .rewrite.graph import Graph


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz archive")
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zipfile, zlib and NumPy each have their own
        raise UserError(
            f"{path}: is no .npz file of arrays, or is damaged: {' '.join(str(error).split())}"
        ) from None


def read_inputs(path: Path, plan: Plan) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, checked against what the plan is fed."""
    arrays = read_arrays(path)
    ports = {port.name: port for port in plan.inputs if port.kind == "input"}
    for name in arrays:
        if name not in ports:
            raise UserError(f"{path}: the plan has no input {name!r}; it has {', '.join(ports)}")
    for name, port in ports.items():
        if name not in arrays:
            raise UserError(f"{path}: input {name!r} is missing, expected {port.type}")
        array = arrays[name] = as_planned(arrays[name], port.type.dtype)
        if array.shape != port.type.shape or str(array.dtype) != port.type.dtype:
            found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise UserError(f"{path}: input {name!r}: expected {port.type}, found {found}")
    return arrays


def draw_inputs(graph: Graph, plan: Plan, seed: int) -> dict[str, np.ndarray]:
    """Random inputs that suit what they are used for."""
    from .verification.numbers import Uses

    rng, uses = np.random.default_rng(seed), Uses.of(graph)
    drawn = {}
    for port in plan.inputs:
        if port.kind == "input":
            drawn[port.name] = uses.draw(rng, port.name, port.type, False, False).astype(
                numpy_dtype(port.type.dtype)
            )
    return drawn


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An .npz file, whole or not at all; bfloat16, which NumPy files do not have, as float32."""
    plain = {name: a.astype(np.float32) if str(a.dtype) == "bfloat16" else a for name, a in arrays.items()}
    with whole_file(path) as file:
        np.savez(file, **plain)  # pyright: ignore[reportArgumentType]
