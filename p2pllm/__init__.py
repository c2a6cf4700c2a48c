"""p2pllm: a swarm of unlike machines that serves one language model, with no coordinator."""

__all__ = ["__version__"]

__version__ = "0.1.0"
