"""The steps of one model's rows, without the model: which tokens are told, and which proposals
hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxsrv.engine.events import Activations, Likelihood
from mlxsrv.engine.outcomes import Decoded, Fault, RowFailure, TextFacts
from mlxsrv.engine.plans import Decode, ReadDraft
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.prompt_index import Tokens, common_prefix
from mlxsrv.engine.scheduling.speculation_controller import MOST_UNREAD
from tests.support.fake_decoders import FakeDecoder
from tests.support.fake_device import FakeDevice
from tests.support.fake_rows import FakeRow, require


class FakeSteps:
    """Draws the tokens of rows, and checks what is proposed to them.

    Args:
        facts: of the model.
        device: what comes of work items.

    Attributes:
        watched: the activations of each token are looked at.
    """

    def __init__(self, facts: TextFacts, device: FakeDevice) -> None:
        self.watched = False
        self._facts = facts
        self._device = device
        self._draft: tuple[int, Tokens] | None = None  # the row that it follows, and what it read
        self._draft_room = 0  # tokens that its KV cache has had at most

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft's KV cache."""
        room = -(-self._draft_room // STEP) * STEP
        return sum(cost.bytes(room) for cost in self._facts.draft_costs)

    def run(self, work: Decode, decoder: FakeDecoder) -> Decoded:
        """One step of a decoder, or a round of proposals."""
        if work.proposals:
            return self._run_round(decoder.rows, work)
        if work.guesses:
            return self._run_guesses(decoder, work)
        return self._step(decoder)

    def forget_draft(self) -> None:
        self._draft, self._draft_room = None, 0

    def _step(self, decoder: FakeDecoder) -> Decoded:
        rows = decoder.rows
        activations = tuple(Activations(*place, ()) for place in decoder.looked)
        tokens: list[tuple[int, int]] = []
        broken: list[int] = []
        failures: list[RowFailure] = []
        for row in rows:
            if row.fresh:
                row.fresh = False
            elif self._device.breaks(row.job, len(row.drawn)):
                row.over = True
                broken.append(row.id)
            else:
                tokens.append((row.id, self._tell(row, failures)))
        decoder.looked = [(row.id, row.held - 1) for row in rows] if self.watched else []
        return Decoded(
            tokens=tuple(tokens),
            likelihoods=_find_likelihoods(rows, tokens),
            broken=tuple(broken),
            failures=tuple(failures),
            bound=self._find_bound(rows),
            activations=activations,
        )

    def _tell(self, row: FakeRow, failures: list[RowFailure]) -> int:
        """Give the row its next token."""
        place = len(row.drawn)
        token = self._device.draw(row.job, place)
        row.drawn.append(token)
        row.over |= token in row.job.end_tokens or len(row.drawn) >= row.job.max_tokens
        if (failure := self._device.stop(row.job, place)) is not None:
            failures.append(failure)
            row.over = True
        return token

    def _find_bound(self, rows: Iterable[FakeRow]) -> tuple[int, ...]:
        """Rows whose constraint binds their next token: not the one that is drawn already."""
        return tuple(row.id for row in rows if self._device.binds(row.job, len(row.drawn)))

    # A draft model.

    def _run_round(self, rows: Sequence[FakeRow], work: Decode) -> Decoded:
        [count], [row] = work.proposals, rows
        require(self._facts.drafts, "there is no draft model")
        self._require_proposable(row, count)
        require(count > 0, "no proposals")
        require(self._draft is not None and self._draft[0] == row.id, "the draft follows another")
        assert self._draft is not None
        read = self._draft[1]
        require(common_prefix(read, row.text) == read.size, "the draft has read another text")
        require(row.length - read.size <= MOST_UNREAD, "the draft lacks much of the text")
        length = row.length
        accepted = {row.id: self._device.accept(row.job, len(row.drawn), count)}
        done = self._check(rows, accepted)
        if row.id not in done.broken:
            self._draft = row.id, row.text[: min(length + count, row.length)]
            self._draft_room = max(self._draft_room, length + count)
        return done

    def _run_guesses(self, decoder: FakeDecoder, work: Decode) -> Decoded:
        rows = decoder.rows
        require(self._facts.lookup, "nothing is looked up in this model")
        require(not work.solo, "proposals to a row in the solo decoder")
        require(
            self._facts.shares or len(decoder.groups) == 1, "proposals to rows in several passes"
        )
        require(len(work.guesses) == len(rows), "guesses for other rows")
        require(any(work.guesses), "no guesses")
        accepted: dict[int, int] = {}
        for row, guess in zip(rows, work.guesses, strict=True):
            require(len(guess) != 1, "a guess of an input, and no proposal")
            self._require_proposable(row, max(len(guess) - 1, 0))
            tokens = [self._device.draw(row.job, len(row.drawn) + i) for i in range(len(guess))]
            if guess and guess[0] == tokens[0]:
                pairs = zip(guess[1:], tokens[1:], strict=True)
                same = [proposed == drawn for proposed, drawn in pairs]
                accepted[row.id] = (*same, False).index(False)
        if not accepted:
            return self._step(decoder)
        return self._check(rows, accepted)

    def _require_proposable(self, row: FakeRow, count: int) -> None:
        """Check that so many tokens may be proposed to a row, or to others in the same pass."""
        require(not row.fresh, "proposals to a fresh row")
        require(not self.watched, "proposals while each token is watched")
        require(row.job.logprobs is None and not row.job.sampling.changes_logits, "each token asks")
        require(not self._device.binds(row.job, len(row.drawn)), "the constraint binds a token")
        require(not count or len(row.drawn) + 1 + count <= row.job.max_tokens, count, "proposals")

    def _check(self, rows: Sequence[FakeRow], accepted: dict[int, int]) -> Decoded:
        """A pass that checks proposals, so many of which hold."""
        tokens: list[tuple[int, int]] = []
        broken: list[int] = []
        failures: list[RowFailure] = []
        following: dict[int, int] = {}
        for row in rows:
            if self._device.breaks(row.job, len(row.drawn)):
                row.over = True
                broken.append(row.id)
                continue
            for left in range(accepted.get(row.id, 0), -1, -1):
                failed = len(failures)
                tokens.append((row.id, self._tell(row, failures)))
                if len(failures) > failed or self._find_bound([row]):
                    break
                if left == 0:
                    following[row.id] = self._device.draw(row.job, len(row.drawn))
        return Decoded(
            tokens=tuple(tokens),
            broken=tuple(broken),
            failures=tuple(failures),
            bound=self._find_bound(rows),
            following=following,
            accepted={row_id: n for row_id, n in accepted.items() if row_id not in broken},
        )

    def read_draft(self, work: ReadDraft, row: FakeRow, fault: Fault | None) -> None:
        require(self._facts.drafts, "there is no draft model")
        text = row.text
        known = 0 if self._draft is None else common_prefix(self._draft[1], text)
        require(work.begin <= known, "the draft has", known, "tokens of the text")
        require(work.tokens > 0, "the draft reads nothing")
        require(work.begin + work.tokens <= row.length, "the draft reads beyond the text")
        self._draft = None if fault is not None else (row.id, text[: work.begin + work.tokens])
        read = work.begin + work.tokens
        room = max(self._draft_room, read) if work.begin else read
        self._draft_room = room if fault is None else 0


def _find_likelihoods(
    rows: Iterable[FakeRow], tokens: Sequence[tuple[int, int]]
) -> dict[int, Likelihood]:
    reported = {row_id for row_id, _ in tokens}
    asking = (row.id for row in rows if row.id in reported and row.job.logprobs is not None)
    return dict.fromkeys(asking, Likelihood(-1.0))
