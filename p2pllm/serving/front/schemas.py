"""Bodies of the OpenAI-compatible API, validated by pydantic. Unknown fields are ignored, as OpenAI's server
does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from p2pllm.execution import SamplingParams
from p2pllm.serving.front.completion import Prompt

__all__ = ["ChatBody", "ContentPart", "MessageBody", "StreamOptions"]


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes; UnicodeError is a ValueError to
    pydantic.
    """
    text.encode()
    return text


PlainText = Annotated[str, AfterValidator(_encodable)]


class ContentPart(BaseModel):
    """One part of a message; only text can be served."""

    type: Literal["text"]
    text: PlainText


class MessageBody(BaseModel):
    """One chat message; ``content`` may be a string, null, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: PlainText | list[ContentPart] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """Options that make sense with ``stream`` only."""

    include_usage: bool = False


class ChatBody(BaseModel):
    """``POST /v1/chat/completions``."""

    model: str | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=4096)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    n: Literal[1] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds that the whole answer may take, our own addition."""

    @property
    def prompt_guess(self) -> int:
        """About how many tokens the prompt has, before it is tokenized: 4 characters each."""
        return sum(len(message.plain()["content"]) for message in self.messages) // 4 + 4 * len(self.messages)

    @property
    def most_tokens(self) -> int | None:
        """How many new tokens there may be, if the client says so."""
        return self.max_completion_tokens or self.max_tokens

    def prompt(self, *, default_seed: int) -> Prompt:
        """As the serving core takes it."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Prompt(
            messages=[message.plain() for message in self.messages],
            sampling=SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                seed=(default_seed if self.seed is None else self.seed) % 2**63,
            ),
            max_tokens=self.most_tokens,
            stop=tuple(text for text in stop if text),
        )
