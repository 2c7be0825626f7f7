"""Coding agents as npm ships them, each in a home of its own, against a scripted model.

The model reads a file through the agent's own tool, changes it by what the file said, and answers.
The agents are set up by `mlxsrv connect`. These tests run in the server's environment, which has
what a model is made with; `make test-clients` installs the agents.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxsrv.text.call_formats.calls import WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from tests.support.scripted import AFTER_TOOL
from tests.support.serving import Line, Server, environment, serving
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.turns import write_turns

AGENTS = Path(__file__).with_name("agents") / "node_modules" / ".bin"

LIMIT = 100.0
"""Seconds that an agent may take, on a machine that may be busy."""

KEY = "sesame"

CONTEXT = 400_000
"""Tokens, of one byte each: agents send up to 100,000 bytes."""

ASKED = "Make the colour in colour.txt green."
ANSWER = "The colour was blue and is green now."
UNREAD = "I could not read the file."
UNCHANGED = "I could not change the file."

Call = tuple[str, dict[str, Any]]


class Agent(msgspec.Struct, frozen=True):
    """The command that runs an agent, and the calls of its tools that do the work.

    Attributes:
        client: its name for `mlxsrv connect`.
        command: its program with arguments, without the prompt.
        route: where it sends its requests.
        read, change: the calls, made for the file at this path.
        proxied: it asks no proxy for the server, if NO_PROXY says so.
    """

    client: str
    command: tuple[str, ...]
    route: str
    read: Callable[[Path], Call]
    change: Callable[[Path], Call]
    proxied: bool = True


CODEX = Agent(
    "codex",
    # The sandbox needs rights that a container may not have, and the folder is the test's own.
    ("codex", "exec", "--skip-git-repo-check", "--strict-config", "-s", "danger-full-access"),
    "/v1/responses",
    read=lambda file: ("exec_command", {"cmd": f"cat {file}"}),
    change=lambda file: ("exec_command", {"cmd": f"sed -i.old s/blue/green/ {file}"}),
)

OPENCODE = Agent(
    "opencode",
    ("opencode", "run"),
    "/v1/chat/completions",
    read=lambda file: ("read", {"filePath": str(file)}),
    change=lambda file: (
        "edit",
        {"filePath": str(file), "oldString": "blue", "newString": "green"},
    ),
)


CLAUDE = Agent(
    "claude",
    ("claude", "--allowedTools", "Read,Edit", "-p"),
    "/v1/messages",
    read=lambda file: ("Read", {"file_path": str(file)}),
    change=lambda file: (
        "Edit",
        {"file_path": str(file), "old_string": "blue", "new_string": "green"},
    ),
)


CONTINUE = Agent(
    "continue",
    ("cn", "--auto", "--verbose", "-p"),
    "/v1/chat/completions",
    read=lambda file: ("Read", {"filepath": str(file)}),
    change=lambda file: (
        "Edit",
        {"file_path": str(file), "old_string": "blue", "new_string": "green"},
    ),
)

QWEN_CODE = Agent(
    "qwen-code",
    ("qwen", "--yolo", "-p"),
    "/v1/chat/completions",
    read=lambda file: ("read_file", {"file_path": str(file)}),
    change=lambda file: (
        "edit",
        {"file_path": str(file), "old_string": "blue", "new_string": "green"},
    ),
    proxied=False,
)


class Run(msgspec.Struct, frozen=True):
    """The outcome of an agent's run.

    Attributes:
        output: what it printed.
        file: the file afterwards.
        requests: to its route, as the server logged them.
        read: tokens of prompts that were read, and not found in the prompt cache.
        prompts: tokens of each prompt.
    """

    output: str
    file: str
    requests: list[Line]
    read: float
    prompts: list[int]


class Format(msgspec.Struct, frozen=True):
    """The way in which a model writes.

    Attributes:
        name: of its calls.
        thoughts: the name of its format of thoughts.
        said: text around an answer that calls no tool.
    """

    name: str = "hermes"
    thoughts: str = "none"
    said: tuple[str, str] = ("", "")

    def call(self, call: Call) -> str:
        name, arguments = call
        return CALLS[self.name].spell([WrittenCall(name, arguments)])

    def answer(self, text: str) -> str:
        return text.join(self.said)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*CALLS[self.name].marks, *THOUGHTS[self.thoughts].marks)


def scripts(agent: Agent, file: Path, format: Format) -> dict[str, str]:
    """Each turn depends on what the one before has brought."""
    results = "(messages | selectattr('role', 'equalto', 'tool') | list | length)"
    return {
        "not tools": format.answer("A title"),
        f"{AFTER_TOOL} and {results} == 1 and 'blue' not in messages[-1].content": format.answer(
            UNREAD
        ),
        f"{AFTER_TOOL} and {results} == 1": format.call(agent.change(file)),
        f"{AFTER_TOOL} and 'rror' in messages[-1].content": format.answer(UNCHANGED),
        AFTER_TOOL: format.answer(ANSWER),
        "true": format.call(agent.read(file)),
    }


def run_in_group(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run a command without a terminal and return what it printed; end all that it has started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {LIMIT:g} s:\n{output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def metric(server: Server, name: str) -> float:
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        text = client.get("/metrics").text
    return sum(
        float(value) for value in re.findall(rf"^mlxsrv:{name}_total{{.*}} (.*)$", text, re.M)
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[Agent, Format], Run]]:
    """Runs an agent that knows nothing but its own home, the file, and the server."""
    if shutil.which("node") is None or not (AGENTS / "codex").exists():
        pytest.skip("the agents are not installed: `make test-clients` does it where npm is there")
    for name in ("home", "scratch", "server"):
        (tmp_path / name).mkdir()
    file = tmp_path / "scratch" / "colour.txt"
    file.write_text("The colour is blue.\n")
    variables = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{AGENTS}:{os.environ['PATH']}",
        "MLXSRV_API_KEY": KEY,
    }
    # Nothing listens there: what an agent asks of other servers fails at once.
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    servers: list[Any] = []

    def run(agent: Agent, format: Format, session: bool = False) -> Run:
        folder = tmp_path / "server"
        model = write_turns(
            folder / "model",
            scripts(agent, file, format),
            template=CHAT_TEMPLATE,
            markers=format.markers,
            context=CONTEXT,
        )
        options = ("--model", f"scripted={model}", "--api-key", KEY, "--trust-remote-code")
        formats = ("--tool-format", format.name, "--thinking-format", format.thoughts)
        servers.append(serving(folder, *options, *formats, "--metrics"))
        server: Server = servers[-1].__enter__()
        ours = [sys.executable, "-m", "mlxsrv", "run" if session else "connect", agent.client]
        command = [str(AGENTS / agent.command[0]), *agent.command[1:], ASKED]
        if session:
            command = [*ours, "--url", server.url, "--", *command[1:]]
        else:
            subprocess.run(
                [*ours, *options, "--url", server.url, "--write", "--yes"],
                env={**environment(), **variables},
                check=True,
                timeout=60,
            )
        proxied = {**proxies, "NO_PROXY": "127.0.0.1"} if agent.proxied else {}
        output = run_in_group(command, file.parent, variables | proxied)
        return Run(
            output,
            file.read_text(),
            server.log("request", path=agent.route),
            metric(server, "prefix_cache_queries") - metric(server, "prefix_cache_hits"),
            [line["prompt_tokens"] for line in server.log("stream end")],
        )

    try:
        yield run
    finally:
        for server in servers:
            server.__exit__(None, None, None)


JSON = Format()
HARMONY = Format("harmony", "harmony", ("<|channel|>final<|message|>", ""))


@pytest.mark.parametrize(
    ("agent", "format"),
    [
        *((agent, JSON) for agent in (CODEX, OPENCODE, CLAUDE, CONTINUE, QWEN_CODE)),
        (CODEX, Format("qwen_xml")),
        (OPENCODE, Format("glm")),
        (CLAUDE, HARMONY),
        (QWEN_CODE, Format("gemma4", "gemma4")),
        (OPENCODE, Format("mistral_args")),
        (CODEX, HARMONY),
    ],
    ids=lambda each: getattr(each, "client", getattr(each, "name", None)),
)
def test_an_agent_reads_a_file_changes_it_and_answers(
    agent: Agent, format: Format, run: Callable[[Agent, Format], Run]
) -> None:
    done = run(agent, format)
    assert done.file == "The colour is green.\n", done.output
    assert ANSWER in done.output
    assert len(done.requests) >= 3
    assert {request["status"] for request in done.requests} == {200}
    # Later turns have all of the earlier ones before them, and only what is new is read.
    assert done.read < 1.3 * max(done.prompts)


@pytest.mark.parametrize(
    "agent", [CODEX, OPENCODE, CLAUDE, QWEN_CODE], ids=lambda agent: agent.client
)
def test_an_agent_works_with_settings_for_one_session(
    agent: Agent, run: Callable[..., Run]
) -> None:
    """`mlxsrv run` starts it; nothing is written for it."""
    done = run(agent, JSON, session=True)
    assert done.file == "The colour is green.\n", done.output
    assert ANSWER in done.output
    assert {request["status"] for request in done.requests} == {200}
