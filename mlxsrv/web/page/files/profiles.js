/** Profiles: steerings that the server keeps under a name. */

import { attempt, download, el, errorLine, field, fileInput, lineForm, section, small } from "./dom.js";
import { query } from "./sae.js";

export class ProfilePanel {
	constructor(api, host) {
		this.api = api;
		this.host = host;
		this.name = el("input", { required: true, maxLength: 100, autocomplete: "off" });
		const file = fileInput(content => {
			this.refresh(async () => this.api.post("api/profiles/import", await content));
		});
		this.list = el("ul");
		this.error = errorLine();
		this.element = section(
			"Profiles",
			lineForm("Save these features as", this.name, "Save", () => this.save()),
			this.list,
			field("Import a profile", file),
			this.error,
		);
	}

	/** Read the profiles, after a change. */
	refresh(change) {
		return attempt(this.error, async () => {
			await change?.();
			const { model_id, sae_id, layer } = this.host.content();
			const [all, active] = await Promise.all([
				this.api.get("api/profiles"),
				this.api.get(`api/profiles/active${query(model_id)}`),
			]);
			for (const each of all) each.values = new Map(Object.entries(each.steering).map(([k, v]) => [Number(k), v]));
			const fits = each => each.model_id === model_id && each.sae_id === sae_id && each.layer === layer;
			this.list.replaceChildren(...all.map(each => this.item(each, fits(each), each.id === active?.id)));
			this.host.read(all.filter(fits));
		});
	}

	/** @param {boolean} fits whether it is for what is attached */
	item(profile, fits, active) {
		const { id, name, values, mode, model_id, sae_id, layer } = profile;
		const path = `api/profiles/${id}`;
		const action = (verb, press) => small(verb, press, `${verb} ${name}`);
		const change = async work => {
			await this.refresh(work);
			this.name.focus(); // the button that was pressed is gone
		};
		const save = async () => download(`${name}.json`, JSON.stringify(await this.api.get(`${path}/export`), null, 2));
		const verb = active ? "Deactivate" : "Activate";
		const facts = [
			active && "active: the default of its model",
			...[...values].map(each => each.join(": ")),
			mode,
			!fits && `for ${sae_id} on layer ${layer} of ${model_id}`,
		];
		return el(
			"li",
			{ ariaLabel: name },
			el("strong", name),
			el("small", facts.filter(Boolean).join(", ")),
			el(
				"div.line",
				action("Use", () => this.host.use(profile)),
				action(verb, () => change(() => this.api.post(`${path}/${verb.toLowerCase()}`))),
				action("Export", () => attempt(this.error, save)),
				action("Delete", () => change(() => this.api.delete(path))),
			),
		);
	}

	async save() {
		const body = { name: this.name.value.trim(), ...this.host.content() };
		if (await this.refresh(() => this.api.post("api/profiles", body))) this.name.value = "";
	}
}
