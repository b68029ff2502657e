"""ONNX models of any size: GPT-, Llama- and Mixtral-shaped, with random weights or with none.

    model = gpt(layers=2, width=64, heads=4, vocabulary=256, context=32, batch=2)         random weights, seed 0
    model = llama(layers=126, width=16384, heads=128, kv_heads=8, ..., weights="none")     405B in a few MB
    write(model, "model.onnx")
    python -m parallegg.builders llama-8b --context 4096 --batch 8 -o llama.onnx

In: sizes.  Out: an `onnx.ModelProto` of opset 20, from input_ids [batch, context] to logits, with the nodes and names
that exporters write: LayerNormalization and Gelu for GPT; RMS norms in parts, rotary positions by Slice, Neg and
Concat, and SiLU for Llama.  The experts of `moe` have static shapes: each takes a fixed number of tokens of every
sequence, and a token that comes too late passes by (GShard, Lepikhin et al. 2020).
Without weights they are declared as external data in a file that does not exist: enough for planning.
Missing: element types other than float32, caches for generation, dropout.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .program import UserError

OPSET, IR_VERSION = 20, 10
LOWEST = float(np.finfo(np.float32).min)


# ------------------------------------------------------------------------------------------- models


def gpt(
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    context: int = 1024,
    batch: int = 1,
    ffn: int = 0,
    qkv: str = "fused",
    weights: str = "random",
    seed: int = 0,
) -> onnx.ModelProto:
    """GPT-2: learnt positions, LayerNormalization before each part, Gelu; the head is the embedding (tied).

    `ffn` 0 means 4 * width.  With `qkv="separate"` each of the three is a product of its own, which splits by heads.
    """
    if qkv not in ("fused", "separate"):
        raise UserError(f"qkv {qkv!r}: expected 'fused' or 'separate'")
    _positive(layers=layers, width=width, vocabulary=vocabulary, context=context, batch=batch)
    _divides("heads", heads, "width", width)
    w = _Writer("gpt", weights, seed)
    tokens, table = w.embedding("transformer.wte.weight", vocabulary, width, batch, context)
    places = w.op(
        "Gather", w.weight("transformer.wpe.weight", context, width), w.positions(context), name="wpe"
    )
    x = w.op("Add", tokens, places, name="embedding")
    mask = w.causal_mask(context)
    for i in range(layers):
        w.at(f"transformer.h.{i}")
        y = w.layer_norm(x, width, "ln_1")
        if qkv == "fused":
            y = w.linear(y, width, 3 * width, "attn.c_attn")
            parts = w.op("Split", y, name="attn/split", outputs=3, axis=-1, num_outputs=3)
        else:
            parts = [w.linear(y, width, width, f"attn.{name}_proj") for name in "qkv"]
        q, k, v = (w.heads(t, batch, context, heads, name) for t, name in zip(parts, "qkv", strict=True))
        y = w.attention(q, k, v, mask, width // heads, (batch, context, width))
        x = w.op("Add", x, w.linear(y, width, width, "attn.c_proj"), name="attn/residual")
        y = w.layer_norm(x, width, "ln_2")
        hidden = ffn or 4 * width
        y = w.op("Gelu", w.linear(y, width, hidden, "mlp.c_fc"), name="mlp/gelu", approximate="tanh")
        x = w.op("Add", x, w.linear(y, hidden, width, "mlp.c_proj"), name="mlp/residual")
    w.at("")
    x = w.layer_norm(x, width, "transformer.ln_f")
    w.op("MatMul", x, w.op("Transpose", table, name="lm_head/transpose", perm=[1, 0]), name="logits")
    return w.model((batch, context, vocabulary))


def llama(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    vocabulary: int = 128256,
    context: int = 8192,
    batch: int = 1,
    theta: float = 500000.0,
    weights: str = "random",
    seed: int = 0,
) -> onnx.ModelProto:
    """Llama 3: rotary positions, grouped-query attention, RMS norms, SwiGLU."""
    w = _Writer("llama", weights, seed)

    def swiglu(x: str) -> str:
        gate = w.matmul(x, "mlp.gate_proj.weight", width, ffn)
        up = w.matmul(x, "mlp.up_proj.weight", width, ffn)
        return w.matmul(w.gated(gate, up, "mlp"), "mlp.down_proj.weight", ffn, width)

    return _llama(w, swiglu, layers, width, heads, kv_heads, vocabulary, context, batch, theta)


def moe(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    experts: int = 8,
    chosen: int = 2,
    capacity_factor: float = 1.25,
    vocabulary: int = 32000,
    context: int = 4096,
    batch: int = 1,
    theta: float = 1e6,
    weights: str = "random",
    seed: int = 0,
) -> onnx.ModelProto:
    """Mixtral: Llama's attention; each token goes to `chosen` of the experts."""
    if not 0 < chosen <= experts:
        raise UserError(f"moe: chosen = {chosen} of {experts} experts")
    w = _Writer("moe", weights, seed)
    capacity = math.ceil(capacity_factor * chosen * context / experts)

    def experts_part(x: str) -> str:
        return _experts(w, x, (batch, context, width), experts, chosen, min(capacity, context), ffn)

    return _llama(w, experts_part, layers, width, heads, kv_heads, vocabulary, context, batch, theta)


