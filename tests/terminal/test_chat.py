"""`mlxsrv chat`, `ps` and `stop` with real servers; the chat on a terminal of its own."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import mlxsrv
from mlxsrv.settings import Settings
from mlxsrv.terminal.client import RequestFailed, ServerClient
from mlxsrv.terminal.processes import ListeningProcess, listening_process
from mlxsrv.terminal.screen import StatusLine, shown
from mlxsrv.terminal.starting import running_server
from tests.support.commands import Run
from tests.support.serving import PATIENCE, Server, environment, serving, wait_for
from tests.support.terminals import Terminal, on_terminal

ABOUT_ITSELF = "I am the small demo model"
KEY = "sesame"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Wants a key."""
    options = ("--no-hf-cache", "--api-key", KEY)
    with serving(tmp_path_factory.mktemp("server"), *options) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """All commands have it."""
    monkeypatch.setenv("MLXSRV_API_KEY", KEY)


def pipe(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


ON_A_TERMINAL = """
import fcntl, runpy, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("mlxsrv", run_name="__main__", alter_sys=True)
"""
"""`python -m mlxsrv` where Ctrl-C is for it, also if a shell runs the tests in its background."""


def terminal(*arguments: str) -> AbstractContextManager[Terminal]:
    """`python -m mlxsrv` on a terminal."""
    return on_terminal(
        [sys.executable, "-c", ON_A_TERMINAL, *arguments],
        environment() | {"TERM": "xterm", "NO_COLOR": "1", "MLXSRV_API_KEY": KEY},
    )


def test_a_chat_on_a_terminal(demo: Server) -> None:
    with terminal("chat", "--url", demo.url) as chat:
        begun = chat.until(">>> ")
        assert f"demo, 4,096 tokens of context at {demo.url}" in begun
        assert "Ctrl-C stops an answer" in begun
        assert ABOUT_ITSELF in chat.answer("Who are you?")
        for line, told in (
            ("/model", "* demo (loaded)"),
            ("/model nobody", "'nobody' is not served here"),
            ("/imge x.png", "There is no command /imge; did you mean /image?"),
            ("/image x.png", "demo reads text only"),
            ("/system Be brief.", "System prompt: Be brief."),
            ("/system none", "System prompt: none"),
            ("/set temperature hot", "mlxsrv: temperature: expected a number, got a text"),
            ("/set temperature 9", "mlxsrv: temperature: expected a number of at most 2"),
            ("/set tool_choice x", "it cannot be 'x', only 'any', 'auto', 'none' or 'required'"),
            ("/set", "Nothing is set"),
            ("/set temperature 1", "temperature = 1"),
            ("/set temperature", "Nothing is set"),
            ("/set temprature 1", "demo ignores temprature; did you mean temperature?"),
            ("/set TEMPERATURE 1", "did you mean temperature?"),
            ("/set reasoning_effort low", "demo ignores reasoning_effort\r"),
            ("/set n 3", "n: the chat shows one answer"),
            ("/set max_tokens 0", "max_tokens: expected a whole number of at least 1"),
            ("/set", "Nothing is set"),
            ("/set max_tokens=2", "max_tokens = 2"),
            ("hi", "cut off at the most tokens"),
            ("/clear", "begins anew"),
            ("/?", "/exit    End the chat"),
        ):
            assert told in chat.answer(line), line
        chat.write('"""Who are\nyou?"""\n')
        chat.until("... ")
        chat.until("\n>>> ")
        chat.write("quit\n")
        assert chat.status() == 0


class EndlessAnswer(BaseHTTPRequestHandler):
    """A server whose answer begins, and goes on until the client has gone."""

    gone = threading.Event()

    def do_GET(self) -> None:
        model: dict[str, object] = {
            "id": "endless",
            "context_length": None,
            "capabilities": [],
            "type": "chat",
        }
        body = json.dumps({"status": "ok"} if self.path.startswith("/health") else model).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        choice = {"delta": {"content": "and so on "}, "finish_reason": None}
        piece = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        with suppress(ConnectionError):
            self.wfile.write(piece)
            while not self.gone.wait(0.01):
                self.wfile.write(piece)
        self.gone.set()

    def log_message(self, *_: object) -> None:
        pass


def test_ctrl_c_stops_the_answer_and_then_the_chat() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), EndlessAnswer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with terminal("chat", "--url", f"http://127.0.0.1:{server.server_port}") as chat:
                chat.until(">>> ")
                chat.write("Go on.\n")
                chat.until("and so on and so on")
                chat.write("\x03")
                assert "[stopped]" in chat.until("\n>>> ")
                assert EndlessAnswer.gone.wait(PATIENCE)
                # A signal that comes just before the line is read is seen once a line is there.
                chat.write("\x03\n")
                chat.until("Press Ctrl-C again")
                chat.until(">>> ")
                chat.write("\x03\n")
                assert chat.status() == 0
        finally:
            server.shutdown()


