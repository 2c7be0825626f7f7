/** The answers that are generated: at most one of each conversation. */

import { generate } from "./generate.js";

const SAVES = 2000; // milliseconds between two saves of an answer
const PATIENCE = 700; // milliseconds before the page asks what an answer waits for

export class Runs {
	constructor(chat) {
		this.chat = chat;
		this.byConversation = new Map();
		addEventListener("pagehide", () => {
			for (const [id, { reply }] of this.byConversation) {
				this.stop(id); // the browser ends it anyway, which would be an error
				this.saveText(id, reply);
			}
		});
	}

	of(id) {
		return this.byConversation.get(id)?.reply;
	}

	/** Stop the answer of a conversation. What is deleted after that stays deleted. */
	async stop(id) {
		const run = this.byConversation.get(id);
		run?.controller.abort();
		await run?.ended;
	}

	/** Generate an answer of a conversation, and save it; another one is stopped. */
	start(id, reply, body) {
		this.stop(id);
		const controller = new AbortController();
		const ended = this.generate(id, reply, body, controller.signal);
		this.byConversation.set(id, { reply, controller, ended });
		this.lookWhileWaiting(reply);
		return ended;
	}

	async generate(id, reply, body, signal) {
		let saved = performance.now();
		let begun = false;
		const changed = () => {
			if (!begun && reply.answer.firstToken !== null) {
				begun = true;
				if (this.chat.models.unsettled) this.chat.models.look().catch(() => {}); // its model is here
			}
			this.chat.view(reply)?.update();
			if (performance.now() - saved < SAVES) return;
			saved = performance.now();
			this.saveText(id, reply);
		};
		await generate(this.chat.api, body, signal, changed, reply.answer);
		if (this.of(id) === reply) this.byConversation.delete(id);
		this.chat.store.saveMessage(id, reply);
	}

	/** Save what there is so far, without the probabilities: they are many. */
	saveText(id, reply) {
		this.chat.store.saveMessage(id, { ...reply, answer: { ...reply.answer, tokens: [] } });
	}

	/** Know what an answer waits for: its model may be on its way. The server is asked only while somebody sees it. */
	async lookWhileWaiting(reply) {
		const { answer } = reply;
		let pause = PATIENCE;
		while (true) {
			await new Promise(resolve => setTimeout(resolve, pause));
			if (answer.finish !== null || answer.firstToken !== null) return;
			pause = 3 * PATIENCE;
			const waiting = this.chat.view(reply)?.waiting;
			if (document.hidden || !waiting?.checkVisibility({ visibilityProperty: true })) continue;
			const error = await this.chat.models.look().catch(thrown => thrown);
			pause = Math.max(pause, error?.pause ?? 0);
		}
	}
}
