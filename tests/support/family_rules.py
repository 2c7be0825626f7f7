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
    "lfm2": "{# <|tool_call_start|> #}" + _loop(_TURN),
    "phi 3.5": _loop(
        "{% if message.role in ['system', 'user', 'assistant'] %}" + _TURN + "{% endif %}"
    ),
    "hermes 3": "{# <tool_call> #}"
    + _loop("{% if message.tool_calls %}" + _CALLS + "{% else %}" + _TURN + "{% endif %}"),
    "mistral nemo": "{# [TOOL_CALLS] #}"
    + _MISTRAL.replace(
        _TURN + _CALLS,
        "{% if message.tool_calls %}"
        + _CALLS
        + "{% elif message.role != 'system' %}{% if loop.last and message.role == 'user' and "
        "messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        + _TURN
        + "{% endif %}",
    ),
    "command r7b": "{# <|START_ACTION|> #}{% set ns = namespace(count=0) %}"
    + _loop(
        "{% if message.role == 'tool' %}[tool] {{ message.tool_call_id | tojson }}: "
        "{{ message.content }}\n{% elif message.tool_calls %}{% for call in message.tool_calls %}"
        'call "{{ ns.count }}": {{ call.function.name }} {{ call.function.arguments | tojson }}\n'
        "{% set ns.count = ns.count + 1 %}{% endfor %}{% else %}" + _TURN + "{% endif %}"
    ),
    "gemma4": "{# <|tool_call><tool_call|> #}"
    + _loop(
        "{% if message.role == 'tool' %}{% elif message.tool_calls %}"
        + _CALLS
        + "{% set place = loop.index %}{% set ns = namespace(on=true) %}"
        "{% for result in messages[place:] %}{% if result.role != 'tool' %}{% set ns.on = false %}"
        "{% endif %}{% if ns.on %}[tool] {{ result.content }}\n{% endif %}{% endfor %}"
        "{{ message.content }}{% else %}" + _TURN + "{% endif %}"
    ),
    "qwen3-coder": "{# <function=f><parameter=k> #}"
    + _loop(
        _TURN + "{% for call in message.tool_calls or [] %}call {{ call.function.name }}\n"
        "{% for key, value in call.function.arguments | items %}{{ key }}: "
        "{{ value | tojson if value is mapping or value is sequence and value is not string "
        "else value | string }}\n{% endfor %}{% endfor %}"
    ),
    "seed": "{# <seed:tool_call> #}"
    + _loop(
        _TURN + "{% for call in message.tool_calls or [] %}call {{ call.function.name }}\n"
        "{% for key, value in call.function.arguments | items %}{{ key }}: {{ value }}\n"
        "{% endfor %}{% endfor %}"
    ),
    "ministral": "{# [TOOL_CALLS][ARGS][THINK][/THINK] #}"
    + _ALTERNATE.replace(
        "{% for message in rest %}",
        "{% for message in rest if not message.tool_calls and message.role != 'tool' %}",
    )
    + _loop(
        "[{{ message.role }}] {% if message.content is string %}{{ message.content }}{% else %}"
        "{% for block in message.content %}{% if block.type == 'thinking' %}"
        "<{{ block.thinking }}>{% else %}{{ block.text }}{% endif %}{% endfor %}{% endif %}\n"
        + _CALLS
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
