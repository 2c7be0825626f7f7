"""A client that is killed while its long prompt is read, and asks again: what was read is there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from tests.support import faulty
from tests.support.client import COMPLETIONS, ask, completion
from tests.support.effort import often
from tests.support.serving import PATIENCE, Server, serving_faulty, wait_for
from tests.support.tiny import write_model

SIZE = 20_000
CHUNK = 512
CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read())
request.add_header("Content-Type", "application/json")
urllib.request.urlopen(request).read()
"""


@pytest.fixture(scope="module")
def sluggish(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Takes at least a tenth of a second for each slice of a prompt, and little more."""
    folder = tmp_path_factory.mktemp("sluggish")
    one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    more = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 2 * SIZE}
    model = write_model(folder / "model", "qwen3", plain=True, **one, **more)
    options = ["--model", f"t={model}", "--prefill-chunk", f"{CHUNK}"]
    with serving_faulty(folder, *options) as server:
        server.logged("model loaded")
        yield server


def engine(server: Server) -> dict[str, int]:
    [model] = httpx.get(f"{server.url}/health?verbose=1", timeout=PATIENCE).json()["models"]
    return dict(model["engine"])


@pytest.mark.parametrize("stream", often([True, False], [True]))
def test_a_client_killed_half_way_through_a_long_prompt_goes_on_from_there(
    sluggish: Server, stream: bool
) -> None:
    prompt = [60 + stream, *[faulty.SLUGGISH] * (SIZE - 1)]
    body = completion(prompt, max_tokens=1)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, sluggish.url + COMPLETIONS], stdin=subprocess.PIPE
    )
    try:
        assert client.stdin is not None
        client.stdin.write(msgspec.json.encode(body | {"stream": stream}))
        client.stdin.close()
        wait_for(lambda: engine(sluggish)["reading"] == 1, why="its prompt is read")
        time.sleep(15 * faulty.SLUGGISH_SECONDS)  # some slices, of forty
    finally:
        client.kill()
        client.wait()
    wait_for(lambda: engine(sluggish)["reading"] == 0, why="its prompt is read no more")
    with httpx.Client(base_url=sluggish.url, timeout=120) as again:
        usage = ask(again, body, COMPLETIONS)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] == SIZE
    assert cached % CHUNK == 0, "all slices that were read"
    assert 2 * CHUNK <= cached < SIZE - 1
