"""A model that is wrong beside others is served one row at a time, and says so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.architectures import write_architecture
from tests.support.client import answer, ask, chat
from tests.support.serving import serving


def test_requests_that_overlap_are_answered_one_after_the_other(tmp_path: Path) -> None:
    folder = write_architecture(tmp_path / "model", "gpt_bigcode")
    with serving(tmp_path, f"--model=t={folder}") as server, server.client() as client:
        bodies = [chat("word " * words) for words in (1, 9, 30)]
        alone = [ask(client, body) for body in bodies]
        with ThreadPoolExecutor() as threads:
            together = [*threads.map(lambda body: ask(client, body), bodies)]
        assert [*map(answer, together)] == [*map(answer, alone)]
        [model] = client.get("/health?verbose=1").json()["models"]
        assert model["max_rows"] == 1
        reason = server.logged("option not applied")["reason"]
        assert reason.startswith("max_concurrency: rows of this model decode one at a time: beside")