def _llama(
    w: _Writer,
    feed_forward: Callable[[str], str],
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    context: int,
    batch: int,
    theta: float,
) -> onnx.ModelProto:
    _positive(layers=layers, width=width, vocabulary=vocabulary, context=context, batch=batch)
    _divides("heads", heads, "width", width)
    _divides("kv_heads", kv_heads, "heads", heads)
    size = width // heads
    _divides("2", 2, "width / heads", size)
    x, _ = w.embedding("model.embed_tokens.weight", vocabulary, width, batch, context)
    mask, (cos, sin) = w.causal_mask(context), w.rotary_tables(context, size, theta)
    for i in range(layers):
        w.at(f"model.layers.{i}")
        y = w.rms_norm(x, width, "input_layernorm")
        q, k, v = (
            w.heads(w.matmul(y, f"self_attn.{name}_proj.weight", width, count * size), batch, context, count, name)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )  # fmt: skip
        q, k = w.rotate(q, cos, sin, size, "q"), w.rotate(k, cos, sin, size, "k")
        k, v = (
            w.repeat(t, (batch, kv_heads, context, size), heads, name) for t, name in ((k, "k"), (v, "v"))
        )
        y = w.attention(q, k, v, mask, width // heads, (batch, context, width))
        x = w.op("Add", x, w.matmul(y, "self_attn.o_proj.weight", width, width), name="self_attn/residual")
        y = w.rms_norm(x, width, "post_attention_layernorm")
        x = w.op("Add", x, feed_forward(y), name="mlp/residual")
    w.at("")
    x = w.rms_norm(x, width, "model.norm")
    w.op("MatMul", x, w.weight("lm_head.weight", width, vocabulary), name="logits")
    return w.model((batch, context, vocabulary))


def _experts(
    w: _Writer, x: str, shape: tuple[int, int, int], experts: int, chosen: int, capacity: int, ffn: int
) -> str:
    """A mixture of experts as products with 0/1 tables: which token is which expert's c-th of its sequence."""
    batch, context, width = shape
    logits = w.matmul(x, "block_sparse_moe.gate.weight", width, experts)
    chances = w.op("Softmax", logits, name="moe/chances", axis=-1)
    _, best = w.op("TopK", chances, w.ints(chosen), name="moe/topk", outputs=2, axis=-1)
    hot = w.op("OneHot", best, w.ints(experts), w.floats(0, 1), name="moe/one_hot", axis=-1)
    mask = w.op("ReduceSum", hot, w.ints(2), name="moe/mask", keepdims=0)
    # Its seat at an expert is the number of tokens before it that chose the same: no token depends on later ones.
    seat = w.op("CumSum", mask, w.scalar(1), name="moe/before", exclusive=1)
    seat = w.op("Cast", seat, name="moe/seat", to=TensorProto.INT64)
    place = w.op("OneHot", seat, w.ints(capacity), w.floats(0, 1), name="moe/place", axis=-1)
    table = w.op("Mul", place, w.op("Unsqueeze", mask, w.ints(-1), name="moe/mask_column"), name="moe/table")
    gates = w.op("Mul", chances, mask, name="moe/gates")
    total = w.op("ReduceSum", gates, w.ints(-1), name="moe/total", keepdims=1)
    shares = w.op(
        "Unsqueeze", w.op("Div", gates, total, name="moe/share"), w.ints(-1), name="moe/share_column"
    )
    flat = [batch, context, experts * capacity]
    combine = w.reshape(w.op("Mul", table, shares, name="moe/weighted"), flat, "moe/flat_weighted")
    table = w.reshape(table, flat, "moe/flat_table")
    inputs = w.op(
        "MatMul", w.op("Transpose", table, name="moe/to_experts", perm=[0, 2, 1]), x, name="moe/dispatch"
    )
    inputs = w.reshape(inputs, [batch, experts, capacity, width], "moe/by_expert")
    inputs = w.op("Transpose", inputs, name="moe/experts_first", perm=[1, 0, 2, 3])
    inputs = w.reshape(inputs, [experts, batch * capacity, width], "moe/tokens")
    gate = w.matmul(inputs, "block_sparse_moe.experts.w1.weight", experts, width, ffn)
    up = w.matmul(inputs, "block_sparse_moe.experts.w3.weight", experts, width, ffn)
    outputs = w.matmul(w.gated(gate, up, "moe"), "block_sparse_moe.experts.w2.weight", experts, ffn, width)
    outputs = w.reshape(outputs, [experts, batch, capacity, width], "moe/back")
    outputs = w.op("Transpose", outputs, name="moe/batch_first", perm=[1, 0, 2, 3])
    outputs = w.reshape(outputs, [batch, experts * capacity, width], "moe/slots")
    return w.op("MatMul", combine, outputs, name="moe/combine")


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} = {size} is not positive")


