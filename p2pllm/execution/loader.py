"""Loading one slice: the meta model is cut first, then its tensors are read, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from p2pllm.errors import ModelError
from p2pllm.execution.architecture import SlicedModel, WeightUnit, build_model, model_config, weight_units
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.selfcheck import check_architecture
from p2pllm.execution.stage import Stage

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

    Memory peaks at the slice and one parameter. ``progress`` hears (bytes fetched and loaded, in all). Raises
    `ModelError` if the range is not in the model, a tensor is missing or has a wrong shape, or the model
    cannot be sliced.
    """
    if not 0 <= start < end <= checkpoint.layers:
        raise ModelError(f"{checkpoint.name} has layers 0:{checkpoint.layers}, not {start}:{end}")
    config = model_config(checkpoint)
    check_architecture(config)
    model = build_model(config, getattr(torch, dtype))
    units = weight_units(checkpoint, model)
    sliced = SlicedModel(model, start, end)
    wanted = sliced.states()
    if missing := [name for name in wanted if name not in units]:
        raise ModelError(f"{checkpoint.name} lacks {len(missing)} tensors of the model, first {missing[0]}")
    size = sum(state.nbytes for state in wanted.values())

    def report(fetched: int, to_fetch: int, loaded: int) -> None:
        if progress is not None:
            progress(fetched + loaded, to_fetch + size)

    sources = [source for name in wanted for source in units[name].sources]
    fetched = checkpoint.fetch(sources, lambda done, total: report(done, total, 0))
    _fill(
        checkpoint,
        sliced,
        wanted,
        units,
        device=torch.device(device),
        progress=lambda loaded: report(fetched, fetched, loaded),
    )
    sliced.finish(torch.device(device))
    return Stage(sliced, dtype=dtype, device=device)


def _fill(
    checkpoint: Checkpoint,
    sliced: SlicedModel,
    wanted: Mapping[str, Tensor],
    units: Mapping[str, WeightUnit],
    *,
    device: torch.device,
    progress: Callable[[int], None],
) -> None:
    done = 0
    # A head tied to the embedding is one tensor in a whole model; else the last stage has a copy of its own.
    made_of: dict[tuple[str, ...], Tensor] = {}
    filled: set[str] = set()
    for name, state in wanted.items():
        unit = units[name]
        if unit.sources in made_of and name not in filled:
            sliced.put(name, made_of[unit.sources])
        elif name not in filled:
            stored = {source: _to_tensor(checkpoint, source) for source in unit.sources}
            for target, value in unit.assemble(stored).items():
                if target in wanted:
                    placed = value.to(device=device, dtype=wanted[target].dtype).contiguous()
                    sliced.put(target, placed)
                    filled.add(target)
                    made_of[unit.sources] = placed
        done += state.nbytes
        progress(done)


def _to_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    array = checkpoint.read(name)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
