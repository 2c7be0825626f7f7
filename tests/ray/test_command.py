"""`python -m mlxsrv replicas` serves until a signal."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.ray.conftest import commanded


def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    with commanded(tmp_path, "--replicas", "2") as command:
        assert command.announced == "2 replicas"
        asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{command.url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        command.stop()
