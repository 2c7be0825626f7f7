/** Text of a model, in which nothing is hidden. */

import { copy, el, small } from "./dom.js";
import { Highlighter } from "./highlight.js";

/** Control characters, and those that change the order of others or that nobody sees. */
const HIDDEN =
	/([\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}])/u;

/** Make what shows a text: text as it is, and a mark such as "U+202E" for each hidden character. */
export function visible(text) {
	const made = document.createDocumentFragment();
	text.split(HIDDEN).forEach((part, index) => {
		if (part) made.append(index % 2 ? mark(part) : part);
	});
	return made;
}

/** Name a text so that its spaces are seen. */
export function named(text) {
	return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(empty)";
}

function mark(character) {
	const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
	return el("span.hidden-character.quiet", { title: "A character that cannot be seen" }, `U+${code}`);
}

/** A framed text as it is, with a button that copies it. */
export class CodeView {
	constructor(title, label, announce, language = "") {
		this.text = "";
		this.code = el("code");
		this.colours = new Highlighter(this.code, language);
		const copied = () => copy(this.text, announce);
		const press = small("Copy", copied, label);
		const bar = el("div.bar.quiet", el("span", title), press);
		this.element = el("div.framed.box", bar, el("pre", { tabIndex: 0 }, this.code));
	}

	/** Show a text; if it begins as the last one, only the rest is added. */
	update(text) {
		this.colours.show(text, text.startsWith(this.text));
		this.text = text;
	}
}
