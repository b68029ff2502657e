"""The collectives of a lowered program, counted from its StableHLO text.

In: the text (`Executable.stablehlo()`), the mesh.  Out: {(kind, axes): (count, payload_bytes)}, axes being
the mesh axis that the replica groups vary over (several joined by "+", in mesh order), payload the operands'
bytes on one device. A function counts as often as it is called, a loop as often as it runs where the text
says so (`lax.scan`: from 0 while less than a constant, by 1).
StableHLO and not the compiled program, because XLA:CPU widens bfloat16 collectives.
Groups of one device move nothing and are skipped; a collective of another kind, or in a loop whose trip count
is not in the text, raises ValueError rather than be missed.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from ..mesh import Mesh
from ..program import ITEM_BYTES

KINDS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
}
UNCOUNTED = ("collective_permute", "collective_broadcast", "send", "recv")
ELEMENTS = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64",
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
}  # fmt: skip

FUNCTION = re.compile(r"^\s*func\.func\b.*?@([\w.$-]+|\"[^\"]*\")\(")
CALL = re.compile(r"\bcall @([\w.$-]+|\"[^\"]*\")\(")
OPERATION = re.compile(r"\"?stablehlo\.(\w+)\"?\b")
GROUPS = re.compile(r"replica_groups = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>")
OPERANDS = re.compile(r": \(([^()]*)\) -> ")
CONSTANT = re.compile(r"(%\w+) = stablehlo\.constant dense<(\d+)>")
COMPARE = re.compile(r"stablehlo\.compare +LT, (%\w+), (%\w+)")
TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")


def collectives(text: str, mesh: Mesh) -> dict[tuple[str, str], tuple[int, int]]:
    bodies = dict(functions(text))
    total: Counter = Counter()

    def visit(name: str, times: int | None) -> None:
        """Add what function `name` does when it runs so often."""
        body = bodies[name]
        for index, repeats in repetitions(body):
            often = None if times is None or repeats is None else times * repeats
            for callee in CALL.findall(body[index]):
                visit(callee, often)
            for kind, axes, payload in collective(body, index, mesh):
                if often is None:
                    raise ValueError(f"loop without a known trip count around {body[index].strip()}")
                total.update({(kind, axes, "count"): often, (kind, axes, "bytes"): often * payload})

    visit("main", 1)
    keys = sorted({key[:2] for key in total})
    return {key: (total[*key, "count"], total[*key, "bytes"]) for key in keys}


def functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each function's name and lines; the text has no nested functions."""
    name, body = None, []
    for line in text.splitlines():
        match = FUNCTION.match(line)
        if match:
            if name is not None:
                yield name, body
            name, body = match[1], []
        body.append(line)
    if name is not None:
        yield name, body


def repetitions(body: list[str]) -> Iterator[tuple[int, int | None]]:
    """Each line's number, and how often the loops around it run it in one call (None: unknown)."""
    loops: list[tuple[str, int | None]] = [("", 1)]  # the line that closes each, how often its body runs
    for index, line in enumerate(body):
        if len(loops) > 1 and line == loops[-1][0]:
            loops.pop()
        often = loops[-1][1]
        yield index, often
        if "stablehlo.while" in line:
            trips = trip_count(body, index)
            closing = " " * (len(line) - len(line.lstrip())) + "}"
            loops.append((closing, None if often is None or trips is None else often * trips))


def trip_count(body: list[str], index: int) -> int | None:
    """Of the loop at line `index`, if it counts from 0 by 1 and stops at a constant."""
    stop = next(i for i in range(index, len(body)) if body[i].lstrip().startswith("} do {"))
    constants = dict(CONSTANT.findall("\n".join(body[:stop])))
    compare = COMPARE.search("\n".join(body[index:stop]))
    if not compare:
        return None
    start = re.search(rf"{re.escape(compare[1])} = (%\w+)", body[index])
    step = re.search(rf"stablehlo\.add {re.escape(compare[1])}, (%\w+)", "\n".join(body[stop:]))
    if not start or not step:
        return None
    steps = dict(reversed(CONSTANT.findall("\n".join(body[stop:]))))  # names recur: the first
    if constants.get(start[1]) != "0" or steps.get(step[1]) != "1" or compare[2] not in constants:
        return None
    return int(constants[compare[2]])


def collective(body: list[str], index: int, mesh: Mesh) -> Iterator[tuple[str, str, int]]:
    """(kind, axes, payload bytes) of the collective at line `index`, if there is one."""
    for operation in OPERATION.findall(body[index])[:1]:
        if operation in UNCOUNTED:
            raise ValueError(f"StableHLO operation {operation!r} is not counted: {body[index].strip()}")
        if operation in KINDS:
            axes = axes_of(replica_groups(body[index]), mesh)
            if axes:
                yield KINDS[operation], axes, operand_bytes(body, index)


def replica_groups(line: str) -> np.ndarray:
    """MLIR writes nested lists, one number for all, or the bytes in hexadecimal above 100 numbers."""
    match = GROUPS.search(line)
    if not match:
        raise ValueError(f"replica groups not understood: {line.strip()}")
    literal, shape = match[1], (int(match[2]), int(match[3]))
    if literal.startswith('"0x'):
        values = np.frombuffer(bytes.fromhex(literal[3:-1]), dtype="<i8")
    else:
        values = np.asarray(ast.literal_eval(literal))
    return np.broadcast_to(values, shape) if values.size == 1 else values.reshape(shape)


def axes_of(groups: np.ndarray, mesh: Mesh) -> str:
    """The axes the groups vary over; every group must be all devices that differ in these axes only."""
    sizes = tuple(axis.size for axis in mesh)
    places = np.stack(np.unravel_index(groups, sizes), -1)  # group, member, axis
    varies = (places != places[:, :1]).any((0, 1))
    size = math.prod(axis.size for axis, moved in zip(mesh, varies, strict=True) if moved)
    distinct = all(len(set(group)) == size for group in groups.tolist())
    fixed = (places == places[:, :1])[..., ~varies].all()
    if groups.shape[1] != size or not distinct or not fixed:
        raise ValueError(f"replica groups {groups.tolist()} are not along axes of mesh {mesh}")
    return "+".join(name for name, moved in zip(mesh.names, varies, strict=True) if moved)


def operand_bytes(body: list[str], index: int) -> int:
    """From the operation's type, which for one with a region stands where the region ends."""
    for line in body[index:]:
        match = OPERANDS.search(line)
        if match and (line is body[index] or line.lstrip().startswith("})")):
            return sum(tensor_bytes(*tensor) for tensor in TENSOR.findall(match[1]))
    raise ValueError(f"no type found for {body[index].strip()}")


def tensor_bytes(dimensions: str, element: str) -> int:
    return math.prod(map(int, dimensions.split("x")[:-1])) * ITEM_BYTES[ELEMENTS[element]]
