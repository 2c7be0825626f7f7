"""The tokenizer: tokens, prompts and pipelines from a model's text files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from mlx_lm.utils import load_tokenizer

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.formats.model_folder import describe_model
from mlxsrv.prompts import sandbox
from mlxsrv.prompts.encoding import Truncation
from mlxsrv.prompts.templates.chat_template import names_tools
from mlxsrv.prompts.templates.messages import Chat
from mlxsrv.prompts.token_texts import TokenTexts
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.reader import OfferedCalls, ToolOpened
from tests.support.fixtures import ModelFolder
from tests.support.growth import assert_linear

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
EVERYTHING = r"""{{ bos_token }}{{ eos_token }}{%- set at = namespace(n=0) %}
    {%- for message in messages %}{% generation %}{% set at.n = at.n + 1 %}
    {{- message.role }} {{ message.content }}
    {{- message.tool_calls | default([]) | tojson(indent=1) }}
    {%- endgeneration %}{% if loop.index > 5 %}{% break %}{% endif %}
    {% endfor %}{{ at.n }} {{ tools | tojson }} {{ x }} {{ "\ud83d\ude00 \ud83d" }}
    {%- if add_generation_prompt %}assistant:{% endif %} {{- messages[-1].content }}"""


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A copy of a model's folder that a test may change."""
    return Path(shutil.copytree(model_folder("qwen3"), tmp_path / "m"))


def change(file: Path, **values: Any) -> None:
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | values))


def ids(folder: Path, *tokens: str) -> set[int]:
    return set(load_tokenizer(folder).convert_tokens_to_ids(list(tokens)))


def test_end_tokens_come_from_the_files(folder: Path) -> None:
    assert Tokenizer(folder).end_tokens == ids(folder, "<|im_end|>", "<|endoftext|>")
    change(folder / "generation_config.json", eos_token_id=[7, 8])
    change(folder / "config.json", eos_token_id=9)
    assert Tokenizer(folder).end_tokens == ids(folder, "<|im_end|>") | {7, 8, 9}


@pytest.mark.parametrize("token", ["<|eot_id|>", "<end_of_turn>", "<|end_of_text|>"])
def test_a_marker_ends_chats_where_the_template_ends_turns_with_it(
    folder: Path, token: str
) -> None:
    add_token(folder, token)
    tokenizer = Tokenizer(folder)
    assert 512 not in tokenizer.end_tokens | tokenizer.turn_ends, "nothing names it"
    for template, ends in (
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n" + token + "{% endfor %}", True),
        (token + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ raise_exception('no') }}" + token + "{% endfor %}", False),
    ):
        change(folder / "tokenizer_config.json", chat_template=template)
        tokenizer = Tokenizer(folder)
        assert (512 in tokenizer.turn_ends) is ends
        assert 512 not in tokenizer.end_tokens
        assert tokenizer.turn_ends >= tokenizer.end_tokens


def test_a_call_marker_that_ends_a_turn_is_no_text(folder: Path) -> None:
    texts = TokenTexts(
        load_tokenizer(folder),
        end_tokens=frozenset(),
        turn_ends=frozenset({5}),
        thoughts={},
        calls={5: "\ufdd0", 6: "\ufdd1"},
    )
    shown = [texts.detokenizer(chat=True, calls=True).feed(token) for token in (5, 6)]
    assert shown == ["", "\ufdd1"]


