"""Lowering: collectives and placement on eight devices, mistakes, StableHLO counts, float64, replicas."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from parallegg.mesh import Mesh, parse_layout
from parallegg.planfile import Plan, Port
from parallegg.program import Node, TensorType, UserError
from parallegg.rewrite.operators import infer
from parallegg.runtime.devices import ensure_devices, profile_name
from parallegg.runtime.lowering import QUICK, Executable, as_float64, assemble, evaluate, lower
from parallegg.runtime.stablehlo import collectives

MESHES = [Mesh.parse("data=2,model=4"), Mesh.parse("a=2,b=2,c=2")]
DTYPES = ["float32", "float64", "bool", "int64", "bfloat16"]


def values(shape, dtype, seed=0):
    """Small integers, exact in every type."""
    return np.random.default_rng(seed).integers(0, 5, shape).astype(jax.numpy.dtype(dtype))


def port(name, kind, type, layout):
    return Port(name, kind, type, parse_layout(layout), f"{name}@{layout}")


def local_result(node, operands, mesh):
    """The types that a node of these tests computes."""
    if not node.domain:
        return infer(node.op, node.attributes, operands)
    if node.op == "GatherOrZero":
        return infer("Gather", node.attributes, operands)
    x, shape = operands[0], list(operands[0].shape)
    ways, dim = mesh[node.attributes["axis"]].size, node.attributes.get("dim")
    if node.op in ("AllGather", "AllToAll"):
        shape[dim] *= ways
    if node.op in ("ReduceScatter", "LocalSlice", "AllToAll"):
        shape[node.attributes.get("to_dim", dim)] //= ways
    return (TensorType(tuple(shape), x.dtype),)


def plan_of(mesh, inputs, outputs, nodes, constants=()):
    constants = dict(constants)
    types = {name: TensorType(value.shape, str(value.dtype)) for name, value in constants.items()}
    types |= {p.local: TensorType(mesh.local_shape(p.type.shape, p.layout), p.type.dtype) for p in inputs}
    for node in nodes:
        results = local_result(node, tuple(types[name] for name in node.inputs), mesh)
        types.update(zip(node.outputs, results, strict=True))
    return Plan(mesh, tuple(inputs), tuple(outputs), tuple(nodes), types, constants)


def parallegg(op, inputs, output, **attributes):
    return Node(f"{op} {output}", op, inputs, (output,), attributes, domain="parallegg")


def one_node(mesh, op, attributes, type, before, after, out=None):
    """A plan of one collective that turns layout `before` of x into layout `after`."""
    x, y = port("x", "input", type, before), port("y", "output", out or type, after)
    y = replace(y, local="result")
    return plan_of(mesh, [x], [y], [parallegg(op, (x.local,), y.local, **attributes)])


def layouts(mesh, axis, placement):
    return ",".join(placement if name == axis else "R" for name in mesh.names)


def run(plan, check_replicas=True, **inputs):
    program = lower(plan, compiler_options=QUICK)
    return program.run(program.place(inputs), check_replicas=check_replicas)


def every_axis():
    return [pytest.param(mesh, axis.name, id=f"{mesh}-{axis.name}") for mesh in MESHES for axis in mesh]


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("mesh, axis", every_axis())
@pytest.mark.parametrize("dtype", DTYPES)
def test_moving_collectives_return_the_tensor(mesh, axis, dtype):
    """Gather, slice and exchange: the logical value stays; counts and bytes are those of the text."""
    x = values((8, 8, 3), dtype)
    type, size = TensorType(x.shape, dtype), mesh[axis].size
    part = type.bytes // size
    for op, attributes, before, after, payload in (
        ("AllGather", {"dim": 1}, "S1", "R", part),
        ("AllToAll", {"dim": 0, "to_dim": 1}, "S0", "S1", part),
        ("LocalSlice", {"dim": 0}, "R", "S0", None),
    ):
        plan = one_node(
            mesh,
            op,
            {"axis": axis, **attributes},
            type,
            layouts(mesh, axis, before),
            layouts(mesh, axis, after),
        )
        found = run(plan, x=x)["y"]
        assert found.dtype == x.dtype and np.array_equal(found, x), op
        expected = {} if payload is None else {(op, axis): (1, payload)}
        assert collectives(lower(plan).stablehlo(), mesh) == expected


@pytest.mark.parametrize("mesh, axis", every_axis())
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16"])
def test_reductions_combine_what_the_devices_hold(mesh, axis, dtype):
    """Each device's part of x counts as a tensor of its own: the result is a reduction over blocks."""
    x = values((8, 8), dtype)
    size = mesh[axis].size
    blocks = x.reshape(size, 8 // size, 8)
    block = TensorType(blocks.shape[1:], dtype)
    mean = blocks.sum(0, dtype=x.dtype) / x.dtype.type(size)
    for op, attributes, after, expected in (
        ("AllReduce", {"reduction": "sum"}, "R", blocks.sum(0, dtype=x.dtype)),
        ("AllReduce", {"reduction": "max"}, "R", blocks.max(0)),
        ("AllReduce", {"reduction": "min"}, "R", blocks.min(0)),
        *([] if dtype == "int64" else [("AllReduce", {"reduction": "mean"}, "R", mean)]),
        ("ReduceScatter", {"dim": 1}, "S1", blocks.sum(0, dtype=x.dtype)),
    ):
        before, behind = layouts(mesh, axis, "S0"), layouts(mesh, axis, after)
        plan = one_node(
            mesh, op, {"axis": axis, **attributes}, TensorType(x.shape, dtype), before, behind, block
        )
        found = run(plan, x=x)["y"]
        assert found.dtype == x.dtype and np.array_equal(found, expected), op
        assert collectives(lower(plan).stablehlo(), mesh) == {(op, axis): (1, block.bytes)}


@pytest.mark.parametrize("mesh, axis", every_axis())
def test_include_makes_a_partial_value(mesh, axis):
    x = values((4, 3), "float32")
    replicated = layouts(mesh, axis, "R")
    ports = (
        port("x", "input", TensorType((4, 3), "float32"), replicated),
        port("y", "output", TensorType((4, 3), "float32"), replicated),
    )
    partial = f"x@{layouts(mesh, axis, 'P')}"
    nodes = (
        parallegg("Include", (ports[0].local,), partial, axis=axis),
        parallegg("AllReduce", (partial,), ports[1].local, axis=axis),
    )
    plan = plan_of(mesh, ports[:1], ports[1:], nodes)
    assert np.array_equal(run(plan, x=x)["y"], x)
    program = lower(plan)
    blocks = program.blocks(program.place({"x": x}), [partial])[partial]
    value, consistent = assemble(blocks, parse_layout(layouts(mesh, axis, "P")))
    assert consistent and np.array_equal(value, x)


INDICES = np.array([[0, 7, -1], [-8, 3, 4]])


@pytest.mark.parametrize("dim", [0, 1])
def test_gather_of_split_rows(dim):
    """Over two axes: the indices are made local axis by axis, rows held elsewhere count as zero."""
    mesh, table = MESHES[0], values((8, 8), "float32")
    expected = np.take(table, INDICES, dim)
    indices = port("indices", "input", TensorType((2, 3), "int64"), "R,R")
    rows = port("rows", "output", TensorType(expected.shape, "float32"), "R,R")
    sums = [
        parallegg("AllReduce", ("rows@P,P",), "rows@R,P", axis="data"),
        parallegg("AllReduce", ("rows@R,P",), "rows@R,R", axis="model"),
    ]
    twice = port("table", "input", TensorType((8, 8), "float32"), f"S{dim},S{dim}")
    nodes = (
        parallegg("LocalIndices", ("indices@R,R",), "i", axis="data", rows=8, mode="wrap"),
        parallegg("LocalIndices", ("i",), "j", axis="model", rows=4, mode="zero"),
        parallegg("GatherOrZero", (twice.local, "j"), "rows@P,P", axis=dim),
        *sums,
    )
    plan = plan_of(mesh, (twice, indices), (rows,), nodes)
    assert np.array_equal(run(plan, table=table, indices=INDICES)["rows"], expected)


def test_an_axis_of_one_device_moves_nothing():
    mesh, x = Mesh.parse("one=1,data=2"), values((4, 3), "float32")
    indices = port("i", "input", TensorType((2,), "int64"), "R,R")
    table = port("x", "input", TensorType((4, 3), "float32"), "S0,R")
    nodes = (
        parallegg("LocalIndices", (indices.local,), "j", axis="one", rows=4, mode="wrap"),
        parallegg("GatherOrZero", (table.local, "j"), "p", axis=0),
        parallegg("AllReduce", ("p",), "y", axis="one", reduction="mean"),
    )
    y = replace(port("y", "output", TensorType((2, 3), "float32"), "R,R"), local="y")
    plan = plan_of(mesh, (indices, table), (y,), nodes)
    assert np.array_equal(run(plan, x=x, i=np.array([-1, 1]))["y"], x[[3, 1]])
    assert collectives(lower(plan).stablehlo(), mesh) == {}


def test_a_dimension_split_by_two_axes_has_the_earlier_axis_outermost():
    mesh, x = MESHES[0], np.arange(16.0)
    plan = one_node(
        mesh, "AllGather", {"axis": "model", "dim": 0}, TensorType((16,), "float64"), "S0,S0", "S0,R"
    )
    program = lower(plan)
    arrays = program.place({"x": x})
    parts = [np.asarray(shard.data).tolist() for shard in arrays[0].addressable_shards]
    assert parts == x.reshape(8, 2).tolist()  # each device was given its own two elements
    assert np.array_equal(program.run(arrays)["y"], x)
    blocks = program.blocks(arrays, [plan.inputs[0].local])[plan.inputs[0].local]
    assert np.array_equal(assemble(blocks, plan.inputs[0].layout)[0], x)


# ---------------------------------------------------------------- a program


def column_row(mesh, dtype="float32"):
    """y = relu(x a) b, batch over the first axis; a by columns and b by rows over the second."""
    types = {"x": (8, 6), "a": (6, 8), "b": (8, 4), "y": (8, 4)}
    types = {name: TensorType(shape, dtype) for name, shape in types.items()}
    inputs = (
        port("x", "input", types["x"], "S0,R"),
        port("a", "parameter", types["a"], "R,S1"),
        port("b", "parameter", types["b"], "R,S0"),
        port("two", "constant", TensorType((), dtype), "R,R"),
    )
    nodes = (
        Node("m", "MatMul", ("x@S0,R", "a@R,S1"), ("h@S0,S1",)),
        Node("r", "Max", ("h@S0,S1", "zero"), ("h2@S0,S1",)),
        Node("s", "Mul", ("h2@S0,S1", "two@R,R"), ("h3@S0,S1",)),
        Node("n", "MatMul", ("h3@S0,S1", "b@R,S0"), ("y@S0,P",)),
        Node("c", "AllReduce", ("y@S0,P",), ("y@S0,R",), {"axis": "model"}, "parallegg"),
    )
    constants = {"two": np.asarray(2, dtype), "zero": np.asarray(0, dtype)}  # zero has no port
    return plan_of(mesh, inputs, [port("y", "output", types["y"], "S0,R")], nodes, constants)


def weights(name):
    shape = {"a": (6, 8), "b": (8, 4)}[name]
    return np.random.default_rng(ord(name)).standard_normal(shape).astype("float32")


X = np.random.default_rng(1).standard_normal((8, 6)).astype("float32")


def expected(x, a, b):
    return np.maximum(x @ a, 0) * 2 @ b


def test_program_with_weights_and_constants():
    program = lower(column_row(MESHES[0]), compiler_options=QUICK)
    found = program.run(program.place({"x": X}, weights), check_replicas=True)["y"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(X, weights("a"), weights("b")), rtol=1e-5)
    assert collectives(program.stablehlo(), MESHES[0]) == {("AllReduce", "model"): (1, 4 * 4 * 4)}


def test_float64_plan_is_exact_where_float32_is_not():
    plan = as_float64(column_row(MESHES[0]))
    program = lower(plan, compiler_options=QUICK)

    def wide(name):
        return weights(name).astype("float64")

    found = program.run(program.place({"x": X.astype("float64")}, wide))["y"]
    exact = expected(X.astype("float64"), wide("a"), wide("b"))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, exact, rtol=1e-13)
    assert np.abs(expected(X, weights("a"), weights("b")) - exact).max() > 1e-8


