"""Bodies of OpenAI's API and of what others add to it, right and wrong."""

from __future__ import annotations

from typing import Any

from tests.support.schemas import Body

Table = dict[str, list[Any]]
"""Fields and values to try, each in a request that is fine but for it."""


def chat(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> Body:
    return {"prompt": "Once", **fields}


def tool(name: str = "f", **fields: Any) -> Body:
    return {"type": "function", "function": {"name": name, **fields}}


def message(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "hi"}, fields]}


JSON_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_OBJECT = {"type": "json_object"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Values that are wrong whatever else is there; the error's param is the field.

WRONG: Table = {
    "model": [5, [], {}, True],
    "temperature": ["0.5", -0.1, 2.1, True, [], {}],
    "top_p": ["1", -0.1, 1.1, False, []],
    "top_k": ["5", -2, 1.5, True, 2**31],
    "min_p": ["0", -0.1, 1.1, True],
    "frequency_penalty": ["0", -2.1, 2.1, True, []],
    "presence_penalty": ["0", -2.1, 2.1, False, {}],
    "repetition_penalty": ["1", 0, -1, 10.1, True],
    "repeat_penalty": ["1", 0, -1, 10.1, True],
    "dry_multiplier": ["1", -0.1, 101, True, []],
    "dry_base": ["2", 0.9, 101, True],
    "dry_allowed_length": ["2", -1, 1.5, True],
    "dry_penalty_last_n": ["64", -2, 1.5, True],
    "dry_sequence_breakers": ["\n", 5, {}, True, ["x"] * 17],
    "logit_bias": [
        *("5", 5, True, {"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"05": 1}, {" 5": 1}),
        *({"5": "1"}, {"5": True}, {"5": None}, {"5": 100.1}, {"5": -101}, {"5": []}),
        *({str(2**31): 1}, {"5": 1, "x": 1}),
    ],
    "seed": ["1", 1.5, True, 2**63, -(2**63) - 1, []],
    "stop": [5, True, {}, ["x"] * 17],
    "max_tokens": ["8", -5, 0, 1.5, True, []],
    "max_completion_tokens": ["8", 0, -2, 1.5, True],
    "n_predict": ["8", 0, -2, 1.5, True],
    "min_tokens": ["8", -1, 1.5, True, []],
    "truncate_prompt_tokens": ["8", 0, -2, 1.5, True, []],
    "ignore_eos": ["yes", 1, 0, []],
    "stop_token_ids": [5, "5", {}, True, [1] * 1001],
    "bad_words": ["a", 5, {}, True, ["a"] * 1001],
    "allowed_token_ids": [5, "5", {}, True, []],
    "n": ["1", 0, -1, 129, 1.5, True, []],
    "guided_regex": ["", 5, True, ["a"], {}],
    "guided_choice": [[], "a", 5, {}, True],
    "guided_grammar": ["", 5, ["start: x"], {}],
    "guided_json": [5, True, []],
    "structured_outputs": [5, True, [], "json"],
    "grammar": [5, True, [], {}],
    "json_schema": [5, True, []],
    "profile": ["", 5, True, [], {}],
    "steering": [
        *("5", 5, True, {"a": 1}, {"1.0": 1}, {"": 1}, {"05": 1}, {" 5": 1}, {"5": "1"}),
        *({"5": True}, {"5": None}, {"5": 200.1}, {"5": -201}, {"5": []}, {"5": 1, "x": 1}),
        {str(feature): 1 for feature in range(1001)},
    ],
    "steering_mode": ["add", "", 5, True, []],
    "control_vector": ["", 5, True, [], {"": 1}, {"a": "1"}, {"a": 100.1}, {"a": -101}],
    "stream": ["true", 1, 0, []],
    "stream_options": [True, "x", []],
    "prompt_logprobs": ["1", True, -1, 21, 1.5, []],
    "return_token_ids": [1, "true", []],
    "return_tokens_as_token_ids": [1, "true", []],
    "timings_per_token": [1, "true", []],
    "verbose": [1, "true", {}],
    "user": [5, {}, []],
}
WRONG_CHAT: Table = {
    "messages": [None, [], {}, "hi", 5],
    "logprobs": [1, 0, "true", []],
    "top_logprobs": ["1", -1, 21, 1.5, True],
    "tools": [{}, "f", 5, True],
    "tool_choice": ["some", 5, True, [], "", "AUTO"],
    "parallel_tool_calls": [1, "true", {}],
    "response_format": ["json_object", 5, [], True],
    "chat_template_kwargs": [[], "x", 5, True],
    "reasoning_effort": [5, True, {}],
    "reasoning": ["high", 5, True],
    "enable_thinking": ["yes", 1, "high"],
    "think": [1, [], "x" * 101],
    "continue_final_message": ["yes", 1],
    "add_generation_prompt": ["yes", 1],
    "chat_template": ["", 5, True, []],
}
WRONG_COMPLETION: Table = {
    "prompt": [None, 5, True, {}, [], ["a", 5], [5, "a"], ["a", [5]], [5, [5]]],
    "logprobs": ["1", True, False, -1, 21, 1.5, []],
    "echo": [1, 0, "true", []],
    "best_of": ["1", 0, -1, True, 1.5],
    "suffix": [5, ["x"], True],
}
WRONG_INFILL: Table = {
    "input_prefix": [None, 5, ["x"]],
    "input_suffix": [None, 5, ["x"]],
    "input_extra": ["x", {}, 5],
    "prompt": [5, ["x"]],
    "n": [2],
}
WRONG_WITHIN_INFILL: list[tuple[Body, str]] = [
    ({"logit_bias": [5]}, "logit_bias[0]"),
    ({"logit_bias": [[5]]}, "logit_bias[0]"),
    ({"logit_bias": [[5, "x"]]}, "logit_bias[0][1]"),
    ({"logit_bias": [[5, 101]]}, "logit_bias[0][1]"),
    ({"input_extra": ["x"]}, "input_extra[0]"),
    ({"input_extra": [{"text": 5}]}, "input_extra[0].text"),
    ({"input_extra": [{"text": "x", "filename": None}]}, "input_extra[0].filename"),
]
WRONG_TOKENIZE: Table = {
    "content": [5, ["a"], {}, True],
    "prompt": [5, ["a"], "x"],
    "messages": ["x", [], 5, [{"role": "user", "content": "x"}]],
    "return_token_strs": [1, "true", []],
    "model": [5, [], True],
    "add_special_tokens": [1, "true", []],
    "with_pieces": [1, "true", []],
}
WRONG_DETOKENIZE: Table = {"tokens": [None, 5, "1", {}, True], "model": [5, [], True]}

# Values that are wrong somewhere inside, and fields that do not go together.

Elsewhere = list[tuple[Body, str]]
"""Bodies and the error's param."""

WRONG_WITHIN: Elsewhere = [
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex"),
    ({"grammar": "g", "json_schema": {}}, "json_schema"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": [None]}, "stop[0]"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": [1, 2**31]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["a" * 1001]}, "bad_words[0]"),
    ({"bad_words": [["a"]]}, "bad_words[0]"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
    ({"guided_choice": [None]}, "guided_choice[0]"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    (
        {"stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "guided_grammar": "start: x"}, "guided_grammar"),
    ({"guided_choice": ["a"], "guided_json": {}}, "guided_json"),
    ({"guided_grammar": "start: x", "guided_json": "{}"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
]
WRONG_WITHIN_CHAT: Elsewhere = [
    (message(role="robot"), "messages[1].role"),
    (message(role=None), "messages[1].role"),
    (message(role="user", content=5), "messages[1].content"),
    (message(role="user", content={"type": "text", "text": "hi"}), "messages[1].content"),
    (message(role="user", content=["hi"]), "messages[1].content[0]"),
    (message(role="user", name=5), "messages[1].name"),
    (message(role="assistant", tool_calls="f()"), "messages[1].tool_calls"),
    (message(role="assistant", reasoning=5), "messages[1].reasoning"),
    (message(role="assistant", refusal=5), "messages[1].refusal"),
    (message(role="assistant", function_call="f"), "messages[1].function_call"),
    (message(role="assistant", tool_calls=["f()"]), "messages[1].tool_calls[0]"),
    ({"messages": [5]}, "messages[0]"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
    *[
        ({"tools": [tool(name)]}, "tools[0].function.name")
        for name in ("", "x" * 65, "a b", "a\n", "é", "f()")
    ],
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(), tool(parameters=[])]}, "tools[1].function.parameters"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": tool("f")}, "tool_choice"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": "f"}},
        "tool_choice.function",
    ),
    ({"tools": [tool()], "tool_choice": tool("f") | {"type": "custom"}}, "tool_choice.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": 5}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": JSON_OBJECT, "guided_json": {}}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {}},
            },
            "guided_choice": ["a"],
        },
        "response_format",
    ),
]
WRONG_WITHIN_COMPLETION: Elsewhere = [
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [5, 2**31]}, "prompt[1]"),
    ({"prompt": [2**80]}, "prompt[0]"),
    ({"prompt": [[5], [[1]]]}, "prompt[1][0]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
]
WRONG_WITHIN_DETOKENIZE: Elsewhere = [
    ({"tokens": [1, -1]}, "tokens[1]"),
    ({"tokens": ["1"]}, "tokens[0]"),
    ({"tokens": [True]}, "tokens[0]"),
    ({"tokens": [1.5]}, "tokens[0]"),
    ({"tokens": [2**31]}, "tokens[0]"),
]

