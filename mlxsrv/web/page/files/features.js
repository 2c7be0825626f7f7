/** The features that steer: a slider for each, the mode, and a field that finds more. */

import { el, errorLine, field, lineForm, section, small } from "./dom.js";

/** @typedef {ReturnType<typeof emptySteering>} Steering what is set for a model */

const MOST = 200; // the API takes no more
const USUAL = 20; // where sliders end, unless a value is higher

export function emptySteering() {
	return { values: new Map(), mode: "additive", question: "Who are you?" };
}

export class FeatureList {
	constructor(changed) {
		this.changed = changed;
		this.steering = emptySteering();
		this.named = []; // names and values
		this.count = 0; // of the SAE's features
		this.rows = el("ul.features");
		this.mode = el(
			"select",
			{ onchange: () => this.setMode() },
			el("option", { value: "additive" }, "additive: adds to the activation"),
			el("option", { value: "clamp" }, "clamp: sets the activation"),
		);
		this.names = el("datalist", { id: "named-features" });
		this.wanted = el("input", { required: true, autocomplete: "off" });
		this.wanted.setAttribute("list", this.names.id);
		this.error = errorLine();
		this.element = section(
			"Features",
			this.rows,
			lineForm("Add by number or name", this.wanted, "Add", () => this.find()),
			this.names,
			this.error,
			field("Mode", this.mode),
		);
	}

	/** Show a steering, and change it from here on. `count` is that of its SAE's features. */
	show(steering, count) {
		this.steering = steering;
		this.count = count;
		this.error.hidden = true;
		this.draw();
	}

	offer(named) {
		this.named = named;
		this.names.replaceChildren(...named.map(({ name }) => el("option", { value: name })));
	}

	draw() {
		this.mode.value = this.steering.mode;
		this.rows.replaceChildren(...[...this.steering.values].map(each => this.row(...each)));
	}

	setMode() {
		this.steering.mode = this.mode.value;
		this.changed();
	}

	add(values) {
		for (const [feature, value] of values) this.steering.values.set(feature, value);
		this.draw();
		this.changed();
	}

	/** Add what the number or the name in the field means. */
	find() {
		const text = this.wanted.value.trim().toLowerCase();
		const number = Number(text);
		const exists = /^\d+$/.test(text) && number < this.count;
		const found = exists
			? [[number, this.steering.values.get(number) ?? 0]]
			: this.named.find(({ name }) => name.toLowerCase() === text)?.values;
		this.error.textContent = `There is no feature ${text}. The SAE has 0 to ${this.count - 1}; only presets and profiles have names.`;
		this.error.hidden = !!found;
		if (!found) return;
		this.wanted.value = "";
		this.add(found);
	}

	row(feature, value) {
		const { values } = this.steering;
		const name = this.named.find(each => each.values.size === 1 && each.values.has(feature))?.name;
		const label = name ? `${feature}, ${name}` : `${feature}`;
		const slider = el("input", {
			type: "range",
			step: 0.5,
			ariaLabel: `Feature ${label}`,
			oninput: () => (typed.value = slider.value),
			onchange: () => set(slider.valueAsNumber),
		});
		const typed = el("input", {
			type: "number",
			step: "any",
			ariaLabel: `Value of feature ${label}`,
			onchange: () => set(typed.valueAsNumber),
		});
		const show = () => {
			if (Math.abs(value) > slider.max || !slider.max) {
				slider.max = Math.abs(value) > USUAL ? MOST : USUAL;
				slider.min = -slider.max;
			}
			slider.value = typed.value = value;
		};
		const set = wanted => {
			if (!Number.isNaN(wanted)) value = Math.max(-MOST, Math.min(MOST, wanted));
			show();
			values.set(feature, value);
			this.changed();
		};
		const remove = () => {
			values.delete(feature);
			this.add([]);
			this.wanted.focus();
		};
		show();
		return el(
			"li",
			el("span", el("strong.mono", feature), name && ` ${name}`),
			small("×", remove, `Remove feature ${label}`),
			slider,
			typed,
		);
	}
}
