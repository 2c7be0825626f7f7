"""From a spec's messages or prompts to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation.parameters import Bans
from mlxsrv.generation.spec import (
    ChatPrompt,
    GenerationSpec,
    GrammarForm,
    InfillPrompt,
    TextPrompts,
    ToolSpec,
)
from mlxsrv.prompts.constraints import ConstraintSpec, chat_constraint, text_constraint
from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.prompts.infill import infill
from mlxsrv.prompts.messages import Chat, Messages, plain_message, plain_tool
from mlxsrv.text.tools import ToolCalls, ToolDialect

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer


class PromptPlan(msgspec.Struct, frozen=True):
    """A request's prompts, and what its answers have to follow.

    A worker thread makes it.

    Attributes:
        paths: where in the request each prompt is.
        dialect: how the model calls the tools that it was given.
        parallel: whether it may call more than one tool.
        constraint: the grammar that the answers must follow.
        bans: tokens that the answers may not have.
        ignored: paths of fields that the model's template does not take.
    """

    prompts: list[Prompt]
    paths: Sequence[str]
    dialect: ToolDialect | None = None
    parallel: bool = True
    constraint: ConstraintSpec | None = None
    bans: Bans | None = None
    ignored: Sequence[str] = ()

    def tool_calls(self) -> ToolCalls | None:
        """Return a new stage that reads the calls of one answer."""
        if self.dialect is None:
            return None
        return ToolCalls(self.dialect, parallel=self.parallel, bound=self.bound)

    @property
    def bound(self) -> bool:
        """Whether the whole answer follows a grammar."""
        return self.constraint is not None and not self.constraint.calls_only


def plan(spec: GenerationSpec, tokenizer: Tokenizer) -> PromptPlan:
    """Plan a request's prompts.

    Runs in a worker thread. Token ids are checked, since MLX reads past the end of a table.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    _check_biases(spec, tokenizer)
    match spec.prompt:
        case ChatPrompt(plain=str(text), template=None) if not tokenizer.chat_template.exists:
            prompts = TextPrompts(prompts=[text], places=[spec.path("messages")])
            return _plan_texts(spec, prompts, tokenizer)
        case ChatPrompt():
            return _plan_chat(spec, spec.prompt, tokenizer)
        case TextPrompts(suffix=""):
            return _plan_texts(spec, spec.prompt, tokenizer)
        case TextPrompts():
            return _plan_suffix(spec, spec.prompt, tokenizer)
        case InfillPrompt():
            return _plan_infill(spec, spec.prompt, tokenizer)


