"""The prompt index: which texts are in the prompt cache, so that they are not read again.

An entry stands for a KV cache that the runner keeps, under the tokens that it has seen. A lookup
finds the entry that shares the longest prefix with a prompt. The caches of attention layers can be
cut back to any length, so any shared prefix is of use. Those of recurrent layers and full sliding
windows cannot: such an entry is of use only if the prompt begins with all of it. So entries are
made where later prompts are likely to go on: see `checkpoints`. As a chat grows, new ones supersede
those that are of little use beside them: see `superseding`. Which one is evicted where there is no
room for all: see `prompt_worth`.

Steering changes what a KV cache holds, so an entry is of use only to prompts that are steered
alike.

Prefixes of less than `LEAST` tokens are not worth a copy. Tokens are kept as arrays, and a common
prefix is found by one comparison of two: 0.15 ms for prompts of a hundred thousand tokens. mlx-lm's
trie of nested dicts takes 12 ms to find such a prompt and 61 ms to store it, and takes 22 MB.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.scheduling.prompt_worth import Eviction, PromptWorth
from mlxsrv.engine.scheduling.superseding import Link, find_superseded
from mlxsrv.generation.parameters import Steering

Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Token ids."""

Beginning = tuple[bytes, Steering | None]
"""The first tokens of a text, and how it is steered."""

LEAST = 64
_MOST_ENTRIES = 128  # bounds a lookup where a model is so small that bytes would not
# Tokens at the end of a prompt that open an answer's thoughts. The next turn lacks both.
_OPENING = 4


