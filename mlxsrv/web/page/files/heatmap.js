/** Which features fire where: a table of tokens and features, coloured by activation. */

import { BASE } from "./api.js";
import { attempt, button, el, errorLine, section, small } from "./dom.js";
import { query } from "./sae.js";
import { named, visible } from "./text.js";

const TOP = 50; // features that are read for each token
const COLUMNS = 12;
const MOST_TOKENS = 999; // kept: an unusual number, by which a tab knows what another has switched on

/**
 * Have a model answer. Read prompt and answer once more while the monitor watches, and leave the
 * monitor as it was.
 */
async function read(api, body) {
	const { model, steering, steering_mode } = body;
	const configure = (state, options) => api.post("api/monitoring/configure", { model, ...state }, options);
	const { features, top_k, history_size, ...state } = await api.get(`api/monitoring${query(model)}`);
	// What another tab has switched on goes off.
	const enabled = state.enabled && (features.length > 0 || top_k !== TOP || history_size !== MOST_TOKENS);
	// It is sent even if the tab is closed.
	const putBack = () => configure({ enabled, features, top_k, history_size }, { keepalive: true });
	const leave = () => putBack().catch(() => {});
	addEventListener("pagehide", leave);
	// Where somebody watches already, other features would end the statistics.
	const watched = enabled ? {} : { features: [], top_k: TOP };
	try {
		await configure({ enabled: true, history_size: MOST_TOKENS, ...watched });
		const answer = await api.post("v1/chat/completions", { ...body, return_token_ids: true });
		const prompt = answer.prompt_token_ids;
		const echo = await api.post("v1/completions", {
			model,
			prompt: [...prompt, ...answer.choices[0].token_ids],
			echo: true,
			logprobs: 0,
			max_tokens: 0,
			steering,
			steering_mode,
		});
		const path = `api/monitoring/history${query(model)}&limit=${MOST_TOKENS}&request_id=`;
		const entries = await api.get(path + echo.id);
		if (!entries.length) throw new Error("Something has switched the monitor off. Read it again.");
		for (const { id } of [answer, echo]) await api.delete(path + id);
		await putBack();
		return {
			tokens: echo.choices[0].logprobs.tokens, // of the prompt and the answer
			prompt: prompt.length,
			// Activations of features, by token.
			seen: new Map(entries.map(each => [each.token_position, each.activations])),
		};
	} catch (error) {
		await leave(); // the first error says more
		throw error;
	} finally {
		removeEventListener("pagehide", leave);
	}
}

/** Have tabs take turns, where the browser has locks: one that ends switches the monitor off. */
const inTurn = work =>
	new Promise((done, failed) => {
		const begin = () => work().then(done, failed);
		(navigator.locks?.request(`monitor of ${BASE}`, begin) ?? Promise.reject()).catch(begin);
	});

export class HeatMap {
	/** `body` makes the request for an answer; `choose` is called for a feature. */
	constructor(api, body, choose) {
		this.choose = choose;
		this.asked = null; // the request whose activations are wanted
		const error = errorLine();
		this.table = el("table");
		this.frame = el("div.heat.box", { tabIndex: 0, role: "region", ariaLabel: "Heat map", hidden: true }, this.table);
		const run = async steered => {
			for (const each of buttons) each.disabled = true;
			await attempt(error, async () => {
				const asked = (this.asked = body(steered));
				const found = await inTurn(() => read(api, asked));
				if (asked === this.asked) this.show(found);
			});
			for (const each of buttons) each.disabled = false;
		};
		const buttons = [
			button("Read the unsteered answer", () => run(false)),
			button("Read the steered answer", () => run(true)),
		];
		const explained = `The strongest ${TOP} features of each token, before steering. Press a feature to steer with it.`;
		const line = el("div.line", buttons);
		this.element = section("Which features fire where", el("p.quiet", explained), line, error, this.frame);
	}

	clear() {
		this.asked = null;
		this.frame.hidden = true;
	}

	show({ tokens, prompt, seen }) {
		const columns = strongest(seen);
		const most = Math.max(...columns.values(), 1e-9);
		const heads = [...columns].map(([feature, value]) =>
			el(
				"th",
				{ scope: "col" },
				small(feature, () => this.choose(feature, value), `Add feature ${feature}`),
			),
		);
		const rows = tokens.map((token, at) => {
			const cells = [...columns.keys()].map(feature => {
				const value = seen.get(at)?.[feature];
				const cell = el("td", value?.toFixed(1));
				cell.style.setProperty("--heat", `${45 * Math.max(0, (value ?? 0) / most)}%`);
				return cell;
			});
			return el("tr", el("th.mono", { scope: "row" }, visible(named(token))), cells);
		});
		const group = (title, part) => {
			const head = { scope: "rowgroup", colSpan: columns.size + 1 };
			return el("tbody", el("tr", el("th", head, title)), part);
		};
		this.frame.hidden = false;
		this.table.replaceChildren(
			el("thead", el("tr", el("th", { scope: "col" }, "Token"), heads)),
			group("Question", rows.slice(0, prompt)),
			group("Answer", rows.slice(prompt)),
		);
	}
}

/** The highest activations of the features whose activations have the largest sums. */
function strongest(seen) {
	const found = new Map();
	for (const [at, active] of seen) {
		if (at === 0) continue; // many models give it huge activations, which say nothing about the text
		for (const [feature, value] of Object.entries(active)) {
			const { sum, most } = found.get(+feature) ?? { sum: 0, most: 0 };
			found.set(+feature, { sum: sum + value, most: Math.max(most, value) });
		}
	}
	const sorted = [...found].sort(([, one], [, other]) => other.sum - one.sum);
	return new Map(sorted.slice(0, COLUMNS).map(([feature, { most }]) => [feature, most]));
}
