/** The page: its views, one of which is shown, as the address says behind `#`. */

import { API } from "./api.js";
import { button, el, small } from "./dom.js";
import { helpButton, themeButton } from "./help.js";
import { icon } from "./icons.js";
import { Keys } from "./keys.js";
import { Models } from "./models.js";

/** The file of a view has its class, `View`: its `element` is shown, and then its `shown` called. */

const VIEWS = {
	chat: { title: "Chat", load: () => import("./chat.js") },
	compare: { title: "Compare", load: () => import("./compare.js") },
	steer: { title: "Steer", load: () => import("./steer.js") },
	server: { title: "Server", load: () => import("./server.js") },
};

const find = selector => /** @type {HTMLElement} */ (document.querySelector(selector));
const main = find("main");
const note = find("#note");
const trouble = find("#trouble");
const api = new API(new Keys());
const models = new Models(api);
api.missing = () => connect();
const made = new Map(); // views, by name
let front; // the view that is shown
let noteEnds = 0;
let retry = 0;

/** @param {() => void} [undo] */
function announce(text, undo) {
	const end = () => (note.textContent = "");
	const press = () => {
		end();
		undo?.();
	};
	note.replaceChildren(text, ...(undo ? [small("Undo", press)] : []));
	clearTimeout(noteEnds);
	noteEnds = setTimeout(end, undo ? 10_000 : 4000);
}

async function open(name) {
	if (!Object.hasOwn(VIEWS, name)) {
		name = "chat";
		history.replaceState(null, "", "#chat"); // a new entry would lead Back here again
	}
	const { title, load } = VIEWS[name];
	const address = `#${name}`;
	if (location.hash !== address) history.pushState(null, "", address);
	document.title = `${title} · mlxsrv`;
	for (const link of document.querySelectorAll("nav a"))
		link.ariaCurrent = link.getAttribute("href") === address ? "page" : null;
	try {
		const { View } = await load();
		if (location.hash !== address) return; // another view was asked for meanwhile
		const view = made.get(name) ?? new View({ api, models, announce, open });
		made.set(name, view);
		if (view !== front) {
			front = view;
			bringToFront(view.element);
			view.shown();
		}
		return view;
	} catch {
		if (location.hash !== address) return;
		front = undefined;
		// A browser may hold a module to be missing until the page is loaded anew.
		const again = button("Try again", () => location.reload());
		bringToFront(el("p.error", { role: "alert" }, `${title} cannot be opened: the server did not send it. `, again));
	}
}

/** Show an element. Views behind it stay in the document, and at their places. */
function bringToFront(element) {
	find(":popover-open")?.hidePopover();
	find("main > .error")?.remove();
	if (!element.isConnected) main.append(element);
	for (const each of main.children) each.toggleAttribute("inert", each !== element);
}

/** A file that is dropped beside a place for it would be opened instead of the page. */
function holdFiles(event) {
	if (event.dataTransfer.types.includes("Files")) event.preventDefault();
}

/** Read the models, and try again while the server cannot be reached. */
async function connect(read = () => models.refresh()) {
	clearTimeout(retry);
	try {
		await read();
		trouble.hidden = true;
		follow();
	} catch (error) {
		const again = button("Try again", () => connect());
		trouble.replaceChildren(error.message, " ", again);
		trouble.hidden = false;
		if (error.status !== 401) connectAfter(Math.max(3000, error.pause ?? 0));
	}
}

function follow() {
	if (models.unsettled) connectAfter(2000, () => models.look());
}

/** Read the models after these milliseconds, or later, when somebody looks. */
function connectAfter(pause, read) {
	clearTimeout(retry);
	retry = setTimeout(() => (document.hidden ? connectAfter(pause, read) : connect(read)), pause);
}

find("nav").append(
	...Object.entries(VIEWS).map(([name, { title }]) => el("a", { href: `#${name}` }, icon(name), el("span", title))),
);
find("#model").append(models.select());
find("#tools").append(themeButton(), helpButton());
find("header").after(models.line());
find(".skip").onclick = event => {
	event.preventDefault(); // what stands behind # names a view
	main.focus();
};
for (const name of ["dragover", "drop"]) addEventListener(name, holdFiles);
models.addEventListener("change", follow);
addEventListener("hashchange", () => open(location.hash.slice(1)));
await open(location.hash.slice(1));
connect();
// All are here before somebody wants them: the server may be gone by then.
for (const { load } of Object.values(VIEWS)) load().catch(() => {});