class _Entry:
    """A cached prompt; or a promised one, which a planned work item is to cache.

    Args:
        asked: tokens that a client gave. Those behind them are an answer.
        lasting: it ends at a checkpoint, and not where a prompt or an answer ended.

    Attributes:
        uses: the uses of the cached prompt that was moved to this one's row: for each, how many
            tokens it saved. They count as this entry's own once it is cached.
    """

    __slots__ = ("asked", "beginning", "bytes", "cuts", "lasting", "number", "tokens", "uses")

    def __init__(
        self,
        number: int,
        tokens: Tokens,
        steering: Steering | None,
        *,
        asked: int,
        lasting: bool,
        cuts: bool,
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.asked = asked
        self.lasting = lasting
        self.beginning = find_beginning(tokens, steering)
        self.bytes = 0
        self.cuts = cuts
        self.uses: tuple[int, ...] = ()

    def covers(self, other: _Entry) -> bool:
        """Whether this entry can be cut back to what `other` holds. Then `other` is superfluous."""
        return (self.cuts or other.tokens.size == self.tokens.size) and self.begins_with(other)

    def begins_with(self, other: _Entry) -> bool:
        size = other.tokens.size
        if size > self.tokens.size:
            return False
        # The last token first: it differs in most pairs.
        same = self.tokens[size - 1] == other.tokens[-1]
        return bool(same) and common_prefix(self.tokens, other.tokens) == size

    def outdates(self, other: _Entry, checkpoints: Collection[int]) -> bool:
        """Whether this entry makes `other` useless: both begin with the same question, and a client
        has continued it here with another answer than the one cached in `other`. (Clients often
        send an answer back in other tokens, or without its thoughts.)

        Args:
            other: a cached prompt that this one does not begin with.
            checkpoints: lengths of cached checkpoints. If one is right at the end of the question,
                `other` is also useless where it is the question and only opens the thoughts.
        """
        size = other.tokens.size
        if other.lasting or (
            other.asked == size and not any(size - _OPENING <= at <= size for at in checkpoints)
        ):
            return False
        shared = common_prefix(self.tokens, other.tokens)
        return other.answers_behind(shared) and shared < min(self.asked, other.tokens.size)

    def answers_behind(self, shared: int) -> bool:
        """Whether all behind the first `shared` tokens is an answer, or opens one."""
        return shared >= self.asked - _OPENING


class PromptIndex:
    """Cached prompts by their tokens.

    Args:
        most_bytes: beyond these the entries of least worth are dropped; 0 keeps none.
        cuts: KV caches of the model can be cut back to any length.
        worth: chooses the entry that goes; PromptWorth, unless given.

    Attributes:
        bytes: of all cached prompts.
        late: this round's plan already lists the dropped entries. The runner drops those that are
            dropped from now on with the next plan.
        room: returns whether there is memory to cache a KV cache of so many tokens.
        changes: a counter of changes of the entries: the result of `find` is valid until it grows.
    """

    def __init__(
        self, most_bytes: int, *, cuts: bool = True, worth: Eviction | None = None
    ) -> None:
        self.bytes = 0
        self.late = False
        self.room: Callable[[int], bool] | None = None
        self.changes = 0
        self._dropped: list[int] = []
        self._most_bytes = most_bytes
        self._cuts = cuts
        self._promised: dict[int, _Entry] = {}
        self._reserved: dict[int, int] = {}  # tokens of entries that come from disk
        self._entries: dict[int, _Entry] = {}
        self._alike: defaultdict[Beginning, list[_Entry]] = defaultdict(list)
        self._worth = PromptWorth() if worth is None else worth
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Tokens, steering: Steering | None = None) -> tuple[int | None, int]:
        """Find the entry with the longest prefix of `tokens`. Returns its number and the length of
        the prefix; None and 0 if there is none.

        Promised entries count: in each plan rows are freed, and cached, before prompts are read. So
        a client that hangs up and asks again at once finds its prompt cached.
        """
        if tokens.size < LEAST or not (self._entries or self._promised):
            return None, 0
        best, most = None, 0
        beginning = find_beginning(tokens, steering)
        promised = [each for each in self._promised.values() if each.beginning == beginning]
        # Of several that share as much, the shortest: it is the least to copy.
        for entry in sorted([*self._alike.get(beginning, ()), *promised], key=_size):
            # One that shares more has the same token behind what the best one shares.
            size = min(entry.tokens.size, tokens.size)
            if size <= most or entry.tokens[most] != tokens[most]:
                continue
            shared = common_prefix(entry.tokens, tokens)
            if shared > most and (entry.cuts or shared == entry.tokens.size):
                best, most = entry.number, shared
        return best, most

    def begins(self, beginning: Beginning) -> bool:
        """Whether there is a cached prompt with this beginning."""
        return beginning in self._alike

    def holds(self, tokens: Tokens, steering: Steering | None = None) -> bool:
        """Whether all of a text is cached, or promised, so that it need not be cached again."""
        return self.find(tokens, steering)[1] == tokens.size

    def use(self, number: int, tokens: int) -> None:
        """Note that a prompt begins with the entry now, which saves reading so many tokens."""
        # One that is promised has no worth yet; what goes on from it is there soon, and has.
        if number in self._entries:
            self._worth.use(number, tokens)

    def move_out(self, number: int, tokens: int) -> tuple[int, ...] | None:
        """Take an entry out of the prompt cache for a row that begins with its first `tokens`, if
        all behind these is an answer. The runner then moves its KV cache to the row.

        Returns:
            Its uses, which the row's own text inherits when it is cached; None if the entry stays.
        """
        entry = self._entries.get(number)
        if entry is None or not entry.cuts or not entry.answers_behind(tokens):
            return None
        return self._drop(entry)

    def wants(self, tokens: int) -> bool:
        """Whether a KV cache of so many tokens is worth caching, and there is memory for it. It
        reserves the memory, so it is asked once for each entry that is then promised."""
        wanted = tokens >= LEAST and self._most_bytes > 0
        return wanted and (self.room is None or self.room(tokens))

    def bytes_of(self, number: int) -> int:
        """Bytes of a cached prompt; 0 if the runner has yet to keep it."""
        return self._entries[number].bytes if number in self._entries else 0

    @property
    def promised(self) -> list[int]:
        """The number of tokens of each promised entry."""
        kept = [entry.tokens.size for entry in self._promised.values()]
        return [*kept, *self._reserved.values()]

    def promise(
        self,
        tokens: Tokens,
        steering: Steering | None = None,
        *,
        asked: int | None = None,
        lasting: bool = False,
        uses: tuple[int, ...] = (),
    ) -> int:
        """Promise an entry that the runner is to cache. Returns its number.

        Args:
            tokens: that it will hold.
            steering: of its row.
            asked: how many of them a client gave; all, unless given. The others are an answer.
            lasting: it ends at a checkpoint, and not where a prompt or an answer ended.
            uses: of the entry whose place it takes.
        """
        self._number += 1
        asked = tokens.size if asked is None else min(asked, tokens.size)
        entry = _Entry(
            self._number, tokens, steering, asked=asked, lasting=lasting, cuts=self._cuts
        )
        entry.uses = uses
        self._promised[self._number] = entry
        self.changes += 1
        return self._number

    def confirm(self, promised: Sequence[int], kept: Sequence[KeptPrompt]) -> None:
        """Turn promised entries into cached ones, if the runner has kept them; drop the others."""
        for number in promised:
            entry = self._promised.pop(number)
            self.changes += 1
            for prompt in kept:
                if prompt.entry == number:
                    entry.bytes, entry.cuts = prompt.bytes, prompt.cuts
                    self._put(entry)

    def reserve(self, tokens: int) -> int:
        """Reserve memory for an entry of so many tokens, which is fetched from disk. Returns its
        number. `put_fetched` or `cancel` follows."""
        self._number += 1
        self._reserved[self._number] = tokens
        return self._number

    def cancel(self, number: int) -> None:
        """Give back what was reserved for an entry: it could not be fetched."""
        self._reserved.pop(number, None)

    def put_fetched(self, tokens: Tokens, prompt: KeptPrompt) -> None:
        """Add an entry that was fetched from disk. Prompts on disk have no steering."""
        self.cancel(prompt.entry)
        entry = _Entry(
            prompt.entry, tokens, None, asked=tokens.size, lasting=False, cuts=prompt.cuts
        )
        entry.bytes = prompt.bytes
        self._put(entry)

    def has(self, number: int) -> bool:
        """Whether there is an entry of this number, and not only a promise."""
        return number in self._entries

    def drop_prefixes(self, tokens: Tokens, steering: Steering | None = None) -> None:
        """Drop the entries that are prefixes of these tokens."""
        if tokens.size < LEAST or not self._entries:
            return
        for entry in [*self._alike.get(find_beginning(tokens, steering), ())]:
            if common_prefix(entry.tokens, tokens) == entry.tokens.size:
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
            self.drop(self._worth.choose())
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

    def _put(self, entry: _Entry) -> None:
        alike = self._alike.get(entry.beginning, ())
        if entry.bytes > self._most_bytes or any(old.covers(entry) for old in alike):
            self._dropped.append(entry.number)
            return
        parent = self._find_parent(entry, alike)
        self._worth.add(entry.number, entry.tokens.size, entry.bytes, parent)
        for tokens in entry.uses:
            self._worth.use(entry.number, tokens)
        if alike:
            self._supersede(entry, [*alike])
        self._entries[entry.number] = entry
        self._alike[entry.beginning].append(entry)
        self.bytes += entry.bytes
        self.changes += 1
        while self.bytes > self._most_bytes or len(self._entries) > _MOST_ENTRIES:
            self.drop(self._worth.choose())

    def _find_parent(self, entry: _Entry, alike: Iterable[_Entry]) -> int | None:
        """Return the number of the longest entry with which this one begins: the earlier state of
        the same chat.

        None if there is none. None as well if the only one is a checkpoint: many chats share their
        first checkpoint (the system message), so it does not show that the chat is the same.
        """
        chain = sorted(filter(entry.begins_with, alike), key=_size)
        if not chain or (chain[-1].lasting and len(chain) == 1):
            return None
        return chain[-1].number

    def _supersede(self, entry: _Entry, alike: list[_Entry]) -> None:
        """Drop the entries that are of little use beside a new one.

        Args:
            entry: the new one.
            alike: the others whose first tokens are the same.
        """
        for old in [old for old in alike if entry.covers(old)]:
            alike.remove(old)
            self._drop(old, heir=entry)
        chain = [old for old in alike if entry.begins_with(old)]
        chain.sort(key=_size)
        others = [old for old in alike if old not in chain]
        checkpoints = [old.tokens.size for old in chain if old.lasting]
        for old in [old for old in others if entry.outdates(old, checkpoints)]:
            others.remove(old)
            self._drop(old, heir=entry)
        if entry.cuts:
            return
        for place in find_superseded([Link(old.tokens.size, old.lasting) for old in chain]):
            # One that another chat goes on from is of use to that.
            if not any(other.begins_with(chain[place]) for other in others):
                self._drop(chain[place], heir=entry)

    def _drop(self, entry: _Entry, heir: _Entry | None = None) -> tuple[int, ...]:
        """Drop an entry. Returns its uses, which `heir` has from now on."""
        del self._entries[entry.number]
        self._alike[entry.beginning].remove(entry)
        if not self._alike[entry.beginning]:
            del self._alike[entry.beginning]
        self.bytes -= entry.bytes
        self.changes += 1
        self._dropped.append(entry.number)
        return self._worth.remove(entry.number, None if heir is None else heir.number)


def _size(entry: _Entry) -> int:
    return entry.tokens.size


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
