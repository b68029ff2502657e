"""A plan as one JAX program: `jax.jit(jax.shard_map(...))` over its mesh, node by node on local shapes.

In: a `Plan`, whose ports say how every logical tensor is split (Partial is not allowed at a port).
Out: an `Executable` that places data, runs, and prints its StableHLO without devices or data; `evaluate` (and
`flat_program`, to run it again) runs a flat program on one device. A wrong feed, too few devices, an unknown
operator, or a node whose result is not what the plan's types say, raise `UserError` naming it.
    dimension split by several axes      spec(): JAX, like `mesh.py`, has the earlier axis outermost
    the value that blocks stand for      assemble(): concatenate Shard, sum Partial, compare Replicate
    a plan's arithmetic in float64       as_float64()
Replication is not checked by JAX here (`check_vma=False` lets differing "replicated" results pass silently):
`run(..., check_replicas=True)` compares them. The stricter `check_vma=True` refuses correct plans, such as an
all-gather into a replicated output.
Missing: pipelines, loops over micro-batches, several processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..mesh import Layout, Mesh, Partial, Shard, format_layout
from ..planfile import Plan, Port
from ..program import FLOATING, Node, TensorType, UserError
from ..rewrite.operators import OWN
from .operators import JAX, exact_types, gather

Source = Callable[[str], np.ndarray]
Options = Mapping[str, Any]
Devices = Sequence[Any]  # of jax.Device, which has no type: jaxlib comes without stubs

# XLA:CPU removes barriers before it fuses; it can run them.
BARRIERS: Options = {"xla_disable_hlo_passes": "cse_barrier_expander"}

# For programs that run once or twice, such as tests and numeric checks: compiling is what takes the time.
# A training step of 1,765 nodes on eight devices compiles in 21 s instead of 43.
QUICK: Options = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class ReplicasDiffer(UserError):
    """Devices hold different values of what the plan calls replicated."""


# ---------------------------------------------------------------- nodes


def local_slice(a: Options, size: int, x: jax.Array) -> jax.Array:
    block = x.shape[a["dim"]] // size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(a["axis"]) * block, block, a["dim"])


def include(a: Options, size: int, x: jax.Array) -> jax.Array:
    return jnp.where(lax.axis_index(a["axis"]) == 0, x, jnp.zeros_like(x))


def local_indices(a: Options, size: int, indices: jax.Array) -> jax.Array:
    """Into this coordinate's block of `rows`, -1 for elsewhere (as a negative index is in mode "zero")."""
    held = a["rows"] // size
    if a["mode"] == "wrap":
        indices = jnp.where(indices < 0, indices + a["rows"], indices)
    local = indices - (lax.axis_index(a["axis"]) * held).astype(indices.dtype)
    return jnp.where((indices >= 0) & (local >= 0) & (local < held), local, -1)


