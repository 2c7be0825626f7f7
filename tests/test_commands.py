"""The commands: called, and as processes where the process matters."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlxsrv.commands import COMMANDS
from mlxsrv.version import __version__
from tests.support.commands import Done, Run
from tests.support.serving import environment
from tests.support.tiny import write_model


def run_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlxsrv", *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models, one of which cannot be served."""
    root = tmp_path_factory.mktemp("models")
    good = write_model(root / "org" / "good", "qwen3")
    shutil.copytree(good, root / "broken")
    (root / "broken" / "model.safetensors").unlink()
    return root


def test_models_are_listed_with_what_their_files_say(run: Run, folder: Path) -> None:
    listed = run("models", "--models-dir", str(folder), "--model", f"x={folder / 'org/good'}")
    assert listed.returncode == 0, listed.stderr
    head, *lines = listed.stdout.splitlines()
    assert head.split() == ["MODEL", "TYPE", "CONTEXT", "PARAMETERS", "WEIGHTS", "SIZE"]
    assert [line.split()[0] for line in lines] == ["demo", "x", "broken"]
    assert "x (default)" in lines[1]
    assert "chat" in lines[1]
    assert "4096" in lines[1]
    assert "cannot be served" in lines[2]
    assert "safetensors" in lines[2]


def test_models_are_listed_as_json(run: Run, folder: Path) -> None:
    listed = run("models", "--json", MLXSRV_MODELS_DIR=str(folder))
    models = {model["id"]: model for model in json.loads(listed.stdout)}
    assert models.keys() == {"demo", "org/good", "broken"}
    assert models["demo"]["default"] is True
    assert models["org/good"]["problem"] is None
    assert models["org/good"]["capabilities"] == ["completion", "chat", "tools", "thinking"]
    assert models["broken"]["type"] is None


def test_nothing_is_loaded_to_list_models(folder: Path) -> None:
    code = (
        "import sys; from mlxsrv.terminal.listing import models;"
        f"models(['--models-dir', {str(folder)!r}]); assert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("modles",), 2, "there is no command 'modles'; did you mean models?"),
        (("ls",), 2, "there is no command 'ls'; did you mean models?"),
        (("-v",), 2, "there is no option -v; did you mean -V, --version?"),
        (("xyzzy",), 2, "there is no command 'xyzzy'; mlxsrv --help lists them"),
        (("serve", "--prot", "1"), 2, "there is no option --prot; did you mean --port?"),
        (("pull", "--quite", "a/b"), 2, "there is no option --quite; did you mean --quiet?"),
        (("--port", "1", "connect", "codex"), 2, "'connect' is a command: mlxsrv connect [OPT"),
        (
            ("--default-temperature", "1"),
            2,
            "no option --default-temperature; see: mlxsrv --help-all",
        ),
        (("serve", "--port"), 2, "--port needs a value: --port PORT"),
        (("chat", "--metrics=on"), 2, "--metrics takes no value, and has 'on'"),
        (("service", "instal"), 2, "'instal' is not an action; did you mean install?"),
        (
            ("service",),
            2,
            "ACTION is missing (one of: install, uninstall, status); see: mlxsrv service --help",
        ),
        (("recommend", "--memory", "64"), 2, "--memory: '64' has no unit, such as 64GB"),
        (("models", "--pin", "nobody"), 2, "'nobody' is not served here"),
        (("pull", "not-a-repository"), 2, "ORG/NAME"),
        (("replay", "/no/record"), 2, "/no/record: No such file"),
        (("replay", __file__), 2, "is no record"),
        (("connect", "nobody"), 2, "'nobody' is not a client; there are: codex, "),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (("models", "--port", "x"), 2, "--port"),
                (("pull", "../x"), 2, "'../x'"),
                (("connect",), 2, "name a client; there are: codex, "),
            )
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    run: Run, arguments: tuple[str, ...], status: int, told: str
) -> None:
    check_one_line(run(*arguments), status, told)


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    # Nothing listens on port 9.
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    check_one_line(run_process("pull", "org/name", **variables), 1, "org/name")


def check_one_line(done: Done | subprocess.CompletedProcess[str], status: int, told: str) -> None:
    assert done.returncode == status, done.stderr
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("mlxsrv: ")


def test_each_command_has_help_of_its_own(run: Run) -> None:
    whole = run("--help").stdout
    for name, command in COMMANDS.items():
        assert f"  {name} " in whole
        assert command.does in whole
        shown = run(name, "--help")
        assert shown.returncode == 0
        assert shown.stdout.startswith("usage: mlxsrv " + ("" if name == "serve" else name))
        assert (run("help", name).stdout, len(shown.stdout) < 4000) == (shown.stdout, True), name
        assert "--prefill-chunk" not in shown.stdout
    assert run("help").stdout == whole
    assert "--prefill-chunk" in run("models", "--help-all").stdout


