"""The whole embedded model as transformers loads and runs it: what every answer is compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from p2pllm.execution import open_checkpoint
from p2pllm.execution.gguf_file import GgufCheckpoint
from p2pllm.execution.sampler import uniform

NEAR_TIE = 1e-3
"""In fp32 a greedy token may differ where its logit is this near the best, a sampled one where its uniform is
this near a boundary: the order of a summation decides such ties."""


class Reference:
    """transformers' own model and tokenizer, in fp32."""

    def __init__(self) -> None:
        checkpoint = open_checkpoint("embedded")
        assert isinstance(checkpoint, GgufCheckpoint)
        folder, file = str(checkpoint.path.parent), checkpoint.path.name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        )
        self.model.eval()

    def prompt(self, text: str) -> list[int]:
        """Token ids of a chat with one user message."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]

    def text(self, tokens: list[int]) -> str:
        """What a person reads."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocabulary) of one whole forward pass."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]

    def check_greedy(self, prompt: str, tokens: list[int], *, limit: int) -> None:
        """Each token is the best one after those before it, near ties aside, and the end is where it must
        be.
        """
        ids = self.prompt(prompt)
        rows = self.logits([*ids, *tokens])[len(ids) - 1 : -1]
        for position, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            best = row.max()
            assert best - row[token] <= NEAR_TIE, (
                f"token {position} is {token}, transformers has {row.argmax()}"
            )
        ends = [position for position, token in enumerate(tokens) if token == self.tokenizer.eos_token_id]
        assert ends == [len(tokens) - 1] if len(tokens) < limit else ends in ([], [limit - 1])

    def check_sampled(self, prompt: str, tokens: list[int], **sampling: Any) -> None:
        """Each token is where its uniform falls, near ties aside."""
        for position, distance in enumerate(self._distances(prompt, tokens, **sampling)):
            assert distance <= NEAR_TIE, f"token {position} is {distance:.2g} away from its uniform"

    def check_same(self, prompt: str, one: list[int], other: list[int], **sampling: Any) -> None:
        """Two sampled answers are the same, or part where the uniform is near a boundary."""
        if one == other:
            return
        parting = next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        for tokens in (one, other):
            assert self._distances(prompt, tokens[: parting + 1], **sampling)[parting] > -NEAR_TIE

    def _distances(
        self,
        prompt: str,
        tokens: list[int],
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        **_: Any,
    ) -> list[float]:
        """How far each uniform is outside the share of the token drawn (negative: how far inside).

        The shares are those of the tokens that transformers' warpers keep, laid out by id.
        """
        ids = self.prompt(prompt)
        rows = self.logits([*ids, *tokens])[len(ids) - 1 : -1]
        warpers = LogitsProcessorList(
            [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
        )
        found = []
        for position, (row, token) in enumerate(zip(warpers(torch.tensor([ids]), rows), tokens, strict=True)):
            shares = torch.softmax(row.double(), dim=-1)
            end = float(shares[: token + 1].sum())
            chance = uniform(seed, len(ids) + position)
            found.append(max(end - float(shares[token]) - chance, chance - end))
        return found
