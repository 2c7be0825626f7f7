"""One request being answered: from a validated Struct to what it generates."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Activations, Failed, JobEvent, Progress, Receiver, Started
from mlxsrv.engine.faults import survivable
from mlxsrv.engine.orders import Job
from mlxsrv.errors import (
    ContextLengthExceeded,
    EngineFailed,
    ServeError,
    UnsupportedParameter,
)
from mlxsrv.generation import Steering, Usage
from mlxsrv.logs import log
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.model import LoadState
from mlxsrv.prompts.planning import PromptPlan
from mlxsrv.service.asked import Asked, Home
from mlxsrv.service.choice import Choice
from mlxsrv.service.observing import Generated, Timing
from mlxsrv.service.outputs import Ended, Opened, Output
from mlxsrv.service.parameters import end_tokens, sampling
from mlxsrv.service.patience import Patience, Stage
from mlxsrv.service.scores import Scores
from mlxsrv.wire.openai import Identity

if TYPE_CHECKING:
    from mlxsrv.prompts.grammars.grammar import CompiledGrammar
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer

_log = logging.getLogger("mlxsrv.service.service")


class Reply:
    """Lives on the event loop; whoever makes it must `close` it.

    The device thread's events arrive through callbacks on the loop that only note them; `outputs`
    turns them into text on its reader's time. The timers for silence and for time that is over wake
    the reader too, so no read lasts longer than `keepalive` seconds.
    """

    def __init__(self, home: Home, lease: Lease, asked: Asked) -> None:
        self.who = Identity(
            id=f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=lease.model.entry.name,
            system_fingerprint=home.fingerprint,
        )
        self.choices = asked.choices
        self.scored = asked.likeliest is not None
        self._home = home
        self._lease = lease
        self._asked = asked
        self._closed = False
        self._tell_read: Callable[[], None] = lambda: None

        # What has arrived and was not read yet.
        self._started = False
        self._error: ServeError | None = None
        self._expired = False
        self._silent = False

        # What has been read.
        self._opened = False
        self._choices: list[Choice] = []
        self._engine: EngineClient | None = None  # set: a job was submitted
        self._prompt_tokens = 0
        self._thinks = False
        self._first_text: float | None = None
        timed = asked.timed or home.observers
        self._timing = Timing(home.observers, self.who.model) if timed else None

        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._begun = self._last_read = self._loop.time()
        settings = home.settings
        self._patience = Patience(
            settings,
            self._lapse,
            loading=lambda: lease.model.progressing,
            heard=lambda: self._begun if self._engine is None else self._engine.heard,
        )
        self._keepalive = self._loop.call_later(settings.keepalive, self._check_silence)

    def once_read(self, done: Callable[[], None]) -> None:
        """Have `done` called, perhaps more than once, when the prompts are tokens or never will
        be."""
        self._tell_read = done

    # Admission.

    async def admit(self) -> None:
        """Wait for all that the jobs need, and submit them. Failures come out of `outputs`."""
        try:
            await self._submit()
        except ServeError as error:
            self.fail(error)
        except BaseException as error:
            if not survivable(error):
                raise
            log(_log, logging.ERROR, "admission failed", traceback=True, **self._fields())
            self.fail(ServeError(self._internal("could not take this request")), cause=repr(error))

    async def _submit(self) -> None:
        tokenizer = await self._lease.tokenizer()
        self._patience.enter(Stage.QUEUED)
        if "completion" not in self._lease.capabilities:
            raise UnsupportedParameter(
                "model: it writes no text, it only makes embeddings or judges texts", param="model"
            )
        plan = await self._lease.model.tokenizer_lock.run(partial(self._asked.prepare, tokenizer))
        self._tell_read()
        steering = await self._home.steering.resolve(self._asked.request, self.who.model)
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in plan.prompts)
        self._thinks = tokenizer.thinks
        grammar = await self._compile(tokenizer, plan)
        self._choices = self._make_choices(tokenizer, plan, grammar, steering)
        await self._lease.enter()
        self._patience.enter(Stage.QUEUED)
        for choice in self._choices:
            await self._lease.borrow_row(choice)
            if self._over:
                # It ended while it was queued, and a client that reads nothing has not heard yet.
                self._lease.return_row(choice)
                return
            # No await from here on: a cancellation finds the row either not borrowed or the job
            # submitted, and close() undoes both. Nor can the SAE be detached: the order to do so
            # would be behind the job in the device thread's inbox.
            choice.job = self._confirm_steering(choice.job)
            self._engine = self._home.engine
            receive: Receiver = partial(self._receive, choice)
            if self._timing is not None:
                receive = self._timing.watch(receive)
            self._engine.submit(choice.job, receive, choice.constraint)
            choice.submitted = True
            self._patience.enter(self._stage)
        log(_log, logging.INFO, "stream start", **self._fields(), prompt_tokens=self._prompt_tokens)

    def _confirm_steering(self, job: Job) -> Job:
        """Raises SAENotAttached if the SAE that was asked for has gone."""
        if job.steering is None:
            return job
        desk = self._home.steering
        steering = desk.confirm(self._asked.request, job.steering, self.who.model)
        return msgspec.structs.replace(job, steering=steering)

    async def _compile(self, tokenizer: Tokenizer, plan: PromptPlan) -> CompiledGrammar | None:
        """The grammar of the answers. Takes up to seconds, so not while holding the tokenizer."""
        if plan.constraint is None:
            return None
        compile = partial(
            tokenizer.grammars.compile, plan.constraint.spec, param=plan.constraint.param
        )
        return await anyio.to_thread.run_sync(
            compile, abandon_on_cancel=True, limiter=self._lease.model.compiling
        )

    @property
    def _over(self) -> bool:
        return self._error is not None or self._expired

    def _make_choices(
        self,
        tokenizer: Tokenizer,
        plan: PromptPlan,
        grammar: CompiledGrammar | None,
        steering: Steering | None,
    ) -> list[Choice]:
        copies = self._asked.request.choices
        return [
            self._make_choice(tokenizer, plan, grammar, steering, prompt, i * copies + k)
            for i, prompt in enumerate(plan.prompts)
            for k in range(copies)
        ]

    def _make_choice(
        self,
        tokenizer: Tokenizer,
        plan: PromptPlan,
        grammar: CompiledGrammar | None,
        steering: Steering | None,
        prompt: Prompt,
        index: int,
    ) -> Choice:
        asked = self._asked
        constraint = scores = None
        if grammar is not None:
            constraint = grammar.constraint(tokenizer.think_end if prompt.thinking else None)
        if self.scored:
            scores = Scores(
                tokenizer.token_bytes,
                tokenizer.token_bytes_or_name,
                strips_space=asked.chat and tokenizer.strips_first_space,
                every=not asked.chat,
                ends=tokenizer.turn_ends,
                numbered=bool(asked.request.return_tokens_as_token_ids),
            )
        pipeline = tokenizer.pipeline(
            stops=asked.request.stops,
            chat=asked.chat,
            thinking=prompt.thinking,
            bound=grammar is not None,
            tools=plan.tool_calls(),
            min_tokens=asked.request.min_tokens or 0,
        )
        return Choice(
            index,
            self._job(tokenizer, plan, steering, index),
            pipeline,
            constraint=constraint,
            scores=scores,
            echo=prompt.text if asked.echo else "",
            tells_tokens=bool(asked.request.return_token_ids),
            spelling=None
            if asked.request.prompt_logprobs is None
            else tokenizer.token_bytes_or_name,
        )

    def _job(
        self, tokenizer: Tokenizer, plan: PromptPlan, steering: Steering | None, index: int
    ) -> Job:
        asked = self._asked
        nth, copy = divmod(index, asked.request.choices)
        prompt = plan.prompts[nth]
        return Job(
            id=self._home.next_job_id(),
            model=self.who.model,
            prompt=prompt.tokens,
            max_tokens=self._max_tokens(
                self._lease.context_length, len(prompt.tokens), plan.paths[nth]
            ),
            # What a grammar binds may end with any of them: it allows none before the text's end.
            end_tokens=end_tokens(
                asked.request,
                tokenizer,
                chat=asked.chat,
                guided=plan.constraint is not None,
                more=prompt.ends,
            ),
            checkpoint=prompt.checkpoint,
            logprobs=asked.likeliest,
            scores=asked.scores,
            ranks=asked.request.prompt_logprobs is not None,
            sampling=sampling(asked.request, tokenizer, copy),
            steering=steering,
            bans=plan.bans,
        )

    def _max_tokens(self, context: int | None, prompt_tokens: int, param: str) -> int:
        """How many tokens may be drawn. Raises ContextLengthExceeded if not one may."""
        asked = self._asked.limit
        limit = self._home.settings.default_max_tokens if asked is None else asked
        if context is None:
            return limit
        left = context - prompt_tokens
        if left < min(limit, 1):
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context} tokens; the prompt has "
                f"{prompt_tokens}, which leaves no room for an answer",
                param=param,
            )
        return min(left, limit)

    # What arrives, from the device thread and from timers; all on the loop.

    def fail(self, error: ServeError, *, cause: str | None = None) -> None:
        """End the reply with `error`. What was generated before is given first. `cause` is for the
        log, where a client is not to know it."""
        if not self._over and not self._finished:
            self._error = error
            level = logging.ERROR if error.status >= 500 else logging.INFO
            self._log_failure(level, error.code, cause or error.message)
            self._free_rows(self._choices)
            self._wake()

    @property
    def _finished(self) -> bool:
        """All choices have come to their end, though it may not have been read yet."""
        return bool(self._choices) and all(choice.finish for choice in self._choices)

    @property
    def _stage(self) -> Stage:
        """How far those choices are that are not over."""
        running = [choice for choice in self._choices if choice.finish is None]
        if any(choice.begun for choice in running):
            return Stage.BEGUN
        submitted = any(choice.submitted for choice in running)
        return Stage.SUBMITTED if submitted else Stage.QUEUED

    def _receive(self, choice: Choice, event: JobEvent) -> None:
        if isinstance(event, Started):
            self._started = True
            self._wake()
            return
        self._patience.move()
        if not choice.begun:
            choice.begun = True
            self._patience.enter(self._stage)
        match event:
            case Progress():
                return
            case Activations():
                self._home.steering.record(self.who.model, self.who.id, event)
                return
            case Failed():
                self.fail(
                    EngineFailed("the inference engine has failed; restart the server")
                    if self._home.failure
                    else ServeError(self._internal(_failing(event))),
                    cause=event.reason,
                )
            case _:
                choice.receive(event)
                if choice.finish is not None:
                    self._return_rows([choice])
        self._wake()

    def _lapse(self, error: ServeError) -> None:
        """Its time is over, in one way or another. What text there is, is an answer."""
        if self._over or self._finished:
            return
        if self._first_text is None:
            self.fail(error)
            return
        self._expired = True
        self._log_failure(logging.WARNING, "timeout", error.message)
        for choice in self._choices:
            choice.submitted = True  # or it would never be read
            choice.finish = choice.finish or "timeout"
        self._free_rows(self._choices)
        self._wake()

    def _check_silence(self) -> None:
        interval = self._home.settings.keepalive
        now = self._loop.time()
        if now >= self._last_read + interval:
            # A comment opens the stream with status 200. A prompt that does not fit is refused
            # before that, unless a download has to tell what fits.
            self._silent = bool(self._choices) or self._lease.model.state is LoadState.FETCHING
            self._last_read = now
            self._wake()
        self._keepalive = self._loop.call_at(self._last_read + interval, self._check_silence)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Reading.

    async def outputs(self) -> list[Output]:
        """What is ready, waiting for the first of it. Empty: silence for `keepalive` seconds.

        Raises:
            ServeError: the reply failed; there is nothing more to read.
        """
        while True:
            outputs = self._read()
            if outputs:
                self._last_read = self._loop.time()
                return outputs
            if self._error is not None:
                raise self._error
            if self._silent:
                self._silent = False
                return []
            self._waiter = self._loop.create_future()
            await self._waiter

    def _read(self) -> list[Output]:
        outputs: list[Output] = []
        if self._started and not self._opened:
            self._opened = True
            outputs.append(Opened())
        for choice in self._choices:
            read = choice.read()
            if not read:
                continue
            # What is told of the prompt is no text of the answer.
            if self._first_text is None and choice.tokens:
                self._first_text = self._loop.time()
            if choice.ended:
                self._free_rows([choice])
            outputs += read
        if outputs and isinstance(outputs[-1], Ended) and self._all_ended:
            outputs[-1] = msgspec.structs.replace(outputs[-1], usage=self.usage())
        return outputs

    @property
    def _all_ended(self) -> bool:
        return all(choice.ended for choice in self._choices)

    def usage(self) -> Usage:
        """Of all choices together, as far as they were read; each prompt counts once, and what of
        it was cached."""
        thoughts = sum(choice.pipeline.reasoning_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in self._choices),
            reasoning_tokens=thoughts if self._thinks else None,
            cached_tokens=sum(
                choice.cached_tokens for choice in self._choices[:: self._asked.request.choices]
            ),
            timings=self._timing.timings if self._timing and self._asked.timed else None,
        )

    # The end.

    def close(self) -> None:
        """Give back all that the reply holds: its rows, its place, its timers. Only the first call
        counts. A reply closed before it was done was left by its client."""
        if self._closed:
            return
        self._closed = True
        self._tell_read()
        self._patience.close()
        self._keepalive.cancel()
        self._free_rows(self._choices)
        self._home.forget(self)
        if self._disconnected:
            self._log_failure(logging.INFO, "disconnected", "its client went away")
        self._log_end()

    def _free_rows(self, choices: list[Choice]) -> None:
        """These jobs are to end."""
        for choice in choices:
            if self._engine is not None and choice.submitted:
                self._engine.cancel(choice.job.id)
        self._return_rows(choices)

    def _return_rows(self, choices: list[Choice]) -> None:
        """These jobs are over. Their client may read slowly, or never: others need not wait."""
        for choice in choices:
            self._lease.return_row(choice)
        if self._closed or self._over or self._finished:
            self._patience.close()
            self._lease.release()
        else:
            self._patience.enter(self._stage)

    def _log_end(self) -> None:
        now = self._loop.time()
        tokens = sum(choice.tokens for choice in self._choices)
        ttft = rate = None
        if self._first_text is not None:
            ttft = self._first_text - self._begun
            # A clock may tick in milliseconds, and an answer be shorter.
            decoding = now - self._first_text
            rate = (tokens - 1) / decoding if tokens > 1 and decoding > 0 else None
        log(
            _log,
            logging.INFO,
            "stream end",
            **self._fields(),
            finish=self._outcome(),
            prompt_tokens=self._prompt_tokens,
            tokens=tokens,
            ttft=ttft,
            tokens_per_second=rate,
            seconds=now - self._begun,
        )

    def _log_failure(self, level: int, code: str, cause: str) -> None:
        tokens = sum(choice.tokens + choice.waiting_tokens for choice in self._choices)
        log(_log, level, "stream error", **self._fields(), code=code, cause=cause, tokens=tokens)

    def _outcome(self) -> str:
        if self._error is not None:
            return self._error.code
        return "disconnected" if self._disconnected else self._choices[0].finish or "stop"

    @property
    def _disconnected(self) -> bool:
        """Of a reply that is closed: whether that was before its end."""
        return self._error is None and not (self._choices and self._all_ended)

    @property
    def generated(self) -> Generated | None:
        """What came of a reply that is closed, if it was observed."""
        timing = self._timing
        if timing is None:
            return None
        ended = self._error is None and not self._disconnected
        return Generated(
            id=self.who.id,
            model=self.who.model,
            usage=self.usage(),
            reasons=tuple(choice.reason for choice in self._choices) if ended else (),
            begun=timing.begun,
            submitted=timing.submitted,
            first_token=timing.first_token,
            last_token=timing.last_token,
            error=None if self._error is None else self._error.code,
        )

    def _fields(self) -> dict[str, Any]:
        return {
            "request": self._asked.request_id,
            "model": self.who.model,
            "user": self._asked.request.user,
        }

    def _internal(self, what: str) -> str:
        return f"the server {what}; its log says why under request id {self._asked.request_id}"


def _failing(event: Failed) -> str:
    return f"failed while generating: {event.clear}" if event.clear else "failed while generating"
