/** Chips above the message box: the settings that are in force, each with a button that takes it back. */

import { el, small } from "./dom.js";
import { defaults, inForce } from "./settings.js";

export class Chips {
	constructor(chat) {
		this.chat = chat;
		this.shown = "";
		this.element = el("ul.chips", { ariaLabel: "Settings in force" });
		this.draw();
	}

	draw() {
		const all = Object.entries(inForce(this.chat.conversation.settings));
		const shown = JSON.stringify(all);
		if (shown === this.shown) return; // what has the focus keeps it
		this.shown = shown;
		this.element.hidden = all.length === 0;
		this.element.replaceChildren(...all.map(each => this.chip(...each)));
	}

	chip(name, label) {
		const { settings, box } = this.chat;
		const takeBack = () => {
			settings.change({ [name]: defaults()[name] });
			box.focus();
		};
		return el(
			"li",
			small(label, () => settings.open(name)),
			small("×", takeBack, `Remove: ${label}`),
		);
	}
}
