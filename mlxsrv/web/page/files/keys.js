/** The API key: asked for when the server wants one; kept in memory or for the session. */

import { button, el, field } from "./dom.js";
import { recall, remember } from "./session.js";

const NAME = "API key";

export class Keys {
	constructor() {
		this.key = recall(NAME) || null;
		this.asking = null; // the answer of the dialog that is open
	}

	/** Ask for a key, once for all requests that want one. Tell whether one was given. */
	ask(wrong) {
		this.asking ??= this.open(wrong).finally(() => (this.asking = null));
		return this.asking;
	}

	/** @param {boolean} wrong whether the server has refused a key */
	open(wrong) {
		// Other characters cannot stand in a header.
		const ascii = { pattern: "[ -~]+", title: "Characters of ASCII only" };
		const input = el("input", { type: "password", autocomplete: "off", required: true, ...ascii });
		const keep = el("input", { type: "checkbox" });
		const dialog = el(
			"dialog",
			{ ariaLabel: NAME },
			el(
				"form",
				{ method: "dialog" },
				el("h2", NAME),
				wrong && el("p.error", { role: "alert" }, "The server does not know this key."),
				field("The server wants an API key", input),
				el("label.check", keep, "Keep it until this tab is closed"),
				el(
					"div.actions",
					button("Cancel", () => dialog.close()),
					el("button.main", { value: "given" }, "Use this key"),
				),
			),
		);
		document.body.append(dialog);
		dialog.showModal();
		return new Promise(resolve => {
			dialog.onclose = () => {
				const given = dialog.returnValue === "given";
				if (given) {
					this.key = input.value.trim();
					remember(NAME, keep.checked ? this.key : "");
				}
				dialog.remove();
				resolve(given);
			};
		});
	}
}
