"""Ids of calls in the form that a family's template reads when they come back."""

from __future__ import annotations

import re

from mlxsrv.text.call_formats.call_ids import count_calls
from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.formats import CALLS
from mlxsrv.text.frames import NoThoughts
from mlxsrv.text.marks import SPELLED
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolOpened

FORMS = {
    "hermes": "call_[A-Za-z0-9]{24}",
    "kimi_k2": "functions.f:7",
    "mistral_args": "[A-Za-z0-9]{9}",
    "mistral_list": "[A-Za-z0-9]{9}",
    "command": "7",
}


def test_new_ids_have_the_form_of_the_format() -> None:
    for name, form in FORMS.items():
        assert re.fullmatch(form, CALLS[name].ids.new("f", 7)), name
    ids = CALLS["hermes"].ids
    assert ids.new("f", 7) != ids.new("f", 7)


def test_calls_are_counted_over_the_whole_chat() -> None:
    assert count_calls([]) == 0
    assert count_calls(["call_1", "call_2"]) == 2
    assert count_calls(["call_1", None]) == 2
    assert count_calls(["functions.f:4", "functions.g:5"]) == 6, "earlier ones are gone"


def test_an_id_with_a_number_of_any_length_is_counted() -> None:
    assert count_calls(["functions.f:" + "9" * 5000]) == 1


def test_an_answers_calls_go_on_with_the_count() -> None:
    calls = OfferedCalls(CALLS["kimi_k2"], Tools({"f": {}, "g": {}}), earlier=3)
    stage = AnswerReader(NoThoughts().frame(SPELLED, thinking=False), SPELLED, calls)
    one, two = (
        f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for name in ("f:0", "g:1")
    )
    text = f"<|tool_calls_section_begin|>{one}{two}<|tool_calls_section_end|>"
    parts = [*stage.feed(text), *stage.flush()]
    opened = [part.id for part in parts if isinstance(part, ToolOpened)]
    assert opened == ["functions.f:3", "functions.g:4"]
