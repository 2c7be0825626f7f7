/** The server's memory: a bar, and what its parts are. */

import { el, section } from "./dom.js";
import { bytes } from "./figures.js";

const PARTS = { weights: "Weights", rows: "Running", reading: "Prefill", kept: "Prompt cache", free: "Free" };

export class MemoryBar {
	constructor() {
		this.parts = Object.entries(PARTS).map(([name, label], index) => {
			const [part, key, size] = [el("span"), el("span"), el("b")];
			for (const each of [part, key]) each.style.setProperty("--turn", String(index * 100));
			return { name, part, size, line: el("li", key, `${label} `, size) };
		});
		this.bar = el("div.memory", { role: "img" }, ...this.parts.map(({ part }) => part));
		this.legend = el("ul.legend.line", ...this.parts.map(({ line }) => line));
		this.device = el("p.quiet");
		this.element = section("Memory", this.bar, this.legend, this.device);
	}

	/** @param {Record<string, number> | undefined} memory in bytes; undefined: it is not known now */
	update(memory) {
		if (!memory) return;
		const { limit, budget, rows, reading, kept, active, cached, peak } = memory;
		const counts = { ...memory, free: Math.max(0, budget - rows - reading - kept) };
		for (const { name, part, size } of this.parts) {
			part.style.flexGrow = counts[name];
			part.hidden = counts[name] === 0;
			size.textContent = bytes(counts[name]);
		}
		const texts = this.parts.map(({ line }) => line.textContent);
		this.bar.ariaLabel = `Memory, of ${bytes(limit)}: ${texts.join(", ")}`;
		this.device.textContent =
			`The limit is ${bytes(limit)}. MLX has ${bytes(active)} in use, ` +
			`keeps ${bytes(cached)} for reuse, and had ${bytes(peak)} at most.`;
	}
}
