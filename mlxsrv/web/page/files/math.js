/**
 * Formulas of TeX as MathML, which browsers draw themselves. What is not understood is null, and then shown as it
 * was written. The time is in proportion to the length.
 */

import {
	ACCENTS,
	BELOW,
	FENCES,
	FUNCTIONS,
	INTEGRALS,
	LARGE,
	LETTERS,
	OPERATORS,
	UNDER,
	isStyle,
	styled,
} from "./symbols.js";

const DEEPEST = 40; // so deep may groups be nested
const LONGEST = 20_000; // characters

const TOKEN = /\\(?:[A-Za-z]+\*?|[^])|[^]/gu;
const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.3, enspace: 0.5, quad: 1, qquad: 2 };
const UPRIGHT = /^(?:math(?:rm|op|up)|operatorname\*?)$/;
const TEXTS = /^(?:text(?:rm|bf|it|sf|tt)?|[mh]box)$/;
const SAME = /^(?:math(?:it|normal|ord|bin|rel|open|close)|ensuremath)$/;
const IGNORED =
	/^(?:(?:display|text|script)style|(?:no)?limits|nonumber|notag|hline|[Bb]igg?[lrm]?|rm|it|bf|strut|allowbreak|hfill)$/;
const STACKED = { overset: "mover", stackrel: "mover", underset: "munder" };
const FRAMES = {
	matrix: "",
	smallmatrix: "",
	array: "",
	pmatrix: "()",
	bmatrix: "[]",
	Bmatrix: "{}",
	vmatrix: "||",
	Vmatrix: "‖‖",
	cases: "{",
};
const ALIGNED = /^(?:align|aligned|alignat|split|eqnarray|gather|gathered|multline|equation|displaymath)\*?$/;

class Unknown extends Error {}

/** Make the MathML of a formula; null if there is something in it that is not known here. */
export function mathOf(source, display) {
	if (source.length > LONGEST || HIDDEN.test(source)) return null;
	try {
		const parser = new Parser(source, display);
		const row = parser.row(() => false, 0);
		if (parser.peek() !== undefined) return null;
		return make("math", { display: display ? "block" : "inline", alttext: source.trim() }, row);
	} catch (error) {
		if (error instanceof Unknown) return null;
		throw error;
	}
}

/** What changes the order of other characters has no place in a formula. */
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/u;

function make(tag, attributes, ...children) {
	const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...children);
	return element;
}

const letter = (text, props = {}) => make("mi", props, text);
const operator = (text, props = {}) => make("mo", props, text);
const space = width => make("mspace", { width: `${width}em` });
const fence = text => operator(text, { stretchy: "true", fence: "true" });
const bracket = text => operator(text, { stretchy: "false", lspace: "0", rspace: "0" });

function fenceOf(token) {
	const found = FENCES.get(token) ?? FENCES.get(token.slice(1));
	if (found === undefined) throw new Unknown();
	return found;
}

function rowOf(nodes) {
	return nodes.length === 1 ? nodes[0] : make("mrow", {}, ...nodes);
}

class Parser {
	constructor(source, display) {
		this.tokens = source.match(TOKEN) ?? [];
		this.at = 0;
		this.display = display;
	}

	/** The next token that is no space. */
	peek() {
		while (/^\s$/.test(this.tokens[this.at] ?? "")) this.at++;
		return this.tokens[this.at];
	}

	next() {
		const token = this.peek();
		if (token === undefined) throw new Unknown();
		this.at++;
		return token;
	}

	expect(token) {
		if (this.next() !== token) throw new Unknown();
	}

	/** Read until a token that ends it, which is left. */
	row(ends, depth) {
		return rowOf(this.list(ends, depth));
	}

