/** What a tab remembers until it is closed, for each server by itself; nothing where site data is blocked. */

import { BASE } from "./api.js";

const nameOf = what => `mlxsrv ${BASE.pathname} ${what}`;

/** @returns {string} "" if there is nothing */
export function recall(what) {
	try {
		return sessionStorage.getItem(nameOf(what)) ?? "";
	} catch {
		return "";
	}
}

export function remember(what, text) {
	try {
		sessionStorage.setItem(nameOf(what), text);
	} catch {}
}
