"""The rules by which chat templates of families refuse or lose messages, in some lines of Jinja.

Each writes what it takes as `[role] content`, calls as `call name arguments`, results as
`[tool] content`.
"""

from __future__ import annotations

from collections.abc import Mapping

_TURN = "[{{ message.role }}] {{ message.content }}\n"
_CALL = "call {{ call.function.name }} {{ call.function.arguments | tojson }}\n"
_CALLS = "{% for call in message.tool_calls or [] %}" + _CALL + "{% endfor %}"
_START = "{% if add_generation_prompt %}[assistant] {% endif %}"


def _loop(body: str, messages: str = "messages") -> str:
    return f"{{% for message in {messages} %}}{body}{{% endfor %}}{_START}"


def _refuse(condition: str, words: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{words}') }}}}{{% endif %}}"


_REST = "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"

_ALTERNATE = (
    _REST
    + "{% for message in rest %}"
    + _refuse("(message.role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate")
    + "{% endfor %}"
)

_MISTRAL = (
    _REST
    + "{% set ns = namespace(index=0) %}{% for message in rest %}"
    + "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    + _refuse("(message.role == 'user') != (ns.index % 2 == 0)", "roles must alternate")
    + "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    + _loop(
        _refuse("message.role == 'tool' and message.tool_call_id | length != 9", "id of 9")
        + "{% if message.role == 'system' %}"
        + _refuse("not loop.first", "only user, assistant and tool")
        + "{% endif %}{% for call in message.tool_calls or [] %}"
        + _refuse("call.id is not defined or call.id | length != 9", "id of 9")
        + "{% endfor %}"
        + _TURN
        + _CALLS
    )
)

FAMILY_RULES: Mapping[str, str] = {
    "chatml": _loop(_TURN + _CALLS),
    "qwen3": _loop(_refuse("message.content is none", "no content") + _TURN + _CALLS),
    "qwen3.5": (
        _refuse("not messages | selectattr('role', 'equalto', 'user') | list", "no user query")
        + _refuse(
            "reasoning_effort is defined and reasoning_effort not in ['xhigh', 'medium', 'low']",
            "unknown effort",
        )
        + "{{ reasoning_effort }}"
        + _loop(
            _refuse("message.role == 'system' and not loop.first", "system must be first")
            + _TURN
            + "{% for call in message.tool_calls or [] %}call {{ call.function.name }} "
            "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}\n"
            "{% endfor %}{% endfor %}"
        )
    ),
    "gemma2": _refuse("messages[0].role == 'system'", "no system") + _ALTERNATE + _loop(_TURN),
    "gemma3": _ALTERNATE + _loop(_TURN),
    "llama2": _ALTERNATE + _loop(_TURN),
    "llama3": _loop(
        _refuse("message.tool_calls and message.tool_calls | length != 1", "single tool-calls")
        + _TURN
        + _CALLS
    ),
    "mistral": _MISTRAL,
    "mistral small": (
        "{% for message in messages %}"
        + _refuse(
            "message.role == 'assistant' and not message.content and not message.tool_calls",
            "an answer needs content or calls",
        )
        + "{% endfor %}"
        + _MISTRAL
    ),
    "gpt-oss": _loop(
        _refuse("message.content is none", "no content")
        + _refuse("message.tool_calls and message.content and message.thinking", "not both")
        + _TURN
        + "{% if message.tool_calls %}{{ message.thinking }}{% set call = message.tool_calls[0] %}"
        + _CALL
        + "{% endif %}"
    ),
    "deepseek v3": _loop(
        "{% if message.content is not none %}"
        + _TURN
        + "{% else %}{% for call in message.tool_calls %}"
        "{{ 'call ' + call.function.name + ' ' + call.function.arguments + '\n' }}"
        "{% endfor %}{% endif %}"
    ),
    "kimi": _loop(
        _TURN + "{% for call in message.tool_calls or [] %}call {{ call.id }} "
        "{{ call.function.arguments if call.function.arguments is string else "
        "call.function.arguments | tojson }}\n{% endfor %}"
    ),
}

STRICT_RULES = (
    _refuse("not messages | selectattr('role', 'equalto', 'user') | list", "no user query")
    + _REST
    + "{% set ns = namespace(index=0) %}{% for message in rest %}"
    + _refuse("message.role == 'system'", "system must be first")
    + _refuse("message.tool_calls and message.tool_calls | length != 1", "single tool-calls")
    + "{% for call in message.tool_calls or [] %}"
    + _refuse("not call.id or call.id | length != 9", "id of 9")
    + "{% for key, value in call.function.arguments | items %}{% endfor %}{% endfor %}"
    + "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    + _refuse("(message.role == 'user') != (ns.index % 2 == 0)", "roles must alternate")
    + "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
)
"""Most of these rules in one template, which begins with them. They write nothing."""
