"""The clients that can be set up: one function for each, and their table.

Each function says what the client's own documents say of a provider with an address of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from shlex import quote
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from mlxsrv.connect.address import NO_KEY, ServerAddress
from mlxsrv.connect.formats import Owned, write_yaml
from mlxsrv.connect.setup import FILE, KEY, ClientSetup, ConfigFile, Session
from mlxsrv.connect.url import KEY_VARIABLE

_PROVIDER = "mlxsrv"
_HOUR = 3_600_000
"""Milliseconds that a client may wait for an answer: a long prompt may take minutes to read."""
_IN_A_CONTAINER = (
    "In a container, 127.0.0.1 is the container: use host.docker.internal as the host, and "
    "start the server with --allowed-host host.docker.internal.",
)


def _export(name: str, value: str) -> str:
    return f"export {name}={value}"


def _codex(server: ServerAddress) -> ClientSetup:
    provider = Owned(name=_PROVIDER, base_url=server.openai, wire_api="responses")
    if server.key:
        provider["env_key"] = KEY_VARIABLE
    content = {
        "model": server.model,
        "model_provider": _PROVIDER,
        "model_context_window": server.context_length,
        "model_providers": {_PROVIDER: provider},
    }
    return ClientSetup(
        title="Codex",
        file=ConfigFile("~/.codex", "config.toml", "toml", content, variable="CODEX_HOME"),
        commands=("codex",),
        session=Session("codex", tuple(_overrides(content))),
    )


def _overrides(content: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The settings as Codex takes them on its command line: values of TOML, by dotted names."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{path}{name}.")
        elif value is not None:
            yield from ("-c", f"{path}{name}={json.dumps(value, ensure_ascii=False)}")


def _claude(server: ServerAddress) -> ClientSetup:
    tiers = ("OPUS", "SONNET", "HAIKU")
    context, output = server.context_length, server.max_output
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": None if server.key else NO_KEY,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": server.model for tier in tiers},
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "API_TIMEOUT_MS": str(_HOUR),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": None if context is None else str(context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": None if output is None else str(output),
    }
    helper = f"printenv {KEY_VARIABLE}" if server.key else None
    exported = {name: quote(value) for name, value in variables.items() if value is not None}
    exported["ANTHROPIC_AUTH_TOKEN"] = server.shell_key
    content = {"apiKeyHelper": helper, "env": variables}
    return ClientSetup(
        title="Claude Code",
        file=ConfigFile(
            "~/.claude", "settings.json", "json", content, variable="CLAUDE_CONFIG_DIR"
        ),
        commands=("claude",),
        session=Session("claude", ("--settings", FILE)),
        instead=tuple(_export(name, value) for name, value in exported.items()),
    )


def _opencode(server: ServerAddress) -> ClientSetup:
    setup = _opencodes(server, "opencode", schema="https://opencode.ai/config.json")
    return replace(setup, session=Session("opencode", variables={"OPENCODE_CONFIG": FILE}))


def _kilo(server: ServerAddress) -> ClientSetup:
    return _opencodes(server, "kilo", schema="https://app.kilo.ai/config.json", title="Kilo Code")


def _opencodes(server: ServerAddress, name: str, *, schema: str, title: str = "") -> ClientSetup:
    """A client of opencode's family."""
    model: dict[str, Any] = {"name": server.model}
    if server.context_length is not None:
        model["limit"] = {"context": server.context_length, "output": server.max_output}
    key = f"{{env:{KEY_VARIABLE}}}" if server.key else NO_KEY
    provider = Owned(
        npm="@ai-sdk/openai-compatible",
        name=_PROVIDER,
        options={"baseURL": server.openai, "apiKey": key, "timeout": _HOUR},
        models={server.model: model},
    )
    content = {
        "$schema": schema,
        "model": f"{_PROVIDER}/{server.model}",
        "small_model": f"{_PROVIDER}/{server.model}",
        "provider": {_PROVIDER: provider},
    }
    return ClientSetup(
        title=title or name,
        file=ConfigFile(
            "~/.config", f"{name}/{name}.json", "json", content, variable="XDG_CONFIG_HOME"
        ),
        commands=(name,),
    )