def test_as_float64_rewrites_casts_to_floating_types_only():
    plan = column_row(MESHES[0])
    casts = tuple(Node(to, "Cast", ("x@S0,R",), (to,), {"to": to}) for to in ("bfloat16", "float32", "int32"))
    wide = as_float64(plan_of(plan.mesh, plan.inputs, [], casts))
    assert [node.attributes["to"] for node in wide.nodes] == ["float64", "float64", "int32"]


def test_evaluate_runs_what_the_outputs_need():
    nodes = [
        Node("a", "Add", ("x", "y"), ("s",)),
        Node("t", "TopK", ("s",), ("top", "at"), {"k": 1, "axis": 0, "largest": 1, "sorted": 1}),
        Node("broken", "NoSuchOperator", ("s",), ("never",)),
    ]
    found = evaluate(nodes, {"x": np.array([1, 2**60]), "y": np.array([1, 1])}, ["at", "s", "x"])
    assert found["s"].tolist() == [2, 2**60 + 1] and found["at"].tolist() == [1]
    assert found["s"].dtype == np.int64 and found["x"].tolist() == [1, 2**60]


# ---------------------------------------------------------------- mistakes


def refuse(match, call):
    with pytest.raises(UserError, match=match):
        call()


def test_wrong_feeds_are_named():
    program = lower(column_row(MESHES[0]))
    refuse("input 'x': missing, expected float32.8,6.", lambda: program.place({}, weights))
    refuse(
        "input 'z': the plan has no such input; it has x", lambda: program.place({"x": X, "z": X}, weights)
    )
    refuse(
        r"input 'x': expected float32\[8,6\], found float32\[6,8\]",
        lambda: program.place({"x": X.T}, weights),
    )
    wide = X.astype("float64")
    refuse(
        r"input 'x': expected float32\[8,6\], found float64\[8,6\]",
        lambda: program.place({"x": wide}, weights),
    )
    refuse("parameter 'a': no source", lambda: program.place({"x": X}))
    refuse(
        r"parameter 'a': expected float32\[6,8\], found float32\[3\]",
        lambda: program.place({"x": X}, lambda name: np.zeros(3, "float32")),
    )


