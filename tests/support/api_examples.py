"""The examples of `/openapi.json`, asked of a real server in the order in which they stand.

    python -m tests.support.api_examples    asks them, and writes the answers into the file anew

Answers of random models are written by hand, and stay.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import mlxsrv
from tests.support.encoder_folders import write as write_encoder_folder
from tests.web.test_infill import write_infiller

FILE = Path(mlxsrv.__file__).parent / "wire" / "examples.json"
BY_HAND = (
    *("infill", "createFIMCompletion", "rerank", "rerankAsCohere", "registerSAE"),
    *("getMetrics", "getDescription"),
)
"""Operations whose answers in the file are written by hand, or left out."""

Example = dict[str, Any]


def read_examples() -> list[Example]:
    """The examples in the file, in their order."""
    examples: list[Example] = json.loads(FILE.read_text("utf-8"))
    return examples


def settings(folder: Path) -> mlxsrv.Settings:
    """A server that can answer all of them: models are made in `folder`."""
    coder = write_infiller(folder / "coder", "Qwen2.5-Coder, Qwen3-Coder")
    reranker = write_encoder_folder(folder / "reranker", "bert-classifier")
    return mlxsrv.Settings(
        model=("demo", f"coder={coder}", f"reranker={reranker}"),
        hf_cache=False,
        allow_download=True,
        metrics=True,
        ollama_root=True,
        data_dir=str(folder / "data"),
    )


def ask(client: TestClient) -> Iterator[tuple[Example, Any]]:
    """Send each example. An id that the server makes stands in later requests as it is now."""
    routes = {
        told["operationId"]: (method, path)
        for path, methods in client.get("/openapi.json").json()["paths"].items()
        for method, told in methods.items()
    }
    now: dict[str, str] = {}
    for example in read_examples():
        method, path = routes[example["operation"]]
        values = {name: now.get(id, id) for name, id in example.get("path", {}).items()}
        response = client.request(
            method,
            path.format(**values),
            params=example.get("query"),
            json=example.get("body"),
        )
        if values:
            example["path"] = values
        if example["operation"] in ("createProfile", "createResponse"):
            now[_id(example["answer"])] = _id(response.json())
        yield example, response


def _id(answer: Any) -> str:
    return str((answer.get("data") or answer)["id"])


def _short(answer: Any) -> Any:
    """The answer with the beginnings of long texts and lists."""
    match answer:
        case dict():
            return {name: _short(value) for name, value in answer.items()}
        case list():
            return [_short(value) for value in (answer[:4] if len(answer) > 8 else answer)]
        case str() if len(answer) > 300:
            return f"{answer[:200]} ..."
    return answer


def main() -> None:
    lines = []
    with (
        tempfile.TemporaryDirectory() as folder,
        TestClient(mlxsrv.create_app(settings(Path(folder)))) as client,
    ):
        for example, response in ask(client):
            print(response.status_code, example["operation"])
            if example["operation"] not in BY_HAND:
                is_json = response.headers["content-type"].startswith("application/json")
                example["answer"] = _short(response.json() if is_json else response.text)
            lines.append(json.dumps(example, ensure_ascii=False))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
