"""Settings: one table, and everything else read off it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from mlxsrv.configuration import load_settings, wrong_variables
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings, options


def test_help_is_short_and_help_all_names_every_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: dict[str, set[str]] = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as exit_info:
            load_settings([flag], {})
        assert exit_info.value.code == 0
        shown[flag] = {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}
    common = {option.flag for option in options() if option.common}
    assert 10 <= len(common) <= 15
    rare = {option.flag for option in options()} - common
    assert common < shown["--help"]
    assert rare < shown["--help-all"]
    assert not rare & shown["--help"] - {"--help-all"}


def test_every_option_is_in_one_group() -> None:
    titles = [title for title, _ in groupby(options(), key=lambda option: option.group)]
    assert len(titles) == len({*titles})
    assert "" not in titles


def test_the_default_model_may_be_given_without_a_flag() -> None:
    assert load_settings(["org/a", "--port", "1"], {}).model == ("org/a",)
    assert load_settings(["--port", "1", "x=org/a", "--metrics"], {}).model == ("x=org/a",)
    both = load_settings(["org/a", "--model", "org/b"], {"MLXSRV_MODEL": "org/c"})
    assert both.model == ("org/a", "org/b")


def test_variables_that_mean_nothing_are_named() -> None:
    environ = {"MLXSRV_PRT": "1", "MLXSRV_PORT": "1", "MLXSRV_PATCHES": "off", "OTHER": ""}
    told = "the variable MLXSRV_PRT means nothing; did you mean MLXSRV_PORT?"
    assert [*wrong_variables(environ)] == [told]


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "mlxsrv.toml"
    file.write_text("port = 1\nmax-queue = 2\nkeepalive = 3\nmodel = ['a']\n")
    environ = {"MLXSRV_PORT": "10", "MLXSRV_MAX_QUEUE": "20"}
    settings = load_settings(["--config", str(file), "--port", "100"], environ)
    assert (settings.port, settings.max_queue, settings.keepalive) == (100, 20, 3.0)
    assert settings.model == ("a",)
    assert settings.host == "127.0.0.1"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "mlxsrv.toml"
    file.write_text("port = 1")
    assert load_settings([], {"MLXSRV_CONFIG": str(file)}).port == 1


def test_without_a_command_line_only_variables_count() -> None:
    assert load_settings(None, {"MLXSRV_PORT": "7"}).port == 7


def test_a_repeated_flag_and_a_variable_with_commas_give_all_models() -> None:
    assert load_settings(["--model", "a", "--model", "b=c"], {}).model == ("a", "b=c")
    assert load_settings([], {"MLXSRV_MODEL": "a,b=c"}).model == ("a", "b=c")


def test_a_flag_may_have_the_name_that_other_servers_give_it() -> None:
    flags = ["--tool-call-parser", "qwen3_xml", "--tool-format", "b=glm"]
    more = ["--reasoning-parser", "qwen3", "--reasoning-format=none", "--enable-auto-tool-choice"]
    settings = load_settings([*flags, *more], {})
    assert settings.tool_format == ("qwen3_xml", "b=glm")
    assert settings.thinking_format == ("qwen3", "none")


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--port", "x"], {}, "--port"),
        (["--port", "65536"], {}, "--port"),
        (["--keepalive", "0"], {}, "--keepalive"),
        (["--keepalive", "nan"], {}, "--keepalive"),
        (["--max-concurrency", "1.5"], {}, "--max-concurrency"),
        ([], {"MLXSRV_LOG_LEVEL": "loud"}, "MLXSRV_LOG_LEVEL"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
        (["--prot", "1"], {}, "there is no option --prot; did you mean --port?"),
        (["--prot=1"], {}, "there is no option --prot; did you mean --port?"),
        (["--xyzzy"], {}, "there is no option --xyzzy"),
        (["--port"], {}, "--port"),
        (["org/a", "org/b"], {}, "'org/b' is one argument too many"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_source(
    argv: list[str], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(argv, environ)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_value_says_what_is_right() -> None:
    for flag, value, told in (
        ("--port", "abc", "'abc' is not a whole number from 0 to 65535"),
        ("--max-queue", "-1", "'-1' is not a whole number of at least 0"),
        ("--keepalive", "0", "'0' is not a number above 0"),
        ("--memory-limit", "12parsecs", "'12parsecs' is no size: 8GB, 512MB or bytes"),
        ("--max-body", "1kB", "'1kB' is not a whole number of at least 1024"),
        ("--log-level", "foo", "'foo' is not one of debug, info, warning, error"),
        ("--kv-bits", "7", "'7' is not one of 2, 3, 4, 5, 6, 8"),
        ("--allowed-host", "x:80", "'x:80' is not a host name without a port, or *"),
        ("--root-path", "llm", "'llm' is not a path such as /llm"),
        ("--host", "", "'' is not a name"),
        ("--api-key", "a b", "the key is not of printable ASCII without spaces"),
    ):
        with pytest.raises(SettingsError) as error:
            load_settings([f"{flag}={value}"], {})
        assert str(error.value) == f"{flag}: {told}"


@pytest.mark.parametrize("text", ["prot = 1", "port = '1'", "port = true", "= 1"])
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mlxsrv.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"mlxsrv\.toml"):
        load_settings(["--config", str(file)], {})


def test_a_struct_made_in_code_is_checked_too() -> None:
    with pytest.raises(SettingsError, match="max_concurrency"):
        Settings(max_concurrency=0)
    with pytest.raises(SettingsError, match="port"):
        Settings(port="8000")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("12GB", 12 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512mb", 512 * 10**6),
        ("2k", 2000),
        ("1 TB", 10**12),
    ],
)
def test_bytes_may_be_written_with_a_unit(text: str, number: int, tmp_path: Path) -> None:
    file = tmp_path / "mlxsrv.toml"
    file.write_text(f"memory-limit = {text!r}")
    by_flag = load_settings(["--memory-limit", text], {})
    by_variable = load_settings([], {"MLXSRV_MEMORY_LIMIT": text})
    by_file = load_settings(["--config", str(file)], {})
    assert {s.memory_limit for s in (by_flag, by_variable, by_file)} == {number}


@pytest.mark.parametrize("text", ["12XB", "-1GB", "GB", "1.5", "12GBB", "0"])
def test_bytes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--memory-limit"):
        load_settings([f"--memory-limit={text}"], {})


def test_a_switch_is_turned_by_flag_variable_and_file(tmp_path: Path) -> None:
    file = tmp_path / "mlxsrv.toml"
    file.write_text("allow-download = true\nhf-cache = false\n")
    settings = load_settings(["--config", str(file)], {})
    assert (settings.allow_download, settings.hf_cache) == (True, False)
    assert load_settings(["--hf-cache"], {"MLXSRV_HF_CACHE": "0"}).hf_cache is True
    assert load_settings(["--no-hf-cache"], {}).hf_cache is False


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, True) for text in ("true", "1", "on", "yes", "On")),
        *((text, False) for text in ("false", "0", "off", "no", "OFF")),
    ],
)
def test_a_variable_turns_a_switch_with_the_words_that_the_table_shows(
    text: str, value: bool
) -> None:
    environ = {"MLXSRV_METRICS": text, "MLXSRV_HF_CACHE": text}
    settings = load_settings([], environ)
    assert (settings.metrics, settings.hf_cache) == (value, value)


def test_a_wrong_switch_is_refused_with_its_text_once() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings([], {"MLXSRV_METRICS": "maybe"})
    assert str(error.value) == "MLXSRV_METRICS: 'maybe' is not on or off"
    assert load_settings([], {"MLXSRV_HF_CACHE": "false"}).hf_cache is False
    with pytest.raises(SettingsError, match="MLXSRV_HF_CACHE"):
        load_settings([], {"MLXSRV_HF_CACHE": "perhaps"})
