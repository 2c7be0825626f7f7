"""Completion in shells: scripts for bash, zsh and fish, made of what the commands take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from shlex import quote
from types import MappingProxyType
from typing import Final

import msgspec


class CompletedCommand(msgspec.Struct, frozen=True):
    """A command as a shell completes it.

    Attributes:
        does: one line about it.
        flags: its options, each with the values that are known of it; None: it takes no value.
        common: those that its help shows. The others are offered once a letter of them is there:
            the server has a hundred.
        words: the values of its first argument, where they are known.
    """

    name: str
    does: str
    flags: Mapping[str, Sequence[str] | None]
    common: Sequence[str]
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
{_takes_value(commands)}
_mlxsrv() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local flags common words= values given=0 i
    # --flag=value is three words.
    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $word == = ]] && word=
{_cases(commands, default, "${COMP_WORDS[1]}")}
    for ((i = 2; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            -* | =) ;;
            *) [[ ${{COMP_WORDS[i-1]}} == = ]] || _mlxsrv_takes "${{COMP_WORDS[i-1]}}" || given=1 ;;
        esac
    done
    if _mlxsrv_takes "$before"; then words=$values
    elif [[ $word == - || $word == -- ]]; then words=$common
    elif [[ $word == -* ]]; then words=$flags
    elif (( COMP_CWORD == 1 )); then words={quote(_spaced(each.name for each in commands))}
    elif (( given )); then words=
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mlxsrv mlxsrv
"""


def _zsh(commands: Sequence[CompletedCommand], default: CompletedCommand) -> str:
    described = "\n".join(f"        {quote(f'{each.name}:{each.does}')}" for each in commands)
    return f"""\
#compdef mlxsrv
# Completion of mlxsrv in zsh: source <(mlxsrv completion zsh), behind compinit
{_takes_value(commands)}
_mlxsrv() {{
    local flags common values known= given=0 i before=$words[CURRENT-1]
    local -a names=(
{described}
    )
{_cases(commands, default, "${words[2]}").replace(" words=", " known=")}
    if [[ $PREFIX == --*=* ]]; then
        before=${{PREFIX%%=*}}
        compset -P '*='
    fi
    for ((i = 3; i < CURRENT; i++)); do
        [[ $words[i] == -* ]] || _mlxsrv_takes $words[i-1] || given=1
    done
    if _mlxsrv_takes $before; then
        if [[ -n $values ]]; then compadd -- ${{=values}}; else _files; fi
    elif [[ $PREFIX == (-|--) ]]; then
        compadd -- ${{=common}}
    elif [[ $PREFIX == -* ]]; then
        compadd -- ${{=flags}}
    elif (( CURRENT == 2 )); then
        _describe command names
    elif [[ -n $known ]] && (( ! given )); then
        compadd -- ${{=known}}
    else
        _files
    fi
}}
compdef _mlxsrv mlxsrv
"""


def _takes_value(commands: Sequence[CompletedCommand]) -> str:
    """A function that succeeds for a flag with a value, and sets `values` to those that are known;
    in the language of bash and zsh."""
    flags: dict[Sequence[str], list[str]] = {}
    for flag, values in _all_flags(commands).items():
        if values is not None:
            flags.setdefault((*values,), []).append(flag)
    lines = ["_mlxsrv_takes() {", "    case $1 in"]
    for values, those in flags.items():
        lines.append(f"        {' | '.join(those)}) values={quote(_spaced(values))} ;;")
    return "\n".join([*lines, "        *) return 1 ;;", "    esac", "}"])


def _all_flags(commands: Sequence[CompletedCommand]) -> dict[str, Sequence[str] | None]:
    return {flag: values for each in commands for flag, values in each.flags.items()}


def _cases(commands: Sequence[CompletedCommand], default: CompletedCommand, word: str) -> str:
    """A `case` that sets `flags`, `common` and `words` by the command, in the language of bash and
    zsh."""

    def flags(command: CompletedCommand) -> str:
        return f"flags={quote(_spaced(command.flags))} common={quote(_spaced(command.common))}"

    lines = [f"    case {word} in"]
    for each in commands:
        lines.append(f"        {each.name}) {flags(each)} words={quote(_spaced(each.words))} ;;")
    lines += [f"        *) {flags(default)} ;;", "    esac"]
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
            words = _spaced(each.words)
            here = f"__fish_seen_subcommand_from {each.name}"
            first = f"'{here}; and not __fish_seen_subcommand_from {words}'"
            lines.append(f"complete -c mlxsrv -f -n {first} -a {quote(words)}")

    def seen(taking: Collection[str]) -> str:
        # Without a command the default one is meant, so its flags are for all but a few.
        general = default.name in taking
        those = _spaced(each.name for each in commands if (each.name in taking) != general)
        return f"{'not ' if general else ''}__fish_seen_subcommand_from {those}"

    for flag, values in _all_flags(commands).items():
        when = takes = seen([each.name for each in commands if flag in each.flags])
        shows = seen([each.name for each in commands if flag in each.common])
        if shows != takes:
            when += f"; and begin; {shows}; or not contains -- (commandline -ct) - --; end"
        value = "" if values is None else " -r"
        known = f" -f -a {quote(_spaced(values))}" if values else ""
        lines.append(f"complete -c mlxsrv -n '{when}' -l {flag[2:]}{value}{known}")
    return "\n".join(lines) + "\n"


_Script = Callable[[Sequence[CompletedCommand], CompletedCommand], str]
SHELLS: Final[Mapping[str, _Script]] = MappingProxyType({"bash": _bash, "zsh": _zsh, "fish": _fish})
