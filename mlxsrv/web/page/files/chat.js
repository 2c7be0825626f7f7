/** The view "Chat": a conversation, the list of all of them, and the settings. */

import { add, asRequest, branches, choose, newConversation, newId, path, upTo } from "./conversation.js";
import { Attachments } from "./attachments.js";
import { Chips } from "./chips.js";
import { button, composes, download, el, errorLine, growing, onEnter, small, type } from "./dom.js";
import { emptyAnswer } from "./generate.js";
import { icon, iconButton } from "./icons.js";
import { ConversationList } from "./list.js";
import { viewOf } from "./message.js";
import { Meter } from "./meter.js";
import { chatBody, hasForm } from "./request.js";
import { Runs } from "./runs.js";
import { recall, remember } from "./session.js";
import { savedSettings } from "./saved.js";
import { SettingsForm } from "./settings.js";
import { Store } from "./store.js";
import { asFile, fromFile } from "./transfer.js";
import { Welcome } from "./welcome.js";

const NEAR = 40; // pixels from the end that count as the end

export class View {
	constructor(context) {
		this.api = context.api;
		this.models = context.models;
		this.announce = context.announce;
		this.openView = context.open;
		this.conversation = newConversation(savedSettings());
		this.store = new Store(
			() => this.tell("The browser does not keep what is new here. Export it before you close this tab."),
			change => this.changedElsewhere(change),
		);
		this.runs = new Runs(this);
		this.views = new Map(); // of the messages that are shown, by id
		this.wanted = ""; // the conversation that was asked for last
		this.coming = recall("conversation"); // until something is shown
		this.following = true; // whether the end stays in sight
		this.top = 0;
		this.settings = new SettingsForm(this);
		this.list = new ConversationList(this);
		this.side = new Panel("panel", "Chats", this.list.element, isWide());
		this.options = new Panel("settings", "Settings", this.settings.element, false, () => this.settings.refresh());
		this.title = el("h1", { dir: "auto" });
		this.messages = el("div.messages");
		this.welcome = new Welcome(this);
		const onscroll = () => this.follow();
		const props = { role: "log", tabIndex: 0, ariaLabel: "Messages", ariaLive: "off", onscroll };
		this.log = el("div.log", props, this.welcome.element, this.messages);
		new ResizeObserver(() => this.toEnd()).observe(this.messages);
		this.trouble = errorLine();
		this.heard = el("p.unseen", { role: "status" });
		this.box = growing("textarea", { rows: 1, dir: "auto", placeholder: "Message", ariaLabel: "Message" });
		this.box.addEventListener("input", () => this.keepDraft());
		this.meter = new Meter(this);
		this.chips = new Chips(this);
		this.asked = el("p.line.asked", { role: "status", hidden: true });
		this.looks = el("input", {
			type: "checkbox",
			onchange: () => this.changeSettings({ logprobs: this.looks.checked }),
		});
		const attach = el("span");
		this.sendButton = el("button.icon-button.main", { ariaLabel: "Send", title: "Send: Enter" }, icon("send"));
		this.stopButton = iconButton("stop", "Stop", () => this.stop(), "icon-button main");
		const tools = el("div.line", attach, this.chips.thinking, this.meter.element, this.sendButton, this.stopButton);
		const form = onEnter(el("form.composer", this.box, tools), () => this.send());
		const foot = el("div.foot", this.asked, this.meter.line, this.chips.element, form);
		const bar = el(
			"div.bar",
			this.side.toggle,
			this.title,
			el("label.toggle", this.looks, icon("eye"), "Look inside"),
			this.options.toggle,
		);
		this.element = el(
			"section.chat",
			{ ariaLabel: "Chat" },
			this.side.content,
			el("div.middle", bar, this.log, this.trouble, foot, this.heard),
			this.options.content,
		);
		this.attachments = new Attachments(this);
		attach.replaceWith(this.attachments.button);
		form.prepend(this.attachments.element);
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
		const { key, shiftKey, target } = event;
		const ctrl = event.ctrlKey || event.metaKey;
		const last = this.messages.querySelector(".user:nth-last-child(-n + 2) .row button");
		const acts = {
			Escape: () => this.stop(),
			...(target === this.box && this.box.value === "" && last && { ArrowUp: () => last.click() }),
			...(ctrl && { ",": () => this.options.toggle.click() }),
			...(ctrl && !shiftKey && { k: () => this.searchChats() }),
			...(ctrl && shiftKey && { o: () => this.startNew() }),
		};
		const act = acts[key.length === 1 ? key.toLowerCase() : key];
		if (!act) return;
		if (key !== "Escape") event.preventDefault();
		act();
	}

	searchChats() {
		this.side.show(true);
		this.list.search.focus();
		this.list.search.select();
	}

	// Conversations.

	/** Show what this tab had open. */
	async restore() {
		this.drawDraft();
		const empty = this.conversation;
		const current = this.coming;
		const heads = await this.store.heads();
		// The user may have begun meanwhile.
		if (this.conversation === empty && heads.some(({ id }) => id === current)) await this.open(current);
		if (this.coming) {
			this.coming = ""; // it is gone
			this.draw();
			this.drawDraft();
		}
		await this.drawList();
	}

	startNew() {
		this.show(newConversation(savedSettings()));
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
		remember(`draft ${id}`, "", true);
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
		this.trouble.hidden = this.asked.hidden = true;
		this.views.clear();
		this.messages.replaceChildren();
		this.draw();
		this.drawList();
		if (!isWide()) this.side.show(false);
		this.coming = "";
		this.drawDraft();
		this.attachments.draw();
		this.box.focus();
	}

