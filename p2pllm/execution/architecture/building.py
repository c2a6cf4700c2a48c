"""Building a whole model on the meta device, with our attention in it.

Attention goes to `attend` through transformers' registry, with the ragged batch travelling as a keyword
argument; as no mask function is registered beside it, transformers builds no masks.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from p2pllm.errors import ModelError
from p2pllm.execution.architecture.gguf import gguf_arguments
from p2pllm.execution.attention import Ragged, attend
from p2pllm.execution.checkpoint import Checkpoint

__all__ = ["build_model", "model_config"]

_ATTENTION = "p2pllm"
_AutoConfig: Any = transformers.AutoConfig
_AutoModel: Any = transformers.AutoModelForCausalLM
_logging: Any = transformers.logging
_logging.set_verbosity_error()  # its remarks on configurations are not for our users


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    ragged: Ragged | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers calls it: (1, heads, tokens, dim) in, (1, tokens, heads, dim) out."""
    if ragged is None:
        raise ModelError(f"{type(module).__name__} does not hand the batch on to attention: not supported")
    mixed = attend(
        ragged,
        module.layer_idx,
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return mixed.unsqueeze(0), None


AttentionInterface.register(_ATTENTION, _attention)


def model_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The transformers configuration of a checkpoint; raises `ModelError` if it has none."""
    try:
        if checkpoint.kind == "gguf":
            config = _AutoConfig.for_model(**gguf_arguments(checkpoint.config, tied=checkpoint.tied))
        else:
            config = _AutoConfig.from_pretrained(checkpoint.directory())
        text: PreTrainedConfig = config.get_text_config(decoder=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        version = transformers.__version__
        raise ModelError(
            f"transformers {version} does not know the model {checkpoint.name}: {reason}"
        ) from error
    return text


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model with its parameters on the meta device: no memory, no values. Raises `ModelError`."""
    try:
        with init_empty_weights():
            model = _AutoModel.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"transformers cannot build a {config.model_type} decoder: {reason}") from error
    built: PreTrainedModel = model.eval()
    return built
