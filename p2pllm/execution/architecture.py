"""Everything we touch of transformers' model code: building, slicing and running a decoder's own modules.

Model code moves fast, so only this file knows it. A model is built on the meta device, cut down to one slice, and run
through its own ``forward``: embedding, rotary tables, layers and head stay the architecture's, whatever it is. Two
things are ours. Attention goes to `attention.attend` through transformers' registry, with the ragged batch travelling
as a keyword argument; with no mask function registered beside it, transformers builds no masks. And a stage that does
not begin at layer 0 wraps its first layer in `_Entry`, which drops whatever the model does to hidden states before the
first layer (Gemma scales them, GPT-2 adds positions) and puts the received ones in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from ..errors import ModelError
from .attention import Ragged, attend
from .checkpoint import Checkpoint

__all__ = ["SlicedModel", "WeightUnit", "build_model", "model_config", "weight_units"]

_ATTENTION = "p2pllm"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: Ragged | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend` in the shape that transformers calls: (1, heads, tokens, dim) in, (1, tokens, heads, dim) out."""
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
transformers.logging.set_verbosity_error()  # its remarks on configurations are not for our users


def model_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The transformers configuration of a checkpoint; raises `ModelError` if transformers has no such model."""
    try:
        if checkpoint.kind == "gguf":
            return AutoConfig.for_model(**_gguf_config(checkpoint))
        return AutoConfig.from_pretrained(checkpoint.directory()).get_text_config(decoder=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model {checkpoint.name}: {reason}"
        ) from error


def _gguf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The arguments of the model's configuration class, renamed from the metadata of a GGUF file."""
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    metadata = checkpoint.config
    architecture = metadata["general.architecture"]
    # llama.cpp stores Mistral as Llama, and spells some architectures without transformers' underscores.
    is_mistral = architecture == "llama" and "mistral" in str(metadata.get("general.name", "")).lower()
    spelled = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    model_type = "mistral" if is_mistral else spelled
    if model_type not in GGUF_CONFIG_MAPPING:
        raise ValueError(f"GGUF files of architecture {architecture} are not supported")
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}))
    for key, name in GGUF_CONFIG_MAPPING[model_type].items():
        if name is not None and f"{architecture}.{key}" in metadata:
            values[name] = metadata[f"{architecture}.{key}"]
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        if f"tokenizer.{key}" in metadata:
            values[name] = metadata[f"tokenizer.{key}"]
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    values["model_type"] = {"gemma3": "gemma3_text"}.get(model_type, model_type)
    values["tie_word_embeddings"] = checkpoint.tied
    return values


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model with its parameters on the meta device: no memory, no values. Raises `ModelError`."""
    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"transformers cannot build a {config.model_type} decoder: {reason}") from error
    return model.eval()


class _Entry(nn.Module):
    """The first layer of a stage in mid-model: takes the received hidden states in place of what precedes layer 0."""

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
    """The modules of decoder layers [start, end), with the embedding if start is 0 and norm + head if end is the last.

    Cutting happens on the meta model; ``parameters()`` then names exactly the tensors to load.
    """

    def __init__(self, model: PreTrainedModel, start: int, end: int) -> None:
        """Cut ``model`` down; raises `ModelError` if it is not a plain stack of decoder layers."""
        self.model = model
        self.start, self.end = start, end
        self.base: nn.Module = model.base_model
        children = list(self.base.named_children())
        stacks = [i for i, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList)]
        if len(stacks) != 1 or len(children[stacks[0]][1]) != model.config.num_hidden_layers:
            raise ModelError(
                f"{model.config.model_type} is not a plain stack of decoder layers: not supported"
            )
        self._layers_name, layers = children[stacks[0]]
        norms = [(name, child) for name, child in children[stacks[0] + 1 :] if _holds_weights(child)]
        if len(norms) != 1 or model.get_output_embeddings() is None:
            raise ModelError(f"{model.config.model_type} does not end in one norm and a head: not supported")
        (self._norm_name, norm), *_ = norms
        self.is_first, self.is_last = start == 0, end == len(layers)

        for index in range(len(layers)):
            if not start <= index < end:
                layers[index] = nn.Module()
        if not self.is_first:
            for name, child in children[: stacks[0]]:
                if _holds_weights(child):
                    setattr(
                        self.base, name, _NoEmbedding() if isinstance(child, nn.Embedding) else nn.Identity()
                    )
        if not self.is_last:
            setattr(self.base, self._norm_name, nn.Identity())
            model.set_output_embeddings(nn.Identity())
        self.rope_switch = _rope_switch(model.config)
        self._layers = layers
        self._views: dict[tuple[int, int], nn.Module] = {}
        self._head = _with_modules(model, {model.base_model_prefix: _Hidden(norm)}) if self.is_last else None

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """The slice's parameters and stored buffers by their full names."""
        return iter(self.model.state_dict(keep_vars=True).items())

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter or buffer its value; raises `ModelError` if it has another shape."""
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        expected = getattr(module, leaf).shape
        if value.shape != expected:
            raise ModelError(
                f"{name} has shape {tuple(value.shape)}, not {tuple(expected)}: the model's files disagree"
            )
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def run(self, ragged: Ragged, start: int, end: int) -> Tensor:
        """Hidden states after layers [start, end): (tokens, hidden), before the final norm.

        At layer 0 the batch holds token ids, after it hidden states.
        """
        view = self._views.get((start, end))
        if view is None:
            view = self._views[start, end] = self._view(start, end)
        positions = ragged.positions.unsqueeze(0)
        if start == 0:
            output = view(
                input_ids=ragged.tokens.unsqueeze(0), position_ids=positions, use_cache=False, ragged=ragged
            )
        else:
            output = view(
                inputs_embeds=ragged.received, position_ids=positions, use_cache=False, ragged=ragged
            )
        return output[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocabulary) in float32, from (rows, hidden) as `run` left them after the last layer."""
        if self._head is None:
            raise ModelError(f"layers {self.start}:{self.end} hold no head")
        return self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()

    def _view(self, start: int, end: int) -> nn.Module:
        """The decoder as if layers [start, end) were all it had. It shares every module with the slice."""
        layers = list(self._layers[start:end])
        if start > 0:
            layers[0] = _Entry(layers[0])
        view = _with_modules(
            self.base, {self._layers_name: nn.ModuleList(layers), self._norm_name: nn.Identity()}
        )
        view.config = _narrow(self.model.config, start, end)
        return view.eval()


