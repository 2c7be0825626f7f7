"""The names of models, and the entries that they lead to."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxsrv.errors import ModelNotFound
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.catalogue.hub_cache import Repository
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "plain", "qwen3", plain=True)


def catalogue(*models: str, **options: Any) -> Catalogue:
    return Catalogue(msgspec.convert({"model": models, "hf_cache": False, **options}, Settings))


def find(catalogue: Catalogue, name: str | None) -> ModelEntry:
    return asyncio.run(catalogue.find(name))


def listed(catalogue: Catalogue) -> dict[str, ModelEntry]:
    asyncio.run(catalogue.refresh())
    return {entry.name: entry for entry in catalogue}


# What the command line names.


def test_without_models_the_demo_is_the_default() -> None:
    demo = catalogue()
    assert demo.default == "demo"
    assert find(demo, None) == find(demo, "default") == find(demo, "demo")


def test_the_demo_may_be_named_as_any_other(plain: Path) -> None:
    models = catalogue("demo", f"t={plain}")
    assert [entry.name for entry in models] == ["demo", "t"]
    assert models.default == "demo"


def test_a_folder_is_called_by_its_name_or_by_the_one_given(tmp_path: Path) -> None:
    for name in ("one", "two", "two=three"):
        (tmp_path / name).mkdir()
    models = catalogue(
        str(tmp_path / "one"), f"alias={tmp_path / 'two'}", str(tmp_path / "two=three")
    )
    assert [entry.name for entry in models] == ["one", "alias", "two=three", "demo"]
    assert models.default == "one"
    assert find(models, "alias").source.place == tmp_path / "two"


def test_further_names_of_the_same_files_are_aliases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    again = catalogue("./one", str(tmp_path / "one"), "../" + tmp_path.name + "/one")
    assert [(entry.name, entry.aliases) for entry in again] == [("one", ()), ("demo", ())]
    models = catalogue(f"a={tmp_path / 'one'}", f"b={tmp_path / 'one'}", f"a={tmp_path / 'one'}")
    assert [(entry.name, entry.aliases) for entry in models] == [("a", ("b",)), ("demo", ())]
    assert find(models, "b") == find(models, "a")


def test_a_repository_is_called_by_its_id_and_keeps_it_beside_another_name() -> None:
    models = catalogue("org/some-model", "short=org/other@v2")
    assert find(models, "org/some-model").source.place == Repository("org/some-model")
    assert find(models, "short").source.place == Repository("org/other", "v2")
    assert find(models, "org/other@v2") == find(models, "short")


def test_an_adapter_makes_an_entry_of_its_own(tmp_path: Path) -> None:
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    models = catalogue(str(base), f"x={base}+{tuned}", f"org/name+{tuned}")
    assert [entry.name for entry in models] == ["base", "x", "org/name+tuned", "demo"]
    assert find(models, "x").source.adapter == tuned
    with pytest.raises(SettingsError, match="there is no adapter folder"):
        catalogue(f"x={base}+{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("text", ["./nowhere", "/no/such/folder", "nowhere", "a=b=c", "x=", ""])
def test_a_folder_that_is_not_there_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(SettingsError, match=r"there is no folder .* and it is no ORG/NAME"):
        catalogue(text)


def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "md").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, told in (
        ("md/a.gguf", "is a GGUF file: .* mlx_lm.convert"),
        ("md/a", "is a file, not"),
    ):
        Path(name).touch()
        for text in (name, f"./{name}", f"x={name}"):
            with pytest.raises(SettingsError, match=told):
                catalogue(text)


def test_two_models_of_one_name_are_a_wrong_setting(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "m").mkdir(parents=True)
    with pytest.raises(SettingsError, match="NAME=PATH"):
        catalogue(str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m"))


# Names of clients.


def test_an_alias_stands_for_what_matches_and_is_not_served_itself(plain: Path) -> None:
    models = catalogue(
        str(plain),
        "big=org/big",
        "claude-own=org/own",
        model_alias=["claude-haiku-*=plain", "claude-*=big", "gpt-5=default", "[o]1=org/big"],
    )
    for name, answers in {
        "claude-haiku-4-5": "plain",
        "claude-opus-4-8": "big",
        "claude-own": "claude-own",
        "gpt-5": "plain",
        "gpt-5:latest": "plain",
        "o1": "big",
    }.items():
        assert find(models, name).name == answers
        assert models.label(name) == answers
    for unknown in ("Claude-opus", "gpt-5-mini", "x-claude-opus"):
        with pytest.raises(ModelNotFound):
            find(models, unknown)
        assert models.label(unknown) == ""
    with pytest.raises(ModelNotFound, match="did you mean 'big'"):
        find(models, "bigg")


def test_a_model_that_comes_later_has_its_name_before_an_alias(plain: Path, tmp_path: Path) -> None:
    models = catalogue(models_dir=[str(tmp_path)], model_alias=["late*=demo"], any_model=True)
    assert find(models, "late").name == find(models, "later").name == "demo"
    shutil.copytree(plain, tmp_path / "late")
    assert list(listed(models)) == ["demo", "late"]
    assert find(models, "late").name == "late"
    assert find(models, "later").name == "demo"


def test_any_model_sends_an_unknown_name_to_the_default_model(plain: Path, tmp_path: Path) -> None:
    models = catalogue("demo", models_dir=[str(tmp_path)], any_model=True, allow_download=True)
    for name in ("gpt-4o", "org/unknown", "../../etc/passwd", ""):
        assert find(models, name).name == models.label(name) == "demo"
    shutil.copytree(plain, tmp_path / "late")
    assert find(models, "late").name == "late"
    (tmp_path / "late" / "model.safetensors").unlink()
    listed(models)
    with pytest.raises(ModelNotFound, match="cannot be served"):
        find(models, "late")


@pytest.mark.parametrize("text", ["claude-*", "=demo", "claude-*=", ""])
def test_an_alias_that_is_none_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(SettingsError, match="is not PATTERN=NAME"):
        catalogue(model_alias=[text])


def test_an_alias_for_an_unknown_model_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match="'dmo' is not served here; did you mean 'demo'"):
        catalogue(model_alias=["claude-*=dmo"])
    with pytest.raises(SettingsError, match="'claude-b' is not served here"):
        catalogue(model_alias=["claude-*=demo", "x=claude-b"])


def test_an_option_that_names_no_model_is_a_wrong_setting(plain: Path) -> None:
    for option, value in {
        "pin": "nobody",
        "preload": "nobody",
        "draft_model": f"nobody={plain}",
        "tool_format": "nobody=hermes",
        "thinking_format": "nobody=think",
    }.items():
        with pytest.raises(SettingsError, match="'nobody' is not served here"):
            catalogue(**{option: [value]})


def test_a_format_belongs_to_the_model_it_is_named_for() -> None:
    models = catalogue(
        "a=org/a", "b=org/b", tool_format=["hermes", "b=glm"], thinking_format=["b=none"]
    )
    words = {entry.name: models.format_words(entry) for entry in models}
    assert words == {"a": ("hermes", None), "b": ("glm", "none"), "demo": (None, None)}


def test_a_format_that_is_none_is_a_wrong_setting() -> None:
    for option in ("tool_format", "thinking_format"):
        with pytest.raises(
            SettingsError, match=f"^{option}: .*'demo-xml'; there are: none, apertus"
        ):
            catalogue(**{option: ["demo=demo-xml"]})


def test_a_draft_model_belongs_to_the_model_it_is_named_for(plain: Path) -> None:
    models = catalogue("a=org/a", "b=org/b", draft_model=[f"b={plain}", str(plain)])
    by_name = {entry.name: models.draft(entry) for entry in models}
    assert by_name["a"] is not None
    assert by_name["b"] is not None
    assert by_name["demo"] is None


def test_tokens_are_looked_up_for_the_model_that_is_named(plain: Path) -> None:
    given = [f"b={plain}", "b=ngram", "ngram", f"demo={plain}"]
    models = catalogue("a=org/a", "b=org/b", draft_model=given)
    looked_up = {entry.name: (models.looks_up(entry), models.draft(entry)) for entry in models}
    assert looked_up["a"] == (True, None)
    assert not looked_up["b"][0], "the first value counts"
    assert looked_up["b"][1] is not None
    assert not looked_up["demo"][0]


# What is found.


def test_models_below_a_folder_are_found_and_described(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "one")
    shutil.copytree(plain, tmp_path / "org" / "two")
    (tmp_path / "notes").mkdir()
    entries = listed(catalogue(models_dir=[str(tmp_path)]))
    assert list(entries) == ["demo", "one", "org/two"]
    said = entries["org/two"].description
    assert said is not None
    assert (said.type, said.family, said.context_length) == ("chat", "qwen3", 4096)


def test_a_model_that_comes_later_is_found_when_it_is_asked_for(
    plain: Path, tmp_path: Path
) -> None:
    models = catalogue(models_dir=[str(tmp_path)])
    with pytest.raises(ModelNotFound):
        find(models, "late")
    shutil.copytree(plain, tmp_path / "late")
    assert find(models, "late").description is not None
    shutil.rmtree(tmp_path / "late")
    assert "late" not in listed(models)


def test_what_has_not_changed_is_not_read_again(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain, tmp_path / "one")
    shutil.copytree(plain, tmp_path / "two")
    models = catalogue(models_dir=[str(tmp_path)])
    listed(models)
    described: list[str] = []

    def counting(folder: Path, **options: Any) -> ModelDescription:
        described.append(folder.name)
        return describe_model(folder, **options)

    monkeypatch.setattr("mlxsrv.models.catalogue.catalogue.describe_model", counting)
    listed(models)
    assert described == []
    os.utime(tmp_path / "two" / "config.json", (1, 1))
    listed(models)
    assert described == ["two"]


def test_what_cannot_be_served_is_told_once_and_refused_with_the_reason(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(plain, tmp_path / "broken")
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(
        json.dumps(config | {"model_type": "no_such_model"})
    )
    models = catalogue(models_dir=[str(tmp_path)])
    for _ in range(2):
        assert "no_such_model" in (listed(models)["broken"].problem or "")
        with pytest.raises(ModelNotFound, match=r"cannot be served: .*no_such_model"):
            find(models, "broken")
    assert len([r for r in caplog.records if "left out" in r.getMessage()]) == 1
    shutil.copy(plain / "config.json", tmp_path / "broken" / "config.json")
    assert find(models, "broken").problem is None


def test_the_cache_of_the_hub_is_served_but_not_what_of_it_is_incomplete(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("whole", "part"):
        root = tmp_path / f"models--org--{name}"
        shutil.copytree(plain, root / "snapshots" / ("a" * 40))
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("a" * 40)
    weights = root / "snapshots" / ("a" * 40) / "model.safetensors"
    weights.unlink()
    weights.symlink_to("nowhere")
    entries = listed(catalogue(hf_cache=True))
    assert entries["org/whole"].problem is None
    assert "run: mlxsrv pull org/part" in (entries["org/part"].problem or "")
    with pytest.raises(ModelNotFound, match="not complete"):
        find(catalogue(hf_cache=True), "org/part")
    allowed = find(catalogue(hf_cache=True, allow_download=True), "org/part")
    assert allowed.source.place == Repository("org/part")
    assert "org/whole" not in listed(catalogue())


def test_a_link_to_a_folder_that_is_named_is_no_second_model(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(plain)
    assert list(listed(catalogue(f"t={plain}", models_dir=[str(tmp_path)]))) == ["t", "demo"]


# Names that lead nowhere.


def test_an_unknown_name_is_told_with_near_ones() -> None:
    models = catalogue("org/some-model")
    with pytest.raises(ModelNotFound, match="did you mean 'org/some-model'") as error:
        find(models, "org/some-modle")
    assert error.value.param == "model"
    with pytest.raises(ModelNotFound, match="served are: 'org/some-model', 'demo'"):
        find(models, "zzz")


def test_a_repository_that_is_not_here_is_told_with_how_to_get_it() -> None:
    with pytest.raises(ModelNotFound, match=r"mlxsrv pull org/new$"):
        find(catalogue(), "org/new")
    allowed = find(catalogue(allow_download=True), "org/new")
    assert allowed.source.place == Repository("org/new")


@pytest.mark.parametrize("allow", [False, True])
def test_a_name_is_never_a_path(allow: bool, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = catalogue(allow_download=allow)
    monkeypatch.chdir(plain.parent.parent)
    relative = f"{plain.parent.name}/{plain.name}"
    for name in (str(plain), f"./{relative}", "../..", f"{relative}/..", "a=b/c", "~/x", "org/.."):
        with pytest.raises(ModelNotFound):
            find(models, name)
    if not allow:
        with pytest.raises(ModelNotFound):
            find(models, relative)