def test_too_few_devices():
    program = lower(column_row(MESHES[0]), devices=jax.devices()[:4])
    refuse("mesh data=2,model=4: needs 8 devices, found 4", lambda: program.place({"x": X}, weights))
    assert ensure_devices(8) == "8 virtual CPU devices"
    refuse("devices: 9 needed, found 8 of kind cpu", lambda: ensure_devices(9))


def test_a_port_is_not_partial():
    plan = column_row(MESHES[0])
    partial = replace(plan, outputs=(replace(plan.outputs[0], layout=parse_layout("S0,P")),))
    refuse("output 'y': layout S0,P has a Partial", lambda: lower(partial))


def test_wrong_nodes_are_named():
    mesh, type = MESHES[0], TensorType((8,), "float32")

    def text(plan):
        return lambda: lower(plan).stablehlo()

    plan = one_node(mesh, "AllGather", {"axis": "data", "dim": 0}, type, "S0,R", "R,R")

    def changed(**changes):
        return replace(plan, nodes=(replace(plan.nodes[0], **changes),))

    refuse("'Gossip' is not an operator of the domain 'parallegg'", text(changed(op="Gossip")))
    refuse("operator 'Gossip' has no JAX function", text(changed(op="Gossip", domain="")))
    refuse("has no axis 'rows'", text(changed(attributes={"axis": "rows", "dim": 0})))
    refuse(
        r"node 'n' \(AllReduce\), output 'result': expected float32\[8\], found float32\[4\]",
        text(changed(name="n", op="AllReduce")),
    )


