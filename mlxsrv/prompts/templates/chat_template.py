"""A chat template: messages to one text, by the model's own template or by one of a client's.

Both run in the Jinja sandbox of transformers. A client's runs in a process of its own as well,
since nobody has looked at its loops.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.prompts.sandbox import TooMuch, run_apart
from mlxsrv.prompts.templates.histories import Histories
from mlxsrv.prompts.templates.messages import Chat, Messages, PlainMessage
from mlxsrv.prompts.templates.switches import Switches
from mlxsrv.text.formats import Formats

# End-of-turn tokens by family. Published models often forget to list theirs. So in chats, the
# marker that the template writes at the end of a turn also counts as an end token.
_TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen and many others
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's answer
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",  # Gemma
)

# Names that rendering sets itself where a signature does not say so, in transformers and Jinja.
_RENDERED = frozenset({"self", "conversations", "messages"})

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "mlxsrv_tool",
            "description": "mlxsrv",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
_QUESTION: Messages = [{"role": "user", "content": "?"}]

_TAGS = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERALS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"(?<![\w.])tools\b")

_SCRIPT = Path(__file__).with_name("template_process.py")


class _Rendered(msgspec.Struct, frozen=True):
    """The answer of `template_process.py`: a text, or the reason why there is none."""

    text: str = ""
    reason: str = ""


def template_texts(wrapper: Any) -> Sequence[str]:
    """Return the texts of a tokenizer's templates, first that for chats with tools; none if they
    are code.

    Args:
        wrapper: mlx-lm's tokenizer.
    """
    template = wrapper.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    texts = (named.get(name) for name in ("tool_use", "default"))
    return [text for text in texts if isinstance(text, str)]


def names_tools(template: str) -> bool:
    """Whether a template in Jinja uses the variable `tools`. The word may also stand in its text,
    or be a part of another variable's name."""
    code = (_LITERALS.sub("", tag[0]) for tag in _TAGS.finditer(template))
    return any(_TOOLS_VARIABLE.search(each) for each in code)


