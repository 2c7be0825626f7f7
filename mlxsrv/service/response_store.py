"""Responses that clients may ask for again or go on from, in memory and within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from mlxsrv.errors import PreviousResponseNotFound, ResponseNotFound, StoredItemNotFound


class StoredItem(Struct, frozen=True):
    """An item of a conversation, as JSON."""

    id: str
    body: bytes


class StoredResponse(Struct, frozen=True, kw_only=True):
    """A response and what it answers.

    Attributes:
        body: the response as JSON.
        input: the items that it answers, without those of the responses before it.
        output: its own items.
        previous: the id of the response that it follows.
    """

    id: str
    body: bytes
    input: Sequence[StoredItem] = ()
    output: Sequence[StoredItem] = ()
    previous: str | None = None

    @property
    def size(self) -> int:
        """Bytes, about."""
        items = [*self.input, *self.output]
        return len(self.body) + sum(len(item.body) + len(item.id) + 200 for item in items) + 1000


class Responses(Protocol):
    """Where responses are kept: in this process, or shared with others."""

    def put(self, response: StoredResponse) -> None: ...

    def get(self, id: str) -> StoredResponse: ...

    def delete(self, id: str) -> None: ...

    def conversation(self, id: str | None) -> list[StoredItem]: ...

    def item(self, id: str, path: str) -> StoredItem: ...


class ResponseStore:
    """Keeps the responses that were used last. Used on one event loop.

    Args:
        most: how many responses; 0: none.
        most_bytes: how many bytes they may take.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # least recent first
        self._items: dict[str, StoredItem] = {}
        self._bytes = 0

    def put(self, response: StoredResponse) -> None:
        """Keep a response; forget those that were not used for longest, if there is no room. One
        that would fill the store alone and more is not kept: the others would go for nothing."""
        if response.size > self._most_bytes:
            return
        self._responses[response.id] = response
        self._bytes += response.size
        for item in (*response.input, *response.output):
            self._items[item.id] = item
        while len(self._responses) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._responses)))

    def get(self, id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        response = self._responses.get(id)
        if response is None:
            raise no_response(id)
        self._responses.move_to_end(id)
        return response

    def delete(self, id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(id)
        self._forget(id)

    def conversation(self, id: str | None) -> list[StoredItem]:
        """Return all items up to the end of a response, with those of the responses before it.

        Raises:
            PreviousResponseNotFound: one of them is not here.
        """
        chain: list[StoredResponse] = []
        while id is not None:
            response = self._responses.get(id)
            if response is None:
                raise no_previous(id)
            chain.append(response)
            id = response.previous
        chain.reverse()
        for response in chain:
            self._responses.move_to_end(response.id)
        return [item for response in chain for item in (*response.input, *response.output)]

    def item(self, id: str, path: str) -> StoredItem:
        """Return the item of this id. `path` is the field that refers to it.

        Raises:
            StoredItemNotFound
        """
        item = self._items.get(id)
        if item is None:
            raise no_item(id, path)
        return item

    def _forget(self, id: str) -> None:
        response = self._responses.pop(id)
        self._bytes -= response.size
        for item in (*response.input, *response.output):
            if self._items.get(item.id) is item:
                del self._items[item.id]


def no_response(id: str) -> ResponseNotFound:
    return ResponseNotFound(f"Response with id '{id[:100]}' not found.")


def no_previous(id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{id[:100]}' not found.", param="previous_response_id"
    )


def no_item(id: str, path: str) -> StoredItemNotFound:
    return StoredItemNotFound(f"{path}: Item with id '{id[:100]}' not found.", param=path)
