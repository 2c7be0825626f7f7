/** A look inside an answer: its tokens, coloured by their probability, and what else could have come. */

import { button, eachFrame, el } from "./dom.js";
import { named, visible } from "./text.js";

/** Levels, each with its least probability. */
const LEVELS = { "≥ 90 %": 0.9, "≥ 50 %": 0.5, "≥ 20 %": 0.2, "≥ 5 %": 0.05, "< 5 %": 0 };

/** Tokens that the browser draws together; a line's end is the place to part them. */
const CHUNK = 100;
const LARGEST_CHUNK = 600;

const KEYS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity };

/** Special tokens, such as "<|im_end|>", "</s>" and "[INST]": as a text they are something else. */
const SPECIAL = /^(?:<[|｜].*[|｜]>|<\/?\w+>|\[\/?[A-Z_]+\])$/;

/** Begin an answer as another did, up to a token, and go on with an alternative to it. */
export function beginning({ reasoning, tokens }, index, alternative) {
	const { top_logprobs } = tokens[index];
	const kept = [...tokens.slice(0, index), { ...alternative, top_logprobs }];
	const decoder = new TextDecoder();
	const texts = kept.map(each => decoded(decoder, each));
	return { reasoning, content: texts.join(""), tokens: kept };
}

/** Decode a token whose first bytes may have been in the tokens before it. */
function decoded(decoder, { bytes, token }) {
	return bytes?.length ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
}

export class InsideView {
	constructor(choose) {
		this.choose = choose;
		this.tokens = [];
		this.spans = [];
		this.first = null; // the token that they begin with
		this.at = 0; // the token that the keyboard has
		this.decoder = new TextDecoder();
		this.marked = null;
		this.text = el("div.tokens", {
			role: "group",
			ariaLabel: "Tokens. The arrow keys move between them.",
			onclick: event => this.press(event.target),
			onkeydown: event => this.key(event),
		});
		this.alternatives = el("div.alternatives.box", { popover: "auto", role: "dialog" });
		const levels = Object.keys(LEVELS).map((name, level) => el("span", { "data-level": level }, name));
		const legend = el("p.levels.quiet", "Probability ", levels);
		this.element = el("div.inside", legend, this.text, this.alternatives);
		this.draw = eachFrame(() => this.drawNow());
	}

	update(tokens) {
		this.tokens = tokens;
		this.draw();
	}

	mark(index) {
		this.marked = index;
		this.draw();
	}

	clear() {
		this.text.replaceChildren();
		this.spans = [];
		this.first = this.tokens[0];
		this.at = 0;
		// A character may be spread over several tokens: it is shown with its last one.
		this.decoder = new TextDecoder();
	}

	drawNow() {
		if (this.tokens.length < this.spans.length || this.tokens[0] !== this.first) this.clear();
		for (const token of this.tokens.slice(this.spans.length)) this.add(token);
		this.text.querySelector(".differs")?.classList.remove("differs");
		this.spans[this.marked ?? -1]?.classList.add("differs");
	}

	add(token) {
		const index = this.spans.length;
		const text = decoded(this.decoder, token);
		const title = `${text === "" ? "part of a character" : named(text)}, ${percent(token)}`;
		const level = Object.values(LEVELS).findIndex(least => Math.exp(token.logprob) >= least);
		const span = el(
			"span",
			{
				role: "button",
				tabIndex: index === 0 ? 0 : -1,
				title,
				ariaLabel: title,
				ariaHasPopup: "dialog",
				"data-index": index,
				"data-level": level,
			},
			text === "" ? "·" : visible(text.replaceAll("\n", "↵\n")),
		);
		const size = this.text.lastElementChild?.childElementCount ?? LARGEST_CHUNK;
		const lineEnds = this.spans.at(-1)?.textContent?.endsWith("\n");
		if (size >= LARGEST_CHUNK || (size >= CHUNK && lineEnds)) this.text.append(el("div"));
		this.text.lastElementChild.append(span);
		this.spans.push(span);
	}

	key(event) {
		const { key, target } = event;
		if (key === "Enter" || key === " ") this.press(target);
		else if (key in KEYS) this.focus(this.at + KEYS[key]);
		else return;
		event.preventDefault();
	}

	focus(index) {
		this.spans[this.at].tabIndex = -1;
		this.at = Math.max(0, Math.min(index, this.spans.length - 1));
		this.spans[this.at].tabIndex = 0;
		this.spans[this.at].focus();
	}

	press(target) {
		const span = target.closest("[data-index]");
		if (!span) return;
		this.focus(Number(span.dataset.index));
		this.open(this.at);
	}

	open(index) {
		this.watch?.abort(); // of the list before
		const token = this.tokens[index];
		const all = [...token.top_logprobs];
		if (!all.some(each => same(each, token))) all.push(token);
		const name = `Token ${index + 1}: ${nameOf(token)}`;
		this.alternatives.ariaLabel = name;
		this.alternatives.replaceChildren(
			el("h2", name),
			...all.map(each => this.choice(index, each)),
			el("small", all.length > 1 ? "Choose one to go on from it." : "No alternatives were asked for."),
		);
		this.alternatives.showPopover();
		this.place(this.spans[index].getClientRects()[0]);
		this.alternatives.querySelector("button:enabled")?.focus();
		const scrolled = ({ target }) => {
			if (target === this.alternatives) return;
			watch.abort();
			this.alternatives.hidePopover();
		};
		const watch = (this.watch = new AbortController());
		const props = { capture: true, signal: watch.signal };
		// By then, events of earlier scrolling have arrived.
		requestAnimationFrame(() => document.addEventListener("scroll", scrolled, props));
	}

	/** Put the alternatives below a token or, if there is no room, above it. */
	place({ left, top, bottom }) {
		const { style, offsetWidth: width, offsetHeight: height } = this.alternatives;
		style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
		style.top = `${bottom + height + 8 < innerHeight ? bottom + 4 : Math.max(8, top - height - 4)}px`;
	}

	/** Whether a text ends with an alternative: a part of a character is none that one could send. */
	ends(index, alternative) {
		const decoder = new TextDecoder();
		for (const each of [...this.tokens.slice(0, index), alternative]) decoded(decoder, each);
		return decoder.decode() === "";
	}

	choice(index, alternative) {
		const taken = same(alternative, this.tokens[index]);
		const share = el("div.share");
		share.style.width = `${100 * Math.exp(alternative.logprob)}%`;
		const label = [el("code", visible(nameOf(alternative))), el("span", percent(alternative)), share];
		const made = button(label, () => {
			this.alternatives.hidePopover();
			if (!taken) this.choose(index, alternative);
		});
		if (taken) made.ariaCurrent = "true";
		else made.disabled = SPECIAL.test(alternative.token) || !this.ends(index, alternative);
		return made;
	}
}

/** Name a token: a part of a character by its bytes. */
function nameOf({ token, bytes }) {
	if (!bytes || !token.includes("\ufffd")) return named(token);
	return bytes.map(byte => byte.toString(16).padStart(2, "0")).join(" ");
}

function percent({ logprob }) {
	const share = 100 * Math.exp(logprob);
	return share < 0.01 ? "< 0.01 %" : `${share.toFixed(share < 1 ? 2 : 1)} %`;
}

function same(one, other) {
	return one.token === other.token && String(one.bytes) === String(other.bytes);
}
