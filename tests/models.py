"""The models that the planner is held to, and the zoo as one graph."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from parallegg.mesh import Mesh
from parallegg.program import Node
from parallegg.rewrite.graph import Graph
from parallegg.rewrite.onnx_reader import load

from .zoo import CASES

DATA = Path(__file__).parent / "data"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
TOKENS = {"input_ids": (8, 16), "attention_mask": (8, 16)}


@dataclass(frozen=True)
class Sample:
    """A model file with the shapes it is planned for; its integer inputs lie below `high`."""

    name: str
    path: Path
    shapes: dict[str, tuple[int, ...]] | None = field(default=None, hash=False)
    high: int = 100

    def graph(self) -> Graph:
        return load(self.path, self.shapes)


SAMPLES = [
    Sample("gpt2.dynamo", DATA / "gpt2.dynamo.onnx"),
    Sample("gpt2.legacy_dyn", DATA / "gpt2.legacy_dyn.onnx", TOKENS),
    Sample("bert.dynamo", DATA / "bert.dynamo.onnx"),
    Sample("llama.dynamo", DATA / "llama.dynamo.onnx"),
    Sample("llama.legacy_dyn", DATA / "llama.legacy_dyn.onnx", TOKENS),
    Sample("resnet50.legacy", DATA / "resnet50.legacy.onnx"),
    Sample("light_resnet50", LIGHT / "light_resnet50.onnx"),
]
# A loss inside, a mixture of experts, Attention of opset 23, torch's older exporter.
OTHERS = [
    Sample("cnn_eval_loss.dynamo", DATA / "cnn_eval_loss.dynamo.onnx", high=10),
    Sample("moe_static.legacy", DATA / "moe_static.legacy.onnx"),
    Sample("sdpa_op23.dynamo", DATA / "sdpa_op23.dynamo.onnx"),
    Sample("bert.legacy", DATA / "bert.legacy.onnx"),
]
# Its Dropout draws at random, so that no other runtime computes the same.
CNN_TRAIN_LOSS = Sample("cnn_train_loss.legacy", DATA / "cnn_train_loss.legacy.onnx", high=10)
MESHES = {
    text: Mesh.parse(text)
    for text in ("data=2,model=4", "data=8", "model=8", "data=2,seq=2,model=2", "data=2,model=2")
}


@functools.cache
def zoo_graph() -> Graph:
    """Every case of the zoo side by side: its own inputs, its own output."""
    nodes, inputs, outputs, types = [], [], [], {}
    for number, case in enumerate(CASES):
        names = tuple(f"x{number}.{i}" for i in range(len(case.kind.operands)))
        types |= dict(zip(names, case.kind.operands, strict=True)) | {f"y{number}": case.kind.result}
        nodes.append(
            Node(f"{number} {case.name}", case.node.op, names, (f"y{number}",), case.node.attributes)
        )
        inputs += names
        outputs.append(f"y{number}")
    return Graph("zoo", tuple(nodes), tuple(inputs), (), {}, tuple(outputs), types)
