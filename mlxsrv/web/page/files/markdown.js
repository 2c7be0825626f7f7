/** Show Markdown as elements and text nodes: nothing here reads HTML, and nothing is fetched. */

import { readBlocks } from "./blocks.js";
import { el } from "./dom.js";
import { addInline } from "./inline.js";
import { mathOf } from "./math.js";
import { CodeView, visible } from "./text.js";

export class MarkdownView {
	constructor(announce = () => {}) {
		this.element = el("div.markdown");
		this.blocks = new Blocks(this.element, announce);
		this.finished = 0; // so many of the blocks stay, whatever comes
		this.done = ""; // their text
	}

	/** Show a text; if it begins as the last one, only the blocks at its end change. */
	update(text) {
		if (!text.startsWith(this.done)) {
			this.finished = 0;
			this.done = "";
		}
		const rest = text.slice(this.done.length);
		const blocks = readBlocks(rest);
		this.blocks.update(blocks, this.finished);
		// The last line may still grow, and be the line under a table's head, which is the one above it.
		const known = rest.lastIndexOf("\n", rest.lastIndexOf("\n") - 1);
		const last = blocks.findLastIndex(({ begin }) => begin <= known);
		if (last < 1) return;
		this.finished += last;
		this.done += rest.slice(0, blocks[last].begin);
	}
}

class Blocks {
	constructor(element, announce) {
		this.element = element;
		this.announce = announce;
		this.views = [];
	}

	/** Show blocks behind those that are kept. */
	update(blocks, kept = 0) {
		for (const view of this.views.splice(kept + blocks.length)) view.element.remove();
		blocks.forEach((block, index) => {
			let view = this.views[kept + index];
			if (!view?.shows(block)) {
				const made = new BlockView(block, this.announce);
				if (view) view.element.replaceWith(made.element);
				else this.element.append(made.element);
				this.views[kept + index] = view = made;
			}
			view.update(block);
		});
	}
}

class BlockView {
	constructor({ kind, detail }, announce) {
		this.kind = kind;
		this.detail = detail;
		this.text = "";
		this.code = kind === "code" ? new CodeView(visible(detail), "Copy the code", announce, detail) : null;
		this.element = this.code?.element ?? FRAMES[kind](detail);
		this.inner = this.element.querySelector("table") ?? this.element;
		this.blocks = new Blocks(this.inner, announce);
	}

	/** Whether a block differs from this one by what it contains only. */
	shows({ kind, detail }) {
		return kind === this.kind && detail === this.detail;
	}

	update({ lines, children }) {
		this.blocks.update(children);
		const text = lines.join("\n");
		if (text === this.text) return;
		this.text = text;
		if (this.code) return this.code.update(text);
		if (this.kind === "formula") return this.showFormula(text);
		this.inner.replaceChildren();
		addInline(this.inner, text);
	}

	/** Show a formula that has ended, if it is understood; else its text. */
	showFormula(text) {
		const math = this.detail ? mathOf(text, true) : null;
		this.inner.replaceChildren(math ?? el("code", visible(text.trim())));
	}
}

/** The elements of blocks without their content, by kind and detail. */
const FRAMES = {
	paragraph: () => el("p"),
	quote: () => el("blockquote"),
	rule: () => el("hr"),
	formula: () => el("div.formula", { tabIndex: 0 }),
	heading: level => el(`h${Math.min(6, Number(level) + 2)}`), // the page's own headings are above
	list: start => (start ? el("ol", { start: Number(start) }) : el("ul")),
	item: task => (task ? el("li.task", taskBox(task !== " ")) : el("li")),
	table: () => el("div.table", { tabIndex: 0 }, el("table")),
	row: () => el("tr"),
	head: alignment => aligned(el("th"), alignment),
	cell: alignment => aligned(el("td"), alignment),
};

function taskBox(checked) {
	return el("input", { type: "checkbox", checked, disabled: true, ariaLabel: checked ? "Done" : "Not done" });
}

function aligned(cell, alignment) {
	cell.style.textAlign = alignment;
	return cell;
}
