"""From a request's messages or prompt to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation import Bans
from mlxsrv.prompts.constraints import ConstraintSpec, chat_constraint, text_constraint
from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.prompts.infill import infill
from mlxsrv.prompts.messages import Chat, PlainMessage
from mlxsrv.text.infill import ProjectFile
from mlxsrv.text.tools import ToolCalls, ToolDialect
from mlxsrv.wire.generation_request import GenerationRequest
from mlxsrv.wire.infill import InfillRequest
from mlxsrv.wire.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer


class PromptPlan(msgspec.Struct, frozen=True):
    """A request's prompts, and what its answers have to follow.

    A worker thread makes it, with the tokenizer to itself.

    Attributes:
        paths: where in the request each prompt is.
        dialect: how the model calls the tools that it was given.
        parallel: whether it may call more than one tool.
        constraint: the grammar that the answers must follow.
        bans: tokens that the answers may not have.
    """

    prompts: list[Prompt]
    paths: list[str]
    dialect: ToolDialect | None = None
    parallel: bool = True
    constraint: ConstraintSpec | None = None
    bans: Bans | None = None

    def tool_calls(self) -> ToolCalls | None:
        """Return a new stage that reads the calls of one answer."""
        if self.dialect is None:
            return None
        bound = self.constraint is not None
        return ToolCalls(self.dialect, parallel=self.parallel, bound=bound)


def plan_chat(
    request: ChatRequest, messages: Sequence[PlainMessage], tokenizer: Tokenizer
) -> PromptPlan:
    """Plan the prompt of a chat, which the model's template writes.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    tools = _callable_tools(request)
    dialect = tokenizer.dialect(tools) if tools else None
    if tools and (dialect is None or not _has_variable("tools", request, tokenizer)):
        raise UnsupportedParameter(
            "tools: this model's chat template has no tools, or calls them in a way that is not "
            "supported",
            param="tools",
        )
    chat = Chat(
        messages=messages,
        variables=_variables(request, tokenizer),
        continue_final=bool(request.continue_final_message),
        answers=request.add_generation_prompt is not False,
        tools=tools or None,
        template=request.chat_template,
    )
    budget, last = tokenizer.budget("messages"), _last_tokens(request, tokenizer)
    prompt = tokenizer.render(chat, budget, last)
    _require_tokens(prompt, "messages" if request.chat_template is None else "chat_template")
    return PromptPlan(
        [prompt],
        ["messages"],
        dialect=dialect,
        parallel=request.parallel_tool_calls is not False,
        constraint=_prepared(chat_constraint(request, dialect), tokenizer),
        bans=_bans(request, tokenizer),
    )