# Wrong in a way that a schema cannot say, or that no tool would understand.

WRONG_UNSAID: Elsewhere = [
    *(({"json_schema": text}, "json_schema") for text in ("{", "[]", "")),
    *(
        ({"structured_outputs": {"json": text}}, "structured_outputs.json")
        for text in ("{", "[]", "")
    ),
    ({"profile": "mine", "steering": {"5": 1}}, "steering"),
    ({"profile": "mine", "steering": {}}, "steering"),
    ({"steering_mode": "additive"}, "steering_mode"),
    ({"profile": "mine", "steering_mode": "clamp"}, "steering_mode"),
    ({"steering": None, "steering_mode": "clamp"}, "steering_mode"),
    ({"max_tokens": 5, "max_completion_tokens": 7}, "max_completion_tokens"),
    ({"max_tokens": -1, "max_completion_tokens": 7, "n_predict": 5}, "n_predict"),
    ({"repetition_penalty": 1.5, "repeat_penalty": 1.25}, "repeat_penalty"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
]
CONTINUOUS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
WRONG_UNSAID_ASKED: Elsewhere = [
    ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    (CONTINUOUS, "stream_options.continuous_usage_stats"),
]
WRONG_UNSAID_COMPLETION: Elsewhere = [
    ({"suffix": "x", "echo": True}, "suffix"),
    ({"suffix": "x", "prompt": [5]}, "suffix"),
    ({"suffix": "x", "prompt": [[5]]}, "suffix"),
]
WRONG_UNSAID_CHAT: Elsewhere = [
    ({"enable_thinking": True, "think": False}, "think"),
    ({"enable_thinking": False, "think": "low"}, "think"),
    ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "think"),
    (
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": [[]]}},
        "enable_thinking",
    ),
    ({"think": "low", "reasoning_effort": "high"}, "think"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"reasoning": {"enabled": True}, "think": False}, "reasoning.enabled"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": "null"}, "guided_json"),
    ({"guided_json": ""}, "guided_json"),
    ({"guided_json": "[" * 9000}, "guided_json"),
    ({"tools": [tool("f"), tool("g")], "tool_choice": tool("h")}, "tool_choice.function.name"),
]

