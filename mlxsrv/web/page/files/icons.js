/** Icons: lines on a square of 24, in the colour of the text. */

import { button, svg } from "./dom.js";

const LINES = {
	again: "M20 12a8 8 0 1 1-2.4-5.7L20 8.5M20 4v4.5h-4.5",
	auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
	chat: "M4 5h16v11H10l-5 4v-4H4z",
	clip: "m20 11-8.3 8.3a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.4 8.4a1.7 1.7 0 0 1-2.4-2.4l7.7-7.7",
	compare: "M4 5h6.5v14H4zM13.5 5H20v14h-6.5z",
	copy: "M9 9h11v11H9zM5 15H4V4h11v1",
	dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
	edit: "m4 20 1-4.5L16 4.5l3.5 3.5L8.5 19zM13.5 7l3.5 3.5",
	eye: "M2.5 12S6 5.5 12 5.5 21.5 12 21.5 12 18 18.5 12 18.5 2.5 12 2.5 12zM12 9a3 3 0 1 0 0 6 3 3 0 0 0 0-6",
	file: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
	help: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18M9.3 9.5a2.8 2.8 0 1 1 4 2.5c-.9.5-1.3 1-1.3 2M12 17v.01",
	light:
		"M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6 19 19M5 19l1.4-1.4M17.6 6.4 19 5",
	more: "M5 12h1M11.5 12h1M18 12h1",
	panel: "M4 5h16v14H4zM9.5 5v14",
	send: "M12 19V5M6 11l6-6 6 6",
	server: "M4 5h16v6H4zM4 13h16v6H4zM7.5 8h.01M7.5 16h.01",
	settings:
		"M4 7h8M18 7h2M4 17h2M12 17h8M15 4.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5M9 14.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5",
	steer: "M5 20v-7M5 9V4M12 20v-4M12 12V4M19 20v-9M19 7V4M3 13h4M10 12h4M17 11h4",
	stop: "M6 6h12v12H6z",
	trash: "M4 7h16M9.5 7V4h5v3M6.5 7l1 13h9l1-13M10.5 11v5M13.5 11v5",
};

export function icon(name) {
	const made = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
	made.append(svg("path", { d: LINES[name] }));
	return made;
}

/** Make a button whose name is read and shown as a hint. */
export function iconButton(name, label, press, className = "icon-button") {
	return button(icon(name), press, { ariaLabel: label, title: label, className });
}
