"""Plain HTTP, which the answers of the clients are compared with."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

from tests.clients.talk import MODEL

TIMEOUT = 60.0  # seconds


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON that answers this JSON. Raises HTTPError."""
    with urlopen(url, json.dumps(body).encode(), TIMEOUT) as response:
        return json.load(response)


def embed(base_url: str, texts: str | list[str], **more: Any) -> list[list[float]]:
    """The texts' vectors, as the JSON has them."""
    answer = post(f"{base_url}/embeddings", {"model": MODEL, "input": texts, **more})
    return [one["embedding"] for one in answer["data"]]
