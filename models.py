"""Sample models by name: `onnx:light_resnet50` anywhere a model is expected.

    resolve(text)   the file of a named sample, or `text` as a path
    samples()       all samples, with what they are fed

Every source is a prefix and a folder of ONNX files: `onnx:` the light models that come with the onnx package (weights
replaced by constants), `example:` the project's own, where the installation has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from .program import UserError
from .rewrite.model_file import read_model

SOURCES = {
    "onnx": Path(onnx.__file__).parent / "backend" / "test" / "data" / "light",
    "example": Path(__file__).parent / "examples" / "models",
}


@dataclass(frozen=True)
class Sample:
    """A model that can be named: its file, size and inputs (`8x3x224x224`, an open dimension by its name)."""

    name: str
    path: Path
    file_bytes: int
    operators: int
    inputs: tuple[tuple[str, str], ...]


def resolve(model: str) -> Path:
    """The file of `onnx:NAME` or `example:NAME`; any other text is a path."""
    prefix, colon, name = model.partition(":")
    if not colon or prefix not in SOURCES:
        return Path(model)
    files = {path.stem: path for path in _files(prefix)}
    if name not in files:
        known = ", ".join(files) or "none"
        raise UserError(f"model {model!r}: no such sample; known are {known} (parallegg models)")
    return files[name]


def samples() -> list[Sample]:
    """Every sample model of this installation."""
    return [_sample(prefix, path) for prefix in SOURCES for path in _files(prefix)]


def _files(prefix: str) -> list[Path]:
    return sorted(SOURCES[prefix].glob("*.onnx"))


def _sample(prefix: str, path: Path) -> Sample:
    graph = read_model(path).graph
    inputs = tuple(_inputs(graph))
    return Sample(f"{prefix}:{path.stem}", path, path.stat().st_size, len(graph.node), inputs)


def _inputs(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """What must be fed; some exporters declare weights as inputs too."""
    weights = {tensor.name for tensor in graph.initializer}
    filled = {node.output[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    for value in graph.input:
        if value.name not in weights | filled:
            dims = value.type.tensor_type.shape.dim
            yield value.name, "x".join(d.dim_param or str(d.dim_value) for d in dims)