def test_differing_replicas_are_found():
    """A forgotten all-reduce: every device's result passes as replicated unless compared."""
    mesh = MESHES[0]
    plan = column_row(mesh)
    forgotten = Node("c", "Relu", ("y@S0,P",), ("y@S0,R",))
    plan = replace(plan, nodes=(*plan.nodes[:-1], forgotten))
    program = lower(plan, compiler_options=QUICK)
    arrays = program.place({"x": X}, weights)
    program.run(arrays)
    refuse("output 'y': devices hold different values", lambda: program.run(arrays, check_replicas=True))


# ---------------------------------------------------------------- StableHLO


def test_functions_count_as_often_as_they_are_called():
    text = """
module @jit_f {
  func.func public @main(%arg0: tensor<4xbf16>) -> tensor<4xbf16> {
    %0 = call @twice(%arg0) : (tensor<4xbf16>) -> tensor<4xbf16>
    %1 = func.call @"once.1"(%0) : (tensor<4xbf16>) -> tensor<4xbf16>
    return %1 : tensor<4xbf16>
  }
  func.func private @twice(%arg0: tensor<4xbf16>) -> tensor<4xbf16> {
    %0 = call @"once.1"(%arg0) : (tensor<4xbf16>) -> tensor<4xbf16>
    %1 = call @"once.1"(%0) : (tensor<4xbf16>) -> tensor<4xbf16>
    return %1 : tensor<4xbf16>
  }
  func.func private @"once.1"(%arg0: tensor<4xbf16>) -> tensor<4xbf16> {
    %0 = "stablehlo.all_reduce"(%arg0) <{replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}> ({
    ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
      %6 = stablehlo.add %a, %b : tensor<bf16>
      stablehlo.return %6 : tensor<bf16>
    }) : (tensor<4xbf16>) -> tensor<4xbf16>
    return %0 : tensor<4xbf16>
  }
}
"""
    assert collectives(text, Mesh.parse("a=2,b=2")) == {("AllReduce", "b"): (3, 24)}


