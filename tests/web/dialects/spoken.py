"""A conversation in no dialect, and the interface of its dialects."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import httpx
import msgspec
from starlette.testclient import TestClient

from mlxsrv.generation.spec import GenerationSpec
from tests.support.client import Body

Client = httpx.Client | TestClient
Response = Any  # theirs are of two libraries

# What is asked, in no dialect.


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: Mapping[str, Any]
    id: str = ""


def whole_calls(written: Iterable[tuple[str, str, str]]) -> list[Call]:
    """The calls that can be made, of those with these names, arguments and ids."""
    calls = []
    for name, arguments, id in written:
        with contextlib.suppress(msgspec.DecodeError):
            calls.append(Call(name, msgspec.json.decode(arguments, type=dict[str, Any]), id))
    return calls


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A message. A tool's answers the call of the id `answers`."""

    role: Literal["user", "assistant", "tool"] = "user"
    text: str = ""
    thoughts: str = ""
    calls: Sequence[Call] = ()
    answers: str = ""


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: Mapping[str, Any]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    Attributes:
        choice: "required", "none", or the name of the tool that must be called.
    """

    model: str = "agent"
    turns: Sequence[Turn]
    system: str = ""
    tools: Sequence[Tool] = ()
    choice: str | None = None
    schema: Mapping[str, Any] | None = None
    stop: str | None = None
    limit: int = 100
    temperature: float = 0
    seed: int | None = None
    thinks: bool | None = None


def asking(text: str = "What is the weather in Paris?", /, **fields: Any) -> Asked:
    return Asked(turns=[Turn(text=text)], **fields)


# What is answered, in no dialect.


class Counts(msgspec.Struct, frozen=True):
    """None: the dialect has no place for it."""

    prompt: int
    answer: int
    cached: int | None
    thoughts: int | None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    text: str = ""
    thoughts: str = ""
    calls: Sequence[Call] = ()
    finish: str
    usage: Counts

    def turn(self) -> Turn:
        """The message by which a client gives the answer back."""
        return Turn(role="assistant", text=self.text, thoughts=self.thoughts, calls=self.calls)

    @property
    def essence(self) -> tuple[Any, ...]:
        """All but the ids of calls, and counts that not all dialects have."""
        calls = [(call.name, call.arguments) for call in self.calls]
        usage = (self.usage.prompt, self.usage.answer)
        return self.text, self.thoughts, calls, self.finish, usage


class Spoken(ABC):
    """A dialect, as a client speaks it.

    Attributes:
        lacks: the fields of `Asked` that it has no place for.
        keepalive: what it sends while nothing is produced, at its beginning.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    lacks: ClassVar[frozenset[str]] = frozenset()
    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    keepalive: ClassVar[bytes]

    @abstractmethod
    def body(self, asked: Asked) -> Body: ...

    @abstractmethod
    def spec(self, body: Body) -> GenerationSpec:
        """Return the answer of the server to a body."""

    @abstractmethod
    def read(self, body: Body) -> Said:
        """Read a whole answer."""

    @abstractmethod
    def hear(self, response: Response) -> Said:
        """Read a stream."""

    def can(self, asked: Asked) -> bool:
        return all(getattr(asked, name) is None for name in self.lacks)

    def post(self, client: Client, asked: Asked, *, stream: bool = False, **more: Any) -> Response:
        body = self.body(asked) | {"stream": stream} | more
        return client.post(self.path, json=body)

    def ask(self, client: Client, asked: Asked) -> Said:
        response = self.post(client, asked)
        assert response.status_code == 200, response.text
        return self.read(response.json())

    def stream(self, client: Client, asked: Asked) -> Said:
        response = self.post(client, asked, stream=True)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == self.stream_type
        return self.hear(response)


def present(**fields: Any) -> Body:
    return {name: value for name, value in fields.items() if value not in (None, [], "")}
