"""Requests and answers about tokens: llama.cpp's, and vLLM's for requests with its fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.generation.texts import PlacedText, TextTokens, TokensSpec
from mlxsrv.wire.decoding import RequestDecoder, missing
from mlxsrv.wire.openai.generation_request import TokenId
from mlxsrv.wire.openai.messages import Message
from mlxsrv.wire.openai.requests import ChatRequest, Tool, check_ending
from mlxsrv.wire.schema_rules import Schema, having

# Requests.

_TEXTS = ("content", "prompt", "messages")


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text, which llama.cpp calls `content` and vLLM `prompt`, or a chat."""

    schema_rules: ClassVar[Schema] = {"oneOf": [having(name) for name in _TEXTS]}

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1000)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=100)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @property
    def chat(self) -> ChatRequest:
        """The chat, if the request has one."""
        return ChatRequest(
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )

    def spec(self) -> TokensSpec:
        """Return the request in no dialect. The tokens around a text are wanted by default."""
        content: PlacedText | GenerationSpec
        if self.messages is not None:
            content = self.chat.spec()
        elif self.content is not None:
            content = (self.content, "content")
        else:
            content = (self.prompt or "", "prompt")
        return TokensSpec(
            content=content,
            model=self.model,
            special=self.add_special_tokens is not False,
            spelled=bool(self.with_pieces),
            named=bool(self.return_token_strs),
        )

    def answer(self, tokens: TextTokens) -> TokenizeResponse:
        pieces: list[int | TokenPiece] = [*tokens.ids]
        if tokens.spellings is not None:
            pairs = zip(tokens.ids, tokens.spellings, strict=True)
            pieces = [TokenPiece.make(id, spelling) for id, spelling in pairs]
        return TokenizeResponse(
            pieces,
            len(pieces),
            max_model_len=tokens.context if self.content is None else UNSET,
            token_strs=UNSET if tokens.names is None else [*tokens.names],
        )


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    model: str | None = None


_OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")


def _check_tokenize(request: TokenizeRequest) -> None:
    match [name for name in _TEXTS if getattr(request, name) is not None]:
        case []:
            raise missing("content")
        case [one, another, *_]:
            raise InvalidRequest(f"{another}: cannot be combined with {one}", param=another)
        case ["messages"] if request.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens: the chat template writes them for messages; leave it out",
                param="add_special_tokens",
            )
        case ["messages"]:
            check_ending(request.chat)


def _idle_chat(request: TokenizeRequest) -> list[str]:
    """The fields for chats, in a request without a chat."""
    if request.messages is not None:
        return []
    return [name for name in _OF_CHATS if getattr(request, name) is not None]


TOKENIZE_REQUESTS = RequestDecoder(TokenizeRequest, check=_check_tokenize, idle=_idle_chat)
DETOKENIZE_REQUESTS = RequestDecoder(DetokenizeRequest)


class TokenizerQuery(Struct, frozen=True):
    model: str | None = None


# Answers.


class TokenPiece(Struct, frozen=True):
    """A token and its text or, where its bytes are no text alone, their values."""

    id: int
    piece: str | list[int]

    @classmethod
    def make(cls, id: int, token: bytes) -> TokenPiece:
        try:
            return cls(id, token.decode())
        except UnicodeDecodeError:
            return cls(id, list(token))


class TokenizeResponse(Struct, frozen=True):
    """`max_model_len` answers a `prompt` or `messages`: null if the context has no known end.
    `token_strs` are the tokens as the vocabulary spells them."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int | UnsetType | None = UNSET
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct, frozen=True):
    """The text, under the two names that it is looked for."""

    content: str
    prompt: str


class AppliedTemplate(Struct, frozen=True):
    """A chat as the model's template writes it."""

    prompt: str
