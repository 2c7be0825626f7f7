"""One limit for weights, rows and kept prompts, as clients and operators see it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.client import Body, ask, chat
from tests.support.effort import EFFORT, often
from tests.support.fixtures import ModelFolder
from tests.support.heavy import PER_LAYER, ask_all, make_work, write_heavy
from tests.support.saes import write_sae
from tests.support.serving import Server, serving, wait_for

Memory = dict[str, int]

FEW, MANY = 7, 14
PATIENCE = 300.0
REQUESTS = MANY if EFFORT == "long" else FEW
ANSWER = 640
"""Tokens that an answer has at most: several steps by which KV caches grow, so rows surely have to
give way."""
OPTIONS = ("--no-hf-cache", "--prefill-chunk=64")
LAYERS = 2
PER_TOKEN = LAYERS * PER_LAYER
SHORT_ROW = 2 * 512 * PER_TOKEN
TOKENS = 1150
ROOM = TOKENS * PER_TOKEN
"""Bytes for KV caches. A row has its own twice while it joins others."""


def health(client: httpx.Client) -> Body:
    return dict(client.get("/health?verbose=1").json())


def memory(client: httpx.Client) -> Memory:
    return dict(health(client)["memory"])


def at_rest(told: Memory) -> Memory | None:
    return None if told["rows"] or told["reading"] else told


def preemptions(client: httpx.Client) -> int:
    return sum(model["engine"].get("preemptions", 0) for model in health(client)["models"])


class Heavy:
    """Two models that are mostly KV cache, work for them, and the texts that are right."""

    def __init__(self, folder: Path) -> None:
        self.models = [
            f"--model={name}={write_heavy(folder / name, seed=seed, layers=LAYERS)}"
            for seed, name in enumerate("xy")
        ]
        self.weights = (folder / "x" / "model.safetensors").stat().st_size
        numbers = {"x": REQUESTS, "y": REQUESTS // 2}
        self.work = {
            name: make_work(number, model=name, answer=ANSWER) for name, number in numbers.items()
        }
        with serving(folder, *self.models, *OPTIONS) as server:
            self.right = {name: asyncio.run(ask_all(server.url, self.work[name])) for name in "xy"}

    @contextmanager
    def served(self, folder: Path, limit: int, *options: str) -> Iterator[Server]:
        """A server with so much memory. In the end MLX had never more in use than that and what one
        step works with."""
        arguments = (*self.models, *OPTIONS, f"--memory-limit={limit}", *options)
        with serving(folder, *arguments) as server, server.client() as client:
            server.logged("model loaded")
            begun = memory(client)
            yield server
            told = wait_for(lambda: at_rest(memory(client)), why="the rows are free")
            # The warm-up reads and decodes as well, a few tokens only; each model makes steps.
            models = {line["model"] for line in server.log("model loaded")}
            step = len(models) * (begun["peak"] - begun["weights"])
            assert told["peak"] <= limit + step
            assert step < limit / 2
            assert told["kept"] <= told["budget"]


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Heavy:
    return Heavy(tmp_path_factory.mktemp("heavy"))


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
    options = (*models, "--no-hf-cache", f"--memory-limit={limit}", "--log-level=debug")
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


@pytest.mark.parametrize("requests", often([FEW, MANY], [FEW]))
@pytest.mark.slow
def test_more_work_than_fits_is_all_answered(heavy: Heavy, tmp_path: Path, requests: int) -> None:
    """And right, with prompts kept beside it as far as there is room. Three times as many tokens
    are generated as there is room for, and six times in long runs."""
    limit = heavy.weights + ROOM
    with heavy.served(tmp_path, limit) as server, server.client() as client:
        assert memory(client)["budget"] < ROOM * 1.01
        work, right = heavy.work["x"][:requests], heavy.right["x"][:requests]
        assert asyncio.run(ask_all(server.url, work)) == right
        [generated] = [model["engine"]["tokens"] for model in health(client)["models"]]
        assert generated > 2.5 * TOKENS * requests / FEW
        assert preemptions(client) > 0, "some rows had to give way"
        assert memory(client)["kept"] > 0


@pytest.mark.parametrize("requests", often([3, 6], [3]))
@pytest.mark.slow
def test_the_limit_holds_beside_swaps_embeddings_and_an_sae(
    heavy: Heavy, tmp_path: Path, requests: int
) -> None:
    """Both models fit with a little for rows; first one has nobody's attention, then an SAE."""
    write_sae(tmp_path / "saes" / "one")
    limit = 2 * heavy.weights + 2 * ROOM
    sae_dir = f"--sae-dir={tmp_path / 'saes'}"
    options = (sae_dir, "--log-level=debug")
    with heavy.served(tmp_path, limit, *options) as server, server.client() as client:
        with embedding(server):
            for part in (slice(0, requests), slice(requests, 2 * requests)):
                work = [*heavy.work["x"][part], *heavy.work["y"][part]]
                right = [*heavy.right["x"][part], *heavy.right["y"][part]]
                assert asyncio.run(ask_all(server.url, work)) == right
                attached = client.post("/api/saes/one/attach", json={"model": "x"})
                assert attached.json()["success"] == (part.start == 0)
        assert len(server.log("memory divided")) >= 3


