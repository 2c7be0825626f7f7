"""Random work items for the real runner, with every kind of KV cache: rows join, end, are cut back,
lose what they hold, change their groups and places, and begin with what others hold or have left.
The text of each is the greedy one that the model has for it when it is read alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.plans import Decode, Keep, RowGroup, count_fed
from tests.support.driver import Driver
from tests.support.effort import examples
from tests.support.text_engine import make_caches
from tests.support.tiny import WINDOW, write_model

LEAST = 2  # tokens that are cached or copied
MOST_ROWS = 6
ACTS = 24
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "quantized": ("wide", {"group": 32, "bits": 8}),
    "bounded": ("qwen3", {"max_size": 20}),
    "window": ("gemma3_text", {}),
    "sinks": ("gpt_oss", {}),
    "recurrent": ("qwen3_next", {}),
    "several": ("falcon_h1", {}),
}
SIZES = (1, 2, 3, 7, 12, WINDOW - 1, WINDOW, WINDOW + 1, 33, 60)
ACTIONS = ("read", "read", "together", "arrange", "steps", "steps", "leave", "rewind", "propose")


class Chances:
    """A driver, and what its rows and kept prompts hold."""

    def __init__(self, model: Any, caches: KVCacheFactory, random: Random) -> None:
        self.driver = Driver(model, caches, lookup=True)
        self._model = model
        self._caches = caches
        self._random = random
        self._ready: list[int] = []
        self._lost: list[int] = []
        self._groups: list[RowGroup] = []
        self._stale = False  # rows have left since the groups were arranged
        self._kept: dict[int, tuple[tuple[int, ...], bool]] = {}  # tokens, and whether it cuts
        self._rows = self._entries = 0

    @property
    def _decoded(self) -> list[int]:
        return [row for group in self._groups for row in group.rows]

    def _text(self, row: int) -> tuple[int, ...]:
        return (*self.driver.prompts[row], *self.driver.drawn[row])

    def _held(self, row: int) -> int:
        """The number of tokens of its text that a row's KV cache holds."""
        return len(self._text(row)) - (row in self._ready)

    def act(self) -> None:
        action = self._random.choice(ACTIONS)
        note(action)
        getattr(self, f"_{action}")()

    def finish(self) -> None:
        """Have all rows draw some tokens, and check the text of each."""
        while self._lost:
            self._read_alone(self._lost[0])
        self._arrange()
        if self._groups:
            self._steps()
        for row in self.driver.drawn:
            self._check(row)
        self.driver.release(*self._decoded, *self._ready)
        assert self.driver.is_empty

    # Texts are read.

    def _admit(self, prompt: Sequence[int]) -> int:
        self._rows += 1
        self.driver.admit(self._rows, tuple(prompt))
        return self._rows

    def _new(self, count: int) -> list[int]:
        return self._random.choices(range(5, 300), k=count)

    @property
    def _full(self) -> bool:
        return len(self._decoded) + len(self._ready) + len(self._lost) >= MOST_ROWS

    def _read(self) -> None:
        """Read a text anew, or a new one, which may begin with what there is."""
        if self._lost:
            self._read_alone(self._lost[0])
        elif not self._full:
            sources = [{"source": entry} for entry in self._kept]
            if self.driver.runner.facts.cuts:
                rows = (*self._ready, *self._decoded)
                sources += [{"from_row": row} for row in rows if self._held(row) >= LEAST]
            self._read_alone(None, self._random.choice([{}, {}, *sources]))

    def _read_alone(self, row: int | None, more: dict[str, Any] | None = None) -> None:
        more = dict(more or {})
        if row is not None:
            self._lost.remove(row)
        elif more:
            begins, begin = self._find_beginning(more)
            more |= {"begin": begin}
            row = self._admit((*begins[:begin], *self._new(self._random.randint(1, 20))))
        else:
            row = self._admit(self._new(self._random.choice(SIZES)))
        last, begin = len(self._text(row)) - 1, more.get("begin", 0)
        cuts = {self._random.randint(begin, last) for _ in range(2)} - {begin, last}
        keep = None
        if last >= LEAST and self._random.random() < 0.5:
            self._entries += 1
            keep = Keep(self._entries, last)
        spans = self.driver.span(row, cuts=sorted(cuts), keep=keep, **more)
        text = self._text(row)
        for number, span in enumerate(spans):
            if number and self._groups:  # others go on meanwhile
                self._step()
            for kept in self.driver.runner.read([span]).kept:
                self._kept[kept.entry] = text[:last], kept.cuts
        self._ready.append(row)

    def _find_beginning(self, more: dict[str, Any]) -> tuple[tuple[int, ...], int]:
        """A text, and how much of it a new one begins with."""
        if "from_row" in more:
            row = more["from_row"]
            return self._text(row), self._random.randint(LEAST, self._held(row))
        tokens, cuts = self._kept[more["source"]]
        begin = self._random.randint(LEAST, len(tokens)) if cuts else len(tokens)
        if self._random.random() < 0.5:
            more["moves"] = True
            del self._kept[more["source"]]
        return tokens, begin

    def _together(self) -> None:
        if self._full:
            return
        sizes = self._random.choices(SIZES, k=self._random.choice([2, 3]))
        sizes = [max(size, 2) for size in sizes]
        if not self.driver.runner.facts.pads:
            sizes = [sizes[0]] * len(sizes)
        rows = [self._admit(self._new(size)) for size in sizes]
        self.driver.read_together(*([row] for row in rows))
        self._ready += rows

    # Rows are decoded.

    def _arrange(self) -> None:
        """Have rows join, and groups merge; in any places, with any room."""
        random = self._random
        joining = [row for row in self._ready if random.choice([True, True, False])]
        parts = [[*group.rows] for group in self._groups] + [[row] for row in joining]
        merged: list[list[int]] = []
        for part in parts:
            places = [*range(len(merged)), None]
            place = random.choice(places)
            if place is None:
                merged.append(part)
            else:
                merged[place] += part
        self._groups = [self._make_group(random.sample(rows, len(rows))) for rows in merged]
        self._ready = [row for row in self._ready if row not in joining]
        if self._groups:
            self._run(Decode(model=0, groups=tuple(self._groups)))

    def _make_group(self, rows: Sequence[int]) -> RowGroup:
        longest = max(len(self._text(row)) for row in rows)
        slots = len(rows) + self._random.randint(0, 2)
        return RowGroup(tuple(rows), slots, longest + self._random.randint(1, 12))

    def _run(self, work: Decode) -> None:
        done, fault = self.driver.runner.decode(work)
        assert fault is None
        assert not done.broken
        for row, token in done.tokens:
            self.driver.drawn[row].append(token)
        self._stale = False

    def _steps(self) -> None:
        for _ in range(self._random.randint(1, 6)):
            self._step()

    def _step(self, proposals: tuple[tuple[int, ...], ...] = ()) -> None:
        tokens = count_fed(proposals)
        rooms = [
            max(len(self._text(row)) for row in group.rows) + tokens <= group.columns
            for group in self._groups
        ]
        groups = None
        if self._stale or not all(rooms):
            grown = [
                group if fits else RowGroup(group.rows, group.slots, group.columns + tokens + 5)
                for group, fits in zip(self._groups, rooms, strict=True)
            ]
            self._groups, groups = grown, tuple(grown)
        if self._groups:
            self._run(Decode(model=0, groups=groups, proposals=proposals))

    def _propose(self) -> None:
        """Propose tokens that hold, in part or not at all: the others are cut off again."""
        if not self.driver.runner.facts.lookup or len(self._groups) != 1:
            return
        self._step()  # no row is fresh
        proposals: list[tuple[int, ...]] = []
        for row in self._groups[0].rows:
            right = self._find_next(self._text(row), self._random.randint(2, 5))
            wrong = self._random.randint(0, len(right))
            proposal = (*right[:wrong], *(5 + token % 200 for token in right[wrong:]))
            proposals.append(self._random.choice([(), proposal, proposal]))
        if any(proposals):
            self._step(tuple(proposals))

    # Rows leave.

    def _some(self) -> list[int]:
        rows = [*self._ready, *self._decoded]
        return self._random.sample(rows, min(len(rows), 1))

    def _leave(self) -> None:
        for row in self._some():
            held, text = self._held(row), self._text(row)
            self._check(row)
            keep = None
            if held >= LEAST and self._random.random() < 0.5:
                self._entries += 1
                cuts = self.driver.runner.facts.cuts
                keep = Keep(self._entries, self._random.randint(LEAST, held) if cuts else held)
            for kept in self.driver.release(row, keep=keep):
                assert keep is not None
                self._kept[kept.entry] = text[: keep.tokens], kept.cuts
            self._take_out(row)

    def _rewind(self) -> None:
        for row in self._some():
            self.driver.runner.rewind([row])
            self._take_out(row)
            self._lost.append(row)

    def _take_out(self, row: int) -> None:
        if row in self._ready:
            self._ready.remove(row)
            return
        self._stale = True
        left: list[RowGroup] = []
        for group in self._groups:
            rows = [each for each in group.rows if each != row]
            if len(rows) < len(group.rows) and rows:
                rows = self._random.sample(rows, len(rows))
            left += [RowGroup(tuple(rows), group.slots, group.columns)] if rows else []
        self._groups = left

    # What is right.

    def _likeliest(self, text: Sequence[int]) -> list[int]:
        """The likeliest token behind each beginning of the text, which is read alone."""
        logits = self._model(mx.array(list(text))[None], cache=self._caches.make().layers)
        found: list[int] = logits[0].argmax(-1).tolist()
        return found

    def _find_next(self, text: Sequence[int], count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            found.append(self._likeliest([*text, *found])[-1])
        return found

    def _check(self, row: int) -> None:
        if drawn := self.driver.drawn[row]:
            first = len(self.driver.prompts[row]) - 1
            assert drawn == self._likeliest(self._text(row)[:-1])[first:]


@pytest.fixture(scope="module")
def makers(models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each kind, the model and what makes its KV caches."""
    folder = tmp_path_factory.mktemp("wide")
    wide, _ = load_model(write_model(folder, "qwen3", head_dim=32))
    found = {}
    for kind, (family, more) in KINDS.items():
        model = wide if family == "wide" else models(family)
        found[kind] = model, make_caches(model, **more)
    return found


# Not shrunk: a script of other numbers is another one altogether.
@pytest.mark.slow
@settings(max_examples=examples(60, usual=8), phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 30), kind=st.sampled_from([*KINDS]))
def test_texts_are_right_whatever_rows_do(makers: dict[str, Any], seed: int, kind: str) -> None:
    model, caches = makers[kind]
    chances = Chances(model, caches, Random(seed))
    for _ in range(ACTS):
        chances.act()
    chances.finish()