def _pi(server: ServerAddress) -> ClientSetup:
    model: dict[str, Any] = {"id": server.model, "reasoning": "thinking" in server.capabilities}
    if server.context_length is not None:
        model |= {"contextWindow": server.context_length, "maxTokens": server.max_output}
    provider = Owned(
        baseUrl=server.openai,
        api="openai-completions",
        apiKey=f"!printenv {KEY_VARIABLE}" if server.key else NO_KEY,
        models=[model],
    )
    content = {"providers": {_PROVIDER: provider}}
    return ClientSetup(
        title="pi",
        file=ConfigFile(
            "~/.pi/agent", "models.json", "json", content, variable="PI_CODING_AGENT_DIR"
        ),
        commands=(f"pi --provider {_PROVIDER} --model {quote(server.model)}",),
    )


def _qwen_code(server: ServerAddress) -> ClientSetup:
    key = f"${KEY_VARIABLE}" if server.key else NO_KEY
    auth = {"selectedType": "openai", "baseUrl": server.openai, "apiKey": key}
    content = {
        "security": {"auth": auth},
        "model": {
            "name": server.model,
            "generationConfig": {"contextWindowSize": server.context_length, "timeout": _HOUR},
        },
    }
    return ClientSetup(
        title="Qwen Code",
        file=ConfigFile("~/.qwen", "settings.json", "json", content),
        commands=("qwen",),
        session=Session(
            "qwen",
            ("--auth-type", "openai"),
            {
                "QWEN_CODE_SYSTEM_SETTINGS_PATH": FILE,
                # Its user's shell may have these, and they count more than any file.
                "OPENAI_BASE_URL": server.openai,
                "OPENAI_API_KEY": KEY,
                "OPENAI_MODEL": server.model,
            },
        ),
    )


def _aider(server: ServerAddress) -> ClientSetup:
    content: dict[str, Any] = {
        "model": f"openai/{server.model}",
        "openai-api-base": server.openai,
        "timeout": _HOUR // 1000,
        "show-model-warnings": False,
    }
    return ClientSetup(
        title="Aider",
        file=ConfigFile("~", ".aider.conf.yml", "yaml", content),
        variables=(_export("OPENAI_API_KEY", server.shell_key),),
        commands=("aider",),
        session=Session("aider", ("--config", FILE), {"OPENAI_API_KEY": KEY}),
    )


def _continue(server: ServerAddress) -> ClientSetup:
    model: dict[str, Any] = {
        "name": f"{_PROVIDER} {server.model}",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if server.key else NO_KEY,
        "roles": ["chat", "edit", "apply"],
    }
    if "insert" in server.capabilities:
        model["roles"].append("autocomplete")
    if "tools" in server.capabilities:
        model["capabilities"] = ["tool_use"]
    if server.context_length is not None:
        model["defaultCompletionOptions"] = {"contextLength": server.context_length}
    content = {"name": "Local", "version": "1.0.0", "schema": "v1", "models": [model]}
    notes = (f"Continue reads {KEY_VARIABLE} from ~/.continue/.env.",) if server.key else ()
    return ClientSetup(
        title="Continue",
        file=ConfigFile(
            "~/.continue", "config.yaml", "yaml", content, variable="CONTINUE_GLOBAL_DIR"
        ),
        notes=notes,
    )


def _zed(server: ServerAddress) -> ClientSetup:
    model = {
        "name": server.model,
        "max_tokens": server.context_length or 32_768,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True},
    }
    if server.max_output is not None:
        model["max_output_tokens"] = server.max_output
    provider = Owned(api_url=server.openai, available_models=[model])
    key = "holds a key of the server" if server.key else "has any value"
    return ClientSetup(
        title="Zed",
        file=ConfigFile(
            "~/.config",
            "zed/settings.json",
            "json",
            {
                "language_models": {"openai_compatible": {_PROVIDER: provider}},
                "agent": {"default_model": {"provider": _PROVIDER, "model": server.model}},
            },
            variable=None if sys.platform == "darwin" else "XDG_CONFIG_HOME",
        ),
        notes=(f"Zed wants a key: start it where {KEY_VARIABLE} {key}, or enter one in Zed.",),
    )


