"""Speculative decoding: tokens are proposed, and the model verifies several of them in one pass.

A pass over a few tokens costs a large model little more than a pass over one, so each proposal
that holds saves a pass (Leviathan et al. 2023, Chen et al. 2023). A small model proposes them to a
row that is alone; or they are looked up in the texts of all rows, and come with the plan.

- Proposals do not change what is drawn. The model's logits at each position go through the row's
  own sampler with the key of that position, and a proposal holds if it is the token so drawn. The
  text is that of plain decoding, greedy or not.
- One pass verifies the proposals of all rows. It is as long as the most proposals of a row; what a
  row has less is padding, which is cut off with the proposals that do not hold.
- The draft draws with the same random numbers. Where both models give similar logits, they draw the
  same tokens at any temperature; its likeliest token would miss whatever the sampler does not
  favour.
- Masks, bans, penalties and log-probabilities are computed for one token at a time, so a row that
  needs them is given plain steps only. A dormant constraint has no mask; the step ends where it
  wakes up.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import Layers
from mlxsrv.engine.execution.step_results import launch
from mlxsrv.engine.execution.sub_batches import Pass
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.sampling.sampler import Sampler

_MOST_PADDING = 128  # entries by which families pad the vocabularies of their sizes differently


class Draft:
    """The small model, and its KV cache of the row that it follows.

    Args:
        model: the small model.
        vocabulary: entries of the large model's logits, all of which may be proposed.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._last = count_vocabulary(model) - 1
        self.forget()

    def forget(self) -> None:
        """Drop the KV cache; after an error it may hold half of a pass."""
        self._cache: Layers = make_prompt_cache(self._model)
        self._row: LiveRow | None = None
        self._read = 0  # tokens of the row's text that the cache holds

    def follow(self, row: LiveRow, begin: int) -> None:
        """Turn to `row`, whose first `begin` tokens were read."""
        if begin:
            self._cut(self._read - begin)
        else:
            self.forget()  # with its memory, which a cut keeps
        self._row = row

    def read_on(self, tokens: int) -> None:
        """Read so many tokens more of the row's text, and wait for it."""
        part = self._unread(tokens)
        if part:
            self._feed(mx.array(part, dtype=mx.uint32))
            mx.eval([layer.state for layer in self._cache])
            self._read += len(part)

    def propose(self, rows: Sequence[LiveRow], inputs: mx.array, counts: Sequence[int]) -> mx.array:
        """Launch the drawing of tokens `(rows, most)` to follow the rows' texts and their `inputs`
        `(rows,)`. It can be asked for those of one row only.

        What is not read of the text is read on the way. The KV cache then holds all tokens but the
        last one; `cut_to_text` cuts it back to the row's text.
        """
        [row], [count] = rows, counts
        if row is not self._row:
            self.follow(row, 0)
        unread = self._unread()
        fed = mx.concatenate([mx.array(unread, dtype=mx.uint32), inputs]) if unread else inputs
        sampler = Sampler([row.job.sampling], [len(row.drawn) + 1], ahead=count)
        proposals: list[mx.array] = []
        for _ in range(count):
            logits = self._feed(fed)[:, -1, : self._vocabulary]
            fed = sampler(logits).astype(mx.uint32)
            launch(fed)
            proposals.append(fed)
        self._read += len(unread) + count
        return mx.concatenate(proposals)[None]

    def cut_to_text(self) -> None:
        """Cut the KV cache back to the row's text, which has grown by the accepted tokens."""
        assert self._row is not None
        self._cut(self._read - self._row.length)

    def _feed(self, tokens: mx.array) -> mx.array:
        """Logits `(1, n, vocabulary)` behind each of the tokens `(n,)`.

        MLX does not check that a token has an embedding, and the large model's vocabulary may be
        padded further.
        """
        tokens = mx.minimum(tokens, self._last)
        logits: mx.array = self._model(tokens[None], cache=self._cache)
        return logits

    def _unread(self, most: int | None = None) -> list[int]:
        """The tokens of the row's text that are not read, or the first of them."""
        assert self._row is not None
        prompt, drawn = self._row.job.prompt, self._row.drawn
        end = self._row.length if most is None else self._read + most
        behind = max(self._read - len(prompt), 0)
        return [*prompt[self._read : end], *drawn[behind : max(end - len(prompt), 0)]]

    def _cut(self, tokens: int) -> None:
        if tokens > 0:
            trim_prompt_cache(self._cache, tokens)
            self._read -= tokens


