"""Chat templates and streaming text against transformers' tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from p2pllm.errors import ModelError, RequestError
from p2pllm.execution import ChatTokenizer, Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from support.reference import Reference

CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2 = ? 😀"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "  And\n\n3+3?"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ChatTokenizer:
    return ChatTokenizer(checkpoint)


@pytest.fixture(scope="module")
def theirs(reference: Reference) -> Any:
    return reference.tokenizer


def streamed(tokenizer: ChatTokenizer, tokens: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


def test_same_tokens_as_transformers(tokenizer: ChatTokenizer, theirs: Any) -> None:
    for text in ("Hello world", "  spaces  and\ttabs\n", "naïve café 日本語 😀", "<|im_end|> x = 12345;"):
        assert tokenizer.encode(text) == theirs.encode(text)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_chat(chat) == expected


def test_ends_of_an_answer(tokenizer: ChatTokenizer, theirs: Any) -> None:
    assert tokenizer.eos_ids == {theirs.convert_tokens_to_ids("<|im_end|>")}


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])))
def test_streamed_text_is_the_text(tokenizer: ChatTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assume(tokenizer.decode(tokens) == text)  # the vocabulary lacks some bytes
    assert "".join(streamed(tokenizer, tokens)) == text.rstrip("\N{REPLACEMENT CHARACTER}")


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 49151), max_size=12))
def test_any_tokens_can_be_streamed(tokenizer: ChatTokenizer, tokens: list[int]) -> None:
    """Broken bytes too: what is valid comes through, in order."""
    text = "".join(streamed(tokenizer, tokens)).replace("\N{REPLACEMENT CHARACTER}", "")
    assert text == tokenizer.decode(tokens).replace("\N{REPLACEMENT CHARACTER}", "")


def test_a_character_comes_whole(tokenizer: ChatTokenizer) -> None:
    tokens = tokenizer.encode("🦔")
    assert len(tokens) > 1
    assert streamed(tokenizer, tokens) == [*[""] * (len(tokens) - 1), "🦔", ""]


def test_an_unfinished_character_is_dropped(tokenizer: ChatTokenizer) -> None:
    tokens = tokenizer.encode("a🦔")
    assert "".join(streamed(tokenizer, tokens[:-1])) == "a"


def test_special_tokens_are_skipped(tokenizer: ChatTokenizer) -> None:
    tokens = [*tokenizer.encode("Hi"), *tokenizer.eos_ids, *tokenizer.encode(" there")]
    assert "".join(streamed(tokenizer, tokens)) == "Hi there"


@pytest.fixture
def directory(saved_model: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Path:
    """A model with a tokenizer that, like SentencePiece, drops the space before a first word."""
    directory = Path(shutil.copytree(saved_model("llama")[0], tmp_path / "model"))
    words = ["<s>", "</s>", "<|eot_id|>", "▁good", "▁day", "▁to", "▁you", "<unk>"]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|eot_id|>"]
    )
    made.save_pretrained(directory)
    return directory


def test_spaces_between_streamed_words_stay(directory: Path) -> None:
    tokenizer = ChatTokenizer(open_checkpoint(str(directory)))
    assert streamed(tokenizer, [3, 4, 5, 6]) == ["good", " day", " to", " you", ""]


def test_without_a_template_contents_are_joined(directory: Path) -> None:
    tokenizer = ChatTokenizer(open_checkpoint(str(directory)))
    assert tokenizer.encode_chat([{"role": "user", "content": "good day"}]) == [3, 4]


def test_ends_come_from_all_places(directory: Path) -> None:
    """Tokenizer, both configurations, and the end of a turn in the template."""
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 4}))
    assert ChatTokenizer(open_checkpoint(str(directory))).eos_ids == {1, 2, 4, 5, 6}


def test_a_template_may_refuse(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    tokenizer = ChatTokenizer(open_checkpoint(str(directory)))
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "good day"}])


def test_no_tokenizer(saved_model: Callable[[str], tuple[Path, Any]]) -> None:
    with pytest.raises(ModelError, match="tokenizer of llama"):
        ChatTokenizer(open_checkpoint(str(saved_model("llama")[0])))
