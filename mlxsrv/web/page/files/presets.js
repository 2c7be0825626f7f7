/** Features of the demo model's SAE that do what docs/steering.md says. */

/** Feature, name, value, effect, question. @type {[number, string, number, string, string][]} */
const DEMO = [
	[
		1456,
		"not knowing",
		9,
		"7 of 20 answers that did not say so before now say that it knows nothing of the subject",
		"Who are you?",
	],
	[239, "brevity", 8, "16 of 20 answers end early", "How many requests run together?"],
	[1489, "counting", 8.5, "11 of 20 answers count, badly and without end", "Thanks!"],
	[86, "the health check", 9, "11 of 20 answers mention GET /health", "Is it free software?"],
	[545, "Starlette", 8, "7 of 20 answers mention Starlette", "What is mlxsrv?"],
];

/** @param {string} [origin] of an SAE, as /api/saes tells it */
export function presetsOf(origin) {
	const rows = origin === "demo" ? DEMO : [];
	return rows.map(([feature, name, value, effect, question]) => ({
		name,
		values: new Map([[feature, value]]),
		question,
		effect,
	}));
}
