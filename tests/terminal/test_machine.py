"""`mlxsrv recommend`, `doctor`, `rm`, `service` and `completion`: the machine and its files."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxsrv.terminal import doctor
from mlxsrv.terminal.recommending import known_models
from mlxsrv.terminal.units import unit
from tests.support.commands import Run
from tests.support.serving import environment
from tests.support.terminals import on_terminal
from tests.support.tiny import write_model

GB = 10**9


def test_the_table_of_models_is_sorted_and_its_contexts_fit() -> None:
    models = known_models()
    assert [model.gigabytes for model in models] == sorted(model.gigabytes for model in models)
    for model in models:
        assert model.repository.startswith("mlx-community/")
        weights = int(model.gigabytes * GB)
        assert model.context_within(weights) == 0
        limit = weights + model.fixed + 10_000 * model.kv_bytes
        assert model.context_within(limit) == pytest.approx(10_000, abs=1)
        assert model.context_within(1000 * GB) == model.context


@pytest.mark.parametrize(
    ("memory", "largest"),
    [
        ("8GB", "Qwen3.5-4B-OptiQ-4bit"),
        ("16GB", "Qwen3.5-9B-OptiQ-4bit"),
        ("128GB", "Qwen3.5-122B-A10B-4bit"),
    ],
)
def test_models_are_recommended_that_fit(run: Run, memory: str, largest: str) -> None:
    shown = run("recommend", "--memory", memory)
    assert "Sizes and contexts are estimates." in shown.stdout
    assert shown.stdout.splitlines()[2].startswith(f"mlx-community/{largest} ")
    assert f"Try one: mlxsrv chat mlx-community/{largest}\n" in shown.stdout


def test_a_memory_of_its_own_decides(run: Run) -> None:
    assert (
        "None of the models in the table fits" in run("recommend", "--memory-limit", "1GB").stdout
    )
    assert "Qwen3.5-2B-OptiQ-4bit" in run("recommend", "--memory-limit", "2GB").stdout
    wrong = run("recommend", "--memory", "much")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("mlxsrv: --memory: ")


def test_the_doctor_names_what_is_wrong(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the answer of a server, which `make test-long` sees."""
    monkeypatch.setattr(doctor, "_CHECKS", doctor._CHECKS[:-1])
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    broken = write_model(tmp_path / "broken", "qwen3")
    (broken / "model.safetensors").unlink()
    done = run("doctor", "--model", str(broken), "--port", "0", "--memory-limit", "900TB")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    [fault] = [line for line in lines if line.startswith("FAULT")]
    assert fault.startswith("FAULT  broken is left out: ")
    assert "http://127.0.0.1:9 cannot be reached" in done.stdout
    assert "more than the" in done.stdout
    assert lines[-1] == "What is marked FAULT needs you."


