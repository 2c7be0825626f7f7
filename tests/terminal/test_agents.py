"""`mlxsrv run`: agents get settings for one session; programs that print them stand for the agents.

tests/clients/test_agents.py has the real ones do work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.terminal.test_chat import EndlessAnswer

AGENT = """#!/bin/sh
echo "arguments: $*"
env
for each in "$@" "$OPENCODE_CONFIG" "$QWEN_CODE_SYSTEM_SETTINGS_PATH"; do
    if [ -f "$each" ]; then cat "$each"; fi
done
exit 7
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that has a model called endless, and agents in a home of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("codex", "claude", "opencode", "qwen"):
        (folder / name).write_text(AGENT)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), EndlessAnswer) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_agent_runs_with_settings_for_one_session(run: Run, url: str, tmp_path: Path) -> None:
    for agent, wanted in {
        "codex": (
            '-c model="endless" -c model_provider="mlxsrv"',
            f'-c model_providers.mlxsrv.base_url="{url}/v1"',
            '-c model_providers.mlxsrv.env_key="MLXSRV_API_KEY"',
        ),
        "claude": (
            "arguments: --settings ",
            f'"ANTHROPIC_BASE_URL": "{url}"',
            '"apiKeyHelper": "printenv MLXSRV_API_KEY"',
        ),
        "opencode": (
            f'"baseURL": "{url}/v1"',
            '"model": "mlxsrv/endless"',
            '"apiKey": "{env:MLXSRV_API_KEY}"',
        ),
        "qwen-code": (
            f"OPENAI_BASE_URL={url}/v1",
            "OPENAI_MODEL=endless",
            "OPENAI_API_KEY=sesame",
            f'"baseUrl": "{url}/v1"',
        ),
    }.items():
        variables = {"MLXSRV_API_KEY": "sesame", "OPENAI_API_KEY": "foreign"}
        done = run("run", agent, "--url", url, "--", "exec", "--port", "a b", **variables)
        assert done.returncode == 7, done.stderr
        assert "exec --port a b" in done.stdout
        assert "MLXSRV_API_KEY=sesame" in done.stdout
        for text in wanted:
            assert text in done.stdout, agent
        assert f"with endless at {url}" in done.stderr
        assert "sesame" not in done.stdout.replace("_API_KEY=sesame", "")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_what_ends_the_command_ends_the_agent_first(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "bin" / "codex").write_text(
        "#!/bin/sh\ntrap 'echo saved; exit 3' TERM\nkill -INT $PPID; kill -TERM $PPID\n"
        "for each in $(seq 1000); do sleep 0.05; done\n"
    )
    done = run("run", "codex", "--url", url)
    assert (done.returncode, done.stdout) == (3, "saved\n"), done.stderr


def test_what_cannot_be_run_is_told(run: Run, url: str) -> None:
    for arguments, told in (
        ([], "name an agent; there are: codex, claude, "),
        (["codx"], "'codx' is not an agent; did you mean codex?"),
        (["zed"], "zed is set up, not run: mlxsrv connect zed"),
        (["aider"], "aider is not installed here: there is no program 'aider'"),
        (["codex", "--url", "http://127.0.0.1:9"], "no server runs at http://127.0.0.1:9"),
    ):
        done = run("run", *arguments)
        assert done.returncode in (1, 2)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)
        assert told in done.stderr
