/** The list of conversations: searched, renamed, deleted, exported. */

import { button, composes, el, fileInput, isNews, small } from "./dom.js";
import { iconButton } from "./icons.js";

const DAY = 86_400_000; // milliseconds

export class ConversationList {
	constructor(chat) {
		this.chat = chat;
		this.items = el("ul");
		const oninput = () => chat.drawList();
		this.search = el("input", { type: "search", placeholder: "Search", ariaLabel: "Search chats", oninput });
		const picker = fileInput(content => chat.importFile(content), { hidden: true });
		this.element = el(
			"nav.conversations",
			{ ariaLabel: "Conversations" },
			button("New chat", () => chat.startNew(), {
				className: "main",
				title: "Ctrl+Shift+O",
				ariaKeyShortcuts: "Control+Shift+O Meta+Shift+O",
			}),
			this.search,
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

	/** @param {string} open the id of the conversation that is shown */
	update(heads, open) {
		const entries = heads.map(({ id, title, changed }) => ({
			id,
			title,
			current: id === open,
			writing: this.chat.runs.of(id) !== undefined,
			day: dayOf(changed),
		}));
		if (!isNews(this, entries)) return;
		const days = Map.groupBy(entries, ({ day }) => day);
		const group = ([day, all]) => [el("li.group", el("small", day)), ...all.map(each => this.item(each))];
		const none = this.search.value && heads.length === 0 ? [el("li.group", el("small", "Nothing found"))] : [];
		this.items.replaceChildren(...[...days].flatMap(group), ...none);
	}

	/** Focus an entry or, if there are fewer, the last one. */
	focus(place) {
		const all = [...this.items.querySelectorAll("button.open")];
		(all[place] ?? all.at(-1) ?? this.element.querySelector("button")).focus();
	}

	item(entry) {
		const { id, title, current, writing } = entry;
		const props = { className: "open", dir: "auto", ariaCurrent: current ? "true" : null, title };
		const remove = () => {
			const place = [...this.items.querySelectorAll("button.open")].indexOf(open);
			this.chat.remove(entry, place);
		};
		const open = button(title, () => this.chat.open(id), props);
		const rename = iconButton("edit", `Rename ${title}`, () => this.rename(entry, item));
		const buttons = el("span.rest", rename, iconButton("trash", `Delete ${title}`, remove));
		const item = el(writing ? "li.writing" : "li", open, buttons);
		return item;
	}

	/** Show a field in place of an entry. Enter takes the name, Escape does not. */
	rename({ id, title }, item) {
		const shown = [...item.childNodes];
		const input = el("input", { value: title, dir: "auto", ariaLabel: "Name of the chat" });
		const close = () => {
			item.replaceChildren(...shown);
			shown[0].focus();
		};
		input.onkeydown = event => {
			if (composes(event) || !["Enter", "Escape"].includes(event.key)) return;
			event.stopPropagation(); // Escape stops no answer
			close();
			if (event.key === "Enter") this.chat.rename(id, input.value.trim());
		};
		item.replaceChildren(input);
		input.select();
		input.focus();
	}
}

/** Say in words on which day something was. */
function dayOf(time) {
	const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
	if (days < 2) return days < 1 ? "Today" : "Yesterday";
	return days < 8 ? "Last 7 days" : "Earlier";
}
