/** Ask for an answer, and collect it while it arrives. */

/**
 * @typedef {{ token: string, bytes: number[] | null, logprob: number }} Alternative
 * @typedef {Alternative & { top_logprobs: Alternative[] }} Token
 * @typedef {ReturnType<typeof emptyAnswer>} Answer so far
 */

export function emptyAnswer() {
	return {
		content: "",
		reasoning: "",
		calls: [], // as the API tells them
		/** @type {Token[]} of the content, where the request asks for `logprobs` */
		tokens: [],
		/** @type {string | null} "stop", "length", "tool_calls", "stopped" (by the user), "error" */
		finish: null,
		error: "",
		refused: false, // as it would be again
		model: "", // the name that the server gave it
		/** @type {any} */ usage: null, // or as the API tells it
		firstToken: null, // or milliseconds from the request to the first token
		duration: 0, // milliseconds from the first token to the last so far
		elapsed: 0, // milliseconds since the request, as long as the answer is written
		thoughtFrom: null, // or milliseconds from the request to the first token of a thought
		thoughtFor: 0, // milliseconds from that to the last one so far
	};
}

/**
 * Ask, and fill an answer, which may hold what the model is to go on from. An error stands in it:
 * nothing is thrown. `changed` is called after each event and each second; `signal` frees the row on the server.
 */
export async function generate(api, body, signal, changed, answer = emptyAnswer()) {
	const begun = performance.now();
	const tick = () => {
		answer.elapsed = performance.now() - begun;
		changed(answer);
	};
	const clock = setInterval(tick, 1000);
	try {
		for await (const chunk of api.stream("v1/chat/completions", streamed(body), signal)) {
			take(answer, chunk, performance.now() - begun);
			changed(answer);
		}
		if (!answer.finish) throw new Error("The connection to the server broke");
	} catch (error) {
		answer.finish = signal.aborted ? "stopped" : "error";
		if (!signal.aborted) answer.error = error.message;
		answer.refused = error.status === 400;
	}
	clearInterval(clock);
	changed(answer);
	return answer;
}

export function streamed(body) {
	return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

/** Add one chunk, which came these milliseconds after the request. */
function take(answer, chunk, elapsed) {
	answer.model ||= chunk.model;
	answer.usage = chunk.usage ?? answer.usage;
	const choice = chunk.choices.find(({ index }) => index === 0); // `n` may have asked for more
	if (!choice) return;
	const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
	if (content || reasoning || calls) {
		answer.firstToken ??= elapsed;
		answer.duration = elapsed - answer.firstToken;
	}
	if (reasoning) {
		answer.thoughtFrom ??= elapsed;
		answer.thoughtFor = elapsed - answer.thoughtFrom;
	}
	answer.content += content ?? "";
	answer.reasoning += reasoning ?? "";
	for (const call of calls ?? []) takeCall(answer.calls, call);
	answer.tokens.push(...(choice.logprobs?.content ?? []));
	answer.finish = choice.finish_reason ?? answer.finish;
}

function takeCall(calls, piece) {
	const call = (calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
	call.id ||= piece.id ?? "";
	call.function.name += piece.function?.name ?? "";
	call.function.arguments += piece.function?.arguments ?? "";
}