# What is missing.

MISSING_CHAT: Elsewhere = [
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    (message(role="user", content=[{"text": "hi"}]), "messages[1].content[0].type"),
    (message(role="assistant", function_call={}), "messages[1].function_call.name"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool()], "tool_choice": {"function": {"name": "f"}}}, "tool_choice.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
]

# What is known and cannot be honoured.

UNSUPPORTED: Table = {
    "functions": [[{"name": "f"}], {}],
    "function_call": [{"name": "f"}, "required"],
    "modalities": [["text", "audio"], ["audio"], []],
    "audio": [{"voice": "ash"}, False],
    "web_search_options": [{}],
    "moderation": [{"model": "m"}],
}
UNSUPPORTED_CHAT: Table = {
    "best_of": [2, 0, True, "1"],
    "echo": [True, 0],
    "suffix": ["the end", 5],
}
UNSUPPORTED_INFILL: Table = {
    "prompt_logprobs": [0, 5],
    "return_tokens_as_token_ids": [True],
    "n_probs": [3],
}
UNSUPPORTED_COMPLETION: Table = {
    "top_logprobs": [1, False],
    "response_format": [JSON_OBJECT, "text"],
    "tools": [[tool()], {}],
    "tool_choice": ["required", tool()],
}

# What is fine: as it is, or because it asks for nothing.

