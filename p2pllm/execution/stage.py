"""The layers that are here, and their forward pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from p2pllm.execution.architecture import SlicedModel
from p2pllm.execution.attention import Ragged, Segment

__all__ = ["Stage"]


class Stage:
    """A model with some of its layers ready to run. One thread runs it; another may fill layers meanwhile."""

    def __init__(self, model: SlicedModel, *, dtype: str, device: str) -> None:
        self.layers = model.layers
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._model = model

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are here. Not while layers are being filled."""
        return self._model.nbytes

    def retain(self, layers: Collection[int]) -> None:
        """Keep these layers, and free the memory of all others. Not while layers are being filled."""
        self._model.retain(layers)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], inputs: Tensor, start: int, end: int) -> Tensor:
        """Run layers [start, end), which must be here, over the tokens of the segments, one after the other.

        ``inputs`` are token ids (tokens,) at layer 0, hidden states (tokens, hidden) of any float type after
        it. Returns hidden states (tokens, hidden). The segments' caches take the new keys and values.
        """
        if len(segments) == 1:
            first = segments[0].position
            positions = torch.arange(first, first + segments[0].count, device=self.device)
        else:
            spans = [torch.arange(s.position, s.position + s.count) for s in segments]
            positions = torch.cat(spans).to(self.device)
        ragged = Ragged(segments, positions.unsqueeze(0))
        if start == 0:
            ragged.tokens = inputs.to(self.device).unsqueeze(0)
        else:
            ragged.received = inputs.to(device=self.device, dtype=self.dtype).unsqueeze(0)
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
        """(rows, vocabulary), float32 on the CPU, from hidden states (rows, hidden) after the last layer."""
        return self._model.logits(hidden).cpu()
