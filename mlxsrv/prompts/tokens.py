"""The tokenizer's own endpoints: texts to tokens and back, and rendered templates.

They are for clients that count tokens or write prompts themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from mlxsrv.errors import RequestTooLarge, ServeError
from mlxsrv.generation.spec import ChatPrompt, GenerationSpec
from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.prompts.planning import check_ids, count_chat, plan
from mlxsrv.wire.openai.tokens import (
    AppliedTemplate,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    TokenPiece,
)

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer


class _ResponseBudget(TokenBudget, frozen=True):
    """The most tokens that one response tells, of a text that no model reads."""

    def refusal(self, found: str, tokens: int) -> ServeError:
        return RequestTooLarge(
            f"at most {self.tokens} tokens of one text are returned{found}", param=self.param
        )


_MOST_TOKENS = 2**20  # as many as /detokenize takes


def tokenize(request: TokenizeRequest, tokenizer: Tokenizer) -> TokenizeResponse:
    """Raises InvalidRequest, RequestTooLarge, ContextLengthExceeded or UnsupportedParameter."""
    ids = _ids(request, tokenizer)
    tokens: list[int | TokenPiece] = [*ids]
    if request.with_pieces:
        tokens = [TokenPiece.make(id, tokenizer.token_bytes_or_name(id)) for id in ids]
    response = TokenizeResponse(tokens, len(ids))
    if request.content is None:
        response = TokenizeResponse(tokens, len(ids), max_model_len=tokenizer.context)
    if request.return_token_strs:
        return structs.replace(response, token_strs=tokenizer.token_names(ids))
    return response


def _ids(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    name, text = request.text
    if text is not None:
        return tokenizer.token_ids(
            text, special=request.special, budget=_ResponseBudget(_MOST_TOKENS, name)
        )
    [prompt] = plan(request.chat.spec(), tokenizer).prompts
    return [*prompt.tokens]


def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer) -> DetokenizeResponse:
    """Raises InvalidRequest for ids that the model does not have."""
    check_ids(request.tokens, "tokens", tokenizer)
    text = tokenizer.decode(request.tokens)
    return DetokenizeResponse(content=text, prompt=text)


def apply_template(spec: GenerationSpec, tokenizer: Tokenizer) -> AppliedTemplate:
    """Raises InvalidRequest or UnsupportedParameter; ContextLengthExceeded if the chat is so long
    that its tokens were not counted."""
    [prompt] = plan(spec, tokenizer).prompts
    return AppliedTemplate(prompt.text)


def count_tokens(spec: GenerationSpec, tokenizer: Tokenizer) -> int:
    """Return how many tokens the prompt of a chat has.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot read the chat.
        RequestTooLarge: it has more tokens than are counted.
    """
    assert isinstance(spec.prompt, ChatPrompt)
    budget = _ResponseBudget(_MOST_TOKENS, spec.path("messages"))
    return count_chat(spec, spec.prompt, tokenizer, budget)


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    return TokenizerInfo(
        tokenizer_class=tokenizer.class_name,
        chat_template=tokenizer.chat_template.source,
        model_max_length=tokenizer.context,
        vocab_size=tokenizer.vocabulary,
        **tokenizer.special_tokens,
    )
