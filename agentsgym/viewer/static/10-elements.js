// Elements, texts and number formats for all views. Nothing here parses HTML: texts become text nodes.

const SVG = "http://www.w3.org/2000/svg";

// Characters that are invisible or change the direction of text: control characters, bidirectional and zero-width
// marks, line separators, tags, lone surrogates. Newlines and tabs are left unchanged.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\u{e0000}-\\u{e007f}\\ud800-\\udfff]",
  "gu",
);

/** Replace invisible characters with visible symbols: ESC with ␛, others with ⟪U+202E⟫. */
function visible(text) {
  return String(text).replace(INVISIBLE, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "␡";
    return `⟪U+${code.toString(16).toUpperCase().padStart(4, "0")}⟫`;
  });
}

/** Set properties, listeners (onclick: function) and attributes of a node; null values are skipped. */
function assign(node, options) {
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (["hidden", "checked", "value", "disabled", "open", "tabIndex", "selected"].includes(name))
      node[name] = value;
    else node.setAttribute(name, visible(value));
  }
  return node;
}

/** Add children: nodes unchanged, anything else as visible text; null and false are skipped. */
function add(node, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
  return node;
}

/** Create an element: el("td.number.faint", {title: "…"}, "text", child, …). */
function el(kind, options = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  return add(assign(node, options), ...children);
}

/** Create a button that runs an action and never submits a form. */
function button(kind, action, options, ...children) {
  return el(`button.${kind}`, { type: "button", onclick: action, ...options }, ...children);
}

/** Create an SVG element. */
function drawn(tag, options = {}, ...children) {
  return add(assign(document.createElementNS(SVG, tag), options), ...children);
}

/** Convert a number from JSON, where NaN is null and infinities are strings. */
function numberOf(value) {
  if (value === null || value === undefined) return NaN;
  return value === "inf" ? Infinity : value === "-inf" ? -Infinity : Number(value);
}

/** Format a number with all stored digits. */
function exact(value) {
  return value === null || value === undefined ? "unknown" : String(value);
}

/** Format a number with at most four significant digits and a true minus sign; – if it is unknown. */
function brief(value) {
  const number = numberOf(value);
  if (Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const text =
    Number.isInteger(number) && size < 1e6
      ? String(size)
      : size >= 1e6 || size < 1e-4
        ? size.toExponential(2)
        : String(Number(size.toPrecision(size >= 1 ? 4 : 3)));
  return number < 0 ? `−${text}` : text;
}

/** Format a number with two decimals and a sign, so that columns align. */
function signed(value) {
  const number = numberOf(value);
  if (Number.isNaN(number) || !Number.isFinite(number)) return brief(value);
  const size = Math.abs(number);
  const text = size && (size < 0.005 || size >= 1e5) ? size.toExponential(0) : size.toFixed(2);
  return number < 0 ? `−${text}` : number > 0 ? `+${text}` : text;
}

/** Format a count with its noun: 1 turn, 1,204 turns. */
function counted(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}

function grouped(count) {
  return count.toLocaleString("en-US");
}

/** The mean of the known numbers; NaN if there are none. */
function meanOf(values) {
  const known = values.map(numberOf).filter((value) => !Number.isNaN(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
}

/** The color step of a value: -8 … 8 by its fraction of the limit, with magnitude at least 1 if it is not 0. */
function strength(value, limit) {
  if (!value || !limit || Number.isNaN(value)) return 0;
  const reach = Number.isFinite(value) ? Math.min(1, Math.abs(value) / limit) : 1;
  return Math.sign(value) * Math.max(1, Math.round(8 * reach));
}

/** The classes that color a value: p1 … p8 (positive), n1 … n8 (negative), none for 0. */
function shade(value, limit) {
  const steps = strength(numberOf(value), limit);
  return steps ? (steps > 0 ? `p${steps}` : `n${-steps}`) : "";
}

/** The largest absolute value of the finite values; 0 if there are none. */
function largest(values) {
  let most = 0;
  for (const value of values) {
    const size = Math.abs(numberOf(value));
    if (Number.isFinite(size) && size > most) most = size;
  }
  return most;
}

const OUTCOME_SIGNS = { won: "✓", lost: "✗", played: "•", failed: "!" };

/** An outcome as a symbol and a word, so that color is not the only difference. */
function outcomeMark(outcome) {
  return el(
    `span.outcome.${outcome}`,
    {},
    el("span.sign", { "aria-hidden": "true" }, OUTCOME_SIGNS[outcome] ?? "•"),
    outcome,
  );
}

/** Format a time in the local time zone, to the second. */
function moment(seconds) {
  const date = new Date(1000 * seconds);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
