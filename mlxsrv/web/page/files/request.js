/** A chat request: its body, and the same as a command and as a program. */

import { BASE } from "./api.js";
import { streamed } from "./generate.js";
import { parsed } from "./settings.js";

const ALTERNATIVES = 10; // of each token

/** Parameters that openai's package takes by name; all others go into `extra_body`. */
const NAMED = new Set(
	(
		"messages model max_tokens temperature top_p seed response_format tools tool_choice logprobs " +
		"top_logprobs reasoning_effort stop n stream stream_options"
	).split(" "),
);

/**
 * Make the body of a request, without what makes it a stream.
 * @param {any[]} messages without the system prompt; an answer at their end is gone on with
 * @throws {Error} where a setting is no JSON
 */
export function chatBody(settings, model, messages) {
	const { system, think, logprobs, steering } = settings;
	const { others, ...forms } = parsed(settings);
	const last = messages.at(-1);
	const goesOn = last?.role === "assistant" && last.content !== "";
	const body = {
		...settings,
		model: model || "default",
		messages: system ? [{ role: "system", content: system }, ...messages] : messages,
		think: { on: true, off: false }[think] ?? (think || null),
		...forms,
		logprobs: logprobs || null,
		top_logprobs: logprobs ? ALTERNATIVES : null,
		steering_mode: steering && settings.steering_mode,
		profile: steering ? null : settings.profile || null,
		...(goesOn && { continue_final_message: true, add_generation_prompt: false }),
		// These stand elsewhere in the request.
		system: null,
		schema: null,
		others: null,
		...others,
	};
	return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null));
}

/** Fields that give an answer a form. */
const FORM = /^(response_format|tool_choice|structured_outputs|grammar|json_schema|guided_.*)$/;

export function hasForm(body) {
	const gives = ([name, form]) => FORM.test(name) && !["auto", "none"].includes(form) && form.type !== "text";
	return Object.entries(body).some(gives);
}

/** The request as a shell command. JSON has no line `JSON`, so nothing in it ends the document. */
export function asCurl(body) {
	return `curl -sS --no-buffer '${BASE}v1/chat/completions' \\
  -H 'Content-Type: application/json' \\
  -H "Authorization: Bearer $MLXSRV_API_KEY" \\
  --data-binary @- <<'JSON'
${JSON.stringify(streamed(body), null, 2)}
JSON
`;
}

export function asPython(body) {
	const all = Object.entries(streamed(body));
	const extra = all.filter(([name]) => !NAMED.has(name));
	const given = all.filter(([name]) => NAMED.has(name));
	if (extra.length) given.push(["extra_body", Object.fromEntries(extra)]);
	return `import os

from openai import OpenAI

client = OpenAI(base_url="${BASE}v1", api_key=os.environ.get("MLXSRV_API_KEY", "none"))
stream = client.chat.completions.create(
${given.map(([name, value]) => `    ${name}=${python(value)},`).join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
`;
}

const WORDS = { true: "True", false: "False", null: "None" };

/** A value as Python writes it: JSON, whose three words differ. */
function python(value) {
	return JSON.stringify(value, null, 4)
		.replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, each => WORDS[each] ?? each)
		.replaceAll("\n", "\n    ");
}