def test_the_version_is_told(run: Run) -> None:
    for asked in ("--version", "-V", "version"):
        assert run(asked).stdout == f"mlxsrv {__version__}\n"


def test_a_client_is_connected_after_its_user_has_seen_the_difference(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / ".codex" / "config.toml"
    variables = {"HOME": str(tmp_path), "MLXSRV_API_KEY": "sesame"}
    shown = run("connect", "codex", "--port", "9000", **variables)
    assert shown.returncode == 0, shown.stderr
    assert 'base_url = "http://127.0.0.1:9000/v1"' in shown.stdout
    assert 'env_key = "MLXSRV_API_KEY"' in shown.stdout
    assert not file.exists()
    # There is no terminal to ask on.
    refused = run("connect", "codex", "--write", **variables)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert not file.exists()
    file.parent.mkdir()
    file.write_text('# mine\nmodel = "other"\n')
    written = run("connect", "codex", "--write", "--yes", **variables)
    assert written.returncode == 0, written.stderr
    assert '-model = "other"\n' in written.stdout
    assert '+model = "demo"\n' in written.stdout
    assert file.with_name("config.toml.bak1").read_text() == '# mine\nmodel = "other"\n'
    again = run("connect", "codex", "--write", **variables)
    assert "has all of this already" in again.stdout
    for done in (shown, refused, written, again):
        assert "sesame" not in done.stdout + done.stderr + file.read_text()


@pytest.mark.parametrize(("said", "written"), [("y\n", True), ("\x04", False)])
def test_the_user_is_asked_on_the_terminal(said: str, written: bool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, said.encode())
        done = subprocess.run(
            [sys.executable, "-m", "mlxsrv", "connect", "claude", "--write"],
            env=environment() | {"HOME": str(tmp_path)},
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert "Write this? [y/N]" in done.stdout
    assert (done.returncode == 0) is written, done.stderr
    assert (tmp_path / ".claude" / "settings.json").exists() is written


INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("mlxsrv", run_name="__main__", alter_sys=True)
"""
"""`python -m mlxsrv`, also where a shell runs the tests in its background and ignores SIGINT."""


def test_ctrl_c_at_the_question_is_no_traceback(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "connect", "claude", "--write"],
        env=environment() | {"HOME": str(tmp_path)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            shown = ""
            while not shown.endswith("[y/N]"):
                more = process.stdout.read(1)
                assert more, shown
                shown += more
            process.send_signal(signal.SIGINT)
            # A signal that comes just before the process reads is not seen until a line is there.
            os.write(ours, b"y\n")
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert (process.returncode, errors) == (130, "mlxsrv: interrupted\n")
    assert not (tmp_path / ".claude").exists()


def test_a_reader_of_the_output_may_go(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mlxsrv", "connect", "codex"],
            env=environment() | {"HOME": str(tmp_path)},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_client_without_a_file_is_not_written(run: Run, tmp_path: Path) -> None:
    done = run("connect", "open-webui", "--write", "--yes", HOME=str(tmp_path))
    assert done.returncode == 2
    assert "OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1" in done.stdout
    assert "has no file to write" in done.stderr


def test_replicas_say_what_is_wrong_before_ray_starts(run: Run) -> None:
    for arguments, told in (
        (["--replicas", "x"], "--replicas: 'x' is not a whole number"),
        (["--num-cpus-per-replica", "x"], "--num-cpus-per-replica: 'x' is not a number"),
        (["--replicas", "0"], "--replicas 0: there is at least 1"),
        (["--num-gpus-per-replica", "-1"], "--num-gpus-per-replica -1: it is at least 0"),
        (["--memory-per-replica", "0"], "--memory-per-replica 0: it is at least 1"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2: it is less"),
        (["--max-replicas", "2", "--requests-per-replica", "0"], "replica 0: it is more than 0"),
        (
            ["--max-replicas", "2", "--downscale-delay", "-1"],
            "--downscale-delay -1: it is at least",
        ),
        (["--record", "x"], "--record: a record is of one engine"),
        (["--stop-with-stdin"], "--stop-with-stdin: replicas are stopped by a signal"),
        (["--model", "/nowhere"], "/nowhere"),
    ):
        done = run("replicas", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert told in done.stderr
    refused = run("replicas", RAY_SERVE_ENABLE_HA_PROXY="1")
    assert refused.returncode == 2
    assert "RAY_SERVE_ENABLE_HA_PROXY: HAProxy does not ask" in refused.stderr
    assert "--num-gpus-per-replica" in run("replicas", "--help").stdout


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_replicas_name_the_extra_that_is_missing(run: Run) -> None:
    done = run("replicas")
    assert done.returncode == 2
    assert "pip install 'mlxsrv[ray]'" in done.stderr