def gather_or_zero(a: Options, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Gather along `axis` (a dimension here), zero for a negative index."""
    dim = a["axis"]
    found = gather({"axis": dim}, rows, jnp.maximum(indices, 0))
    present = (indices >= 0).reshape(*(1,) * dim, *indices.shape, *(1,) * (rows.ndim - 1 - dim))
    return jnp.where(present, found, jnp.zeros_like(found))


def cotangent(a: Options, arrays: Sequence[jax.Array]) -> jax.Array:
    """The cotangent of operand `operand` of the local operator `of`, given that of its result (the last array).

    An Adjoint's operator is linear in the operand, which is not given: the derivative is the same at 0. What is
    computed again for a derivative is not shared with the forward pass, or it would have to be kept: hence the barrier.
    """
    *operands, result = lax.optimization_barrier(tuple(arrays))
    if "shape" in a:
        operands.insert(a["operand"], jnp.zeros(a["shape"], result.dtype))
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(a["attributes"]).items()}
    which = attributes.pop("result", None)  # of an operator with several results
    function: Callable[..., Any] = gather_or_zero if a["of"] == "GatherOrZero" else JAX[a["of"]]

    def alone(operand: jax.Array) -> jax.Array:
        results = function(attributes, *operands[: a["operand"]], operand, *operands[a["operand"] + 1 :])
        return results if which is None else results[which]

    _, pull = jax.vjp(alone, operands[a["operand"]])
    return pull(result)[0]


REDUCE = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}

COLLECTIVES: dict[str, Callable[..., jax.Array]] = {
    "AllReduce": lambda a, size, x: REDUCE[a.get("reduction", "sum")](x, a["axis"]),
    "AllGather": lambda a, size, x: lax.all_gather(x, a["axis"], axis=a["dim"], tiled=True),
    "ReduceScatter": lambda a, size, x: lax.psum_scatter(
        x, a["axis"], scatter_dimension=a["dim"], tiled=True
    ),
    "AllToAll": lambda a, size, x: lax.all_to_all(
        x, a["axis"], split_axis=a["to_dim"], concat_axis=a["dim"], tiled=True
    ),
    "LocalSlice": local_slice,
    "Include": include,
    "LocalIndices": local_indices,
}


def apply(node: Node, arrays: Sequence[jax.Array], mesh: Mesh | None) -> tuple[jax.Array, ...]:
    """The results of one node on this device."""
    if not node.is_collective or node.op in OWN:
        if node.op not in JAX:
            raise UserError(f"node {node.name!r}: operator {node.op!r} has no JAX function")
        results = JAX[node.op](node.attributes, *arrays)
        return results if isinstance(results, tuple) else (results,)
    if node.op == "GatherOrZero":  # its `axis` is a dimension
        return (gather_or_zero(node.attributes, *arrays),)
    if node.op in ("Vjp", "Adjoint"):
        return (cotangent(node.attributes, arrays),)
    if node.op not in COLLECTIVES:
        raise UserError(f"node {node.name!r}: {node.op!r} is not an operator of the domain {node.domain!r}")
    axis = node.attributes["axis"]
    if mesh is None or axis not in mesh.names:
        raise UserError(f"node {node.name!r} ({node.op}): mesh {mesh} has no axis {axis!r}")
    if mesh[axis].size == 1 and node.op != "LocalIndices":
        return (arrays[0],)  # nothing moves
    return (COLLECTIVES[node.op](node.attributes, mesh[axis].size, *arrays),)


def run_nodes(
    nodes: Iterable[Node],
    values: dict[str, jax.Array],
    types: Mapping[str, TensorType] | None = None,
    mesh: Mesh | None = None,
    kept: Collection[str] = (),
) -> None:
    """Add to `values` what every node computes, compared with `types` where they say something.

    What is `kept` stands behind a barrier: XLA would rather compute it again from what it was made of, and keep that.
    """
    for node in nodes:
        try:
            results = apply(node, [values[name] for name in node.inputs], mesh)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if types is None:
                error.add_note(f"in node {node.name!r} ({node.op})")
                raise
            # A plan's node comes from a file, which somebody may have edited.
            said = (str(error).splitlines() or [""])[0]
            text = f"node {node.name!r} ({node.op}) does not run: {type(error).__name__}: {said}"
            raise UserError(text) from error
        for name, result in zip(node.outputs, results, strict=True):
            found, expected = type_of(result), (types or {}).get(name)
            if expected is not None and found != expected:
                raise UserError(
                    f"node {node.name!r} ({node.op}), output {name!r}: expected {expected}, found {found}"
                )
            values[name] = lax.optimization_barrier(result) if name in kept else result


def type_of(array: Any) -> TensorType:
    return TensorType(tuple(array.shape), str(array.dtype))


def needed(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """The nodes that `outputs` depend on, in order."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def flat_program(
    nodes: Sequence[Node], outputs: Iterable[str], *, compiler_options: Options | None = None
) -> Callable[[Mapping[str, Any]], dict[str, np.ndarray]]:
    """From leaves to the named tensors of a program without collectives, compiled once for one device."""
    outputs = tuple(dict.fromkeys(outputs))
    nodes = needed(nodes, outputs)
    read = {name for node in nodes for name in node.inputs}.union(outputs)

    def program(feeds: dict[str, jax.Array]) -> list[jax.Array]:
        known = dict(feeds)
        run_nodes(nodes, known)
        return [known[name] for name in outputs]

    jitted = jax.jit(program, compiler_options=dict(compiler_options or {}))

    def run(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        with exact_types():
            results = jitted({name: value for name, value in values.items() if name in read})
            return dict(zip(outputs, map(np.asarray, results), strict=True))

    return run


def evaluate(
    nodes: Sequence[Node],
    values: Mapping[str, Any],
    outputs: Iterable[str],
    *,
    compiler_options: Options | None = None,
) -> dict[str, np.ndarray]:
    """The tensors named `outputs` of a program without collectives, given its leaves, on one device."""
    return flat_program(nodes, outputs, compiler_options=compiler_options)(values)


# ---------------------------------------------------------------- layouts


def spec(mesh: Mesh, port: Port) -> PartitionSpec:
    """Which axes split each dimension, the earlier axis outermost."""
    if Partial() in port.layout:
        raise UserError(f"{port.kind} {port.name!r}: layout {format_layout(port.layout)} has a Partial axis")
    pairs = list(zip(mesh.names, port.layout, strict=True))
    return PartitionSpec(
        *(tuple(axis for axis, placement in pairs if placement == Shard(d)) for d in range(port.type.rank))
    )


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to a few roundings: an accelerator's replicas may add in different orders."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return np.array_equal(a, b)
    a, b, precision = a.astype(np.float64), b.astype(np.float64), float(jnp.finfo(a.dtype).eps)
    scale = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
    return np.allclose(a, b, rtol=0, atol=64 * precision * scale, equal_nan=True)


def assemble(blocks: np.ndarray, layout: Layout, agree: Callable = close) -> tuple[np.ndarray, bool]:
    """The value whose parts are `blocks` (leading dimensions: the mesh), and whether all replicas agree."""
    if not layout:
        return blocks, True
    parts = [assemble(block, layout[1:], agree) for block in blocks]
    values, consistent = [value for value, _ in parts], all(same for _, same in parts)
    if isinstance(layout[0], Shard):
        return np.concatenate(values, layout[0].dim), consistent
    if layout[0] == Partial():
        return np.sum(values, 0, dtype=values[0].dtype), consistent
    return values[0], consistent and all(agree(values[0], value) for value in values[1:])


def require_equal_replicas(name: str, array: jax.Array) -> None:
    first: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        part = np.asarray(shard.data)
        if not close(first.setdefault(str(shard.index), part), part):
            raise ReplicasDiffer(
                f"output {name!r}: devices hold different values of what is called replicated"
            )


def gathered(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


# ---------------------------------------------------------------- the executable


class Executable:
    """A lowered plan. Nothing is traced, compiled or placed before it is asked for."""

    def __init__(
        self,
        plan: Plan,
        devices: Devices | None = None,
        compiler_options: Options | None = None,
        donate: Iterable[str] = (),
        guard: str | None = None,
    ) -> None:
        self.plan = plan
        self._guard = guard
        self.compiler_options = dict(compiler_options or {})
        self._devices = devices
        self._donated = tuple(i for i, port in enumerate(plan.inputs) if port.name in set(donate))
        # Constants without a port are the same on every device and part of the program.
        ports = {port.name for port in plan.inputs}
        self._scalars = {name: value for name, value in plan.constants.items() if name not in ports}
        self._in_specs = tuple(spec(plan.mesh, port) for port in plan.inputs)
        self._out_specs = tuple(spec(plan.mesh, port) for port in plan.outputs)

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        mesh, devices = self.plan.mesh, self._devices
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < mesh.size:
            raise UserError(f"mesh {mesh}: needs {mesh.size} devices, found {len(devices)}")
        sizes, names = tuple(axis.size for axis in mesh), mesh.names
        kinds = (AxisType.Auto,) * len(
            mesh
        )  # the default kind, Explicit, would type every array by its sharding
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices[: mesh.size])

    def place(self, inputs: Mapping[str, Any], source: Source | None = None) -> list[jax.Array]:
        """The plan's inputs in order, each device receiving its part; weights are read one at a time."""
        ports = self.plan.inputs
        known = {port.name for port in ports if port.kind == "input"}
        for name in inputs:
            if name not in known:
                raise UserError(
                    f"input {name!r}: the plan has no such input; it has {', '.join(sorted(known))}"
                )
        with exact_types():
            return [
                self._place(port, self._find(port, inputs, source), axes)
                for port, axes in zip(ports, self._in_specs, strict=True)
            ]

    def _find(self, port: Port, inputs: Mapping[str, Any], source: Source | None) -> np.ndarray:
        if port.kind == "input":
            if port.name not in inputs:
                raise UserError(f"input {port.name!r}: missing, expected {port.type}")
            return np.asarray(inputs[port.name])
        if port.name in self.plan.constants:
            return np.asarray(self.plan.constants[port.name])
        if source is None:
            raise UserError(f"{port.kind} {port.name!r}: no source of weights was given")
        return np.asarray(source(port.name))

    def _place(self, port: Port, array: np.ndarray, axes: PartitionSpec) -> jax.Array:
        if array.shape != port.type.shape or str(array.dtype) != port.type.dtype:
            found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise UserError(f"{port.kind} {port.name!r}: expected {port.type}, found {found}")
        sharding = NamedSharding(self.mesh, axes)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def put(self, name: str, array: np.ndarray) -> jax.Array:
        """One of the plan's inputs, each device receiving its part."""
        i = next(i for i, port in enumerate(self.plan.inputs) if port.name == name)
        with exact_types():
            return self._place(self.plan.inputs[i], array, self._in_specs[i])

    def call(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The plan's outputs in order, left where they are; with a guard also whether they are good."""
        with exact_types():
            return list(self.compiled(*arrays))

    def run(self, arrays: Sequence[jax.Array], *, check_replicas: bool = False) -> dict[str, np.ndarray]:
        """The plan's outputs by name, whole."""
        results = dict(zip((port.name for port in self.plan.outputs), self.call(arrays), strict=True))
        if check_replicas:
            for name, array in results.items():
                require_equal_replicas(name, array)
        return {name: gathered(array) for name, array in results.items()}

    def blocks(
        self,
        arrays: Sequence[jax.Array],
        tensors: Sequence[str],
        summary: Callable[[jax.Array], jax.Array] = lambda part: part,
    ) -> dict[str, np.ndarray]:
        """Every device's part of the program's `tensors`, or its `summary`; the leading dimensions are the mesh."""
        sizes = tuple(axis.size for axis in self.plan.mesh)
        every = PartitionSpec(self.plan.mesh.names)
        function = jax.shard_map(
            lambda *parts: tuple(summary(part)[None] for part in self._program(parts, tensors)),
            mesh=self.mesh,
            in_specs=self._in_specs,
            out_specs=(every,) * len(tensors),
            check_vma=False,
        )
        with exact_types():
            options = {**QUICK, **self.compiler_options}  # it runs once
            results = jax.jit(function).lower(*arrays).compile(options)(*arrays)
        whole = map(gathered, results)
        return {name: x.reshape(*sizes, *x.shape[1:]) for name, x in zip(tensors, whole, strict=True)}

    def stablehlo(self) -> str:
        """The program's text, from types alone: needs no devices."""
        sizes, names = tuple(axis.size for axis in self.plan.mesh), self.plan.mesh.names
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        with exact_types():
            return self._jit(mesh).trace(*self._abstract(mesh)).lower(lowering_platforms=("cpu",)).as_text()

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {**(BARRIERS if cpu and self.plan.kept else {}), **self.compiler_options}
        with exact_types():
            return self._jit(self.mesh).lower(*self._abstract(self.mesh)).compile(options)

    def _program(self, parts: Sequence[jax.Array], tensors: Iterable[str]) -> tuple[jax.Array, ...]:
        values = {name: jnp.asarray(value) for name, value in self._scalars.items()}
        values |= {port.local: part for port, part in zip(self.plan.inputs, parts, strict=True)}
        fed = {port.name for port in self.plan.inputs}
        values |= {name: jnp.asarray(v) for name, v in self.plan.constants.items() if name not in fed}
        run_nodes(self.plan.nodes, values, self.plan.types, self.plan.mesh, set(self.plan.kept))
        return tuple(values[name] for name in tensors)

    def _guarded(self, parts: Sequence[jax.Array], found: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The outputs; with a guard, state as it was unless that output and its next values are finite, and whether.

        A shard that is not finite is seen by its own devices only: all agree by one number.
        """
        if self._guard is None:
            return tuple(found)
        old = {port.name: part for port, part in zip(self.plan.inputs, parts, strict=True)}
        new = {port.name: part for port, part in zip(self.plan.outputs, found, strict=True)}
        guarded = (self._guard, *(to for _, to in self.plan.state))
        finite = [jnp.isfinite(new[name]).all() for name in guarded]
        good = lax.pmin(jnp.stack(finite).all().astype(jnp.int32), self.plan.mesh.names) > 0
        kept = new | {to: jnp.where(good, new[to], old[of]) for of, to in self.plan.state}
        return (*kept.values(), good)

    def _jit(self, mesh: jax.sharding.Mesh | AbstractMesh) -> jax.stages.Wrapped:
        results = [port.local for port in self.plan.outputs]
        function = jax.shard_map(
            lambda *parts: self._guarded(parts, self._program(parts, results)),
            mesh=mesh,
            in_specs=self._in_specs,
            out_specs=(*self._out_specs, *([] if self._guard is None else [PartitionSpec()])),
            check_vma=False,
        )
        return jax.jit(function, donate_argnums=self._donated)

    def _abstract(self, mesh: jax.sharding.Mesh | AbstractMesh) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                port.type.shape, jnp.dtype(port.type.dtype), sharding=NamedSharding(mesh, axes)
            )
            for port, axes in zip(self.plan.inputs, self._in_specs, strict=True)
        ]


def lower(
    plan: Plan,
    devices: Devices | None = None,
    *,
    compiler_options: Options | None = None,
    donate: Iterable[str] = (),
) -> Executable:
    """`devices`: by default the first that JAX has. `donate`: inputs whose memory outputs may take over."""
    return Executable(plan, devices, compiler_options, donate)


# ---------------------------------------------------------------- the same arithmetic in float64


def widest(dtype: str) -> str:
    return "float64" if dtype in FLOATING else dtype


def widest_type(type: TensorType) -> TensorType:
    return TensorType(type.shape, widest(type.dtype))


def widest_node(node: Node) -> Node:
    if node.op != "Cast" or node.is_collective:
        return node
    return replace(node, attributes={**node.attributes, "to": widest(node.attributes["to"])})


def widest_array(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if str(array.dtype) in FLOATING else array


def as_float64(plan: Plan) -> Plan:
    """The plan with every floating tensor, constant and Cast to a floating type in float64."""
    return replace(
        plan,
        inputs=tuple(replace(port, type=widest_type(port.type)) for port in plan.inputs),
        outputs=tuple(replace(port, type=widest_type(port.type)) for port in plan.outputs),
        nodes=tuple(map(widest_node, plan.nodes)),
        types={name: widest_type(type) for name, type in plan.types.items()},
        constants={name: widest_array(value) for name, value in plan.constants.items()},
    )
