/** The view "Compare": one prompt, and two answers that arrive side by side. */

import { AnswerView } from "./answer.js";
import { asRequest } from "./conversation.js";
import { button, eachFrame, el, field, offer, onEnter } from "./dom.js";
import { emptyAnswer, generate } from "./generate.js";
import { chatBody } from "./request.js";
import { NUMBERS, defaults, numberInput, valueOf } from "./settings.js";

export class View {
	constructor(context) {
		const changed = eachFrame(() => this.draw());
		this.sides = [new Side("A", 1, context, changed), new Side("B", 2, context, changed)];
		this.prompt = el("textarea", { rows: 2, required: true });
		this.stop = button("Stop", () => this.sides.forEach(side => side.stop()));
		this.verdict = el("p.verdict.quiet", { role: "status" });
		const both = part => el("div.pair", ...this.sides.map(side => side[part]));
		this.form = el(
			"form",
			field("Prompt for both", this.prompt),
			both("settings"),
			el("div.actions", el("button.main", "Compare"), this.stop),
		);
		onEnter(this.form, () => this.run());
		this.element = el(
			"section.compare",
			{ ariaLabel: "Compare" },
			el("h1", "Compare two answers"),
			this.form,
			this.verdict,
			both("element"),
		);
		this.draw();
	}

	shown() {
		this.prompt.focus({ preventScroll: true });
	}

	run() {
		if (!this.form.reportValidity()) return;
		for (const side of this.sides) side.ask(this.prompt.value);
	}

	/** Say where the answers part, once both have got there. */
	draw() {
		const [one, other] = this.sides.map(side => side.answer.tokens);
		const running = this.sides.some(side => side.running);
		this.stop.disabled = !running;
		const first = difference(one, other, running);
		for (const side of this.sides) side.view.inside.mark(first);
		if (first !== null) this.verdict.textContent = `The answers part at token ${first + 1}.`;
		else this.verdict.textContent = one.length && other.length && !running ? "Both answers are the same." : "";
	}
}

/** Find the first token that differs, or null. If they are `growing`, what one lacks may still come. */
function difference(one, other, growing) {
	const shared = Math.min(one.length, other.length);
	if (shared === 0) return null;
	for (let index = 0; index < shared; index++) if (one[index].token !== other[index].token) return index;
	return growing || one.length === other.length ? null : shared;
}

class Side {
	constructor(name, seed, context, changed) {
		this.context = context;
		this.changed = changed;
		this.answer = emptyAnswer();
		this.prompt = "";
		this.running = null;
		this.model = modelSelect(context.models);
		const numbers = { seed: { value: seed }, temperature: { step: "any", max: 2 }, top_p: { step: "any" } };
		this.numbers = Object.entries(numbers).map(([name, props]) => [name, numberInput(name, props)]);
		this.steering = el("input", { placeholder: "86: 9, 545: 8.5", pattern: STEERING, title: STEERING_HINT });
		this.profile = el("input");
		this.settings = el(
			"fieldset.box",
			el("legend", name),
			field("Model", this.model),
			this.numbers.map(([name, input]) => field(NUMBERS[name][0], input)),
			field("Steering", this.steering),
			field("Profile", this.profile),
		);
		this.view = new AnswerView(context, begun => this.run({ ...emptyAnswer(), ...begun }));
		this.look = el("input", { type: "checkbox", onchange: () => this.draw() });
		this.element = el(
			"section",
			{ ariaLabel: `Answer ${name}` },
			el("div.bar", el("h2", name), el("label.check", this.look, "Look inside")),
			this.view.element,
		);
		this.draw();
	}

	ask(prompt) {
		this.prompt = prompt;
		this.run(emptyAnswer());
	}

	async run(answer) {
		this.stop();
		const running = new AbortController();
		this.running = running;
		this.answer = answer;
		this.draw();
		const changed = () => this.running === running && this.draw();
		await generate(this.context.api, this.body(), running.signal, changed, answer);
		if (this.running !== running) return;
		this.running = null;
		this.draw();
	}

	body() {
		const settings = {
			...defaults(),
			...Object.fromEntries(this.numbers.map(([name, input]) => [name, valueOf(input)])),
			steering: steeringOf(this.steering.value),
			profile: this.profile.value.trim(),
			logprobs: true,
		};
		const begun = this.answer.content ? [{ role: "assistant", answer: this.answer }] : [];
		return chatBody(settings, this.model.value, asRequest([{ role: "user", content: this.prompt }, ...begun]));
	}

	stop() {
		this.running?.abort();
	}

	draw() {
		this.view.update(this.answer, this.look.checked);
		this.element.ariaBusy = String(this.running !== null);
		this.changed();
	}
}

const STEERING = String.raw`(\s*\d+\s*:\s*-?\d*\.?\d+\s*([,;]|$))*\s*`;
const STEERING_HINT = "Write pairs of an index and a strength, for example 86: 9, 545: 8.5";

/** Read strengths by index; null if there is none. */
function steeringOf(text) {
	const pairs = text.split(/[,;]/).filter(pair => pair.trim() !== "");
	return pairs.length ? Object.fromEntries(pairs.map(pair => pair.split(":").map(Number))) : null;
}

function modelSelect(models) {
	const select = el("select");
	const draw = () => {
		const own = models.names.includes(select.value);
		offer(select, models.names, own ? select.value : models.chosen);
	};
	models.addEventListener("change", draw);
	draw();
	return select;
}
