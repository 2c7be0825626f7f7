/** The models of the server, and buttons that load, unload and pull. */

import { attempt, el, errorLine, lineForm, section, small, table } from "./dom.js";
import { bytes, count } from "./figures.js";
import { isMoving, stateOf } from "./models.js";

const FACTS = ["State", "Size", "KV cache", "Context", "Running", "Requests"];

export class ModelTable {
	constructor(context, look) {
		this.context = context;
		this.look = look;
		this.states = []; // the models that are loaded or wanted, as /health tells them
		this.rows = new Map(); // by model
		this.body = el("tbody");
		this.error = errorLine();
		this.element = section(
			"Models",
			table("Models", ["Model", "", ...FACTS], this.body),
			this.error,
			new PullForm(context).element,
		);
		context.models.addEventListener("change", () => this.draw());
	}

	/** @param {any[] | undefined} states undefined: they are not known now */
	update(states) {
		if (!states) return;
		this.states = states;
		this.context.models.take(states).catch(() => {});
		this.draw();
	}

	draw() {
		const models = this.context.models.all.toSorted((one, other) => one.id.localeCompare(other.id));
		const names = models.map(({ id }) => id);
		if (names.join("\n") !== [...this.rows.keys()].join("\n")) {
			this.rows = new Map(names.map(id => [id, this.rows.get(id) ?? new ModelRow(id, this)]));
			this.body.replaceChildren(...[...this.rows.values()].map(({ element }) => element));
		}
		for (const model of models) {
			const state = this.states.find(({ id }) => id === model.id);
			this.rows.get(model.id)?.update(model, state);
		}
	}
}

class ModelRow {
	constructor(id, table) {
		this.id = id;
		this.table = table;
		this.busy = false;
		this.loaded = false;
		this.cells = FACTS.map(() => el("td"));
		this.button = small("Load", () => this.change());
		this.element = el("tr", el("th", { scope: "row" }, id), el("td", this.button), this.cells);
	}

	/** Load the model or, if it is loaded, unload it. */
	async change() {
		if (this.button.ariaDisabled === "true") return;
		const { id, loaded, table } = this;
		this.busy = true;
		this.label(loaded ? "Unloading…" : "Loading…", true);
		await attempt(table.error, async () => {
			const { api, models, announce } = table.context;
			const keep_alive = loaded ? 0 : undefined;
			await api.post("api/generate", { model: id, stream: false, keep_alive }).catch(error => {
				throw new Error(`${id}: ${error.message}`);
			});
			await models.refresh();
			const there = models.all.find(model => model.id === id)?.loaded;
			if (loaded && there) announce(`${id} goes when nothing needs it any more`);
			else announce(`${id} is ${there ? "loaded" : "unloaded"}`);
		});
		this.busy = false;
		table.draw();
		table.look();
	}

	/** @param {any} state undefined: the model is neither loaded nor wanted */
	update(model, state) {
		this.loaded = model.loaded;
		const pinned = model.loaded && !!state?.pinned;
		const size = state?.bytes ?? model.size;
		const texts = [
			stateOf(model) + (pinned ? ", pinned" : ""),
			size ? bytes(size) : "not here yet",
			kvCache(state?.kv_cache ?? model.kv_cache),
			model.context_length ? count(model.context_length) : "–",
			state ? `${state.rows} of ${state.max_rows}` : "–",
			state?.requests ?? "–",
		];
		this.cells.forEach((cell, index) => (cell.textContent = texts[index]));
		if (this.busy) return;
		this.label(this.loaded ? "Unload" : "Load", pinned || isMoving(model));
		const why = pinned ? "It stays loaded: --pin names it, or it has an SAE" : "It is on its way";
		this.button.title = this.button.ariaDisabled === "true" ? why : "";
	}

	/** The button keeps the focus while it cannot be pressed. */
	label(text, disabled) {
		this.button.textContent = text;
		this.button.ariaLabel = `${text} ${this.id}`;
		this.button.ariaDisabled = String(disabled);
	}
}

/** Say what a request takes in the layers of each kind. */
function kvCache(costs) {
	const kinds = costs?.map(({ kind, bytes_per_token, window, bytes: all }) => {
		if (kind === "state") return `${bytes(all)} per request`;
		const each = `${bytes(bytes_per_token)} per token`;
		if (kind === "window") return `${each} of the last ${count(window)}`;
		if (kind === "first") return `${each} of the first ${count(window)}`;
		return kind === "draft" ? `${each} for the draft` : each;
	});
	return kinds?.join(" + ") || "–";
}

class PullForm {
	constructor(context) {
		this.context = context;
		this.running = null;
		const placeholder = "mlx-community/Qwen3-4B-4bit";
		this.name = el("input", { placeholder, required: true, spellcheck: false });
		this.bar = el("progress", { hidden: true, ariaLabel: "Download" });
		this.detail = el("span.quiet");
		this.error = errorLine();
		this.form = lineForm("Download a model from the Hugging Face hub", this.name, "Pull", () => {
			if (this.running) this.running.abort();
			else attempt(this.error, () => this.pull(this.name.value.trim()));
		});
		this.form.append(this.bar, this.detail);
		this.element = el("div.pull", this.form, this.error);
	}

	async pull(model) {
		const { api, models, announce } = this.context;
		const { signal } = (this.running = new AbortController());
		const files = new Map();
		this.show("Stop");
		try {
			for await (const event of api.stream("api/pull", { model }, signal)) {
				if (event.digest) files.set(event.digest, event);
				this.progress([...files.values()], event.status);
			}
			await models.refresh();
			announce(`${model} is here`);
		} catch (error) {
			if (!signal.aborted) throw error;
		} finally {
			this.running = null;
			this.show("Pull");
		}
	}

	show(next) {
		this.form.querySelector("button").textContent = next;
		this.name.readOnly = next === "Stop";
		this.bar.hidden = !this.name.readOnly;
		this.bar.removeAttribute("value");
		this.detail.textContent = "";
	}

	progress(files, status) {
		const sum = name => files.reduce((all, file) => all + (file[name] ?? 0), 0);
		const [total, done] = [sum("total"), sum("completed")];
		if (total > 0) this.bar.value = done / total;
		this.detail.textContent = total ? `${bytes(done)} of ${bytes(total)}` : status;
	}
}
