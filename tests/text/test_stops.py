import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsrv.text.scan import Scanner
from mlxsrv.text.stops import StopStrings
from tests.support.cuts import cut

SMALL = st.text(alphabet="ab\n你", max_size=14)
STOPS = st.lists(st.text(alphabet="ab\n你", min_size=1, max_size=4), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that is complete first, and that string.

    The text is read one character at a time, as the rule is worded.
    """
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_match(text: str, stops: list[str]) -> int:
    """Return the length of the end of `text` that a stop string begins with."""
    sizes = range(1, len(text) + 1)
    return max((n for n in sizes if any(s.startswith(text[-n:]) for s in stops)), default=0)


def run(stops: list[str], *feeds: str) -> tuple[list[str], str | None]:
    stage = StopStrings(stops)
    texts = [stage.feed(text) for text in feeds]
    return [*texts, stage.flush()], stage.matched


@pytest.mark.parametrize(
    ("stops", "feeds", "texts", "matched"),
    [
        pytest.param([], ["a", "b"], ["a", "b", ""], None, id="none"),
        pytest.param(["\n\n"], ["a\n", "\nb"], ["a", "", ""], "\n\n", id="across feeds"),
        pytest.param(["END"], ["aENDb", "c"], ["a", "", ""], "END", id="with text behind it"),
        pytest.param(["END"], ["EN", "x"], ["", "ENx", ""], None, id="fails"),
        pytest.param(["END"], ["EN"], ["", "EN"], None, id="unfinished"),
        pytest.param(["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab", id="restarts"),
        pytest.param(["aab"], ["aaab"], ["a", ""], "aab", id="restarts within a feed"),
        pytest.param(["abc"], ["aa", "bc"], ["a", "", ""], "abc", id="restarts where it waits"),
        pytest.param(["ab", "abc"], ["abc"], ["", ""], "ab", id="the first to be complete"),
        pytest.param(["bc", "abc"], ["abc"], ["", ""], "abc", id="the longer of two"),
        pytest.param(["abcd", "bc"], ["abcd"], ["a", ""], "bc", id="inside another"),
        pytest.param(["。\n", "🙂"], ["好。", "a🙂b"], ["好", "。a", ""], "🙂", id="multi-byte"),
        pytest.param(["^-]\\"], ["^-", "]^", "-]\\"], ["", "^-]", "", ""], "^-]\\", id="signs"),
    ],
)
def test_stop_strings(
    stops: list[str], feeds: list[str], texts: list[str], matched: str | None
) -> None:
    assert run(stops, *feeds) == (texts, matched)


def test_nothing_comes_after_a_match() -> None:
    stage = StopStrings(["x"])
    assert [stage.feed("axb"), stage.feed("c"), stage.flush(), stage.feed("d")] == ["a", "", "", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@given(SMALL, STOPS, st.data())
@example("aaab", ["aab"], None)
def test_any_cut_gives_the_text_before_the_first_match(
    text: str, stops: list[str], data: st.DataObject | None
) -> None:
    feeds = list(text) if data is None else cut(data, text)
    texts, matched = run(stops, *feeds)
    assert ("".join(texts), matched) == first_match(text, stops)


@given(SMALL, STOPS)
def test_no_more_waits_than_may_still_match(text: str, stops: list[str]) -> None:
    stage = StopStrings(stops)
    sent = ""
    for end, character in enumerate(text, 1):
        sent += stage.feed(character)
        if stage.matched is not None:
            return
        assert sent == text[: end - may_match(text[:end], stops)]


@given(SMALL, STOPS)
def test_the_scanner_answers_for_a_whole_text(text: str, stops: list[str]) -> None:
    scanner = Scanner(stops)
    before, matched = first_match(text, stops)
    if matched is None:
        assert scanner.search(text) is None
        assert scanner.held(text) == may_match(text, stops)
    else:
        assert scanner.search(text) == (len(before), len(before) + len(matched))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_what_is_skipped_matches_nothing_but_may_begin_a_match(size: int) -> None:
    for text, later, expected in (
        ("a STOP b ", "c STOP d", "a STOP b c "),
        ("a ST", "OP b", "a "),
        ("a STOP", " b", "a STOP b"),
        ("a STOPST", "OP", "a STOP"),
    ):
        stage = StopStrings(["STOP"])
        sent = "".join(stage.skip(text[i : i + size]) for i in range(0, len(text), size))
        sent += "".join(stage.feed(later[i : i + size]) for i in range(0, len(later), size))
        assert sent + stage.flush() == expected
        assert (stage.matched is None) == (expected == text + later)
