/** Figures as texts. */

/** Join those that there are. No line begins with a dot. */
export function joined(facts) {
	return facts.filter(Boolean).join("\u00a0· ");
}

export function count(value) {
	return Math.round(value).toLocaleString("en");
}

export function seconds(value) {
	return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

export function bytes(value) {
	const units = ["B", "kB", "MB", "GB", "TB"];
	while (value >= 999.5 && units.length > 1) {
		value /= 1000;
		units.shift();
	}
	return `${Number(value.toPrecision(3))} ${units[0]}`;
}
