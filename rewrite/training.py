"""From a model to its training step: one graph of forward, backward and optimizer.

In: a Graph, a loss, an optimizer.  Out: a `TrainingStep`, whose graph has
  inputs      the batch (and its labels), learning_rate (float32), step (int64: finished steps), the moments
  parameters  the model's weights
  outputs     the loss, then new.NAME for every trained weight, moment and running statistic
`as_training_step` takes a model that is a training step already; `rebuilt` makes a step again by its recipe.
  which weights are trained            _trainable(): floating, not frozen, no statistics of a BatchNormalization
  running statistics                   _as_trained(): in training mode they are state that the forward part updates
  random draws (Dropout)               _as_trained(): anew in every step, by the input `step`
  decay groups                         _decays(): by default not biases and norms (one dimension, or by name)
  gradients before clipping            TrainingStep.gradients
  mixed precision                      precision.py; weights and moments stay as they are in the model
  phases of a given training step      _given_phases()
A weight of one element is a constant in our graphs, and not trained; nor is a statistic of one channel averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ..program import Node, TensorType, UserError
from .builder import Builder, Terms
from .gradients import gradients
from .graph import Graph, Roles, Statistic
from .losses import mean_squared_error, negative_log_likelihood, valid_labels, weighted_mean
from .operators import OPERATORS
from .optimizers import SGD, Adam, AdamW, Optimizer, clipped
from .precision import lowered
from .random_draws import draw_anew, draws
from .statistics import running

FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2
NO_DECAY = ("*bias*", "*norm*", "*ln_*")  # besides weights of one dimension
LOSSES = ("cross-entropy", "mse")
OPTIMIZERS: Mapping[str, type[SGD] | type[Adam]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW)}


@dataclass(frozen=True)
class LossSpec:
    """A loss on the model's output `output`, with its labels in the input `label`.

    cross-entropy: logits [.., classes], integer labels [..]; the mean is over labels that are not `ignore_index`.
    mse: labels like the output.  An input `label` that the model has is used, otherwise it is added.
    """

    kind: str
    output: str
    label: str = "labels"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise UserError(f"loss {self.kind!r}: not known; known are {', '.join(LOSSES)}")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"loss: label_smoothing must lie in [0, 1), got {self.label_smoothing}")


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One step of training as a graph, and what its tensors are.

    `initial` says how a state begins: as the "parameter" of that name in the model, as "zeros", or as the "input" of
    that name (only in given training steps, whose file holds no values).
    """

    graph: Graph
    phases: dict[str, int]  # node -> 0 forward, 1 backward, 2 optimizer
    state: tuple[tuple[str, str], ...]  # (input or parameter, output with its new value)
    loss: str
    initial: dict[str, str]
    gradients: dict[str, str]  # trained weight -> its gradient, before any clipping
    frozen: tuple[str, ...] = ()
    learning_rate: str | None = None
    step: str | None = None
    warnings: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)  # what `rebuilt` needs besides the model; JSON

    @property
    def roles(self) -> Roles:
        """What the planner needs to know of the step besides its graph."""
        return Roles(self.phases, self.state)

    @property
    def batch(self) -> tuple[str, ...]:
        """The inputs that are fed anew at every step: no state and no scalar of the optimizer."""
        other = {self.learning_rate, self.step} | {name for name, _ in self.state}
        return tuple(name for name in self.graph.inputs if name not in other)


