"""Loading layers: what is missing of them is read from the checkpoint, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from p2pllm.errors import ModelError
from p2pllm.execution.architecture import SlicedModel, WeightUnit, build_model, model_config, weight_units
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.hardware import return_host_memory
from p2pllm.execution.quantization import check_quant
from p2pllm.execution.selfcheck import check_architecture
from p2pllm.execution.stage import Stage

__all__ = ["Loader"]

_RETURNED_AT_ONCE = 64 << 20
"""Bytes of weights after which freed memory goes back to the system, before it adds up."""


class Loader:
    """A checkpoint, and the `Stage` that its layers are loaded into; at first it holds none."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: str, device: str, quant: str = "none") -> None:
        """Build the model without weights, in a second or more; raises `ModelError` if it cannot be
        sliced, or not be kept as ``quant`` says.
        """
        check_quant(quant, device)
        config = model_config(checkpoint)
        siblings = check_architecture(config)
        model = build_model(config, getattr(torch, dtype))
        self._checkpoint = checkpoint
        self._device = torch.device(device)
        self._units = weight_units(checkpoint, model)
        self._model = SlicedModel(model, self._device, siblings=siblings, quant=quant)
        self.stage = Stage(self._model, dtype=dtype, device=device)

    def load(self, start: int, end: int, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Read what is not here yet of layers [start, end). The stage may run its other layers meanwhile.

        Memory peaks at the new layers and one parameter. ``progress`` hears (bytes fetched and loaded, in
        all). Raises `ModelError` if the range is not in the model, or a tensor is missing or has a wrong
        shape; what was read before that stays until the stage is told what to retain.
        """
        if not 0 <= start < end <= self._model.layers:
            name, layers = self._checkpoint.name, self._model.layers
            raise ModelError(f"{name} has layers 0:{layers}, not {start}:{end}")
        wanted = self._model.missing(start, end)
        if lacking := [name for name in wanted if name not in self._units]:
            raise ModelError(
                f"{self._checkpoint.name} lacks {len(lacking)} tensors of the model, first {lacking[0]}"
            )
        size = sum(state.nbytes for state in wanted.values())
        sources = [source for name in wanted for source in self._units[name].sources]
        fetched = self._checkpoint.fetch(sources, lambda done, total: progress(done, total + size))
        self._fill(wanted, lambda loaded: progress(fetched + loaded, fetched + size))

    def _fill(self, wanted: dict[str, Tensor], progress: Callable[[int], None]) -> None:
        # A head tied to the embedding is one tensor where both are here; else each has a copy of its own.
        made_of = {self._units[name].sources: value for name, value in self._model.kept().items()}
        filled: set[str] = set()
        done = returned = 0
        for name, state in wanted.items():
            unit = self._units[name]
            if name not in filled:
                if unit.sources in made_of:
                    self._model.put(name, made_of[unit.sources])
                else:
                    filled |= self._make(unit, wanted)
                    if (kept := self._model.kept_as(name)) is not None:
                        made_of[unit.sources] = kept
            done += state.nbytes
            if done - returned > _RETURNED_AT_ONCE:
                return_host_memory()
                returned = done
            progress(done)

    def _make(self, unit: WeightUnit, wanted: Mapping[str, Tensor]) -> set[str]:
        """Read what a unit is made of and put it in the model; returns the names it filled.

        Nothing of it stays referenced here, so that the next one finds its memory free.
        """
        made = dict(unit.assemble({source: self._read(source) for source in unit.sources}))
        filled = made.keys() & wanted.keys()
        for name in sorted(filled):
            self._model.put(name, made.pop(name).to(self._device, wanted[name].dtype).contiguous())
        return filled

    def _read(self, name: str) -> Tensor:
        array = self._checkpoint.read(name)
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
