"""From a spec's messages or prompts to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.formats.infill import InfillFamily, InfillText, find_family, lay_out, to_tokens
from mlxsrv.generation.parameters import Bans, DryPenalty
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
from mlxsrv.prompts.templates.chat_template import names_tools
from mlxsrv.prompts.templates.messages import Chat, plain_message, plain_tool
from mlxsrv.prompts.templates.tool_descriptions import describe_tools
from mlxsrv.text.call_formats.call_ids import count_calls
from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.reader import OfferedCalls

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer

_SIGN = "\u263a"  # no vocabulary merges it with what follows


class PromptPlan(msgspec.Struct, frozen=True):
    """A request's prompts, and what its answers have to follow.

    A worker thread makes it.

    Attributes:
        paths: where in the request each prompt is.
        calls: those that the answers may make.
        constraint: the grammar that the answers must follow.
        bans: tokens that the answers may not have.
        dry: the penalty for repetitions in the answers.
        thinking_budget: tokens that thoughts may take, if the request says so.
        ignored: paths of what the model cannot take: fields of its template, strings of no token.
    """

    prompts: list[Prompt]
    paths: Sequence[str]
    calls: OfferedCalls | None = None
    constraint: ConstraintSpec | None = None
    bans: Bans | None = None
    dry: DryPenalty | None = None
    thinking_budget: int | None = None
    ignored: Sequence[str] = ()

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
    asked = spec.prompt
    if isinstance(asked, ChatPrompt):
        plain = asked.template is None and not tokenizer.chat_template.exists
        if not plain or asked.plain is None:
            return _plan_chat(spec, asked, tokenizer)
        asked = TextPrompts(prompts=[asked.plain], places=[spec.path("messages")])
    prompts, paths = _make_prompts(spec, asked, tokenizer)
    dry, unknown = _dry(spec, tokenizer)
    return PromptPlan(
        prompts,
        paths,
        constraint=_prepared(text_constraint(spec), tokenizer),
        bans=_bans(spec, tokenizer),
        dry=dry,
        ignored=unknown,
    )


def _plan_chat(spec: GenerationSpec, asked: ChatPrompt, tokenizer: Tokenizer) -> PromptPlan:
    """Plan the prompt of a chat, which the model's template writes."""
    chat, calls, ignored = _make_chat(spec, asked, tokenizer)
    budget = tokenizer.budget(chat.path)
    prompt = tokenizer.render(chat, budget, _last_tokens(spec, tokenizer))
    _require_tokens(prompt, chat.path if asked.template is None else chat.template_path)
    enforces = tokenizer.enforces_calls
    thoughts = tokenizer.own_thoughts(prompt)
    wanted = chat_constraint(spec, asked, calls, enforces=enforces, thoughts=thoughts)
    constraint = _prepared(wanted, tokenizer)
    forms = [tool.input_form for tool in asked.tools if tool.input_form is not None]
    if any(constraint is None or isinstance(form, GrammarForm) for form in forms):
        reason = (
            "only a regex can bind the input of a call, with --tool-grammar, strict, or a "
            "tool_choice that requires a call"
        )
        tokenizer.log_once("grammars of custom tools not enforced", reason=reason)
    dry, unknown = _dry(spec, tokenizer)
    return PromptPlan(
        [prompt],
        [chat.path],
        calls=calls,
        constraint=constraint,
        bans=_bans(spec, tokenizer),
        dry=dry,
        thinking_budget=asked.thinking_budget,
        ignored=[*ignored, *unknown],
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
) -> tuple[Chat, OfferedCalls | None, list[str]]:
    """Return what the template writes, the calls that may be made, and the paths of fields that the
    template does not take."""
    tools = [plain_tool(tool) for tool in _offered(asked, tokenizer)]
    calls = _offered_calls(asked, tokenizer) if tools else None
    if tools and calls is None and not tokenizer.leaves_calls:
        tokenizer.log_once("tools refused", reason="it is not known how this model calls tools")
        path = spec.path("tools")
        raise UnsupportedParameter(
            f"{path}: it is not known how this model calls tools; start the server with "
            "--tool-format prompted to have them described to it, or leave them out",
            param=path,
        )
    variables, ignored = _variables(spec, asked, tokenizer)
    messages = [plain_message(message) for message in asked.messages]
    if calls is not None and not _takes_tools(asked, tokenizer):
        tokenizer.log_once("tools described in the system message", format=calls.format.name)
        messages, tools = describe_tools(messages, tools, calls.format), []
    if asked.template is None:
        messages = tokenizer.chat_template.adapt(messages, tools=bool(tools))
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
    return chat, calls, ignored


