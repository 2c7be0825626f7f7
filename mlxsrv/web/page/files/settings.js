/** The settings of a conversation. */

import { el, errorLine, field, growing, small } from "./dom.js";
import { Presets } from "./saved.js";

/** Make settings that leave all to the model and the server. @returns {Record<string, any>} */
export function defaults() {
	return {
		system: "",
		temperature: null,
		top_p: null,
		top_k: null,
		min_p: null,
		max_tokens: null,
		seed: null,
		think: "",
		schema: "", // a JSON schema, or a whole `response_format`
		tools: "", // JSON
		others: "", // fields of the request that have no setting here, as JSON
		logprobs: false,
		steering: null, // strengths by index
		steering_mode: "additive",
		profile: "", // the name of a steering profile, used without `steering`
	};
}

/** Settings that are numbers: label, limits, usual value, hint. @type {Record<string, [string, object, string, string]>} */
export const NUMBERS = {
	temperature: [
		"Temperature",
		{ max: 2, step: 0.1 },
		"1",
		"0: always the likeliest token. 1: as the model has learnt. Higher: more variety.",
	],
	max_tokens: ["Max tokens", { min: 1 }, "no limit", "An answer ends after so many tokens."],
	top_p: ["Top p", { max: 1, step: 0.05 }, "1", "Only the likeliest tokens that together have this probability."],
	top_k: ["Top k", {}, "off", "Only so many of the likeliest tokens."],
	min_p: ["Min p", { max: 1, step: 0.01 }, "off", "Only tokens with this share of the likeliest one's probability."],
	seed: ["Seed", {}, "random", "The same seed gives the same answer to the same request."],
};

export const THINKING = {
	"": "Default",
	on: "On",
	off: "Off",
	low: "Low effort",
	medium: "Medium effort",
	high: "High effort",
};

/** Settings that are JSON: the label of each, and a hint. */
const TEXTS = {
	schema: ["JSON schema of the answer"],
	tools: ["Tools", "A JSON list. You type in what a call returns."],
	others: ["Other fields of the request", 'For example {"stop": ["\\n"]}'],
};

/**
 * Read the settings that are JSON. Those that are empty are null.
 * @throws {Error & { setting: string }} where one is no JSON
 */
export function parsed(settings) {
	const schema = json(settings, "schema");
	const tools = json(settings, "tools");
	return {
		response_format: schema && responseFormat(schema),
		tools: tools && [tools].flat().map(asTool),
		others: json(settings, "others"),
	};
}

function json(settings, name) {
	if (settings[name].trim() === "") return null;
	try {
		const value = JSON.parse(settings[name]);
		if (typeof value === "object" && (name === "tools" || !Array.isArray(value))) return value;
	} catch {}
	const form = name === "tools" ? "list" : "object";
	throw Object.assign(new Error(`${TEXTS[name][0]}: this is no JSON ${form}`), { setting: name });
}

function responseFormat(schema) {
	if (["json_schema", "json_object"].includes(schema.type)) return schema;
	return { type: "json_schema", json_schema: { name: "answer", schema } };
}

function asTool(tool) {
	return tool?.function ? tool : { type: "function", function: tool };
}

/** Say in words which settings are on, by name. Thinking has its own switch. */
export function inForce(settings) {
	const { system, profile, schema, tools, others, steering } = settings;
	const numbers = Object.entries(NUMBERS).filter(([name]) => settings[name] !== null);
	return {
		...(system.trim() && { system: "System prompt" }),
		...Object.fromEntries(numbers.map(([name, [label]]) => [name, `${label} ${settings[name]}`])),
		...(profile && { profile: `Profile ${profile}` }),
		...(steering && { steering: "Steering" }),
		...(schema.trim() && { schema: "JSON schema" }),
		...(tools.trim() && { tools: "Tools" }),
		...(others.trim() && { others: "Other fields" }),
	};
}

/** Make the control of a setting that is a number. */
export function numberInput(name, props = {}) {
	const [, limits, placeholder, title] = NUMBERS[name];
	return el("input", { type: "number", placeholder, title, min: 0, ...limits, ...props });
}

/** The setting that a control holds. */
export function valueOf({ type, value }) {
	if (type !== "number") return value;
	return value === "" ? null : Number(value);
}

