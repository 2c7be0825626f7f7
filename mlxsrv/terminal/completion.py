"""Completion in shells: scripts for bash, zsh and fish, made of what the commands take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from shlex import quote
from types import MappingProxyType
from typing import Final

import msgspec


class CompletedCommand(msgspec.Struct, frozen=True):
    """A command as a shell completes it.

    Attributes:
        does: one line about it.
        flags: its options.
        words: the values of its first argument, where they are known.
    """

    name: str
    does: str
    flags: Sequence[str]
    words: Sequence[str] = ()


def completion_script(shell: str, commands: Sequence[CompletedCommand], default: str) -> str:
    """The script that has a shell complete the commands.

    Args:
        shell: one of SHELLS.
        default: the command whose options `mlxsrv` takes without a command.
    """
    return SHELLS[shell](commands, next(each for each in commands if each.name == default))


def _bash(commands: Sequence[CompletedCommand], default: CompletedCommand) -> str:
    return f"""\
# Completion of mlxsrv in bash: source <(mlxsrv completion bash)
_mlxsrv() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} flags words=
{_cases(commands, default, "${COMP_WORDS[1]}")}
    case $word in
        -*) words=$flags ;;
        *) (( COMP_CWORD == 1 )) && words={quote(_spaced(each.name for each in commands))} ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mlxsrv mlxsrv
"""


def _zsh(commands: Sequence[CompletedCommand], default: CompletedCommand) -> str:
    described = "\n".join(f"        {quote(f'{each.name}:{each.does}')}" for each in commands)
    return f"""\
#compdef mlxsrv
# Completion of mlxsrv in zsh: source <(mlxsrv completion zsh), behind compinit
_mlxsrv() {{
    local flags words_known=
    local -a names_known=(
{described}
    )
{_cases(commands, default, "${words[2]}").replace(" words=", " words_known=")}
    if [[ $PREFIX == -* ]]; then
        compadd -- ${{=flags}}
    elif (( CURRENT == 2 )); then
        _describe command names_known
    elif [[ -n $words_known ]]; then
        compadd -- ${{=words_known}}
    else
        _files
    fi
}}
compdef _mlxsrv mlxsrv
"""


def _cases(commands: Sequence[CompletedCommand], default: CompletedCommand, word: str) -> str:
    """A `case` that sets `flags` and `words` by the command, in the language of bash and zsh."""
    lines = [f"    case {word} in"]
    for each in commands:
        values = f"flags={quote(_spaced(each.flags))} words={quote(_spaced(each.words))}"
        lines.append(f"        {each.name}) {values} ;;")
    lines += [f"        *) flags={quote(_spaced(default.flags))} ;;", "    esac"]
    return "\n".join(lines)


def _spaced(words: Iterable[str]) -> str:
    return " ".join(words)


def _fish(commands: Sequence[CompletedCommand], default: CompletedCommand) -> str:
    lines = ["# Completion of mlxsrv in fish: mlxsrv completion fish | source"]
    begun = _spaced(each.name for each in commands)
    for each in commands:
        lines.append(
            f"complete -c mlxsrv -f -n 'not __fish_seen_subcommand_from {begun}' "
            f"-a {each.name} -d {quote(each.does)}"
        )
        if each.words:
            here = f"'__fish_seen_subcommand_from {each.name}'"
            lines.append(f"complete -c mlxsrv -f -n {here} -a {quote(_spaced(each.words))}")
    for flag in dict.fromkeys(flag for each in commands for flag in each.flags):
        # Without a command the default one is meant, so its flags are for all but a few.
        general = flag in default.flags
        those = _spaced(each.name for each in commands if (flag in each.flags) != general)
        seen = f"{'not ' if general else ''}__fish_seen_subcommand_from {those}"
        lines.append(f"complete -c mlxsrv -n '{seen}' -l {flag[2:]}")
    return "\n".join(lines) + "\n"


_Script = Callable[[Sequence[CompletedCommand], CompletedCommand], str]
SHELLS: Final[Mapping[str, _Script]] = MappingProxyType({"bash": _bash, "zsh": _zsh, "fish": _fish})