def training_step(
    graph: Graph,
    *,
    loss: str | LossSpec,
    optimizer: Optimizer,
    clip_norm: float | None = None,
    frozen: Sequence[str] = (),
    no_decay: Sequence[str] | None = None,
    compute_dtype: str | None = None,
    strict: bool = False,
) -> TrainingStep:
    """The training step of a model.

    `loss` is the model's own scalar output or a LossSpec.  `frozen` and `no_decay` are patterns of parameter names
    (`*.bias`); `no_decay` replaces the default (see NO_DECAY).  `clip_norm` bounds the norm of all gradients.
    `compute_dtype="bfloat16"` computes in it with float32 weights.  `strict` makes warnings errors.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise UserError(f"clip_norm must be positive, got {clip_norm}")
    trainable, held = _trainable(graph, frozen)
    forward = _forward(graph, loss)
    if compute_dtype is not None:
        forward = lowered(forward, compute_dtype)
    (scalar,) = forward.outputs
    forward, measured, count = _as_trained(forward, held)
    wanted = [name for name in trainable if name in forward.parameters]
    backward = gradients(forward, scalar, wanted)
    found = {name: backward.gradients[name] for name in wanted if name in backward.gradients}
    warnings = _without_gradient(graph, trainable, found, scalar, strict)
    warnings += _not_measured(graph, held.union(name for name, _ in measured), scalar)
    decays = _decays(graph, list(found), no_decay)

    builder = Builder.extending(forward, backward.nodes, backward.types, backward.constants)
    phases = {node.name: FORWARD for node in forward.nodes} | {n.name: BACKWARD for n in backward.nodes}
    update = _Update(builder, optimizer, clip_norm, count)
    state = (*update.write(found, decays), *measured)
    outputs = {scalar: scalar} | {new: new for _, new in state}
    step = builder.finish(graph.name, outputs, graph.source)
    return TrainingStep(
        step,
        {node.name: phases.get(node.name, OPTIMIZER) for node in step.nodes},
        state,
        scalar,
        {name: "parameter" if name in step.parameters else "zeros" for name, _ in state},
        found,
        tuple(name for name in graph.parameters if name in held and name in step.parameters),
        update.rate,
        update.step,
        warnings,
        {
            "inputs": _sizes(graph),
            "loss": loss if isinstance(loss, str) else asdict(loss),
            "optimizer": {"name": type(optimizer).__name__, **asdict(optimizer)},
            "clip_norm": clip_norm,
            "frozen": list(frozen),
            "no_decay": None if no_decay is None else list(no_decay),
            "compute_dtype": compute_dtype,
        },
    )


def rebuilt(graph: Graph, recipe: Mapping[str, Any]) -> TrainingStep:
    """The training step of a model by the recipe of one that was made before."""
    options = {key: value for key, value in recipe.items() if key != "inputs"}
    if "pairs" in options:
        return as_training_step(graph, **options)
    fields = dict(options.pop("optimizer"))
    optimizer = OPTIMIZERS[fields.pop("name")](**fields)
    loss = options.pop("loss")
    return training_step(
        graph, loss=loss if isinstance(loss, str) else LossSpec(**loss), optimizer=optimizer, **options
    )


def _sizes(graph: Graph) -> dict[str, list[int]]:
    return {name: list(graph.types[name].shape) for name in graph.inputs}


# ------------------------------------------------------------------------------------- which weights


def matching(names: Iterable[str], patterns: Sequence[str], what: str) -> set[str]:
    """Names that match a pattern; every pattern must match something."""
    names, found = list(names), set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            raise UserError(f"{what} {pattern!r}: matches no parameter; there are {shown or 'none'}")
        found.update(hits)
    return found


def _trainable(graph: Graph, frozen: Sequence[str]) -> tuple[list[str], set[str]]:
    """Parameters to train, and what is held fixed: parameters, running statistics."""
    averages = dict.fromkeys(statistic.name for statistic in graph.statistics)
    held = matching(dict.fromkeys((*graph.parameters, *averages)), frozen, "frozen") | _statistics(graph)
    floating = [name for name in graph.parameters if graph.types[name].floating and name not in averages]
    trainable = [name for name in floating if name not in held]
    if not trainable:
        why = "all are frozen" if floating else "the model has none of a floating type"
        raise UserError(f"no parameter to train: {why}")
    return trainable, held


def _statistics(graph: Graph) -> set[str]:
    """Parameters that are only the mean or variance of a BatchNormalization: measured, not trained."""
    measured, other = set(), set()
    for node in graph.nodes:
        fixed = node.inputs[3:] if node.op == "BatchNormalization" else ()
        measured.update(fixed)
        other.update(node.inputs[: len(node.inputs) - len(fixed)])
    return measured.intersection(graph.parameters) - other


def _without_gradient(graph, trainable, found, loss, strict) -> tuple[str, ...]:
    missing = [name for name in trainable if name not in found]
    if missing and (strict or not found):
        text = ", ".join(map(repr, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise UserError(f"loss {loss!r} gives no gradient to {text}: freeze what should not be trained")
    return tuple(f"parameter {name!r} has no gradient and is not trained" for name in missing)


def _not_measured(graph: Graph, known: Collection[str], loss: str) -> tuple[str, ...]:
    """Running statistics, but the known ones: those of nodes that the loss does not depend on."""
    missing = dict.fromkeys(s.name for s in graph.statistics if s.name not in known)
    return tuple(
        f"loss {loss!r} does not depend on what {name!r} averages: it stays as it is" for name in missing
    )


def _decays(graph: Graph, trained: Sequence[str], no_decay: Sequence[str] | None) -> set[str]:
    if no_decay is not None:
        return set(trained) - matching(graph.parameters, no_decay, "no_decay")
    return {
        name
        for name in trained
        if graph.types[name].rank > 1 and not any(fnmatchcase(name.lower(), p) for p in NO_DECAY)
    }


# ------------------------------------------------------------------------------------------ the loss


def _forward(graph: Graph, loss: str | LossSpec) -> Graph:
    """The graph whose only output is the scalar loss."""
    name = loss if isinstance(loss, str) else loss.output
    if name not in graph.outputs:
        raise UserError(f"loss: the model has no output {name!r}; it has {', '.join(graph.outputs)}")
    builder = Builder.extending(graph)
    if isinstance(loss, str):
        kind = graph.types[loss]
        if not kind.floating or kind.size != 1:
            raise UserError(f"loss {loss!r} is {kind}, not a floating scalar: attach a loss, "
                            f"for example cross-entropy:{loss}")  # fmt: skip
        scalar = builder.emit("Reshape", (loss,), {"shape": ()}, f"{loss}/scalar")[0]
    else:
        scalar = _attach(Terms(builder, builder.fresh("loss")), loss, graph)
    return builder.finish(graph.name, {scalar: scalar}, graph.source)


def _as_trained(forward: Graph, held: set[str]) -> tuple[Graph, tuple[tuple[str, str], ...], str | None]:
    """The forward graph in a training step, the pairs of its running statistics, and its input that counts steps.

    A statistic that several nodes measure (of one layer that is used twice) is updated by each in turn.
    """
    builder = Builder.extending(forward)
    count = _counting(builder) if draws(builder) else None
    measuring: dict[str, list[Statistic]] = {}
    for statistic in forward.statistics:
        if statistic.name not in held:
            measuring.setdefault(statistic.name, []).append(statistic)
    pairs = tuple((name, _measured(builder, statistics)) for name, statistics in measuring.items())
    builder.statistics.clear()
    outputs = {name: name for name in (*forward.outputs, *(new for _, new in pairs))}
    return builder.finish(forward.name, outputs, forward.source), pairs, count


def _measured(builder: Builder, statistics: Sequence[Statistic]) -> str:
    """The next value of a weight that is the running average of what several nodes measure, named after the weight."""
    weight = current = statistics[0].name
    if weight not in builder.types:
        builder.weight(weight, statistics[0].type)
    t = Terms(builder, builder.fresh(f"new.{weight}"))
    for left, statistic in zip(reversed(range(len(statistics))), statistics, strict=True):
        label = f"{left}_to_come" if left else ""
        current = running(t, current, statistic.measured, statistic.momentum, label)
    return current


def _counting(builder: Builder) -> str:
    """A new input, the count of finished steps, on which every random draw depends."""
    step = builder.fresh("step")
    builder.input(step, TensorType((), "int64"))
    draw_anew(builder, step)
    return step


def _attach(t: Terms, loss: LossSpec, graph: Graph) -> str:
    kind = graph.types[loss.output]
    if not kind.floating:
        raise UserError(f"loss {loss.kind}: output {loss.output!r} is {kind}, not floating")
    found = loss.output
    if kind.dtype in ("float16", "bfloat16"):
        found = t.emit("Cast", found, label="wide", to="float32")
    if loss.kind == "mse":
        labels = _labels(t, loss, graph, t.type_of(found), (t.dtype_of(found),))
        return mean_squared_error(t, found, labels)
    if kind.rank < 1:
        raise UserError(f"loss cross-entropy: output {loss.output!r} is {kind}, it has no classes")
    labels = _labels(t, loss, graph, TensorType(kind.shape[:-1], "int64"), ("int64", "int32"))
    axis = kind.rank - 1
    logp = t.emit("LogSoftmax", found, label="log_probabilities", axis=axis)
    each = negative_log_likelihood(t, logp, labels, axis, smoothing=loss.label_smoothing, label="each")
    return weighted_mean(t, each, None, valid_labels(t, labels, loss.ignore_index))


def _labels(t: Terms, loss: LossSpec, graph: Graph, expected: TensorType, dtypes: tuple[str, ...]) -> str:
    """The input that holds the labels, added if the model has none of that name."""
    if loss.label in graph.inputs:
        kind = graph.types[loss.label]
        if kind.shape != expected.shape or kind.dtype not in dtypes:
            raise UserError(
                f"loss {loss.kind}:{loss.output}: the label input {loss.label!r} is {kind}, expected {expected}"
            )
    elif loss.label in graph.types:
        raise UserError(f"loss: the label {loss.label!r} is a tensor of the model, but no input")
    else:
        t.builder.input(loss.label, expected)
    return loss.label


# ----------------------------------------------------------------------------------------- the update


class _Update:
    """Writes the optimizer's nodes into a builder."""

    def __init__(
        self, builder: Builder, optimizer: Optimizer, clip_norm: float | None, step: str | None
    ) -> None:
        """`step` is the input that counts steps, if there is one already."""
        self.builder, self.optimizer, self.clip_norm = builder, optimizer, clip_norm
        self.rate = self._input("learning_rate", TensorType((), "float32"))
        counts = optimizer.counts_steps and step is None
        self.step = self._input("step", TensorType((), "int64")) if counts else step
        self._scalars: dict[str, tuple[str, ...]] = {}

    def write(self, gradients: Mapping[str, str], decays: set[str]) -> tuple[tuple[str, str], ...]:
        """Update every weight by its gradient; the pairs of state."""
        if self.clip_norm is not None:
            gradients = clipped(Terms(self.builder, "clip"), gradients, self.clip_norm)
        pairs, moments = [], []
        for weight, gradient in gradients.items():
            new, more = self._weight(weight, gradient, weight in decays)
            pairs.append((weight, new))
            moments += more
        return (*pairs, *moments)

    def _weight(self, weight: str, gradient: str, decay: bool) -> tuple[str, list[tuple[str, str]]]:
        """Update one weight, in float32 or wider; its new value and the pairs of its moments."""
        stored, builder = self.builder.types[weight], self.builder
        dtype = "float32" if stored.dtype in ("float16", "bfloat16") else stored.dtype
        kind = TensorType(stored.shape, dtype)
        old = [self._input(f"{moment}.{weight}", kind) for moment in self.optimizer.moments]
        result = Terms(builder, builder.fresh(f"new.{weight}"))
        t = result if dtype == stored.dtype else Terms(builder, f"{result.name}/wide")
        wide, gradient = (t.emit("Cast", x, label="wide", to=dtype) for x in (weight, gradient))
        moments = [(Terms(builder, builder.fresh(f"new.{moment}")), moment) for moment in old]
        new, made = self.optimizer.update(t, wide, gradient, moments, self._shared(dtype), decay)
        return result.emit("Cast", new, to=stored.dtype), list(zip(old, made, strict=True))

    def _shared(self, dtype: str) -> tuple[str, ...]:
        if dtype not in self._scalars:
            t = Terms(self.builder, "optimizer")
            self._scalars[dtype] = self.optimizer.scalars(t, self.rate, self.step, dtype)
        return self._scalars[dtype]

    def _input(self, name: str, kind: TensorType) -> str:
        name = self.builder.fresh(name)
        self.builder.input(name, kind)
        return name


