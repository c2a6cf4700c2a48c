"""What stands in a slice of a model for the parts that are elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from p2pllm.execution.attention import Ragged

__all__ = ["Entry", "NoEmbedding", "Normed", "Output"]


class Entry(nn.Module):
    """The first layer of a stage in mid-model: takes the received hidden states in place of its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, _: Tensor, *args: Any, ragged: Ragged, **kwargs: Any) -> Any:
        return self.layer(ragged.received, *args, ragged=ragged, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Some models ask their layers what kind of attention they want.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class NoEmbedding(nn.Module):
    """Stands for the embedding in mid-model; `Entry` drops what it gives."""

    def forward(self, indices: Tensor) -> Tensor:
        return torch.zeros((), device=indices.device)


class Normed(nn.Module):
    """Stands for the decoder when only the head is run: hands back the given states, normalised."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Output:
        return Output(self.norm(inputs_embeds))


class Output:
    """A model output of which only the hidden states exist."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None
