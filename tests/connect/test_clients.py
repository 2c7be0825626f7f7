"""Each client is told the server's address, model and context, and never its key."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mlxsrv.connect.address import ServerAddress, find_address
from mlxsrv.connect.clients import CLIENTS
from mlxsrv.connect.writing import FileChange, plan_change, write_change
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.model_folders import change
from tests.support.tiny import write_model

ADDRESS = ServerAddress("http://127.0.0.1:8000", "org/a model", 40_000, key=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own: no test may touch the developer's files."""
    for name in (
        *("CODEX_HOME", "CLAUDE_CONFIG_DIR", "CONTINUE_GLOBAL_DIR"),
        *("PI_CODING_AGENT_DIR", "XDG_CONFIG_HOME"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def address(**options: Any) -> ServerAddress:
    return find_address(msgspec.convert({"hf_cache": False, **options}, Settings))


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "mac.local"}, "http://mac.local:8000"),
    ],
)
def test_the_url_is_one_that_a_client_can_reach(options: dict[str, Any], url: str) -> None:
    assert address(**options).url == url


def test_a_url_may_be_given_with_the_path_of_the_api_or_without() -> None:
    for given in ("https://x/llm", "https://x/llm/", "https://x/llm/v1", "https://x/llm/v1/"):
        assert find_address(Settings(hf_cache=False), given).openai == "https://x/llm/v1"
    with pytest.raises(SettingsError, match="--url"):
        find_address(Settings(hf_cache=False), "127.0.0.1:8000")
    for wrong in ("http://[::1", "http://x:port"):
        with pytest.raises(SettingsError, match="is not a URL"):
            find_address(Settings(hf_cache=False), wrong)
    with pytest.raises(SettingsError, match="--port"):
        address(port=0)


def test_model_and_context_come_from_the_catalogue(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen3", max_position_embeddings=64_000)
    known = address(model=[f"big={model}"])
    assert (known.model, known.context_length, known.key, known.warnings) == (
        *("big", 64_000, False, ()),
    )
    short = address(model=[f"big={model}"], max_context=16_000, api_key=["sesame"])
    assert (short.context_length, short.key) == (16_000, True)
    assert "16000 tokens is short" in short.warnings[0]
    assert address(model=["org/not-here"]).context_length is None
    assert find_address(Settings(hf_cache=False), model="demo").model == "demo"
    with pytest.raises(SettingsError, match="'nobody' is not served here"):
        find_address(Settings(hf_cache=False), model="nobody")


def test_a_client_may_ask_for_any_name_that_the_server_answers_for() -> None:
    aliased = Settings(hf_cache=False, model_alias=("gpt-*=demo",))
    assert find_address(aliased, model="gpt-5").model == "gpt-5"
    assert find_address(Settings(hf_cache=False, any_model=True), model="x").model == "x"
    with pytest.raises(SettingsError, match="'x' is not served here"):
        find_address(aliased, model="x")


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\x85b", "a\u2028", "a\ud800"])
def test_a_name_that_no_file_could_hold_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="use --model NAME=MODEL"):
        address(model=[f"{name}=demo"])


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_is_told_where_the_server_is_and_which_model(client: str) -> None:
    for key, context in itertools.product((True, False), (40_000, None)):
        server = msgspec.structs.replace(ADDRESS, key=key, context_length=context)
        text = CLIENTS[client](server).text(server)
        assert "http://127.0.0.1:8000" in text
        assert "org/a model" in text
        assert ("MLXSRV_API_KEY" in text) is (key or client == "zed")
        if client not in ("aider", "cline", "open-webui", "openai", "copilot", "llm"):
            assert ("40000" in text) is (context is not None)


