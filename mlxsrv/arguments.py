"""The arguments of the command line: parsers whose errors are one line, and whose help is short.

`--help` shows the options that people need. `--help-all` shows the server's others as well.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NoReturn

from mlxsrv.options import ENV_PREFIX, Option, SettingsError
from mlxsrv.settings import options
from mlxsrv.version import __version__

_NEAR = 0.75
"""The likeness of a misspelt name to the one that is proposed: one letter of four may be wrong."""

SERVES = "Serve MLX language models over OpenAI's, Anthropic's and Ollama's APIs."


class Arguments(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        command: its name; "" for the server.
        does: the first lines of its help.
        operands: the arguments in its usage that are no options.
        notes: the last lines of its help.
    """

    def __init__(
        self, command: str, does: str, *, operands: str = "", notes: str | None = None
    ) -> None:
        prog = f"mlxsrv {command}".rstrip()
        super().__init__(
            prog=prog,
            usage=" ".join(filter(None, (prog, operands, "[OPTIONS]"))),
            add_help=False,
            description=_wrap(does),
            epilog=notes and _wrap(notes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._rare: dict[argparse.Action, str] = {}
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        if command:
            self._add_help(self._optionals)

    def _add_help(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("-h", "--help", action="help", help="Show this help.")

    def read(self, arguments: Sequence[str] | None) -> dict[str, Any]:
        """Return the values by name. Raises SettingsError, in one line."""
        values, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            first = next((each for each in unknown if each.startswith("-")), None)
            if first is None:
                raise SettingsError(f"{unknown[0]!r} is one argument too many")
            flag = first.partition("=")[0]
            known = self._option_string_actions
            whole = "--help-all" if "--help-all" in known else "--help"
            if short := known.get(flag.swapcase()):
                flags = ", ".join(short.option_strings)
                raise SettingsError(f"there is no option {flag}; did you mean {flags}?")
            near = did_you_mean(flag, known) or f"; see: {self.prog} {whole}"
            raise SettingsError(f"there is no option {flag}{near}")
        return vars(values)

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError, in words of our own where argparse has its own."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            first = missing.partition(",")[0]
            values = next((each.choices for each in self._actions if each.metavar == first), None)
            listed = f" (one of: {', '.join(values)})" if values else ""
            raise SettingsError(f"{missing} is missing{listed}; see: {self.prog} --help")
        place, _, what = message.removeprefix("argument ").partition(": ")
        flag = place.partition("/")[0]
        if what == "expected one argument":
            value = self._option_string_actions[flag].metavar
            raise SettingsError(f"{flag} needs a value: {flag} {value}")
        unwanted = what.removeprefix("ignored explicit argument ")
        if unwanted != what:
            raise SettingsError(f"{flag} takes no value, and has {unwanted}")
        raise SettingsError(message.removeprefix("argument "))

    def flags(self, *, rare: bool = True) -> dict[str, Sequence[str] | None]:
        """The long flags, each with the values that are known of it; None: it takes no value.

        Args:
            rare: with those that only `--help-all` shows.
        """
        known = {option.flag: option.choices for option in options()}
        return {
            flag: None if action.nargs == 0 else known.get(flag, ())
            for action in self._actions
            if rare or action not in self._rare
            for flag in action.option_strings
            if flag.startswith("--")
        }

    def words(self) -> Sequence[str]:
        """The values of its first argument that is no option, where they are known."""
        first = next((each for each in self._actions if not each.option_strings), None)
        return [] if first is None or first.choices is None else [*first.choices]

    def add_server_options(self, *, shown: bool) -> None:
        """Add the options of the server, in their groups.

        Args:
            shown: `--help` shows the common ones; else `--help-all` alone shows any.
        """
        for title, members in groupby(options(), key=lambda option: option.group):
            group = self.add_argument_group(title)
            for option in members:
                self._add(group, option, shown=shown and option.common)
        other = self.add_argument_group("Other" if shown else "Options of the server")
        if shown:
            self._add_help(other)
        other.add_argument(
            "--help-all", action=_HelpAll, nargs=0, help="Show the help with all options."
        )
        if shown:
            version = f"mlxsrv {__version__}"
            told = "Show the version."
            other.add_argument("-V", "--version", action="version", version=version, help=told)
        other.add_argument("--config", metavar="FILE.toml", help="Read options from a TOML file.")
        self._hide(
            other.add_argument("--enable-auto-tool-choice", action="store_true"),
            "Changes nothing: vLLM needs it to call tools.",
        )

    def _add(self, group: argparse._ArgumentGroup, option: Option, *, shown: bool) -> None:
        default = f" (default: {option.shown_default})" if option.shown_default else ""
        # argparse expands % in help texts.
        text = f"{option.help}{default}".replace("%", "%%")
        if option.switch:
            action = group.add_argument(
                option.flag,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=text,
            )
        else:
            action = group.add_argument(
                option.flag,
                *option.also,
                dest=option.name,
                action="append" if option.repeatable else "store",
                metavar=option.metavar,
                help=text,
            )
        if not shown:
            self._hide(action, text)

    def _hide(self, action: argparse.Action, text: str) -> None:
        self._rare[action] = text
        action.help = argparse.SUPPRESS

    def show_all(self) -> NoReturn:
        """Print the help with all options, and exit."""
        for action, text in self._rare.items():
            action.help = text
        self.print_help()
        self.exit()


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Arguments)
        parser.show_all()


def server_arguments(commands: Mapping[str, str] = MappingProxyType({})) -> Arguments:
    """Make the parser of the server.

    Args:
        commands: names of the commands, each with a line that says what it does.
    """
    parser = Arguments(
        "",
        f"{SERVES} Without a model, the built-in demo answers.",
        operands="[COMMAND] [MODEL]",
        notes=f"Each option is also a variable ({ENV_PREFIX}PORT=9000) and a key of the TOML file "
        "that --config names. A flag overrides a variable, and a variable overrides the file. "
        f"{ENV_PREFIX}PATCHES=off leaves MLX, mlx-lm and transformers unpatched.",
    )
    width = max(map(len, commands), default=0)
    lines = [f"{name:<{width}}  {does}" for name, does in commands.items()]
    parser.add_argument_group("Commands", "\n".join(lines) or None)
    add_model(parser, commands)
    parser.add_server_options(shown=True)
    return parser


def add_model(parser: Arguments, commands: Collection[str] = ()) -> None:
    """Let the default model be given without a flag.

    Args:
        commands: names that are refused: a command must be the first argument.
    """

    def read(text: str) -> str:
        if text in commands:
            raise argparse.ArgumentTypeError(f"{text!r} is a command: mlxsrv {text} [OPTIONS]")
        return text

    parser.add_argument(
        "first_model",
        metavar="MODEL",
        nargs="?",
        type=read,
        help="The default model, as --model names one.",
    )


def command_arguments(command: str, does: str, *, operands: str = "") -> Arguments:
    """Make the parser of a command that takes the server's options beside its own."""
    parser = Arguments(command, does, operands=operands)
    parser.add_server_options(shown=False)
    return parser


def whole_number(text: str) -> int:
    """The number for `type` of an argument: what is wrong is said in words."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def real_number(text: str) -> float:
    """As `whole_number`, for any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def one_of(what: str, names: Collection[str]) -> Callable[[str], str]:
    """Make a function for `type` of an argument that is one of these names; `choices` has them,
    too, for completion.

    Args:
        what: it is, with its article.
    """

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(str(no_such(what, text, names)))
        return text

    return read


def did_you_mean(name: str, names: Collection[str]) -> str:
    """The end of a sentence about a misspelt name; empty if none is near."""
    bare = {_without_prefix(each): each for each in names}
    near = difflib.get_close_matches(_without_prefix(name), bare, n=1, cutoff=_NEAR)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def _without_prefix(name: str) -> str:
    """A flag, a variable or a command of the chat without what all of its kind begin with: that
    makes no name nearer than others."""
    return name.lstrip("-/").removeprefix(ENV_PREFIX)


def no_such(what: str, name: str | None, names: Collection[str]) -> SettingsError:
    """The error for a name that is missing or not among these."""
    listed = f"; there are: {', '.join(names)}"
    if name is None:
        return SettingsError(f"name {what}{listed}")
    return SettingsError(f"{name!r} is not {what}{did_you_mean(name, names) or listed}")


def _wrap(text: str) -> str:
    return textwrap.fill(text, max(shutil.get_terminal_size().columns - 2, 40))
