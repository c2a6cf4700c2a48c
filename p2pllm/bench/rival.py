"""The baseline of the benches: transformers' own ``generate``, batching and forward, and llama.cpp.

It knows torch, as what it runs is not ours.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from p2pllm.execution import Checkpoint, in_own_thread

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = ["Rival", "copy_bandwidth", "llama_cpp_tok_s"]

PAGE_TOKENS: Final = 256
BATCH_TOKENS: Final = 512
COPY_BYTES: Final = 2**28
COPIES: Final = 5


class Rival:
    """The whole model as transformers loads and runs it, with ``threads`` threads.

    They are gone when a method returns: between its turns they would slow down whoever else computes.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        import torch

        self._torch = torch
        self._threads = threads
        self._model: Any = self._in_own_thread(lambda: _load(checkpoint).eval())

    def _in_own_thread(self, work: Callable[[], T]) -> T:
        def run() -> T:
            self._torch.set_num_threads(self._threads)
            return work()

        return in_own_thread(run)

    def become(self, dtype: str) -> None:
        """Have weights of another dtype from now on."""
        self._model = self._in_own_thread(lambda: self._model.to(getattr(self._torch, dtype)))

    def decode_tok_s(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of greedy ``generate``, the first one and the prompt left out."""

        _, first, *later = self._in_own_thread(lambda: self._generate(prompt, tokens))
        return (tokens - 1) / (later[-1] - first)

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        """Generate for all prompts at once by transformers' continuous batching; for each of them when its
        tokens came, in seconds from the start.
        """
        import transformers

        config: Any = transformers.GenerationConfig
        pages = sum(-(-(len(prompt) + tokens) // PAGE_TOKENS) for prompt in prompts)
        greedy = config(
            do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        # Without bounds it would claim most of the memory, and spend half a minute on that.
        paged = transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=2 * pages, max_batch_tokens=BATCH_TOKENS
        )
        done = self._in_own_thread(
            lambda: self._model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=greedy,
                continuous_batching_config=paged,
                record_timestamps=True,
                warmup=False,
            )
        )
        began = min(output.created_time for output in done.values())
        return [[stamp - began for stamp in output.timestamps] for output in done.values()]

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Seconds of one forward pass over a prompt, with the logits of its last token."""

        @self._torch.inference_mode()
        def seconds() -> float:
            began = time.perf_counter()
            self._model(self._rows(prompt), use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began

        return self._in_own_thread(seconds)

    def best(self, tokens: Sequence[int]) -> list[int]:
        """What greedy sampling would say after each of these tokens, all those before it given."""

        @self._torch.inference_mode()
        def answers() -> list[int]:
            logits = self._model(self._rows(tokens)).logits[0]
            return [int(token) for token in logits.argmax(dim=-1)]

        return self._in_own_thread(answers)

    def _generate(self, prompt: Sequence[int], tokens: int) -> list[float]:
        """When (s) the prompt was taken in, and then each token came."""
        times: list[float] = []
        streamer = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        self._model.generate(
            self._rows(prompt),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            streamer=streamer,
        )
        return times

    def _rows(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._torch.tensor([list(tokens)])


def copy_bandwidth(threads: int) -> float:
    """Bytes per second, read and written, of copying memory that no cache holds."""
    return in_own_thread(lambda: _copy_bandwidth(threads))


def _copy_bandwidth(threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2 * COPY_BYTES / best


def llama_cpp_tok_s(checkpoint: Checkpoint, prompt: Sequence[int], tokens: int, threads: int) -> float | None:
    """Tokens per second of llama.cpp on the same GGUF file; None without its Python package, or the file."""
    path = getattr(checkpoint, "path", None)
    if path is None or importlib.util.find_spec("llama_cpp") is None:
        return None
    llama: Any = importlib.import_module("llama_cpp").Llama(
        str(path), n_threads=threads, n_ctx=len(prompt) + tokens + 1, verbose=False
    )
    arrivals = []
    for _ in llama.generate(list(prompt), temp=0.0):
        arrivals.append(time.perf_counter())
        if len(arrivals) == tokens:
            break
    return (tokens - 1) / (arrivals[-1] - arrivals[0])


def _load(checkpoint: Checkpoint) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    path = getattr(checkpoint, "path", None)
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        )
    return AutoModelForCausalLM.from_pretrained(str(checkpoint.directory()), dtype=torch.float32)
