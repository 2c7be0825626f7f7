"""From a request's messages or prompt to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.errors import (
    InvalidRequest,
    MissingParameter,
    UnsupportedParameter,
)
from mlxsrv.generation import Bans
from mlxsrv.prompts.constraints import ConstraintSpec, chat_constraint, text_constraint
from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.prompts.infill import infill
from mlxsrv.text.infill import ProjectFile
from mlxsrv.text.tools import ToolCalls, ToolDialect
from mlxsrv.wire.infill import InfillRequest
from mlxsrv.wire.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    ToolCall,
)

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer

PlainMessage = dict[str, Any]


def chat_messages(messages: Sequence[Message]) -> list[PlainMessage]:
    """Messages as chat templates want them. Raises InvalidRequest with the path of the fault."""
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> PlainMessage:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    plain: PlainMessage = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    thoughts = message.reasoning_content or message.reasoning
    if thoughts is not None:
        plain["reasoning_content"] = thoughts
    if message.function_call is not None:
        old = ToolCall(message.function_call)
        plain["tool_calls"] = [_tool_call(old, f"{where}.function_call", "arguments")]
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _content(message: Message, where: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        path = f"{where}.content[{i}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"{path}: this model takes text only, not {part.type!r}", param=path
            )
        if part.text is None:
            raise MissingParameter(f"missing required parameter: {path}.text", param=f"{path}.text")
        texts.append(part.text)
    return "".join(texts)


def _tool_call(call: ToolCall, where: str, arguments: str = "function.arguments") -> dict[str, Any]:
    """Templates take the arguments as an object, where the wire has a string of JSON."""
    path = f"{where}.{arguments}"
    try:
        given = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not a JSON object: {error}", param=path) from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": given},
    }


class PromptPlan(msgspec.Struct, frozen=True):
    """What a worker thread finds out before a request's jobs can be made.

    `paths` says where in the request each prompt is.
    `dialect` is how the model calls the tools that it was given, `parallel` whether it may call
    more than one; `constraint` is what the answers must follow, `bans` what they may not have.
    """

    prompts: list[Prompt]
    paths: list[str]
    dialect: ToolDialect | None = None
    parallel: bool = True
    constraint: ConstraintSpec | None = None
    bans: Bans | None = None

    def tool_calls(self) -> ToolCalls | None:
        """A new stage for one answer's calls."""
        if self.dialect is None:
            return None
        bound = self.constraint is not None
        return ToolCalls(self.dialect, parallel=self.parallel, bound=bound)


def plan_chat(
    request: ChatRequest, messages: Sequence[PlainMessage], tokenizer: Tokenizer
) -> PromptPlan:
    """The chat as the model's template writes it, and what the answer must follow.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    tools = _offered(request)
    dialect = tokenizer.dialect(tools) if tools else None
    if tools and (dialect is None or not _knows("tools", request, tokenizer)):
        raise UnsupportedParameter(
            "tools: this model's chat template has no tools, or calls them in a way that is not "
            "known here",
            param="tools",
        )
    prompt = tokenizer.render(
        messages,
        variables=_variables(request, tokenizer),
        continue_final=bool(request.continue_final_message),
        answers=request.add_generation_prompt is not False,
        tools=tools or None,
        template=request.chat_template,
        limit=tokenizer.limit("messages"),
        last=_last(request, tokenizer),
    )
    return PromptPlan(
        [prompt],
        ["messages"],
        dialect=dialect,
        parallel=request.parallel_tool_calls is not False,
        constraint=_prepared(chat_constraint(request, dialect), tokenizer),
        bans=_bans(request, tokenizer),
    )


def _variables(request: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the template is given beside the messages. Raises InvalidRequest."""
    variables = dict(request.chat_template_kwargs or {})
    for name in tokenizer.reserved(variables):
        path = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{path}: the server sets it; leave it out", param=path)
    if request.effort is not None and _knows("reasoning_effort", request, tokenizer):
        variables["reasoning_effort"] = request.effort
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking
    return variables


def _knows(variable: str, request: ChatRequest, tokenizer: Tokenizer) -> bool:
    if request.chat_template is not None:
        return variable in request.chat_template
    return tokenizer.knows(variable)


def _last(request: GenerationRequest, tokenizer: Tokenizer) -> int | None:
    """Of how many tokens of a prompt only the last are wanted, if so. -1: as many as the context
    holds beside the answer, which may have half of it."""
    asked, context = request.truncate_prompt_tokens, tokenizer.context
    if asked != -1 or context is None:
        return None if asked == -1 else asked
    half = context // 2
    return context - min(half if request.limit is None else request.limit, half)


