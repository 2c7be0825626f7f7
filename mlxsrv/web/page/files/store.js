/** Conversations in the browser's IndexedDB: heads, which are all but the messages, and messages. */

import { BASE } from "./api.js";

/** Each path of a host may have a server of its own. */
const NAME = `mlxsrv ${BASE.pathname}`;

export class Store {
	/**
	 * @param {() => void} failed is called once, if the database fails
	 * @param {(change: { id: string, gone: boolean }) => void} changed gets what another tab has saved or deleted
	 */
	constructor(failed, changed) {
		this.failed = failed;
		this.broken = false;
		/** Conversations as this tab saved them last, by id, for a database that fails. */
		this.saved = new Map();
		this.opened = openDatabase();
		this.tabs = new BroadcastChannel(NAME);
		this.tabs.onmessage = ({ data }) => changed(data);
	}

	/** All heads, the latest first. */
	async heads() {
		const kept = (await this.read("heads", heads => heads.getAll())) ?? [];
		const own = this.broken ? this.saved.values() : [];
		const heads = new Map([...kept, ...own].map(head => [head.id, head]));
		return [...heads.values()].sort((one, other) => other.changed - one.changed);
	}

	/** The heads of conversations that have a text, in their names or their messages. */
	async search(text) {
		const has = each => (each ?? "").toLowerCase().includes(text.toLowerCase());
		const messages = (await this.read("messages", kept => kept.getAll())) ?? [];
		const found = messages.filter(({ content, answer }) => has(content) || has(answer?.content));
		const ids = new Set(found.map(({ conversation }) => conversation));
		return (await this.heads()).filter(({ id, title }) => has(title) || ids.has(id));
	}

	async load(id) {
		if (this.broken && this.saved.has(id)) return this.saved.get(id);
		const [head, kept] = await Promise.all([
			this.read("heads", heads => heads.get(id)),
			this.read("messages", messages => messages.getAll(messagesOf(id))),
		]);
		if (!head || !kept) return null;
		kept.sort((one, other) => one.number - other.number);
		return { ...head, messages: kept.map(({ conversation, ...message }) => message) };
	}

	/** Keep the head of a conversation, and those of its messages that are new. */
	async save(conversation, added = []) {
		const { messages, ...head } = conversation;
		const { id } = head;
		this.saved.set(id, conversation);
		await this.write(added.length > 0 && { id }, (heads, kept) => {
			heads.put(head);
			// After a failure the others may be missing too.
			for (const message of this.broken ? messages : added) kept.put({ ...message, conversation: id });
		});
	}

	async saveMessage(id, message) {
		await this.write({ id }, (_, kept) => kept.put({ ...message, conversation: id }));
	}

	async delete(id) {
		this.saved.delete(id);
		await this.write({ id, gone: true }, (heads, kept) => {
			heads.delete(id);
			kept.delete(messagesOf(id));
		});
	}

	/** @returns {Promise<any>} undefined if the database fails */
	async read(name, ask) {
		try {
			return await result(ask((await this.opened).transaction(name).objectStore(name)));
		} catch {
			this.fail();
		}
	}

	/** Change the database, and tell the other tabs of a change of messages. */
	async write(change, work) {
		try {
			const transaction = (await this.opened).transaction(["heads", "messages"], "readwrite");
			work(transaction.objectStore("heads"), transaction.objectStore("messages"));
			transaction.commit(); // the page may be about to close
			await new Promise((resolve, reject) => {
				transaction.oncomplete = resolve;
				transaction.onabort = () => reject(transaction.error);
			});
			if (change) this.tabs.postMessage(change);
		} catch {
			this.fail();
		}
	}

	fail() {
		if (!this.broken) this.failed();
		this.broken = true;
	}
}

async function openDatabase() {
	const request = indexedDB.open(NAME, 1);
	request.onupgradeneeded = () => {
		request.result.createObjectStore("heads", { keyPath: "id" });
		request.result.createObjectStore("messages", { keyPath: ["conversation", "id"] });
	};
	const database = await result(request);
	database.onversionchange = () => database.close(); // or this tab would block a newer page
	return database;
}

/** The keys of a conversation's messages: a list comes after each text. */
function messagesOf(id) {
	return IDBKeyRange.bound([id], [id, []]);
}

/** @returns {Promise<any>} */
function result(request) {
	return new Promise((resolve, reject) => {
		request.onsuccess = () => resolve(request.result);
		request.onerror = () => reject(request.error);
	});
}
