"""The works of a round for one model: its rows, and its texts to embed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlxsrv.engine.events import Event, Failed, Progress
from mlxsrv.engine.orders import Embed, Job, Load
from mlxsrv.engine.outcomes import EmbedFacts, Outcome, TextFacts
from mlxsrv.engine.plans import AdmitTexts, EmbedSlice, ReleaseTexts, Work
from mlxsrv.engine.scheduling.embed_schedule import EmbedSchedule
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule

_NO_TEXT = "this model does not generate text"


class ModelSchedule:
    """One model that is loaded.

    Args:
        number: the model's.
        client: the number of the client that it belongs to.
        order: the load's.
        text: of the model; None for an encoder.
        embed: of the model.
    """

    def __init__(
        self,
        number: int,
        client: int,
        order: Load,
        text: TextFacts | None,
        embed: EmbedFacts,
    ) -> None:
        self.number = number
        self.client = client
        self.name = order.model
        pace = Pace(order.prefill_chunk, order.max_gap)
        self._embed = EmbedSchedule(number, embed, pace)
        self._text: TextSchedule | None = None
        if text is not None:
            self._text = TextSchedule(
                number, client=client, max_rows=order.max_rows, pace=pace, facts=text
            )
        self._texts_are_next = False

    @property
    def text(self) -> TextSchedule:
        """Raises ValueError for an encoder."""
        if self._text is None:
            raise ValueError(_NO_TEXT)
        return self._text

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        return self._text is not None

    @property
    def streaming(self) -> bool:
        """Whether rows are being decoded."""
        return self._text is not None and self._text.streaming

    @property
    def idle(self) -> bool:
        return self._embed.idle and (self._text is None or self._text.idle)

    def statistics(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        texts = self._embed.statistics()
        return texts | ({"tokens": 0} if self._text is None else self._text.statistics())

    # Jobs.

    def submit(self, order: Job | Embed) -> None:
        """Take a job. Raises ValueError or OverflowError if the model cannot do it."""
        if isinstance(order, Embed):
            self._embed.submit(order)
        else:
            self.text.submit(order)

    def cancel(self, job_ids: Collection[int]) -> None:
        """Forget these jobs; ids of other models' jobs are ignored."""
        if self._text is not None:
            self._text.cancel(job_ids)
        self._embed.cancel(job_ids)

    def fail(self, reason: str) -> list[Event]:
        """End all jobs, since the model goes."""
        texts = [Failed(job, reason) for job in self._embed.fail()]
        return [*(() if self._text is None else self._text.fail(reason)), *texts]

    # Planning.

    def plan(self, *, beside: bool) -> list[Work]:
        """The works of a round; `beside`: other models have streams."""
        works: list[Work] = [*self._embed.take_changes()]
        text = self._text
        streaming = self.streaming
        if text is not None and not text.idle:
            works += text.plan_rows()
            works += text.plan_steps()
        prompts, texts = self._choose(beside=beside)
        if text is not None and prompts and (work := text.plan_slice(beside=beside)) is not None:
            works.append(work)
        if texts and (slice := self._embed.plan(decoding=streaming, beside=beside)) is not None:
            works.append(slice)
        return works

    def _choose(self, *, beside: bool) -> tuple[bool, bool]:
        """Whether a slice of prompts is read, and one of texts: both. But while there are streams
        they take turns, since a slice of each may fill the streams' gap."""
        both = self._text is not None and self._text.pending and self._embed.pending
        if not both or not (beside or self.streaming):
            return True, True
        self._texts_are_next = not self._texts_are_next
        return not self._texts_are_next, self._texts_are_next

    def settle(self, work: Work, outcome: Outcome) -> Sequence[Event]:
        """Learn what came of a work. Returns what the client is told."""
        if isinstance(work, (AdmitTexts, EmbedSlice, ReleaseTexts)):
            events = self._embed.settle(work, outcome)
            return [*events, *(Progress(job) for job in self._embed.progress())]
        self.text.settle(work, outcome)
        return self.text.take_events()
