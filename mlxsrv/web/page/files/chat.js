/** The view "Chat": a conversation, the list of all of them, and the settings. */

import { add, asRequest, branches, choose, newConversation, newId, path, upTo } from "./conversation.js";
import { button, composes, download, el, errorLine, onEnter, small } from "./dom.js";
import { emptyAnswer } from "./generate.js";
import { ConversationList } from "./list.js";
import { viewOf } from "./message.js";
import { chatBody, hasForm } from "./request.js";
import { Runs } from "./runs.js";
import { recall, remember } from "./session.js";
import { SettingsForm, defaults } from "./settings.js";
import { Store } from "./store.js";
import { asFile, fromFile } from "./transfer.js";

const NEAR = 40; // pixels from the end of the conversation that count as its end

export class View {
	constructor(context) {
		this.api = context.api;
		this.models = context.models;
		this.announce = context.announce;
		this.conversation = newConversation(defaults());
		this.store = new Store(
			() => this.tell("The browser does not keep what is new here. Export it before you close this tab."),
			change => this.changedElsewhere(change),
		);
		this.runs = new Runs(this);
		this.views = new Map(); // of the messages that are shown, by id
		this.wanted = ""; // the conversation that was asked for last
		this.following = true; // whether the end stays in sight
		this.settings = new SettingsForm(this);
		this.list = new ConversationList(this);
		this.side = new Panel("Chats", this.list.element, isWide());
		this.options = new Panel("Settings", this.settings.element, false);
		this.title = el("h1", { dir: "auto" });
		this.messages = el("div.messages");
		this.empty = el("p.empty.quiet", "Ask the model something.");
		const onscroll = () => this.follow();
		const props = { role: "log", tabIndex: 0, ariaLabel: "Messages", ariaLive: "off", onscroll };
		this.log = el("div.log", props, this.empty, this.messages);
		new ResizeObserver(() => this.toEnd()).observe(this.messages);
		this.trouble = errorLine();
		this.heard = el("p.unseen", { role: "status" });
		this.box = el("textarea", { rows: 1, dir: "auto", placeholder: "Message", ariaLabel: "Message" });
		this.looks = el("input", {
			type: "checkbox",
			onchange: () => this.changeSettings({ logprobs: this.looks.checked }),
		});
		this.sendButton = el("button.main", "Send");
		this.stopButton = button("Stop", () => this.stop(), { title: "Escape" });
		const form = onEnter(el("form.composer", this.box, this.sendButton, this.stopButton), () => this.send());
		const bar = el(
			"div.bar",
			this.side.toggle,
			this.title,
			el("label.check", this.looks, "Look inside"),
			this.options.toggle,
		);
		this.element = el(
			"section.chat",
			{ ariaLabel: "Chat" },
			this.side.content,
			el("div.middle", bar, this.log, this.trouble, form, this.heard),
			this.options.content,
		);
		document.addEventListener("keydown", event => this.element.inert || this.press(event));
		this.models.addEventListener("change", () => this.draw());
		this.draw();
		this.restored = this.restore();
	}

	shown() {
		this.toEnd();
		this.box.focus();
	}

