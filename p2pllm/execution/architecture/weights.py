"""Which stored tensors make which parameter of a model, and how.

Mostly one makes one. But transformers renames what older files call otherwise and stacks experts, and
llama.cpp has names of its own, permutes, shifts and stacks. Both sets of rules are taken from where they are
kept up to date.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from p2pllm.execution.architecture.gguf import gguf_arguments
from p2pllm.execution.checkpoint import Checkpoint

__all__ = ["WeightUnit", "weight_units"]


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """Stored tensors that make one parameter (rarely several).

    ``assemble`` takes the stored tensors by name, and gives the model's by the model's names.
    """

    sources: tuple[str, ...]
    assemble: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def weight_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    """How each parameter of the whole (uncut) ``model`` is made, by the parameter's name.

    A parameter that is tied to another and not stored itself is made like that other.
    """
    units = (
        _gguf_units(checkpoint, model) if checkpoint.kind == "gguf" else _safetensors_units(checkpoint, model)
    )
    for target, source in (model.all_tied_weights_keys or {}).items():
        for missing, present in ((target, source), (source, target)):
            if missing not in units and present in units:
                units[missing] = _tied(units[present], missing)
    return units


def _tied(unit: WeightUnit, target: str) -> WeightUnit:
    def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
        (value,) = unit.assemble(stored).values()
        return {target: value}

    return WeightUnit(unit.sources, assemble)


def _safetensors_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    known = model.state_dict()
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(checkpoint.tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if target in known:
            found.setdefault(target, []).append((name, pattern))

    def unit(target: str, parts: list[tuple[str, str | None]]) -> WeightUnit:
        def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
            if parts[0][1] is None:
                return {target: stored[parts[0][0]]}
            rule: Any = copy.deepcopy(
                next(rule for rule in converters if parts[0][1] in rule.source_patterns)
            )
            for name, pattern in parts:
                rule.add_tensor(target, name, pattern, stored.pop(name))
            made = rule.convert(target, model=model, config=model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        return WeightUnit(tuple(name for name, _ in parts), assemble)

    return {target: unit(target, parts) for target, parts in found.items()}


def _gguf_units(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, WeightUnit]:
    import gguf
    from transformers import modeling_gguf_pytorch_utils as rules

    architecture = checkpoint.config["general.architecture"]
    processors: dict[str, Any] = rules.TENSOR_PROCESSORS
    config = gguf_arguments(checkpoint.config, tied=checkpoint.tied)
    processor = processors.get(architecture, rules.TensorProcessor)(config=config)
    to_parameter = _gguf_names(model, gguf, processor, architecture)
    found: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        target = to_parameter.get(name) or to_parameter.get(name.removesuffix(".weight"))
        if target is not None:
            found.setdefault(target, []).append(name)

    def unit(target: str, sources: list[str]) -> WeightUnit:
        def assemble(stored: dict[str, Tensor]) -> Mapping[str, Tensor]:
            made: dict[str, Any] = {"tensors": {}}
            for name in sources:
                weights = stored.pop(name).numpy()
                result = processor.process(
                    weights, name, tensor_key_mapping=to_parameter, parsed_parameters=made
                )
                if result.name is not None:  # else the processor has put it among the made ones itself
                    made["tensors"][target] = torch.from_numpy(np.ascontiguousarray(result.weights))
            return {target: made["tensors"][target]}

        return WeightUnit(tuple(sources), assemble)

    return {target: unit(target, sources) for target, sources in found.items()}


def _gguf_names(model: PreTrainedModel, gguf: Any, processor: Any, architecture: str) -> dict[str, str]:
    """The model's parameter names by llama.cpp's tensor names."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    to_parameter: dict[str, str] = {}
    for parameter in model.state_dict():
        spelled = processor.preprocess_name(parameter)
        stem, dot, leaf = spelled.rpartition(".")
        stem, suffix = (stem, dot + leaf) if leaf in ("weight", "bias") else (spelled, "")
        stored = names.get_name(stem)
        if stored is not None:
            to_parameter[stored + suffix] = parameter
        else:
            processor.perform_fallback_tensor_mapping(to_parameter, suffix, "", parameter)
    return to_parameter
