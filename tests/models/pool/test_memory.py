"""The choice of the models to evict, from numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsrv.errors import InsufficientMemory
from mlxsrv.models.catalogue.catalogue import ModelEntry, ModelSource
from mlxsrv.models.pool.memory import PoolLimits
from mlxsrv.models.pool.model import LoadState, Model
from mlxsrv.models.pool.model_files import ModelFiles
from mlxsrv.settings import Settings


def model(
    name: str, size: int, *, users: int = 0, used: float = 0, base: str = "", row: int = 0
) -> Model:
    """A loaded model of `size` bytes; one with a `base` has as many again of its own. A short row
    of it takes `row` bytes."""
    folder = Path("/" + (base or name))
    made = Model(ModelEntry(name, ModelSource(folder), 0), Settings())
    made.files = ModelFiles(
        folder,
        None,
        None,
        base=size,
        own=size if base else 0,
        short_row=row,
        context_length=None,
        writes=True,
        pooling_config="",
        cross_encoder_config="",
    )
    made.users, made.last_entry = users, used
    made._state = LoadState.LOADED
    for _ in range(users):
        made.add_lease(None)
    return made


def limits(
    models: int | None = None, size: int = 10**9, pinned: tuple[str, ...] = ()
) -> PoolLimits:
    return PoolLimits(models, size, frozenset(pinned))


def names(models: list[Model]) -> list[str]:
    return [model.name for model in models]


def test_nothing_goes_where_there_is_room() -> None:
    loaded = [model("a", 10), model("b", 10)]
    assert limits(3, 30).victims(model("new", 10), loaded) == []


def test_the_least_recently_used_goes_first_and_no_more_than_need_to() -> None:
    loaded = [model("a", 10, used=3), model("b", 10, used=1), model("c", 10, used=2)]
    assert names(limits(size=30).victims(model("new", 10), loaded)) == ["b"]
    assert names(limits(size=30).victims(model("new", 20), loaded)) == ["b", "c"]
    assert names(limits(models=3).victims(model("new", 10), loaded)) == ["b"]


def test_a_small_one_is_spared_when_the_next_has_to_go_anyway() -> None:
    loaded = [model("small", 1, used=1), model("large", 20, used=2)]
    assert names(limits(size=21).victims(model("new", 20), loaded)) == ["large"]


def test_an_idle_model_goes_before_one_in_use() -> None:
    loaded = [model("busy", 10, users=1, used=1), model("idle", 10, used=2)]
    assert names(limits(size=20).victims(model("new", 10), loaded)) == ["idle"]
    assert names(limits(size=20).victims(model("new", 20), loaded)) == ["idle", "busy"]


def test_pinned_models_never_go_and_the_refusal_has_the_numbers() -> None:
    loaded = [model("pinned", 10, used=1), model("other", 10, used=2)]
    some = limits(size=20, pinned=("pinned",))
    assert names(some.victims(model("new", 10), loaded)) == ["other"]
    with pytest.raises(
        InsufficientMemory, match=r"new needs 11 bytes.* is 20, .* pinned .* take 10"
    ):
        some.victims(model("new", 11), loaded)
    with pytest.raises(InsufficientMemory, match="all 1 models that may be are pinned"):
        limits(models=1, pinned=("pinned",)).victims(model("new", 1), loaded[:1])


def test_what_fits_exactly_fits_and_one_byte_more_does_not() -> None:
    assert limits(size=10).victims(model("new", 10), []) == []
    with pytest.raises(InsufficientMemory, match=r"new needs 10 bytes.*--memory-limit"):
        limits(size=9).victims(model("new", 10), [])


def test_weights_that_are_shared_count_once() -> None:
    loaded = [model("a", 10, base="base", used=1)]
    assert limits(size=30).victims(model("b", 10, base="base"), loaded) == []
    assert names(limits(size=29).victims(model("b", 10, base="base"), loaded)) == ["a"]


def test_a_model_needs_room_for_a_short_row() -> None:
    loaded = [model("a", 10, used=1, row=2)]
    assert limits(size=24).victims(model("new", 10, row=2), loaded) == []
    assert names(limits(size=23).victims(model("new", 10, row=2), loaded)) == ["a"]
    with pytest.raises(InsufficientMemory, match=r"needs 12 bytes, a row of 256 .* is 11 "):
        limits(size=11).victims(model("new", 10, row=2), loaded)
    # What rows may take is the rest, whoever it was meant for.
    assert limits(size=24).left([*loaded, model("new", 10, row=2)]) == 4


def test_for_rows_idle_models_go_and_no_more_than_need_to() -> None:
    busy, pinned = model("busy", 10, users=1, used=1), model("pinned", 10, used=2)
    idle = [model("small", 1, used=3), model("old", 10, used=4), model("new", 10, used=5)]
    some, placed = limits(pinned=("pinned",)), [busy, pinned, *idle]
    assert some.idle_models(0, placed) == []
    assert names(some.idle_models(1, placed)) == ["small"]
    assert names(some.idle_models(2, placed)) == ["old"], "the small one alone would not do"
    assert names(some.idle_models(11, placed)) == ["small", "old"]
    assert names(some.idle_models(10**6, placed)) == ["small", "old", "new"], "all that may go"


def test_a_model_that_loads_or_is_asked_for_does_not_go_for_rows() -> None:
    loading, asked = model("loading", 10), model("asked", 10)
    loading._state = LoadState.LOADING
    asked.add_lease(None)
    assert limits().idle_models(10, [loading, asked]) == []


def test_of_models_with_the_same_base_both_must_go_to_free_it() -> None:
    loaded = [model("a", 10, used=1, base="base"), model("b", 10, used=2, base="base")]
    assert names(limits().idle_models(10, loaded)) == ["a"]
    assert names(limits().idle_models(11, loaded)) == ["a", "b"]


def test_a_row_that_has_no_room_beside_what_stays_is_refused_with_the_numbers() -> None:
    new, pinned, other = model("new", 10, row=6), model("pinned", 10), model("other", 10)
    some = limits(size=26, pinned=("pinned",))
    some.require_row(new, [new, pinned, other])  # the other may go
    with pytest.raises(InsufficientMemory, match=r"new needs 6 bytes .* 256 .* is 25, .* leaves 5"):
        limits(size=25, pinned=("pinned",)).require_row(new, [new, pinned, other])
