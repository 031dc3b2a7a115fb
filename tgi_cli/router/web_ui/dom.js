// Building blocks of the page. Text reaches the document as text nodes only.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. Of `properties`, functions named `on...` listen, `class` and names with a hyphen
 * are attributes, and others are properties; null and false are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class" || name === "for" || name === "role" || name.includes("-"))
      element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** An icon of those in index.html. */
export function icon(name) {
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** Change an icon button's icon and its name. */
export function setIcon(button, name, label) {
  button.querySelector("use").setAttribute("href", `#i-${name}`);
  button.setAttribute("aria-label", label);
  button.title = label;
}

/** A button that shows an icon; its name is for screen readers and the tooltip. */
export function iconButton(name, label, onclick) {
  return h(
    "button",
    { class: "icon-button", type: "button", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/** Tell screen readers what has happened. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Save a text as a file of the user's. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A number with the separators of the user's language. */
export const number = (value, digits = 0) =>
  value.toLocaleString(undefined, { maximumFractionDigits: digits, minimumFractionDigits: digits });

/** Seconds as a short text: 84 ms, 1.2 s, 3 min. */
export function duration(seconds) {
  if (seconds < 0.0995) return `${number(seconds * 1000, seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 100) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${number(seconds / 60)} min`;
  return seconds < 129_600 ? `${number(seconds / 3600)} h` : `${number(seconds / 86_400)} days`;
}
