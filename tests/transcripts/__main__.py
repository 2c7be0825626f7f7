"""`python -m tests.transcripts`: write transcripts, or compare two folders of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
from starlette.testclient import TestClient

import mlxsrv
from tests.support.client import Body
from tests.support.encoder_folders import write as write_encoder_folder
from tests.support.families import FAMILIES
from tests.support.scripted import AFTER_TOOL, write_conversation
from tests.support.tiny import write_model
from tests.transcripts.asking import features, misuses, recorded
from tests.transcripts.masking import Mask
from tests.web.test_infill import write_infiller

_HEADERS = ("content-type", "x-ignored-params", "retry-after", "www-authenticate", "allow")
_SAYS = {
    AFTER_TOOL: "Rain <&> falls there; \u00e9l\u00e8ve \U0001f327.",
    "tools": "<think>\nI need the weather.\n</think>\n\nLet me look.<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "true": "<think>\nA short thought.\n</think>\n\nHe said: the answer is \u201c42\u201d.",
}


def main(arguments: list[str]) -> int:
    if len(arguments) == 2:
        return _compare(Path(arguments[0]), Path(arguments[1]))
    [folder] = map(Path, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with TestClient(mlxsrv.create_app(_settings(folder / "models"))) as client:
        description = client.get("/openapi.json").json()
        _write(folder / "openapi.json", [description])
        _write(folder / "routes.jsonl", _transcripts(client, [*recorded(), *features()]))
        _write(folder / "misuses.jsonl", _transcripts(client, misuses(description)))
    for on in (False, True):
        settings = mlxsrv.Settings(model=("demo",), page="off" if on else "on", ollama_root=on)
        with TestClient(mlxsrv.create_app(settings)) as client:
            described = [client.get("/openapi.json").json(), client.get("/").status_code]
        _write(folder / f"openapi-{'other' if on else 'page'}.json", described)
    _write(folder / "tokens.jsonl", _tokens(folder / "models"))
    print(f"written to {folder} in {time.monotonic() - begun:.0f} s")
    return 0


def _settings(models: Path) -> mlxsrv.Settings:
    if not models.exists():
        write_model(models / "plain", "qwen3", plain=True)
        write_conversation(models / "says", _SAYS, max_position_embeddings=10**5)
        write_encoder_folder(models / "embed", "bert")
        write_encoder_folder(models / "rerank", "bert-classifier")
        write_infiller(models / "fim", "Qwen2.5-Coder, Qwen3-Coder")
    names = ("plain", "says", "embed", "rerank", "fim")
    return mlxsrv.Settings(
        model=(*(f"{name}={models / name}" for name in names), "demo"),
        hf_cache=False,
        data_dir=str(models / "data"),
        max_body=100_000,
    )


def _transcripts(client: TestClient, requests: Any) -> Iterator[Any]:
    mask, last = Mask(), "resp_nothing"
    for asked in requests:
        body = json.dumps(asked.body).replace("{last}", last)
        response = client.request(
            asked.method,
            asked.path.replace("{last}", last),
            content=asked.raw if asked.raw is not None else None if asked.body is None else body,
            headers={"content-type": "application/json", **asked.headers},
        )
        text = response.text
        if asked.path == "/v1/responses" and '"id":"resp_' in text:
            last = "resp_" + text.partition('"id":"resp_')[2].partition('"')[0]
        elif asked.path == "/api/profiles" and asked.method == "POST" and response.is_success:
            last = response.json()["data"]["id"]
        streamed = "event-stream" in response.headers.get("content-type", "")
        streamed |= "ndjson" in response.headers.get("content-type", "")
        yield {
            "asked": asked.label,
            "status": response.status_code,
            "headers": {
                name: mask.text(response.headers[name])
                for name in _HEADERS
                if name in response.headers
            },
            "answer": mask.stream(text) if streamed else mask.body(text),
        }


def _tokens(models: Path) -> Iterator[Any]:
    """Token ids of every test family, alone and in rows; and the peak of memory of one row."""
    for family in FAMILIES:
        folder = models / family
        if not folder.exists():
            write_model(folder, family)
        settings = mlxsrv.Settings(model=(f"m={folder}",), hf_cache=False)
        with TestClient(mlxsrv.create_app(settings)) as client:
            mx.reset_peak_memory()
            alone = [_ids(client, body) for body in _prompts()]
            peak = mx.get_peak_memory()
            with ThreadPoolExecutor(6) as threads:
                rows = [*threads.map(lambda body: _ids(client, body), _prompts())]
        yield {"family": family, "alone": alone, "rows": rows, "peak_mb": round(peak / 2**20)}


def _prompts() -> Iterator[Body]:
    for number, length in enumerate((3, 17, 40, 90, 200, 7)):
        prompt = [5 + (31 * number + 7 * place) % 200 for place in range(length)]
        yield {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 20,
            "return_token_ids": True,
            **({"temperature": 0} if number % 2 else {"seed": number, "top_p": 0.9}),
        }


def _ids(client: TestClient, body: Body) -> list[int]:
    answer = client.post("/v1/completions", json=body).json()
    return list(answer["choices"][0]["token_ids"]) if "choices" in answer else [-1]


def _write(path: Path, lines: Any) -> None:
    openapi = path.stem.startswith("openapi")  # the order of its keys means nothing
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, sort_keys=openapi) + "\n")


def _compare(before: Path, after: Path) -> int:
    differences = 0
    for path in sorted(before.glob("*.json*")):
        old, new = (each.read_text("utf-8").splitlines() for each in (path, after / path.name))
        found = [number for number, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
        print(f"{path.name}: {len(old)} and {len(new)}, {len(found)} differ")
        differences += len(found) + abs(len(old) - len(new))
        for number in found[:40]:
            one, other = old[number], new[number]
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            print(f"  line {number + 1}: {one[:90]}")
            print(f"    before ...{one[max(0, at - 60) : at + 140]}")
            print(f"    after  ...{other[max(0, at - 60) : at + 140]}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
