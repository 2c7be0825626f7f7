"""Requests that break their own row of a running server."""

from __future__ import annotations

import httpx

from tests.support.client import Body, completion

BEGIN = (30, 31, 32, 33)
FOR_EVER = 500_000


def poisoned(token: int, **fields: object) -> Body:
    return completion([*BEGIN, token], **fields)


def engine(client: httpx.Client) -> dict[str, int]:
    [model] = [each for each in health(client)["models"] if each["id"] == "t"]
    return dict(model["engine"])


def health(client: httpx.Client) -> Body:
    return dict(client.get("/health?verbose=1").json())


def at_rest(client: httpx.Client) -> bool:
    rows = engine(client)
    return rows["rows"] == rows["reading"] == rows["waiting"] == 0
