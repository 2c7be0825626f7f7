"""The tokenizer's own endpoints: texts to tokens and back, and rendered templates.

They are for clients that count tokens or write prompts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxsrv.errors import RequestTooLarge, ServeError
from mlxsrv.generation.spec import ChatPrompt, GenerationSpec
from mlxsrv.generation.texts import TextTokens, TokenizerInfo, TokensSpec
from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.prompts.planning import check_ids, count_chat, plan

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer


class _ResponseBudget(TokenBudget, frozen=True):
    """The most tokens that one response tells, of a text that no model reads."""

    def refusal(self, found: str, tokens: int) -> ServeError:
        return RequestTooLarge(
            f"at most {self.tokens} tokens of one text are returned{found}", param=self.param
        )


_MOST_TOKENS = 2**20  # as many as /detokenize takes


def tokenize(spec: TokensSpec, tokenizer: Tokenizer) -> TextTokens:
    """Raises InvalidRequest, RequestTooLarge, ContextLengthExceeded or UnsupportedParameter."""
    if isinstance(spec.content, GenerationSpec):
        [prompt] = plan(spec.content, tokenizer).prompts
        ids = [*prompt.tokens]
    else:
        text, path = spec.content
        budget = _ResponseBudget(_MOST_TOKENS, path)
        ids = tokenizer.token_ids(text, special=spec.special, budget=budget)
    return TextTokens(
        ids,
        tokenizer.context,
        [*map(tokenizer.token_bytes_or_name, ids)] if spec.spelled else None,
        tokenizer.token_names(ids) if spec.named else None,
    )


def detokenize(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Raises InvalidRequest for ids that the model does not have."""
    check_ids(ids, "tokens", tokenizer)
    return tokenizer.decode(ids)


def apply_template(spec: GenerationSpec, tokenizer: Tokenizer) -> str:
    """Raises InvalidRequest or UnsupportedParameter; ContextLengthExceeded if the chat is so long
    that its tokens were not counted."""
    [prompt] = plan(spec, tokenizer).prompts
    return prompt.text


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
