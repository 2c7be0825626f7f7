/**
 * Show what stands within a paragraph: emphasis, code, links, formulas. HTML remains text.
 * The time is in proportion to the length, whatever the text is.
 */

import { el } from "./dom.js";
import { mathOf } from "./math.js";
import { visible } from "./text.js";

/** So many marks may wait for their end; older ones are text. This bounds depth and time. */
const MOST_WAITING = 16;

const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "s" };

/** What stands behind the text of a link: an address, perhaps with a title. */
const DESTINATION = /\(\s*(?:<([^<>\n]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;

const ESCAPED = /\\[!-/:-@[-`{-~]/;

/** An address in a text, which ends before what rather ends the sentence. */
const BARE = /https?:\/\/(?:\([^\s()<>]*\)|[^\s()<>"`*[\]\\])+(?<![?!.,:;'_~])/;

const formula = (display, marks) => (reader, found) => reader.readFormula(found, display, marks);

/** What is no plain text, and how it is read. Of two at the same place the first counts. @type {[RegExp, Function][]} */
const RULES = [
	[/\\\((?:[^\\]|\\[^()])*\\\)/, formula(false, 2)],
	[/\\\[(?:[^\\]|\\[^[\]])*\\\]/, formula(true, 2)],
	[/\$\$[^$]+\$\$/, formula(true, 2)],
	[/(?<![\w$])\$(?=[^\s$])[^$]*(?<=\S)\$(?!\w)/, formula(false, 1)], // "$5 and $6" is none, nor "$A/$B"
	[/\\\n|(?<! ) {2,}\n/, reader => reader.add(el("br"))],
	[ESCAPED, (reader, escaped) => reader.say(escaped[1])],
	[/(?<!`)`{1,8}(?!`)/, (reader, ticks) => reader.readCode(ticks)],
	[/\*+|_+|~+/, (reader, mark) => reader.readEmphasis(mark)],
	[/!?\[/, (reader, mark) => reader.wait(mark)],
	[/\]/, reader => reader.readLink()],
	[/<(?:https?:\/\/|mailto:)[^\s<>]*>/, (reader, found) => reader.readAddress(found)],
	[BARE, (reader, found) => reader.readAddress(found)],
];

const SPECIAL = new RegExp(RULES.map(([{ source }]) => `(${source})`).join("|"), "gi");

export function addInline(element, text) {
	new Reader(element, text).read();
}

class Reader {
	constructor(element, text) {
		this.element = element;
		this.text = text;
		this.at = 0;
		/** Marks that may begin an element, each with the node that shows it. */
		this.waiting = [];
		/** Backticks whose end does not come any more; it is not searched for again. */
		this.unended = new Set();
	}

	read() {
		for (;;) {
			const begin = this.at;
			SPECIAL.lastIndex = begin;
			const found = SPECIAL.exec(this.text);
			if (!found) return this.say(this.text.slice(begin));
			this.say(this.text.slice(begin, found.index));
			this.at = SPECIAL.lastIndex;
			const rule = found.findIndex((group, index) => index > 0 && group !== undefined) - 1;
			RULES[rule][1](this, found[0]);
		}
	}

	say(text) {
		this.add(visible(text));
	}

	add(node) {
		this.element.append(node);
	}

	/** Show a formula between marks of a length; one that is not understood as it is. */
	readFormula(found, display, marks) {
		const made = mathOf(found.slice(marks, -marks), display);
		if (made) this.add(made);
		else this.say(found);
	}

	readCode(ticks) {
		const end = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
		end.lastIndex = this.at;
		const found = this.unended.has(ticks) ? null : end.exec(this.text);
		if (!found) {
			this.unended.add(ticks);
			return this.say(ticks);
		}
		const code = this.text.slice(this.at, found.index).replaceAll("\n", " ");
		const padded = /^ .* $/.test(code) && code.trim() !== "";
		this.add(el("code", visible(padded ? code.slice(1, -1) : code)));
		this.at = end.lastIndex;
	}

	readEmphasis(run) {
		const before = this.text[this.at - run.length - 1] ?? " ";
		const after = this.text[this.at] ?? " ";
		const word = run[0] === "_" ? /[\p{L}\p{N}]/u : /(?!)/; // as in snake_case
		const left = /\s/.test(before) || word.test(after) ? run : this.end(run);
		const opens = !/\s/.test(after) && !word.test(before);
		const marks = left.length === 3 ? [left[0], left.slice(1)] : [left];
		for (const mark of marks) {
			if (opens && mark in TAGS) this.wait(mark);
			else this.add(mark);
		}
	}

	/** End emphasis of the same length. Three marks end what there is. @returns {string} those left */
	end(run) {
		let left = run;
		while (left) {
			const index = this.waiting.findLastIndex(
				({ mark }) => mark[0] === run[0] && (mark.length === left.length || left.length === 3),
			);
			if (index < 0) break;
			const { mark } = this.waiting[index];
			this.wrap(index, el(TAGS[mark]));
			left = left.slice(mark.length);
		}
		return left;
	}

	wait(mark) {
		const node = document.createTextNode(mark);
		this.add(node);
		this.waiting.push({ mark, node });
		if (this.waiting.length > MOST_WAITING) this.waiting.shift();
	}

	/** Replace a waiting mark and all behind it by an element that contains them. */
	wrap(index, made) {
		const { node } = this.waiting[index];
		while (node.nextSibling) made.append(node.nextSibling);
		node.replaceWith(made);
		this.waiting.length = index; // a mark within it has no end outside
	}

	/** Make a link. So is an image, which is never fetched. */
	readLink() {
		const index = this.waiting.findLastIndex(({ mark }) => mark.endsWith("["));
		DESTINATION.lastIndex = this.at;
		const found = index < 0 ? null : DESTINATION.exec(this.text);
		const target = found?.[1] ?? found?.[2] ?? "";
		const link = linkTo(target.replace(new RegExp(ESCAPED, "g"), escaped => escaped[1]));
		if (!found || !link) {
			this.waiting.splice(index, index < 0 ? 0 : 1); // brackets belong together in text, too
			return this.add("]");
		}
		this.wrap(index, link);
		for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
		if (!link.hasChildNodes()) link.append(link.href);
		this.at += found[0].length;
	}

	readAddress(found) {
		const target = found.replace(/^<|>$/g, "");
		const link = linkTo(target);
		link?.append(visible(target));
		this.add(link ?? visible(found));
	}
}

/** Make a link; null unless the target is an address of the web or of mail. */
function linkTo(target) {
	if (!/^(https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) return null;
	const { href } = new URL(target);
	return el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" });
}