def test_counts_on_a_mesh_of_more_devices_than_there_are():
    """Above 100 numbers MLIR writes the groups in hexadecimal."""
    mesh = Mesh.parse("a=4,b=32,one=1")
    for axis in ("a", "b", "one"):
        before = layouts(mesh, axis, "S0")
        plan = one_node(
            mesh, "AllGather", {"axis": axis, "dim": 0}, TensorType((32, 3), "int8"), before, "R,R,R"
        )
        expected = {("AllGather", axis): (1, 96 // mesh[axis].size)} if axis != "one" else {}
        assert collectives(Executable(plan).stablehlo(), mesh) == expected


def groups(literal, shape="2x2", operation="all_gather"):
    return (
        "func.func public @main(%a: tensor<4xf32>) {\n"
        f'  %0 = "stablehlo.{operation}"(%a) <{{replica_groups = dense<{literal}> : tensor<{shape}xi64>}}>'
        " : (tensor<4xf32>, tensor<f64>) -> tensor<8xf32>\n}"
    )


def test_groups_over_several_axes_and_groups_that_are_no_axes():
    mesh = Mesh.parse("a=2,b=2")
    assert collectives(groups("[[0, 1, 2, 3]]", "1x4"), mesh) == {("AllGather", "a+b"): (1, 24)}
    assert collectives(groups("[[0, 2], [1, 3]]"), mesh) == {("AllGather", "a"): (1, 24)}
    assert collectives(groups("0", "1x1"), Mesh.parse("a=1")) == {}
    for wrong in ("[[0, 3], [1, 2]]", "[[0, 1], [0, 2]]", "[[0, 1], [2, 2]]"):
        with pytest.raises(ValueError, match="are not along axes"):
            collectives(groups(wrong), mesh)
    with pytest.raises(ValueError, match="collective_permute"):
        collectives(groups("[[0, 1]]", "1x2", "collective_permute"), mesh)


def loop_text(repeat):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    function = jax.shard_map(repeat, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(function).lower(jax.ShapeDtypeStruct((4,), "float32")).as_text()


def test_a_loop_counts_as_often_as_it_runs():
    def twice(x):
        return jax.lax.fori_loop(0, 2, lambda i, x: jax.lax.psum(x, "a"), jax.lax.psum(x, "a"))

    def nested(x):
        x = jax.lax.scan(lambda x, _: (twice(x), None), x, None, length=3)[0]
        return jax.lax.psum(x, "a")

    assert collectives(loop_text(nested), Mesh.parse("a=8")) == {("AllReduce", "a"): (10, 160)}


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    def until(x):
        return jax.lax.while_loop(lambda x: x[0] < 9, lambda x: jax.lax.psum(x, "a"), x)

    def counted(x):
        return jax.lax.fori_loop(0, x[0].astype(int), lambda i, x: jax.lax.psum(x, "a"), x)

    for repeat in (until, counted):
        with pytest.raises(ValueError, match="loop without a known trip count"):
            collectives(loop_text(repeat), Mesh.parse("a=8"))


@pytest.mark.parametrize(
    "answer, name",
    [
        ("warning\ndevices\tgpu\t8\tNVIDIA A100-SXM4-80GB\n", "a100"),
        ("devices\ttpu\t4\tTPU v5 lite", "tpu-v5e"),
        ("devices\tcpu\t8\tcpu", "cpu"),
        ("", "cpu"),
    ],
)
def test_hardware_is_named_after_what_jax_calls_it(answer, name):
    assert profile_name(answer) == name