def _takes_tools(asked: ChatPrompt, tokenizer: Tokenizer) -> bool:
    if asked.template is not None:
        return names_tools(asked.template)
    return tokenizer.chat_template.takes_tools


def _offered_calls(asked: ChatPrompt, tokenizer: Tokenizer) -> OfferedCalls | None:
    """Return the calls of the request's tools; None if it is not known how the model writes any."""
    if tokenizer.formats.calls is None:
        return None
    schemas = {tool.name: tool.parameters or {} for tool in _offered(asked, tokenizer)}
    earlier = count_calls(call.id for message in asked.messages for call in message.calls)
    return OfferedCalls(tokenizer.formats.calls, Tools(schemas), asked.parallel, earlier)


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
    if asked.template is not None:
        return _clients_thinking(spec, asked, asked.template)
    switches = tokenizer.chat_template.switches
    variables: dict[str, Any] = {}
    ignored: list[str] = []
    effort = asked.effort or None  # some clients send "" where nothing is chosen
    none = effort == "none" or asked.thinking_budget == 0
    thinks = False if asked.thinking is None and none else asked.thinking
    turned = None if thinks is None else switches.turn(thinks)
    variables.update(turned or {})
    if asked.thinking_budget is not None and asked.thinking_budget > 0:
        variables.update(switches.set_budget(asked.thinking_budget) or {})
    changes = switches.can_turn or asked.thinking != tokenizer.formats.thoughts.thinks
    if turned is None and asked.thinking is not None and changes:
        ignored.append(spec.path("enable_thinking"))
    if effort is None:
        return variables, ignored
    level = switches.set_effort(effort)
    one_field = spec.path("reasoning_effort") == spec.path("enable_thinking")
    if level is not None and (effort != "none" or "none" in level.values() or turned is None):
        variables.update(level)
    elif turned is None or (effort != "none" and not one_field):
        ignored.append(spec.path("reasoning_effort"))
    return variables, list(dict.fromkeys(ignored))


