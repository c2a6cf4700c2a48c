"""How many blocks there is memory for."""

from __future__ import annotations

from collections.abc import Collection

from p2pllm.errors import ModelError
from p2pllm.execution.blocks import BLOCK_TOKENS, outputs_layer
from p2pllm.execution.types import runs_of

__all__ = ["KvBudget"]


class KvBudget:
    """Turns bytes into blocks, which are as large as the largest layer seen wants them.

    A block of outputs may want more than that, and then counts as several.
    """

    def __init__(self, layers: int, output_bytes: int) -> None:
        """For a model of ``layers`` layers, between which a token has ``output_bytes``."""
        self._layers, self._output_bytes = layers, output_bytes
        self.block_bytes = 0
        """Bytes of a block, 0 until any layer was seen."""
        self._output_blocks = 0

    def learn(self, token_bytes: int) -> None:
        """A layer was seen that keeps so many bytes of a token."""
        self.block_bytes = max(self.block_bytes, token_bytes * BLOCK_TOKENS)
        if not self._output_blocks:  # and no other later on, so that what is taken is what is given back
            self._output_blocks = -(-self._output_bytes * BLOCK_TOKENS // self.block_bytes)

    @property
    def costs(self) -> dict[int, int]:
        """How many blocks one of the outputs at each border between layers counts as."""
        borders = (outputs_layer(end, self._layers) for end in range(1, self._layers))
        return {border: self._output_blocks for border in borders if border is not None}

    def width(self, held: Collection[int]) -> int:
        """What a block in all layers ``held`` counts as, with the outputs that each run of these keeps."""
        return len(held) + self._output_blocks * sum(end < self._layers for _, end in runs_of(held))

    def blocks(self, held: Collection[int], kv_bytes: int) -> int:
        """How many there are in ``kv_bytes``; raises `ModelError` if not even one in all layers ``held``."""
        blocks, width = kv_bytes // self.block_bytes, self.width(held)
        if blocks < width:
            least = width * self.block_bytes
            raise ModelError(f"no room for KV cache: {len(held)} layers need {least} bytes at least")
        return blocks
