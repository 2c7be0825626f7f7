"""Answers in every format are read right, however they arrive, and wherever they end."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.text.formats import CALLS
from tests.support.cuts import cut
from tests.support.effort import examples
from tests.text.formats.hearing import (
    Heard,
    Vector,
    all_marks,
    by_format,
    hear,
    names,
    places,
    reader,
    shown,
    vectors,
)

VECTORS = by_format()
each_format = pytest.mark.parametrize("format", VECTORS)


def test_every_format_has_vectors() -> None:
    assert set(CALLS) == set(VECTORS)


@each_format
def test_answers_are_read(format: str) -> None:
    for vector in VECTORS[format]:
        for marks in all_marks(vector):
            heard = hear(vector, [shown(vector, marks)], marks)
            assert heard.meets(vector.expect), (vector.id, vector.why, vector.text, heard)


@pytest.mark.slow
@each_format
def test_any_split_is_heard_as_the_whole(format: str) -> None:
    for vector in VECTORS[format]:
        for marks in all_marks(vector):
            text = shown(vector, marks)
            whole = hear(vector, [text], marks)
            assert hear(vector, text, marks) == whole, vector.id
            for place in places(vector, len(text)):
                halves = [text[:place], text[place:]]
                assert hear(vector, halves, marks) == whole, (vector.id, halves)


@pytest.mark.slow
@each_format
def test_nothing_is_taken_back_and_a_cut_answer_is_the_beginning(format: str) -> None:
    for vector in VECTORS[format]:
        for marks in all_marks(vector):
            text = shown(vector, marks)
            whole = hear(vector, [text], marks, cut=True)
            for place in places(vector, len(text)):
                stage, begun = reader(vector, marks), text[:place]
                so_far = Heard().add(stage.feed(begun))
                assert so_far.begins(whole), (vector.id, begun, so_far)
                ended = hear(vector, [begun], marks, cut=True)
                assert Heard(calls=ended.calls).begins(whole), (vector.id, begun, ended)
                assert so_far.begins(ended), (vector.id, begun, ended)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=examples(400))
def test_random_pieces(data: st.DataObject) -> None:
    vector: Vector = data.draw(st.sampled_from(vectors()))
    for marks in all_marks(vector):
        text = shown(vector, marks)
        assert hear(vector, [*cut(data, text)], marks) == hear(vector, [text], marks)


@each_format
def test_only_one_call_may_be_made(format: str) -> None:
    for vector in VECTORS[format]:
        for marks in all_marks(vector):
            text = shown(vector, marks)
            whole = hear(vector, [text], marks)
            if len(whole.calls) < 2:
                continue
            for feeds in ([text], text):
                stage, heard = reader(vector, marks, parallel=False), Heard()
                for piece in feeds:
                    heard.add(stage.feed(piece))
                heard.add(stage.flush())
                assert stage.done
                assert heard.calls == whole.calls[:1], vector.id


@st.composite
def near(draw: st.DrawFn) -> Vector:
    """A vector with some of its text missing, doubled, or replaced by other signs."""
    vector: Vector = draw(st.sampled_from(vectors()))
    signs = [*names(vector.calls, vector.thoughts), *"\n {}[]()<>\"'=:,/x5", "call:now", "now"]
    text = vector.text
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        middle = draw(st.sampled_from(["", text[start:end] * 2, *signs]))
        text = text[:start] + middle + text[end:]
    return msgspec.structs.replace(vector, text=text)


@pytest.mark.slow
@given(near(), st.data())
@settings(max_examples=examples(1200, 120))
def test_near_answers_are_heard_alike_however_they_arrive(
    vector: Vector, data: st.DataObject
) -> None:
    for marks in all_marks(vector):
        text = shown(vector, marks)
        whole = hear(vector, [text], marks)
        assert hear(vector, [*cut(data, text)], marks) == whole
        assert hear(vector, text, marks) == whole
        place = data.draw(st.integers(0, len(text)))
        so_far = Heard().add(reader(vector, marks).feed(text[:place]))
        assert so_far.begins(hear(vector, [text], marks, cut=True))
        assert so_far.begins(whole)
