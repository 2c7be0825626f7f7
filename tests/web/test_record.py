"""Records of running servers: a crowd with faults is replayed to the same plans."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support import faulty
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    RawClient,
    answer,
    ask,
    chat,
    completion,
)
from tests.support.fixtures import Folders
from tests.support.poisoning import BEGIN, FOR_EVER, at_rest, engine, poisoned
from tests.support.saes import write_sae
from tests.support.serving import Server, environment, serving_faulty, wait_for

CHUNK = 64
SYSTEM = "You are a sailor and know all about the sea, the wind and the stars. " * 3


def replay(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlxsrv", "replay", str(path), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def crowd(server: Server, client: httpx.Client) -> None:
    """Everything that a server does, at once."""
    for text in ("One.", "Two."):  # a chat goes on, so its prompt is kept
        ask(client, chat(SYSTEM + text))
    client.post("/api/saes/sae/attach", json={"model": "t"}).raise_for_status()
    bodies = [chat(f"{SYSTEM}{i}", max_tokens=10 + 7 * i) for i in range(5)]
    bodies += [chat("Sing.", max_tokens=30, temperature=0.9, seed=3, n=3)]
    bodies += [chat("Steer.", max_tokens=30, steering={"5": 4.0})]
    bodies += [chat("x " * 700, max_tokens=5), chat("Score.", logprobs=True, top_logprobs=2)]
    bodies += [chat("Ban.", logit_bias={"40": 5}, presence_penalty=1.0, max_tokens=20)]
    faults = [poisoned(each) for each in (faulty.RAISES, faulty.NAN, faulty.MEMORY)]
    grammar = completion("Say:", guided_regex="[ab]{12}", temperature=1, seed=1, max_tokens=20)
    endless = chat(max_tokens=FOR_EVER, stream=True)
    long = completion([faulty.SLUGGISH] * (200 * CHUNK))
    with (
        ThreadPoolExecutor(20) as threads,
        RawClient(server, long, COMPLETIONS) as reading,
        RawClient(server, endless) as leaving,
    ):
        # It is half read when memory is short, so it is read anew.
        wait_for(lambda: engine(client)["reading"], why="the long prompt is read")
        asked = [threads.submit(ask, client, body) for body in bodies]
        leaving.until(FIRST_CONTENT)
        failed = [threads.submit(client.post, COMPLETIONS, json=body) for body in faults]
        held = threads.submit(ask, client, grammar, COMPLETIONS)
        texts = {"model": "t", "input": ["hello", "there " * 40]}
        embedded = threads.submit(client.post, "/v1/embeddings", json=texts)
        other = threads.submit(ask, client, chat(model="u"))
        leaving.hang_up()  # where memory is short, others may wait for its row
        assert [each.result().status_code for each in failed] == [500] * 3
        reading.hang_up()
        assert re.fullmatch("[ab]{12}", answer(held.result()))
        assert embedded.result().status_code == 200
        for each in [*asked, other]:
            each.result()
    wait_for(lambda: at_rest(client), why="all rows are free")
    client.post("/api/saes/sae/detach", json={"model": "t"}).raise_for_status()
    ask(client, chat(SYSTEM + "Three."))
    assert client.post(CHAT, json=chat("gone", max_tokens=1)).status_code == 200


def test_a_crowd_is_replayed_to_the_same_plans(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path
    write_sae(folder / "saes" / "sae", d_in=64, d_sae=128)
    path = folder / "record"
    options = ["--model", f"t={folders.endless}", "--model", f"u={folders.thinking}"]
    options += ["--sae-dir", str(folder / "saes"), "--data-dir", str(folder / "data")]
    options += ["--record", str(path), "--prefill-chunk", f"{CHUNK}"]
    with serving_faulty(folder, *options) as server, server.client() as client:
        crowd(server, client)
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no difference\n")
    for reason in ("this token is refused", "the model computed NaN", "too many"):
        assert reason in done.stdout
    text = path.read_text()
    for kind in ("EmbedSlice", "Cancel", "Attach", "Detach", "Rewind", "Forget"):
        assert f'"type":"{kind}"' in text, kind
    assert text.count("[ab]{12}") == 1, "the grammar is in its order"


def test_the_record_of_a_thread_that_died_ends_with_what_it_did(
    folders: Folders, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    arguments = ["--model", f"t={folders.endless}", "--record", str(path)]
    with serving_faulty(tmp_path, *arguments) as server, server.client() as client:
        ask(client, chat())
        response = client.post(COMPLETIONS, json=completion([*BEGIN, faulty.DEADLY]))
        assert response.status_code == 503
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the record ends before this was done: Decode" in done.stdout
