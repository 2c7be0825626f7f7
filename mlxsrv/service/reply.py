"""One reply: from a validated request to the outputs that answer it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import (
    Activations,
    Failed,
    JobEvent,
    Progress,
    Receiver,
    Started,
)
from mlxsrv.engine.faults import survivable
from mlxsrv.engine.orders import Job
from mlxsrv.errors import EngineFailed, InsufficientMemory, ServeError, UnsupportedParameter
from mlxsrv.generation.outputs import Ended, Identity, Output, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.logs import log
from mlxsrv.models.pool.lease import Lease, Withdrawn
from mlxsrv.models.pool.model import LoadState
from mlxsrv.prompts.planning import PromptPlan, plan
from mlxsrv.service.choice import Choice
from mlxsrv.service.choice_factory import ChoiceFactory
from mlxsrv.service.lifecycle import ENDED, Lifecycle, State
from mlxsrv.service.observing import Generated, Timing
from mlxsrv.service.resources import Resources

if TYPE_CHECKING:
    from mlxsrv.prompts.grammars.grammar import CompiledGrammar
    from mlxsrv.prompts.tokenizer import Tokenizer

_log = logging.getLogger("mlxsrv.service")

# Looked up once: before Python 3.12 a member of an enum costs as much as the rest of a check.
_SUBMITTED, _CLOSED = State.SUBMITTED, State.CLOSED


class Reply:
    """The answer to one request that generates text. Used on the event loop.

    Two tasks share it: one runs `admit`, the other reads `outputs`. Whoever makes a reply must
    `release` it when both are over. The engine's events arrive in callbacks of the event loop,
    while no task runs; the callbacks only store the event, and `outputs` makes text of it when its
    reader wants it. The callbacks of timers wake the reader too, so no read lasts longer than
    `keepalive` seconds.

    Args:
        lease: the claim on the model, which the reply releases.
        request_id: for logs and error messages.
        id: the response's.
        forget: called once, with the reply, when it is released.
    """

    def __init__(
        self,
        resources: Resources,
        lease: Lease,
        spec: GenerationSpec,
        request_id: str,
        id: str,
        forget: Callable[[Reply], None],
    ) -> None:
        self.identity = Identity(
            id=id,
            created=int(time.time()),
            model=lease.model.entry.name,
            system_fingerprint=resources.fingerprint,
        )
        self.spec = spec
        self._resources = resources
        self._lease = lease
        self._request_id = request_id
        self._forget = forget
        self._tokenized: Callable[[], None] = lambda: None

        self._choices: Sequence[Choice] = ()
        self._engine: EngineClient | None = None  # set when the first job is submitted
        # Held so that the device thread finds it compiled, however late the jobs are admitted.
        self._compiled: CompiledGrammar | None = None
        self._error: ServeError | None = None  # set: the state is FAILED, or CLOSED after that
        self._not_taken: Sequence[str] = ()  # fields that the model's template does not take
        self._prompt_tokens = 0
        self._thinks = False

        self._timing = Timing(resources.observers, self.identity.model, wanted=spec.timed)
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._first_text: float | None = None  # when the first text was read
        self._lifecycle = Lifecycle(
            resources.settings, lease.model, lambda: resources.pool.engine.heard, self._expire
        )
        # A keep-alive opens the stream with status 200. A prompt that does not fit is refused
        # before that, unless a download comes first, which shows what fits.
        self._wakeup = Wakeup(
            resources.settings.keepalive,
            lambda: bool(self._choices) or lease.model.state is LoadState.FETCHING,
        )

    def when_tokenized(self, done: Callable[[], None]) -> None:
        """Have `done` called once the request's prompts are tokens, or never will be. It may be
        called more than once."""
        self._tokenized = done

    @property
    def state(self) -> State:
        return self._lifecycle.state

    @property
    def ignored(self) -> Sequence[str]:
        """The paths of what the prompt does not have, as far as that is known."""
        return [*self.spec.ignored, *self._not_taken]

    # Admission.

    async def admit(self) -> None:
        """Wait for all that the jobs need, and submit them. `outputs` raises what goes wrong."""
        try:
            await self._submit_all()
        except ServeError as error:  # Withdrawn included: fail() does nothing then
            self.fail(error)
        except BaseException as error:
            if not survivable(error):
                raise
            log(_log, logging.ERROR, "admission failed", traceback=True, **self._log_fields())
            self.fail(self._internal_error("could not take this request"), cause=repr(error))

    async def _submit_all(self) -> None:
        tokenizer = await self._lease.tokenizer()
        self._proceed(State.PREPARING)
        self._choices = await self._make_choices(tokenizer)
        await self._lease.enter()
        self._proceed(State.QUEUED)
        # No await from here on: if the task is cancelled, either no job is submitted or all are,
        # and release() undoes that. Nor can the SAE be detached: the order to do so would be behind
        # the jobs in the device thread's inbox. Each has its own turn in the engine's line.
        for choice in self._choices:
            self._submit(choice)

    def _proceed(self, state: State) -> None:
        """Enter `state`. Raises Withdrawn if the reply ended while its admission waited."""
        if self.state in ENDED:
            raise Withdrawn("the reply has ended")
        self._lifecycle.enter(state)

    async def _make_choices(self, tokenizer: Tokenizer) -> list[Choice]:
        """Raises ServeError: the model cannot do what is asked."""
        if not self._lease.writes:
            raise UnsupportedParameter(
                "model: it generates no text, it only makes embeddings or scores texts",
                param="model",
            )
        planned = await self._lease.run_in_worker(plan, self.spec, tokenizer)
        self.spec = self.spec.without_messages
        self._tokenized()
        self._not_taken = planned.ignored
        steering = await self._resources.steering.resolve(self.spec.steering, self.identity.model)
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in planned.prompts)
        self._thinks = tokenizer.formats.thoughts.thinks
        self._compiled = await self._compile(tokenizer, planned)
        factory = ChoiceFactory(
            self._resources,
            self.spec,
            self.identity.model,
            self._lease.context_length,
            tokenizer,
            planned,
            None if self._compiled is None else self._compiled.grammar,
            steering,
            self._lease.turn,
        )
        return factory.make()

    async def _compile(self, tokenizer: Tokenizer, planned: PromptPlan) -> CompiledGrammar | None:
        """The grammar of the answers, or of their calls. Takes up to seconds."""
        constraint = planned.constraint
        if constraint is None:
            return None
        grammars = tokenizer.grammars
        compile = grammars.compile_call if constraint.calls_only else grammars.compile
        return await anyio.to_thread.run_sync(
            partial(compile, constraint.spec, param=constraint.param),
            abandon_on_cancel=True,
            limiter=self._lease.model.compiling,
        )

    def _submit(self, choice: Choice) -> None:
        """Raises SAENotAttached if the SAE that was asked for has gone."""
        choice.job = self._confirm_steering(choice.job)
        self._engine = self._resources.pool.engine
        receive: Receiver = partial(self._receive, choice)
        self._lease.note_queued(choice.job.id)
        self._engine.submit(choice.job, self._timing.watch(receive))

    def _confirm_steering(self, job: Job) -> Job:
        if job.steering is None:
            return job
        steering = self._resources.steering.confirm(
            self.spec.steering, job.steering, self.identity.model
        )
        return msgspec.structs.replace(job, steering=steering)

    # What ends the reply early. A reply that has ended stays as it is.

    def fail(self, error: ServeError, *, cause: str | None = None) -> None:
        """End the reply with `error`. Its reader gets what was generated before, then the error.

        Args:
            cause: for the log, if the client is not to know it.
        """
        if not self._lifecycle.may_enter(State.FAILED):
            return
        self._error = error
        self._lifecycle.enter(State.FAILED)
        level = logging.ERROR if error.status >= 500 else logging.INFO
        self._log_failure(level, error.code, cause or error.message)
        self._give_back()
        self._wakeup.wake()

    def _expire(self, error: ServeError) -> None:
        """A time limit has passed. Text that the client has is an answer; without any, the
        reply fails."""
        if self._first_text is None:
            self.fail(error)
        elif self._lifecycle.may_enter(State.FINISHED):
            self._lifecycle.enter(State.FINISHED)
            self._log_failure(logging.WARNING, "timeout", error.message)
            for choice in self._choices:
                choice.expire()
            self._give_back()
            self._wakeup.wake()

    # The engine's events, in callbacks on the loop.

    def _receive(self, choice: Choice, event: JobEvent) -> None:
        if not isinstance(event, Started):
            self._lifecycle.touch()
            if choice.state is _SUBMITTED:
                choice.enter(State.RUNNING)
                self._follow_choices()
        match event:
            case Progress():
                return
            case Activations():
                self._resources.steering.record(self.identity.model, self.identity.id, event)
                return
            case Failed():
                self._fail_with(event)
            case Started():
                choice.receive(event)
                self._start_choice(choice)
            case _:
                choice.receive(event)
                if choice.finish is not None:
                    self._end_choice(choice)
        self._wakeup.wake()

    def _start_choice(self, choice: Choice) -> None:
        """Note that a choice has a row."""
        self._lease.note_started(choice.job.id)
        self._follow_choices()
        if self._timing.note_start():
            fields = self._log_fields()
            log(_log, logging.INFO, "stream start", **fields, prompt_tokens=self._prompt_tokens)

    def _fail_with(self, event: Failed) -> None:
        error: ServeError
        if self._resources.pool.failure is not None:
            error = EngineFailed("the inference engine has failed; restart the server")
        elif event.shortage is not None:
            error = InsufficientMemory(event.shortage.message)
        else:
            reason = f": {event.clear}" if event.clear else ""
            error = self._internal_error(f"failed while generating{reason}")
        self.fail(error, cause=event.reason)

    def _follow_choices(self) -> None:
        """Take the state of the most advanced unfinished choice; a reply that has ended keeps its
        own."""
        if self.state in ENDED:
            return
        states = {choice.state for choice in self._choices}
        for state in (State.RUNNING, State.SUBMITTED, State.QUEUED):
            if state in states:
                self._lifecycle.enter(state)
                return
        self._lifecycle.enter(State.FINISHED)
        self._lease.release()

    # Reading.

    async def outputs(self) -> list[Output]:
        """Return what is ready; wait for the first of it. Empty: silence for `keepalive` seconds.

        Raises:
            ServeError: the reply failed; there is nothing more to read.
        """
        while True:
            outputs = self._read()
            if outputs:
                self._wakeup.note_read()
                return outputs
            if self._error is not None:
                raise self._error
            if self._wakeup.take_keepalive():
                return []
            await self._wakeup.wait()

    def _read(self) -> list[Output]:
        outputs: list[Output] = []
        for choice in self._choices:
            read = choice.collect()
            if not read:
                continue
            # The prompt and its scores are no text of the answer.
            if self._first_text is None and choice.sampled:
                self._first_text = self._loop.time()
            if choice.state is _CLOSED:
                self._end_choice(choice)
                self._log_faults(choice)
            outputs += read
        if outputs and isinstance(outputs[-1], Ended) and self._all_read:
            outputs[-1] = msgspec.structs.replace(outputs[-1], usage=self.usage())
        return outputs

    @property
    def _all_read(self) -> bool:
        return bool(self._choices) and all(each.state is State.CLOSED for each in self._choices)

    def usage(self) -> Usage:
        """Tokens of all choices, as far as they were read. A prompt, and what of it was cached,
        counts once however many answers it has."""
        reasoning = sum(choice.pipeline.reasoning_tokens for choice in self._choices)
        first_answers = self._choices[:: self.spec.choices]
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.sampled for choice in self._choices),
            reasoning_tokens=reasoning if self._thinks else None,
            cached_tokens=sum(choice.cached_tokens for choice in first_answers),
            timings=self._timing.timings(self._lease.load_seconds) if self.spec.timed else None,
        )

    # The end.

    def _end_choice(self, choice: Choice) -> None:
        """Note that a choice has ended, and so has its row, before its client has read that: it may
        read slowly or never."""
        self._cancel(choice)
        self._follow_choices()

    def _give_back(self) -> None:
        """Take back all jobs, and the claim on the model."""
        for choice in self._choices:
            self._cancel(choice)
        self._lease.release()

    def _cancel(self, choice: Choice) -> None:
        if self._engine is not None:
            self._engine.cancel(choice.job.id)  # does nothing for a job that is over
        self._lease.note_ended(choice.job.id)

    def release(self) -> None:
        """Give back all that the reply holds: its rows, its place, its timers. Only the first call
        counts. A reply that is released before its end was left by its client."""
        if self.state is State.CLOSED:
            return
        self._lifecycle.enter(State.CLOSED)
        self._tokenized()
        self._wakeup.stop()
        self._give_back()
        self._forget(self)
        if self._disconnected:
            log(_log, logging.INFO, "client left", **self._log_fields(), tokens=self._tokens)
        self._log_end()

    @property
    def _disconnected(self) -> bool:
        """Whether the client of a released reply left before the end."""
        return self._error is None and not self._all_read

    @property
    def generated(self) -> Generated:
        """The result of a released reply."""
        timing = self._timing
        ended = self._error is None and not self._disconnected
        return Generated(
            id=self.identity.id,
            model=self.identity.model,
            usage=self.usage(),
            reasons=tuple(choice.reason for choice in self._choices) if ended else (),
            begun=timing.begun,
            ttft=self._ttft,
            started=timing.started,
            first_token=timing.first_token,
            last_token=timing.last_token,
            error=None if self._error is None else self._error.code,
        )

    @property
    def _ttft(self) -> float | None:
        """Seconds until the first text was read."""
        return None if self._first_text is None else self._first_text - self._begun

    # The log.

    def _log_end(self) -> None:
        now = self._loop.time()
        tokens = sum(choice.sampled for choice in self._choices)
        rate = None
        if self._first_text is not None:
            # Some clocks have a resolution of milliseconds, and an answer can take less than that.
            decoding = now - self._first_text
            rate = (tokens - 1) / decoding if tokens > 1 and decoding > 0 else None
        log(
            _log,
            logging.INFO,
            "stream end",
            **self._log_fields(),
            finish=self._outcome(),
            prompt_tokens=self._prompt_tokens,
            tokens=tokens,
            ttft=self._ttft,
            tokens_per_second=rate,
            seconds=now - self._begun,
        )

    def _log_failure(self, level: int, code: str, cause: str) -> None:
        fields = self._log_fields()
        log(_log, level, "stream error", **fields, code=code, cause=cause, tokens=self._tokens)

    @property
    def _tokens(self) -> int:
        """The tokens so far, those that the client has not read included."""
        return sum(choice.sampled + choice.waiting_tokens for choice in self._choices)

    def _log_faults(self, choice: Choice) -> None:
        """Log what was wrong with a choice and its tool calls, if anything was."""
        if choice.pipeline.repeated:
            log(_log, logging.INFO, "answer repeated itself", **self._log_fields())
        if faults := choice.pipeline.faults:
            cause = "; ".join(dict.fromkeys(faults))
            log(_log, logging.INFO, "tool call broken", **self._log_fields(), cause=cause)

    def _outcome(self) -> str:
        if self._error is not None:
            return self._error.code
        return "disconnected" if self._disconnected else self._choices[0].finish or "stop"

    def _log_fields(self) -> dict[str, Any]:
        return {
            "request": self._request_id,
            "model": self.identity.model,
            "user": self.spec.user,
        }

    def _internal_error(self, what: str) -> ServeError:
        return ServeError(
            f"the server {what}; its log says why under request id {self._request_id}"
        )


class Wakeup:
    """Wakes the one task that reads a reply, when something has come or nothing has for long.

    Used on the event loop. `stop` ends its timer.

    Args:
        interval: seconds of silence after which a keep-alive is due.
        may_keep_alive: returns whether one may be sent yet: it opens a stream with status 200.
    """

    def __init__(self, interval: float, may_keep_alive: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval = interval
        self._may_keep_alive = may_keep_alive
        self._keepalive_due = False
        self._waiter: asyncio.Future[None] | None = None
        self._last_read = self._loop.time()
        # One timer for all reads: a timer a read would cost as much as the read itself.
        self._timer = self._loop.call_later(interval, self._check)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `wake`. The caller has found nothing to read."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def note_read(self) -> None:
        """Note that the task has something to send."""
        self._last_read = self._loop.time()

    def take_keepalive(self) -> bool:
        """Return whether a keep-alive is due; if so it counts as sent."""
        due, self._keepalive_due = self._keepalive_due, False
        return due

    def stop(self) -> None:
        self._timer.cancel()
        self._may_keep_alive = bool  # it held the reply, which holds this

    def _check(self) -> None:
        now = self._loop.time()
        if now >= self._last_read + self._interval:
            self._keepalive_due = self._may_keep_alive()
            self._last_read = now
            self.wake()
        self._timer = self._loop.call_at(self._last_read + self._interval, self._check)
