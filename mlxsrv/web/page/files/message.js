/** Messages of a conversation, with what can be done with each. */

import { AnswerView } from "./answer.js";
import { foldedFile } from "./attachments.js";
import { branches } from "./conversation.js";
import { button, composes, copy, el, field, growing, onEnter, small, type } from "./dom.js";
import { iconButton } from "./icons.js";
import { isMoving, stateOf } from "./models.js";
import { asCurl, asPython } from "./request.js";

/** Of a longer message the beginning is shown. */
const LONG = 1500;
const LINES = 15;

export function viewOf(chat, message) {
	if (message.role === "user") return new QuestionView(chat, message);
	if (message.role === "tool") return new ResultsView(chat, message);
	return new ReplyView(chat, message);
}

function plain(label, press, ariaLabel) {
	return small(label, press, ariaLabel, "small plain");
}

/** Make a button that shows others, which few want. */
function more(...others) {
	const rest = el("span.rest", { hidden: true }, others);
	const press = iconButton("more", "More", () => {
		rest.hidden = !rest.hidden;
		press.ariaExpanded = String(!rest.hidden);
	});
	press.ariaExpanded = "false";
	return [press, rest];
}

class MessageView {
	constructor(chat, message, name, ...actions) {
		this.chat = chat;
		this.message = message;
		this.branch = el("span");
		this.back = plain("‹", () => chat.step(message, -1), "Previous branch");
		this.on = plain("›", () => chat.step(message, 1), "Next branch");
		const props = { role: "group", ariaLabel: "Branches" };
		this.stepper = el("span.stepper.quiet", props, this.back, this.branch, this.on);
		this.body = el("div.body");
		this.row = el("div.row", actions, this.stepper);
		this.element = el(`article.message.${message.role}`, { ariaLabel: name }, this.body, this.row);
	}

	place() {
		const all = branches(this.chat.conversation, this.message);
		this.stepper.hidden = all.length < 2;
		this.branch.textContent = `${all.indexOf(this.message) + 1} / ${all.length}`;
	}

	/** Show a form instead of the message. What is sent becomes a branch, with a view of its own. */
	edit(form) {
		const shown = [...this.body.childNodes];
		const close = () => {
			this.body.replaceChildren(...shown);
			this.row.hidden = false;
			this.row.firstElementChild.focus();
		};
		form.append(small("Cancel", close));
		form.addEventListener("keydown", event => {
			if (event.key !== "Escape" || composes(event)) return;
			event.stopPropagation(); // it stops no answer
			close();
		});
		this.body.replaceChildren(form);
		this.row.hidden = true;
		form.querySelector("textarea").focus();
	}
}

class QuestionView extends MessageView {
	constructor(chat, question) {
		const { content, parent, files = [] } = question;
		const rewrite = () => {
			const area = growing("textarea", { value: content, dir: "auto", ariaLabel: "Your message" });
			const form = enterForm([area], "Send", () => {
				const said = { role: "user", content: area.value, files };
				if (area.value.trim() !== "" || files.length) chat.ask(parent, said);
			});
			this.edit(form);
		};
		const copied = () => copy(content, chat.announce);
		super(chat, question, "You", iconButton("edit", "Edit", rewrite), iconButton("copy", "Copy", copied));
		const text = el("p", content); // each line in its own direction
		if (content === "") text.hidden = true;
		this.body.append(...files.map(file => foldedFile(file, chat.announce)));
		this.body.append(text, ...(isLong(content) ? [foldOf(text)] : []));
	}
}

function isLong(text) {
	return text.length > LONG || text.split("\n", LINES + 1).length > LINES;
}

/** Fold an element. @returns a button that unfolds it and folds it again */
function foldOf(element) {
	const fold = folded => {
		element.classList.toggle("folded", folded);
		press.textContent = folded ? "Show all" : "Show less";
		press.ariaExpanded = String(!folded);
	};
	const press = small("", () => fold(!element.classList.contains("folded")));
	fold(true);
	return press;
}

