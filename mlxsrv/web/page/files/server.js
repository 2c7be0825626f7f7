/** The view "Server", read once a second while it is shown. */

import { button, el, isNews, section, table } from "./dom.js";
import { count, joined, seconds } from "./figures.js";
import { ModelTable } from "./loading.js";
import { MemoryBar } from "./memory.js";
import { Plot, WINDOW } from "./plot.js";

const PERIOD = 1000; // milliseconds between two looks
const PATIENCE = 5000; // milliseconds that a look may take

const STATES = {
	ok: "Ready",
	loading: "Loading the model",
	draining: "Shutting down",
	failed: "Failed",
	stalled: "The engine is stalled",
};

export class View {
	constructor(context) {
		this.api = context.api;
		this.next = 0; // the timer of the next look
		this.looking = new AbortController();
		this.figures = new Figures();
		this.state = el("span", { role: "status" }, "…");
		this.stalled = el("span.quiet");
		this.again = button("Try again", () => this.begin(), { hidden: true });
		this.models = new ModelTable(context, () => this.begin());
		this.memory = new MemoryBar();
		this.errors = new ErrorTable();
		this.element = el(
			"section.server",
			{ ariaLabel: "Server" },
			el("div.state.line", el("h1", "Server"), this.state, this.stalled, this.again),
			this.figures.element,
			this.memory.element,
			this.models.element,
			this.errors.element,
		);
		document.addEventListener("visibilitychange", () => this.begin());
	}

	shown() {
		this.begin();
	}

	/** Look now, and then once a second as long as somebody sees it. */
	begin() {
		clearTimeout(this.next);
		this.looking.abort();
		if (this.element.inert || document.hidden) return;
		this.looking = new AbortController();
		this.look(this.looking.signal);
	}

	/** @param {AbortSignal} ended another look has begun, or the tab is hidden */
	async look(ended) {
		const error = await this.api
			.health(AbortSignal.any([ended, AbortSignal.timeout(PATIENCE)]))
			.then(health => this.draw(health))
			.catch(thrown => thrown);
		if (ended.aborted) return;
		if (error) this.miss(error);
		this.again.hidden = error?.status !== 401;
		if (this.again.hidden) this.next = setTimeout(() => this.begin(), Math.max(PERIOD, error?.pause ?? 0));
	}

	draw(health) {
		const stalled = health.engine.stalled_seconds;
		const { status, reason } = health;
		this.say(STATES[status] + (reason ? `: ${reason}` : ""), ["ok", "loading"].includes(status));
		this.stalled.textContent = stalled ? `One step has taken ${seconds(stalled)} so far.` : "";
		this.figures.add(health);
		this.memory.update(health.memory);
		this.models.update(health.models);
		this.errors.update(health.errors);
	}

	miss(error) {
		const lost = error.name === "TimeoutError" || error.status === 0;
		this.say(lost ? "The server does not answer; trying again" : error.message, false);
		this.stalled.textContent = "";
		this.figures.skip();
	}

	/** Change the state only when it is another, so that screen readers say it once. */
	say(text, well) {
		if (this.state.textContent !== text) this.state.textContent = text;
		this.state.classList.toggle("error", !well);
	}
}

class Figures {
	constructor() {
		this.plots = {
			rows: new Plot("Running", String, 1),
			waiting: new Plot("Queued", String, 1),
			speed: new Plot("Tokens per second", count, 1),
			ttft: new Plot("Time to first token", seconds, 0),
			hits: new Plot("Prompt cache hits", percent, 1),
		};
		this.totals = el("p.quiet");
		const plots = Object.values(this.plots).map(plot => plot.element);
		this.element = section("Requests", el("div.tiles", plots), this.totals);
		this.before = null; // time and tokens of the last look
		this.history = []; // tokens that were read and cached, in the last two minutes
	}

	add({ models, requests }) {
		const now = performance.now();
		const sum = of => models?.reduce((all, model) => all + of(model), 0) ?? null;
		const tokens = sum(model => model.engine.tokens ?? 0);
		this.draw(now, {
			rows: sum(model => model.rows),
			waiting: sum(model => model.waiting_for_row),
			speed: this.speed(now, tokens),
			ttft: requests.ttft?.median ?? null,
			hits: this.hits(now, requests),
		});
		this.totals.textContent = described(requests);
	}

	skip() {
		this.before = null;
		this.draw(performance.now(), {});
	}

	draw(now, values) {
		for (const [name, plot] of Object.entries(this.plots)) plot.add(now, values[name] ?? null);
	}

	/** The tokens per second since the look before, or null. */
	speed(time, tokens) {
		const before = this.before;
		this.before = tokens === null ? null : { time, tokens };
		if (!before || tokens === null || tokens < before.tokens) return null; // or a model has gone
		return (1000 * (tokens - before.tokens)) / (time - before.time);
	}

	/** The share of prompts' tokens from the cache. */
	hits(now, { prompt_tokens: read, cached_tokens: cached }) {
		const history = this.history;
		if (read < (history.at(-1)?.read ?? 0)) history.length = 0; // the server is another
		history.push({ time: now, read, cached });
		while (history[0].time < now - WINDOW) history.shift();
		const more = read - history[0].read;
		return more > 0 ? (cached - history[0].cached) / more : null;
	}
}

class ErrorTable {
	constructor() {
		this.rows = el("tbody");
		this.none = el("p.quiet", "No request has failed since the start.");
		this.table = table("Last errors", ["Time", "Request", "Status", "Code", "Model", "Request id"], this.rows);
		this.element = section("Last errors", this.none, this.table);
		this.update([]);
	}

	update(errors) {
		if (!isNews(this, errors)) return;
		this.none.hidden = errors.length > 0;
		this.table.hidden = !this.none.hidden;
		this.rows.replaceChildren(...errors.map(errorRow));
	}
}

function errorRow({ time, method, route, status, code, model, request_id }) {
	const at = new Date(time);
	const cells = [
		el("time", { dateTime: time, title: at.toLocaleString() }, at.toLocaleTimeString()),
		`${method} ${route || "no such route"}`,
		status || "–",
		el("code", code),
		model || "–",
		el("code", request_id),
	];
	return el("tr", ...cells.map(cell => el("td", cell)));
}

function described({ ended, failed, prompt_tokens, completion_tokens, ttft }) {
	return joined([
		`Since the start ${count(ended)} requests, ${count(failed)} failed`,
		`${count(prompt_tokens)} tokens read, ${count(completion_tokens)} written`,
		ttft && `95 % of first tokens within ${seconds(ttft.p95)}`,
	]);
}

function percent(value) {
	return `${Math.round(100 * value)} %`;
}