def add_token(folder: Path, token: str) -> None:
    """Write one more into the vocabulary, behind all others."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    added = {"id": 512, "content": token, "special": True, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append(added)
    file.write_text(json.dumps(content))


def test_without_a_generation_config_there_are_no_defaults(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).defaults.temperature is None


def test_sampling_defaults_are_the_models_own(folder: Path) -> None:
    change(folder / "generation_config.json", temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
    defaults = Tokenizer(folder).defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert defaults.min_p is None


def render(tokenizer: Tokenizer, **more: Any) -> Any:
    return tokenizer.render(Chat(**{"messages": HELLO, **more}))


def test_a_chat_is_what_the_template_renders(folder: Path) -> None:
    wrapper = load_tokenizer(folder)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    prompt = render(Tokenizer(folder))
    assert wrapper.decode(list(prompt.tokens)) == expected
    assert not prompt.thinking


def test_a_template_that_opens_the_think_block_is_noticed(folder: Path) -> None:
    assert render(Tokenizer(folder), variables={"enable_thinking": True}).thinking


def test_a_final_message_can_be_continued(folder: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I was about to"}]
    prompt = render(Tokenizer(folder), messages=messages, continue_final=True)
    assert load_tokenizer(folder).decode(list(prompt.tokens)).endswith("I was about to")


def test_what_a_template_refuses_is_the_clients_error(folder: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    change(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidRequest, match="roles must alternate") as error:
        render(Tokenizer(folder))
    assert error.value.param == "messages"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endless", "reason"),
    [
        ("{{ 7 ** (3 * 10**8) }}", "takes more than 2 s"),  # minutes, on any machine
        pytest.param(
            "{{ 'x' * 10**12 }}",
            "takes too much memory",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no such limit"),
        ),
    ],
)
def test_a_clients_template_that_takes_too_much_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, endless: str, reason: str
) -> None:
    """Also in one operation. The model's own may take as long as it likes."""
    if "memory" not in reason:  # which must not end for its time
        monkeypatch.setattr(sandbox, "_SECONDS", 2)
    template = Tokenizer(folder).chat_template
    with pytest.raises(InvalidRequest, match=reason) as error:
        template.render(Chat(messages=HELLO, template=endless))
    assert error.value.param == "chat_template"


