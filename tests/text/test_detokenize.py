import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.text.detokenize import (
    DecodingDetokenizer,
    Detokenizer,
    Scheme,
    TokenBytes,
    token_bytes,
)
from mlxsrv.text.stage import Stage
from tests.text.conftest import TEXTS

MARKERS = ("<think>", "</think>")


def run(stage: Stage[int, str], ids: Iterable[int]) -> list[str]:
    return [*(stage.feed(token_id) for token_id in ids), stage.flush()]


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def named(tokenizer: Any, *tokens: str) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    return ids


@pytest.fixture(scope="module")
def byte_table(byte_level: Any) -> TokenBytes:
    return token_bytes(byte_level, "byte_level")


@pytest.fixture(scope="module")
def piece_table(sentencepiece: Any) -> TokenBytes:
    return token_bytes(sentencepiece, "sentencepiece")


@given(TEXTS)
def test_byte_level_agrees_with_decode(byte_level: Any, byte_table: TokenBytes, text: str) -> None:
    ids = encode(byte_level, text)
    assert "".join(run(Detokenizer(byte_table), ids)) == decode(byte_level, ids) == text


@given(TEXTS)
def test_sentencepiece_agrees_with_decode(
    sentencepiece: Any, piece_table: TokenBytes, text: str
) -> None:
    ids = encode(sentencepiece, text)
    stage = Detokenizer(piece_table, strip_first_space=True)
    assert "".join(run(stage, ids)) == decode(sentencepiece, ids)