def test_clients_are_told_what_the_model_can_do(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen3", plain=True)
    change(model / "tokenizer_config.json", chat_template="{{ messages }}")
    mute = address(model=[f"m={model}"])
    assert (mute.capabilities, len(mute.warnings)) == (("completion", "chat", "thinking"), 2)
    able = msgspec.structs.replace(mute, capabilities=("completion", "chat", "tools", "insert"))
    for server in (mute, able):
        shown = {name: CLIENTS[name](server).text(server) for name in CLIENTS}
        assert ("- tool_use" in shown["continue"]) == (server is able)
        assert ("- autocomplete" in shown["continue"]) == (server is able)
        assert ("supports_tools: true" in shown["llm"]) == (server is able)
        assert ('"reasoning": true' in shown["pi"]) == (server is mute)


def test_what_is_to_be_pasted_is_yaml() -> None:
    for client in ("librechat", "llm"):
        read = yaml.safe_load(CLIENTS[client](ADDRESS).paste)
        model = read[0] if client == "llm" else read["endpoints"]["custom"][0]
        assert ADDRESS.model in (model.get("model_name"), *model.get("tokenConfig", ()))
        assert ADDRESS.openai in model.values()


@pytest.mark.parametrize("client", [name for name in CLIENTS if CLIENTS[name](ADDRESS).file])
def test_what_a_client_has_is_changed_when_the_server_changes(client: str) -> None:
    """Keys come and go, and so does a known context: nothing of the old server stays."""
    servers = [
        msgspec.structs.replace(ADDRESS, key=True, model="old"),
        msgspec.structs.replace(ADDRESS, key=False, context_length=None),
    ]
    for server in servers:
        file = CLIENTS[client](server).file
        assert file is not None
        if client == "continue" and file.path().exists():
            with pytest.raises(SettingsError, match=r"config\.yaml stays as it is"):
                plan_change(file)
            return
        change = plan_change(file)
        assert change.needed
        write_change(change, lambda: True)
        assert not plan_change(file).needed
        text = change.path.read_text()
    assert "org/a model" in text
    assert "old" not in text
    assert "MLXSRV_API_KEY" not in text
    assert "40000" not in text


@pytest.mark.parametrize(
    ("client", "variable", "path"),
    [
        ("codex", "CODEX_HOME", "config.toml"),
        ("opencode", "XDG_CONFIG_HOME", "opencode/opencode.json"),
        ("kilo", "XDG_CONFIG_HOME", "kilo/kilo.json"),
        ("pi", "PI_CODING_AGENT_DIR", "models.json"),
    ],
)
def test_a_folder_that_the_client_takes_from_a_variable_is_used(
    client: str, variable: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    file = CLIENTS[client](ADDRESS).file
    assert file is not None
    assert file.path() == tmp_path / "elsewhere" / path


# Writing.


def a_change(path: Path, before: str | None = "a\nb\n") -> FileChange:
    if before is not None:
        path.write_text(before)
    return FileChange(path, before, "a\nc\n")


def test_a_file_is_written_and_each_old_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("")
    path.chmod(0o640)
    for number in (1, 2):
        copy = write_change(a_change(path), lambda: True)
        assert copy == tmp_path / f"config.bak{number}"
        assert copy.read_text() == "a\nb\n"
        assert path.read_text() == "a\nc\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in tmp_path.iterdir()} == {"config", "config.bak1", "config.bak2"}


def test_a_new_file_is_its_users_alone_and_has_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "config"
    assert write_change(a_change(path, None), lambda: True) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_difference_is_told_as_diff_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "config"
    assert a_change(path).diff().splitlines()[2:] == ["@@ -1,2 +1,2 @@", " a", "-b", "+c"]
    assert "+++ " + str(path) in a_change(path, None).diff()


def test_nothing_is_written_unless_the_user_agrees_and_the_file_is_still_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config"
    change = a_change(path)
    with pytest.raises(SettingsError, match="stays as it is"):
        write_change(change, lambda: False)

    def changed_meanwhile() -> bool:
        path.write_text("other")
        return True

    with pytest.raises(SettingsError, match="changed meanwhile"):
        write_change(change, changed_meanwhile)
    assert [each.name for each in tmp_path.iterdir()] == ["config"]
    assert path.read_text() == "other"


def test_a_file_that_cannot_be_read_or_written_is_told(home: Path) -> None:
    file = CLIENTS["codex"](ADDRESS).file
    assert file is not None
    file.path().mkdir(parents=True)
    with pytest.raises(SettingsError, match="it is not a file"):
        plan_change(file)
    file.path().rmdir()
    os.mkfifo(file.path())
    with pytest.raises(SettingsError, match="it is not a file"):
        plan_change(file)
    file.path().unlink()
    file.path().symlink_to(file.path())
    with pytest.raises(SettingsError, match="cannot be read"):
        plan_change(file)
    file.path().unlink()
    file.path().write_text("#" * 1_000_001)
    with pytest.raises(SettingsError, match="more than 1,000,000 bytes"):
        plan_change(file)
    file.path().write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="cannot be read"):
        plan_change(file)
    (home / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        write_change(FileChange(home / "file" / "x", None, "y"), lambda: True)


def test_a_file_behind_a_link_is_written_where_it_is(home: Path) -> None:
    real = home / "dotfiles.toml"
    real.write_text("# mine\n")
    (home / ".codex").mkdir()
    os.symlink(real, home / ".codex" / "config.toml")
    file = CLIENTS["codex"](ADDRESS).file
    assert file is not None
    change = plan_change(file)
    assert change.path == real.resolve()
    write_change(change, lambda: True)
    assert (home / ".codex" / "config.toml").is_symlink()
    assert "# mine" in real.read_text()
