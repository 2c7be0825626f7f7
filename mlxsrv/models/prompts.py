"""From a request's messages or prompt to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from mlxsrv.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from mlxsrv.wire.openai import ChatRequest, Message, ToolCall

if TYPE_CHECKING:
    from mlxsrv.engine.tokenizer import Prompt, Tokenizer

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
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
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


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates take the arguments as an object, where the wire has a string of JSON."""
    path = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not a JSON object: {error}", param=path) from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def render_chat(
    request: ChatRequest, messages: Sequence[PlainMessage], tokenizer: Tokenizer
) -> Prompt:
    """The chat as the model's template writes it."""
    variables = dict(request.chat_template_kwargs or {})
    for name in tokenizer.reserved(variables):
        path = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{path}: not a variable of a chat template", param=path)
    if request.reasoning_effort is not None and tokenizer.knows("reasoning_effort"):
        variables["reasoning_effort"] = request.reasoning_effort
    return tokenizer.render(
        messages,
        variables=variables,
        continue_final=bool(request.continue_final_message),
    )


def single_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """The one prompt that `prompt` holds in any of OpenAI's four forms."""
    if isinstance(prompt, str):
        return prompt
    if prompt and all(isinstance(item, int) for item in prompt):
        return cast(list[int], prompt)
    if len(prompt) != 1:
        raise UnsupportedParameter(
            "prompt: this server completes one prompt a request", param="prompt"
        )
    return cast(str | list[int], prompt[0])


def encode_prompt(prompt: str | list[int], tokenizer: Tokenizer) -> Prompt:
    """The prompt of a text completion, its ids checked: MLX reads past the end of a table."""
    if isinstance(prompt, str):
        return _not_empty(tokenizer.encode(prompt))
    for i, token in enumerate(prompt):
        if token >= tokenizer.vocabulary:
            path = f"prompt[{i}]"
            raise InvalidRequest(
                f"{path}: {token} is no token id of this model; it has {tokenizer.vocabulary}",
                param=path,
            )
    return _not_empty(tokenizer.given(prompt))


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt.tokens:
        raise InvalidRequest("prompt: must hold at least one token", param="prompt")
    return prompt