@contextmanager
def embedding(server: Server, words: int = 50) -> Iterator[None]:
    """Texts are embedded all the time, one of them of so many words."""
    over = threading.Event()
    statuses: set[int] = set()

    def embed() -> None:
        with server.client() as client:
            while not over.wait(0.1):
                statuses.add(post_texts(client, "ship " * words, "sea").status_code)

    thread = threading.Thread(target=embed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert statuses == {200}


def post_texts(client: httpx.Client, *texts: str) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": "x", "input": texts}, timeout=PATIENCE)


@pytest.mark.slow
def test_the_limit_holds_beside_long_texts_to_embed(heavy: Heavy, tmp_path: Path) -> None:
    """Their KV caches take half of the memory."""
    with heavy.served(tmp_path, heavy.weights + ROOM) as server, server.client() as client:
        tokens = post_texts(client, "ship " * 100).json()["usage"]["total_tokens"]
        with embedding(server, words=100 * TOKENS // 2 // tokens):
            work, right = heavy.work["x"][:5], heavy.right["x"][:5]
            assert asyncio.run(ask_all(server.url, work)) == right


def test_a_text_to_embed_that_never_fits_is_a_507(heavy: Heavy, tmp_path: Path) -> None:
    with heavy.served(tmp_path, heavy.weights + ROOM) as server, server.client() as client:
        tokens = post_texts(client, "ship " * 100).json()["usage"]["total_tokens"]
        refused = post_texts(client, "sea", "ship " * (120 * TOKENS // tokens))
        assert refused.status_code == 507, refused.text
        error = refused.json()["error"]
        assert error["code"] == "insufficient_memory"
        told = re.search(
            r"need (\d+) bytes of memory.* there are (\d+): .*--memory-limit", error["message"]
        )
        assert told is not None, error
        assert int(told[1]) > int(told[2]) == memory(client)["budget"]


def test_idle_models_go_for_requests_that_need_their_memory(heavy: Heavy, tmp_path: Path) -> None:
    limit = 2 * heavy.weights + 2 * SHORT_ROW
    with heavy.served(tmp_path, limit) as server, server.client() as client:
        ask(client, heavy.work["y"][0] | {"max_tokens": 1})
        assert len(server.log("model loaded")) == 2
        work, right = heavy.work["x"][:5], heavy.right["x"][:5]
        assert asyncio.run(ask_all(server.url, work)) == right
        gone = server.logged("model unloaded", model="y")
        assert gone["reason"] == "room for requests"


@pytest.mark.slow
def test_the_limit_holds_where_one_model_makes_room_for_the_other(
    heavy: Heavy, tmp_path: Path
) -> None:
    limit = 2 * heavy.weights + 2 * SHORT_ROW * 9 // 10
    with heavy.served(tmp_path, limit) as server, server.client() as client:
        work = [heavy.work[name][number] for number in range(3) for name in "xy"]
        right = [heavy.right[name][number] for number in range(3) for name in "xy"]
        assert asyncio.run(ask_all(server.url, work)) == right
        assert len(server.log("models switched")) >= 1
        assert memory(client)["weights"] <= heavy.weights, "the other one has gone"