def _copilot(server: ServerAddress) -> ClientSetup:
    context = server.context_length or 32_768
    output = server.max_output or 8_192
    model = {
        "id": server.model,
        "name": server.model,
        "url": f"{server.openai}/chat/completions",
        "toolCalling": True,
        "vision": False,
        "maxInputTokens": context - output,
        "maxOutputTokens": output,
    }
    entry = {"name": _PROVIDER, "vendor": "customendpoint", "apiType": "chat-completions"}
    key = "a key of the server" if server.key else "any text"
    return ClientSetup(
        title="Copilot Chat in VS Code",
        paste=json.dumps([{**entry, "models": [model]}], indent=2, ensure_ascii=False),
        notes=(
            "In VS Code, run 'Chat: Open Language Models (JSON)' and put these lines there.",
            f"VS Code then asks for the key: enter {key}.",
        ),
    )


def _cline(server: ServerAddress) -> ClientSetup:
    model, url = quote(server.model), quote(server.openai)
    return ClientSetup(
        title="Cline",
        commands=(f"cline auth -p openai -k {server.shell_key} -m {model} -b {url}", "cline"),
        notes=("In VS Code: the provider 'OpenAI Compatible', with this base URL and model.",),
    )


def _open_webui(server: ServerAddress) -> ClientSetup:
    return ClientSetup(
        title="Open WebUI",
        variables=(
            _export("OPENAI_API_BASE_URL", quote(server.openai)),
            _export("OPENAI_API_KEY", server.shell_key),
        ),
        commands=("open-webui serve",),
        notes=(
            "Open WebUI reads these variables at its first start; later, its admin settings count.",
            *_IN_A_CONTAINER,
        ),
    )


def _librechat(server: ServerAddress) -> ClientSetup:
    endpoint: dict[str, Any] = {
        "name": _PROVIDER,
        "apiKey": f"${{{KEY_VARIABLE}}}" if server.key else NO_KEY,
        "baseURL": server.openai,
        "models": {"default": [server.model], "fetch": True},
        "titleConvo": True,
        "titleModel": "current_model",
        "modelDisplayLabel": _PROVIDER,
    }
    if server.context_length is not None:
        costs = {"prompt": 0, "completion": 0, "context": server.context_length}
        endpoint["tokenConfig"] = {server.model: costs}
    return ClientSetup(
        title="LibreChat",
        paste=write_yaml({"version": "1.2.8", "endpoints": {"custom": [endpoint]}}),
        notes=(
            "Put these lines into librechat.yaml in LibreChat's folder, and start LibreChat again.",
            *((f"It reads {KEY_VARIABLE} from the file .env beside it.",) if server.key else ()),
            *_IN_A_CONTAINER,
        ),
    )


def _llm(server: ServerAddress) -> ClientSetup:
    model: dict[str, Any] = {
        "model_id": _PROVIDER,
        "model_name": server.model,
        "api_base": server.openai,
        "supports_schema": True,
        "supports_tools": "tools" in server.capabilities,
    }
    commands = [f"llm -m {_PROVIDER} 'What is a prompt cache?'"]
    if server.key:
        model["api_key_name"] = _PROVIDER
        commands.insert(0, f"llm keys set {_PROVIDER} --value {server.shell_key}")
    return ClientSetup(
        title="llm",
        paste=write_yaml([model]),
        commands=tuple(commands),
        notes=(
            'Put these lines into "$(dirname "$(llm logs path)")/extra-openai-models.yaml", a list '
            "of models.",
        ),
    )


def _openai(server: ServerAddress) -> ClientSetup:
    return ClientSetup(
        title="Any client of OpenAI's API",
        variables=(
            _export("OPENAI_BASE_URL", quote(server.openai)),
            _export("OPENAI_API_KEY", server.shell_key),
            _export("OPENAI_MODEL", quote(server.model)),
        ),
    )


CLIENTS: Final[Mapping[str, Callable[[ServerAddress], ClientSetup]]] = MappingProxyType(
    {
        "codex": _codex,
        "claude": _claude,
        "opencode": _opencode,
        "kilo": _kilo,
        "pi": _pi,
        "qwen-code": _qwen_code,
        "aider": _aider,
        "continue": _continue,
        "zed": _zed,
        "copilot": _copilot,
        "cline": _cline,
        "open-webui": _open_webui,
        "librechat": _librechat,
        "llm": _llm,
        "openai": _openai,
    }
)
