"""Variables of a chat template that say whether and how much the model thinks.

Each family has its own. Which of them a template takes is learned from it: it writes a question
with them, and what it then writes tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from mlxsrv.prompts.templates.messages import Messages

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of the effort to put into thinking, as clients name them."""

_USUAL_EFFORTS = ("low", "medium", "high")
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort")
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),  # DeepSeek V3.1, Kimi, Granite 3
    ("thinking_mode", "enabled", "disabled"),  # MiniMax-M3
    ("thinking_mode", "thinking", "chat"),  # DeepSeek V3.2
    ("thinking_budget", -1, 0),  # Seed-OSS
)
"""Names, with the values that turn thinking on and off."""

_ANY = "mlxsrv"  # a word that no template knows
_BUDGET = "thinking_budget"
_QUESTION: Messages = [{"role": "user", "content": "?"}]


class QuestionWriter(Protocol):
    """Writes messages with variables by a template; None if the template refuses them."""

    def __call__(self, messages: Messages, /, **variables: Any) -> str | None: ...


class Switches:
    """The things that one template can be told about thinking. Any thread may use it.

    Attributes:
        turn: returns the variables that turn thinking on or off; None if there are none, or if the
            template refuses this.
        set_effort: returns the variables of the level of effort next to what is asked for that the
            template takes; of two as near the higher one. None: it takes none.
        set_budget: returns the variables of a budget in tokens; None if it takes none, or not this.
        can_turn: whether there is a switch, even if one of its positions is refused.
    """

    def __init__(self, write: QuestionWriter) -> None:
        self._write = write
        self.turn = lru_cache(maxsize=2)(self._turn)
        self.set_effort = lru_cache(maxsize=16)(self._set_effort)
        self._find_switch = lru_cache(maxsize=1)(self._switch)
        self._find_effort = lru_cache(maxsize=1)(self._effort_name)
        self._find_budget = lru_cache(maxsize=1)(self._takes_budget)

    @property
    def can_turn(self) -> bool:
        return self._find_switch() is not None

    def set_budget(self, tokens: int) -> Mapping[str, Any] | None:
        variables = {_BUDGET: tokens}
        return variables if self._find_budget() and self._takes(variables) else None

    def _turn(self, on: bool) -> Mapping[str, Any] | None:
        switch = self._find_switch()
        if switch is None:
            return None
        name, yes, no = switch
        variables = {name: yes if on else no}
        return variables if self._takes(variables) else None

    def _switch(self) -> tuple[str, Any, Any] | None:
        """Return the first variable whose two values make a difference."""
        for name, on, off in _SWITCHES:
            if self._question(**{name: on}) != self._question(**{name: off}):
                return name, on, off
        return None

    def _set_effort(self, asked: str) -> Mapping[str, Any] | None:
        name = self._find_effort()
        if name is None:
            return None
        if asked not in EFFORTS:
            return {name: asked} if self._takes_effort(name, asked) else None
        place = EFFORTS.index(asked)
        away = {level: number - place for number, level in enumerate(EFFORTS)}
        levels = [level for level in EFFORTS if level != "none" or level == asked]
        levels.sort(key=lambda level: (abs(away[level]), -away[level]))
        found = next((level for level in levels if self._takes_effort(name, level)), None)
        # A word that is no different from any other stands for the template's default, which is
        # nearer than a level two steps away.
        written = self._question(**{name: asked})
        usual = written is not None and written == self._question(**{name: _ANY})
        if usual and asked != "none" and (found is None or abs(away[found]) > 1):
            found = asked
        return None if found is None else {name: found}

    def _effort_name(self) -> str | None:
        """Return the first variable that makes a difference with some level."""
        plain = self._question()
        for name in _EFFORT_NAMES:
            if any(self._question(**{name: level}) != plain for level in EFFORTS):
                return name
        return None

    def _takes_effort(self, name: str, level: str) -> bool:
        """Whether the template takes a level of effort. One that it writes as it writes any word is
        known to the model only if it is usual."""
        written, other = self._question(**{name: level}), self._question(**{name: _ANY})
        if written is None or other is None:
            return written is not None
        if _ANY in other:
            same = written.replace(level, _ANY) == other.replace(level, _ANY)
            return level in _USUAL_EFFORTS or not same
        return written != other or level in written.lower()

    def _takes_budget(self) -> bool:
        written = self._question(**{_BUDGET: 512})
        return written is not None and written != self._question()

    def _takes(self, variables: Mapping[str, Any]) -> bool:
        return self._question(**variables) is not None

    def _question(self, **variables: Any) -> str | None:
        return self._write(_QUESTION, **variables)
