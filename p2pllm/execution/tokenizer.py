"""Text to tokens and back: chat templates, the tokens that end an answer, and decoding as tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from p2pllm.errors import ModelError, RequestError
from p2pllm.execution.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTokenizer", "TextDecoder"]

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|end_of_turn|>",
    "<|user|>",
)
"""Tokens that end an answer in the templates that use them, whether or not the configuration says so."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: no whole character needs more tokens than this."""


class ChatTokenizer:
    """A checkpoint's tokenizer. ``eos_ids`` are the tokens that end an answer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Build it from the checkpoint's files, in a second or so; raises `ModelError` if they do not do."""
        self._name = checkpoint.name
        try:
            self._tokenizer, configured = (
                _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_directory(checkpoint)
            )
        except (ValueError, KeyError, TypeError, IndexError, OSError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"the tokenizer of {checkpoint.name} cannot be built: {reason}") from error
        self.eos_ids = frozenset(configured) | self._end_of_turn()

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with what the model wants before it (usually nothing, or one begin token)."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins.

        Without a chat template the contents are joined by blank lines. Raises `RequestError` where the
        template refuses the conversation (some take no system message, or only alternating roles).
        """
        if self._tokenizer.chat_template is None:
            return self.encode("\n\n".join(message["content"] for message in messages))
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise RequestError(
                f"the chat template of {self._name} refuses these messages: {error}"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special tokens left out."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decoder(self) -> TextDecoder:
        """A decoder for one answer."""
        return TextDecoder(self)

    def _end_of_turn(self) -> frozenset[int]:
        template = str(self._tokenizer.chat_template or "")
        vocabulary = self._tokenizer.get_vocab()
        return frozenset(
            vocabulary[token] for token in _END_OF_TURN if token in template and token in vocabulary
        )


class TextDecoder:
    """Decodes an answer token by token. All deltas together are the text of all tokens together."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens are decoded beside the ones before them, as some tokenizers drop a leading space.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while it ends inside a character."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """What is left at the end of the answer; an unfinished character is dropped."""
        text = self._text().rstrip(_REPLACEMENT) if self._pending else ""
        self._pending = []
        return text

    def _text(self) -> str:
        context = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(context) :]


def _from_gguf(checkpoint: Checkpoint) -> tuple[PreTrainedTokenizerBase, set[int]]:
    from p2pllm.execution.architecture import gguf_tokenizer

    ends = (checkpoint.config.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    return gguf_tokenizer(checkpoint.config), {end for end in ends if end is not None}


def _from_directory(checkpoint: Checkpoint) -> tuple[PreTrainedTokenizerBase, set[int]]:
    from transformers import AutoTokenizer

    directory = checkpoint.directory()
    if directory is None:
        raise ValueError("the model has no directory")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = _ids(tokenizer.eos_token_id) | _ids(checkpoint.config.get("eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids |= _ids(json.loads(generation.read_text("utf-8")).get("eos_token_id"))
    return tokenizer, ids


def _ids(value: object) -> set[int]:
    """The token ids in a configuration entry that may be absent, one id, or a list."""
    listed = value if isinstance(value, list) else [value]
    return {item for item in listed if isinstance(item, int)}
