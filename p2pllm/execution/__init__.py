"""The execution room: model files in, tokens out. The only room that knows torch.

Importing it does not import torch; that happens when an `Executor` loads, a `ChatTokenizer` is built or a
device is chosen.
"""

from p2pllm.execution.checkpoint import Checkpoint, TensorInfo
from p2pllm.execution.executor import Executor
from p2pllm.execution.hardware import (
    Hardware,
    choose_device,
    default_dtype,
    default_threads,
    probe,
)
from p2pllm.execution.kv import BLOCK_TOKENS
from p2pllm.execution.sources import open_checkpoint
from p2pllm.execution.tokenizer import ChatTokenizer, TextDecoder
from p2pllm.execution.types import (
    DTYPES,
    Activation,
    ExecutorStats,
    SamplingParams,
    SessionKey,
    StageOutput,
    runs_of,
)

__all__ = [
    "BLOCK_TOKENS",
    "DTYPES",
    "Activation",
    "ChatTokenizer",
    "Checkpoint",
    "Executor",
    "ExecutorStats",
    "Hardware",
    "SamplingParams",
    "SessionKey",
    "StageOutput",
    "TensorInfo",
    "TextDecoder",
    "choose_device",
    "default_dtype",
    "default_threads",
    "open_checkpoint",
    "probe",
    "runs_of",
]