FINE: Table = {
    "model": ["default", "org/name"],
    "temperature": [0, 1, 2, 0.5, 2.0],
    "top_p": [0, 1, 0.5],
    "top_k": [-1, 0, 2**31 - 1],
    "min_p": [0, 1],
    "frequency_penalty": [-2, 0, 2, 0.5],
    "presence_penalty": [-2, 0, 2, -0.5],
    "repetition_penalty": [0.01, 1, 10],
    "repeat_penalty": [0.01, 1, 10],
    "dry_multiplier": [0, 0.8, 100],
    "dry_base": [1, 1.75, 100],
    "dry_allowed_length": [0, 2, 2**31 - 1],
    "dry_penalty_last_n": [-1, 0, 64, 2**31 - 1],
    "dry_sequence_breakers": [[], ["\n", ":", "a b"], ["x"] * 16],
    "logit_bias": [{}, {"0": 100, "50256": -100}, {"5": 0.5}, [], [[5, 0.5], [6, False]]],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "stop": ["x", "", [], [""], ["x"] * 16],
    "max_tokens": [-1, 1, 2**40],
    "max_completion_tokens": [-1, 1],
    "n_predict": [-1, 1],
    "min_tokens": [0, 5],
    "truncate_prompt_tokens": [-1, 1, 2**40],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], [0, 5, 2**31 - 1]],
    "bad_words": [[], ["a", " b c"]],
    "allowed_token_ids": [[0], [5, 2**31 - 1]],
    "guided_regex": ["a+"],
    "guided_choice": [["yes", "no"], [""]],
    "guided_grammar": ['start: "x"'],
    "guided_json": [JSON_SCHEMA, '{"type": "object"}', {}],
    "structured_outputs": [
        *({"json": JSON_SCHEMA}, {"json": "{}", "disable_any_whitespace": True}, {"regex": "a"}),
        *({"choice": ["a"], "json_object": False}, {"grammar": "start: x", "regex": None}),
        {"json_object": True, "disable_fallback": True, "disable_additional_properties": True},
    ],
    "grammar": ['root ::= "x"', ""],
    "json_schema": [JSON_SCHEMA, '{"type": "object"}', {}],
    "profile": ["mine", "a b é"],
    "steering": [{}, {"5": 1}, {"0": -200, "16383": 200.0}],
    "control_vector": ["calm", {}, {"calm": 1, "a/b c": -0.5}],
    "stream": [True, False],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": None}],
    "timings_per_token": [True, False],
    "verbose": [True, False],
    "return_token_ids": [True, False],
    "user": ["ada"],
}
FINE_ASKED: Table = {
    "n": [1, 128],
    "prompt_logprobs": [0, 20],
    "return_tokens_as_token_ids": [True, False],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "suffix": [""],
}
FINE_CHAT: Table = {
    "logprobs": [True, False],
    "top_logprobs": [0],
    "tools": [[], [tool()], [tool("a.b-c_D9", description="x", parameters={}, strict=True)]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "response_format": [
        {"type": "text"},
        JSON_OBJECT,
        JSON_OBJECT | {"schema": JSON_SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": JSON_SCHEMA}},
    ],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "reasoning_effort": ["low", "none"],
    "reasoning": [{}, {"effort": "low"}, {"enabled": False}],
    "enable_thinking": [True, False],
    "think": [True, False, "none", "low", "medium", "high", "max"],
    "continue_final_message": [True],
    "add_generation_prompt": [True, False],
    "chat_template": ["{{ messages }}"],
    "best_of": [1],
    "echo": [False],
}
FINE_COMPLETION: Table = {
    "prompt": ["x", ["x", "y"], [0, 5], [[5], [6, 7]]],
    "logprobs": [0, 20],
    "echo": [True, False],
    "best_of": [1],
    "suffix": ["", "x"],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
}
FINE_TOGETHER: list[Body] = [
    {"steering": {"5": 0}, "steering_mode": "clamp"},
    {"max_tokens": 5, "max_completion_tokens": 5, "n_predict": -1},
    {"repetition_penalty": 1.5, "repeat_penalty": 1.5},
    {"steering": {}, "steering_mode": "additive", "control_vector": "calm"},
    {"profile": "mine", "steering": None, "steering_mode": None, "control_vector": {}},
]
FINE_TOGETHER_CHAT: list[Body] = [
    {"logprobs": True, "top_logprobs": 20},
    {"enable_thinking": True, "think": "low", "reasoning_effort": "low"},
    {"think": False, "chat_template_kwargs": {"enable_thinking": False}},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"tools": [tool()], "tool_choice": "required"},
    {"tools": [tool()], "tool_choice": "any"},
    {"tools": [tool("f"), tool("g")], "tool_choice": tool("g")},
    {"tools": [tool()], "response_format": JSON_OBJECT},
    {"response_format": {"type": "text"}, "guided_regex": "a"},
    {"response_format": None, "guided_regex": "a", "guided_json": None},
    message(role="assistant", content=None, tool_calls=[CALL], refusal=None),
    message(role="assistant", content=None, function_call=CALL["function"]),
    message(role="assistant", content="x", reasoning="y", reasoning_content="y", audio=None),
    message(role="tool", content="5", tool_call_id="call_1"),
    message(role="function", name="f", content="5"),
    message(role="user", content=[{"type": "text", "text": "a"}]),
]
FINE_TOGETHER_COMPLETION: list[Body] = [
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"n": 3, "best_of": 3},
    {"n": None, "best_of": 1},
    {"prompt": ["a", "b"], "n": 2},
]
FINE_TOKENIZE: Table = {
    "content": ["", "x"],
    "model": ["m"],
    "add_special_tokens": [True, False],
    "with_pieces": [True, False],
}
FINE_DETOKENIZE: Table = {"tokens": [[], [0, 5, 2**31 - 1]], "model": ["m"]}
