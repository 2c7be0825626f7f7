/** What an empty chat shows: the model, questions to begin with, and what else there is to try. */

import { button, el, isNews } from "./dom.js";
import { bytes, count, joined } from "./figures.js";
import { icon } from "./icons.js";

/** Questions that the demo model knows the answers to. */
const QUESTIONS = [
	"What can you do?",
	"What is temperature?",
	"How many requests run together?",
	"Is it free software?",
	"How do I stop the server?",
	"How do I serve a model of my own?",
];

/** What a model that is no demo can be asked for. */
const ANY = [
	"Explain how a transformer predicts the next token.",
	"Write a Python function that finds all primes below n, with tests.",
	"Compare three ways to cache data, in a table.",
	"Plan a weekend in Lisbon for two.",
];

export class Welcome {
	constructor(chat) {
		this.chat = chat;
		this.name = el("h2", { dir: "auto" });
		this.about = el("p", "The built-in demo model. It answers questions about this server.");
		this.facts = el("p.quiet");
		this.questions = el("div.questions.line", { role: "group", ariaLabel: "Questions to begin with" });
		const doors = el(
			"div.doors.tiles",
			door("chat", "Chat", "Ask, edit, and ask again: each answer stays as a branch.", () => chat.box.focus()),
			door("eye", "Look inside", "See how sure the model was of each token, and go on from another.", () => {
				chat.changeSettings({ logprobs: true });
				chat.box.focus();
				chat.announce("The next answer shows its tokens");
			}),
			door("steer", "Steer", "Turn a feature of the model up or down, and compare the answers.", () =>
				chat.openView("steer"),
			),
		);
		this.element = el("div.welcome", this.name, this.about, this.facts, this.questions, doors);
		chat.models.addEventListener("change", () => this.draw());
		this.draw();
	}

	draw() {
		const model = this.chat.models.current;
		const facts = factsOf(model ?? {});
		if (!isNews(this, [model?.id, facts])) return;
		this.name.textContent = model?.id ?? "mlxsrv";
		this.facts.textContent = facts;
		this.about.hidden = model?.id !== "demo";
		const questions = model?.id === "demo" ? QUESTIONS : ANY;
		const ask = question => button(question, () => this.chat.sendMessage(question));
		this.questions.replaceChildren(...questions.map(ask));
		this.questions.hidden = !model;
	}
}

function factsOf({ details, size, context_length: context }) {
	return joined([
		details?.parameter_size && `${details.parameter_size} parameters`,
		size && bytes(size),
		context && `${count(context)} tokens of context`,
	]);
}

function door(name, title, text, press) {
	return button([icon(name), el("strong", title), el("small", text)], press, { className: "door" });
}
