"""The form in which responses and items are stored, and how they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest
from mlxsrv.wire.responses.answers import new_item_id
from mlxsrv.wire.responses.items import InputMessage, InputReference, stored_form
from mlxsrv.wire.responses.requests import ResponsesRequest


def stored_input(request: ResponsesRequest) -> Iterator[tuple[str, bytes | None]]:
    """The items of a request; those that it refers to without their JSON."""
    if isinstance(request.input, str):
        yield stored_form(InputMessage(role="user", content=request.input), new_item_id)
    for placed in request.items:
        if isinstance(placed.item, InputReference):
            yield placed.item.id, None
        else:
            yield stored_form(placed.item, new_item_id)


# Queries.


class ResponseQuery(Struct, frozen=True):
    stream: bool | None = None


class ItemQuery(Struct, frozen=True):
    """The page of a list that is wanted, the newest items first unless `order` says otherwise."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def page_of(ids: Sequence[str], query: ItemQuery) -> tuple[Sequence[int], bool]:
    """Return the places of the items that are asked for, and whether there are more.

    Args:
        ids: of all items, in their order.

    Raises:
        InvalidRequest: `after` is none of them.
    """
    places = range(len(ids)) if query.order == "asc" else range(len(ids))[::-1]
    if query.after is not None:
        if query.after not in ids:
            raise InvalidRequest("after: there is no item of that id", param="after")
        places = places[places.index(ids.index(query.after)) + 1 :]
    return places[: query.limit], len(places) > query.limit