def test_the_doctor_tells_whose_the_port_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._port, doctor._extras))
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]);"
    with subprocess.Popen(
        [sys.executable, "-uc", f"{listen} s.accept()[0].close(); s.accept()[0].close()"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        done = run("doctor", "--port", port)
    assert done.returncode == 1
    assert f"FAULT  port {port} is another program's (process {process.pid}: " in done.stdout
    assert "extras: " in done.stdout


@pytest.mark.long
def test_the_doctor_has_the_demo_answer(run: Run) -> None:
    done = run("doctor", "--port", "0", HF_HUB_OFFLINE="1")
    assert "answered in" in done.stdout
    notes = sum(line.startswith("note") for line in done.stdout.splitlines())
    assert done.stdout.splitlines()[-1].startswith(f"No fault; {notes} note" if notes else "All is")


@pytest.fixture
def cache(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two revisions of a model, which share a file."""
    root = tmp_path / "hub"
    model = root / "models--org--tiny"
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for blob, size in (("shared", 1000), ("new", 3000), ("old", 7000)):
        (model / "blobs").mkdir(parents=True, exist_ok=True)
        (model / "blobs" / blob).write_bytes(bytes(size))
    for (ref, commit), own in zip(commits.items(), ("new", "old"), strict=True):
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for blob in ("shared", own):
            (snapshot / f"{blob}.safetensors").symlink_to(f"../../blobs/{blob}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return root


def test_a_model_is_removed_once_its_user_agrees(run: Run, cache: Path) -> None:
    model = cache / "models--org--tiny"
    refused = run("rm", "org/tiny")
    assert (refused.returncode, model.exists()) == (2, True)
    assert "add --yes to remove" in refused.stderr
    one = run("rm", "org/tiny@v1", "--yes")
    assert one.stdout == "org/tiny@v1 is removed: 7 kB are free again.\n"
    assert [path.name for path in (model / "snapshots").iterdir()] == ["a" * 40]
    assert run("rm", "org/tiny", "--yes").stdout.endswith(": 4 kB are free again.\n")
    assert not model.exists()
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / "x.incomplete").write_bytes(bytes(999_700))  # an interrupted download
    assert run("rm", "org/tiny", "--yes").stdout.endswith(": 1 MB are free again.\n")
    assert not model.exists()
    for name, told in (("org/tiny", "'org/tiny' is not in the cache"), ("tiny", "ORG/NAME")):
        assert told in run("rm", name, "--yes").stderr


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a service manager that does nothing, in a home of its own."""
    log = tmp_path / "log"
    for name in ("systemctl", "launchctl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return log


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is of Linux")
def test_a_service_is_installed_and_taken_away(run: Run, manager: Path, tmp_path: Path) -> None:
    file = tmp_path / ".config" / "systemd" / "user" / "mlxsrv.service"
    install = ("service", "install", "demo", "--port", "9")
    assert "No service is installed" in run("service", "status").stdout
    refused = run(*install)
    assert (refused.returncode, file.exists(), manager.exists()) == (2, False, False)
    command = f"{sys.executable} -m mlxsrv --exit-on-failure --model demo --port 9"
    assert f"ExecStart={command}\n" in refused.stdout
    secret = run(*install, "--api-key", "sesame", "--yes")
    assert "give --api-key-file instead" in secret.stderr
    open_to_all = run(*install, "--yes", MLXSRV_API_KEY="sesame")
    assert "so the service would ask for no key; give --api-key-file" in open_to_all.stderr
    assert not file.exists()
    keys = tmp_path / "keys"
    keys.write_text("sesame")
    own = ("--api-key-file", str(keys), "--yes")
    command = command.replace("--port 9", f"--port 9 --api-key-file {keys}")
    done = run(*install, *own, MLXSRV_LOG_LEVEL="warning", MLXSRV_API_KEY="sesame")
    assert f"ExecStart={command}\n" in file.read_text()
    assert done.returncode == 0, done.stderr
    assert "Environment=MLXSRV_LOG_LEVEL=warning\n" in file.read_text()
    assert "sesame" not in file.read_text() + done.stdout
    assert manager.read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlxsrv",
        "systemctl --user restart mlxsrv",
    ]
    assert "State: running" in run("service", "status", "--port", "9").stdout
    assert "add --yes" in run("service", "uninstall").stderr
    assert run("service", "uninstall", "--yes").returncode == 0
    assert not file.exists()
    assert "systemctl --user disable --now mlxsrv\n" in manager.read_text()
    assert run("service", "uninstall", "--yes").returncode == 2


def test_a_manager_that_fails_is_told(run: Run, manager: Path, tmp_path: Path) -> None:
    for name in ("systemctl", "launchctl"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    done = run("service", "install", "--yes", "--port", "9")
    assert done.returncode == 1
    assert done.stderr.endswith(": no bus\n")
    assert "could not start it now" in done.stdout
    assert "To take it away: mlxsrv service uninstall" in done.stdout
    asked = run("service", "status", "--port", "9")
    assert (asked.returncode, "State: unknown" in asked.stdout) == (1, True)
    assert asked.stderr.endswith(": no bus\n")
    run("service", "install", "--yes", "--port", "10")
    # It does not run either, so what is left can go.
    gone = run("service", "uninstall", "--yes")
    assert gone.returncode == 0
    assert ".bak1\n" in gone.stdout


def test_launchd_has_a_file_of_its_own(manager: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    made = unit(["/bin/python", "-m", "mlxsrv"], {"HF_HOME": "/x y"}, Path("/work"), 10.0)
    assert made.path.parts[-3:] == ("Library", "LaunchAgents", "mlxsrv.plist")
    content = plistlib.loads(made.text.encode())
    assert content["ProgramArguments"] == ["/bin/python", "-m", "mlxsrv"]
    assert content["EnvironmentVariables"] == {"HF_HOME": "/x y"}
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert made.start[-1] == ("launchctl", "bootstrap", f"gui/{os.getuid()}", str(made.path))


def test_systemd_reads_arguments_as_they_are(
    manager: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    made = unit(["python", "a b", '"%h"', "$x"], {"A": "1 $2"}, Path("/work"), 10.0)
    assert 'ExecStart=python "a b" "\\"%%h\\"" $$x\n' in made.text
    assert 'Environment="A=1 $2"\n' in made.text


TRIED = """
tried() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mlxsrv; echo "${COMPREPLY[*]}"; }
tried mlxsrv re
tried mlxsrv help re
tried mlxsrv --por
tried mlxsrv connect codex --
tried mlxsrv connect codex --por
tried mlxsrv ps --js
tried mlxsrv run c
tried mlxsrv service un
tried mlxsrv connect codex c
tried mlxsrv run --port 8000 c
tried mlxsrv chat --log-level w
tried mlxsrv --log-level = d
tried mlxsrv --models-dir p
"""


def test_bash_completes_commands_options_and_words(run: Run) -> None:
    script = run("completion", "bash").stdout
    tried = subprocess.run(["bash", "-c", script + TRIED], capture_output=True, text=True)
    assert tried.stdout.splitlines() == [
        *["recommend replicas replay"] * 2,
        "--port",
        "--help --help-all --config --for-model --url --write --yes",
        "--port",
        "--json",
        "codex claude",
        "uninstall",
        "",
        "codex claude",
        "warning",
        "debug",
        "",
    ], tried.stderr


INTERACTIVE = {
    "bash": (["--norc", "--noprofile", "-i"], "PS1='> '; bind 'set enable-bracketed-paste off'"),
    "zsh": (["-f", "-i"], "PS1='> '; autoload -Uz compinit; compinit -D -u"),
}
"""Arguments of a shell that reads nothing of its user's, and what it needs at first."""


@pytest.mark.parametrize("shell", INTERACTIVE)
def test_tab_after_a_command_offers_the_options_of_its_help(
    run: Run, shell: str, tmp_path: Path
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(run("completion", shell).stdout)
    arguments, begin = INTERACTIVE[shell]
    with on_terminal([program, *arguments], environment() | {"TERM": "xterm"}) as typed:
        typed.write(f"{begin}; source {script}; echo is rea''dy\n")
        typed.until("is ready\r\n")
        typed.write("mlxsrv connect codex --\t\t")
        typed.until("codex --")
        offered = ""
        while not {"for-model", "url", "write", "yes"} <= {*re.findall(r"[a-z-]+", offered)}:
            offered += typed.until("--")
    assert "kv-bits" not in offered


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_as_bash_does(run: Run) -> None:
    script = run("completion", "fish").stdout
    for line, completed in (
        ("rec", ["recommend"]),
        ("help rec", ["recommend"]),
        ("service un", ["uninstall"]),
        ("connect codex clau", []),
        ("stop --", ["--config", "--help", "--help-all"]),
        ("stop --po", ["--port"]),
        ("chat --log-level w", ["warning"]),
        ("ps --js", ["--json"]),
    ):
        tried = f"{script}complete -C 'mlxsrv {line}'"
        done = subprocess.run(["fish", "-N", "-c", tried], capture_output=True, text=True)
        assert [each.split("\t")[0] for each in done.stdout.splitlines()] == completed, line


def test_the_script_of_zsh_is_one_that_it_reads(run: Run) -> None:
    script = run("completion", "zsh").stdout
    assert "recommend" in script
    assert "--prefill-chunk" in script
    if program := shutil.which("zsh"):
        subprocess.run([program, "-n"], input=script, text=True, check=True)
