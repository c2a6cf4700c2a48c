"""The two threads that torch runs on: one takes steps, the other reads weights meanwhile.

Reading takes seconds to minutes and steps take milliseconds, so neither may wait for the other. What both of
them touch is one `Stage`: the reader fills layers that no step uses yet, and only the step thread, between
two steps, empties layers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pllm.errors import ModelError
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.hardware import return_memory
from p2pllm.execution.kv import KvStore, SessionCache
from p2pllm.execution.types import Activation
from p2pllm.execution.work import Outcome, StepTimes, TriedOut, Work
from p2pllm.execution.worker import Worker

if TYPE_CHECKING:
    from p2pllm.execution.loader import Loader

__all__ = ["Engine"]


class Engine:
    """A checkpoint's layers on their device, for one executor. All methods are for the event loop's thread.

    Who calls sees to it that only one of `read`, `retain` and `weight_bytes` is going on at a time.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: str, device: str, threads: int, quant: str = "none"
    ) -> None:
        """``threads`` is the share of the cores that a step may use; reading uses one."""
        self.store = KvStore()
        self._checkpoint = checkpoint
        self._dtype, self._device, self._threads = dtype, device, threads
        self._quant = quant
        self._stepping = Worker("p2pllm-steps")
        self._reading = Worker("p2pllm-weights")
        self._loader: Loader | None = None
        self._closing = False

    async def prepare(self) -> None:
        """Import torch and transformers and build the model without weights. Raises `ModelError`.

        Imports take seconds in which the event loop hardly turns, so do it before others count on it.
        """
        await self._share_cores()
        await self._reading.run(self._prepare)

    async def read(self, start: int, end: int, progress: Callable[[int, int], None] | None) -> None:
        """Read what is not here yet of layers [start, end). ``progress`` hears (bytes read, bytes in all).

        Raises `ModelError` if they cannot be read, or the engine is closed meanwhile. Then, and when
        cancelled, some of their weights are here: `retain` frees them.
        """
        await self._share_cores()
        loop = asyncio.get_running_loop()
        stopped = False

        def report(done: int, total: int) -> None:
            if stopped or self._closing:
                raise ModelError("loading was stopped")
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        reading = self._reading.run(self._read, start, end, report)
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            stopped = True
            await asyncio.wait({reading})
            reading.exception()  # that it was stopped is nobody's concern
            raise
        reading.result()

    async def try_out(self, start: int, end: int) -> TriedOut:
        """Decode a little. Raises `ModelError` if the layers cannot run here."""
        from p2pllm.execution.trial import Trial

        trial = Trial(self._loaded.stage, start, end, self._checkpoint.hidden)
        for _ in range(Trial.STEPS):
            # One by one: steps of sessions come between.
            await self._stepping.run(trial.step)
        return trial.result

    async def step(self, works: Sequence[Work]) -> tuple[list[Outcome], StepTimes]:
        """Run one step, see `run_step`."""
        from p2pllm.execution.step import run_step

        return await self._stepping.run(run_step, self._loaded.stage, works)

    async def settle(self, cache: SessionCache) -> None:
        """Let the steps asked for before end, and make the copies that a session still needs."""
        from p2pllm.execution.step import settle

        await self._stepping.run(settle, cache)

    async def outputs(
        self, cache: SessionCache, table: NDArray[np.int64], layer: int, start: int, end: int
    ) -> Activation:
        """What was kept of a session's outputs, see `read_outputs`."""
        from p2pllm.execution.outputs import read_outputs

        return await self._stepping.run(read_outputs, cache, table, layer, start, end)

    async def retain(self, layers: Collection[int], blocks: Mapping[int, int]) -> None:
        """Free the memory of all layers but these, once the steps asked for before are over.

        ``blocks`` says of how many KV blocks of each layer the memory is kept.
        """
        if self._loader is not None:
            emptied = self._stepping.run(self._loader.stage.retain, frozenset(layers))
            await asyncio.gather(emptied, self._stepping.run(self.store.retain, blocks))
            await self._reading.run(return_memory)

    async def shorten(self, blocks: Mapping[int, int]) -> None:
        """Free the memory of KV blocks but of so many of each layer, once the steps asked for are over."""
        await self._stepping.run(self.store.retain, blocks)

    def weight_bytes(self) -> int:
        """Bytes of all weights that are here."""
        return 0 if self._loader is None else self._loader.stage.weight_bytes

    def stop_reading(self) -> None:
        """Let no read go on past the parameter that it is at, for good."""
        self._closing = True

    async def close(self) -> None:
        """Let what the threads still do end, and leave none of them."""
        self.stop_reading()
        await self._reading.close()
        await self._stepping.close()

    @property
    def _loaded(self) -> Loader:
        if self._loader is None:
            raise ModelError(f"no layers of {self._checkpoint.name} are here yet")
        return self._loader

    async def _share_cores(self) -> None:
        if self._loader is None:
            # The last to set it sets the process's number too, and that should be the steps'.
            await self._reading.run(_take_cores, 1)
            await self._stepping.run(_take_cores, self._threads)

    def _prepare(self) -> Loader:
        """On the reading thread."""
        if self._loader is None:
            from p2pllm.execution.loader import Loader

            self._loader = Loader(self._checkpoint, dtype=self._dtype, device=self._device, quant=self._quant)
        return self._loader

    def _read(self, start: int, end: int, report: Callable[[int, int], None]) -> None:
        """On the reading thread."""
        try:
            self._prepare().load(start, end, report)
        except ModelError:
            raise
        except Exception as error:  # the disk or the memory, mostly; what is held already goes on
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"layers {start}:{end} cannot be loaded: {reason}") from error
        return_memory()  # what reading needed beside the weights


def _take_cores(threads: int) -> None:
    """Have torch use so many threads in this one's name."""
    import torch

    torch.get_num_threads()  # a thread takes the process's number at its first look, and then its own alone
    torch.set_num_threads(threads)