def _clients_thinking(
    spec: GenerationSpec, asked: ChatPrompt, template: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the same for a client's template, which is not asked what it takes."""
    thinks = False if asked.thinking is None and asked.effort == "none" else asked.thinking
    told = {"enable_thinking": thinks, "reasoning_effort": asked.effort or None}
    variables = {name: value for name, value in told.items() if value is not None}
    if "reasoning_effort" not in variables or "reasoning_effort" in template:
        return variables, []
    del variables["reasoning_effort"]
    switched = asked.effort == "none" and "enable_thinking" in template
    return variables, [] if switched else [spec.path("reasoning_effort")]


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
    only calls that the model makes by itself would follow it."""
    if constraint is None:
        return None
    try:
        tokenizer.grammars.prepare(param=constraint.param)
    except UnsupportedParameter as error:
        if not constraint.calls_only:
            raise
        # Also if a tool is strict: SDKs say so by themselves, and an answer is better than a 400.
        tokenizer.enforces_calls = False
        tokenizer.log_once("tool grammar has no effect", reason=error.message)
        return None
    return constraint


def _make_prompts(
    spec: GenerationSpec, asked: TextPrompts | InfillPrompt, tokenizer: Tokenizer
) -> tuple[list[Prompt], Sequence[str]]:
    """Return the prompts of a text completion, and where in the request each is."""
    match asked:
        case TextPrompts(prompts=prompts, places=paths, suffix=""):
            last = _last_tokens(spec, tokenizer)
            pairs = zip(prompts, paths, strict=True)
            return [_encode(prompt, path, tokenizer, last) for prompt, path in pairs], paths
        case TextPrompts(prompts=prompts, places=paths, suffix=suffix):
            path = spec.path("suffix")
            reason = f"{path}: this model has no fill-in-the-middle tokens; leave it out"
            family = _find_family(spec, tokenizer, reason, path)
            budget = tokenizer.budget("prompt")
            texts = [prompt for prompt in prompts if isinstance(prompt, str)]  # so are all of them
            parts = [lay_out(family, text, suffix, ()) for text in texts]
            return [_fill_in(tokenizer, family, each, budget) for each in parts], paths
        case InfillPrompt(prefix=prefix, suffix=suffix, files=files):
            reason = (
                "model: it has no fill-in-the-middle tokens, so it cannot infill; choose another "
                "model"
            )
            family = _find_family(spec, tokenizer, reason, "model")
            budget = tokenizer.budget("input_prefix")
            part = lay_out(family, prefix, suffix, files)
            return [_fill_in(tokenizer, family, part, budget)], ["input_prefix"]


def _find_family(
    spec: GenerationSpec, tokenizer: Tokenizer, reason: str, param: str
) -> InfillFamily:
    """Return how the model marks the gap in a text. Raises UnsupportedParameter, also if prompts
    are to be truncated: markers of the gap would go."""
    if spec.truncate is not None:
        raise UnsupportedParameter(
            "truncate_prompt_tokens: a text around a gap is read as a whole; leave it out",
            param="truncate_prompt_tokens",
        )
    family = find_family(tokenizer.ids_by_name)
    if family is None:
        raise UnsupportedParameter(reason, param=param)
    return family


def _fill_in(
    tokenizer: Tokenizer,
    family: InfillFamily,
    parts: Iterable[str | InfillText],
    budget: TokenBudget | None,
) -> Prompt:
    """Return the prompt for the text in a gap.

    Args:
        parts: the texts around it, and the model's own markers.

    Raises:
        ContextLengthExceeded: a text is so far over the budget that its tokens were not counted.
    """
    ids = tokenizer.ids_by_name
    tokens = to_tokens(parts, ids, partial(_encode_part, tokenizer, budget))
    start = tokenizer.token_ids("", special=True)[:1]
    if start and start[0] == ids.get(tokenizer.special_tokens["bos_token"] or ""):
        tokens = start + tokens
    ends = frozenset(ids[name] for name in family.ends if name in ids)
    return msgspec.structs.replace(tokenizer.prompt_of(tokens), ends=ends)


def _encode_part(tokenizer: Tokenizer, budget: TokenBudget | None, part: InfillText) -> list[int]:
    """Return the tokens of a text inside a prompt.

    If the tokenizer writes a space before each text, it is made to write it before a sign that is
    taken off again.
    """
    if not (part.joined and tokenizer.strips_first_space):
        return tokenizer.token_ids(part.text, special=False, budget=budget)
    sign = tokenizer.token_ids(_SIGN, special=False)
    return tokenizer.token_ids(_SIGN + part.text, special=False, budget=budget)[len(sign) :]


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


def _dry(spec: GenerationSpec, tokenizer: Tokenizer) -> tuple[DryPenalty | None, list[str]]:
    """Return the penalty for repetitions, and the paths of breakers that are in no token."""
    wished = spec.sampling.dry
    if wished is None:
        return None, []
    found = [tokenizer.tokens_with(text) if text else () for text in wished.breakers]
    dry = DryPenalty(
        wished.multiplier,
        wished.base,
        wished.allowed_length,
        wished.last_n,
        breakers=tuple(sorted({token for tokens in found for token in tokens})),
    )
    path = spec.path("dry_sequence_breakers")
    return dry, [f"{path}[{i}]" for i, tokens in enumerate(found) if not tokens]
