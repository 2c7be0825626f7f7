"""One conversation with a server: its messages, and what every request has beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from mlxsrv.arguments import did_you_mean
from mlxsrv.terminal.client import RequestFailed, ServerClient

_NOT_SET: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "use /model",
        "system": "use /system",
        "messages": "the chat sets this itself",
        "stream": "the chat sets this itself",
        "n": "the chat shows one answer",
    }
)
"""Fields of a request that the user cannot set, and why."""


class Conversation:
    """The turns so far, with the settings that the user may change between them.

    Args:
        model: the name of the model.
        system: the system prompt; "" for none.

    Attributes:
        parameters: fields of every request, such as `temperature`.
    """

    def __init__(self, client: ServerClient, model: str, system: str = "") -> None:
        self.model = model
        self.system = system
        self.parameters: dict[str, Any] = {}
        self._client = client
        self._turns: list[dict[str, str]] = []

    def drop_turns(self) -> None:
        """Forget all turns; the settings stay."""
        self._turns.clear()

    def ask(self, text: str, show: Callable[[str, str], None]) -> str:
        """Ask, show the answer's pieces (thought, text) as they come, and return a note about its
        end: "" if there is nothing to say.

        What has come when Ctrl-C or an error ends the answer stays part of the conversation; a
        question without any answer does not.

        Raises:
            RequestFailed: the server refuses, or the answer breaks off.
            KeyboardInterrupt: the user has stopped the answer.
        """
        answer: list[str] = []
        question = {"role": "user", "content": text}
        head = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            **self.parameters,
            "model": self.model,
            "messages": [*head, *self._turns, question],
        }
        try:
            with self._client.chat(body) as stream:
                for thought, piece in stream:
                    answer.append(piece)
                    show(thought, piece)
                return _note(stream.ending, stream.ignored)
        finally:
            if said := "".join(answer):
                self._turns += [question, {"role": "assistant", "content": said}]

    def set(self, name: str, value: object) -> None:
        """Have every request carry this field.

        Raises RequestFailed if the server refuses the field, or ignores it.
        """
        if name in _NOT_SET:
            raise RequestFailed(f"{name}: {_NOT_SET[name]}")
        # Only a request that is read to its end, and for which the model is asked, is sure to be
        # taken the next time. It is left when its answer begins.
        body = {
            **self.parameters,
            name: value,
            "model": self.model,
            "messages": [{"role": "user", "content": "?"}],
        }
        with self._client.chat(body) as stream:
            paths = stream.ignored.split(", ")
        if ignored := [path for path in paths if path.partition(".")[0] == name]:
            raise RequestFailed(f"{self.model} ignores {', '.join(ignored)}{self._near(name)}")
        self.parameters[name] = value

    def _near(self, name: str) -> str:
        """The field that a misspelt one may mean, as the end of a sentence."""
        described = self._client.get("/openapi.json")["components"]["schemas"]
        fields = described["ChatRequest"]["properties"]
        return "" if name in fields else did_you_mean(name.lower(), fields)

    def choose(self, name: str) -> str:
        """Take another model, and return a line about it. Raises RequestFailed."""
        found = self._client.model(name)
        if "completion" not in (found["capabilities"] or ("completion",)):
            raise RequestFailed(f"{found['id']} does not chat: it is of the type {found['type']}")
        self.model = found["id"]
        length = found["context_length"]
        return f"{self.model}, {length:,} tokens of context" if length else self.model

    def others(self) -> list[tuple[str, str]]:
        """The names and states of the server's models that write. Raises RequestFailed."""
        return [
            (model["id"], model["state"])
            for model in self._client.get("/v1/models")["data"]
            if "completion" in (model["capabilities"] or ("completion",))
        ]


def _note(ending: str | None, ignored: str) -> str:
    notes = []
    if ending == "length":
        notes.append("cut off at the most tokens of an answer: /set max_tokens allows more")
    if ignored:
        notes.append(f"the server ignores: {ignored}")
    return "; ".join(notes)
