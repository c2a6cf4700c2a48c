"""Loading one slice: the meta model is cut first, then only its own tensors are read, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ModelError
from .architecture import SlicedModel, WeightUnit, build_model, model_config, weight_units
from .checkpoint import Checkpoint
from .selfcheck import check_architecture
from .stage import Stage

__all__ = ["load_stage"]


def load_stage(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    dtype: str,
    device: str,
    progress: Callable[[int, int], None] | None = None,
) -> Stage:
    """Load layers [start, end) of ``checkpoint`` in ``dtype`` onto ``device``.

    Memory peaks at the slice and one parameter. ``progress`` hears (bytes loaded, bytes in all). Raises `ModelError`
    if the range is not in the model, a tensor is missing or of the wrong shape, or the architecture cannot be sliced.
    """
    if not 0 <= start < end <= checkpoint.layers:
        raise ModelError(f"{checkpoint.name} has layers 0:{checkpoint.layers}, not {start}:{end}")
    config = model_config(checkpoint)
    check_architecture(config)
    model = build_model(config, getattr(torch, dtype))
    units = weight_units(checkpoint, model)
    sliced = SlicedModel(model, start, end)
    wanted = dict(sliced.states())
    if missing := [name for name in wanted if name not in units]:
        raise ModelError(
            f"{checkpoint.name} lacks {len(missing)} tensors of the model, the first is {missing[0]}"
        )
    checkpoint.fetch([source for name in wanted for source in units[name].sources])
    _fill(checkpoint, sliced, wanted, units, torch.device(device), progress)
    sliced.model.to(device)  # what is left: rotary tables and other buffers that are computed, not stored
    return Stage(sliced, dtype=dtype, device=device)


def _fill(
    checkpoint: Checkpoint,
    sliced: SlicedModel,
    wanted: dict[str, Tensor],
    units: dict[str, WeightUnit],
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(state.numel() * state.element_size() for state in wanted.values())
    done = 0
    # A tied head and embedding in one slice are one tensor; across slices the last stage has its own copy.
    shared: dict[tuple[str, ...], Tensor] = {}
    filled: set[str] = set()
    for name, state in wanted.items():
        if name not in filled:
            unit = units[name]
            if unit.sources in shared:
                made = {name: shared[unit.sources]}
            else:
                stored = {source: _to_tensor(checkpoint, source) for source in unit.sources}
                made = {
                    target: value.to(device=device, dtype=wanted[target].dtype).contiguous()
                    for target, value in unit.assemble(stored).items()
                    if target in wanted
                }
            for target, value in made.items():
                sliced.put(target, value)
                filled.add(target)
            if len(made) == 1:
                shared[unit.sources] = next(iter(made.values()))
        done += state.numel() * state.element_size()
        if progress is not None:
            progress(done, total)


def _to_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    array: npt.NDArray[Any] = checkpoint.read(name)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
