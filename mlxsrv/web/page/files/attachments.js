/** Text files that go with a message: chosen, dropped or pasted, and shown folded. */

import { languageOf } from "./conversation.js";
import { el, small } from "./dom.js";
import { bytes } from "./figures.js";
import { icon, iconButton } from "./icons.js";
import { CodeView } from "./text.js";

/** @typedef {import("./conversation.js").Attachment} Attachment */

const LONGEST = 1_000_000; // bytes of a file
const PASTED = 2000; // characters of a pasted text that becomes an attachment

export class Attachments {
	constructor(chat) {
		this.chat = chat;
		this.all = new Map(); // by the draft that they belong to
		this.element = el("ul.chips", { ariaLabel: "Attached files", hidden: true });
		const picker = el("input", { type: "file", multiple: true, hidden: true });
		picker.onchange = () => {
			this.take(picker.files);
			picker.value = ""; // the same file may be chosen again
		};
		this.button = el(
			"span",
			iconButton("clip", "Attach text files", () => picker.click()),
			picker,
		);
		const { element, box } = chat;
		box.addEventListener("paste", event => this.paste(event));
		element.addEventListener("drop", ({ dataTransfer }) => this.take(dataTransfer.files));
	}

	/** The attachments of what is written now. @returns {Attachment[]} */
	get files() {
		return this.all.get(this.chat.draft.name) ?? [];
	}

	set(files) {
		this.all.set(this.chat.draft.name, files);
		this.draw();
	}

	async take(files) {
		for (const file of [...files]) {
			try {
				const text = await textOf(file);
				this.set([...this.files, { name: file.name, text }]);
			} catch (error) {
				this.chat.announce(error.message);
			}
		}
		this.chat.box.focus();
	}

	paste(event) {
		const { files } = event.clipboardData;
		const text = event.clipboardData.getData("text/plain");
		if (!files.length && text.length < PASTED) return;
		event.preventDefault();
		if (text) this.set([...this.files, { name: "Pasted text", text }]);
		else this.take(files);
	}

	draw() {
		const chip = file => {
			const remove = () => {
				this.set(this.files.filter(each => each !== file));
				this.chat.box.focus();
			};
			return el("li", icon("file"), file.name, sizeOf(file), small("×", remove, `Remove ${file.name}`));
		};
		this.element.replaceChildren(...this.files.map(chip));
		this.element.hidden = this.files.length === 0;
		this.chat.meter.draw();
	}
}

function sizeOf({ text }) {
	return el("small", bytes(new TextEncoder().encode(text).length));
}

/** @param {File} file @throws {Error} for the user, if it is no text */
async function textOf(file) {
	if (file.size > LONGEST) throw new Error(`${file.name} has more than ${bytes(LONGEST)}`);
	try {
		const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
		if (!text.includes("\0")) return text;
	} catch {}
	throw new Error(`${file.name} is no text file`);
}

/** Show an attachment of a message, folded; its text is drawn when it is opened. @param {Attachment} file */
export function foldedFile(file, announce) {
	const made = el("details.file", el("summary", icon("file"), file.name, sizeOf(file)));
	made.addEventListener(
		"toggle",
		() => {
			const view = new CodeView(file.name, `Copy ${file.name}`, announce, languageOf(file.name));
			view.update(file.text);
			made.append(view.element);
		},
		{ once: true },
	);
	return made;
}