# ------------------------------------------------------------------------------- a given training step


def as_training_step(
    graph: Graph, pairs: str | Sequence[str] | Mapping[str, str], *, loss: str = "loss"
) -> TrainingStep:
    """A model that already computes a training step.

    `pairs` says which output is the new value of which input or parameter: a mapping, or patterns such as
    `p.{} -> new.{}`, where {} stands for any text.  By a pattern, an input without such an output is frozen (or, by a
    bare `{}`, fed); an output without such an input is a mistake.
    """
    sizes = _sizes(graph)
    if loss not in graph.outputs:
        raise UserError(f"loss: the model has no output {loss!r}; it has {', '.join(graph.outputs)}")
    kind = graph.types[loss]
    if not kind.floating or kind.size != 1:
        raise UserError(f"loss {loss!r} is {kind}, not a floating scalar")
    frozen: list[str] = []
    if isinstance(pairs, Mapping):
        state = dict(pairs)
    else:
        state = {}
        for pattern in [pairs] if isinstance(pairs, str) else pairs:
            found, rest = _pairs_by(pattern, graph)
            state |= found
            frozen += rest
    _check_state(graph, state)
    graph, count = _drawn_anew(graph)
    phases = _given_phases(graph, loss, state)
    return TrainingStep(
        graph,
        phases,
        tuple(state.items()),
        loss,
        {name: "input" if name in graph.inputs else "parameter" for name in state},
        _given_gradients(graph, phases, state),
        tuple(name for name in frozen if name not in state),
        step=count,
        recipe={
            "inputs": sizes,
            "pairs": pairs
            if isinstance(pairs, str)
            else dict(pairs)
            if isinstance(pairs, Mapping)
            else list(pairs),
            "loss": loss,
        },
    )