def _divides(small: str, a: int, large: str, b: int) -> None:
    if a < 1 or b % a:
        raise UserError(f"{small} = {a} does not divide {large} = {b}")


# ------------------------------------------------------------------------------------------- writing


class _Writer:
    """Nodes and initializers under names like an exporter's; every method gives the name of its result."""

    def __init__(self, name: str, weights: str, seed: int) -> None:
        if weights not in ("random", "none"):
            raise UserError(f"weights {weights!r}: expected 'random' or 'none'")
        self.name, self.prefix = name, ""
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.random = np.random.default_rng(seed) if weights == "random" else None
        self.offset = 0  # of the next weight in the file that does not exist
        self.known: dict[tuple[float, ...], str] = {}  # constants that are there

    def at(self, prefix: str) -> None:
        """What follows belongs to this part of the model."""
        self.prefix = f"{prefix}." if prefix else ""

    def op(self, kind: str, *inputs: str, name: str, outputs: int = 1, **attributes: Any) -> Any:
        """One node; its output is named after it."""
        name = (self.prefix + name).replace(".", "/")
        made = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, f"node_{name}", **attributes))
        return made[0] if outputs == 1 else made

    # --------------------------------------------------------------------------------- stored tensors

    def weight(self, name: str, *shape: int, mean: float = 0.0) -> str:
        """A parameter, drawn around `mean` (0 for matrices, 1 for scales)."""
        name = self.prefix + name
        if self.random is None:
            self.initializers[name] = self._external(name, shape)
        else:
            spread = 0.02 if len(shape) == 1 else 1 / math.sqrt(shape[-2])
            values = mean + spread * self.random.standard_normal(shape, np.float32)
            self.initializers[name] = numpy_helper.from_array(values.astype(np.float32), name)
        return name

    def _external(self, name: str, shape: Sequence[int]) -> onnx.TensorProto:
        tensor = TensorProto(
            name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL
        )
        size = 4 * math.prod(shape)
        for key, value in (("location", f"{self.name}.weights"), ("offset", self.offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self.offset += size
        return tensor

    def _stored(self, value: np.ndarray, name: str) -> str:
        self.initializers[name] = numpy_helper.from_array(value, name)
        return name

    def ints(self, *values: int) -> str:
        return self._stored(np.asarray(values, np.int64), "ints_" + "_".join(map(str, values)))

    def scalar(self, value: int) -> str:
        return self._stored(np.asarray(value, np.int64), f"int_{value}")

    def number(self, value: float) -> str:
        return self._stored(np.asarray(value, np.float32), f"number_{value!r}")

    def floats(self, *values: float) -> str:
        """A node with constants: an initializer of several numbers would be a weight."""
        if values not in self.known:
            name = self.known[values] = f"floats_{len(self.known)}"
            value = numpy_helper.from_array(np.asarray(values, np.float32))
            self.nodes.append(helper.make_node("Constant", [], [name], f"node_{name}", value=value))
        return self.known[values]

    # ----------------------------------------------------------------------------------------- parts

    def embedding(self, name: str, vocabulary: int, width: int, batch: int, context: int) -> tuple[str, str]:
        """The rows of the tokens, and the table."""
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [batch, context])
        self.inputs.append(ids)
        table = self.weight(name, vocabulary, width)
        return self.op("Gather", table, "input_ids", name="embed_tokens"), table

    def positions(self, context: int) -> str:
        return self.op("Range", self.scalar(0), self.scalar(context), self.scalar(1), name="positions")

    def causal_mask(self, context: int) -> str:
        """True where the row (a query) comes after the column (a key)."""
        rows = self.op("Range", self.scalar(0), self.scalar(context), self.scalar(1), name="mask/range")
        rows = self.op("Unsqueeze", rows, self.ints(1), name="mask/rows")
        columns = self.op("Transpose", rows, name="mask/columns", perm=[1, 0])
        return self.op("GreaterOrEqual", rows, columns, name="mask")

    def rotary_tables(self, context: int, size: int, theta: float) -> tuple[str, str]:
        """cos and sin of position times frequency, [context, size]."""
        steps = self.op("Cast", self.positions(context), name="rotary/steps", to=TensorProto.FLOAT)
        steps = self.op("Unsqueeze", steps, self.ints(1), name="rotary/column")
        speeds = self.floats(*(theta ** (-i / size) for i in range(0, size, 2)))
        angles = self.op("Mul", steps, speeds, name="rotary/half")
        angles = self.op("Concat", angles, angles, name="rotary/angles", axis=-1)
        return self.op("Cos", angles, name="rotary/cos"), self.op("Sin", angles, name="rotary/sin")

    def rotate(self, x: str, cos: str, sin: str, size: int, name: str) -> str:
        """x cos + (-second half, first half) sin"""
        name = f"self_attn/{name}_rotary"
        first = self._part(x, 0, size // 2, f"{name}/first")
        second = self.op("Neg", self._part(x, size // 2, size, f"{name}/second"), name=f"{name}/neg")
        turned = self.op("Concat", second, first, name=f"{name}/half", axis=-1)
        straight = self.op("Mul", x, cos, name=f"{name}/cos")
        return self.op("Add", straight, self.op("Mul", turned, sin, name=f"{name}/sin"), name=name)

    def _part(self, x: str, start: int, end: int, name: str) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(-1), name=name)

    def matmul(self, x: str, name: str, *shape: int) -> str:
        return self.op("MatMul", x, self.weight(name, *shape), name=name.removesuffix(".weight"))

    def linear(self, x: str, inner: int, outer: int, name: str) -> str:
        y = self.op("MatMul", x, self.weight(f"{name}.weight", inner, outer), name=f"{name}/matmul")
        return self.op("Add", y, self.weight(f"{name}.bias", outer), name=name)

    def layer_norm(self, x: str, width: int, name: str) -> str:
        scale, bias = self.weight(f"{name}.weight", width, mean=1), self.weight(f"{name}.bias", width)
        return self.op("LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=1e-5)

    def rms_norm(self, x: str, width: int, name: str) -> str:
        square = self.op("Pow", x, self.number(2), name=f"{name}/square")
        mean = self.op("ReduceMean", square, self.ints(-1), name=f"{name}/mean", keepdims=1)
        root = self.op(
            "Sqrt", self.op("Add", mean, self.number(1e-5), name=f"{name}/add"), name=f"{name}/sqrt"
        )
        scaled = self.op("Mul", x, self.op("Reciprocal", root, name=f"{name}/rsqrt"), name=f"{name}/scaled")
        return self.op("Mul", self.weight(f"{name}.weight", width, mean=1), scaled, name=name)

    def heads(self, x: str, batch: int, context: int, heads: int, name: str) -> str:
        """[batch, context, width] as [batch, heads, context, width / heads]."""
        x = self.reshape(x, [batch, context, heads, -1], f"self_attn/{name}_heads")
        return self.op("Transpose", x, name=f"self_attn/{name}", perm=[0, 2, 1, 3])

    def repeat(self, x: str, shape: tuple[int, int, int, int], heads: int, name: str) -> str:
        """Every key/value head once for each of the query heads that share it."""
        batch, kv_heads, context, size = shape
        if kv_heads == heads:
            return x
        name = f"self_attn/{name}_repeat"
        x = self.op("Unsqueeze", x, self.ints(2), name=f"{name}/group")
        many = self.ints(batch, kv_heads, heads // kv_heads, context, size)
        return self.reshape(
            self.op("Expand", x, many, name=f"{name}/expand"), [batch, heads, context, size], name
        )

    def attention(self, q: str, k: str, v: str, mask: str, size: int, shape: Sequence[int]) -> str:
        """softmax(q k' / sqrt(size)) v, heads joined again."""
        turned = self.op("Transpose", k, name="self_attn/k_transpose", perm=[0, 1, 3, 2])
        scores = self.op("MatMul", q, turned, name="self_attn/scores")
        scores = self.op("Mul", scores, self.number(size**-0.5), name="self_attn/scale")
        scores = self.op("Where", mask, scores, self.number(LOWEST), name="self_attn/masked")
        chances = self.op("Softmax", scores, name="self_attn/softmax", axis=-1)
        y = self.op("MatMul", chances, v, name="self_attn/values")
        y = self.op("Transpose", y, name="self_attn/join", perm=[0, 2, 1, 3])
        return self.reshape(y, list(shape), "self_attn/joined")

    def gated(self, gate: str, up: str, name: str) -> str:
        """SiLU(gate) * up"""
        silu = self.op("Mul", gate, self.op("Sigmoid", gate, name=f"{name}/sigmoid"), name=f"{name}/silu")
        return self.op("Mul", silu, up, name=f"{name}/gated")

    def reshape(self, x: str, shape: Sequence[int], name: str) -> str:
        return self.op("Reshape", x, self.ints(*shape), name=name)

    def model(self, shape: Sequence[int]) -> onnx.ModelProto:
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
        graph = helper.make_graph(
            self.nodes, self.name, self.inputs, [logits], list(self.initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="parallegg"
        )


# --------------------------------------------------------------------------------------- command line

SIZES: dict[str, tuple[Callable[..., onnx.ModelProto], dict[str, int]]] = {
    "gpt2": (gpt, {}),
    "gpt2-xl": (gpt, {"layers": 48, "width": 1600, "heads": 25}),
    "gpt3-175b": (gpt, {"layers": 96, "width": 12288, "heads": 96, "context": 2048}),
    "llama-8b": (llama, {}),
    "llama-70b": (llama, {"layers": 80, "width": 8192, "heads": 64, "ffn": 28672}),
    "llama-405b": (llama, {"layers": 126, "width": 16384, "heads": 128, "ffn": 53248}),
    "mixtral-8x7b": (moe, {}),
}


def write(model: onnx.ModelProto, path: str | Path) -> Path:
    """Weights that were declared outside stay absent."""
    path = Path(path)
    try:
        path.write_bytes(model.SerializeToString())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    except ValueError as error:  # protobuf's limit of 2 GiB
        raise UserError(f"{path}: too large for one ONNX file: build it with weights 'none'") from error
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m parallegg.builders", description="Write an ONNX model of any size."
    )
    kinds = parser.add_subparsers(required=True, metavar="MODEL")
    plain = {build.__name__: (build, {}) for build in (gpt, llama, moe)}
    for name, (build, sizes) in (plain | SIZES).items():
        settings = inspect.signature(build).parameters.values()
        kind = kinds.add_parser(
            name, help=(build.__doc__ or "").strip().splitlines()[0], description=build.__doc__
        )
        for setting in settings:
            default = sizes.get(setting.name, setting.default)
            if setting.name == "weights" and name in SIZES:
                default = "none"
            kind.add_argument(
                f"--{setting.name.replace('_', '-')}",
                type=type(default),
                default=default,
                help=f"default: {default}",
            )
        kind.add_argument("-o", "--output", required=True)
        kind.set_defaults(build=build)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    build, output = options.pop("build"), options.pop("output")
    try:
        write(build(**options), output)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