def _plan_chat(spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the prompt of a chat, which the model's template writes."""
    chat, dialect, ignored = _make_chat(spec, asked, tokenizer)
    budget = tokenizer.budget(chat.path)
    prompt = tokenizer.render(chat, budget, _last_tokens(spec, tokenizer))
    _require_tokens(prompt, chat.path if asked.template is None else chat.template_path)
    enforces = tokenizer.enforces_calls
    constraint = _prepared(chat_constraint(spec, asked, dialect, enforces=enforces), tokenizer)
    forms = [tool.input_form for tool in asked.tools if tool.input_form is not None]
    if any(constraint is None or isinstance(form, GrammarForm) for form in forms):
        reason = (
            "the model writes a call as JSON, inside which only a regex can bind the input, with "
            "--tool-grammar or a tool_choice that requires a call"
        )
        tokenizer.log_once("grammars of custom tools not enforced", reason=reason)
    return PromptPlan(
        [prompt],
        [chat.path],
        dialect=dialect,
        parallel=asked.parallel,
        constraint=constraint,
        bans=_bans(spec, tokenizer),
        ignored=ignored,
    )


def count_chat(
    spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer, budget: TokenBudget
) -> int:
    """Return how many tokens the prompt of a chat has, also if it is longer than the context.

    Raises:
        InvalidRequest, UnsupportedParameter: as for a chat that is answered.
        ServeError: the budget's refusal.
    """
    chat, _, _ = _make_chat(spec, asked, tokenizer)
    return len(tokenizer.render(chat, budget).tokens)


def _make_chat(
    spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer
) -> tuple[Chat, ToolDialect | None, list[str]]:
    """Return what the template writes, how the model calls the tools in it, and the paths of fields
    that the template does not take."""
    tools = [plain_tool(tool) for tool in _offered(asked, tokenizer)]
    dialect = tokenizer.dialect(tools) if tools else None
    if tools and (dialect is None or not _has_variable("tools", asked, tokenizer)):
        path = spec.path("tools")
        raise UnsupportedParameter(
            f"{path}: this model's chat template has no tools, or calls them in a way that is not "
            "supported",
            param=path,
        )
    variables, ignored = _variables(spec, asked, tokenizer)
    messages = _messages(asked, tokenizer)
    chat = Chat(
        messages=messages,
        variables=variables,
        # An empty message at the end may be gone; then there is nothing to go on with.
        continue_final=asked.continues and messages[-1]["role"] == asked.messages[-1].role,
        answers=asked.answers,
        tools=tools or None,
        template=asked.template,
        path=spec.path("messages"),
        template_path=spec.path("chat_template"),
    )
    return chat, dialect, ignored


def _offered(asked: ChatPrompt, tokenizer: Tokenizer) -> Sequence[ToolSpec]:
    """Return the tools that stand in the prompt.

    Where a grammar decides which of them are called, that is all of them: a choice of some leaves
    the prompt as it is, and the prompt cache has it. Otherwise it is those that may be called.
    """
    choice = asked.tool_choice
    if choice.mode == "none":
        return ()
    if not choice.only or choice.mode == "required" or tokenizer.enforces_calls:
        return asked.tools
    return [tool for tool in asked.tools if tool.name in choice.only]


def _messages(asked: ChatPrompt, tokenizer: Tokenizer) -> Messages:
    messages = [plain_message(message) for message in asked.messages]
    return tokenizer.chat_template.adapt(messages) if asked.template is None else messages


def _variables(
    spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[str]]:
    """Return the template's variables besides the messages, and the paths of fields that it does
    not take. Raises InvalidRequest."""
    variables = dict(asked.variables)
    for name in tokenizer.chat_template.reserved(variables):
        path = f"{spec.path('chat_template_kwargs')}.{name}"
        raise InvalidRequest(f"{path}: the server sets it; leave it out", param=path)
    thinking, ignored = _thinking(spec, asked, tokenizer)
    return variables | thinking, ignored


def _thinking(
    spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that say whether and how much to think, and the paths of fields that the
    template does not take. They are advice: what it would refuse is left out."""
    template = tokenizer.chat_template if asked.template is None else None
    variables: dict[str, Any] = {}
    ignored: list[str] = []
    effort = asked.effort or None  # some clients send "" where nothing is chosen
    thinks = False if asked.thinking is None and effort == "none" else asked.thinking
    if thinks is not None and (template is None or template.takes("enable_thinking", thinks)):
        variables["enable_thinking"] = thinks
    elif asked.thinking is not None:
        ignored.append(spec.path("enable_thinking"))
    if effort is None:
        return variables, ignored
    level = effort if template is None else template.nearest_effort(effort)
    if not _has_variable("reasoning_effort", asked, tokenizer):
        level = None
    switched = "enable_thinking" in variables and _has_variable("enable_thinking", asked, tokenizer)
    one_field = spec.path("reasoning_effort") == spec.path("enable_thinking")
    if level is not None and (effort != "none" or level == "none" or not switched):
        variables["reasoning_effort"] = level
    elif not switched or (effort != "none" and not one_field):
        ignored.append(spec.path("reasoning_effort"))
    return variables, list(dict.fromkeys(ignored))


def _has_variable(name: str, asked: ChatPrompt, tokenizer: Tokenizer) -> bool:
    if asked.template is not None:
        return name in asked.template
    return tokenizer.chat_template.has_variable(name)


def _last_tokens(spec: GenerationSpec, tokenizer: Tokenizer) -> int | None:
    """Return how many of a prompt's last tokens are wanted; None for all.

    A request that says -1 wants as many as the context holds beside the answer, which may have half
    of it.
    """
    context = tokenizer.context
    if spec.truncate != -1 or context is None:
        return None if spec.truncate == -1 else spec.truncate
    half = context // 2
    return context - min(half if spec.limit is None else spec.limit, half)


def _prepared(constraint: ConstraintSpec | None, tokenizer: Tokenizer) -> ConstraintSpec | None:
    """Derive what compiling the constraint needs of the tokenizer; None if it cannot be used, and
    the request did not ask for it."""
    if constraint is None:
        return None
    try:
        tokenizer.grammars.prepare(param=constraint.param)
    except UnsupportedParameter as error:
        if not constraint.calls_only:
            raise
        tokenizer.enforces_calls = False  # the request did not ask for it
        tokenizer.log_once("tool grammar has no effect", reason=error.message)
        return None
    return constraint


def _plan_texts(spec: GenerationSpec, asked: TextPrompts, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the prompts of a text completion."""
    last = _last_tokens(spec, tokenizer)
    encoded = [
        _encode(prompt, path, tokenizer, last)
        for prompt, path in zip(asked.prompts, asked.places, strict=True)
    ]
    return _plan_text(spec, encoded, asked.places, tokenizer)


def _plan_suffix(spec: GenerationSpec, asked: TextPrompts, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the texts between each prompt and the suffix; such a request has prompts of text."""
    _require_whole(spec)
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    budget = tokenizer.budget("prompt")
    filled = [infill(tokenizer, text, asked.suffix, budget=budget) for text in texts]
    found = [prompt for prompt in filled if prompt is not None]
    if len(found) < len(filled):
        path = spec.path("suffix")
        raise UnsupportedParameter(
            f"{path}: this model has no fill-in-the-middle tokens; leave it out", param=path
        )
    return _plan_text(spec, found, asked.places, tokenizer)


def _plan_infill(spec: GenerationSpec, asked: InfillPrompt, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the text between prefix and suffix."""
    _require_whole(spec)
    budget = tokenizer.budget("input_prefix")
    prompt = infill(tokenizer, asked.prefix, asked.suffix, asked.files, budget)
    if prompt is None:
        raise UnsupportedParameter(
            "model: it has no fill-in-the-middle tokens, so it cannot infill; choose another model",
            param="model",
        )
    return _plan_text(spec, [prompt], ["input_prefix"], tokenizer)


def _require_whole(spec: GenerationSpec) -> None:
    """Raise UnsupportedParameter if prompts are to be truncated: markers of the gap would go."""
    if spec.truncate is not None:
        raise UnsupportedParameter(
            "truncate_prompt_tokens: a text around a gap is read as a whole; leave it out",
            param="truncate_prompt_tokens",
        )


def _plan_text(
    spec: GenerationSpec, prompts: list[Prompt], paths: Sequence[str], tokenizer: Tokenizer
) -> PromptPlan:
    return PromptPlan(
        prompts,
        paths,
        constraint=_prepared(text_constraint(spec), tokenizer),
        bans=_bans(spec, tokenizer),
    )


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
        raise budget.refusal(f"; the text has {len(tokens)}", len(tokens))


def check_ids(tokens: Sequence[int], path: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest for an id that the model does not have."""
    for i, token in enumerate(tokens):
        if token >= tokenizer.vocabulary:
            where = f"{path}[{i}]"
            raise InvalidRequest(
                f"{where}: {token} is not a token id of this model; it has {tokenizer.vocabulary}",
                param=where,
            )


def _check_biases(spec: GenerationSpec, tokenizer: Tokenizer) -> None:
    for token in spec.sampling.logit_bias:
        if token >= tokenizer.vocabulary:
            raise InvalidRequest(
                f"logit_bias: {token} is not a token id of this model; it has "
                f"{tokenizer.vocabulary}",
                param="logit_bias",
            )


def _bans(spec: GenerationSpec, tokenizer: Tokenizer) -> Bans | None:
    """Return what the answers may not have. Raises InvalidRequest for ids of no token."""
    check_ids(spec.stop_token_ids, "stop_token_ids", tokenizer)
    check_ids(spec.allowed_token_ids, "allowed_token_ids", tokenizer)
    bans = Bans(
        min_tokens=spec.min_tokens,
        allowed=tuple(spec.allowed_token_ids),
        words=tuple(ids for word in spec.bad_words for ids in tokenizer.word_ids(word)),
    )
    return None if bans == Bans() else bans