@pytest.mark.parametrize(
    "chat",
    [
        {},
        {"continue_final": True},
        {"answers": False},
        {"tools": [TOOL]},
        {"variables": {"x": 0.1}},
    ],
)
def test_a_clients_template_writes_what_the_models_own_would(folder: Path, chat: Any) -> None:
    calls = [{"function": {"name": "look", "arguments": {"a": 1}}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief 😀"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "I was "},
    ]
    change(folder / "tokenizer_config.json", chat_template=EVERYTHING)
    template = Tokenizer(folder).chat_template
    own = template.render(Chat(messages=messages, **chat))
    assert template.render(Chat(messages=messages, template=EVERYTHING, **chat)) == own
    assert "😀" in own
    assert "�" in own


def test_a_model_without_a_template_does_not_chat(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    assert not tokenizer.chat_template.exists
    with pytest.raises(UnsupportedParameter, match="/v1/completions"):
        render(tokenizer)


def test_the_template_itself_is_no_variable(folder: Path) -> None:
    names = ["chat_template", "enable_thinking", "tokenize"]
    assert Tokenizer(folder).chat_template.reserved(names) == ["chat_template", "tokenize"]


@pytest.mark.parametrize(
    "text", ["plain text", "emoji 😀🚀 👩‍👩‍👧‍👦", "你好，世界", "Größe\n\n  naïve"]
)
def test_the_pipeline_gives_back_what_was_encoded(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    pipeline = tokenizer.pipeline(stops=[], chat=True, thinking=False)
    pieces = [pipeline.feed([token]) for token in tokenizer.encode(text).tokens]
    pieces.append(pipeline.flush())
    texts = [part for step in pieces for part in step if isinstance(part, tuple)]
    assert "".join(piece for _, piece in texts) == text


def test_special_tokens_are_no_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    pipeline = tokenizer.pipeline(stops=[], chat=True, thinking=False)
    tokens = tokenizer.encode("a<|im_start|>b<think>c</think>d").tokens
    assert pipeline.feed(tokens) == [("content", "ab"), ("reasoning", "c"), ("content", "d")]


def unpack(folder: Path, **settings: str) -> None:
    """Have the vocabulary in the two files of GPT-2's tokenizers instead of tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(f"{' '.join(m)}\n" for m in model["merges"]))
    change(folder / "tokenizer_config.json", **settings)


def test_a_vocabulary_may_be_in_the_files_that_its_class_reads(folder: Path) -> None:
    text = "Tell me of the sea."
    usual = Tokenizer(folder).encode(text)
    unpack(folder, tokenizer_class="Qwen2Tokenizer")
    assert describe_model(folder).type == "chat"
    assert Tokenizer(folder).encode(text) == usual


def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path) -> None:
    """transformers makes one, of a few special tokens, where its class looks for other files."""
    unpack(folder, tokenizer_class="LlamaTokenizer")
    with pytest.raises(ValueError, match=r"LlamaTokenizer finds no vocabulary.*tokenizer\.json"):
        Tokenizer(folder)


def sentencepiece(folder: Path) -> None:
    """Turn the byte-level tokenizer into one that spells as sentencepiece does, in place."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, normalizers, trainers

    raw = Raw(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<|im_end|>", *bytes_], show_progress=False
    )
    raw.train_from_iterator(["hello world, hello there"] * 4, trainer)
    content = json.loads(raw.to_str())
    # byte tokens are part of the vocabulary and not special
    content["added_tokens"] = [
        t for t in content["added_tokens"] if not t["content"].startswith("<0x")
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_sentencepiece_answer_loses_its_first_space_in_a_chat_only(folder: Path) -> None:
    sentencepiece(folder)
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode("hello é world").tokens
    for chat, expected in [(True, "hello é world"), (False, " hello é world")]:
        pipeline = tokenizer.pipeline(stops=[], chat=chat, thinking=False)
        assert pipeline.feed(tokens) == [("content", expected)]


@pytest.mark.parametrize("decoder", ["sentencepiece", "Metaspace", None])
def test_a_byte_level_vocabulary_is_decoded_as_its_pre_tokenizer_spells(
    folder: Path, decoder: str | None
) -> None:
    """Some conversions leave a decoder that is not the vocabulary's, and each space is a Ġ."""
    expected = Tokenizer(folder)
    text = "Hello there, naïve 你好\n\n  🙂"
    members = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    decoders = {
        "sentencepiece": {"type": "Sequence", "decoders": members},
        "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        None: None,
    }
    change(folder / "tokenizer.json", decoder=decoders[decoder])
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode(text).tokens
    assert tokens == expected.encode(text).tokens
    assert tokenizer.decode(tokens) == text
    assert not tokenizer.strips_first_space
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    for chat in (True, False):
        pipeline = tokenizer.pipeline(stops=[], chat=chat, thinking=False)
        assert pipeline.feed(tokens) == [("content", text)]


def test_the_markers_of_calls_are_text_only_where_tools_were_given(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.formats.calls is HERMES
    tokens = tokenizer.encode('so<tool_call>{"name": "f", "arguments": {}}</tool_call>').tokens
    plain = tokenizer.pipeline(stops=[], chat=True, thinking=False)
    assert plain.feed(tokens) == [("content", 'so{"name": "f", "arguments": {}}')]
    calling = tokenizer.pipeline(
        stops=[], chat=True, thinking=False, calls=OfferedCalls(HERMES, Tools({"f": {}}))
    )
    parts = calling.feed(tokens)
    assert parts[0] == ("content", "so")
    assert isinstance(parts[1], ToolOpened)
    assert parts[1].name == "f"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("words", [30, 6_000, pytest.param(60_000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_text_is_cut_as_its_tokenizer_does_it(
    folder: Path, words: int, side: Literal["left", "right"]
) -> None:
    """However long it is; and nothing is cut afterwards."""
    text = " ".join(f"word{i % 97} and" for i in range(words))
    theirs = load_tokenizer(folder)._tokenizer
    theirs.truncation_side = side
    ours = Tokenizer(folder)
    whole = ours.token_ids(text, special=True)
    for count in (5, 17):
        expected = theirs(text, truncation=True, max_length=count)["input_ids"]
        assert ours.token_ids(text, special=True, truncation=Truncation(count, side)) == expected
        assert ours.token_ids(text, special=True) == whole
    assert ours.token_ids("a", special=True, truncation=Truncation(5, side)) == ours.token_ids(
        "a", special=True
    )


@pytest.mark.slow
def test_of_two_texts_the_longer_is_cut(folder: Path) -> None:
    theirs, ours = load_tokenizer(folder)._tokenizer, Tokenizer(folder)
    for one, other in (("a b c", "word " * 50), ("word " * 30, "and so " * 40)):
        expected = theirs(one, other, truncation="longest_first", max_length=20)["input_ids"]
        assert ours.pair_ids(one, other, truncation=Truncation(20, "right"))[0] == expected

    # The tokenizer alone would make millions of encodings of what it cuts off here.
    def cut(words: int) -> None:
        one, other = "word " * words, "and so " * (2 * words)
        assert ours.pair_ids(one, other, truncation=Truncation(20, "right"))[0] == expected

    assert_linear(cut, 3000)


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- for tool in tools -%}{{ tool }}{%- endfor %}", True),
        ("{{ render(tools) }}", True),
        ("You have <tools> here.{{ messages }}", False),
        ("{% if xml_tools %}{{ xml_tools }}{% endif %}", False),
        ("{{ 'the tools' ~ \"tools\" }}", False),
        ("{{ message.tools }}", False),
    ],
)
def test_a_template_takes_tools_if_it_uses_the_variable(template: str, takes: bool) -> None:
    assert names_tools(template) == takes
