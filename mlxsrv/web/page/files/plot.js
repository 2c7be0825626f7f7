/** A small live plot of one number, drawn as SVG. */

import { el, svg } from "./dom.js";

export const WINDOW = 120_000; // milliseconds
const GAP = 3_000; // the line does not lead across a longer time without a value
const WIDTH = 240;
const HEIGHT = 48;

export class Plot {
	/** @param {number} least what the top is worth at least */
	constructor(title, format, least) {
		this.title = title;
		this.format = format;
		this.least = least;
		this.samples = []; // times and values
		this.now = el("strong");
		this.most = el("small");
		this.line = svg("path", {});
		this.area = svg("path", { class: "area" });
		const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
		this.picture = svg("svg", { viewBox, preserveAspectRatio: "none", role: "img" });
		this.picture.append(this.area, this.line);
		const axis = el("p.bar", el("small", "2 minutes ago"), el("small", "now"));
		this.element = el("div.plot.box", el("h3", title), el("p.bar", this.now, this.most), this.picture, axis);
	}

	/** Take the value of a moment in milliseconds, or null, and draw. */
	add(time, value) {
		if (value !== null) this.samples.push({ time, value });
		this.samples = this.samples.filter(each => each.time > time - WINDOW);
		const values = this.samples.map(each => each.value);
		const most = Math.max(...values);
		const { title, format } = this;
		this.now.textContent = value === null ? "–" : format(value);
		this.most.textContent = most > 0 ? `up to ${format(most)}` : "";
		const range = values.length && `; from ${format(Math.min(...values))} to ${format(most)} in the last 2 minutes`;
		this.picture.ariaLabel = `${title}: ${value === null ? "no value" : `${format(value)} now`}${range || ""}`;
		const lines = this.lines(time, Math.max(this.least, most) || 1);
		this.line.setAttribute("d", lines.map(points => `M${points.map(({ x, y }) => `${x},${y}`).join("L")}`).join(""));
		const below = points => `M${points[0].x},${HEIGHT}${points.map(({ x, y }) => `L${x},${y}`).join("")}V${HEIGHT}Z`;
		this.area.setAttribute("d", lines.map(below).join(""));
	}

	/** The points of each line: no line leads across a gap. */
	lines(now, most) {
		let last = -Infinity;
		/** @type {{ x: string, y: string }[][]} */
		const lines = [];
		for (const { time, value } of this.samples) {
			if (time - last > GAP) lines.push([]);
			last = time;
			const x = (WIDTH * (1 - (now - time) / WINDOW)).toFixed(1);
			lines.at(-1)?.push({ x, y: (1 + (HEIGHT - 2) * (1 - value / most)).toFixed(1) });
		}
		return lines;
	}
}
