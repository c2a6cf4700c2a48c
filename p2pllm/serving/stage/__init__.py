"""The stage side of sessions: what a peer does with the frames of the chains that it is part of."""

from p2pllm.serving.stage.stages import Stages

__all__ = ["Stages"]
