"""Batches for training: consecutive slices of the arrays of a file, or what a Python function yields.

    data = open_data("text.npz", inputs, check)             `inputs`: name -> the planned type
    data = open_data("my_data.py:batches", inputs, check)   the file is run: trusted code
    data.require(steps, first, skip, repeat)                refuses data that do not suffice, where that can be told
    next(data.batches(skip, repeat))                        `skip` batches are left out; `repeat` starts again
A function is called without arguments, or with `shapes=` (input name -> planned shape) if it has such a parameter, and
yields dicts of arrays by input name.  What goes wrong in it is a UserError with file, line and reason, and so is the
end of the data: an iterator of batches does not just stop.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import read_arrays
from .planfile import as_planned
from .program import TensorType, UserError

Batch = dict[str, np.ndarray]
Inputs = Mapping[str, TensorType]
Check = Callable[[Mapping[str, Any], str], None]
END = object()


def open_data(text: str, inputs: Inputs, check: Check) -> ArrayData | FunctionData:
    """The data of `FILE.npz` or `FILE.py:FUNCTION`; `check(batch, what)` refuses what the plan does not take."""
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        return FunctionData(Path(file), function, inputs, check)
    if text.endswith(".py"):
        raise UserError(f"{text}: which of its functions yields batches? Expected {text}:FUNCTION")
    return ArrayData(Path(text), read_arrays(Path(text)), inputs)


def examples_of(inputs: Inputs) -> int:
    """Examples in a batch; 1 where no input has dimensions."""
    return next((type_.shape[0] for type_ in inputs.values() if type_.rank), 1)


def tokens_of(inputs: Inputs) -> int | None:
    """Tokens in a batch: the elements of its first integer matrix, if it has one."""
    return next((t.size for t in inputs.values() if t.rank == 2 and not t.floating), None)


# ------------------------------------------------------------------------------------------------ arrays


class ArrayData:
    """Batches of the planned size from whole arrays, first to last; a rest that fills no batch is left out.

    An input without dimensions is the same in every batch.
    """

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], inputs: Inputs) -> None:
        self.path, self.inputs = path, inputs
        self.arrays = {name: _column(path, name, arrays, expected) for name, expected in inputs.items()}
        for name in arrays:
            if name not in inputs:
                raise UserError(f"{path}: the plan has no input {name!r}; it has {', '.join(inputs)}")
        sized = [(name, len(self.arrays[name]), t.shape[0]) for name, t in inputs.items() if t.rank]
        self.size = examples_of(inputs)
        self.examples, self.count = 1, math.inf  # any number of batches
        for i, (name, examples, size) in enumerate(sized):
            if i == 0:
                self.examples, self.count = examples, examples // size
            elif examples * self.size != self.examples * size:
                raise UserError(
                    f"{path}: input {sized[0][0]!r} has {self.examples} examples, but {name!r} has {examples}"
                )

    def require(self, steps: int, first: int, skip: int, repeat: bool) -> None:
        """Refuse data that do not suffice for `steps` from step `first`, before anything is done."""
        if self.count == 0:
            raise UserError(f"{self.path}: {self.examples} examples are no batch of {self.size}")
        left = max(self.count - skip, 0)
        if steps > left and not repeat:
            skipped = f" without the first {_batches(skip)} (--skip)" if skip else ""
            raise UserError(
                f"{self.path}: data ends early: {self.examples} examples are enough for "
                f"{left} {'step' if left == 1 else 'steps'} of {self.size}{skipped}, step {first + left} has none; "
                "--repeat starts again"
            )

    def batches(self, skip: int, repeat: bool) -> Iterator[Batch]:
        for number in itertools.count(skip):
            if number >= self.count and not repeat:
                raise UserError(f"{self.path}: data ends early, after {_batches(number)}")
            yield self._batch(number if self.count == math.inf else number % int(self.count))

    def _batch(self, i: int) -> Batch:
        sizes = {name: type_.shape[0] for name, type_ in self.inputs.items() if type_.rank}
        return {
            name: array[i * sizes[name] : (i + 1) * sizes[name]] if name in sizes else array
            for name, array in self.arrays.items()
        }


def _column(path: Path, name: str, arrays: Mapping[str, np.ndarray], expected: TensorType) -> np.ndarray:
    """All examples of one input."""
    if name not in arrays:
        raise UserError(f"{path}: input {name!r} is missing, expected {_many(expected)}")
    array = as_planned(arrays[name], expected.dtype)
    fits = array.ndim == expected.rank and array.shape[1:] == expected.shape[1:]
    if not fits or str(array.dtype) != expected.dtype:
        found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        raise UserError(f"{path}: input {name!r}: expected {_many(expected)}, found {found}")
    return array


def _many(expected: TensorType) -> str:
    if not expected.rank:
        return str(expected)
    sizes = ",".join(["n", *map(str, expected.shape[1:])])
    return f"{expected.dtype}[{sizes}] in batches of {expected.shape[0]}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


# ------------------------------------------------------------------------------------------------ functions


class FunctionData:
    """Batches that a function of a Python file yields."""

    def __init__(self, path: Path, name: str, inputs: Inputs, check: Check) -> None:
        self.path, self.name, self.inputs, self.check = path, name, inputs, check
        self._function = _function(path, name)

    def require(self, steps: int, first: int, skip: int, repeat: bool) -> None:
        """Nobody knows how many there will be."""

    def batches(self, skip: int, repeat: bool) -> Iterator[Batch]:
        number = 0
        while True:
            start = number
            for batch in self._once():
                number += 1
                if number > skip:
                    yield self._checked(batch, number)
            if number == start:
                raise UserError(f"{self.path}:{self.name}: data ends early, it yields no batch")
            if not repeat:
                raise UserError(
                    f"{self.path}:{self.name}: data ends early, after {_batches(number)}; --repeat starts again"
                )

    def _once(self) -> Iterator[Any]:
        """What the function yields when it is called."""
        iterator = _guarded(self.path, lambda: iter(self._function(**self._arguments())))
        while (batch := _guarded(self.path, lambda: next(iterator, END))) is not END:
            yield batch

    def _arguments(self) -> dict[str, Any]:
        try:
            parameters = inspect.signature(self._function).parameters
        except ValueError:  # written in C
            return {}
        return (
            {"shapes": {name: t.shape for name, t in self.inputs.items()}} if "shapes" in parameters else {}
        )

    def _checked(self, batch: Any, number: int) -> Batch:
        what = f"{self.path}:{self.name}: batch {number}"
        if not isinstance(batch, Mapping):
            raise UserError(f"{what}: found a {type(batch).__name__}, expected a dict of arrays")
        arrays = {}
        for name, array in batch.items():
            try:
                arrays[name] = np.asarray(array)
            except (TypeError, ValueError) as error:  # lists of unequal lengths, for example
                raise UserError(f"{what}: input {name!r} is no array: {error}") from None
            if name in self.inputs:
                arrays[name] = as_planned(arrays[name], self.inputs[name].dtype)
        self.check(arrays, what)
        return arrays


def _function(path: Path, name: str) -> Callable[..., Any]:
    module = _module(path)
    found = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if key[0] != "_" and inspect.isfunction(value)]
        raise UserError(f"{path}: has no function {name!r}; it has {', '.join(own) or 'none'}")
    if not callable(found):
        raise UserError(
            f"{path}: {name!r} is of type {type(found).__name__}, expected a function that yields batches"
        )
    return found


def _module(path: Path) -> ModuleType:
    """The file, run; it may import its neighbours, as a script may."""
    if not path.is_file():
        raise UserError(f"{path}: cannot be read: {'it is a folder' if path.is_dir() else 'No such file'}")
    spec = importlib.util.spec_from_file_location(
        f"data_of_{path.stem}", path
    )  # no module's name that it imports
    assert spec and spec.loader
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[module.__name__] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    _guarded(path, lambda: loader.exec_module(module))
    return module


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """The call's result; an error in it is told with the last line of the file that took part."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        lines, trace = [], error.__traceback__
        while trace is not None:
            if Path(trace.tb_frame.f_code.co_filename).absolute() == path.absolute():
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.lineno:
            lines.append(error.lineno)
        where = f"{path}:{lines[-1]}" if lines else str(path)
        said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise UserError(f"{where}: {type(error).__name__}{f': {said}' if said else ''}") from error