class ResultsView extends MessageView {
	constructor(chat, message) {
		const { results, parent } = message;
		const retype = () => this.edit(resultsForm(chat, parent, results));
		super(chat, message, "Results of tools", iconButton("edit", "Edit", retype));
		for (const { name, content } of results)
			this.body.append(el("small", `Result of ${name}`), el("pre", { tabIndex: 0, dir: "auto" }, content));
	}
}

class ReplyView extends MessageView {
	constructor(chat, reply) {
		const give = text => copy(text, chat.announce);
		super(
			chat,
			reply,
			"Answer",
			iconButton("copy", "Copy", () => give(reply.answer.content)),
			iconButton("again", "Regenerate", () => chat.regenerate(reply, null)),
			...more(
				plain("Copy as curl", () => give(asCurl(chat.request(reply)))),
				plain("Copy as Python", () => give(asPython(chat.request(reply)))),
			),
		);
		this.answer = new AnswerView(chat, begun => chat.regenerate(reply, begun));
		this.waiting = el("p.waiting.quiet");
		this.retry = button("Try again", () => chat.retry(reply));
		this.form = null; // asks for what the tools return
		this.body.append(this.waiting, this.answer.element, this.retry);
	}

	place() {
		super.place();
		this.update();
	}

	/** Show the answer as it is: for each token, so nothing here reads the whole of it. */
	update() {
		const { answer } = this.message;
		const running = answer.finish === null;
		const { state, reason } = this.chat.models.current ?? {};
		const saysWhy = state === "failed" && answer.error.includes(reason.slice(1)); // with a capital
		this.element.classList.toggle("says-why", saysWhy);
		this.answer.update(answer, this.chat.conversation.settings.logprobs);
		this.waiting.hidden = !running || answer.firstToken !== null;
		if (!this.waiting.hidden) this.waiting.textContent = this.waitsFor();
		this.retry.hidden = answer.error === "" || answer.refused;
		this.element.classList.toggle("running", running);
		this.element.ariaBusy = String(running);
		this.drawForm();
	}

	waitsFor() {
		const { answer, model } = this.message;
		if (answer.elapsed < 1000) return "";
		const found = this.chat.models.all.find(({ id }) => id === model);
		if (found && isMoving(found)) return `The model is ${stateOf(found)}.`;
		return `Waiting for the first token, ${Math.floor(answer.elapsed / 1000)} s`;
	}

	/** The call that waits for a result, or undefined. */
	get call() {
		if (!this.form || this.form.hidden) return undefined;
		const areas = [...this.form.querySelectorAll("textarea")];
		const first = areas.findIndex(({ value }) => value === "");
		const empty = Math.max(0, first);
		return {
			name: this.message.answer.calls[empty].function.name,
			focus: () => areas[empty].focus(),
			/** Take a text as its result, and send the results if none is missing. */
			fill: text => {
				type(areas[empty], text);
				if (areas.every(({ value }) => value !== "")) this.form.requestSubmit();
				else this.call?.focus();
			},
		};
	}

	/** Ask for what the tools return, as long as nothing follows. */
	drawForm() {
		const { answer, id } = this.message;
		const asks = answer.finish === "tool_calls" && !this.element.nextSibling;
		if (asks && !this.form) {
			const results = answer.calls.map(call => ({ id: call.id, name: call.function.name, content: "" }));
			this.form = resultsForm(this.chat, id, results);
			this.body.append(this.form);
		}
		if (this.form) this.form.hidden = !asks;
	}
}

/** A form with a field for each result of a tool. */
function resultsForm(chat, parent, results) {
	const areas = results.map(({ content }) => growing("textarea.mono", { value: content, rows: 2, spellcheck: false }));
	const fields = results.map(({ name }, i) => field(`Result of ${name}`, areas[i]));
	return enterForm(fields, "Send the results", () => {
		const typed = results.map((each, i) => ({ ...each, content: areas[i].value }));
		chat.ask(parent, { role: "tool", results: typed });
	});
}

function enterForm(fields, verb, act) {
	return onEnter(el("form", fields, el("button.main.small", verb)), act);
}
