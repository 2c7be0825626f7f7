/** The models that can be asked, and the one that is chosen. */

import { el, offer, small } from "./dom.js";
import { bytes } from "./figures.js";
import { recall, remember } from "./session.js";

/** Fires "change" when another model is chosen, or the list or a state in it has changed. */
export class Models extends EventTarget {
	constructor(api) {
		super();
		this.api = api;
		this.all = []; // the entries of /v1/models
		this.chosen = recall("model");
	}

	/** The names of those that generate text, or may: the files of some are not here. */
	get names() {
		const may = ({ type, capabilities }) => type === null || capabilities.includes("completion");
		return this.all.filter(may).map(({ id }) => id);
	}

	get current() {
		return this.all.find(({ id }) => id === this.chosen);
	}

	/** Whether to look again: a model is on its way, or the chosen one could not be loaded. */
	get unsettled() {
		return this.all.some(isMoving) || this.current?.state === "failed";
	}

	/** Read the list again. Until the user chooses, it is the server's default model. */
	async refresh() {
		const { data } = await this.api.get("v1/models");
		let { chosen } = this;
		if (!data.some(({ id }) => id === chosen)) chosen = (await this.api.get("v1/models/default")).id;
		this.all = data; // with the choice: a select alone would take the first
		const { names } = this;
		this.choose(names.includes(chosen) ? chosen : (names[0] ?? ""));
	}

	async look() {
		await this.take((await this.api.health()).models);
	}

	/** Take the models that are loaded or wanted, as /health tells them; undefined: they are not known now. */
	async take(states) {
		if (!states) return;
		const byId = new Map(states.map(each => [each.id, each]));
		const known = this.all.every(({ id, state }) => {
			const now = byId.get(id)?.state ?? "unused";
			return now === state || (now === "unused" && state === "failed");
		});
		if (!known) return this.refresh();
		for (const model of this.all) {
			const { download, load } = byId.get(model.id) ?? {};
			Object.assign(model, { download, load });
		}
		if (this.all.some(progressOf)) this.choose(this.chosen);
	}

	choose(id) {
		this.chosen = id;
		this.dispatchEvent(new Event("change"));
	}

	/** Make a list, over the choice that one sees: on a narrow screen the name alone. */
	select() {
		const onchange = () => {
			remember("model", select.value);
			this.choose(select.value);
		};
		const select = el("select", { ariaLabel: "Model", onchange });
		const shown = el("span", { ariaHidden: "true" });
		this.addEventListener("change", () => {
			offer(select, this.names, this.chosen);
			for (const option of select.options) {
				const model = this.all.find(({ id }) => id === option.value);
				if (isMoving(model) || model.state === "failed") option.text += ` (${stateOf(model)})`;
				else if (model.size) option.text += ` · ${bytes(model.size)}`;
			}
			const { chosen } = this;
			const begin = chosen.lastIndexOf("/") + 1;
			const facts = select.selectedOptions[0]?.text.slice(chosen.length);
			shown.replaceChildren(el("small", chosen.slice(0, begin)), chosen.slice(begin), el("small", facts));
		});
		return el("div.toggle.picker", shown, select);
	}

	/** Make a line that says what keeps the chosen model from answering. */
	line() {
		const text = el("span", { role: "status" });
		const bar = el("progress");
		const figures = el("span.quiet");
		const again = small("Try again", () => this.load(this.chosen));
		const line = el("p.line.note", { hidden: true }, text, bar, figures, again);
		this.addEventListener("change", () => {
			const { id, state, reason, ...rest } = this.current ?? {};
			const progress = progressOf(rest);
			line.hidden = state !== "failed" && !(state && isMoving({ state }));
			const news = state === "failed" ? `${id} could not be loaded: ${reason}` : `${id}: ${state}`;
			if (text.textContent !== news) text.textContent = news; // screen readers say it once
			text.classList.toggle("error", state === "failed");
			again.hidden = state !== "failed";
			bar.hidden = figures.hidden = !progress;
			if (!progress) return;
			bar.ariaLabel = state === "downloading" ? "Download" : "Load";
			bar.value = share(progress);
			figures.textContent = `${bytes(progress.completed)} of ${bytes(progress.total)}`;
		});
		return line;
	}

	/** Load a model. Its state shows an error. */
	async load(model) {
		await this.api.post("api/generate", { model, stream: false }).catch(() => {});
		await this.refresh();
	}
}

/** Whether a model is on its way into memory. */
export function isMoving({ state }) {
	return !["loaded", "unused", "failed"].includes(state);
}

export function stateOf(model) {
	const progress = progressOf(model);
	if (model.state === "unused") return "not loaded";
	return progress ? `${model.state} ${Math.floor(100 * share(progress))} %` : model.state;
}

/** The bytes of a download or a load that is under way: those that are here, and all. */
function progressOf({ download, load }) {
	return download ?? load;
}

function share({ completed, total }) {
	return completed / (total || 1);
}
