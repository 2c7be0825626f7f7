"""Responses that clients may ask for again or go on from, in memory and within bounds.

Clients choose the ids of what they send, so an item's id says something only beside the client that
has sent it. The ids of responses are the server's own, and cannot be guessed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from mlxsrv.errors import PreviousResponseNotFound, ResponseNotFound, StoredItemNotFound

Take = Callable[[int, str], None]
"""Called with the bytes of an item, before the next one is looked for, and with the field that asks
for it; raises if there is no room."""


class StoredItem(Struct, frozen=True, tag=True):
    """An item of a conversation, as JSON.

    Attributes:
        response: the id of the response that has it.
    """

    id: str
    response: str
    body: bytes


class StoredReference(Struct, frozen=True, tag=True):
    """An item that another response has. It is not copied: a body of some bytes may name many
    items, or a large one many times."""

    id: str
    response: str


class StoredResponse(Struct, frozen=True, kw_only=True):
    """A response and what it answers.

    Attributes:
        owner: the id of the client that has asked for it.
        body: the response as JSON.
        input: the items that it answers, without those of the responses before it.
        output: its own items.
        previous: the id of the response that it follows.
    """

    id: str
    owner: str
    body: bytes
    input: Sequence[StoredItem | StoredReference] = ()
    output: Sequence[StoredItem] = ()
    previous: str | None = None

    @property
    def items(self) -> Sequence[StoredItem | StoredReference]:
        return (*self.input, *self.output)

    @property
    def own_items(self) -> list[StoredItem]:
        """The items that no other response has."""
        return [item for item in self.items if isinstance(item, StoredItem)]

    @property
    def size(self) -> int:
        """Bytes, about."""
        own = sum(len(item.body) for item in self.own_items)
        return len(self.body) + own + sum(len(item.id) + 200 for item in self.items) + 1000


class Recalled(Struct, frozen=True):
    """The stored items that a request continues or refers to.

    Attributes:
        conversation: the items of the response that it follows, and of all before that one.
        references: the items that its input names, by their ids.
    """

    conversation: Sequence[StoredItem]
    references: Mapping[str, StoredItem]


class ResponseStore:
    """Keeps the responses that were used last, in memory. Used on one event loop.

    Args:
        most: how many responses; 0: none.
        most_bytes: how many bytes they may take.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._responses: dict[str, StoredResponse] = {}
        self._owned: dict[str, OrderedDict[str, None]] = {}
        """The ids of each owner's responses, the least recently used first."""
        self._items: dict[tuple[str, str], dict[str, StoredItem]] = {}
        """By owner and id, then by the responses that have an item of that id; the newest last."""
        self._bytes: Counter[str] = Counter()  # of each owner

    def put(self, response: StoredResponse) -> None:
        """Keep a response. If there is no room, those go that were not used for longest, of the
        client that has most: so a client has all the room that others leave, and none loses what it
        has to one that has more. A response that would fill the store alone and more is not kept:
        the others would go for nothing."""
        if not self._most or response.size > self._most_bytes:
            return
        self._responses[response.id] = response
        self._owned.setdefault(response.owner, OrderedDict())[response.id] = None
        self._bytes[response.owner] += response.size
        for item in response.own_items:
            self._items.setdefault((response.owner, item.id), {})[response.id] = item
        while len(self._responses) > self._most or self._bytes.total() > self._most_bytes:
            largest = max(self._owned, key=self._part)
            self._forget(next(iter(self._owned[largest])))

    def get(self, id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        response = self._find(id)
        if response is None:
            raise ResponseNotFound(f"Response with id '{id[:100]}' not found.")
        self._touch([id])
        return response

    def delete(self, id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(id)
        self._forget(id)

    def resolve(self, item: StoredItem | StoredReference) -> StoredItem | None:
        """Return the item itself; None if it is that of a response which is gone."""
        return item if isinstance(item, StoredItem) else self._follow(item)

    def recall(
        self, previous: str | None, references: Sequence[tuple[str, str]], owner: str, take: Take
    ) -> Recalled:
        """Return what a request of `owner` continues or refers to. An id means an item of the
        conversation; else the owner's newest one.

        Args:
            previous: the id of the response that it follows.
            references: ids of items, each with the field that refers to it.
            take: makes room. An item that is named twice takes it twice, as it does in the prompt.

        Raises:
            PreviousResponseNotFound, StoredItemNotFound: it is not here. Also what `take` raises.
        """
        chain: list[list[StoredItem]] = []
        used: list[str] = []
        while previous is not None:
            response = self._find(previous)
            if response is None:
                raise _no_previous(previous)
            used.append(previous)
            chain.append([self._taken(item, take) for item in response.items])
            previous = response.previous
        conversation = [item for items in reversed(chain) for item in items]
        known = {item.id: item for item in conversation} if references else {}
        for id, path in references:
            item = known.get(id) or self._newest(owner, id)
            if item is None:
                raise StoredItemNotFound(
                    f"{path}: Item with id '{id[:100]}' not found.", param=path
                )
            take(len(item.body), path)
            known[id] = item
        used += [item.response for item in (*conversation, *known.values())]
        if used:
            self._touch(dict.fromkeys(reversed(used)))
        return Recalled(conversation, {id: known[id] for id, _ in references})

    def _taken(self, item: StoredItem | StoredReference, take: Take) -> StoredItem:
        found = self.resolve(item)
        if found is None:
            raise _no_previous(item.response)
        take(len(found.body), "previous_response_id")
        return found

    def _part(self, owner: str) -> float:
        """The part of the store that an owner has: of its responses or of its bytes."""
        return max(len(self._owned[owner]) / self._most, self._bytes[owner] / self._most_bytes)

    def _follow(self, reference: StoredReference) -> StoredItem | None:
        response = self._responses.get(reference.response)
        if response is None:
            return None
        return self._items[response.owner, reference.id][response.id]

    def _find(self, id: str) -> StoredResponse | None:
        return self._responses.get(id)

    def _newest(self, owner: str, id: str) -> StoredItem | None:
        """The item that the newest response of `owner` which has one has under this id."""
        found = self._items.get((owner, id))
        return None if found is None else found[next(reversed(found))]

    def _touch(self, ids: Iterable[str]) -> None:
        """Note that these responses are used now."""
        for id in ids:
            self._owned[self._responses[id].owner].move_to_end(id)

    def _forget(self, id: str) -> None:
        response = self._responses.pop(id)
        owned = self._owned[response.owner]
        del owned[id]
        self._bytes[response.owner] -= response.size
        if not owned:
            del self._owned[response.owner], self._bytes[response.owner]
        for name in {item.id for item in response.own_items}:
            found = self._items[response.owner, name]
            del found[id]
            if not found:
                del self._items[response.owner, name]


def _no_previous(id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{id[:100]}' not found.", param="previous_response_id"
    )
