"""The question for memory: when a client is asked, and what its answer brings."""

from __future__ import annotations

from mlxsrv.engine.events import MemoryShort
from mlxsrv.engine.scheduling.memory_question import _NEXT, MemoryQuestion, QuestionState

MOST = 100  # bytes that there are
PATHS = {
    QuestionState.ENOUGH: [],
    QuestionState.ASKED: [QuestionState.ASKED],
    QuestionState.ANSWERED: [QuestionState.ASKED, QuestionState.ANSWERED],
}
"""A way to each state from the first."""


def make() -> tuple[MemoryQuestion, list[MemoryShort]]:
    reported: list[MemoryShort] = []
    return MemoryQuestion(reported.append), reported


def test_a_state_follows_another_only_by_the_table() -> None:
    assert {*_NEXT} == {*QuestionState}
    for state in QuestionState:
        for following in QuestionState:
            question, refused = make()[0], False
            for each in PATHS[state]:
                question._enter(each)
            try:
                question._enter(following)
            except RuntimeError:
                refused = True
            case = f"{state.value}, then {following.value}"
            assert refused == (following not in _NEXT[state]), case
            assert question.state is (state if refused else following), case


def test_the_client_is_asked_once_and_then_for_more_only() -> None:
    question, reported = make()
    question.ask(MOST, MOST)
    assert reported == [], "there is enough"
    for needed in (120, 120, 130):
        question.ask(needed, MOST)
    assert reported == [MemoryShort(20)], "it has not answered"
    question.note_answer()
    question.ask(120, MOST)
    assert reported == [MemoryShort(20)], "it has"
    question.ask(130, MOST)
    assert reported == [MemoryShort(20), MemoryShort(30)]


def test_what_is_short_again_is_asked_for_again() -> None:
    question, reported = make()
    question.ask(120, MOST)
    question.note_answer()
    question.note_enough()
    question.ask(120, MOST)
    assert reported == [MemoryShort(20)] * 2


def test_no_text_is_refused_before_the_client_has_answered_for_it() -> None:
    question, reported = make()
    assert not question.ask_for(1, 120, MOST)
    assert not question.ask_for(1, 120, MOST)
    assert reported == [MemoryShort(20)]
    assert not question.ask_for(2, 150, MOST), "the question under way is for less"
    question.note_answer()
    assert question.ask_for(1, 120, MOST)
    assert not question.ask_for(2, 150, MOST)
    assert reported == [MemoryShort(20), MemoryShort(50)]
    question.note_answer()
    assert question.ask_for(2, 150, MOST)


def test_an_answer_from_before_there_was_enough_refuses_nobody() -> None:
    question, reported = make()
    assert not question.ask_for(1, 120, MOST)
    question.note_enough()
    question.note_answer()
    assert not question.ask_for(1, 120, MOST)
    assert reported == [MemoryShort(20)] * 2
