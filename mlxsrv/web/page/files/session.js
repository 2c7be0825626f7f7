/** What the browser remembers for each server by itself: nothing where site data is blocked. */

import { BASE } from "./api.js";

const nameOf = what => `mlxsrv ${BASE.pathname} ${what}`;
const storage = lasting => (lasting ? localStorage : sessionStorage);

/** @param {boolean} [lasting] else for this tab, until it is closed @returns {string} "" if there is nothing */
export function recall(what, lasting) {
	try {
		return storage(lasting).getItem(nameOf(what)) ?? "";
	} catch {
		return "";
	}
}

export function remember(what, text, lasting = false) {
	try {
		if (text) storage(lasting).setItem(nameOf(what), text);
		else storage(lasting).removeItem(nameOf(what));
	} catch {}
}