class ChatTemplate:
    """The chat template of one model, if it has any.

    Args:
        wrapper: mlx-lm's tokenizer.
        formats: those of the model.

    Attributes:
        switches: what it can be told about thinking.
    """

    def __init__(self, wrapper: Any, formats: Formats) -> None:
        self._wrapper = wrapper
        self._texts = template_texts(wrapper)
        self._histories = Histories(self._write, formats)
        self._histories_with_tools = Histories(partial(self._write, tools=_TOOLS), formats)
        self.switches = Switches(self._write)
        self._reserved = _RENDERED.union(inspect.signature(self._apply).parameters)

    @property
    def exists(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def is_text(self) -> bool:
        """Whether it is in Jinja, not code in Python."""
        return bool(self._texts) and self._wrapper._chat_template is None

    @property
    def source(self) -> str | None:
        """The template's text; None if there is none, if there are several, or it is code."""
        template = self._wrapper.chat_template
        return template if isinstance(template, str) else None

    @property
    def takes_tools(self) -> bool:
        """Whether it may write tools. Code takes what every other template takes."""
        return any(map(names_tools, self._texts)) or (self.exists and not self.is_text)

    def reserved(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are parameters of rendering, not variables of a template.

        A client that could set them could replace the template.
        """
        return [name for name in names if name in self._reserved]

    def render(self, chat: Chat) -> str:
        """Render a chat. Where its messages are refused, they are changed until the template takes
        them, if it ever does.

        Raises:
            UnsupportedParameter: there is no template.
            InvalidRequest: the template refuses these messages, or a client's template fails.
            Overloaded: the system ended the process of a client's template.
        """
        if chat.template is not None:
            return self._render_clients(chat, chat.template)
        if not self.exists:
            raise UnsupportedParameter(
                "this model has no chat template; use /v1/completions", param=chat.path
            )
        try:
            text = self._apply(
                list(chat.messages),
                tokenize=False,
                add_generation_prompt=chat.answers and not chat.continue_final,
                continue_final_message=chat.continue_final,
                tools=None if chat.tools is None else list(chat.tools),
                **chat.variables,
            )
        except Exception as error:  # a template may raise anything
            histories = self._adapting(tools=bool(chat.tools))
            forced = histories.force(list(chat.messages), partial(self.render_other, chat))
            if forced is not None:
                return self.render(msgspec.structs.replace(chat, messages=forced))
            raise InvalidRequest(
                f"{chat.path}: the model's chat template refused them: {error}", param=chat.path
            ) from None
        # A template may spell a character as two halves of a surrogate pair.
        return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _render_clients(self, chat: Chat, template: str) -> str:
        """Render a chat by a client's template, in the sandbox."""
        tokens = self._wrapper._tokenizer.special_tokens_map
        request = {
            **{name: str(token) for name, token in tokens.items()},
            **chat.variables,
            "conversations": [
                # As transformers does it: many templates write None for a key without a value.
                [
                    {key: value for key, value in message.items() if value is not None}
                    for message in chat.messages
                ]
            ],
            "tools": chat.tools,
            "chat_template": template,
            "add_generation_prompt": chat.answers and not chat.continue_final,
            "continue_final_message": chat.continue_final,
        }
        crash = "too much for Jinja: its blocks may be nested too deeply"
        try:
            rendered = run_apart(
                _SCRIPT, request, type=_Rendered, library="transformers", crash=crash
            )
            reason = rendered.reason
        except TooMuch as error:
            reason = str(error)
        if reason:
            path = chat.template_path
            raise InvalidRequest(f"{path}: it cannot be rendered: {reason}", param=path)
        return rendered.text

    def render_other(self, chat: Chat, messages: Sequence[PlainMessage]) -> str | None:
        """Render other messages in place of the chat's; None if the template refuses them."""
        tools = None if chat.tools is None else list(chat.tools)
        return self._write(messages, **{**chat.variables, "tools": tools})

    def adapt(self, messages: Messages, *, tools: bool = False) -> Messages:
        """Return messages as the template takes them, beside `tools` or without any."""
        return self._adapting(tools=tools).adapt(messages)

    def _adapting(self, *, tools: bool) -> Histories:
        """There may be another template for chats with tools, or one that takes nothing else."""
        return self._histories_with_tools if tools and self.takes_tools else self._histories

    def _write(self, messages: Sequence[PlainMessage], /, **variables: Any) -> str | None:
        """Write messages and the beginning of an answer; None if the template refuses them."""
        try:
            variables["add_generation_prompt"] = True
            return str(self._apply(list(messages), tokenize=False, **variables))
        except Exception:  # a template may raise anything
            return None

    def write_question(self, *, thinking: bool) -> str | None:
        """Return a question as the template writes it; None if it refuses it.

        Args:
            thinking: whether the model shall think about it.
        """
        return self._write(_QUESTION, enable_thinking=thinking, thinking=thinking)

    def turn_ends(self) -> set[int]:
        """Return the end-of-turn token that the template writes behind an assistant's message."""
        if not self.exists:
            return set()
        answer = "mlxsrv"
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        try:
            text = self._apply(chat, tokenize=False)
        except Exception:  # a template that wants more than a user's question
            return set()
        rest = text.rpartition(answer)[2].lstrip()
        vocabulary = self._wrapper.get_vocab()
        return {vocabulary[end] for end in _TURN_ENDS if end in vocabulary and rest.startswith(end)}

    @property
    def _apply(self) -> Any:
        # mlx-lm's wrapper turns thinking on wherever the vocabulary has a think token. A request
        # that says nothing should get the default of the template's author. Only models whose
        # template is code of mlx-lm's must go through the wrapper.
        if self._wrapper._chat_template is not None:
            return self._wrapper.apply_chat_template
        return self._wrapper._tokenizer.apply_chat_template
