"""The execution room: model files in, tokens out. The only room that knows torch.

Importing it does not import torch; that happens when an `Executor` loads, a `ChatTokenizer` is built or a
device is chosen.
"""

from p2pllm.execution.blocks import BLOCK_TOKENS, blocks_for
from p2pllm.execution.checkpoint import Checkpoint, TensorInfo
from p2pllm.execution.executor import Executor
from p2pllm.execution.hardware import (
    Hardware,
    choose_device,
    default_dtype,
    probe,
)
from p2pllm.execution.quantization import (
    QUANTS,
    check_quant,
    head_bytes,
    layer_bytes,
    shares_head,
    weight_bytes,
)
from p2pllm.execution.sources import open_checkpoint
from p2pllm.execution.tally import Totals
from p2pllm.execution.threads import default_threads, in_own_thread, wait_briefly
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
    "QUANTS",
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
    "Totals",
    "blocks_for",
    "check_quant",
    "choose_device",
    "default_dtype",
    "default_threads",
    "head_bytes",
    "in_own_thread",
    "layer_bytes",
    "open_checkpoint",
    "probe",
    "runs_of",
    "shares_head",
    "wait_briefly",
    "weight_bytes",
]
