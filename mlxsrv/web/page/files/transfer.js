/** Conversations as a file: what is written, and what is believed of a file that is read. */

import { newConversation } from "./conversation.js";
import { emptyAnswer } from "./generate.js";
import { defaults, parsed } from "./settings.js";

const FORMAT = "mlxsrv conversations";

// Each value stands for its type, `null` for any; a list holds what its items are like.
const ALTERNATIVE = { token: "", bytes: [0], logprob: 0 };
const TOKEN = { ...ALTERNATIVE, top_logprobs: [ALTERNATIVE] };
const CALL = { id: "", type: "function", function: { name: "", arguments: "" } };
const PLACE = { id: "", parent: "", number: 0, role: "" };
const BEGUN = { content: "", reasoning: "", tokens: [TOKEN] };

const ROLES = {
	user: { ...PLACE, content: "", files: [{ name: "", text: "" }] },
	tool: { ...PLACE, results: [{ id: "", name: "", content: "" }] },
	assistant: {
		...PLACE,
		answer: { ...emptyAnswer(), calls: [CALL], tokens: [TOKEN] },
		settings: defaults(),
		model: "",
		begun: null,
	},
};

export function asFile(conversations) {
	return JSON.stringify({ format: FORMAT, version: 1, conversations });
}

/** Read a file. Each conversation gets a new id, so that none takes another's place. @throws {Error} for the user */
export function fromFile(file) {
	if (file?.format !== FORMAT || !Array.isArray(file.conversations))
		throw new Error("This file holds no conversations of this page");
	return file.conversations.map(readConversation);
}

function readConversation(raw) {
	const { id, changed, ...fresh } = newConversation(defaults());
	const read = like({ ...fresh, chosen: null, messages: [null] }, raw);
	return { id, changed, ...read, chosen: { ...read.chosen }, messages: inOrder(read.messages.map(readMessage)) };
}

/** Put each message behind its parent, and number them. */
function inOrder(messages) {
	const following = Map.groupBy(messages, ({ parent }) => parent);
	const ordered = [{ id: "" }];
	for (const { id } of ordered) {
		ordered.push(...(following.get(id) ?? []));
		following.delete(id);
	}
	// A message lacks its parent, is in a circle, or has the id of another.
	if (new Set(ordered.map(({ id }) => id)).size <= messages.length)
		throw new Error("The messages of this file do not follow each other");
	return ordered.slice(1).map((message, number) => ({ ...message, number }));
}

function readMessage(raw) {
	if (!Object.hasOwn(ROLES, raw?.role)) throw new Error("A message of this file has no role");
	const message = like(ROLES[raw.role], raw);
	if (message.begun) message.begun = like(BEGUN, message.begun);
	if (message.settings) parsed(message.settings); // its request can be copied
	return message;
}

/** What a pattern has, with the values of `raw` where they have its types. */
function like(pattern, raw) {
	if (pattern === null) return raw ?? null;
	if (Array.isArray(pattern)) return Array.isArray(raw) ? raw.map(each => like(pattern[0], each)) : [];
	if (typeof pattern !== "object") return typeof raw === typeof pattern ? raw : pattern;
	return Object.fromEntries(Object.entries(pattern).map(([name, each]) => [name, like(each, raw?.[name])]));
}
