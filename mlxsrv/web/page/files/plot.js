/** A small live plot of one number, drawn as SVG. */

import { el } from "./dom.js";

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
		this.line = shape("path", {});
		const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
		this.picture = shape("svg", { viewBox, preserveAspectRatio: "none", role: "img" });
		this.picture.append(this.line);
		this.element = el("div.plot.box", el("h3", title), el("p.bar", this.now, this.most), this.picture);
	}

	/** Take the value of a moment in milliseconds, or null, and draw. */
	add(time, value) {
		if (value !== null) this.samples.push({ time, value });
		this.samples = this.samples.filter(each => each.time > time - WINDOW);
		const values = this.samples.map(each => each.value);
		const most = Math.max(...values);
		const { title, format } = this;
		this.now.textContent = value === null ? "–" : format(value);
		this.most.textContent = values.length ? `up to ${format(most)}` : "";
		const range = values.length && `; from ${format(Math.min(...values))} to ${format(most)} in the last 2 minutes`;
		this.picture.ariaLabel = `${title}: ${value === null ? "no value" : `${format(value)} now`}${range || ""}`;
		this.line.setAttribute("d", this.path(time, Math.max(this.least, most) || 1));
	}

	path(now, most) {
		let last = -Infinity;
		const points = this.samples.map(({ time, value }) => {
			const x = WIDTH * (1 - (now - time) / WINDOW);
			const y = 1 + (HEIGHT - 2) * (1 - value / most);
			const step = time - last > GAP ? "M" : "L";
			last = time;
			return `${step}${x.toFixed(1)},${y.toFixed(1)}`;
		});
		return points.join("");
	}
}

function shape(tag, attributes) {
	const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	return element;
}
