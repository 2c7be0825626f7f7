"""`mlxsrv chat`: talk with a model in the terminal, or answer one question from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from mlxsrv.arguments import Arguments, command_arguments, did_you_mean
from mlxsrv.configuration import settings_from
from mlxsrv.options import SettingsError
from mlxsrv.terminal.client import RequestFailed
from mlxsrv.terminal.conversation import Conversation
from mlxsrv.terminal.screen import dim, shown
from mlxsrv.terminal.starting import running_server

_PROMPT = ">>> "
_MORE = "... "
_QUOTES = '"""'
_PIPE = 'a question comes through a pipe: echo "..." | mlxsrv chat'


def chat(arguments: Sequence[str]) -> None:
    """Chat until the user ends it; from a pipe, answer what comes from it."""
    flags = chat_arguments().read(arguments)
    words, url, system = (flags.pop(name) for name in ("asked", "url", "system"))
    if len(words) > 1:
        raise SettingsError(f"{words[1]!r} is one argument too many; {_PIPE}")
    question = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if question == "":
        raise SettingsError("nothing to answer: write something into the pipe")
    asked, settings = words[0] if words else None, settings_from(flags)
    with contextlib.ExitStack() as stack:
        try:
            client, name = stack.enter_context(
                running_server(settings, flags, url=url, model=asked)
            )
            conversation = Conversation(client, "", system)
            described = conversation.choose(name)
        except (SettingsError, RequestFailed) as error:
            raise _with_remedy(error, asked) from None
        if question is None:
            ChatTerminal(conversation).run(f"{described} at {client.url}")
            return
        with _answer_line() as write:
            note = conversation.ask(question, lambda _, text: write(shown(text)))
        if note:
            print(f"mlxsrv: {note}", file=sys.stderr)


def _with_remedy(
    error: SettingsError | RequestFailed, asked: str | None
) -> SettingsError | RequestFailed:
    """The error, with what to do if the argument is no model of the server, or none at all."""
    if asked is None:
        return error
    if isinstance(error, RequestFailed):
        if error.param != "model":
            return error
        if os.path.isdir(asked):
            remedy = f"a server for this folder: mlxsrv chat {asked} --port 0"
            return RequestFailed(f"{error}; {remedy}")
    if "/" in asked or str(error).endswith("?"):
        return error
    return SettingsError(f"{error}; {_PIPE}")


def chat_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "chat",
        "Chat with a model. Uses the server that runs at the address of the options, else starts "
        "one and stops it at the end. From a pipe it answers once: echo hi | mlxsrv chat.",
        operands="[MODEL]",
    )
    # "*": a question here gets an error that says where it belongs.
    parser.add_argument("asked", metavar="MODEL", nargs="*", help="Model; else the default one.")
    parser.add_argument("--url", help="Address of the server, if not http://HOST:PORT.")
    parser.add_argument("--system", metavar="TEXT", default="", help="System prompt.")
    return parser


