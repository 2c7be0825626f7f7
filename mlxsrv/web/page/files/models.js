/** The models that can be asked, and the one that is chosen. */

import { el, offer } from "./dom.js";
import { recall, remember } from "./session.js";

/** Fires "change" when another model is chosen or the list has changed. */
export class Models extends EventTarget {
	constructor(api) {
		super();
		this.api = api;
		this.all = []; // the entries of /v1/models
		this.chosen = recall("model");
	}

	/** The names of those that generate text. */
	get names() {
		return this.all.filter(model => model.capabilities.includes("completion")).map(({ id }) => id);
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

	choose(id) {
		this.chosen = id;
		this.dispatchEvent(new Event("change"));
	}

	select() {
		const onchange = () => {
			remember("model", select.value);
			this.choose(select.value);
		};
		const select = el("select", { ariaLabel: "Model", onchange });
		this.addEventListener("change", () => offer(select, this.names, this.chosen));
		return select;
	}
}
