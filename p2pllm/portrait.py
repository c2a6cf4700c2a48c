"""What a peer says of itself in its records."""

from __future__ import annotations

from collections.abc import Callable

from p2pllm import __version__
from p2pllm.config import Address, PeerConfig
from p2pllm.execution import Executor
from p2pllm.machine import Machine
from p2pllm.records import MetricsBody, PeerBody
from p2pllm.scheduling import Offer
from p2pllm.swarm import Allocation
from p2pllm.transport import Certificate, Links

__all__ = ["MAX_NAME", "Portrait"]

MAX_NAME = 96
"""Characters of a name in a record."""


class Portrait:
    """What a peer is, has, and wants. What its operator decides is set from outside."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        machine: Machine,
        offer: Offer,
        certificate: Certificate | None,
        executor: Executor,
        allocation: Allocation,
        links: Links,
        rho: Callable[[], tuple[tuple[str, float], ...]],
    ) -> None:
        self.addresses: tuple[Address, ...] = ()
        self.leaving = False
        self.paused = False
        self.replans = 0
        self.force = False
        self._config = config
        self._machine = machine
        self._offer = offer
        self._certificate = certificate
        self._executor = executor
        self._allocation = allocation
        self._links = links
        self._rho = rho

    def describe(self) -> PeerBody:
        """What changes slowly."""
        machine, offer = self._machine, self._offer
        return PeerBody(
            addresses=self.addresses,
            region=self._config.region,
            hardware=machine.name[:MAX_NAME],
            certificate=b"" if self._certificate is None else self._certificate.fingerprint,
            memory_bytes=machine.memory_bytes,
            flops=machine.flops,
            bandwidth=machine.bandwidth,
            capacity=offer.capacity,
            kv_bytes=offer.kv_bytes,
            layer_s=offer.layer_s,
            head_s=offer.head_s,
            dtype=machine.dtype,
            quantization=machine.quant,
            software=__version__,
            leaving=self.leaving,
            paused=self.paused,
            pinned=self._config.layers is not None,
            replans=self.replans,
            force=self.force,
        )

    def measure(self) -> MetricsBody:
        """What changes with load."""
        stats = self._executor.stats()
        return MetricsBody(
            spans=self._allocation.spans(),
            generation=self._allocation.generation,
            layer_s=stats.layer_s,
            head_s=stats.head_s,
            wait_s=stats.wait_s,
            running=stats.running,
            waiting=stats.waiting,
            free_kv_blocks=stats.kv_blocks_free,
            cached_kv_blocks=stats.kv_blocks_cached,
            memory_used=stats.weight_bytes + stats.kv_bytes_used,
            upload=self._links.upload,
            rho=self._rho(),
        )
