/** The view "Steer": features of an SAE change what the chosen model answers. */

import { AnswerView } from "./answer.js";
import { button, el, lineForm, section } from "./dom.js";
import { FeatureList, emptySteering } from "./features.js";
import { emptyAnswer, generate } from "./generate.js";
import { HeatMap } from "./heatmap.js";
import { presetsOf } from "./presets.js";
import { ProfilePanel } from "./profiles.js";
import { SAEPanel } from "./sae.js";

/** @typedef {import("./features.js").Steering} Steering */

const PAUSE = 150; // milliseconds without a change, after which the model is asked
const MOST_TOKENS = 256; // strong steering lets many models write without end

export class View {
	constructor(context) {
		this.context = context;
		const { api, models } = context;
		this.model = ""; // whose attachment was read
		this.attachment = null; // as `SAEPanel` tells it
		this.kept = new Map(); // steerings by model and SAE, as long as the page is open
		this.steering = emptySteering();
		this.known = presetsOf();
		this.pause = 0; // the timer that asks

		this.sae = new SAEPanel(api, attachment => this.attached(attachment));
		this.features = new FeatureList(() => this.askSoon());
		this.profiles = new ProfilePanel(api, {
			content: () => this.content(),
			use: ({ values, mode }) => this.use({ values: new Map(values), mode }),
			read: profiles => this.features.offer([...this.known, ...profiles]),
		});
		this.heat = new HeatMap(
			api,
			steered => this.body(steered),
			(feature, most) => this.features.add([[feature, Math.round(2 * most) / 2]]),
		);
		this.unsteered = new LiveAnswer(context);
		this.steered = new LiveAnswer(context);
		this.question = el("input", { required: true, autocomplete: "off" });
		this.presets = el("div.presets.tiles", { role: "group", ariaLabel: "Try a feature" });
		this.none = el("p.quiet", "No feature is set.");
		this.spoken = el("p.unseen", { role: "status" });
		this.features.element.append(button("Use in chat", () => this.useInChat()));
		const answers = el(
			"div.pair",
			section("Unsteered answer", this.unsteered.view.element),
			section("Steered answer", this.none, this.steered.view.element),
		);
		const form = lineForm("Question", this.question, "Ask", () => {
			this.steering.question = this.question.value.trim();
			this.ask();
		});
		this.parts = el(
			"div.parts",
			{ hidden: true },
			this.presets,
			this.features.element,
			el("div.outcome", form, answers, this.spoken, this.heat.element),
			this.profiles.element,
		);
		const explained =
			"A sparse autoencoder (SAE) finds features in a layer of the model. Set some, and see what changes.";
		this.element = el(
			"section.steer",
			{ ariaLabel: "Steer" },
			el("h1", "Steer"),
			el("p.quiet", explained),
			this.sae.element,
			this.parts,
		);
		models.addEventListener("change", () => this.refresh());
	}

	shown() {
		this.model = ""; // others may have attached or detached meanwhile
		this.refresh();
	}

	/** Read what the chosen model has, where that is not known. */
	async refresh() {
		const model = this.context.models.chosen;
		if (!model || model === this.model) return;
		this.model = model;
		const read = await this.sae.refresh(model);
		if (!read && this.model === model) this.model = "";
	}

	attached(there) {
		const before = this.attachment;
		this.attachment = there;
		this.parts.hidden = !there;
		if (before?.model !== there?.model || before?.since !== there?.since) {
			const key = `${there?.model} ${there?.sae_id}`;
			this.steering = this.kept.get(key) ?? emptySteering();
			this.kept.set(key, this.steering);
			this.known = presetsOf(there?.origin);
			this.presets.replaceChildren(...this.known.map(each => this.card(each)));
			clearTimeout(this.pause);
			this.unsteered.clear();
			this.steered.clear();
			this.heat.clear();
			this.features.offer(this.known);
			this.use({}, false);
		}
		if (there) this.profiles.refresh();
	}

	card({ name, values, question, effect }) {
		const [[feature, value]] = values;
		const texts = [`feature ${feature} at ${value}`, `“${question}”`].map(text => el("span", text));
		const press = () => this.use({ values: new Map(values), mode: "additive", question });
		return button([el("strong", name), ...texts, el("small", effect)], press);
	}

	/** Change the steering, and show it. @param {Partial<Steering>} changes */
	use(changes, ask = true) {
		Object.assign(this.steering, changes);
		this.question.value = this.steering.question;
		this.features.show(this.steering, this.attachment?.d_sae ?? 0);
		if (ask) this.askSoon();
	}

	/** Ask when nothing has changed for a moment: a slider's keys change it step by step. */
	askSoon() {
		clearTimeout(this.pause);
		this.pause = setTimeout(() => this.ask(), PAUSE);
	}

	/** Ask for both answers; one whose request has not changed stays. */
	async ask() {
		this.none.hidden = this.steering.values.size > 0;
		this.unsteered.ask(this.body(false));
		if (!this.none.hidden) return this.steered.clear();
		const answer = await this.steered.ask(this.body(true));
		if (answer) this.spoken.textContent = `Steered answer: ${answer.content || answer.error}`;
	}

	body(steered) {
		const { values, mode, question } = this.steering;
		return {
			model: this.attachment?.model,
			messages: [{ role: "user", content: question }],
			temperature: 0,
			max_tokens: MOST_TOKENS,
			steering: steered ? Object.fromEntries(values) : {},
			steering_mode: steered ? mode : undefined,
		};
	}

	content() {
		const { model, sae_id, layer } = this.attachment;
		const { values, mode } = this.steering;
		return { steering: Object.fromEntries(values), mode, model_id: model, sae_id, layer };
	}

	async useInChat() {
		const { values, mode } = this.steering;
		const chat = await this.context.open("chat");
		await chat?.steer(Object.fromEntries(values), mode);
	}
}

/** An answer that is asked for anew whenever its request changes. */
class LiveAnswer {
	constructor(context) {
		this.api = context.api;
		this.view = new AnswerView(context);
		this.asked = ""; // the request whose answer is shown
		this.stop = new AbortController();
	}

	/** Ask, unless this request was the last. @returns null if it was, or if another came meanwhile */
	async ask(body) {
		const asked = JSON.stringify(body);
		if (asked === this.asked) return null;
		const { signal } = this.begin(asked);
		const answer = await generate(this.api, body, signal, so_far => {
			if (!signal.aborted) this.view.update(so_far);
		});
		if (signal.aborted) return null;
		if (answer.error) this.asked = ""; // it may be asked again
		return answer;
	}

	/** End what runs, and show nothing. */
	clear() {
		this.begin("");
		this.view.update(emptyAnswer());
	}

	begin(asked) {
		this.asked = asked;
		this.stop.abort();
		return (this.stop = new AbortController());
	}
}
