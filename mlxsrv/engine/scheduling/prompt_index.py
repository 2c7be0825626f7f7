"""The prompt index: which texts have KV caches that later prompts may begin with, and which of
these are dropped.

An entry stands for a KV cache that the runner keeps, under the tokens that it has seen. A lookup
finds what shares the longest prefix with a prompt: an entry, or what a running row holds. The
caches of attention layers can be cut back to any length, so any shared prefix is of use, and what a
row holds need not be cached beside it. Those of recurrent layers and full sliding windows cannot:
such an entry is of use only if the prompt begins with all of it. So entries are made where later
prompts are likely to go on: see `checkpoints`. Steering changes what a KV cache holds, so an entry
is of use only to prompts that are steered alike.

A new entry replaces those that it can be cut back to, and answers that a client did not take up. Of
the others, that of least *worth* is evicted where there is no room for all. It is worth the tokens
that it will save reading, by the bytes that it takes. Its last uses tell: each counts with the
tokens that it saved, and half a use of all its tokens is taken for granted. So:

- What is used again and again outlasts a flood of prompts that come once.
- Of many prompts that begin with one system prompt, one is found for it, and stays: it saves
  tokens again and again. The others are worth what is asked of their ends.
- A prompt that goes on from another takes over its uses, for a chat goes on from its last turn. The
  other one is worth as much as is read on from it after that: nothing in a chat that only grows.

What is used no more has to be evicted in the end. So worth is added to a floor, which rises to the
worth of each entry that is evicted; an entry has the floor of the moment when it was cached or last
used. This is GreedyDual-Size-Frequency (Cherkasova, 1998), with prompts' beginnings.

Prefixes of less than `LEAST` tokens are not worth a copy. Tokens are kept as arrays, and a common
prefix is found by one comparison of two: 0.15 ms for prompts of a hundred thousand tokens. mlx-lm's
trie of nested dicts takes 12 ms to find such a prompt and 61 ms to store it, and takes 22 MB.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

import msgspec
import numpy as np

from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import Keep
from mlxsrv.generation.parameters import Steering

Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Token ids."""

Beginning = tuple[bytes, Steering | None]
"""The first tokens of a text, and how it is steered."""

LEAST = 64
_MOST_ENTRIES = 128  # bounds a lookup where a model is so small that bytes would not
# Tokens at the end of a prompt that open an answer's thoughts. The next turn lacks both.
_OPENING = 4
_MOST_USES = 4  # of one prompt that count, so that it goes in time when nobody comes back to it
_EXPECTED = 0.5  # uses that are taken for granted


class Source(msgspec.Struct, frozen=True):
    """The beginning that a text goes on from: so many tokens of a cached prompt, its `entry`, or of
    what another `row` holds; or nothing."""

    entry: int | None = None
    row: int | None = None
    tokens: int = 0


