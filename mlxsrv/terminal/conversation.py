"""One conversation with a server: its messages, and what every request has beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsrv.terminal.client import RequestFailed, ServerClient


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
        """Have every request carry this field. Raises RequestFailed if the server refuses it."""
        # A request without messages is refused before anything is done for it. Its fields are read
        # in their order, so an error about this one comes first.
        try:
            with self._client.chat({name: value, "model": self.model, "messages": []}):
                pass
        except RequestFailed as error:
            if error.param not in (None, "messages"):
                raise
        self.parameters[name] = value

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