def _drawn_anew(graph: Graph) -> tuple[Graph, str | None]:
    """The graph with other random draws in every step, and the input that counts them; as it is without draws."""
    builder = Builder.extending(graph)
    if not draws(builder):
        return graph, None
    count = _counting(builder)
    return builder.finish(graph.name, {name: name for name in graph.outputs}, graph.source), count


def _pairs_by(pattern: str, graph: Graph) -> tuple[dict[str, str], list[str]]:
    """The pairs that a pattern finds, and the inputs that it matches without an output."""
    old, arrow, new = (part.strip() for part in pattern.partition("->"))
    if not arrow or old.count("{}") != 1 or new.count("{}") != 1:
        raise UserError(f"state {pattern!r}: expected a pattern such as 'p.{{}} -> new.{{}}'")
    leaves = {text: name for name in (*graph.inputs, *graph.parameters) if (text := _inside(old, name))}
    results = {text: name for name in graph.outputs if (text := _inside(new, name))}
    found = {leaves[text]: results[text] for text in leaves if text in results}
    if not found:
        raise UserError(
            f"state {pattern!r}: matches no input with its output; the inputs are {_some(graph.inputs)}, "
            f"the outputs {_some(graph.outputs)}"
        )
    if old != "{}" and new != "{}":
        for text, name in results.items():
            if text not in leaves:
                raise UserError(
                    f"state {pattern!r}: output {name!r} is the new value of no input "
                    f"or parameter {old.replace('{}', text)!r}"
                )
    return found, [name for text, name in leaves.items() if text not in results] if old != "{}" else []