class Entry:
    """A cached prompt; or a promised one, which a planned work item is to cache.

    Args:
        number: the runner's, for its KV cache.
        tokens: that it holds.
        steering: of its row.
        asked: tokens that a client gave. Those behind them are an answer.
        lasting: it ends at a checkpoint, and not where a prompt or an answer ended.
        cuts: it can be cut back to any length.
        uses: the tokens that each of its last uses saved.
        fetched: it comes from disk, so nobody can begin with it before it is cached.

    Attributes:
        stored: it is on disk, or on its way there, or need not go there.
        bytes: that it takes, once it is cached.
        expected: uses of all its tokens that are taken for granted.
        floor: that its worth is added to.
    """

    def __init__(
        self,
        number: int,
        tokens: Tokens,
        steering: Steering | None = None,
        *,
        asked: int,
        lasting: bool,
        cuts: bool,
        uses: Iterable[int] = (),
        fetched: bool = False,
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.asked = asked
        self.lasting = lasting
        self.beginning = find_beginning(tokens, steering)
        self.bytes = 0
        self.cuts = cuts
        self.fetched = self.stored = fetched
        self.uses = deque(uses, maxlen=_MOST_USES)
        self.expected = _EXPECTED
        self.floor = 0.0

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def worth(self) -> float:
        """The tokens that it will save reading, by the byte, above the floor."""
        return self.floor + (self.expected * self.size + sum(self.uses)) / max(self.bytes, 1)

    def covers(self, other: Entry) -> bool:
        """Whether this entry can be cut back to what `other` holds. Then `other` is superfluous."""
        return (self.cuts or other.size == self.size) and self.begins_with(other)

    def begins_with(self, other: Entry) -> bool:
        if other.size > self.size:
            return False
        # The last token first: it differs in most pairs.
        same = self.tokens[other.size - 1] == other.tokens[-1]
        return bool(same) and common_prefix(self.tokens, other.tokens) == other.size

    def outdates(self, other: Entry, checkpoints: Collection[int]) -> bool:
        """Whether this entry makes `other` useless: both begin with the same question, and a client
        has continued it here with another answer than the one cached in `other`. (Clients often
        send an answer back in other tokens, or without its thoughts.)

        Args:
            other: a cached prompt that this one does not begin with.
            checkpoints: lengths of cached checkpoints. If one is right at the end of the question,
                `other` is also useless where it is the question and only opens the thoughts.
        """
        size = other.size
        if other.lasting or (
            other.asked == size and not any(size - _OPENING <= at <= size for at in checkpoints)
        ):
            return False
        shared = common_prefix(self.tokens, other.tokens)
        return other.answers_behind(shared) and shared < min(self.asked, size)

    def answers_behind(self, shared: int) -> bool:
        """Whether all behind the first `shared` tokens is an answer, or opens one."""
        return shared >= self.asked - _OPENING


_SIZE = attrgetter("size")
_WORTH = attrgetter("worth")


class PromptIndex:
    """Cached prompts by their tokens.

    Args:
        most_bytes: beyond these the entries of least worth are dropped; 0 keeps none.
        cuts: KV caches of the model can be cut back to any length.

    Attributes:
        bytes: of all cached prompts.
        late: this round's plan already lists the dropped entries. The runner drops those that are
            dropped from now on with the next plan.
        room: returns whether there is memory to cache a KV cache of so many tokens.
        changes: a counter of changes of the entries: the result of `find` is valid until it grows.
    """

    def __init__(self, most_bytes: int, *, cuts: bool = True) -> None:
        self.bytes = 0
        self.late = False
        self.room: Callable[[int], bool] | None = None
        self.changes = 0
        self._dropped: list[int] = []
        self._most_bytes = most_bytes
        self._cuts = cuts
        self._promised: dict[int, Entry] = {}
        self._entries: dict[int, Entry] = {}  # the one cached or used last comes last
        self._alike: defaultdict[Beginning, list[Entry]] = defaultdict(list)
        self._floor = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self,
        tokens: Tokens,
        steering: Steering | None = None,
        rows: Callable[[Beginning], Iterable[tuple[int, Tokens]]] | None = None,
    ) -> Source:
        """Find what holds the longest prefix of `tokens`.

        Promised entries count: in each plan rows are freed, and cached, before prompts are read. So
        a client that hangs up and asks again at once finds its prompt cached.

        Args:
            tokens: of a prompt.
            steering: of its row.
            rows: lists the running rows whose texts begin so, and the tokens that their KV caches
                hold and can be cut back to.
        """
        best = Source()
        if tokens.size < LEAST:
            return best
        beginning = find_beginning(tokens, steering)
        promised = [
            each
            for each in self._promised.values()
            if each.beginning == beginning and not each.fetched
        ]
        alike = [*self._alike.get(beginning, ()), *promised]
        # Of several that share as much, the shortest: it is the least to copy. Where each must be
        # shared whole, the longest first: then shorter ones need not be compared.
        for entry in sorted(alike, key=_SIZE, reverse=not self._cuts):
            shared = _share_more(entry.tokens, tokens, best.tokens)
            if shared > best.tokens and (entry.cuts or shared == entry.size):
                best = Source(entry=entry.number, tokens=shared)
        for row, held in () if rows is None else rows(beginning):
            shared = _share_more(held, tokens, best.tokens)
            if shared > best.tokens and shared >= LEAST:
                best = Source(row=row, tokens=shared)
        return best

    def begins(self, beginning: Beginning) -> bool:
        """Whether there is a cached prompt with this beginning."""
        return beginning in self._alike

    def use(self, number: int, tokens: int) -> None:
        """Note that a prompt begins with the entry now, which saves reading so many tokens."""
        # One that is promised has no worth yet; what goes on from it is there soon, and has.
        if (entry := self._entries.pop(number, None)) is not None:
            self._entries[number] = entry
            entry.floor = self._floor
            entry.uses.append(tokens)

    def move_out(self, number: int, tokens: int) -> tuple[int, ...] | None:
        """Take an entry out of the prompt cache for a row that begins with its first `tokens`, if
        all behind these is an answer. The runner then moves its KV cache to the row.

        Returns:
            Its uses, which the row's own text inherits when it is cached; None if the entry stays.
        """
        entry = self._entries.get(number)
        if entry is None or not entry.cuts or not entry.answers_behind(tokens):
            return None
        self._drop(entry)
        return tuple(entry.uses)

    def bytes_of(self, number: int) -> int:
        """Bytes of a cached prompt; 0 if the runner has yet to keep it."""
        return self._entries[number].bytes if number in self._entries else 0

    def list_unwritten(self) -> list[int]:
        """The entries that are not on disk, the one cached or used longest ago first."""
        return [number for number, entry in self._entries.items() if not entry.stored]

    def note_stored(self, number: int, *, stored: bool = True) -> None:
        """Note that an entry, if it is still there, is on its way to disk, or could not be
        written."""
        if (entry := self._entries.get(number)) is not None:
            entry.stored = stored

    # An entry comes.

    @property
    def promised(self) -> list[int]:
        """The number of tokens of each promised entry."""
        return [entry.size for entry in self._promised.values()]

    def wants(self, tokens: int) -> bool:
        """Whether a KV cache of so many tokens is worth caching, and there is memory for it. It
        reserves the memory, so it is asked once for each entry that is then promised."""
        wanted = tokens >= LEAST and self._most_bytes > 0
        return wanted and (self.room is None or self.room(tokens))

    def plan_keep(
        self,
        tokens: Tokens,
        steering: Steering | None,
        *,
        asked: int | None = None,
        lasting: bool = False,
        uses: Iterable[int] = (),
    ) -> Keep | None:
        """Promise an entry, if it is wanted: not, where another holds all of its tokens. A
        checkpoint is wanted then, too. For the arguments see `promise`."""
        if not lasting and self.find(tokens, steering).tokens == tokens.size:
            return None
        if not self.wants(tokens.size):
            return None
        return self.promise(tokens, steering, asked=asked, lasting=lasting, uses=uses)

    def promise(
        self,
        tokens: Tokens,
        steering: Steering | None = None,
        *,
        asked: int | None = None,
        lasting: bool = False,
        uses: Iterable[int] = (),
        fetched: bool = False,
    ) -> Keep:
        """Promise an entry that the runner is to cache. `confirm` follows. For the arguments see
        Entry; all tokens are `asked`, unless given."""
        self._number += 1
        self._promised[self._number] = Entry(
            self._number,
            tokens,
            steering,
            asked=tokens.size if asked is None else min(asked, tokens.size),
            lasting=lasting,
            cuts=self._cuts,
            uses=uses,
            fetched=fetched,
        )
        self.changes += 1
        return Keep(self._number, tokens.size)

    def confirm(self, keeps: Iterable[Keep | None], kept: Iterable[KeptPrompt]) -> None:
        """Turn promised entries into cached ones, if the runner has kept them; drop the others.

        Args:
            keeps: what was promised, with the tokens that KV caches hold now.
            kept: the KV caches that the runner has kept.
        """
        prompts = {prompt.entry: prompt for prompt in kept}
        for keep in [keep for keep in keeps if keep is not None]:
            entry = self._promised.pop(keep.entry)
            self.changes += 1
            if (prompt := prompts.get(keep.entry)) is not None:
                entry.bytes, entry.cuts = prompt.bytes, prompt.cuts
                entry.tokens = entry.tokens[: keep.tokens]
                entry.asked = min(entry.asked, entry.size)
                self._put(entry)

    def _put(self, entry: Entry) -> None:
        alike = self._alike.get(entry.beginning, ())
        if entry.bytes > self._most_bytes or any(old.covers(entry) for old in alike):
            self._dropped.append(entry.number)
            return
        entry.floor = self._floor
        shorter = sorted(filter(entry.begins_with, alike), key=_SIZE)
        self._take_over(entry, shorter)
        checkpoints = [old.size for old in shorter if old.lasting]
        others = [old for old in alike if old not in shorter]
        gone = shorter if entry.cuts else []  # it can be cut back to these
        for old in [*gone, *(old for old in others if entry.outdates(old, checkpoints))]:
            self._drop(old)
            entry.uses.extend(old.uses)
        self._entries[entry.number] = entry
        self._alike[entry.beginning].append(entry)
        self.bytes += entry.bytes
        self.changes += 1
        while self.bytes > self._most_bytes or len(self._entries) > _MOST_ENTRIES:
            self._evict()

    def _take_over(self, entry: Entry, shorter: Sequence[Entry]) -> None:
        """Give an entry the uses of the longest one with which it begins, if it is the first to go
        on from that: it is the next turn of the same chat. Others branch off.

        Many chats share their first checkpoint (the system message), so where it is the only
        shorter one it does not show that the chat is the same.
        """
        if not shorter or (shorter[-1].lasting and len(shorter) == 1):
            return
        older = shorter[-1]
        if older.expected:
            entry.uses = deque([*older.uses, *entry.uses], _MOST_USES)
            older.uses.clear()
            older.expected = 0.0

    # An entry goes.

    def drop_prefixes(self, tokens: Tokens, steering: Steering | None = None) -> None:
        """Drop the entries that are prefixes of these tokens."""
        for entry in [*self._alike.get(find_beginning(tokens, steering), ())]:
            if common_prefix(entry.tokens, tokens) == entry.size:
                self._drop(entry)

    def drop(self, number: int) -> None:
        """Drop one entry, if it is there."""
        if number in self._entries:
            self._drop(self._entries[number])

    def give_way(self, bytes: int) -> int:
        """Evict entries, the least worth first, until so many bytes are free or none is left.
        Promised ones stay, since their bytes are not known yet.

        Returns:
            The bytes that are free now, more than asked for where the last entry was large. The
            runner has them until the next plan forgets the entries.
        """
        before = self.bytes
        while self._entries and before - self.bytes < bytes:
            self._evict()
        return before - self.bytes

    def clear(self) -> None:
        for entry in [*self._entries.values()]:
            self._drop(entry)

    @property
    def dropped(self) -> bool:
        """Whether entries were dropped here that the runner still has."""
        return bool(self._dropped)

    def take_dropped(self) -> tuple[int, ...]:
        """Entries that were dropped since the last call."""
        self.late = True
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _evict(self) -> None:
        """Drop the entry of least worth; of several, the one used longest ago."""
        entry = min(self._entries.values(), key=_WORTH)
        self._floor = max(self._floor, entry.worth)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.number]
        self._alike[entry.beginning].remove(entry)
        if not self._alike[entry.beginning]:
            del self._alike[entry.beginning]
        self.bytes -= entry.bytes
        self.changes += 1
        self._dropped.append(entry.number)


def _share_more(one: Tokens, other: Tokens, most: int) -> int:
    """The length of the longest common prefix; 0 if one token shows that it is not over `most`."""
    if min(one.size, other.size) <= most or one[most] != other[most]:
        return 0
    return common_prefix(one, other)


def find_beginning(tokens: Tokens, steering: Steering | None) -> Beginning:
    """The beginning of a text: texts with different ones have no common prefix worth caching."""
    return tokens[:LEAST].tobytes(), steering


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The length of the longest common prefix."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Token ids as an array. Raises OverflowError for a number that is none."""
    return np.asarray(array("I", tokens))  # which NumPy alone takes twice as long to make
