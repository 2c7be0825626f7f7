/** An answer: its thoughts, its text, its tool calls, how it ended, and its figures. */

import { eachFrame, el } from "./dom.js";
import { count, joined, seconds } from "./figures.js";
import { emptyAnswer } from "./generate.js";
import { InsideView, beginning } from "./inside.js";
import { MarkdownView } from "./markdown.js";
import { CodeView, visible } from "./text.js";

const ENDS = {
	length: "The answer reached its limit of tokens.",
	stopped: "Stopped.",
	timeout: "The server's time for an answer was over.",
};

export class AnswerView {
	/** `goOn` gets the beginning of another answer, which one chooses while looking inside. */
	constructor({ announce, models }, goOn = begun => {}) {
		this.announce = announce;
		this.models = models;
		this.answer = emptyAnswer();
		this.looks = false;
		this.inside = new InsideView((...chosen) => goOn(beginning(this.answer, ...chosen)));
		this.thoughts = new MarkdownView(announce);
		this.text = new MarkdownView(announce);
		this.thinking = el("summary");
		this.glimpse = el("p.glimpse", { dir: "auto", ariaHidden: "true" });
		this.folded = el("details.thoughts.quiet", this.thinking, this.thoughts.element);
		this.calls = [];
		this.end = el("p.end");
		this.figures = el("p.figures.quiet");
		const parts = [this.folded, this.glimpse, this.text.element, this.inside.element, this.end, this.figures];
		this.element = el("div.answer", ...parts);
		this.draw = eachFrame(() => this.drawNow());
		this.drawNow();
	}

	/** Show an answer or, if `looks`, its tokens instead of its text. */
	update(answer, looks = false) {
		this.answer = answer;
		this.looks = looks && answer.tokens.length > 0;
		this.draw();
	}

	drawNow() {
		const { content, reasoning, calls, finish, error } = this.answer;
		this.drawThoughts(reasoning, finish === null && content === "" && calls.length === 0);
		this.inside.element.hidden = !this.looks;
		if (this.looks) this.inside.update(this.answer.tokens);
		this.text.element.hidden = this.looks || content === "";
		this.text.update(this.looks ? "" : content);
		this.drawCalls(calls);
		this.end.textContent = error || ENDS[finish ?? ""] || "";
		this.end.classList.toggle("error", error !== "");
		this.end.hidden = this.end.textContent === "";
		this.figures.replaceChildren(visible(figures(this.answer, this.models.names)));
	}

	/** Show the thoughts, which are folded, and their last line while more of them come. */
	drawThoughts(reasoning, thinks) {
		const { elapsed, thoughtFrom, thoughtFor } = this.answer;
		this.folded.hidden = reasoning === "";
		this.folded.classList.toggle("moving", thinks);
		this.thoughts.update(reasoning);
		const since = Math.max(0, elapsed - (thoughtFrom ?? elapsed));
		if (thinks) this.thinking.textContent = `Thinking, ${Math.floor(since / 1000)} s`;
		else this.thinking.textContent = thoughtFor ? `Thought for ${seconds(thoughtFor / 1000)}` : "Thoughts";
		this.glimpse.hidden = !thinks || this.folded.open;
		if (!this.glimpse.hidden) this.glimpse.replaceChildren(visible(lastLine(reasoning)));
	}

	drawCalls(calls) {
		for (const view of this.calls.splice(calls.length)) view.element.remove();
		calls.forEach((call, index) => {
			if (!this.calls[index]) {
				this.calls[index] = new CallView(this.announce);
				this.end.before(this.calls[index].element);
			}
			this.calls[index].update(call.function);
		});
	}
}

class CallView {
	constructor(announce) {
		this.name = el("code");
		const title = el("span", "Calls ", this.name);
		this.arguments = new CodeView(title, "Copy the arguments", announce, "json");
		this.element = el("div.call", { role: "group", ariaLabel: "Tool call" }, this.arguments.element);
	}

	update(call) {
		this.name.replaceChildren(visible(call.name));
		this.arguments.update(indented(call.arguments));
	}
}

/** JSON with a line for each value; what is no JSON yet stays as it is. */
function indented(json) {
	try {
		return JSON.stringify(JSON.parse(json), null, 2);
	} catch {
		return json;
	}
}

/** The end of a text, of one line at most. */
function lastLine(text) {
	const end = text.slice(-160).trimEnd();
	return end.slice(end.lastIndexOf("\n") + 1);
}

function figures({ model, usage, firstToken, duration, finish }, models) {
	// One model needs no name.
	const facts = models.some(each => each !== model) ? [model] : [];
	const running = finish === null;
	if (usage && running) facts.push(`${count(usage.completion_tokens)} tokens`);
	else if (usage) {
		const cached = usage.prompt_tokens_details?.cached_tokens;
		facts.push(`${count(usage.prompt_tokens)} tokens read${cached ? ` (${count(cached)} cached)` : ""}`);
		facts.push(`${count(usage.completion_tokens)} written`);
	}
	if (firstToken !== null && !running) facts.push(`${seconds(firstToken / 1000)} to first token`);
	// The first token came before the clock of the others began. What came in one packet has no speed.
	if (usage && usage.completion_tokens > 1 && duration > 20) {
		const speed = (1000 * (usage.completion_tokens - 1)) / duration;
		facts.push(`${speed < 100 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
	}
	return joined(facts);
}