/** Say what is wrong with a number that was typed in, or nothing. */
function wrongNumber({ validity, min, max, step }, label) {
	const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = validity;
	const broken = stepMismatch && step === ""; // others have steps for their arrows only
	if (!badInput && !rangeUnderflow && !rangeOverflow && !broken) return "";
	return `${label}: a ${step ? "" : "whole "}number ${max ? `from ${min} to ${max}` : `of at least ${min}`}`;
}

export class SettingsForm {
	constructor(chat) {
		this.chat = chat;
		this.controls = new Map(); // by the setting's name
		this.names = []; // of the profiles of the chosen model
		this.steered = el("span");
		const remove = () => this.change({ steering: null });
		this.steering = el("p.steered", this.steered, small("Remove", remove, "Remove the steering"));
		this.error = errorLine();
		this.profiles = el("select");
		this.chat.models.addEventListener("change", () => this.refresh());
		const numbers = Object.entries(NUMBERS).map(([name, [label]]) => this.add(name, label, numberInput(name)));
		const thinking = Object.entries(THINKING).map(([value, label]) => el("option", { value }, label));
		const texts = Object.entries(TEXTS).map(([name, [label, hint]]) =>
			this.add(name, label, growing("textarea.mono", { rows: 3, spellcheck: false }), hint),
		);
		this.element = el(
			"aside",
			{ ariaLabel: "Settings" },
			el("h2", "Settings"),
			new Presets(this, chat.announce).element,
			this.add("system", "System prompt", growing("textarea", { rows: 4 })),
			el("div.numbers", ...numbers),
			this.add("think", "Thinking", el("select", ...thinking)),
			this.add("profile", "Steering profile", this.profiles),
			this.steering,
			...texts,
		);
		this.draw();
	}

	add(name, label, control, hint) {
		control.addEventListener("input", () => {
			this.chat.changeSettings({ [name]: valueOf(control) });
			this.check();
		});
		this.controls.set(name, control);
		return field(label, control, hint);
	}

	/** Read what the chosen model has of its own, as long as somebody sees it. */
	async refresh() {
		const { api, models, options } = this.chat;
		if (options?.content.hidden !== false) return;
		const model = models.chosen;
		const [shown, profiles] = await Promise.all([
			api.post("api/show", { model }).catch(() => null),
			api.get("api/profiles").catch(() => []),
		]);
		const own = Object.fromEntries((shown?.parameters ?? "").split("\n").map(line => line.trim().split(/\s+/)));
		for (const name of Object.keys(NUMBERS)) this.controls.get(name).placeholder = own[name] ?? NUMBERS[name][2];
		this.names = profiles.filter(each => each.model_id === model).map(({ name }) => name);
		this.drawProfiles();
	}

	drawProfiles() {
		const { profile } = this.chat.conversation.settings;
		const values = [...new Set(["", ...this.names, profile])];
		this.profiles.replaceChildren(...values.map(value => el("option", { value }, value || "None")));
		this.profiles.value = profile;
	}

	/** Show the control of a setting. */
	open(name) {
		this.chat.options.show(true);
		(this.controls.get(name) ?? this.steering.querySelector("button")).focus();
	}

	change(settings) {
		this.chat.changeSettings(settings);
		this.draw();
	}

	draw() {
		const { settings } = this.chat.conversation;
		this.drawProfiles();
		for (const [name, control] of this.controls) control.value = settings[name] ?? "";
		const listed = Object.entries(settings.steering ?? {}).map(([index, strength]) => `${index} by ${strength}`);
		this.steering.hidden = settings.steering === null;
		this.steered.textContent = `Steering: ${listed.join(", ") || "off"} (${settings.steering_mode}) `;
		this.check();
	}

	/** Say what is wrong. Returns its control. */
	check() {
		const wrong = this.wrong();
		this.error.textContent = wrong?.message;
		this.error.hidden = !wrong;
		for (const [name, control] of this.controls) control.ariaInvalid = String(name === wrong?.setting);
		const control = this.controls.get(wrong?.setting);
		control?.after(this.error);
		wrong && this.error.scrollIntoView({ block: "nearest" });
		return control;
	}

	/** @returns {{ setting: string, message: string } | undefined} */
	wrong() {
		for (const [setting, [label]] of Object.entries(NUMBERS)) {
			const message = wrongNumber(this.controls.get(setting), label);
			if (message) return { setting, message };
		}
		try {
			parsed(this.chat.conversation.settings);
		} catch (error) {
			return error;
		}
	}
}