def _rope_switch(config: PreTrainedConfig) -> int | None:
    """The length past which the model's rotary tables change for the whole batch, if they ever do.

    Raises `ModelError` where they change with every length: sessions of unlike length could not share a batch.
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
    setattr(narrow, "num_hidden_layers", end - start)
    return narrow


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """Stored tensors that make one parameter (rarely several): most are one to one, experts are stacked.

    ``assemble`` takes the stored tensors by name and gives the model's, by the model's names.
    """

    target: str
    sources: tuple[str, ...]
    assemble: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def weight_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    """How each parameter of the whole (uncut) ``model`` is made from stored tensors, by the parameter's name.

    A parameter that is tied to another and not stored itself appears under both names.
    """
    units = (
        _gguf_units(checkpoint, model) if checkpoint.kind == "gguf" else _safetensors_units(checkpoint, model)
    )
    for target, source in (model.all_tied_weights_keys or {}).items():
        for missing, present in ((target, source), (source, target)):
            if missing not in units and present in units:
                units[missing] = _renamed(units[present], missing)
    return units


def _renamed(unit: WeightUnit, target: str) -> WeightUnit:
    def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
        (value,) = unit.assemble(stored).values()
        return {target: value}

    return WeightUnit(target, unit.sources, assemble)


def _safetensors_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    """Follows transformers' own rules for renamed and fused weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = model.state_dict()
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target in known:
            found.setdefault(target, []).append((name, pattern))

    def unit(target: str, parts: list[tuple[str, str | None]]) -> WeightUnit:
        def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
            if parts[0][1] is None:
                return {target: stored[parts[0][0]]}
            rule = copy.deepcopy(next(rule for rule in converters if parts[0][1] in rule.source_patterns))
            for name, pattern in parts:
                rule.add_tensor(target, name, pattern, stored.pop(name))
            made = rule.convert(target, model=model, config=model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        return WeightUnit(target, tuple(name for name, _ in parts), assemble)

    return {target: unit(target, parts) for target, parts in found.items()}


def _gguf_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    """Follows the `gguf` package's names, and transformers' rules for what llama.cpp permutes, shifts and stacks."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = checkpoint.config["general.architecture"]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=_gguf_config(checkpoint))
    names = get_tensor_name_map(
        next(a for a, n in MODEL_ARCH_NAMES.items() if n == architecture), checkpoint.layers
    )
    to_model: dict[str, str] = {}
    for parameter in model.state_dict():
        stem, dot, kind = parameter.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, dot, kind = parameter, "", ""
        stored = names.get_name(stem)
        if stored is not None:
            to_model[stored + dot + kind] = parameter
        else:
            processor.perform_fallback_tensor_mapping(to_model, dot + kind, "", parameter)

    found: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        target = to_model.get(name) or to_model.get(name.removesuffix(".weight"))
        if target is not None:
            found.setdefault(target, []).append(name)

    def unit(target: str, sources: list[str]) -> WeightUnit:
        def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
            made: dict[str, Any] = {"tensors": {}}
            for name in sources:
                weights: np.ndarray[Any, Any] = stored.pop(name).numpy()
                result = processor.process(weights, name, tensor_key_mapping=to_model, parsed_parameters=made)
                if result.name is not None:
                    made["tensors"][target] = torch.from_numpy(np.ascontiguousarray(result.weights))
            return {target: made["tensors"][target]}

        return WeightUnit(target, tuple(sources), assemble)

    return {target: unit(target, sources) for target, sources in found.items()}
