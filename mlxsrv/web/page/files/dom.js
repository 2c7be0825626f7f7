/** Make elements. Texts become text nodes: nothing here reads HTML. */

/**
 * Make an element.
 * @param {string} tag its name, with classes behind dots: "button.quiet"
 * @param {any[]} children behind an object of properties, if there is one; what is no property is an attribute
 * @returns {any}
 */
export function el(tag, ...children) {
	const props = children[0]?.constructor === Object ? children.shift() : {};
	const [name, ...classes] = tag.split(".");
	const element = document.createElement(name);
	if (classes.length) element.classList.add(...classes);
	for (const [key, value] of Object.entries(props)) {
		if (value === undefined || value === null) continue;
		if (key in element) Reflect.set(element, key, value);
		else element.setAttribute(key, value);
	}
	element.append(...children.flat().filter(child => (child ?? false) !== false));
	return element;
}

/** Make an element of a picture. */
export function svg(tag, attributes) {
	const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	return element;
}

/** @param {any} label a text, or a list of parts */
export function button(label, press, props = {}) {
	return el("button", { type: "button", onclick: press, ...props }, label);
}

export function small(label, press, ariaLabel, className = "small") {
	return button(label, press, { className, ariaLabel });
}

/** Make a labelled field. @param {string} [hint] is read after the label */
export function field(label, control, hint) {
	control.id ||= `field-${Math.random()}`;
	const note = hint ? el("small", { id: `${control.id}-hint` }, hint) : null;
	if (note) control.setAttribute("aria-describedby", note.id);
	return el("div.field", el("label", { htmlFor: control.id }, label), control, note);
}

/** Have a select offer these values, and show one of them. */
export function offer(select, values, shown) {
	select.replaceChildren(...values.map(value => el("option", { value }, value)));
	if (values.includes(shown)) select.value = shown;
}

export function section(title, ...children) {
	return el("section", { ariaLabel: title }, el("h2", title), ...children);
}

/** Whether a view is to show something new: what is not drawn anew keeps the focus. */
export function isNews(view, state) {
	const before = view.shown;
	view.shown = JSON.stringify(state);
	return view.shown !== before;
}

/** Make a function that has `draw` called once before the next frame, however often it is called. */
export function eachFrame(draw) {
	let asked = false;
	return () => {
		if (asked) return;
		asked = true;
		requestAnimationFrame(() => {
			asked = false;
			draw();
		});
	};
}

/** Make a text area that grows with its text: by its style or, in engines without `field-sizing`, by a script. */
export function growing(tag, props = {}) {
	const area = el(tag, props);
	if (CSS.supports("field-sizing", "content")) return area;
	const grow = () => {
		area.style.height = "auto";
		// Before it is laid out, it has no height to go by.
		if (area.scrollHeight) area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
	};
	area.addEventListener("input", grow);
	new ResizeObserver(eachFrame(grow)).observe(area); // as it is shown, too
	return area;
}

/** Put a text into a field, as if it had been typed. */
export function type(area, text) {
	area.value = text;
	area.dispatchEvent(new Event("input"));
}

export async function copy(text, announce) {
	try {
		await navigator.clipboard.writeText(text);
		announce("Copied");
	} catch {
		announce("The browser does not let this page use the clipboard");
	}
}

/** Whether a key is for an input method: of the one that ends a composition, Safari tells it by the code only. */
export function composes({ isComposing, keyCode }) {
	return isComposing || keyCode === 229;
}

/** Have a form submitted by its button and by Enter; Shift+Enter begins a line. @returns the form */
export function onEnter(form, act) {
	form.addEventListener("submit", event => {
		event.preventDefault();
		act();
	});
	form.addEventListener("keydown", event => {
		const { key, shiftKey, target } = event;
		if (key !== "Enter" || shiftKey || composes(event) || target.type !== "textarea") return;
		event.preventDefault();
		act();
	});
	return form;
}

/** Make a form of one field and a button. */
export function lineForm(label, control, verb, submit) {
	return onEnter(el("form.line", field(label, control), el("button", verb)), submit);
}

/** Make a table that keys, too, scroll sideways. A column of buttons has an empty head. */
export function table(label, heads, body) {
	const cells = heads.map(head => (head ? el("th", { scope: "col" }, head) : el("td")));
	const made = el("table", el("thead", el("tr", cells)), body);
	return el("div.scrolled", { tabIndex: 0, role: "group", ariaLabel: label }, made);
}

export function errorLine() {
	return el("p.error", { role: "alert", hidden: true });
}

/** Do what may fail, and show its error where the user looks. @returns {Promise<boolean>} whether it went well */
export async function attempt(line, work) {
	line.hidden = true;
	try {
		await work();
	} catch (error) {
		line.textContent = error.message;
		line.hidden = false;
	}
	return line.hidden;
}

/** Make an input for a file. `use` is given a promise of the JSON that it holds. */
export function fileInput(use, props = {}) {
	const input = el("input", { type: "file", accept: ".json", ...props });
	input.onchange = () => {
		const content = input.files[0].text().then(JSON.parse);
		use(
			content.catch(() => {
				throw new Error("The file is not JSON");
			}),
		);
		input.value = ""; // the same file may be chosen again
	};
	return input;
}

/** Have the browser save JSON as a file. */
export function download(name, text) {
	const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
	el("a", { href, download: name }).click();
	setTimeout(() => URL.revokeObjectURL(href), 60_000); // the browser may ask first
}
