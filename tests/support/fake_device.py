"""A device without a model: how long work items take there, which tokens are drawn, and what fails.

`FakeDevice` draws tokens that follow from a row and its place, as seeded sampling does, and fails
nothing. Tests and the simulator make others of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import EmbedFacts, Fault, RowFailure, TextFacts
from mlxsrv.engine.plans import Decode, WorkItem

FACTS = TextFacts(
    batched=True,
    cuts=True,
    pads=True,
    padding=1 << 20,
    vocabulary=300,
    prompt_cache_bytes=1 << 20,
    kv_costs=(KVCost(64),),
)


class Pass(NamedTuple):
    """One pass of the model.

    Attributes:
        rows: how many there are.
        tokens: that each of them is fed, padding included.
        held: tokens that the KV cache of a row holds before, padding included; of rows in several
            groups, the mean.
    """

    rows: int
    tokens: int
    held: int


class FakeDevice:
    """Everything goes well, and each pass takes a millisecond.

    Args:
        text: the facts of each model that is loaded; None for encoders.
        embed: the same of the embedding side.
        load_slices: slices that a load or an attachment takes.
    """

    def __init__(
        self,
        text: TextFacts | None = FACTS,
        embed: EmbedFacts | None = None,
        load_slices: int = 1,
    ) -> None:
        self.text = text
        self.embed = EmbedFacts(slices=text is not None) if embed is None else embed
        self.load_slices = load_slices

    def time(self, work: WorkItem, passes: Sequence[Pass]) -> float:
        """Seconds that the work takes."""
        return 0.001 * len(passes)

    def fail(self, work: WorkItem) -> Fault | None:
        """Why the work fails, if it does."""
        return None

    def tells(self, work: Decode) -> bool:
        """Whether a step that fails has told the tokens of the step before."""
        return False

    def draw(self, job: Job, place: int) -> int:
        """The token at this place of the answer."""
        return 100 + (job.id * 31 + place * 7) % 151

    def breaks(self, job: Job, place: int) -> bool:
        """Whether the model computes NaN for this token of the answer; -1: for the prompt, as its
        scores show."""
        return False

    def stop(self, job: Job, place: int) -> RowFailure | None:
        """Why the row's constraint cannot go on behind this token, if it cannot."""
        return None

    def refuse(self, job: Job) -> RowFailure | None:
        """Why the job cannot be taken, if it cannot."""
        return None

    def refuse_load(self, path: str) -> str | None:
        """Why the model or the SAE in this file cannot be used, if it cannot."""
        return None

    def accept(self, job: Job, place: int, proposals: int) -> int:
        """Return how many proposals hold."""
        return proposals // 2

    def binds(self, job: Job, place: int) -> bool:
        """Whether the row's constraint binds the token at this place."""
        return False

    def keeps(self, entry: int) -> bool:
        """Whether the KV cache can be kept as this entry."""
        return True
