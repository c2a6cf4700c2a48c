"""A loaded slice and its forward pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .architecture import SlicedModel
from .attention import Ragged, Segment

__all__ = ["Stage"]


class Stage:
    """Decoder layers [start, end) ready to run. Not for two threads at once."""

    def __init__(self, model: SlicedModel, *, dtype: str, device: str) -> None:
        self.start, self.end = model.start, model.end
        self.is_last = model.is_last
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._model = model
        storages = {
            state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()
            for _, state in model.states()
        }
        self.weight_bytes = sum(storages.values())

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], inputs: Tensor, start: int, end: int) -> Tensor:
        """Run layers [start, end), a sub-range of the slice, over the segments' tokens, one segment after the other.

        ``inputs`` are token ids (tokens,) at layer 0, hidden states (tokens, hidden) of any float type elsewhere.
        Returns hidden states (tokens, hidden). The segments' caches take the new keys and values.
        """
        if len(segments) == 1:
            first = segments[0].position
            positions = torch.arange(first, first + segments[0].count, device=self.device)
        else:
            spans = [torch.arange(s.position, s.position + s.count) for s in segments]
            positions = torch.cat(spans).to(self.device)
        if start == 0:
            ragged = Ragged(segments, positions, inputs.to(self.device), None)
        else:
            hidden = inputs.to(device=self.device, dtype=self.dtype).unsqueeze(0)
            ragged = Ragged(segments, positions, positions, hidden)
        return self._model.run(ragged, start, end)

    def is_long(self, tokens: int) -> bool:
        """Whether a session this long must not share a batch with short ones (their rotary tables differ)."""
        return self._model.rope_switch is not None and tokens > self._model.rope_switch

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that clocks tell the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocabulary) in float32, on the CPU, from hidden states (rows, hidden) after the model's last layer."""
        return self._model.logits(hidden).cpu()
