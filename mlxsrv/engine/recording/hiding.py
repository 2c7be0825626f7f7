"""Hides what a record does not tell: texts, and where files are.

Token ids are replaced by pseudonyms. That of a token is a keyed digest of the text up to and with
it: two texts have the same pseudonyms as far as they are the same, which is all that the scheduler
looks at, and no further. So nothing can be learnt from how often a pseudonym comes, and guesses
cannot be tried without the key, which is kept nowhere.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence

import msgspec

from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Embed,
    ImportModelCode,
    Job,
    Load,
    Order,
    Question,
    Submit,
)
from mlxsrv.engine.outcomes import Decoded
from mlxsrv.engine.plans import (
    Admit,
    AnswerQuestion,
    AttachSlice,
    Decode,
    LoadSlice,
    Release,
    Reset,
    UnloadModel,
    Work,
)
from mlxsrv.generation.parameters import Bans, Grammar, Sampling

# A path from the root or from home, and neither "and/or/but" nor an address of the web.
_PATH = re.compile(r"""(?<![\w./])~?(?:/[^\s/'":;,()]+){2,}/?""")


class PathNames:
    """Names of files: the last part of the path, with a number if another has the same."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by path
        self._paths: set[str] = set()  # the names that are taken

    def name(self, path: str) -> str:
        if path not in self._names:
            last = os.path.basename(path.rstrip("/")) or "file"
            name, number = last, 1
            while name in self._paths:
                number += 1
                name = f"{last} ({number})"
            self._names[path] = name
            self._paths.add(name)
        return self._names[path]

    def clean(self, text: str) -> str:
        """A message without folders: those of files that are known, and what looks like one."""
        for path in sorted(self._names, key=len, reverse=True):
            text = text.replace(path, self._names[path])
        text = text.replace(os.path.expanduser("~"), "~")
        return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)

    def hide(self, order: Order) -> Order:
        """The order with names in place of paths."""
        return Ask(order.number, self._hide(order.question)) if isinstance(order, Ask) else order

    def hide_work(self, work: Work) -> Work:
        """The work with names in place of paths."""
        match work:
            case LoadSlice(order=order) | AttachSlice(order=order) if order is not None:
                return msgspec.structs.replace(work, order=self._hide(order))
            case AnswerQuestion(question=question):
                return msgspec.structs.replace(work, question=self._hide(question))
        return work

    def _hide(self, question: Question | Load | Attach) -> Question | Load | Attach:
        replace = msgspec.structs.replace
        match question:
            case Load():
                return replace(
                    question,
                    path=self.name(question.path),
                    adapter=None if question.adapter is None else self.name(question.adapter),
                    draft=None if question.draft is None else self.name(question.draft),
                    prompt_cache_dir=question.prompt_cache_dir
                    and self.name(question.prompt_cache_dir),
                    vectors=tuple((name, self.name(path)) for name, path in question.vectors),
                )
            case Attach() | ImportModelCode():
                return replace(question, path=self.name(question.path))
        return question


class _Text:
    """One text, as far as it is known."""

    __slots__ = ("_digest", "ends")

    def __init__(self, key: bytes, ends: frozenset[int]) -> None:
        self._digest = hashlib.blake2b(key=key, digest_size=4)
        self.ends = ends

    def copy(self, ends: frozenset[int]) -> _Text:
        text = _Text.__new__(_Text)
        text._digest, text.ends = self._digest.copy(), ends
        return text

    def add(self, token: int) -> int:
        """The pseudonym of the next token."""
        self._digest.update(token.to_bytes(8, "little", signed=True))
        return int.from_bytes(self._digest.copy().digest(), "little")

    def peek(self, token: int) -> int:
        """The pseudonym that the next token would have."""
        return self.copy(self.ends).add(token)


class Pseudonyms:
    """Pseudonyms of the tokens of all rows.

    A row's text is known from the order with its job until the row is released, or its model goes.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._coming: dict[tuple[int, int], _Text] = {}  # by client and job, of this round
        self._rows: dict[int, dict[int, tuple[int, _Text]]] = {}  # by model and job; with client
        # Choices of one request have the same prompt, the same object.
        self._last: tuple[tuple[int, ...], tuple[int, ...], _Text] | None = None

    def hide(self, client: int, order: Order) -> Order:
        """The order with pseudonyms, and no numbers where only the number of tokens matters."""
        match order:
            case Submit(job):
                prompt, text = self._hide_prompt(job)
                self._coming[client, job.id] = text
                return msgspec.structs.replace(order, job=_hide_job(job, prompt))
            case Embed(texts=texts):
                return msgspec.structs.replace(order, texts=tuple(map(_blank, texts)))
        return order

    def _hide_prompt(self, job: Job) -> tuple[tuple[int, ...], _Text]:
        if self._last is None or self._last[0] is not job.prompt:
            text = _Text(self._key, frozenset())
            self._last = job.prompt, tuple(map(text.add, job.prompt)), text
        _, prompt, text = self._last
        return prompt, text.copy(job.end_tokens)

    def follow(self, works: Iterable[Work]) -> None:
        """Note which rows come and go with a plan, the first after the orders."""
        for work in works:
            match work:
                case Admit():
                    rows = self._rows.setdefault(work.model, {})
                    for job in work.jobs:
                        rows[job.id] = work.client, self._coming[work.client, job.id]
                case UnloadModel() | Reset():
                    self._rows.pop(work.model, None)
        self._coming.clear()
        self._last = None

    def hide_guesses(self, work: Work) -> Work:
        """The work without the tokens that are guessed in it. Pseudonyms do not show where a text
        repeats itself, so no replay could find these tokens again."""
        if not isinstance(work, Decode) or not work.guesses:
            return work
        return msgspec.structs.replace(work, guesses=tuple(map(_blank, work.guesses)))

    def forget(self, work: Release) -> None:
        """Note that rows are released."""
        for leave in work.rows:
            self._rows.get(work.model, {}).pop(leave.row, None)

    def hide_drawn(
        self, work: Decode, done: Decoded
    ) -> tuple[Decoded, tuple[tuple[int, int, int], ...]]:
        """The outcome with pseudonyms; and (client, job, pseudonym) of tokens that end their
        rows."""
        rows = self._rows.get(work.model, {})
        ends: list[tuple[int, int, int]] = []
        tokens: list[tuple[int, int]] = []
        for job, token in done.tokens:
            if job not in rows:  # the scheduler does not know it either
                continue
            client, text = rows[job]
            pseudonym = text.add(token)
            tokens.append((job, pseudonym))
            if token in text.ends:
                ends.append((client, job, pseudonym))
        following: dict[int, int] = {}
        for job, token in done.following.items():
            if job not in rows:
                continue
            client, text = rows[job]
            following[job] = text.peek(token)
            if token in text.ends:
                ends.append((client, job, following[job]))
        return msgspec.structs.replace(done, tokens=tuple(tokens), following=following), tuple(ends)


def _hide_job(job: Job, prompt: tuple[int, ...]) -> Job:
    sampling = msgspec.structs.replace(job.sampling, logit_bias=_hide_biases(job.sampling))
    bans = None if job.bans is None else _hide_bans(job.bans)
    return msgspec.structs.replace(
        job,
        prompt=prompt,
        end_tokens=frozenset[int](),
        sampling=sampling,
        bans=bans,
        grammar=None if job.grammar is None else Grammar(""),
    )


def _hide_biases(sampling: Sampling) -> tuple[tuple[int, float], ...]:
    return tuple((0, bias) for _, bias in sampling.logit_bias)


def _hide_bans(bans: Bans) -> Bans:
    words = tuple(map(_blank, bans.words))
    return Bans(bans.min_tokens, allowed=_blank(bans.allowed), words=words)


def _blank(tokens: Sequence[int]) -> tuple[int, ...]:
    """As many zeros."""
    return (0,) * len(tokens)