	list(ends, depth) {
		if (depth > DEEPEST) throw new Unknown();
		const nodes = [];
		for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
			const node = this.scripted(depth);
			if (node) nodes.push(node);
			// A function and its argument are apart, unless it has brackets.
			if (FUNCTIONS.has(token.slice(1)) && !/^(?:[()[\]{}|^_,&]|\\left|\\right|\\\\)?$/.test(this.peek() ?? ""))
				nodes.push(space(0.17));
		}
		return nodes;
	}

	/** Read a piece with what stands at its upper and lower right. */
	scripted(depth) {
		const large = this.standsOver(this.peek());
		let base = "^_'".includes(this.peek() ?? "?") ? make("mrow", {}) : this.piece(depth);
		if (!base) return base;
		let [below, above] = [null, null];
		let primes = "";
		for (let token = this.peek(); token !== undefined; token = this.peek()) {
			const places = token === "\\limits" || token === "\\nolimits";
			if (!places && !"^_'".includes(token)) break;
			if (token === "'") primes += "′";
			this.at++;
			if (token === "^") above = this.argument(depth + 1);
			if (token === "_") below = this.argument(depth + 1);
		}
		if (primes) {
			const mark = operator(primes, { lspace: "0", rspace: "0" });
			above = above ? make("mrow", {}, mark, above) : mark;
		}
		const over = large || /^m(under|over)$/.test(base.localName);
		const [down, up, both] = over ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
		if (below && above) return make(both, {}, base, below, above);
		if (below) return make(down, {}, base, below);
		return above ? make(up, {}, base, above) : base;
	}

	/** Whether limits stand above and below. */
	standsOver(token = "") {
		const name = token.slice(1);
		return this.display && token[0] === "\\" && (LARGE.has(name) || BELOW.has(name) || name === "operatorname*");
	}

	/** Read what a command is for: a group, or one piece. */
	argument(depth) {
		if (this.peek() !== "{") return this.piece(depth) ?? make("mrow", {});
		this.at++;
		const row = this.row(token => token === "}", depth);
		this.expect("}");
		return row;
	}

	/** Read a group as text. */
	raw() {
		this.expect("{");
		let text = "";
		for (let open = 1; open > 0; this.at++) {
			const token = this.tokens[this.at];
			if (token === undefined) throw new Unknown();
			open += { "{": 1, "}": -1 }[token] ?? 0;
			if (open > 0) text += /^\\[,;:! ]$/.test(token) ? " " : token.replace(/^\\(?=[^A-Za-z])/, "");
		}
		return text;
	}

	/** @returns {any} null for what is not seen */
	piece(depth) {
		if (depth > DEEPEST) throw new Unknown();
		if (this.peek() === "{") return this.argument(depth + 1);
		const token = this.next();
		if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1), depth + 1);
		if (/[0-9]/.test(token)) return this.number(token);
		if ("}&^_#%$\\".includes(token)) throw new Unknown();
		if (/\p{L}/u.test(token)) return letter(token);
		if (token === "~") return space(0.3);
		if ("()[]|".includes(token)) return bracket(token);
		return operator({ "-": "−", "*": "∗" }[token] ?? token);
	}

	number(digits) {
		while (
			/^[0-9]$/.test(this.tokens[this.at] ?? "") ||
			(/^[.,]$/.test(this.tokens[this.at] ?? "") && /^[0-9]$/.test(this.tokens[this.at + 1] ?? ""))
		)
			digits += this.tokens[this.at++];
		return make("mn", {}, digits);
	}

	command(name, depth) {
		if (LETTERS.has(name)) return letter(LETTERS.get(name), /^[A-Z∞…⋯]/.test(name) ? { mathvariant: "normal" } : {});
		const large = LARGE.get(name) ?? INTEGRALS.get(name);
		if (large) return operator(large, this.display ? { largeop: "true" } : {});
		if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
		if (OPERATORS.has(name)) return operator(OPERATORS.get(name));
		if (FUNCTIONS.has(name)) return this.named(name.replace(/^(lim|arg)(?=[a-z])/, "$1 "));
		if (/^[dtc]?frac$/.test(name)) return make("mfrac", {}, this.argument(depth), this.argument(depth));
		if (/^[dt]?binom$/.test(name)) {
			const pair = make("mfrac", { linethickness: "0" }, this.argument(depth), this.argument(depth));
			return make("mrow", {}, fence("("), pair, fence(")"));
		}
		if (name === "sqrt") return this.root(depth);
		if (TEXTS.test(name)) return make("mtext", {}, this.raw());
		if (UPRIGHT.test(name)) return this.named(this.raw().replaceAll("\\", ""));
		if (name === "bm" || isStyle(name)) return this.inStyle(name === "bm" ? "boldsymbol" : name, depth);
		if (SAME.test(name)) return this.argument(depth);
		if (/^(?:(?:over|under)line|boxed)$/.test(name)) return make("mrow", { class: name }, this.argument(depth));
		if (ACCENTS.has(name)) {
			const long = name.startsWith("over") || name.startsWith("wide");
			const mark = operator(ACCENTS.get(name), { stretchy: String(long) });
			return make("mover", { accent: "true" }, this.argument(depth), mark);
		}
		if (UNDER.has(name))
			return make("munder", {}, this.argument(depth), operator(UNDER.get(name), { stretchy: "true" }));
		if (Object.hasOwn(STACKED, name)) {
			const mark = this.argument(depth);
			return make(STACKED[name], {}, this.argument(depth), mark);
		}
		if (name === "pmod") {
			const inner = [this.named("mod"), space(0.3), this.argument(depth)];
			return make("mrow", {}, space(0.5), operator("("), ...inner, operator(")"));
		}
		if (name === "bmod" || name === "mod") return make("mrow", {}, space(0.3), this.named("mod"), space(0.3));
		if (name === "not") return this.negated(depth);
		if (name === "tag") return make("mtext", {}, `  (${this.raw()})`);
		if (name === "left") return this.fenced(depth);
		if (name === "begin") return this.environment(depth);
		if (IGNORED.test(name)) return null;
		return bracket(fenceOf(`\\${name}`));
	}

	/** A name of several letters, which is upright. */
	named(name) {
		return make("mrow", {}, letter(name, { mathvariant: "normal" }), operator("\u2061"));
	}

	inStyle(style, depth) {
		const made = this.argument(depth);
		const holder = make("mrow", {}, made);
		for (const each of holder.querySelectorAll("mi, mn")) {
			each.textContent = Array.from(each.textContent ?? "", character => styled(character, style)).join("");
			if (style !== "boldsymbol") each.setAttribute("mathvariant", "normal");
		}
		return made;
	}

	root(depth) {
		if (this.peek() !== "[") return make("msqrt", {}, this.argument(depth));
		this.at++;
		const index = this.row(token => token === "]", depth);
		this.expect("]");
		return make("mroot", {}, this.argument(depth), index);
	}

	negated(depth) {
		const made = this.piece(depth);
		if (made?.localName !== "mo") throw new Unknown();
		made.textContent = `${made.textContent}\u0338`.normalize();
		return made;
	}

	delimiter() {
		const found = fenceOf(this.next());
		return found ? [fence(found)] : [];
	}

	fenced(depth) {
		const nodes = this.delimiter();
		for (;;) {
			nodes.push(...this.list(token => token === "\\right" || token === "\\middle", depth));
			const end = this.next();
			nodes.push(...this.delimiter());
			if (end === "\\right") return make("mrow", {}, ...nodes);
		}
	}

	/** Read rows of cells until a token that ends them. */
	cells(ends, depth) {
		/** @type {any[][]} */
		const rows = [[]];
		for (;;) {
			rows.at(-1)?.push(this.row(token => token === "&" || token === "\\\\" || ends(token), depth));
			const token = this.peek();
			if (token === undefined) throw new Unknown();
			if (ends(token)) break;
			this.at++;
			if (token === "&") continue;
			if (this.tokens[this.at] === "[") while (this.next() !== "]"); // a length
			rows.push([]);
		}
		const last = rows.at(-1);
		if (rows.length > 1 && last?.length === 1 && !last[0].hasChildNodes()) rows.pop();
		return rows;
	}

	tableOf(rows, sides) {
		const cell = (content, index) => make("mtd", { class: sides[index % sides.length] }, content);
		const lines = rows.map(cells => make("mtr", {}, ...cells.map(cell)));
		return make("mtable", this.display ? { displaystyle: "true" } : {}, ...lines);
	}

	environment(depth) {
		const name = this.raw();
		const aligned = ALIGNED.test(name);
		if (!aligned && !Object.hasOwn(FRAMES, name)) throw new Unknown();
		if (name === "array" || name.startsWith("alignat")) this.raw();
		const rows = this.cells(token => token === "\\end", depth);
		this.expect("\\end");
		if (this.raw() !== name) throw new Unknown();
		if (aligned) return this.tableOf(rows, name.startsWith("gather") ? [""] : ["right", "left"]);
		const [open = [], close = []] = Array.from(FRAMES[name], text => [fence(text)]);
		const sides = name === "cases" ? ["left"] : [""];
		const made = this.tableOf(rows, sides);
		if (name !== "cases") made.removeAttribute("displaystyle");
		return make("mrow", {}, ...open, made, ...close);
	}
}
