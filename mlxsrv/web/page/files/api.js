/** The server's API, with the API key if there is one. */

/** Where the server's paths begin: the server may be mounted below another app. */
export const BASE = new URL("..", import.meta.url);

/** An error that the server sent; or that there is no connection to it, with status 0. */
class APIError extends Error {
	/** @param {any} [body] what the server answered, if that is JSON */
	constructor(status, message, body) {
		super(message);
		this.status = status;
		this.body = body;
		this.pause = 0; // milliseconds after which the server wants to be asked again
	}
}

export class API {
	constructor(keys) {
		this.keys = keys;
		/** Is called if the server lacks the model of a request: it may be another server. */
		this.missing = () => {};
	}

	get(path, signal) {
		return this.ask("GET", path, undefined, { signal });
	}

	post(path, body = {}, options = {}) {
		return this.ask("POST", path, body, options);
	}

	/** Read the health, which a server that is not well tells with a 503. */
	health(signal) {
		return this.get("health?verbose=1", signal).catch(error => {
			if (error.body?.requests) return error.body;
			throw error;
		});
	}

	delete(path) {
		return this.ask("DELETE", path);
	}

	/** Ask, and read the answer: below `/api`, without the envelope that some answers have. */
	async ask(method, path, body, options) {
		const answer = await (await this.send(method, path, body, options)).json();
		return answer?.success === true && "data" in answer ? answer.data : answer;
	}

	/** Ask for a stream, and read the JSON of each line: of an event or, in Ollama's API, alone. */
	async *stream(path, body, signal) {
		const response = await this.send("POST", path, body, { signal });
		try {
			for await (const line of linesOf(response.body)) {
				const data = line.replace(/^data: /, "");
				if (data === "[DONE]") return;
				if (!data.startsWith("{")) continue; // a comment, which keeps the connection alive
				const found = JSON.parse(data);
				if (found.error) throw failure(found.error.status ?? 500, found);
				yield found;
			}
		} catch (error) {
			if (error instanceof APIError || signal.aborted) throw error;
			throw new APIError(0, "The connection to the server broke");
		}
	}

	/** Send a request; again with a key of the user's if the server wants one. @param {RequestInit} [options] of `fetch` */
	async send(method, path, body, options) {
		while (true) {
			const { key } = this.keys;
			const headers = new Headers();
			if (body) headers.set("Content-Type", "application/json");
			if (key !== null) headers.set("Authorization", `Bearer ${key}`);
			const response = await fetch(new URL(path, BASE), {
				...options,
				method,
				headers,
				body: body && JSON.stringify(body),
				credentials: "omit",
				cache: "no-store",
				redirect: "error",
			}).catch(error => {
				throw options?.signal?.aborted ? error : new APIError(0, "The server cannot be reached");
			});
			if (response.ok) return response;
			const error = failure(response.status, await response.json().catch(() => null));
			error.pause = 1000 * Number(response.headers.get("Retry-After")) || 0;
			if (error.body?.error?.code === "model_not_found") this.missing();
			if (error.status !== 401) throw error;
			const changed = this.keys.key !== key; // another request has asked meanwhile
			if (!changed && !(await this.keys.ask(key !== null))) throw error;
		}
	}
}

/** The error that a body tells: an object or, in Ollama's API, a text. */
function failure(status, body) {
	const error = body?.error;
	return new APIError(status, inWords(error?.message ?? error ?? `The server answered ${status}`), body);
}

/** Write an error as a sentence. */
function inWords(message) {
	const text = String(message);
	return /^[a-z]+[ :]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
}

async function* linesOf(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		while (true) {
			const { done, value } = await reader.read();
			if (done) return;
			const lines = (rest + value).split("\n");
			rest = lines.pop() ?? "";
			yield* lines;
		}
	} finally {
		await reader.cancel().catch(() => {}); // the server ends the request, and its row is free
	}
}