def _inside(pattern: str, name: str) -> str | None:
    """The text that {} stands for."""
    before, after = pattern.split("{}")
    fits = len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after)
    return name[len(before) : len(name) - len(after)] if fits else None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _check_state(graph: Graph, state: Mapping[str, str]) -> None:
    if not state:
        raise UserError("state: no pair of an input and its new value is given")
    seen: dict[str, str] = {}
    for name, new in state.items():
        if name not in graph.inputs and name not in graph.parameters:
            raise UserError(f"state: the model has no input or parameter {name!r}")
        if new not in graph.outputs:
            raise UserError(f"state {name!r}: the model has no output {new!r}")
        if graph.types[name] != graph.types[new]:
            raise UserError(
                f"state {name!r} is {graph.types[name]}, but its new value {new!r} is {graph.types[new]}"
            )
        if seen.setdefault(new, name) != name:
            raise UserError(f"state {name!r}: output {new!r} is already the new value of {seen[new]!r}")


def _given_phases(graph: Graph, loss: str, state: Mapping[str, str]) -> dict[str, int]:
    """Forward is what the loss depends on; optimizer what is elementwise on the way to a new value; else backward.

    On the way means: read by optimizer nodes alone, with the shape of that state (or a scalar).  A sum of tensors that
    no state has entered yet is a gradient, so backward; so is the norm by which gradients are clipped.
    """
    forward = _leading_to(graph, loss)
    entered = _entered(graph, forward, state)
    phases: dict[str, int] = {}
    shapes = {
        new: {graph.types[name].shape} for name, new in state.items()
    }  # of the states it is on the way to
    read = set(graph.outputs) - set(state.values())  # by other nodes than the optimizer's
    for node in reversed(graph.nodes):
        targets, shape = shapes.get(node.outputs[0], set()), graph.types[node.outputs[0]].shape
        on_the_way = bool(targets) and (shape == () or shape in targets) and read.isdisjoint(node.outputs)
        if node.name in forward:
            phases[node.name] = FORWARD
        elif on_the_way and _elementwise(node) and not _sums_gradients(node, graph, entered):
            phases[node.name] = OPTIMIZER
            for tensor in node.inputs:
                shapes.setdefault(tensor, set()).update(targets)
        else:
            phases[node.name] = BACKWARD
        if phases[node.name] != OPTIMIZER:
            read.update(node.inputs)
    return {node.name: phases[node.name] for node in graph.nodes}


