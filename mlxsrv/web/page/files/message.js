/** Messages of a conversation, with what can be done with each. */

import { AnswerView } from "./answer.js";
import { branches } from "./conversation.js";
import { button, composes, copy, el, field, onEnter, small } from "./dom.js";
import { asCurl, asPython } from "./request.js";

export function viewOf(chat, message) {
	if (message.role === "user") return new QuestionView(chat, message);
	if (message.role === "tool") return new ResultsView(chat, message);
	return new ReplyView(chat, message);
}

function plain(label, press, ariaLabel) {
	return small(label, press, ariaLabel, "small plain");
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
		const { content, parent } = question;
		const rewrite = () => {
			const area = el("textarea", { value: content, dir: "auto", ariaLabel: "Your message" });
			const form = enterForm([area], "Send", () => {
				if (area.value.trim() !== "") chat.ask(parent, { role: "user", content: area.value });
			});
			this.edit(form);
		};
		const copied = () => copy(content, chat.announce);
		super(chat, question, "You", plain("Edit", rewrite), plain("Copy", copied));
		this.body.append(el("p", { dir: "auto" }, content));
	}
}

class ResultsView extends MessageView {
	constructor(chat, message) {
		const { results, parent } = message;
		const retype = () => this.edit(resultsForm(chat, parent, results));
		super(chat, message, "Results of tools", plain("Edit", retype));
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
			plain("Copy", () => give(reply.answer.content)),
			plain("Regenerate", () => chat.regenerate(reply, null)),
			plain("Copy as curl", () => give(asCurl(chat.request(reply)))),
			plain("Copy as Python", () => give(asPython(chat.request(reply)))),
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
		this.answer.update(answer, this.chat.conversation.settings.logprobs);
		this.waiting.hidden = !running || answer.firstToken !== null;
		this.retry.hidden = answer.error === "";
		this.element.classList.toggle("running", running);
		this.element.ariaBusy = String(running);
		this.drawForm();
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
	const areas = results.map(({ content }) => el("textarea.mono", { value: content, rows: 2, spellcheck: false }));
	const fields = results.map(({ name }, i) => field(`Result of ${name}`, areas[i]));
	return enterForm(fields, "Send the results", () => {
		const typed = results.map((each, i) => ({ ...each, content: areas[i].value }));
		chat.ask(parent, { role: "tool", results: typed });
	});
}

function enterForm(fields, verb, act) {
	return onEnter(el("form", fields, el("button.main.small", verb)), act);
}
