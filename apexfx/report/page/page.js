"use strict";
// Data, elements, sizes and colours. Texts of the report reach the document through append() and textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const textOf = number => data.texts[number];
const SVG = "http://www.w3.org/2000/svg"; // a name; nothing is fetched

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value !== undefined && value !== false) element.setAttribute(key, value);
  }
  if (attributes.onclick && element.tagName !== "BUTTON") fill(element, { role: "button", tabindex: 0 }, []); // for the keyboard
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const address = (...route) => "#" + route.map(part => encodeURIComponent(String(part).toWellFormed())).join("/");
const link = (label, ...route) => el("a", { href: address(...route) }, label);
const plural = (number, noun) => noun + (number === 1 ? "" : "s");
const counted = (number, noun) => `${number} ${plural(number, noun)}`;

function table(headers, rows) {
  const numeric = header => header.startsWith("#") ? "number" : "";
  return el("table", {}, el("tr", {}, headers.map(h => el("th", { class: numeric(h) }, h.replace("#", "")))),
    rows.map(row => el("tr", {}, row.map((cell, i) => el("td", { class: numeric(headers[i]) + (typeof cell === "string" ? " pre" : "") }, cell)))));
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; bytes >= 1024 && power < 4; power++) bytes /= 1024;
  return `${power ? bytes.toFixed(bytes < 10 ? 2 : 1) : bytes} ${units[power]}`;
}
const dtypeClass = dtype => /^(bf16|f16|float16|bfloat16)/.test(dtype) ? "half" : /^f32/.test(dtype) ? "f32" : /^f64/.test(dtype) ? "f64" : "other";
const chip = dtype => el("span", { class: dtypeClass(dtype) }, dtype);

/** Return a bar with a part for each dtype, from its counts. */
function shareBar(counts) {
  const title = Object.entries(counts).map(([dtype, n]) => `${n} in ${dtype}`).join(", ");
  return el("div", { class: "share", title }, Object.entries(counts).map(([dtype, n]) => el("i", { class: dtypeClass(dtype), style: { flex: n } })));
}
/** Return what the colours of such bars mean. */
const legend = counts => el("p", { class: "legend" }, Object.entries(counts).map(([dtype, n]) => el("span", { class: dtypeClass(dtype) }, n ? `${n} in ${dtype}` : dtype)));
function count(items, key) {
  const counts = { __proto__: null };
  for (const item of items) counts[key(item)] = (counts[key(item)] || 0) + 1;
  return counts;
}

// Rows of data.ops and data.casts with names.
const ops = data.ops.map(([graph, node, op, dtype, rule, reason, where, source, computes, operands, override]) => ({
  graph, node: textOf(node), op: textOf(op), dtype: textOf(dtype), rule: textOf(rule), reason: textOf(reason), where: textOf(where),
  source: textOf(source), computes, operands: operands.map(textOf), override: textOf(override) }));
const casts = data.casts.map(([graph, node, op, rule, reason, from, to, tensor, source, removed, bytes]) => ({
  graph, bytes, node: textOf(node), op: textOf(op), rule: textOf(rule), reason: textOf(reason), from: textOf(from), to: textOf(to),
  tensor: textOf(tensor), source: textOf(source), removed: textOf(removed) }));
const stageOf = (graph, name) => data.graphs[graph].stages.find(stage => stage.stage === name);
