"""The formats of thoughts and calls of each family, found in its files."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsrv.formats.answer_formats import Evidence, FormatWords, detect, find_ends
from mlxsrv.formats.format_names import UnknownFormat, find_names, names

XTML = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
BY_TOKENS = [
    (XTML, "kimi_k3", "kimi_k3"),
    ({"<|channel|>", "<|constrain|>", "<|call|>", "<|message|>"}, "harmony", "harmony"),
    ({"<|start|>", "<|message|>", "<|eom|>", "<|eot|>"}, "muse", "muse"),
    ({"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"}, "gemma4", "gemma4"),
    ({"<start_function_call>", "<escape>"}, "functiongemma", "none"),
    ({"]<]minimax[>[", "<mm:think>", "</mm:think>"}, "minimax_m3", "minimax_m3"),
    ({"<minimax:tool_call>", "<think>", "</think>"}, "minimax_m2", "think"),
    ({"<|tool_calls_section_begin|>", "<think>", "</think>"}, "kimi_k2", "think"),
    ({"<seed:tool_call>", "<seed:think>"}, "seed_oss", "seed_oss"),
    ({"<longcat_tool_call>", "<longcat_think>", "<longcat_arg_key>"}, "longcat", "longcat"),
    ({"<|tool_call_start|>", "<|tool_list_start|>"}, "lfm2", "none"),
    ({"<|tools_prefix|>", "<|inner_prefix|>"}, "apertus", "apertus"),
    ({"<|START_ACTION|>", "<|START_THINKING|>"}, "command", "command"),
    ({"<tool_call>", "<arg_key>", "<think>", "</think>"}, "glm", "think"),
    ({"<tool_call>", "<tool_calls>", "<arg_key>"}, "hy_v3", "none"),
    ({"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}, "mistral_args", "mistral"),
    ({"[TOOL_CALLS]"}, "mistral_list", "none"),
    ({"<tool_call>", "<think>", "</think>"}, "none", "think"),
    (set(), "none", "none"),
]


@pytest.mark.parametrize("case", BY_TOKENS, ids=lambda case: case[1])
def test_tokens_decide_without_a_template(case: tuple[set[str], str, str]) -> None:
    tokens, calls, thoughts = case
    assert detect(Evidence(tokens)) == (calls, thoughts)
    assert detect(Evidence(tokens, ["{{ messages }}"])) == (calls, thoughts)


BY_TEMPLATE = {
    "<tool_call>\n<function=f>\n<parameter=k>": "qwen_xml",
    '<tool_call>{{ "\\n<function=" ~ name }}<parameter=': "qwen_xml",
    '<function name="f"><param name="k">': "minicpm5",
    "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]": "mistral_ids",
    "[TOOL_CALLS][{{ calls }}]": "mistral_list",
    "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\n```json": "deepseek_v3",
    "<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>": "deepseek_v31",
    "<｜DSML｜function_calls>": "deepseek_v32",
    "<｜DSML｜tool_calls>": "deepseek_v4",
    "<｜DSML｜ calls>": "deepseek_v41",
    "<function_calls>{{ name }}(": "olmo3",
    '<atem:invoke name="f">': "muse",
    "<TOOLCALL>[": "nemotron_v2",
    "<tool_calls>[": "hunyuan",
    "<|bom|><tool_calls>[": "jamba",
    "<|start_of_role|>assistant<|tool_call|>[": "granite",
    "<|tool|><|/tool|><|tool_call|>[": "phi4",
    "[|assistant|]<tool_call>{}</tool_call>[|endofturn|]": "exaone4",
    "<tool_call>\n{}\n</tool_call><response>": "ernie45",
    "<tool_call>\n{}\n</tool_call>": "hermes",
    '{"name": f, "parameters": {}}<|start_header_id|>ipython': "llama_json",
    '{"name": f, "parameters": {}}<function=f>{}</function>ipython': "none",
    "functools[": "functools",
    "{{ tools }}": "none",
}


@pytest.mark.parametrize("template", BY_TEMPLATE)
def test_a_template_decides_where_no_token_does(template: str) -> None:
    assert detect(Evidence((), [template])).calls == BY_TEMPLATE[template]
    tokens = {"<tool_call>", "</tool_call>", "<think>", "</think>"}  # Qwen's, of many fine-tunes
    assert detect(Evidence(tokens, [template])).calls == BY_TEMPLATE[template]


def test_the_template_for_tools_is_looked_at_first() -> None:
    """Hermes 3 and Command R have several by name."""
    templates = ["<tool_call>\n{}\n</tool_call>", "[TOOL_CALLS]"]
    assert detect(Evidence((), templates)).calls == "hermes"
    assert detect(Evidence((), ["{{ tools }}", templates[1]])).calls == "mistral_list"


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"vocabulary": {"｜DSML｜"}, "config": {"model_type": "deepseek_v32"}},
    "deepseek_v41": {"vocabulary": {"｜DSML｜"}, "config": {"model_type": "deepseek_v41_text"}},
    "deepseek_v4": {"vocabulary": {"｜DSML｜"}},
    "llama4_pythonic": {"config": {"model_type": "llama4"}},
    "phi4": {"vocabulary": {"<|tool_call|>"}, "config": {"model_type": "phi3"}},
    "none": {"config": {"model_type": "phi3"}},
    "hermes": {"config": {"model_type": "smollm3"}},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_decides_where_nothing_else_does(name: str) -> None:
    assert detect(Evidence(**{"vocabulary": (), **FAMILIES[name]})).calls == name


def test_a_parser_that_the_files_name_is_believed_if_its_marks_are_there() -> None:
    settings = {"tool_parser_type": "json_tools"}
    assert detect(Evidence({"<tool_call>"}, [], settings)).calls == "hermes"
    assert detect(Evidence((), [], settings)).calls == "none"
    assert detect(Evidence({"]<]minimax[>["}, ["<tool_call>"], settings)).calls == "minimax_m3"
    settings = {"tool_parser_type": "qwen3_coder"}
    assert detect(Evidence({"<tool_call>"}, [], settings)).calls == "qwen_xml"


def test_tokens_end_a_turn_where_the_family_has_them() -> None:
    harmony = {"<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>", "<|im_end|>"}
    assert find_ends(Evidence(harmony)) == ["<|return|>", "<|call|>"]
    gemma = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"}
    assert find_ends(Evidence({*gemma, "<turn|>", "<|tool_response>"})) == [
        "<|tool_response>",
        "<turn|>",
    ]
    assert find_ends(Evidence({*gemma, "<turn|>"})) == ["<turn|>"], "those of the vocabulary"
    assert find_ends(Evidence({*gemma, "<turn|>"} - {"<|tool_call>"})) == ["<turn|>"], "by thoughts"
    assert find_ends(Evidence({"<|user|>", "<|im_end|>"})) == []


# The operator's word.


def test_the_operators_word_decides() -> None:
    glm = Evidence({"<arg_key>", "<think>", "</think>"})
    assert detect(glm, FormatWords("hermes", "none")) == ("hermes", "none")
    assert detect(glm, FormatWords("none")) == ("none", "think")
    assert detect(glm, FormatWords("auto", "auto")) == ("glm", "think")


def test_a_name_that_stands_for_several_is_the_one_that_is_found() -> None:
    for template, wanted in (
        ("[TOOL_CALLS][", "mistral_list"),
        ("[TOOL_CALLS]{{ f }}[ARGS]", "mistral_args"),
        ("", "mistral_args"),
    ):
        assert detect(Evidence((), [template]), FormatWords("mistral")).calls == wanted


# As vLLM 0.33 and SGLang 0.5 have them, but for those of formats that nobody else's models have.
THEIR_CALLS = """
hermes qwen qwen25 qwen3_json qwen3_coder qwen3_xml step3p5 nemotron_v3 mimo seed_oss glm45 glm47
laguna poolside_v1 ling3 longcat minimax_m2 minimax-m2 minimax_m3 deepseek_v3 deepseek_v31
deepseek_v32 deepseek_v4 deepseek_v41 kimi_k2 kimi_k3 mistral llama3_json llama3 llama4_json
llama4_pythonic pythonic lfm2 olmo3 gemma4 functiongemma openai gpt-oss harmony granite granite4
phi4_mini_json apertus cohere_command3 cohere_command4 hunyuan_a13b hy_v3 jamba minicpm5 muse
exaone4 ernie45
"""
THEIR_THOUGHTS = """
qwen3 deepseek_r1 deepseek_v3 glm45 gemma4 openai_gptoss mistral kimi_k2 minimax_m2
minimax_m2_append_think step3p5 nemotron_v3 granite seed_oss olmo3 cohere_command3 hunyuan_a13b
ernie45 apertus2509 muse
"""


def test_what_vllm_and_sglang_call_a_format_is_understood() -> None:
    for word in THEIR_CALLS.split():
        assert set(find_names(word, "calls")) <= {*names("calls")}
    for word in THEIR_THOUGHTS.split():
        assert set(find_names(word, "thoughts")) <= {*names("thoughts")}


def test_an_unknown_name_is_refused_with_all_that_there_are() -> None:
    for kind in ("calls", "thoughts"):
        with pytest.raises(UnknownFormat) as refused:
            find_names("hermess", kind)
        assert "'hermess'" in str(refused.value)
        assert all(name in str(refused.value) for name in names(kind))
