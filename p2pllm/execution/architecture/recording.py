"""Running a model's forward pass again without its Python: the calls that it made, one after the other.

In a step for few rows Python takes longer to find its way through a model's modules than some of what they
compute: with a small model a quarter of the time. What modules call depends on how many rows there are and
not on what is in them. So the calls are noted once for each number of rows, with a `TorchFunctionMode`, and
then made again. Where they do depend on values, the modules go on to run themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Recorded"]

_MOST_ROWS: Final = 16
"""With more of them it is the computing that takes time."""
_MOST_RECORDINGS: Final = 128

_ASKS: Final = frozenset(
    {"__get__", "__len__", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size"}
)
"""What says nothing of a tensor's values; ``__get__`` is of properties."""
_CHOOSES: Final = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "masked_scatter"}
)
"""What gives tensors whose shapes depend on values."""

log = structlog.get_logger()


class _UnfitError(Exception):
    """What was called depends on values."""


class Recorded:
    """A function that calls the same for any inputs with so many rows, as long as its parameters stay."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        """``function`` gets a hashable key and its inputs, of which the first is (1, rows, …)."""
        self._function = function
        self._known: dict[tuple[Any, int], _Recording | None] = {}
        self._seen: set[tuple[Any, int]] = set()

    def forget(self) -> None:
        """Parameters are about to go."""
        self._known.clear()
        self._seen.clear()

    def __call__(self, key: Any, rows: Tensor, *inputs: Any) -> Tensor:
        """What the function gives for this key and these inputs."""
        address = key, rows.shape[1]
        if address in self._known:
            recording = self._known[address]
            if recording is None:
                return self._function(key, rows, *inputs)
            if recording.is_trusted:
                return recording.run(rows, *inputs)
            return self._verify(address, recording, rows, *inputs)
        if address not in self._seen:  # what is made at first use is none of the calls
            if len(self._seen) < _MOST_RECORDINGS and rows.shape[1] <= _MOST_ROWS:
                self._seen.add(address)
            return self._function(key, rows, *inputs)
        recorder = _Recorder((rows, *inputs))
        try:
            with recorder:
                result = self._function(key, rows, *inputs)
            self._known[address] = recorder.recording(result)
        except _UnfitError as error:
            log.debug("pass_not_recorded", reason=str(error))
            self._known[address] = None
            result = self._function(key, rows, *inputs)
        return result

    def _verify(self, address: tuple[Any, int], recording: _Recording, *inputs: Any) -> Tensor:
        """Other values than those it was recorded with must give the same as well."""
        result = self._function(address[0], *inputs)
        if torch.isfinite(result).all():
            recording.is_trusted = torch.equal(recording.run(*inputs), result)
            if not recording.is_trusted:
                log.debug("pass_not_recorded", reason="its values are not those of the modules")
                self._known[address] = None
        return result


class _Recording:
    """Calls as a Python function."""

    def __init__(self, source: str, constants: dict[str, Any]) -> None:
        self.is_trusted = False
        exec(compile(source, "<recorded pass>", "exec"), constants)  # noqa: S102  made here, of names alone
        self.run: Callable[..., Tensor] = constants["run"]


@dataclass(slots=True)
class _Call:
    """``text`` is its source; values go by their numbers, None is what is no tensor."""

    text: str
    uses: list[int]
    gives: list[int | None]
    is_tuple: bool

    @property
    def line(self) -> str:
        names = ["_" if value is None else f"v{value}" for value in self.gives]
        target = f"{', '.join(names)}{',' * self.is_tuple} = " if names else ""
        return f"    {target}{self.text}"


class _Recorder(TorchFunctionMode):
    """Notes calls while they are made."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._values: list[Any] = []  # keeps all of them, so identities are their own
        self._numbers: dict[int, int] = {}
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._inputs = [self._number(value) for value in inputs]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (
            name in _CHOOSES
            or (name == "where" and len(args) == 1)
            or (name == "__getitem__" and _is_mask(args[1]))
        ):
            raise _UnfitError(f"{name} depends on values")
        is_tuple = isinstance(result, (tuple, list))
        results = list(result) if is_tuple else [] if result is None else [result]
        tensors = [value for value in results if isinstance(value, Tensor)]
        if results and not tensors:
            if name not in _ASKS:
                raise _UnfitError(f"{name} is no tensor")
            return result
        if tensors and not name.endswith("_") and all(id(value) in self._numbers for value in tensors):
            return result  # it gave back what it was given
        uses: list[int] = []
        said = [self._say(value, uses) for value in args]
        said += [f"{key}={self._say(value, uses)}" for key, value in kwargs.items()]
        gives = [self._number(value) if isinstance(value, Tensor) else None for value in results]
        self._calls.append(_Call(f"{self._name(func)}({', '.join(said)})", uses, gives, is_tuple))
        return result

    def recording(self, result: Tensor) -> _Recording:
        """All of it as a function from the inputs to ``result``."""
        end = self._numbers.get(id(result))
        if end is None:
            raise _UnfitError("the result comes from nowhere")
        needed = {end}
        lines = [f"    return v{end}"]
        for call in reversed(self._calls):
            values = dict.fromkeys([*call.uses, *(value for value in call.gives if value is not None)])
            if over := [value for value in values if value not in needed]:
                lines.append(f"    del {', '.join(f'v{value}' for value in over)}")
                needed.update(over)
            lines.append(call.line)
        lines.append(f"def run({', '.join(f'v{value}' for value in self._inputs)}):")
        return _Recording("\n".join(reversed(lines)), self._constants)

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
        return number

    def _say(self, value: Any, uses: list[int]) -> str:
        """An argument as source."""
        number = self._numbers.get(id(value))
        if number is not None:
            uses.append(number)
            return f"v{number}"
        if type(value) in (tuple, list):
            inner = "".join(f"{self._say(item, uses)}, " for item in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        if type(value) is slice:
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._say(end, uses) for end in ends)})"
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A name for what stays the same."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._names)}"
            self._constants[name] = value
        return name


def _is_mask(value: Any) -> bool:
    """Whether an index chooses by values."""
    if isinstance(value, tuple):
        return any(map(_is_mask, value))
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)
