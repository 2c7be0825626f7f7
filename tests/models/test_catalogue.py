"""Names and where they lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsrv.errors import ModelNotFound, ModelNotLoaded
from mlxsrv.models.catalogue import Catalogue
from mlxsrv.settings import SettingsError


def test_without_models_the_demo_is_the_default() -> None:
    catalogue = Catalogue([])
    assert catalogue.default == "demo"
    assert catalogue.find(None) == catalogue.find("default") == catalogue.find("demo")


def test_a_folder_is_called_by_its_name_and_by_an_alias_if_given(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two=three").mkdir()
    catalogue = Catalogue(
        [str(tmp_path / "one"), f"alias={tmp_path / 'one'}", str(tmp_path / "two=three")]
    )
    assert [entry.name for entry in catalogue] == ["one", "alias", "two=three", "demo"]
    assert catalogue.default == "one"
    assert catalogue.find("alias").fetch() == tmp_path / "one"


def test_a_repository_is_called_by_its_id() -> None:
    catalogue = Catalogue(["org/some-model", "short=org/other"])
    assert catalogue.find("org/some-model").source == "org/some-model"
    assert catalogue.find("short").source == "org/other"


@pytest.mark.parametrize("text", ["./nowhere", "/no/such/folder", "nowhere", "a=b=c", "x=", ""])
def test_a_folder_that_is_not_there_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(SettingsError, match="there is no folder"):
        Catalogue([text])


def test_two_models_of_one_name_are_a_wrong_setting(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "m").mkdir(parents=True)
    with pytest.raises(SettingsError, match="NAME=PATH"):
        Catalogue([str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m")])


def test_an_unknown_name_is_told_with_near_ones() -> None:
    catalogue = Catalogue(["org/some-model"])
    with pytest.raises(ModelNotFound, match="did you mean 'org/some-model'") as error:
        catalogue.find("org/some-modle")
    assert error.value.param == "model"
    with pytest.raises(ModelNotFound, match="served are: 'org/some-model', 'demo'"):
        catalogue.find("zzz")


def test_a_name_is_never_a_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Catalogue([]).find(str(tmp_path))


def test_a_repository_that_cannot_be_fetched_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotLoaded, match="cannot fetch org/some-model") as error:
        Catalogue(["org/some-model"]).find(None).fetch()
    assert "\n" not in error.value.message