	/** What is written and not sent: of a conversation for good, of a new chat in this tab. */
	get draft() {
		const { id, messages } = this.conversation;
		const known = messages.length ? id : this.coming;
		return known ? { name: `draft ${known}`, lasting: true } : { name: "draft", lasting: false };
	}

	drawDraft() {
		type(this.box, recall(this.draft.name, this.draft.lasting));
	}

	keepDraft() {
		remember(this.draft.name, this.box.value, this.draft.lasting);
		this.meter.draw();
	}

	/** The message that is written now. */
	get said() {
		const { files } = this.attachments;
		return { role: "user", content: this.box.value, ...(files.length && { files }) };
	}

	async remove({ id }, place) {
		await this.runs.stop(id);
		const kept = await this.store.load(id);
		await this.forget(id);
		if (id === this.conversation.id) this.startNew();
		await this.drawList();
		if (!this.element.contains(document.activeElement)) this.list.focus(place); // the button has gone
		this.announce("Deleted", async () => {
			await this.store.save(kept, kept.messages);
			await this.open(id);
		});
	}

	/** Name a conversation; without a name its first question is its title. */
	async rename(id, name) {
		const own = id === this.conversation.id;
		const before = own ? this.conversation : await this.store.load(id);
		if (!before) return;
		const [first] = path(before);
		const renamed = name ? { ...before, title: name, named: true } : choose({ ...before, named: false }, first);
		if (own) this.conversation = renamed;
		await this.store.save(renamed);
		this.draw();
		await this.drawList();
	}

	async drawList() {
		const { id, messages } = this.conversation;
		remember("conversation", messages.length ? id : "");
		const wanted = this.list.search.value;
		const heads = await (wanted ? this.store.search(wanted) : this.store.heads());
		if (wanted === this.list.search.value) this.list.update(heads, id);
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
		this.chips.draw();
		this.meter.draw();
		if (conversation.messages.length) this.store.save(this.conversation);
	}

	/** Whether the settings are right. If not, go to the wrong one. */
	settingsFit() {
		const wrong = this.settings.check();
		if (!wrong) return true;
		this.options.show(true);
		wrong.focus();
		return false;
	}

	// Messages.

	send() {
		const { content, files = [] } = this.said;
		if ((content.trim() === "" && files.length === 0) || this.runs.of(this.conversation.id)) return;
		const last = path(this.conversation).at(-1);
		const call = last && files.length === 0 && this.view(last).call;
		if (call) this.askWhatItIs(call, content);
		else this.sendMessage(content);
	}

	sendMessage(content) {
		if (!this.settingsFit()) return;
		const parent = path(this.conversation).at(-1)?.id ?? "";
		const said = { ...this.said, content };
		type(this.box, ""); // while it is the draft of what is shown
		this.attachments.set([]);
		this.ask(parent, said);
	}

	/** Ask whether a text is what a tool returned: a message would leave the call without a result. */
	askWhatItIs(call, content) {
		const answer = work => () => {
			this.asked.hidden = true;
			work();
		};
		const fill = answer(() => {
			type(this.box, "");
			call.fill(content);
		});
		const result = small("Send it as the result", fill, "", "small main");
		const say = answer(() => this.sendMessage(content));
		const told = `The model waits for the result of ${call.name}.`;
		this.asked.replaceChildren(told, result, small("Send it as a message", say));
		this.asked.hidden = false;
		result.focus();
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
		this.drawList();
		this.box.focus();
		await ended;
		this.draw();
		this.drawList();
		const view = this.view(reply);
		if (!view) return;
		this.hear(reply);
		if (document.activeElement === this.box && this.box.value === "") view.call?.focus();
	}

	stop() {
		this.runs.stop(this.conversation.id);
	}

	view(reply) {
		return this.views.get(reply.id);
	}

	/** Have screen readers say an answer. */
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
		this.chips.draw();
		this.welcome.element.hidden = shown.length > 0 || this.coming !== "";
		this.meter.draw();
		this.looks.checked = conversation.settings.logprobs;
		this.title.textContent = conversation.title || "New chat";
		this.sendButton.hidden = this.runs.of(conversation.id) !== undefined;
		this.stopButton.hidden = !this.sendButton.hidden;
	}

	/** Note whether the user is at the end, which only who moves up leaves. */
	follow() {
		const { scrollHeight, scrollTop, clientHeight } = this.log;
		this.following &&= scrollTop >= this.top;
		this.following ||= scrollHeight - scrollTop - clientHeight < NEAR;
		this.top = scrollTop;
	}

	/** Stay at the end as long as the user does, unless a list of alternatives is open. */
	toEnd() {
		if (!this.welcome.element.hidden || !this.following || document.querySelector(":popover-open")) return;
		this.log.scrollTop = this.log.scrollHeight;
	}
}

function startOf(begun) {
	return { ...emptyAnswer(), ...structuredClone(begun) };
}

/** A part beside the conversation that one may close; on a narrow screen it covers the conversation. */
class Panel {
	constructor(name, label, content, open, opened = () => {}) {
		this.content = content;
		this.opened = opened;
		this.toggle = iconButton(name, label, () => this.show(content.hidden));
		this.show(open);
	}

	show(open) {
		this.content.hidden = !open;
		this.toggle.ariaExpanded = String(open);
		if (open) this.opened();
	}
}

function isWide() {
	return matchMedia("(min-width: 60rem)").matches;
}
