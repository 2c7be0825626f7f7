/** The colours of code: comments, strings, numbers and keywords of the usual languages. */

import { el } from "./dom.js";
import { visible } from "./text.js";

const C_KEYWORDS =
	"abstract async await boolean break case catch class const continue default do else enum export extends false final " +
	"finally for if implements import in interface new null package private protected public readonly return static " +
	"struct super switch this throw throws true try typeof union using var void volatile while";

const KEYWORDS = {
	c:
		`${C_KEYWORDS} auto bool char constexpr delete double extern float inline int long namespace nullptr operator ` +
		"register short signed sizeof string template typedef typename unsigned virtual base byte " +
		"decimal instanceof is lock object out override ref sealed val fun when data companion",
	js:
		`${C_KEYWORDS} any as debugger declare delete from function get instanceof keyof let ` +
		"never number of set string symbol type undefined unknown with yield",
	python:
		"and as assert async await break case class continue def del elif else except False finally for from global if " +
		"import in is lambda match None nonlocal not or pass raise return self True try while with yield",
	go: `${C_KEYWORDS} chan defer error fallthrough func go goto map nil range select string type int bool byte float64`,
	rust:
		"as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move " +
		"mut pub ref return self Self static struct super trait true type unsafe use where while func guard nil protocol " +
		"var init extension",
	shell:
		"case do done elif else esac export fi for function if in local return set source then until while cd echo exit " +
		"sudo pip python",
	sql:
		"add all alter and as asc between by case create delete desc distinct drop else end exists from full group having " +
		"if in index inner insert into is join key left like limit not null offset on or order outer primary references " +
		"right select set table then union unique update values view when where with",
	ruby:
		"and begin break case class def do else elsif end ensure false for if in module next nil not or redo require " +
		"rescue retry return self super then true unless until when while yield local function",
	data: "true false null yes no on off",
	css: "important inherit initial unset none auto",
	markup: "",
};

const STRING = /"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?/;
const NUMBER = /\b(?:0[xb][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)[a-z%]*\b/;
const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/;
const HASH = /#[^\n]*/;

/** Comments and strings, by the name of the keywords. @type {Record<string, [RegExp, RegExp]>} */
const SHAPES = {
	c: [SLASHES, STRING],
	js: [SLASHES, new RegExp(`${STRING.source}|\`(?:[^\`\\\\]|\\\\[^])*\`?`)],
	python: [HASH, new RegExp(`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING.source}`)],
	go: [SLASHES, new RegExp(`${STRING.source}|\`[^\`]*\`?`)],
	rust: [SLASHES, /"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\[^])'/], // 'a is a lifetime
	shell: [/(?<![^\s])#[^\n]*/, /"(?:[^"\\]|\\[^])*"?|'[^']*'?/],
	sql: [/--[^\n]*|\/\*[^]*?(?:\*\/|$)/, STRING],
	ruby: [/#[^\n]*|--[^\n]*/, STRING],
	data: [/(?<![^\s])[#;][^\n]*/, STRING],
	css: [/\/\*[^]*?(?:\*\/|$)/, STRING],
	markup: [/<!--[^]*?(?:-->|$)/, STRING],
};

const NAMES = {
	c: "c c++ cpp h hpp cc java cs csharp c# kotlin kt scala php dart objc groovy",
	js: "js javascript jsx ts typescript tsx mjs node vue svelte",
	python: "python py python3 pycon starlark",
	go: "go golang",
	rust: "rust rs swift zig",
	shell: "sh bash zsh shell console shell-session fish dockerfile makefile make powershell",
	sql: "sql mysql postgres postgresql sqlite",
	ruby: "ruby rb lua elixir",
	data: "json jsonc json5 yaml yml toml ini conf properties",
	css: "css scss less",
	markup: "html xml svg xhtml",
};

const FAMILY = new Map(
	Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map(name => [name, family])),
);

const LANGUAGES = new Map(
	Object.entries(SHAPES).map(([family, [comment, string]]) => {
		const dash = family === "css" || family === "markup" ? "-" : "";
		const parts = [`(${comment.source})`, `(${string.source})`, `(${NUMBER.source})`, `([A-Za-z_$][\\w$${dash}]*)`];
		const words = new Set(KEYWORDS[family].split(" "));
		return [family, { pattern: new RegExp(parts.join("|"), family === "sql" ? "gi" : "g"), words, family }];
	}),
);

/** Adds a growing text of a language to an element, piece by piece. */
export class Highlighter {
	constructor(element, language) {
		this.element = element;
		this.language = LANGUAGES.get(FAMILY.get(language.toLowerCase()) ?? "");
		this.open = 0; // where the last piece begins: it may go on
		this.kept = 0; // nodes before that
	}

	/** Show a text; if it `grows`, it begins as the last one, and only its end is drawn. */
	show(text, grows) {
		if (!grows) this.open = this.kept = 0;
		while (this.element.childNodes.length > this.kept) this.element.lastChild.remove();
		const rest = text.slice(this.open);
		let last = 0; // where the piece at the end begins
		let at = 0;
		for (const found of this.language ? rest.matchAll(this.language.pattern) : []) {
			this.add(rest.slice(at, found.index), "");
			last = found.index;
			this.settle(last);
			at = last + found[0].length;
			this.add(found[0], this.kindOf(found, rest[at]));
		}
		this.add(rest.slice(at), "");
		if (!this.language) {
			last = rest.length;
			this.settle(last);
		}
		this.open += last;
	}

	/** Keep all nodes so far. */
	settle(last) {
		if (last > 0) this.kept = this.element.childNodes.length;
	}

	add(text, kind) {
		if (text) this.element.append(kind ? el(`span.${kind}`, visible(text)) : visible(text));
	}

	kindOf([, comment, string, number, word], next) {
		const { words, family } = /** @type {any} */ (this.language);
		if (comment) return "comment";
		if (string) return family === "data" && next === ":" ? "name" : "string";
		if (number) return "number";
		if (words.has(word) || (family === "sql" && words.has(word.toLowerCase()))) return "keyword";
		return next === "(" || (next === ":" && ["data", "css"].includes(family)) ? "name" : "";
	}
}
