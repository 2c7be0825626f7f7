/** The list of conversations. */

import { button, el, fileInput, small } from "./dom.js";

export class ConversationList {
	constructor(chat) {
		this.chat = chat;
		this.shown = "";
		this.items = el("ul");
		const picker = fileInput(content => chat.importFile(content), { hidden: true });
		this.element = el(
			"nav.conversations",
			{ ariaLabel: "Conversations" },
			button("New chat", () => chat.startNew(), {
				className: "main",
				title: "Ctrl+K",
				ariaKeyShortcuts: "Control+K Meta+K",
			}),
			this.items,
			el(
				"div.actions",
				small("Export", () => chat.exportOne()),
				small("Import", () => picker.click()),
				small("Export all", () => chat.exportAll()),
			),
			picker,
		);
	}

	update(heads, open) {
		const shown = JSON.stringify([open, heads.map(({ id, title }) => [id, title])]);
		if (shown === this.shown) return; // what has the focus keeps it
		this.shown = shown;
		this.items.replaceChildren(...heads.map((head, place) => this.item(head, place, head.id === open)));
	}

	/** Focus an entry or, if there are fewer, the last one. */
	focus(place) {
		const entry = this.items.children[place] ?? this.items.lastElementChild ?? this.element;
		entry.querySelector("button").focus();
	}

	item(head, place, current) {
		const props = { className: "open", dir: "auto", ariaCurrent: current ? "true" : null };
		return el(
			"li",
			button(head.title, () => this.chat.open(head.id), props),
			button("×", () => this.chat.remove(head, place), { ariaLabel: `Delete ${head.title}`, title: "Delete" }),
		);
	}
}
