/** Settings that the user keeps under a name. New chats begin with those that are named "default". */

import { button, el, field } from "./dom.js";
import { recall, remember } from "./session.js";
import { defaults } from "./settings.js";

/** @returns {Record<string, Record<string, any>>} settings by their name */
function presets() {
	try {
		return JSON.parse(recall("presets", true) || "{}");
	} catch {
		return {};
	}
}

/** Make the settings that a new chat begins with. */
export function savedSettings() {
	return { ...defaults(), ...presets().default };
}

export class Presets {
	/** @param {any} form the settings that are kept and changed */
	constructor(form, announce) {
		this.announce = announce;
		this.names = el("datalist", { id: "presets" });
		this.name = el("input", { autocomplete: "off", placeholder: "default", maxLength: 60 });
		this.name.setAttribute("list", "presets");
		const use = () => this.act("used", all => form.change({ ...defaults(), ...all[this.key] }), true);
		const save = () => this.act("saved", all => (all[this.key] = form.chat.conversation.settings));
		const drop = () => this.act("deleted", all => delete all[this.key], true);
		this.element = el(
			"div.saved",
			field("Preset", this.name, "New chats begin with the preset “default”."),
			this.names,
			el(
				"div.actions",
				button("Use", use),
				button("Save", save),
				button("Delete", drop),
				button("Clear", () => form.change(defaults()), { title: "Take all settings back" }),
			),
		);
		this.draw();
	}

	get key() {
		return this.name.value.trim() || "default";
	}

	/** Do something with a preset, and say so. */
	act(done, work, needed = false) {
		const all = presets();
		if (needed && !Object.hasOwn(all, this.key)) return this.announce(`There is no preset “${this.key}”`);
		work(all);
		remember("presets", JSON.stringify(all), true);
		this.announce(`Preset “${this.key}” ${done}`);
		this.draw();
	}

	draw() {
		this.names.replaceChildren(...Object.keys(presets()).map(value => el("option", { value })));
	}
}
