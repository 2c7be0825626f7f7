"""Requests as clients send them, recorded: each is answered, also by a family with strict rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from tests.support.client import Body
from tests.support.encoder_folders import write as write_encoder_folder
from tests.support.family_rules import STRICT_RULES
from tests.support.scripted import write_scripted
from tests.support.tiny import CHAT_TEMPLATE
from tests.web.test_infill import write_infiller

RECORDED = Path(__file__).parents[1] / "support" / "recorded"
NOT_HERE = {"/v1/beta/completions": 404}
"""Routes that a client tries, and that this server does not have."""

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LONGEST = 400  # characters of a stand-in for a text; its length shows nothing


def recorded(name: str) -> list[Body]:
    text = (RECORDED / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


ELSEWHERE = {
    "anthropic",
    "anthropic-0x",
}  # tests/web/test_messages.py asks these, some of which are refused
NAMES = sorted({path.stem for path in RECORDED.glob("*.jsonl")} - ELSEWHERE)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("recorded")
    template = STRICT_RULES + CHAT_TEMPLATE
    strict = write_scripted(
        folder / "strict", ["Yes", "."], template=template, max_position_embeddings=10**5
    )
    models = (
        f"strict={strict}",
        f"embed={write_encoder_folder(folder / 'embed', 'bert')}",
        f"rerank={write_encoder_folder(folder / 'rerank', 'bert-classifier')}",
        f"fim={write_infiller(folder / 'fim', 'Qwen2.5-Coder, Qwen3-Coder')}",
    )
    settings = mlxsrv.Settings(model=models, hf_cache=False)
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


def stand_in(match: re.Match[str]) -> str:
    return ("word " * LONGEST)[: min(int(match[1]), LONGEST)]


def ask(client: TestClient, request: Body) -> tuple[int, str]:
    """The status and the text of the answer."""
    body: Any = request.get("body")
    if body is not None:
        text = re.sub(r"<text of (\d+) characters>", stand_in, json.dumps(body))
        body = json.loads(text)
        body |= {name: min(body[name], 6) for name in LIMITS if name in body}
        # The models here have other names and smaller vocabularies.
        if "model" in body:
            named = "fim" if "/fim/" in request["path"] else body["model"].removesuffix(":latest")
            body["model"] = named if named in ("embed", "rerank", "fim") else "strict"
        if isinstance(body.get("prompt"), list):
            body["prompt"] = [
                [token % 200 for token in ids] if isinstance(ids, list) else ids
                for ids in body["prompt"]
            ]
        if "logit_bias" in body:
            body["logit_bias"] = {"5": 1}
    headers = {name: text for name, text in request["headers"].items() if text != "..."}
    response = client.request(request["method"], request["path"], json=body, headers=headers)
    return response.status_code, response.text


@pytest.mark.parametrize("name", NAMES)
def test_each_request_of_a_client_is_answered(client: TestClient, name: str) -> None:
    for number, request in enumerate(recorded(name)):
        status, text = ask(client, request)
        wanted = NOT_HERE.get(request["path"], 200)
        assert status == wanted, (number, request["path"], text)
        assert '"error":{' not in text or wanted != 200, (number, text)
