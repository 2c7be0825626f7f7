"""`python -m tests.support.faulty` is the real server, but its model fails at certain tokens, and
its threads sleep at certain texts.

A prompt that ends in one of them meets the fault in a decode step, beside everybody else's rows;
the plain tiny models never write one. One that has SLUGGISH in it is read slowly, on any machine.
What is HELD goes on when the test says so: each signal RELEASE lets one of them go.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mlxsrv.cli import main
from mlxsrv.engine.outcomes import LoadStep
from mlxsrv.engine.plans import LoadSlice
from mlxsrv.engine.runner import Runner
from mlxsrv.prompts import sandbox
from mlxsrv.prompts.templates.messages import Chat
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support import sleepy_sandbox
from tests.support.tiny import MARKER_TOKENS, SPECIAL_TOKENS, VOCABULARY

RAISES, NAN, MEMORY, DEADLY = range(VOCABULARY - len(MARKER_TOKENS), VOCABULARY)
_SPECIAL = VOCABULARY - len(MARKER_TOKENS) - len(SPECIAL_TOKENS)
HELD = _SPECIAL + SPECIAL_TOKENS.index("<|im_start|>")
RELEASE = signal.SIGUSR1
HELD_MODEL = "held"
"""The load of a model of this name is held."""
SLOW_MODEL = "slow"
"""Each slice of the load of a model of this name takes at least SLOW_SECONDS."""
SLOW_SECONDS = 0.5
SLUGGISH = _SPECIAL - 1
SLUGGISH_SECONDS = 0.1
"""The time that each slice of a prompt takes if it has such a token."""
PANIC = "panic, please"
ASLEEP = sleepy_sandbox.ASLEEP
"""A thread is at such a chat for hours, and needs no processor for it. When it is, the text is on
stderr."""
_LONGEST = 100.0
"""Seconds after which what is held goes on in any case: the test has failed long before."""


class PanicException(BaseException):
    """As Rust's panics come out of pyo3."""


class Gate:
    """Holds threads. Each signal lets one go, also one that comes later."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)
        # A library may have started threads before, which do not block it. One that gets it would
        # end the process, but for this handler, which runs on the main thread as soon as it can.
        signal.signal(RELEASE, lambda *_: self._open.release())
        # Blocked here, and so in all threads that are started from here on: the one below gets it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {RELEASE})
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self) -> None:
        self._open.acquire(timeout=_LONGEST)

    def _listen(self) -> None:
        while True:
            signal.sigwait({RELEASE})
            self._open.release()


def _fail_at_tokens(model_class: Any, gate: Gate) -> None:
    """Have the class fail. On the device thread, which is to be the first to import MLX."""
    import mlx.core as mx

    real: Callable[..., Any] = model_class.__call__

    def call(self: Any, tokens: mx.array, cache: Any = None) -> Any:
        last = cast(list[int], tokens[:, -1].tolist()) if tokens.shape[1] == 1 else []
        if tokens.shape[1] > 1 and SLUGGISH in cast(list[int], tokens[0].tolist()):
            time.sleep(SLUGGISH_SECONDS)
        if RAISES in last:
            raise RuntimeError("this token is refused")
        if MEMORY in last:
            raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes: too many")
        if DEADLY in last:
            raise SystemExit("killed")
        if HELD in last:
            gate.wait()
        logits = real(self, tokens, cache=cache)
        return mx.where((tokens == NAN)[..., None], float("nan"), logits) if NAN in last else logits

    model_class.__call__ = call


def plug() -> None:
    load, render = Runner._load, Tokenizer.render
    gate, names = Gate(), dict[int, str]()

    def faulty_load(self: Runner, work: LoadSlice) -> LoadStep:
        from mlx_lm.models import qwen3

        if qwen3.Model.__call__.__name__ != "call":
            _fail_at_tokens(qwen3.Model, gate)
        if work.order is not None:  # with the first slice, which alone has the name
            names[work.model] = work.order.model
            if names[work.model] == HELD_MODEL:
                gate.wait()
        if names[work.model] == SLOW_MODEL:
            time.sleep(SLOW_SECONDS)
        return load(self, work)

    def faulty_render(self: Tokenizer, chat: Chat, *args: Any, **named: Any) -> Any:
        if chat.messages[-1]["content"] == PANIC:
            raise PanicException("the tokenizer panicked")
        if chat.messages[-1]["content"] == ASLEEP:
            print(ASLEEP, file=sys.stderr, flush=True)
            time.sleep(3600)
        return render(self, chat, *args, **named)

    sandbox._PROCESS, sandbox._PATIENCE = Path(sleepy_sandbox.__file__), 3600.0
    Runner._load = faulty_load  # type: ignore[method-assign]
    Tokenizer.render = faulty_render  # type: ignore[method-assign]


if __name__ == "__main__":
    plug()
    main()
