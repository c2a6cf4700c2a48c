"""Everything we touch of transformers' internals: configurations, meta models, slicing, weight names, GGUF
tokenizers.

Model code moves fast. Only the files in this package know how it looks inside, so only they change with it.
"""

from p2pllm.execution.architecture.building import build_model, model_config
from p2pllm.execution.architecture.gguf import gguf_tokenizer
from p2pllm.execution.architecture.rewriting import Siblings, find_siblings
from p2pllm.execution.architecture.slicing import SlicedModel, decoder_layers
from p2pllm.execution.architecture.weights import WeightUnit, weight_units

__all__ = [
    "Siblings",
    "SlicedModel",
    "WeightUnit",
    "build_model",
    "decoder_layers",
    "find_siblings",
    "gguf_tokenizer",
    "model_config",
    "weight_units",
]