	press(event) {
		if (composes(event) || document.querySelector("dialog[open], :popover-open")) return;
		if (event.key === "Escape") this.stop();
		if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
			event.preventDefault();
			this.startNew();
		}
	}

	// Conversations.

	/** Show what this tab had open, or a new conversation with the settings of the latest. */
	async restore() {
		const empty = this.conversation;
		const current = recall("conversation");
		const heads = await this.store.heads();
		// The user may have begun meanwhile.
		if (this.conversation === empty) {
			if (heads.some(({ id }) => id === current)) await this.open(current);
			else if (heads[0]) this.settings.change(heads[0].settings);
		}
		await this.drawList();
	}

	startNew() {
		this.show(newConversation(this.conversation.settings));
	}

	/** Show a conversation, unless the user does something else before it is read. */
	async open(id) {
		const before = this.conversation;
		this.wanted = id;
		const running = this.runs.of(id); // it may end while the store is read
		const found = await this.store.load(id);
		if (!found || this.wanted !== id || this.conversation !== before) return;
		const messages = found.messages.map(each => (each.id === running?.id ? running : each));
		// What was being generated when the page was left stays as it is.
		for (const { id, answer } of messages) if (answer && id !== running?.id) answer.finish ??= "stopped";
		this.show({ ...found, messages });
	}

	/** Another tab has saved or deleted a conversation. */
	async changedElsewhere({ id, gone }) {
		const again = button("Read it again", () => this.open(id));
		if (gone && this.runs.of(id)) await this.forget(id);
		if (id === this.conversation.id) {
			if (gone) this.startNew();
			else if (this.trouble.hidden) this.tell("Another tab has changed this conversation. ", again);
		}
		await this.drawList();
	}

	/** Delete a conversation, and what its answer would still save. */
	async forget(id) {
		await this.runs.stop(id);
		await this.store.delete(id);
	}

	/** Say something until another conversation is shown. */
	tell(...parts) {
		this.trouble.replaceChildren(...parts);
		this.trouble.hidden = false;
	}

	show(conversation) {
		this.conversation = conversation;
		this.settings.draw();
		this.following = true;
		this.trouble.hidden = true;
		this.views.clear();
		this.messages.replaceChildren();
		this.draw();
		this.drawList();
		if (!isWide()) this.side.show(false);
		this.box.focus();
	}

	async remove({ id, title }, place) {
		if (!confirm(`Delete “${title}”?`)) return;
		await this.forget(id);
		if (id === this.conversation.id) this.startNew();
		await this.drawList();
		if (!this.element.contains(document.activeElement)) this.list.focus(place); // the button has gone
		this.announce("Deleted");
	}

	async drawList() {
		remember("conversation", this.conversation.id);
		this.list.update(await this.store.heads(), this.conversation.id);
	}

	exportOne() {
		download(`${this.conversation.title || "conversation"}.json`, asFile([this.conversation]));
	}

	async exportAll() {
		const heads = await this.store.heads();
		const all = await Promise.all(heads.map(({ id }) => this.store.load(id)));
		download("conversations.json", asFile(all.filter(Boolean)));
	}

	/** @param {Promise<any>} content of the file */
	async importFile(content) {
		try {
			const conversations = fromFile(await content);
			for (const each of conversations) await this.store.save(each, each.messages);
			if (conversations[0]) await this.open(conversations[0].id);
			this.announce(`${conversations.length} imported`);
		} catch (error) {
			this.announce(error.message);
		}
	}

	// Settings.

	async steer(steering, steering_mode) {
		await this.restored; // or its settings would come over these
		this.settings.change({ steering, steering_mode });
	}

	/** Change some settings. What shows them is drawn by the caller. */
	changeSettings(changes) {
		const { conversation } = this;
		this.conversation = { ...conversation, settings: { ...conversation.settings, ...changes } };
		if ("logprobs" in changes) this.draw();
		if (conversation.messages.length) this.store.save(this.conversation);
	}

	/** Whether the settings can be sent. If not, move to the one that is wrong. */
	settingsFit() {
		const wrong = this.settings.check();
		if (!wrong) return true;
		this.options.show(true);
		wrong.focus();
		return false;
	}

	// Messages.

	send() {
		const content = this.box.value;
		if (content.trim() === "" || this.runs.of(this.conversation.id)) return;
		const parent = path(this.conversation).at(-1)?.id ?? "";
		if (this.ask(parent, { role: "user", content })) this.box.value = "";
	}

	/** Add a message or the results of tools, and have the model answer. @returns whether it could be asked */
	ask(parent, said) {
		if (!this.settingsFit()) return false;
		this.reply(this.append(parent, said).id, null);
		return true;
	}

	/** Answer anew, or go on with a beginning of the answer: a branch beside it. */
	regenerate(reply, begun) {
		if (!this.settingsFit()) return;
		// The server would begin the form anew, behind the text that is there.
		if (begun && hasForm(chatBody(this.conversation.settings, "", [])))
			this.announce("With a JSON schema or another form an answer cannot go on from another token");
		else this.reply(reply.parent, begun);
	}

	retry(reply) {
		reply.answer = startOf(reply.begun);
		reply.model = this.models.chosen;
		this.store.save(this.conversation, [reply]);
		this.run(reply);
	}

	reply(parent, begun) {
		const { settings } = this.conversation;
		const model = this.models.chosen;
		this.run(this.append(parent, { role: "assistant", answer: startOf(begun), settings, model, begun }));
	}

	/** Add a message behind another one. `run` draws it. */
	append(parent, said) {
		const message = { id: newId(), parent, number: this.conversation.messages.length, ...said };
		this.conversation = add(this.conversation, message);
		this.store.save(this.conversation, [message]).then(() => this.drawList());
		return message;
	}

	/** Show the next branch, or with -1 the one before. */
	step(message, by) {
		const all = branches(this.conversation, message);
		const next = all[(all.indexOf(message) + by + all.length) % all.length];
		this.conversation = choose(this.conversation, next);
		this.store.save(this.conversation);
		this.draw();
		const { back, on } = this.views.get(next.id);
		(by < 0 ? back : on).focus();
	}

	// Generation.

	request({ parent, begun, settings, model }) {
		const messages = upTo(this.conversation, parent);
		if (begun?.content) messages.push({ role: "assistant", answer: startOf(begun) });
		return chatBody(settings, model, asRequest(messages));
	}

	async run(reply) {
		const ended = this.runs.start(this.conversation.id, reply, this.request(reply));
		this.following = true;
		this.draw();
		this.box.focus();
		await ended;
		this.draw();
		if (this.view(reply)) this.hear(reply);
	}

	stop() {
		this.runs.stop(this.conversation.id);
	}

	view(reply) {
		return this.views.get(reply.id);
	}

	/** Have screen readers say a finished answer. */
	hear({ answer: { content, calls, error } }) {
		const called = calls.map(call => `Calls ${call.function.name}.`);
		this.heard.textContent = error || ["Answer:", content, ...called].join(" ");
	}

	// Drawing.

	draw() {
		const { conversation, views: former } = this;
		const shown = path(conversation);
		this.views = new Map(shown.map(each => [each.id, former.get(each.id) ?? viewOf(this, each)]));
		for (const [id, { element }] of former) if (!this.views.has(id)) element.remove();
		// Branches part once, so those that stay are the first.
		for (const { element } of this.views.values()) if (!element.parentNode) this.messages.append(element);
		for (const view of this.views.values()) view.place();
		this.empty.hidden = shown.length > 0;
		this.looks.checked = conversation.settings.logprobs;
		this.title.textContent = conversation.title || "New chat";
		this.sendButton.hidden = this.runs.of(conversation.id) !== undefined;
		this.stopButton.hidden = !this.sendButton.hidden;
	}

	/** Note whether the user is at the end. */
	follow() {
		const { scrollHeight, scrollTop, clientHeight } = this.log;
		this.following = scrollHeight - scrollTop - clientHeight < NEAR;
	}

	/** Stay at the end as long as the user does, unless a list of alternatives is open. */
	toEnd() {
		if (this.following && !document.querySelector(":popover-open")) this.log.scrollTop = this.log.scrollHeight;
	}
}

function startOf(begun) {
	return { ...emptyAnswer(), ...structuredClone(begun) };
}

/** A part beside the conversation that one may close; on a narrow screen it covers the conversation. */
class Panel {
	constructor(label, content, open) {
		this.content = content;
		this.toggle = small(label, () => this.show(content.hidden));
		this.show(open);
	}

	show(open) {
		this.content.hidden = !open;
		this.toggle.ariaExpanded = String(open);
	}
}

function isWide() {
	return matchMedia("(min-width: 60rem)").matches;
}
