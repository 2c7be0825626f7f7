/** How much of the model's context a chat takes, and whether what is written has room in it. */

import { asRequest, path } from "./conversation.js";
import { el } from "./dom.js";
import { count } from "./figures.js";
import { chatBody } from "./request.js";

const LONG = 2000; // bytes of a message that is counted before it is sent

export class Meter {
	constructor(chat) {
		this.chat = chat;
		this.element = el("small.meter", { title: "Tokens of this chat, and of the model's context" });
		this.line = el("p.error.asked", { role: "status", hidden: true });
		this.counted = ""; // the request that is counted, or was last
		this.counting = false;
	}

	/** Show what the chat takes; of a long message, as the server counts it. */
	async draw() {
		const { api, conversation, models, said, settings } = this.chat;
		const shown = path(conversation);
		const usage = shown.findLast(({ answer }) => answer?.usage)?.answer.usage;
		const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
		const limit = models.current?.context_length ?? 0;
		const { length } = new TextEncoder().encode(asRequest([said])[0].content);
		// A token has a byte or more.
		if (!limit || !length || (length < LONG && used + length < limit) || settings.wrong()) {
			this.counted = "";
			return this.show(used, limit);
		}
		const body = chatBody(conversation.settings, models.chosen, asRequest([...shown, said]));
		const request = JSON.stringify(body);
		if (this.counting || request === this.counted) return;
		this.counted = request;
		this.counting = true;
		const found = await api.post("tokenize", body).catch(() => null);
		if (found && request === this.counted) this.show(found.count, found.max_model_len);
		this.counting = false;
		this.draw(); // more may be written by now
	}

	show(used, limit) {
		this.element.textContent = used && limit ? `${count(used)} of ${count(limit)}` : "";
		this.element.classList.toggle("error", used > 0.9 * limit);
		this.line.hidden = !this.counted || used < limit;
		if (this.line.hidden) return;
		const told = `Too long: ${count(used)} tokens with this message, of ${count(limit)}.`;
		this.line.textContent = `${told} Shorten it, begin a new chat, or choose another model.`;
	}
}
