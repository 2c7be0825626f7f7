"""One request to a model, in no dialect.

Each dialect in `wire/` makes a `GenerationSpec` of its requests. All that follows knows only the
spec: prompts, constraints, the engine's jobs, steering, observers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from mlxsrv.generation.parameters import RepetitionLimit, SteeringMode

# The form of an answer. `param` is the path of the field that asks for it.


class JSONForm(Struct, frozen=True):
    """JSON that a schema describes; with `compact`, without whitespace between its parts."""

    param: str
    schema: dict[str, Any]
    compact: bool = False


class RegexForm(Struct, frozen=True):
    """A text that the whole regex matches."""

    param: str
    regex: str


class ChoiceForm(Struct, frozen=True):
    """Exactly one of the choices."""

    param: str
    choices: list[str]


class GrammarForm(Struct, frozen=True):
    """A text that a grammar describes, in GBNF or Lark."""

    param: str
    text: str


Form = JSONForm | RegexForm | ChoiceForm | GrammarForm

# Prompts.


class PastCall(Struct, frozen=True):
    """A tool call of an earlier answer, as the client gives it back. Arguments that are no object
    are the text that the model wrote."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat.

    Attributes:
        reasoning: the thoughts before the content, in an assistant's message.
        calls: the tools that an assistant's message calls.
        call_id: the call that a tool's message answers.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    reasoning: str | None = None
    calls: Sequence[PastCall] = ()
    call_id: str | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether an answer can go on from this message: it is an assistant's text."""
        return self.role == "assistant" and bool(self.content) and not self.calls


class ToolSpec(Struct, frozen=True, kw_only=True):
    """A tool that the model may call.

    A tool with a free text as its input (a custom tool) is a function with the one string parameter
    `input`, and `parameters` say so.

    Attributes:
        parameters: the JSON Schema of its arguments.
        input_form: the grammar that such a text should follow, if the tool has one: a regex or
            Lark.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    input_form: RegexForm | GrammarForm | None = None


class ToolChoice(Struct, frozen=True):
    """Whether the model must call a tool.

    Attributes:
        only: names of the tools that may be called; empty: all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    only: tuple[str, ...] = ()


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A chat, which the model's chat template writes.

    Attributes:
        parallel: whether an answer may call more than one tool.
        variables: the template's, which the client sets.
        thinking: whether the model shall think, if the request says so.
        effort: how much it shall think, if the request says so.
        thinking_budget: tokens that its thoughts may take, if the request says so; negative: as
            many as the answer.
        continues: the answer continues the last message.
        answers: the beginning of an answer follows the messages.
        template: a client's template, in place of the model's.
        plain: the text that is continued in place of the chat if there is no template; None: such
            a model is refused.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    variables: Mapping[str, Any] = {}
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    continues: bool = False
    answers: bool = True
    template: str | None = None
    plain: str | None = None


class TextPrompts(Struct, frozen=True, kw_only=True):
    """Texts, or their token ids, that the model continues.

    Attributes:
        places: the path of each prompt in the request.
        suffix: the text that follows each answer; "": none.
        echo: whether each answer begins with its prompt.
    """

    prompts: Sequence[str | list[int]]
    places: Sequence[str]
    suffix: str = ""
    echo: bool = False


class ProjectFile(Struct, frozen=True):
    """Another file of the project, which the text to be filled in may refer to."""

    name: str
    text: str


class InfillPrompt(Struct, frozen=True):
    """The text before and after a gap, which the model fills."""

    prefix: str
    suffix: str
    files: Sequence[ProjectFile] = ()


PromptSpec = ChatPrompt | TextPrompts | InfillPrompt

# The whole.


class DryWishes(Struct, frozen=True, kw_only=True):
    """A penalty for repetitions: a DryPenalty, whose breakers are the tokens that have one of these
    strings in them."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")


class SamplingWishes(Struct, frozen=True, kw_only=True):
    """The settings by which tokens are drawn. None: the model's own default is used."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    dry: DryWishes | None = None
    seed: int | None = None


class SteeringWishes(Struct, frozen=True, kw_only=True):
    """Changes of hidden states: by a stored profile or by features, and by control vectors.

    None: the model's default is used.
    """

    profile: str | None = None
    features: Mapping[int, float] | None = None
    mode: SteeringMode | None = None
    control_vector: str | Mapping[str, float] | None = None


AS_MANY_AS_FIT = 2**31 - 1
"""The limit of an answer that only the context ends."""


class GenerationSpec(Struct, frozen=True, kw_only=True):
    """One request for text.

    Attributes:
        model: the name of a model; None: the default model.
        stops: strings that end an answer.
        limit: how many tokens an answer may have, if the request says so.
        context: how many tokens prompt and answer may have together, if the request says so. The
            model's own context is the bound anyway.
        repetition: the repetition at which an answer ends, if the request says so.
        truncate: how many of a prompt's last tokens are read; None: all; -1: as many as fit.
        choices: how many answers to each prompt.
        logprobs: how many tokens are scored beside each token of an answer; None: no scores.
        prompt_logprobs: the same for the prompt.
        returns_ids: whether the answer has the ids of the prompt and of generated tokens.
        names_ids: whether tokens in log-probabilities are named by their ids.
        timed: whether the answer says how long prompt and answer took.
        streamed: whether the answer is sent while it is written.
        user: the client's name for its user, for the log and for its turns.
        priority: of the request, if it says so; a lower number is served earlier.
        keep_alive: seconds that the model stays loaded without a user after this request; infinity:
            until others need its memory; None: as before.
        ignored: paths of what was left out of the messages.
        paths: where a field stands in the request, if its path there is not the one that chat
            completions have: {"messages": "input"}.
    """

    prompt: PromptSpec
    model: str | None = None
    sampling: SamplingWishes = SamplingWishes()
    steering: SteeringWishes = SteeringWishes()
    form: Form | None = None
    stops: Sequence[str] = ()
    limit: int | None = None
    context: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    truncate: int | None = None
    repetition: RepetitionLimit | None = None
    choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    returns_ids: bool = False
    names_ids: bool = False
    timed: bool = False
    streamed: bool = False
    user: str | None = None
    priority: int | None = None
    keep_alive: float | None = None
    ignored: Sequence[str] = ()
    paths: Mapping[str, str] = {}

    @property
    def all_choices(self) -> int:
        """The number of answers to all prompts together."""
        prompts = len(self.prompt.prompts) if isinstance(self.prompt, TextPrompts) else 1
        return self.choices * prompts

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    @property
    def without_messages(self) -> GenerationSpec:
        """The same without the messages of a chat, which may be long: an answer takes its time, and
        needs only their tokens."""
        if not isinstance(self.prompt, ChatPrompt):
            return self
        return replace(self, prompt=replace(self.prompt, messages=()))

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return isinstance(self.prompt, TextPrompts) and self.prompt.echo

    def path(self, field: str) -> str:
        """Return where in the request a field of chat completions stands, for error messages."""
        return self.paths.get(field, field)
