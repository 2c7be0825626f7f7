"""One limit for weights, rows and kept prompts, as clients and operators see it."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.client import ask, chat
from tests.support.fixtures import ModelFolder
from tests.support.serving import serving

Memory = dict[str, int]


def memory(client: httpx.Client) -> Memory:
    return dict(client.get("/health?verbose=1").json()["memory"])


def test_what_a_row_takes_is_told_by_kind_of_layer(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    families = ("qwen3", "gemma3_text", "lfm2")
    models = [f"--model={name}={model_folder(name)}" for name in families]
    number = 2 * 16 * 4  # two heads of 16 numbers, each of four bytes
    full = {"kind": "full", "bytes_per_token": 2 * number, "window": None, "bytes": 0}
    with serving(tmp_path, *models, "--no-hf-cache") as server, server.client() as client:
        for name in families:
            ask(client, chat(model=name))
        known = {
            model["id"]: model["kv_cache"] for model in client.get("/v1/models").json()["data"]
        }
        assert known["demo"] is None, "it is not loaded"
        assert known["qwen3"] == [full | {"bytes_per_token": 2 * 2 * number}]
        assert known["gemma3_text"] == [
            full,
            full | {"kind": "window", "bytes_per_token": 2 * 2 * number, "window": 16},
        ]
        attention, state = known["lfm2"]
        assert attention == full
        assert (state["kind"], state["bytes_per_token"]) == ("state", 0)
        assert state["bytes"] > 0
        models = client.get("/health?verbose=1").json()["models"]
        assert {model["id"]: model["kv_cache"] for model in models} == {
            name: known[name] for name in families
        }


def test_the_log_says_how_memory_is_divided(model_folder: ModelFolder, tmp_path: Path) -> None:
    limit = 40_000_000
    models = [f"--model={name}={model_folder(name)}" for name in ("qwen3", "gemma3_text")]
    options = (*models, "--no-hf-cache", f"--memory-limit={limit}")
    with serving(tmp_path, *options) as server, server.client() as client:
        first = server.logged("memory divided")
        assert first["limit"] == limit == first["weights"] + first["left"]
        server.logged("model loaded")
        told = memory(client)
        assert (told["limit"], told["weights"], told["budget"]) == (
            limit,
            first["weights"],
            first["left"],
        )
        ask(client, chat(model="gemma3_text"))
        _, second = server.log("memory divided")
        assert second["left"] == memory(client)["budget"] < first["left"]