class Verified(NamedTuple):
    """The result of a speculative step for one row."""

    seen: list[int]  # the row's input and the proposals that held
    following: int  # drawn behind them
    logits: mx.array  # (proposals + 1, vocabulary), behind the input and each proposal
    broken: bool  # the model computed NaN, so a token means nothing


def verify(
    model: Any, whole: Pass, inputs: mx.array, proposals: mx.array, counts: Sequence[int]
) -> list[Verified]:
    """Verify tokens that are proposed to rows. The KV caches then hold all of them; they are to be
    cut back to the rows' texts.

    Args:
        inputs: `(rows,)`.
        proposals: `(rows, most)`.
        counts: how many are proposed to each row; the others are padding.
    """
    rows = whole.rows
    fed = mx.concatenate([inputs[:, None], proposals], axis=1)
    logits = whole.find_logits(model, fed)
    places = [(i, place) for i, count in enumerate(counts) for place in range(count + 1)]
    sampler = Sampler(
        [rows[i].job.sampling for i, _ in places],
        [len(rows[i].drawn) + 1 + place for i, place in places],
        ahead=1,
    )
    drawn, highest = sampler.draw(_take_places(logits, places))
    mx.eval(drawn, highest)
    tokens = cast(list[list[int]], fed.tolist())
    expected = cast(list[int], drawn.tolist())
    logit = cast(list[list[float]], highest.tolist())
    found: list[Verified] = []
    begin = 0
    for i, count in enumerate(counts):
        end = begin + count + 1
        accepted = _count_equal(tokens[i][1 : count + 1], expected[begin:end])
        broken = not all(isfinite(value) for [value] in logit[begin : begin + accepted + 1])
        found.append(
            Verified(tokens[i][: accepted + 1], expected[begin + accepted], logits[i], broken)
        )
        begin = end
    return found


def _take_places(logits: mx.array, places: Sequence[tuple[int, int]]) -> mx.array:
    """Select logits `(places, vocabulary)` from `(rows, n, vocabulary)`; a place is a pair of a row
    and one of its n tokens."""
    rows, width, vocabulary = logits.shape
    flat = logits.reshape(-1, vocabulary)
    if len(places) == rows * width:
        return flat
    return flat[mx.array([i * width + place for i, place in places])]


def check_draft(model: Any, draft: Any) -> None:
    """Check that the logits of both models are of one vocabulary.

    Families pad the vocabularies of their sizes differently, so a few entries more or less are
    ignored.

    Raises:
        ValueError: the vocabularies differ.
    """
    size, other = count_vocabulary(model), count_vocabulary(draft)
    if abs(size - other) > min(_MOST_PADDING, size // 100):
        raise ValueError(
            f"the draft model's vocabulary has {other} tokens, the model's {size}: "
            "a draft model must have the model's own vocabulary"
        )


def find_obstacle(caches: KVCacheFactory, draft: Any | None = None) -> str | None:
    """Why tokens cannot be proposed to rows with such KV caches, or not by this draft model; None
    if they can. Proposals that do not hold must be cut from the KV caches of both."""
    if not caches.cuts:
        return "the model's cache cannot be cut back, so no tokens can be proposed"
    if draft is not None and not KVCacheFactory(draft).cuts:
        return "the draft model's cache cannot be cut back, so it cannot be used"
    return None


def count_vocabulary(model: Any) -> int:
    """Entries of the logits. Nothing is computed: only a shape is looked at."""
    return int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])


def _count_equal(proposed: Sequence[int], drawn: Sequence[int]) -> int:
    """Return the number of tokens that are the same before the first that is not."""
    pairs = zip(proposed, drawn, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposed))
