/**
 * Conversations as trees. Each message knows the one that it follows, so another answer or question is
 * a branch beside the first. Nothing here changes what it is given.
 */

/**
 * @typedef {import("./generate.js").Answer} Answer
 *
 * @typedef {{ id: string, parent: string, number: number }} Place behind its parent, or ""; `number` are older
 * @typedef {{ id: string, name: string, content: string }} Result of a call
 * @typedef {Pick<Answer, "content" | "reasoning" | "tokens">} Beginning to go on with
 * @typedef {{ name: string, text: string }} Attachment
 * @typedef {Place & { role: "user", content: string, files?: Attachment[] }} Question
 * @typedef {Place & { role: "tool", results: Result[] }} Results
 * @typedef {Place & {
 *   role: "assistant", answer: Answer, settings: object, model: string, begun: Beginning | null
 * }} Reply
 * @typedef {{
 *   id: string, title: string, named: boolean, changed: number, settings: Record<string, any>, chosen: Record<string, string>,
 *   messages: (Question | Results | Reply)[]
 * }} Conversation `named` by the user; `changed` in milliseconds; the `settings` of the next answer; `chosen` branches by their parent
 */

export function newId() {
	return crypto.getRandomValues(new BigUint64Array(1))[0].toString(36); // randomUUID needs https
}

export function newConversation(settings) {
	return { id: newId(), title: "", named: false, changed: Date.now(), settings, chosen: {}, messages: [] };
}

/** Add a message, and show its branch. The first question that is shown is the title. */
export function add(conversation, message) {
	return {
		...choose(conversation, message),
		changed: Date.now(),
		messages: [...conversation.messages, message],
	};
}

export function choose(conversation, message) {
	const chosen = { ...conversation.chosen, [message.parent]: message.id };
	const title =
		conversation.named || message.parent !== ""
			? conversation.title
			: titleOf(message.content || message.files?.[0]?.name || "");
	return { ...conversation, chosen, title };
}

/** The messages that are shown, first to last. */
export function path(conversation) {
	const { messages, chosen } = conversation;
	const shown = [];
	let all = messages.filter(({ parent }) => parent === "");
	while (all.length > 0) {
		const next = all.find(({ id, parent }) => id === chosen[parent]) ?? all[0];
		shown.push(next);
		all = messages.filter(({ parent }) => parent === next.id);
	}
	return shown;
}

/** A message and those before it, first to last; none if it is "". @param {string} id */
export function upTo(conversation, id) {
	const byId = new Map(conversation.messages.map(each => [each.id, each]));
	const found = [];
	for (let each = byId.get(id); each; each = byId.get(each.parent)) found.unshift(each);
	return found;
}

export function branches(conversation, message) {
	return conversation.messages.filter(({ parent }) => parent === message.parent);
}

/** Messages as a request has them. An answer of which nothing came stays: many templates want turns to alternate. */
export function asRequest(messages) {
	return messages.flatMap(message => {
		if (message.role === "user") return { role: "user", content: withFiles(message) };
		if (message.role === "tool")
			return message.results.map(({ id, ...result }) => ({ role: "tool", tool_call_id: id, ...result }));
		const { content, reasoning, finish } = message.answer;
		// A call that was cut off has half of its arguments, which the server would refuse.
		const calls = finish === "tool_calls" ? message.answer.calls : [];
		return {
			role: "assistant",
			content,
			...(reasoning && { reasoning_content: reasoning }),
			...(calls.length && { tool_calls: calls }),
		};
	});
}

/** The first line of a message, if need be cut. */
function titleOf(content) {
	const line = content.trim().split("\n")[0];
	return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The language of a file's text, by its name. */
export function languageOf(name) {
	return name.includes(".") ? name.slice(name.lastIndexOf(".") + 1) : "";
}

/** A message's text as the model reads it: its files, each between fences, and then what was written. */
function withFiles({ content, files = [] }) {
	const texts = files.map(({ name, text }) => {
		const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map(({ length }) => length));
		const fence = "`".repeat(longest + 1);
		return `${name}:\n\n${fence}${languageOf(name)}\n${text.replace(/\n$/, "")}\n${fence}`;
	});
	return [...texts, ...(content ? [content] : [])].join("\n\n");
}