@given(st.lists(st.integers(0, 329), max_size=20))
def test_any_ids_agree_with_decode_but_for_a_cut_character(
    byte_level: Any, byte_table: TokenBytes, ids: list[int]
) -> None:
    text = "".join(run(Detokenizer(byte_table), ids))
    whole = decode(byte_level, ids)
    assert whole.startswith(text)
    # The beginning of a surrogate, which is no character, is two broken pieces to some decoders.
    assert whole[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_id_is_written_as_decode_writes_it(
    request: pytest.FixtureRequest, kind: Scheme, shuffled: bool
) -> None:
    tokenizer = request.getfixturevalue(kind)
    table = token_bytes(tokenizer, kind)
    # A cut character is U+FFFD to both, but each decoder has its own count of them; and byte level
    # takes an added token for bytes, even if these are no text.
    ids = [i for i, text in enumerate(table.texts) if text not in (None, "naïve")]
    if shuffled:
        random.Random(31).shuffle(ids)
    stage = Detokenizer(table, strip_first_space=kind == "sentencepiece")
    assert "".join(run(stage, ids)) == decode(tokenizer, ids)


def test_added_tokens_are_spelled_like_others(byte_level: Any, sentencepiece: Any) -> None:
    """A run of spaces, as Gemma's are, and words whose characters would spell broken bytes."""
    cases: tuple[tuple[Scheme, Any, str, str], ...] = (
        ("sentencepiece", sentencepiece, "▁▁▁", "   "),
        ("sentencepiece", sentencepiece, "<▁tool é>", "< tool é>"),
        ("byte_level", byte_level, "ĠĠĠ", "   "),
        ("byte_level", byte_level, "<tool é>", "<tool é>"),
        ("byte_level", byte_level, "naïve", "naïve"),
    )
    for kind, tokenizer, name, text in cases:
        (token,) = named(tokenizer, name)
        assert token in tokenizer.added_tokens_decoder
        stage = Detokenizer(token_bytes(tokenizer, kind))
        assert run(stage, [token]) == [text, ""], name


@given(TEXTS)
def test_no_prefix_shows_a_cut_character(byte_table: TokenBytes, text: str) -> None:
    stage = Detokenizer(byte_table)
    for byte in text.replace("\ufffd", "").encode():
        single = byte_table.data.index(bytes([byte]))
        assert "\ufffd" not in stage.feed(single)
    assert stage.flush() == ""


@pytest.mark.parametrize(
    "text", ["🙂", "👩‍👩‍👧", "你好", "🇨🇿", "é", "a🙂b", "\ufffd", "\ufffd\ufffd"]
)
def test_a_character_comes_with_its_last_byte(byte_table: TokenBytes, text: str) -> None:
    ids = [byte_table.data.index(bytes([byte])) for byte in text.encode()]
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert run(Detokenizer(byte_table), ids) == [*expected, ""]


def test_an_unfinished_character_is_dropped(byte_table: TokenBytes) -> None:
    lead = byte_table.data.index(b"\xf0")
    letter = byte_table.data.index(b"a")
    assert run(Detokenizer(byte_table), [letter, lead]) == ["a", "", ""]
    assert run(Detokenizer(byte_table), [lead, letter]) == ["", "\ufffda", ""]


def test_special_tokens_write_nothing_but_for_those_kept(byte_level: Any) -> None:
    start, end, tool = named(byte_level, "<think>", "<|end|>", "<tool é>")
    dropped = Detokenizer(token_bytes(byte_level, "byte_level"))
    kept = Detokenizer(token_bytes(byte_level, "byte_level", keep=MARKERS))
    assert run(dropped, [start, end, tool]) == ["", "", "<tool é>", ""]
    assert run(kept, [start, end, tool]) == ["<think>", "", "<tool é>", ""]


def test_a_special_token_does_not_part_a_character(byte_level: Any, byte_table: TokenBytes) -> None:
    head, tail = (byte_table.data.index(bytes([byte])) for byte in "é".encode())
    (end,) = named(byte_level, "<|end|>")
    assert run(Detokenizer(byte_table), [head, end, tail]) == ["", "", "é", ""]


def test_ids_beyond_the_table_write_nothing(byte_level: Any, byte_table: TokenBytes) -> None:
    assert run(Detokenizer(byte_table), [len(byte_level), 10**6]) == ["", "", ""]


def test_added_ids_may_lie_beyond_the_size() -> None:
    class Gapped:
        """Two tokens, and an added one far behind them; a whole tokenizer cannot be made so."""

        class Added:
            content = "<x>"
            special = False

        added_tokens_decoder = {9: Added()}  # noqa: RUF012

        def convert_ids_to_tokens(self, ids: list[int], /) -> list[str | None]:
            return [["a", "b", None][token_id] for token_id in ids]

        def __len__(self) -> int:
            return 3

    stage = Detokenizer(token_bytes(Gapped(), "byte_level"))
    assert run(stage, [0, 1, 2, 5, 9]) == ["a", "b", "", "", "<x>", ""]


def test_only_one_first_space_is_stripped(sentencepiece: Any, piece_table: TokenBytes) -> None:
    (space,) = named(sentencepiece, "▁")
    ids = [space, space, *named(sentencepiece, "e"), space]
    assert run(Detokenizer(piece_table), ids) == [" ", " ", "e", " ", ""]
    assert run(Detokenizer(piece_table, strip_first_space=True), ids) == ["", " ", "e", " ", ""]
    begun = [*named(sentencepiece, "<s>"), *ids]
    assert run(Detokenizer(piece_table, strip_first_space=True), begun)[:3] == ["", "", " "]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece"])
@given(text=TEXTS)
def test_the_fallback_agrees_with_decode(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer = request.getfixturevalue(kind)
    if kind == "sentencepiece":  # whose decoder takes a row of them for bytes that are no UTF-8
        text = text.replace("\ufffd", "")
    ids = encode(tokenizer, text)
    # A U+FFFD at the very end cannot be told from a cut character.
    written = "".join(run(DecodingDetokenizer(tokenizer), ids))
    whole = decode(tokenizer, ids)
    assert whole.startswith(written)
    assert set(whole[len(written) :]) <= {"\ufffd"}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(alphabet="你🙂é👩\u200da ", min_size=1, max_size=30))
def test_the_fallback_never_shows_a_cut_character(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = encode(tokenizer, text)
    for end in (len(ids), len(ids) - 1):
        written = "".join(run(DecodingDetokenizer(tokenizer), ids[:end]))
        assert "\ufffd" not in written
        assert text.startswith(written) or kind == "sentencepiece"


def test_the_fallback_drops_an_unfinished_character(sentencepiece: Any) -> None:
    # This decoder takes the whole run of bytes for broken, with the character before the cut one.
    ids = encode(sentencepiece, "x🦀🦀")[:-1]
    assert "".join(run(DecodingDetokenizer(sentencepiece), ids)) == "x🦀"


def test_the_fallback_shows_a_whole_character_behind_broken_bytes(
    byte_level: Any, byte_table: TokenBytes
) -> None:
    for broken in range(12):
        ids = [byte_table.data.index(bytes([byte])) for byte in b"\xe4" * broken + "🙂".encode()]
        assert "".join(run(DecodingDetokenizer(byte_level), ids)) == "\ufffd" * broken + "🙂"


def test_the_fallback_decodes_a_bounded_window(byte_level: Any, byte_table: TokenBytes) -> None:
    class Watching:
        longest = 0

        def decode(self, ids: Any, /, *, skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            text: str = byte_level.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    lead = byte_table.data.index(b"\xe4")
    (end,) = named(byte_level, "<|end|>")
    for ids in (encode(byte_level, "hello 你好 " * 50), [lead] * 300, [end] * 300):
        decoder = Watching()
        text = "".join(run(DecodingDetokenizer(decoder), ids))
        assert 0 <= len(decode(byte_level, ids)) - len(text) <= 11
        assert decoder.longest <= 16


def test_the_fallback_keeps_a_space_across_special_tokens(wordpiece: Any) -> None:
    ids = [*encode(wordpiece, "quick"), *named(wordpiece, "[SEP]", "[SEP]")]
    ids += encode(wordpiece, "fox")
    assert "".join(run(DecodingDetokenizer(wordpiece), ids)) == "quick fox"


def test_the_fallback_gives_kept_ids_their_text(byte_level: Any, byte_table: TokenBytes) -> None:
    start, end = named(byte_level, *MARKERS)
    lead = byte_table.data.index(b"\xe4")
    ids = [start, *encode(byte_level, " a 你"), lead, end, *encode(byte_level, " b")]
    stage = DecodingDetokenizer(byte_level, keep={start: "<think>", end: "</think>"})
    assert "".join(run(stage, ids)) == "<think> a 你</think> b"


def test_noncharacters_of_the_model_are_no_markers(byte_level: Any, byte_table: TokenBytes) -> None:
    ids = encode(byte_level, "a\ufdd0b\ufdefé")
    [marker] = named(byte_level, "!")
    table = byte_table.masking().showing({marker: "\ufdd0"})
    assert "".join(run(Detokenizer(table), ids)) == "a\ufffdb\ufffdé"
    assert "".join(run(Detokenizer(table), [*ids, marker])) == "a\ufffdb\ufffdé\ufdd0"
    # A marker cuts a character off.
    start = encode(byte_level, "\ufdd0")
    cut = "".join(run(Detokenizer(table), [*start[:1], marker]))
    assert len(start) < 2 or cut == "\ufffd\ufdd0"


def test_noncharacters_that_a_tokenizer_decodes_are_no_markers(byte_level: Any) -> None:
    ids = encode(byte_level, "a\ufdd0b")
    [marker] = named(byte_level, "!")
    stage = DecodingDetokenizer(byte_level, keep={marker: "\ufdd0"}, masked=True)
    assert "".join(run(stage, [*ids, marker])) == "a\ufffdb\ufdd0"
