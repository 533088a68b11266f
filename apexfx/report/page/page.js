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
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const link = (label, ...route) => el("a", { href: "#" + route.map(encodeURIComponent).join("/") }, label);

function table(headers, rows, attributes = {}) {
  const numeric = header => header.startsWith("#") ? "number" : "";
  return el("table", attributes, el("tr", {}, headers.map(h => el("th", { class: numeric(h) }, h.replace("#", "")))),
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
function count(items, key) {
  const counts = {};
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

// What nodes are coloured by: their dtype, or the numbers that came with the report.
const overlay = { what: "dtype" };
const overlays = ["dtype", "nothing", ...new Set(data.graphs.flatMap(g => g.stages.flatMap(s => Object.keys(s.overlays))))];
function overlayColour(stage, node) {
  if (overlay.what === "nothing") return "transparent";
  if (overlay.what === "dtype") return node.type ? `var(--${dtypeClass(node.type)})` : "transparent";
  const values = overlayValues(stage, overlay.what);
  const value = values.get(node.name);
  return value > 0 ? `rgb(214 40 40 / ${Math.round(100 * (0.12 + 0.88 * Math.sqrt(value / values.most)))}%)` : "transparent";
}
function overlayValues(stage, what) {
  stage.values ??= {};
  if (!stage.values[what]) {
    stage.values[what] = new Map((stage.overlays[what] || []).map(([node, x]) => [textOf(node), x]));
    stage.values[what].most = Math.max(...stage.values[what].values());
  }
  return stage.values[what];
}
