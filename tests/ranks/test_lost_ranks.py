"""Ranks end together: by a signal, when one of them is killed, and when one hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from mlxsrv import create_app
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.client import COMPLETIONS, RawClient, completion
from tests.support.ranks import PATIENCE, launch, launched, ranks
from tests.support.serving import Server, wait_for
from tests.support.tiny import write_model

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks]

ENDLESS = completion("on and on", max_tokens=500_000, stream=True)
TEXT = rb'"text":"[^"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with more context than a test lasts."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, "qwen3", plain=True, max_position_embeddings=10**6)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_requests_and_all_ranks(
    folder: Path, tmp_path: Path, victim: int
) -> None:
    options = ("--model", f"m={folder}", "--parallel", "tensor")
    with (
        ranks(2, tmp_path, *options) as running,
        RawClient(running.server, ENDLESS, COMPLETIONS) as client,
    ):
        client.until(TEXT, seconds=PATIENCE)
        running.signal(victim, signal.SIGKILL)
        if victim:
            client.until(rb'"code":"engine_failed"', seconds=PATIENCE)
        else:
            with suppress(ConnectionResetError):
                while client.read(seconds=PATIENCE):
                    pass
            assert b"[DONE]" not in client.data
        statuses = running.exit_statuses()
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] == 3
        assert f"rank {victim}" in running.read_log(1 - victim)


@pytest.mark.parametrize("signalled", [(1,), (0, 1)])
def test_sigterm_to_any_rank_drains_and_ends_all(
    folder: Path, tmp_path: Path, signalled: tuple[int, ...]
) -> None:
    options = ("--model", f"m={folder}", "--parallel", "tensor", "--shutdown-grace", "600")
    body = ENDLESS | {"max_tokens": 300}
    with (
        ranks(2, tmp_path, *options) as running,
        RawClient(running.server, body, COMPLETIONS) as client,
    ):
        client.until(TEXT, seconds=PATIENCE)
        for rank in signalled:
            running.signal(rank, signal.SIGTERM)
        client.until(rb'"finish_reason":"length"', seconds=PATIENCE)
        assert running.exit_statuses() == [0, 0]


@pytest.mark.long
def test_the_watchdog_names_a_rank_that_hangs(folder: Path, tmp_path: Path) -> None:
    options = ("--model", f"m={folder}", "--parallel", "tensor", "--step-timeout", "4")
    with (
        ranks(2, tmp_path, *options) as running,
        RawClient(running.server, ENDLESS, COMPLETIONS) as client,
    ):
        client.until(TEXT, seconds=PATIENCE)
        running.signal(1, signal.SIGSTOP)
        slow = running.server.logged("slow step")
        assert "rank 1 is silent" in slow["ranks"], slow
        running.signal(1, signal.SIGCONT)
        client.until(rb"(?s).{%d}" % (len(client.data) + 100_000), seconds=PATIENCE)
        assert b'"error"' not in client.data


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt-cache-dir", "x"), "--prompt-cache-dir cannot be used with --parallel"),
        (("--draft-model", "ngram"), "--draft-model cannot be used with --parallel"),
    ],
)
def test_options_that_ranks_cannot_have_are_refused_at_start(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    started = launch(["--port", "0", "--parallel", "tensor", *options], 2, tmp_path)
    assert started.exit_statuses() == [2, 2]
    assert said in started.read_log(0)


def test_a_model_that_ranks_cannot_share_is_refused_with_the_kinds_that_they_can(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "model", "mamba", plain=True)
    with ranks(2, tmp_path / "ranks", "--model", f"m={folder}", "--parallel", "tensor") as running:
        answer = httpx.post(f"{running.server.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "no tensor parallelism" in message
        assert "qwen3," in message


def test_one_rank_alone_is_told_to_use_the_launcher(tmp_path: Path) -> None:
    started = launch(["--port", "0", "--parallel", "tensor"], 1, tmp_path, variables=False)
    [status] = started.exit_statuses()
    assert status == 1
    assert "mlx.launch" in wait_for(lambda: started.read_log(0), why="it says why")


def test_a_mounted_app_cannot_be_one_of_several_ranks() -> None:
    with pytest.raises(SettingsError, match=r"mlx\.launch"):
        create_app(Settings(parallel="tensor"))


def alive(session: int) -> int:
    """The number of running processes of a session; a zombie does not run."""
    states = subprocess.run(
        ["ps", "-o", "stat=", "-s" if sys.platform == "linux" else "-g", str(session)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return sum(not state.startswith("Z") for state in states)


def test_ranks_end_with_their_launcher(folder: Path, tmp_path: Path) -> None:
    """It dies of SIGTERM, and hands nothing on."""
    options = f"--port 0 --log-format json --parallel tensor --model m={folder}"
    log = tmp_path / "log"
    with launched(2, log, "-m", "mlxsrv", *options.split()) as process:
        server = Server(process, log)
        wait_for(lambda: server.log("listening"), seconds=PATIENCE, why="the server listens")
        with server.client() as client:
            wait_for(
                lambda: client.get("/health").status_code == 200,
                seconds=PATIENCE,
                why="the model is loaded",
            )
            [rank0] = server.log("listening")
            assert rank0["model"] == "m"
            assert len(server.log("ranks joined")) == 2
        assert alive(process.pid) == 3
        process.terminate()
        process.wait(PATIENCE)
        wait_for(lambda: not alive(process.pid), seconds=PATIENCE, why="the ranks end")
