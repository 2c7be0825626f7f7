/** The sheet of keyboard shortcuts, and the switch between light and dark. */

import { button, el } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { recall, remember } from "./session.js";

const CTRL = navigator.platform.startsWith("Mac") ? "⌘" : "Ctrl";

const NAME = "Keyboard shortcuts";

const SHORTCUTS = {
	Enter: "Send the message",
	"Shift Enter": "Begin a new line",
	Escape: "Stop the answer",
	"↑": "Edit your last message, if the box is empty",
	[`${CTRL} K`]: "Search the chats",
	[`${CTRL} Shift O`]: "Begin a new chat",
	[`${CTRL} ,`]: "Open or close the settings",
	"← →": "Look inside: move between tokens; Enter shows what else could have come",
	"?": "Show this sheet",
};

export function helpButton() {
	const rows = Object.entries(SHORTCUTS).map(([keys, does]) => {
		const shown = keys.split(" ").map(key => el("kbd", key));
		return el("tr", el("td", shown), el("td", does));
	});
	const dialog = el(
		"dialog.help",
		{ ariaLabel: NAME },
		el("h2", NAME),
		el("table", el("tbody", rows)),
		button("Close", () => dialog.close(), { className: "main" }),
	);
	document.body.append(dialog);
	const show = () => dialog.open || dialog.showModal();
	document.addEventListener("keydown", event => {
		const { key, target } = event;
		const types = target instanceof Element && target.matches("input, textarea, select");
		if (key !== "?" || types || document.querySelector("dialog[open]")) return;
		event.preventDefault();
		show();
	});
	return iconButton("help", NAME, show);
}

const THEMES = { auto: "as the system has it", light: "light", dark: "dark" };

/** Make a button that goes from one theme to the next. */
export function themeButton() {
	const names = Object.keys(THEMES);
	let theme = recall("theme", true);
	if (!Object.hasOwn(THEMES, theme)) theme = "auto";
	const draw = () => {
		document.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
		press.replaceChildren(icon(theme));
		press.ariaLabel = press.title = `Theme: ${THEMES[theme]}`;
	};
	const press = iconButton("auto", "Theme", () => {
		theme = names[(names.indexOf(theme) + 1) % names.length];
		remember("theme", theme === "auto" ? "" : theme, true);
		draw();
	});
	draw();
	return press;
}