class ChatTerminal:
    """Questions of the user and answers of the model, in turn."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._open = True
        self._warned = False

    def run(self, described: str) -> None:
        """Read lines until the user ends it: /exit, Ctrl-D, or Ctrl-C twice."""
        print(described)
        print(dim("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat."))
        _complete(_COMMANDS)
        while self._open:
            try:
                if text := _read().strip():
                    self._warned = False
                    self._obey(text)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if self._warned:
                    return
                self._warned = True
                print(dim("Press Ctrl-C again, or Ctrl-D, to end the chat."))

    def _obey(self, text: str) -> None:
        try:
            if text.startswith("/") or text in _ALIASES:
                self._command(text)
            else:
                self._answer(text)
        except RequestFailed as error:
            print(f"mlxsrv: {error.message}", file=sys.stderr)

    def _answer(self, text: str) -> None:
        """Show the answer, thoughts in grey; Ctrl-C stops it, and not the chat."""
        thinks = False

        def show(thought: str, piece: str) -> None:
            nonlocal thinks
            if thinks and piece:
                write("\n\n")
            thinks = bool(thought)
            write(dim(shown(thought)) + shown(piece))

        note = "stopped"
        with _answer_line() as write, contextlib.suppress(KeyboardInterrupt):
            note = self._conversation.ask(text, show)
        if note:
            print(dim(f"[{note}]"))

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = _COMMANDS.get(_ALIASES.get(name, name))
        if command is None:
            near = did_you_mean(name, _COMMANDS) or "; /help lists the commands"
            print(f"There is no command {name}{near}")
            return
        command[1](self, rest.strip())

    def _model(self, name: str) -> None:
        if name:
            print(self._conversation.choose(name))
            return
        for each, state in self._conversation.others():
            print(("* " if each == self._conversation.model else "  ") + f"{each} ({state})")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "none" else text
        print(f"System prompt: {self._conversation.system or 'none'}")

    def _set(self, text: str) -> None:
        parameters = self._conversation.parameters
        name, *value = re.split(r"\s*=\s*|\s+", text, maxsplit=1)
        if any(value):
            self._conversation.set(name, _value(value[0]))
        elif name:
            parameters.pop(name, None)
        print(
            "\n".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items())
            or "Nothing is set: the model's own defaults count."
        )

    def _image(self, _: str) -> None:
        print(f"{self._conversation.model} reads text only: no model of this server sees images.")

    def _clear(self, _: str) -> None:
        self._conversation.drop_turns()
        print("The conversation begins anew.")

    def _help(self, _: str) -> None:
        for name, (text, _command) in _COMMANDS.items():
            print(f"{name:<8} {text}")
        print(f"{_QUOTES:<8} Begin and end a message of several lines with it.")

    def _exit(self, _: str) -> None:
        self._open = False


_COMMANDS: Final[Mapping[str, tuple[str, Callable[[ChatTerminal, str], None]]]] = MappingProxyType(
    {
        "/model": ("List the models; with a name: use that one.", ChatTerminal._model),
        "/system": (
            "Show the system prompt; with a text: set it; none: have none.",
            ChatTerminal._system,
        ),
        "/set": (
            "Show what is set; with a name and a value: set it, as in /set temperature 0.2; with "
            "a name alone: leave it to the model.",
            ChatTerminal._set,
        ),
        "/image": ("Not here: the models read text only.", ChatTerminal._image),
        "/clear": ("Forget the conversation.", ChatTerminal._clear),
        "/help": ("List the commands.", ChatTerminal._help),
        "/exit": ("End the chat, as /bye, /quit, exit and quit do.", ChatTerminal._exit),
    }
)

_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"/?": "/help"} | dict.fromkeys(("/bye", "/quit", "exit", "quit"), "/exit")
)
"""Words of other chats and of shells, with the commands that they mean."""


@contextlib.contextmanager
def _answer_line() -> Iterator[Callable[[str], None]]:
    """Write the pieces of an answer; its last line ends, whatever ends the answer."""
    begun = False

    def write(text: str) -> None:
        nonlocal begun
        begun = True
        print(text, end="", flush=True)

    try:
        yield write
    finally:
        if begun:
            print(flush=True)


def _read() -> str:
    """Read a message: a line, or several between triple quotes. Raises EOFError."""
    text = input(_PROMPT)
    if not text.startswith(_QUOTES):
        return text
    text = text.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input(_MORE)
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _value(text: str) -> object:
    """A value of JSON, else the text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _complete(names: Mapping[str, object]) -> None:
    """Have Tab complete these names, where Python has a line editor."""
    try:
        import readline
    except ImportError:
        return

    def complete(text: str, state: int) -> str | None:
        found = [name for name in names if name.startswith(text)] if text else []
        return found[state] + " " if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    emulated = "libedit" in (readline.__doc__ or "")  # as macOS has it
    readline.parse_and_bind("bind ^I rl_complete" if emulated else "tab: complete")
