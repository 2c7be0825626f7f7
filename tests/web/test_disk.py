"""Prompts on disk over HTTP: restarts, sudden ends, two servers on one folder."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client import CHAT, Body, answer, ask, chat
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, wait_for

LONG = "The quick brown fox jumps over the lazy dog. " * 30


def options(folders: Folders, disk: Path, *more: str) -> list[str]:
    return ["--model", f"t={folders.plain}", "--prompt-cache-dir", str(disk), *more]


def cached(body: Body) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def numbers(client: httpx.Client) -> dict[str, int]:
    [model] = client.get("/health?verbose=1").json()["models"]
    found: dict[str, int] = model["engine"]
    return found


def first_turn(client: httpx.Client, text: str = LONG, **more: Any) -> list[Body]:
    """Have a question answered. Returns the chat, with its next question."""
    told = ask(client, chat(text, max_tokens=8, temperature=0, **more))
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer(told)},
        {"role": "user", "content": "And then?"},
    ]


def test_a_chat_goes_on_after_a_restart(folders: Folders, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        turns = first_turn(client)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
    arguments = options(folders, disk, "--metrics")
    with serving(tmp_path, *arguments) as server, server.client() as client:
        warm = ask(client, chat(messages=turns, max_tokens=8, temperature=0))
        told = numbers(client)
        assert told["prompt_cache_disk_hits"] == 1
        assert told["prompt_cache_disk_hit_tokens"] == cached(warm)
        assert told["prompt_cache_disk_files"] >= 2
        assert told["prompt_cache_disk_bytes"] == sum(
            file.stat().st_size for file in disk.rglob("*.safetensors")
        )
        text = client.get("/metrics").text
        for name in ("bytes", "files", "hits_total", "hit_tokens_total", "writes_total"):
            assert f'mlxsrv:prompt_cache_disk_{name}{{model_name="t"}}' in text
    with serving(tmp_path, "--model", f"t={folders.plain}") as server, server.client() as client:
        cold = ask(client, chat(messages=turns, max_tokens=8, temperature=0))
    assert cached(cold) == 0
    assert cached(warm) > 0.8 * warm["usage"]["prompt_tokens"]
    assert answer(warm) == answer(cold)


def test_what_a_client_left_is_there_after_a_restart(folders: Folders, tmp_path: Path) -> None:
    """It hangs up in the middle of its answer, and comes back to another process."""
    disk, text = tmp_path / "kv", LONG * 2
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        body = chat(text, max_tokens=2000, stream=True)
        with client.stream("POST", CHAT, json=body) as response:
            told = (line for line in response.iter_lines() if '"content":"' in line)
            next(line for line in told if '"content":""' not in line)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        again = ask(client, chat(text, max_tokens=4))
        assert cached(again) > 0.8 * again["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.02, marks=pytest.mark.long)])
def test_after_sigkill_the_folder_is_of_use(
    folders: Folders, tmp_path: Path, seconds: float
) -> None:
    disk = tmp_path / "kv"
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        turns = first_turn(client, "Remember this one. " + LONG)
        wait_for(lambda: numbers(client)["prompt_cache_disk_files"] >= 2, why="it is written")

        def ask_on() -> None:
            with server.client() as mine:
                for number in range(1000):
                    try:
                        mine.post(CHAT, json=chat(f"{number} {LONG * 3}", max_tokens=2))
                    except httpx.TransportError:
                        return

        asking = threading.Thread(target=ask_on)
        asking.start()
        before = numbers(client)["prompt_cache_disk_files"]
        wait_for(lambda: len([*disk.rglob("*.safetensors*")]) > before + 2, why="more is written")
        time.sleep(seconds)  # another moment of a write
        server.signal(signal.SIGKILL)
        asking.join(PATIENCE)
        assert not asking.is_alive()
        assert server.exit_status() == -signal.SIGKILL
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        warm = ask(client, chat(messages=turns, max_tokens=8, temperature=0))
        assert cached(warm) > 0.8 * warm["usage"]["prompt_tokens"]
        assert not server.log("a stored prompt is removed"), "whole files only"
        own = f"{server.process.pid}-"
        assert not [each for each in disk.rglob("*-unfinished") if not each.name.startswith(own)]


def test_two_servers_share_a_folder(folders: Folders, tmp_path: Path) -> None:
    """Each writes, reads and evicts; no answer suffers, and the bound holds for both."""
    disk, most = tmp_path / "kv", 2_000_000
    arguments = options(folders, disk, "--prompt-cache-disk-bytes", str(most))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "a", *arguments) as one,
        serving(tmp_path / "b", *arguments) as two,
        one.client() as first,
        two.client() as second,
    ):
        expected = answer(ask(first, chat(LONG, max_tokens=8, temperature=0)))

        def work(client: httpx.Client, name: str) -> None:
            for number in range(8):
                first_turn(client, f"{name} {number} {LONG}")
                assert answer(ask(client, chat(LONG, max_tokens=8, temperature=0))) == expected

        threads = [
            threading.Thread(target=work, args=each) for each in ((first, "a"), (second, "b"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        wait_for(
            lambda: all(numbers(each)["prompt_cache_disk_writes"] > 5 for each in (first, second)),
            why="both have written",
        )
        for server in (one, two):
            assert not server.log("prompts are not stored for now")
            assert not server.log("a stored prompt is removed")
            server.signal(signal.SIGTERM)
            assert server.exit_status() == 0
    sizes = [file.stat().st_size for file in disk.rglob("*") if file.is_file()]
    assert 0 < sum(sizes) <= most + 2 * max(sizes), "but for the file that each was writing"


def test_a_folder_that_cannot_be_used_is_told_once(folders: Folders, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    disk.write_text("a file")
    with serving(tmp_path, *options(folders, disk)) as server, server.client() as client:
        for text in ("one " + LONG, "two " + LONG):
            first_turn(client, text)
        assert len(server.log("prompts are not stored")) == 1
        assert "prompt_cache_disk_files" not in numbers(client)


def test_a_server_without_the_option_touches_no_disk(server: Server, client: httpx.Client) -> None:
    ask(client, chat(model="t", max_tokens=2))
    models = client.get("/health?verbose=1").json()["models"]
    assert not [name for model in models for name in model["engine"] if "disk" in name]
