"""Filling any layers of a model on the meta device, and running any range of them.

A range runs through the architecture's own ``forward``: embedding, rotary tables, layers and head stay what
they are, whatever the model. One thing is ours: a range that does not begin at layer 0 wraps its first layer
in `Entry`, which drops whatever the model does to hidden states before its first layer (Gemma scales them,
GPT-2 adds positions) and puts the received ones in.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from p2pllm.errors import ModelError
from p2pllm.execution.architecture.kernels import kernel_for
from p2pllm.execution.architecture.linear import Part
from p2pllm.execution.architecture.recording import Recorded
from p2pllm.execution.architecture.rewriting import Siblings, replace_linears, replace_norms, replace_rotary
from p2pllm.execution.architecture.stand_ins import Entry, NoEmbedding, Normed
from p2pllm.execution.attention import Ragged
from p2pllm.execution.quantization import head_quant

__all__ = ["SlicedModel", "decoder_layers"]


class SlicedModel:
    """A model of which any layers may be here, and runs over any range of those that are.

    Its modules are all there from the start, and stay; what comes and goes are their weights, which are on
    the meta device while they are not here. The embedding goes with layer 0, norm and head with the last
    layer. Ranges of layers run through *views* that share these modules, so one range may be filled while
    another runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        siblings: Siblings = frozenset(),
        quant: str = "none",
    ) -> None:
        """Take ``model``, with all weights on the meta device; what is computed and not stored (rotary
        tables) goes to ``device``.

        Linear layers that are ``siblings`` become one, and the weights of all of them are kept as ``quant``
        says. Raises `ModelError` if it is not a plain stack of decoder layers, or ``quant`` does not suit it.
        """
        self.rope_switch = _rope_switch(model.config)
        self._model = cast("Any", model)
        self._base = cast("Any", model.base_model)
        stack = decoder_layers(model)
        for layer in stack:
            replace_linears(layer, siblings, kernel_for(model.dtype, device, quant))
            if quant != "none" and any(state.dim() > 2 for state in layer.parameters()):
                raise ModelError(f"{model.config.model_type} stacks its experts: use --quant none")
        replace_rotary(stack)
        replace_linears(model, frozenset(), kernel_for(model.dtype, device, head_quant(quant)))
        replace_norms(model)
        children = list(model.base_model.named_children())
        at, layers = _find_layers(model.config, children)
        norms = [(name, child) for name, child in children[at + 1 :] if _holds_weights(child)]
        head = self._model.get_output_embeddings()
        if len(norms) != 1 or head is None:
            raise ModelError(f"{model.config.model_type} does not end in one norm and a head: not supported")
        self.layers = len(layers)
        self._layers_name, self._layers = children[at][0], layers
        self._norm_name, norm = norms[0]
        beginning = {name: child for name, child in children[:at] if _holds_weights(child)}
        self._skipped = {
            name: NoEmbedding() if isinstance(child, nn.Embedding) else nn.Identity()
            for name, child in beginning.items()
        }
        self._layer_of = _layers_of_states(model, layers, first=beginning.values(), last=(norm, head))
        self._held: set[str] = set()
        self._views: dict[tuple[int, int], Any] = {}
        self._head = _with_modules(model, {model.base_model_prefix: Normed(norm)})
        self._pass, self._logits = Recorded(self._run), Recorded(self._read_off)
        _move_tables(model, device)

    def missing(self, start: int, end: int) -> dict[str, Tensor]:
        """The parameters and stored buffers of layers [start, end) that are not here, by their full names.

        Their values mean nothing, their shapes and types do.
        """
        return {
            name: self._state(name)
            for name, layer in self._layer_of.items()
            if start <= layer < end and name not in self._held
        }

    def kept(self) -> dict[str, Tensor]:
        """The parameters and stored buffers that are here as such, not in a kernel's form, by full name."""
        states = {name: self.kept_as(name) for name in self._layer_of if name in self._held}
        return {name: state for name, state in states.items() if state is not None}

    def kept_as(self, name: str) -> Tensor | None:
        """One of these."""
        state = self._state(name)
        return None if state.is_meta else state

    @property
    def nbytes(self) -> int:
        """Bytes of all weights that are here; those that are tied to each other may share theirs."""
        own = {state.data_ptr(): state.nbytes for state in self.kept().values()}
        bundles = {part.bundle for part in self._model.modules() if isinstance(part, Part)}
        return sum(own.values()) + sum(bundle.nbytes for bundle in bundles)

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter or buffer its value; raises `ModelError` if it has another shape."""
        expected = self._state(name).shape
        if value.shape != expected:
            raise ModelError(
                f"{name} has shape {tuple(value.shape)}, not {tuple(expected)}: files of different models?"
            )
        self._set(name, value)
        self._held.add(name)

    def retain(self, layers: Collection[int]) -> None:
        """Keep the weights of these layers, and let go of all others."""
        self._pass.forget()
        self._logits.forget()
        for name in [name for name in self._held if self._layer_of[name] not in layers]:
            self._set(name, torch.empty_like(self._state(name), device="meta"))
            self._held.discard(name)

    def run(self, ragged: Ragged, start: int, end: int) -> Tensor:
        """Hidden states after layers [start, end): (tokens, hidden), before the final norm."""
        rows = ragged.rows
        # Prompts come in pieces of any length: there is nothing to gain from recording each.
        run = self._pass if rows.shape[1] == len(ragged.segments) else self._run
        return run((start, end), rows, ragged.positions, ragged)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocabulary) in float32, from hidden states (rows, hidden) after the last layer."""
        return self._logits(None, hidden.unsqueeze(0))

    def _run(self, span: tuple[int, int], rows: Tensor, positions: Tensor, ragged: Ragged) -> Tensor:
        view = self._views.get(span)
        if view is None:
            view = self._views[span] = self._view(*span)
        given = {"input_ids" if span[0] == 0 else "inputs_embeds": rows}
        hidden: Tensor = view(**given, position_ids=positions, use_cache=False, ragged=ragged)[0][0]
        return hidden

    def _read_off(self, _: None, rows: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=rows, use_cache=False).logits
        return logits[0].float()

    def _view(self, start: int, end: int) -> Any:
        """The decoder as if layers [start, end) were all it had."""
        layers: list[nn.Module] = list(self._layers[start:end])
        replaced: dict[str, nn.Module] = {self._norm_name: nn.Identity()}
        if start > 0:
            layers[0] = Entry(layers[0])
            replaced |= self._skipped
        replaced[self._layers_name] = nn.ModuleList(layers)
        view = _with_modules(self._base, replaced)
        view.config = _narrow(self._model.config, start, end)
        return view.eval()

    def _state(self, name: str) -> Tensor:
        parent, _, leaf = name.rpartition(".")
        state: Tensor = getattr(self._model.get_submodule(parent), leaf)
        return state

    def _set(self, name: str, value: Tensor) -> None:
        parent, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(parent)
        if isinstance(module, Part) and leaf == "weight":
            module.fill(value)
        elif leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value


def _layers_of_states(
    model: PreTrainedModel, layers: nn.ModuleList, *, first: Iterable[nn.Module], last: Iterable[nn.Module]
) -> dict[str, int]:
    """The layer that each parameter and stored buffer comes and goes with, by its full name.

    Raises `ModelError` if the model has some outside of its layers and both ends.
    """
    names = {module: name for name, module in model.named_modules()}
    parts = [
        *((module, 0) for module in first),
        *((module, index) for index, module in enumerate(layers)),
        *((module, len(layers) - 1) for module in last),
    ]
    found = {name: layer for part, layer in parts for name in part.state_dict(prefix=f"{names[part]}.")}
    if other := [name for name in model.state_dict() if name not in found]:
        raise ModelError(
            f"{model.config.model_type} has weights beside its layers ({other[0]}): not supported"
        )
    return found


def _move_tables(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            table = module._buffers[name]
            if table is not None:
                module._buffers[name] = table.to(device)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a whole model. Raises `ModelError` if it is not a plain stack of them."""
    return _find_layers(model.config, list(model.base_model.named_children()))[1]


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
