/**
 * Read the blocks of a Markdown text, as language models write it. A line closes blocks and opens
 * others; no line changes a block that is closed, so what has been shown of a growing text stays.
 */

/**
 * @typedef {{ kind: string, detail: string, begin: number, children: Block[], lines: string[], mark: string, indent: number,
 *   alignments: string[] }} Block with children or lines. `detail`: a heading's level, "whole" for a formula that has ended, a
 *   list's first number, what is in the box of a task, a code's language, a cell's alignment. `begin`: of its first line in the
 *   text. `mark`: how a list's marks end, the fence of a code, what ends a formula. `indent`: columns before an item's content or a
 *   fence. `alignments`: of a table's columns
 */

/** So deep may blocks be nested; marks beyond are text. */
const DEEPEST = 24;

/** So many columns may a table have; what has more is text. */
const WIDEST = 200;

const CONTAINERS = ["text", "quote", "item"];
const QUOTE = /^\s*> ?/;
const ITEM = /^([-+*]|\d{1,9}[.)])(?:\s+|$)(?:\[([ xX])\]\s)?/;
const HEADING = /^(#{1,6})(?:\s+|$)/;
const FENCE = /^(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)/;
const FORMULA = /^(?:\$\$|\\\[)/;
const RULE = /^([-*_])\s*(?:\1\s*){2,}$/;

export function readBlocks(text) {
	const reader = new Reader();
	let begin = 0;
	for (const line of text.split("\n")) {
		reader.read(line.replace(/\r$/, ""), begin);
		begin += line.length + 1;
	}
	return reader.root.children;
}

/** @returns {Block} */
function block(kind, props = {}) {
	return { kind, detail: "", begin: 0, children: [], lines: [], mark: "", indent: 0, alignments: [], ...props };
}

class Reader {
	constructor() {
		this.root = block("text");
		/** The blocks that the next line may go on with, from the outermost to the innermost. */
		this.open = [this.root];
		this.begin = 0;
	}

	get innermost() {
		return this.open[this.open.length - 1];
	}

	read(line, begin) {
		this.begin = begin;
		let rest = line;
		let depth = 1; // so many of the open blocks go on
		for (; depth < this.open.length; depth++) {
			const left = within(this.open[depth], rest);
			if (left === null) break;
			rest = left;
		}
		if (depth === this.open.length) {
			if (this.innermost.kind === "code") return this.readCode(rest);
			if (this.innermost.kind === "formula") return this.readFormula(rest);
			if (this.innermost.kind === "paragraph" && beginTable(this.innermost, rest)) return;
		}
		while (depth < DEEPEST) {
			const left = this.openContainer(depth, rest);
			if (left === null) break;
			rest = left;
			depth = this.open.length;
		}
		if (!this.openLeaf(depth, rest)) this.readText(depth, rest.trimStart());
	}

	readCode(rest) {
		const { mark, indent, lines } = this.innermost;
		const end = rest.trim();
		if (end.startsWith(mark) && end === mark[0].repeat(end.length)) this.open.pop();
		else lines.push(without(rest, indent));
	}

	/** A formula ends with a line that its mark ends, or with an empty line, as in TeX: then it is none. */
	readFormula(rest) {
		const { mark, lines } = this.innermost;
		const line = rest.trimEnd();
		if (line === "") {
			lines[0] = (mark === "$$" ? "$$" : "\\[") + lines[0];
			this.innermost.kind = "paragraph";
			this.open.pop();
			return;
		}
		const [point] = /[.,;:]?$/.exec(line) ?? [""];
		const last = line.slice(0, line.length - point.length);
		if (!last.endsWith(mark)) return lines.push(rest);
		lines.push(last.slice(0, -mark.length) + point);
		this.innermost.detail = "whole";
		this.open.pop();
	}

	/**
	 * Open a quote or an item of a list.
	 * @returns {string | null} what stands in it; null if the line opens none
	 */
	openContainer(depth, rest) {
		const [quote] = QUOTE.exec(rest) ?? [];
		if (quote) {
			this.add(depth, "quote");
			return rest.slice(quote.length);
		}
		const line = rest.trimStart();
		const found = RULE.test(line) ? null : ITEM.exec(line);
		if (!found) return null;
		const [{ length }, mark, task] = found;
		const number = mark.slice(0, -1);
		const content = line.slice(length);
		const above = this.open[depth - 1];
		// A dash or a number that begins a line of a paragraph may as well be part of it.
		if (above.kind === "paragraph" && (content === "" || (number && Number(number) !== 1))) return null;
		const kind = mark.at(-1);
		if (above.kind !== "list" || above.mark !== kind) {
			this.add(depth, "list", { mark: kind, detail: number });
			depth = this.open.length;
		}
		// CommonMark wants more columns behind "10.", and models write two all the same.
		const indent = indentation(rest) + 2;
		this.add(depth, "item", { detail: task ?? "", indent });
		return content;
	}

	openLeaf(depth, rest) {
		const line = rest.trim();
		const [, mark, language] = FENCE.exec(line) ?? [];
		if (mark) return this.add(depth, "code", { detail: language, mark, indent: indentation(rest) });
		const [heading, level] = HEADING.exec(line) ?? [];
		if (heading) return this.add(depth, "heading", { detail: `${level.length}`, lines: [line.slice(heading.length)] });
		const [formula] = FORMULA.exec(line) ?? [];
		const ends = formula === "$$" ? "$$" : "\\]";
		if (formula && !line.includes(ends, 2)) return this.add(depth, "formula", { mark: ends, lines: [line.slice(2)] });
		return RULE.test(line) && this.add(depth, "rule");
	}

	readText(depth, line) {
		const { kind, lines } = this.innermost;
		const table = this.open[depth - 1];
		// A line that begins as a row may be the head of a table, and begins a paragraph.
		const goesOn = kind === "paragraph" && (line[0] !== "|" || lines[0][0] === "|");
		if (line === "") this.open.length = depth;
		else if (goesOn) lines.push(line);
		else if (table.kind === "table") table.children.push(row("cell", cellsOf(line), table.alignments));
		else this.add(depth, "paragraph", { lines: [line] });
	}

	/** Add a block to the innermost of the first open ones that can contain it, and close those within. */
	add(depth, kind, props = {}) {
		const made = block(kind, { begin: this.begin, ...props });
		const outer = kind === "item" ? ["list"] : CONTAINERS;
		this.open.length = depth;
		while (!outer.includes(this.innermost.kind)) this.open.pop();
		this.innermost.children.push(made);
		this.open.push(made);
		return true;
	}
}

/** Find what of a line is within an open block. @returns {string | null} null if the block does not go on */
function within({ kind, children, indent }, rest) {
	const blank = rest.trim() === "";
	switch (kind) {
		case "quote":
			return QUOTE.test(rest) ? rest.replace(QUOTE, "") : null;
		case "item":
			if (blank) return children.length ? "" : null;
			return indentation(rest) >= indent ? without(rest, indent) : null;
		case "code":
		case "formula":
		case "list":
			return rest;
		case "heading":
		case "rule":
			return null;
		default:
			return blank ? null : rest;
	}
}

/** Count the columns before a text; a tab is four. */
function indentation(text) {
	return /^[ \t]*/.exec(text)?.[0].replaceAll("\t", "    ").length ?? 0;
}

/** Remove columns before a text, as far as it has them. */
function without(text, columns) {
	let at = 0;
	for (let column = 0; column < columns && " \t".includes(text[at] ?? "-"); at++) column += text[at] === "\t" ? 4 : 1;
	return text.slice(at);
}

function cellsOf(line) {
	const cells = line.trim().split(/(?<!\\)\|/);
	if (cells[0] === "") cells.shift();
	if (cells.at(-1) === "") cells.pop();
	return cells.map(cell => cell.trim().replaceAll("\\|", "|"));
}

/** Make a paragraph of one line the head of a table, if the line below says so. */
function beginTable(paragraph, below) {
	const [line, more] = paragraph.lines;
	const alignments = below.includes("|") ? cellsOf(below).map(alignmentOf) : [];
	const heads = cellsOf(line);
	if (more || heads.length !== alignments.length || heads.length > WIDEST || alignments.includes(null)) return false;
	Object.assign(paragraph, { kind: "table", lines: [], children: [row("head", heads, alignments)], alignments });
	return true;
}

/** Read a cell of the line under a table's head; null if it is none. */
function alignmentOf(cell) {
	if (!/^:?-+:?$/.test(cell)) return null;
	if (!cell.endsWith(":")) return "";
	return cell.startsWith(":") ? "center" : "end";
}

function row(kind, texts, alignments) {
	const cells = texts.slice(0, alignments.length);
	return block("row", {
		children: cells.map((text, index) => block(kind, { lines: [text], detail: alignments[index] })),
	});
}
