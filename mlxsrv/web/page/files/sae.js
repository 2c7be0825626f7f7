/** The SAE of a model, and those that may be attached. */

import { attempt, button, el, errorLine, offer } from "./dom.js";
import { bytes, count, joined } from "./figures.js";

const OFFER = "Name folders of SAEs with --sae-dir, or an SAE with POST /api/saes.";

export class SAEPanel {
	/** `changed` gets what /api/saes/attachment tells, with the SAE's `origin`; null where there is none. */
	constructor(api, changed) {
		this.api = api;
		this.changed = changed;
		this.model = "";
		this.all = []; // the answer of /api/saes
		this.attached = null; // the id of an SAE
		this.choice = el("select", {
			ariaLabel: "Sparse autoencoder (SAE)",
			onchange: () => attempt(this.error, () => this.compare()),
		});
		this.facts = el("p", { tabIndex: -1 });
		this.fit = el("p.fit", { role: "status" });
		this.press = button("Attach", () => this.toggle(), { disabled: true });
		this.error = errorLine();
		this.element = el("div.sae.line", this.choice, this.facts, this.press, this.fit, this.error);
	}

	/** Read what a model has. @returns whether the server answered */
	refresh(model) {
		this.model = model;
		return attempt(this.error, async () => {
			const [all, { attached, ...attachment }] = await Promise.all([
				this.api.get("api/saes"),
				this.api.get(`api/saes/attachment${query(model)}`),
			]);
			if (model !== this.model) return;
			this.all = all;
			this.attached = attachment.sae_id;
			const names = all.map(({ id }) => id);
			offer(this.choice, names, this.choice.value);
			this.choice.hidden = attached || !all.length;
			this.press.disabled = !attached;
			this.press.textContent = attached ? "Detach" : "Attach";
			this.press.classList.toggle("main", !attached);
			const origin = all.find(({ id }) => id === this.attached)?.origin;
			this.changed(attached ? { ...attachment, origin } : null);
			if (!attached) return this.compare();
			this.fit.textContent = "";
			this.facts.replaceChildren(el("strong", this.attached), ` is attached: ${described(attachment)}`);
		});
	}

	async compare() {
		const { model } = this;
		const sae = this.all.find(({ id }) => id === this.choice.value);
		this.press.disabled = true;
		this.fit.textContent = "";
		this.facts.textContent = sae ? described(sae) : `There is no SAE to attach. ${OFFER}`;
		if (!sae) return;
		const fit = await this.api.get(`api/saes/${sae.id}/compatibility${query(model)}`);
		if (this.attached || this.model !== model || this.choice.value !== sae.id) return;
		this.press.disabled = !fit.compatible;
		this.fit.classList.toggle("error", !fit.compatible);
		this.fit.textContent = fit.compatible
			? [`It fits ${model}.`, ...fit.warnings].join(" Note: ")
			: `It does not fit ${model}: ${fit.reasons.join("; ")}. ${OFFER}`;
	}

	async toggle() {
		const { model, attached } = this;
		const action = attached ? `${attached}/detach` : `${this.choice.value}/attach`;
		this.press.disabled = true;
		if (await attempt(this.error, () => this.api.post(`api/saes/${action}`, { model }))) await this.refresh(model);
		else this.press.disabled = false;
		this.facts.focus(); // Enter, pressed again, must not undo it
	}
}

export function query(model) {
	return `?model=${encodeURIComponent(model)}`;
}

/** @param {any} sae or its attachment */
function described(sae) {
	return joined([
		sae.d_sae && `${count(sae.d_sae)} features`,
		sae.layer !== null && `layer ${sae.layer}`,
		sae.architecture,
		sae.bytes && bytes(sae.bytes),
	]);
}
