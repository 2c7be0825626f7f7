"""What a reply is asked to do, and what it needs of the service for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Activations
from mlxsrv.generation import Steering
from mlxsrv.prompts.planning import PromptPlan
from mlxsrv.service.observing import Observer
from mlxsrv.settings import Settings
from mlxsrv.wire.requests import GenerationRequest

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer
    from mlxsrv.service.reply import Reply


class Home(Protocol):
    """What a reply needs of the service that made it."""

    settings: Settings
    fingerprint: str
    observers: Sequence[Observer]

    @property
    def steering(self) -> SteeringDesk: ...
    @property
    def engine(self) -> EngineClient: ...
    @property
    def failure(self) -> str | None: ...
    def next_job_id(self) -> int: ...
    def forget(self, reply: Reply, /) -> None: ...


class SteeringDesk(Protocol):
    """What it needs of who knows what is attached."""

    async def resolve(self, request: GenerationRequest, model: str) -> Steering | None:
        """What a request's rows have added. Raises ServeError."""

    def confirm(
        self, request: GenerationRequest, steering: Steering | None, model: str
    ) -> Steering | None:
        """What of it is there still. Raises ServeError."""

    def record(self, model: str, completion: str, event: Activations) -> None:
        """Activations of one token of a completion."""


class Asked(msgspec.Struct, frozen=True):
    """What a reply is to do."""

    request: GenerationRequest
    prepare: Callable[[Tokenizer], PromptPlan]
    """Runs in a worker thread, with the tokenizer to itself."""
    choices: int
    limit: int | None
    likeliest: int | None
    """Tokens to score beside each one; None: no scores."""
    chat: bool
    request_id: str
    echo: bool = False
    timed: bool = False
    """Whether the client is told how long it took."""

    @property
    def scores(self) -> int | None:
        """Tokens to score beside each one of a prompt; None: prompts are not scored."""
        wanted = (self.likeliest if self.echo else None, self.request.prompt_logprobs)
        return max((most for most in wanted if most is not None), default=None)
