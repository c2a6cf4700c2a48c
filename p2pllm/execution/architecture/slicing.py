"""Building a model on the meta device, cutting it down to one slice, and running the slice.

A slice runs through the architecture's own ``forward``: embedding, rotary tables, layers and head stay what
they are, whatever the model. Two things are ours. Attention goes to `attend` through transformers' registry,
with the ragged batch travelling as a keyword argument; as no mask function is registered beside it,
transformers builds no masks. And a stage that does not begin at layer 0 wraps its first layer in `_Entry`,
which drops whatever the model does to hidden states before its first layer (Gemma scales them, GPT-2 adds
positions) and puts the received ones in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from p2pllm.errors import ModelError
from p2pllm.execution.architecture.gguf import gguf_arguments
from p2pllm.execution.attention import Ragged, attend
from p2pllm.execution.checkpoint import Checkpoint

__all__ = ["SlicedModel", "build_model", "model_config"]

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


class _Entry(nn.Module):
    """The first layer of a stage in mid-model: takes the received hidden states in place of its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, _: Tensor, *args: Any, ragged: Ragged, **kwargs: Any) -> Any:
        return self.layer(ragged.received, *args, ragged=ragged, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Some models ask their layers what kind of attention they want.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _NoEmbedding(nn.Module):
    """Stands for an embedding that this slice does not hold; `_Entry` drops what it gives."""

    def forward(self, indices: Tensor) -> Tensor:
        return torch.zeros((), device=indices.device)


class _Hidden(nn.Module):
    """Stands for the decoder when only the head is run: hands back the given states, normalised."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(self.norm(inputs_embeds))


class _Output:
    """A model output of which only the hidden states exist."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None


class SlicedModel:
    """The modules of layers [start, end), with the embedding if start is 0 and norm and head if end is the
    last.

    Cutting happens on the meta model; `states` then names exactly the tensors to load.
    """

    def __init__(self, model: PreTrainedModel, start: int, end: int) -> None:
        """Cut ``model`` down, in place; raises `ModelError` if it is not a plain stack of decoder layers."""
        self.start, self.end = start, end
        self.rope_switch = _rope_switch(model.config)
        self._model = cast("Any", model)
        self._base = cast("Any", model.base_model)
        children = list(model.base_model.named_children())
        at, layers = _find_layers(model.config, children)
        norms = [(name, child) for name, child in children[at + 1 :] if _holds_weights(child)]
        if len(norms) != 1 or self._model.get_output_embeddings() is None:
            raise ModelError(f"{model.config.model_type} does not end in one norm and a head: not supported")
        self._layers_name, self._layers = children[at][0], layers
        self._norm_name, norm = norms[0]
        self.is_last = end == len(layers)

        for index in range(len(layers)):
            if not start <= index < end:
                layers[index] = nn.Module()
        if start > 0:
            for name, child in children[:at]:
                if _holds_weights(child):
                    setattr(
                        self._base, name, _NoEmbedding() if isinstance(child, nn.Embedding) else nn.Identity()
                    )
        if not self.is_last:
            setattr(self._base, self._norm_name, nn.Identity())
            self._model.set_output_embeddings(nn.Identity())
        self._views: dict[tuple[int, int], Any] = {}
        self._head = _with_modules(model, {model.base_model_prefix: _Hidden(norm)}) if self.is_last else None

    def states(self) -> dict[str, Tensor]:
        """The slice's parameters and stored buffers by their full names."""
        return dict(self._model.state_dict(keep_vars=True))

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter or buffer its value; raises `ModelError` if it has another shape."""
        parent, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(parent)
        expected = getattr(module, leaf).shape
        if value.shape != expected:
            raise ModelError(
                f"{name} has shape {tuple(value.shape)}, not {tuple(expected)}: files of different models?"
            )
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def finish(self, device: torch.device) -> None:
        """Move what is computed and not stored (rotary tables) to ``device``."""
        self._model.to(device)

    def run(self, ragged: Ragged, start: int, end: int) -> Tensor:
        """Hidden states after layers [start, end): (tokens, hidden), before the final norm."""
        view = self._views.get((start, end))
        if view is None:
            view = self._views[start, end] = self._view(start, end)
        given = {"input_ids": ragged.tokens} if start == 0 else {"inputs_embeds": ragged.received}
        output = view(**given, position_ids=ragged.positions, use_cache=False, ragged=ragged)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocabulary) in float32, from hidden states (rows, hidden) after the last layer."""
        if self._head is None:
            raise ModelError(f"layers {self.start}:{self.end} hold no head")
        logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()

    def _view(self, start: int, end: int) -> Any:
        """The decoder as if layers [start, end) were all it had. It shares every module with the slice."""
        layers: list[nn.Module] = list(self._layers[start:end])
        if start > 0:
            layers[0] = _Entry(layers[0])
        replaced = {self._layers_name: nn.ModuleList(layers), self._norm_name: nn.Identity()}
        view = _with_modules(self._base, replaced)
        view.config = _narrow(self._model.config, start, end)
        return view.eval()


def _find_layers(
    config: PreTrainedConfig, children: list[tuple[str, nn.Module]]
) -> tuple[int, nn.ModuleList]:
    """The stack of decoder layers among a decoder's children, and its place there."""
    stacks = [(index, child) for index, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList)]
    if len(stacks) != 1 or len(stacks[0][1]) != config.num_hidden_layers:
        raise ModelError(f"{config.model_type} is not a plain stack of decoder layers: not supported")
    return stacks[0]


def _rope_switch(config: PreTrainedConfig) -> int | None:
    """The length past which the model's rotary tables change for the whole batch, if they ever do.

    Raises `ModelError` where they change with every length: unlike sessions could never share a batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for variant in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if variant.get("rope_type") == "dynamic":
            raise ModelError(f"{config.model_type} with dynamic rotary scaling is not supported")
        if variant.get("rope_type") == "longrope":
            return int(variant["original_max_position_embeddings"])
    return None


def _holds_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> Any:
    """A shallow copy of ``module`` with some children replaced."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **replaced}
    return twin


def _narrow(config: PreTrainedConfig, start: int, end: int) -> PreTrainedConfig:
    """The configuration of layers [start, end) alone: every list with an entry per layer is sliced."""
    narrow = copy.copy(config)
    total = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            narrow.__dict__[name] = value[start:end]
    narrow.num_hidden_layers = end - start
    return narrow
