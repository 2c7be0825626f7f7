/** Chips above the message box: the settings that are in force, each with a button that takes it back. */

import { el, isNews, small } from "./dom.js";
import { THINKING, defaults, inForce } from "./settings.js";

const NEXT = { "": "off", off: "on" }; // of thinking; then its default

export class Chips {
	constructor(chat) {
		this.chat = chat;
		this.element = el("ul.chips", { ariaLabel: "Settings in force" });
		const next = () => chat.settings.change({ think: NEXT[chat.conversation.settings.think] ?? "" });
		this.thinking = small("", next, null, "small plain quiet");
		this.draw();
	}

	draw() {
		const { conversation, models } = this.chat;
		const { think } = conversation.settings;
		this.thinking.textContent = `Thinking: ${THINKING[think].toLowerCase()}`;
		this.thinking.hidden = !think && !models.current?.capabilities.includes("thinking");
		const all = Object.entries(inForce(conversation.settings));
		if (!isNews(this, all)) return;
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