def _prepared(constraint: ConstraintSpec | None, tokenizer: Tokenizer) -> ConstraintSpec | None:
    """The constraint, once what it needs of the tokenizer is read: compiling does without."""
    if constraint is not None:
        tokenizer.grammars.prepare(param=constraint.param)
    return constraint


def _offered(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call, as templates take them."""
    if request.tool_choice == "none":
        return []
    return [msgspec.to_builtins(tool) for tool in request.tools or ()]


def plan_completion(
    request: CompletionRequest, prompts: Sequence[str | list[int]], tokenizer: Tokenizer
) -> PromptPlan:
    """The prompts of a text completion, ids checked: MLX reads past the end of a table.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    if request.suffix:
        return _plan_suffix(request, prompts, tokenizer)
    paths = [_prompt_path(request, i) for i in range(len(prompts))]
    last = _last(request, tokenizer)
    encoded = [
        _encode(prompt, path, tokenizer, last) for prompt, path in zip(prompts, paths, strict=True)
    ]
    return _plan_text(request, encoded, paths, tokenizer)


def _plan_suffix(
    request: CompletionRequest, prompts: Sequence[str | list[int]], tokenizer: Tokenizer
) -> PromptPlan:
    """The texts between each prompt and the suffix. A decoded request has prompts of text only."""
    _require_whole(request)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    limit = tokenizer.limit("prompt")
    filled = [infill(tokenizer, text, request.suffix or "", limit=limit) for text in texts]
    found = [prompt for prompt in filled if prompt is not None]
    if len(found) < len(filled):
        raise UnsupportedParameter(
            "suffix: this model has no fill-in-the-middle tokens; leave it out", param="suffix"
        )
    paths = [_prompt_path(request, i) for i in range(len(prompts))]
    return _plan_text(request, found, paths, tokenizer)


def plan_infill(request: InfillRequest, tokenizer: Tokenizer) -> PromptPlan:
    """The text between prefix and suffix. `prompt` is what has been written of it already.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(request, tokenizer)
    _require_whole(request)
    files = [ProjectFile(each.filename, each.text) for each in request.input_extra or ()]
    prefix = request.input_prefix + (request.prompt or "")
    limit = tokenizer.limit("input_prefix")
    prompt = infill(tokenizer, prefix, request.input_suffix, files, limit)
    if prompt is None:
        raise UnsupportedParameter(
            "model: it has no fill-in-the-middle tokens, so it cannot infill; ask another",
            param="model",
        )
    return _plan_text(request, [prompt], ["input_prefix"], tokenizer)


def _require_whole(request: GenerationRequest) -> None:
    """Raises UnsupportedParameter: a part of these prompts would lack what marks the gap."""
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
    """Where in the request a prompt is: a list of ids is one."""
    one = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    return "prompt" if one else f"prompt[{index}]"


def _encode(prompt: str | list[int], path: str, tokenizer: Tokenizer, last: int | None) -> Prompt:
    limit = tokenizer.limit(path)
    if isinstance(prompt, str):
        encoded = tokenizer.encode(prompt, limit, last)
    else:
        prompt = prompt[-last:] if last is not None else prompt
        check_length(prompt, limit)
        check_ids(prompt, path, tokenizer)
        encoded = tokenizer.given(prompt)
    if not encoded.tokens:
        raise InvalidRequest(f"{path}: must hold at least one token", param=path)
    return encoded


def check_length(tokens: Sequence[int], limit: TokenBudget | None) -> None:
    """Raises ContextLengthExceeded."""
    if limit is not None and len(tokens) > limit.tokens:
        raise limit.refusal(f"; the text has {len(tokens)}")


def check_ids(tokens: Sequence[int], path: str, tokenizer: Tokenizer) -> None:
    for i, token in enumerate(tokens):
        if token >= tokenizer.vocabulary:
            where = f"{path}[{i}]"
            raise InvalidRequest(
                f"{where}: {token} is no token id of this model; it has {tokenizer.vocabulary}",
                param=where,
            )


def _check_biases(request: GenerationRequest, tokenizer: Tokenizer) -> None:
    for token in request.logit_bias or {}:
        if token >= tokenizer.vocabulary:
            raise InvalidRequest(
                f"logit_bias: {token} is no token id of this model; it has {tokenizer.vocabulary}",
                param="logit_bias",
            )


def _bans(request: GenerationRequest, tokenizer: Tokenizer) -> Bans | None:
    """What the answers may not have in them. Raises InvalidRequest for ids of no token."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(request, name) or (), name, tokenizer)
    bans = Bans(
        min_tokens=request.min_tokens or 0,
        allowed=tuple(request.allowed_token_ids or ()),
        words=tuple(
            spelling for word in request.bad_words or () for spelling in tokenizer.spellings(word)
        ),
    )
    return None if bans == Bans() else bans