def _leading_to(graph: Graph, loss: str) -> set[str]:
    """The nodes that the loss depends on."""
    wanted, found = {loss}, set()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            found.add(node.name)
            wanted.update(node.inputs)
    return found


def _entered(graph: Graph, forward: set[str], state: Iterable[str]) -> set[str]:
    """State, and what elementwise nodes after the forward part make of it in its shape."""
    entered = set(state)
    for node in graph.nodes:
        if node.name not in forward and _elementwise(node):
            shape = graph.types[node.outputs[0]].shape
            if any(x in entered and graph.types[x].shape == shape for x in node.inputs):
                entered.update(node.outputs)
    return entered


def _elementwise(node: Node) -> bool:
    return node.op == "Where" or (node.op in OPERATORS and OPERATORS[node.op].family in ("Unary", "Binary"))


def _sums_gradients(node: Node, graph: Graph, entered: set[str]) -> bool:
    whole = all(graph.types[x].shape == graph.types[node.outputs[0]].shape for x in node.inputs)
    return node.op == "Add" and whole and entered.isdisjoint(node.inputs)


def _given_gradients(graph: Graph, phases: Mapping[str, int], state: Mapping[str, str]) -> dict[str, str]:
    """For a state, the only tensor of the backward part that its update reads in its shape."""
    maker = {tensor: node for node in graph.nodes for tensor in node.outputs}
    found = {}
    for name, new in state.items():
        ends, seen, stack = set(), set(), [new]
        while stack:
            tensor = stack.pop()
            node = maker.get(tensor)
            if tensor in seen or node is None:
                continue
            seen.add(tensor)
            if phases[node.name] == OPTIMIZER:
                stack += node.inputs
            elif graph.types[tensor].shape == graph.types[name].shape:
                ends.add(tensor)
        if len(ends) == 1:
            found[name] = ends.pop()
    return found