class BrokenAnswer(EndlessAnswer):
    """One whose answer breaks off after its first piece."""

    gone = threading.Event()
    gone.set()


def test_an_answer_that_breaks_off_ends_its_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe("Go on.", monkeypatch)
    with ThreadingHTTPServer(("127.0.0.1", 0), BrokenAnswer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            done = run("chat", "--url", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    assert done == (1, "and so on \n", "mlxsrv: the answer broke off: the server has gone\n")


def test_a_question_from_a_pipe_has_one_answer(
    demo: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe("Who are you?\n", monkeypatch)
    done = run("chat", "--url", demo.url, "demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(ABOUT_ITSELF)
    assert done.stdout.endswith(".\n")
    pipe("hi", monkeypatch)
    late = run("chat", "--url", demo.url, "--max-context", "99", "--no-metrics", "--model", "demo")
    assert late.stderr == (
        f"mlxsrv: a server runs at {demo.url} already, so these options change nothing: "
        "--max-context, --metrics\n"
    )
    pipe("hi", monkeypatch)
    refused = run("chat", "--url", demo.url, MLXSRV_API_KEY="wrong")
    assert "set MLXSRV_API_KEY to one of the server's keys" in refused.stderr
    for arguments, text, told in (
        (["nobody", "--url", demo.url], "hi", "'nobody' is not served here"),
        (["hello", "--url", demo.url], "hi", "every name; a question comes through a pipe"),
        (["/", "--url", demo.url], "hi", "for this folder: mlxsrv chat / --port 0"),
        (["--url", "http://127.0.0.1:9"], "hi", "no server runs at http://127.0.0.1:9"),
        ([], " \n", "nothing to answer"),
        (["Who are you?", "--port", "0"], "hi", "no folder 'Who are you?', and it is no ORG/NAME"),
        (["Who are you?", "--port", "0"], "hi", "a question comes through a pipe"),
        (["Who", "are", "you?"], "hi", "'are' is one argument too many; a question comes through"),
    ):
        pipe(text, monkeypatch)
        done = run("chat", *arguments)
        assert done.returncode in (1, 2)
        assert told in done.stderr


def test_a_reader_of_the_answer_may_go(demo: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(BrokenPipeError), ServerClient(demo.url, KEY).chat(body):
        raise BrokenPipeError  # as print does


def test_an_answer_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "a\x1b]52;c;cm0gLXI=\x07\x9b2J\r\tb\nü\x7f"
    assert shown(answer) == answer
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown(answer) == "a]52;c;cm0gLXI=2J\tb\nü"


def test_a_pipe_hears_now_and_then_what_is_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 4.0, 5.0, 5.0, 9.0, 10.0, 10.0])
    monkeypatch.setattr("mlxsrv.terminal.screen.monotonic", lambda: next(times))
    with StatusLine() as line:
        for share in ("1%", "2%", "3%", "4%"):
            line.show(f"loading the model: {share}")
    told = "mlxsrv: loading the model: {}%\n"
    assert capfd.readouterr().err == told.format(2) + told.format(4)


def test_ps_shows_models_requests_and_memory(demo: Server, run: Run) -> None:
    shown = run("ps", "--url", demo.url)
    address, head, model, memory, requests = shown.stdout.splitlines()
    assert address == f"{demo.url}: ok"
    assert head.split() == ["MODEL", "STATE", "RUNNING", "WAITING", "MEMORY", "IDLE"]
    assert model.split()[:5] == ["demo", "loaded", "0", "0", "2.95"]
    assert re.fullmatch(r"Memory: 2.95 MB of weights, .* the limit is [\d.]+ GB\.", memory)
    assert requests.startswith("Requests since the start: ")
    assert '"waiting_for_row": 0' in run("ps", "--url", demo.url, "--json").stdout


def test_a_server_that_a_command_starts_ends_with_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"model": ["demo"], "hf_cache": False}
    path = str(Path(mlxsrv.__file__).parent / "models" / "demo")
    with running_server(Settings(port=0), flags, url=None, model=path) as (client, name):
        assert name == "demo"
        assert client.model(name)["state"] == "loaded"
        process = listening_process(urlsplit(client.url).port or 0)
        assert process is not None
        assert process.is_server
    assert not client.is_there()
    wrong = {"model": ["/nowhere"]}
    monkeypatch.setattr("mlxsrv.terminal.client._FIRST_PATIENCE", 0.01)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RequestFailed, match="there is no folder '/nowhere'"),
        running_server(Settings(port=(port := silent.getsockname()[1])), wrong, url=None),
    ):
        pass
    told = capfd.readouterr().err
    assert f":{port} within 0.01 s (process {os.getpid()}: " in told
    assert told.endswith("; another server is started\n")