def _variables(request: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template's variables besides the messages. Raises InvalidRequest."""
    variables = dict(request.chat_template_kwargs or {})
    for name in tokenizer.chat_template.reserved(variables):
        path = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{path}: the server sets it; leave it out", param=path)
    if request.effort is not None and _has_variable("reasoning_effort", request, tokenizer):
        variables["reasoning_effort"] = request.effort
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking
    return variables


def _has_variable(name: str, request: ChatRequest, tokenizer: Tokenizer) -> bool:
    if request.chat_template is not None:
        return name in request.chat_template
    return tokenizer.chat_template.has_variable(name)


def _last_tokens(request: GenerationRequest, tokenizer: Tokenizer) -> int | None:
    """Return how many of a prompt's last tokens are wanted; None for all.

    A request that says -1 wants as many as the context holds beside the answer, which may have half
    of it.
    """
    asked, context = request.truncate_prompt_tokens, tokenizer.context
    if asked != -1 or context is None:
        return None if asked == -1 else asked
    half = context // 2
    return context - min(half if request.limit is None else request.limit, half)


def _prepared(constraint: ConstraintSpec | None, tokenizer: Tokenizer) -> ConstraintSpec | None:
    """Derive what compiling the constraint needs of the tokenizer, while this thread has it."""
    if constraint is not None:
        tokenizer.grammars.prepare(param=constraint.param)
    return constraint


def _callable_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the model may call, as templates take them."""
    if request.tool_choice == "none":
        return []
    return [msgspec.to_builtins(tool) for tool in request.tools or ()]


def plan_completion(
    request: CompletionRequest, prompts: Sequence[str | list[int]], tokenizer: Tokenizer
) -> PromptPlan:
    """Plan the prompts of a text completion.

    Token ids are checked, since MLX reads past the end of a table.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    if request.suffix:
        return _plan_suffix(request, prompts, tokenizer)
    paths = [_prompt_path(request, i) for i in range(len(prompts))]
    last = _last_tokens(request, tokenizer)
    encoded = [
        _encode(prompt, path, tokenizer, last) for prompt, path in zip(prompts, paths, strict=True)
    ]
    return _plan_text(request, encoded, paths, tokenizer)


def _plan_suffix(
    request: CompletionRequest, prompts: Sequence[str | list[int]], tokenizer: Tokenizer
) -> PromptPlan:
    """Plan the texts between each prompt and the suffix; such a request has prompts of text."""
    _require_whole(request)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    budget = tokenizer.budget("prompt")
    filled = [infill(tokenizer, text, request.suffix or "", budget=budget) for text in texts]
    found = [prompt for prompt in filled if prompt is not None]
    if len(found) < len(filled):
        raise UnsupportedParameter(
            "suffix: this model has no fill-in-the-middle tokens; leave it out", param="suffix"
        )
    paths = [_prompt_path(request, i) for i in range(len(prompts))]
    return _plan_text(request, found, paths, tokenizer)


def plan_infill(request: InfillRequest, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the text between prefix and suffix; `prompt` is the part of it that is written already.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    _require_whole(request)
    files = [ProjectFile(each.filename, each.text) for each in request.input_extra or ()]
    prefix = request.input_prefix + (request.prompt or "")
    budget = tokenizer.budget("input_prefix")
    prompt = infill(tokenizer, prefix, request.input_suffix, files, budget)
    if prompt is None:
        raise UnsupportedParameter(
            "model: it has no fill-in-the-middle tokens, so it cannot infill; choose another model",
            param="model",
        )
    return _plan_text(request, [prompt], ["input_prefix"], tokenizer)


def _require_whole(request: GenerationRequest) -> None:
    """Raise UnsupportedParameter if prompts are to be truncated: markers of the gap would go."""
    if request.truncate_prompt_tokens is not None:
        raise UnsupportedParameter(
            "truncate_prompt_tokens: a text around a gap is read as a whole; leave it out",
            param="truncate_prompt_tokens",
        )


def _plan_text(
    request: GenerationRequest, prompts: list[Prompt], paths: list[str], tokenizer: Tokenizer
) -> PromptPlan:
    return PromptPlan(
        prompts,
        paths,
        constraint=_prepared(text_constraint(request), tokenizer),
        bans=_bans(request, tokenizer),
    )


def _prompt_path(request: CompletionRequest, index: int) -> str:
    """Return where in the request a prompt is. A list of ids is one prompt."""
    one = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    return "prompt" if one else f"prompt[{index}]"


def _encode(prompt: str | list[int], path: str, tokenizer: Tokenizer, last: int | None) -> Prompt:
    budget = tokenizer.budget(path)
    if isinstance(prompt, str):
        encoded = tokenizer.encode(prompt, budget, last)
    else:
        prompt = prompt[-last:] if last is not None else prompt
        check_length(prompt, budget)
        check_ids(prompt, path, tokenizer)
        encoded = tokenizer.prompt_of(prompt)
    _require_tokens(encoded, path)
    return encoded


def _require_tokens(prompt: Prompt, path: str) -> None:
    if not prompt.tokens:
        raise InvalidRequest(f"{path}: must give at least one token", param=path)


def check_length(tokens: Sequence[int], budget: TokenBudget | None) -> None:
    """Raise the budget's refusal if there are too many tokens."""
    if budget is not None and len(tokens) > budget.tokens:
        raise budget.refusal(f"; the text has {len(tokens)}")


def check_ids(tokens: Sequence[int], path: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest for an id that the model does not have."""
    for i, token in enumerate(tokens):
        if token >= tokenizer.vocabulary:
            where = f"{path}[{i}]"
            raise InvalidRequest(
                f"{where}: {token} is not a token id of this model; it has {tokenizer.vocabulary}",
                param=where,
            )


def _check_biases(request: GenerationRequest, tokenizer: Tokenizer) -> None:
    for token in request.logit_bias or {}:
        if token >= tokenizer.vocabulary:
            raise InvalidRequest(
                f"logit_bias: {token} is not a token id of this model; it has "
                f"{tokenizer.vocabulary}",
                param="logit_bias",
            )


def _bans(request: GenerationRequest, tokenizer: Tokenizer) -> Bans | None:
    """Return what the answers may not have. Raises InvalidRequest for ids of no token."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(request, name) or (), name, tokenizer)
    bans = Bans(
        min_tokens=request.min_tokens or 0,
        allowed=tuple(request.allowed_token_ids or ()),
        words=tuple(ids for word in request.bad_words or () for ids in tokenizer.word_ids(word)),
    )
    return None if bans == Bans() else bans