def test_a_server_that_a_command_starts_does_not_outlive_it() -> None:
    with terminal("chat", "--no-hf-cache", "--port", "0") as chat:
        address = chat.until("\r\n").rpartition(" at http://")[2]
        port = int(address.rpartition(":")[2])
        process = listening_process(port)
        assert process is not None
        chat.kill()
        # Another server may have its port by then.
        wait_for(lambda: listening_process(port) != process, why="the server has ended")


LISTEN = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("name", ["mlxsrv", "other"])
def test_stop_ends_the_server_that_listens_and_no_other_program(
    name: str, run: Run, tmp_path: Path
) -> None:
    """The process is a small one that is called so; another one has the name as an argument."""
    program = tmp_path / name
    program.write_text(LISTEN)
    command = [sys.executable, "-u", str(program), "--directory", "/x/mlxsrv", "\udcff"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        done = run("stop", "--port", port)
        if name == "mlxsrv":
            assert done.returncode == 0
            assert f"(process {process.pid})" in done.stdout
            assert process.poll() == 0
            assert "no server of this user" in run("stop", "--port", port).stderr
        else:
            # The number of a server that ended meanwhile may be this process's.
            ListeningProcess(process.pid, ("mlxsrv",)).end_and_wait()
            assert done.returncode == 1
            assert f"port {port} is that of another program" in done.stderr
            assert process.poll() is None
            process.terminate()


def test_a_mac_tells_of_processes_through_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        waiting = threading.Thread(target=process.wait)  # as a shell waits for what it started
        waiting.start()
        for name, says in (("lsof", str(process.pid)), ("ps", "/bin/python -m mlxsrv demo")):
            (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        found = listening_process(8000)
        assert found is not None
        assert (found.pid, found.is_server) == (process.pid, True)
        found.end_and_wait()
        waiting.join(PATIENCE)
        assert process.returncode == 0


def test_what_answers_may_be_another_program(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # In the queue of the listener, unaccepted: the kernel has made the connection.
        with subprocess.Popen(
            [sys.executable, "-c", ANSWER, str(listener.fileno())], pass_fds=[listener.fileno()]
        ):
            done = run("ps", "--port", str(port))
    assert done.returncode == 1
    assert f"what answers at http://127.0.0.1:{port} is no mlxsrv" in done.stderr


ANSWER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as listener:
    connection, _ = listener.accept()
    connection.recv(9999)
    connection.sendall(b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 2\\r\\n\\r\\nNo")
    connection.close()
"""
