"use strict";
// Numbers of nodes, by which the page colours them: the time of their kernels, the error that they introduce; and a page of each.
const overlay = { what: "dtype" };
const measuredOf = stage => [...(stage.kernels.length ? ["time"] : []), ...Object.keys(stage.errors)];
const overlays = ["dtype", "nothing", ...new Set(data.graphs.flatMap(g => g.stages.flatMap(measuredOf)))];
const isMeasured = () => overlay.what !== "dtype" && overlay.what !== "nothing";

/** Return {of, share, kernels, most} of a stage. `of`: node -> number; of time the ms of its kernels, and `share` an equal part of them. */
function numbersOf(stage, what) {
  stage.numbers ??= {};
  if (stage.numbers[what]) return stage.numbers[what];
  const numbers = { of: new Map(), share: new Map(), kernels: new Map(), most: 0 };
  const add = (map, node, x) => map.set(node, (map.get(node) || 0) + x);
  if (what === "time")
    for (const [name, ms, calls, nodes] of stage.kernels)
      for (const node of nodes.map(textOf)) {
        add(numbers.of, node, ms);
        add(numbers.share, node, ms / nodes.length);
        if (!numbers.kernels.has(node)) numbers.kernels.set(node, []);
        numbers.kernels.get(node).push({ name, ms, calls, others: nodes.length - 1 });
      }
  else for (const [node, x] of stage.errors[what] || []) numbers.of.set(textOf(node), x === null ? Infinity : x);
  for (const x of numbers.of.values()) if (x > numbers.most && x < Infinity) numbers.most = x;
  return stage.numbers[what] = numbers;
}

const ms = x => `${x >= 100 ? x.toFixed(0) : x >= 0.1 ? x.toFixed(2) : x.toFixed(3)} ms`;
function numberText(what, x) {
  if (what === "time") return ms(x);
  if (x === Infinity) return "not finite";
  return what.startsWith("share") && x >= 5e-4 ? percent(x) : x ? x.toExponential(1) : "0";
}
const percent = x => `${(100 * x).toFixed(1)} %`;
function heat(x, most) {
  return x > 0 ? `rgb(214 40 40 / ${Math.round(8 + 57 * Math.sqrt(Math.min(1, x / (most || 1))))}%)` : "transparent";
}

/** Return the colour of a node, and below, the text beside it, which a dtype has none of. */
function nodeColour(stage, node) {
  if (!isMeasured()) return overlay.what === "dtype" && node.type ? `var(--${dtypeClass(node.type)})` : "transparent";
  const { of, most } = numbersOf(stage, overlay.what);
  return heat(of.get(node.name), most);
}
function nodeNumber(stage, node) {
  const x = isMeasured() ? numbersOf(stage, overlay.what).of.get(node.name) : undefined;
  return x ? numberText(overlay.what, x) : "";
}

/** Return the number of several nodes: of time the sum, of an error the largest; undefined where none has one. */
function numberOfAll(stage, nodes, what = overlay.what) {
  const { of, share } = numbersOf(stage, what), known = nodes.filter(node => of.has(node.name));
  if (!known.length) return undefined;
  return known.reduce((all, node) => what === "time" ? all + share.get(node.name) : Math.max(all, of.get(node.name)), 0);
}
const totalTime = stage => stage.kernels.reduce((sum, [, ms]) => sum + ms, 0);

/** Return what the inspector says of a node's numbers: rows of a name and a text. */
function numberRows(stage, name) {
  const text = ({ name, ms: time, calls, others }) => `${ms(time)} a step, kernel ${name}`
    + (others ? `, which computes ${counted(others, "other node")}, too` : "") + (calls === 1 ? "" : `, ${calls} calls`);
  const errors = Object.keys(stage.errors).filter(what => numbersOf(stage, what).of.has(name));
  return [...(numbersOf(stage, "time").kernels.get(name) || []).map(kernel => ["time", text(kernel)]),
    ...errors.map(what => [what, numberText(what, numbersOf(stage, what).of.get(name))])];
}

const bar = share => el("div", { class: "bar" }, el("i", { style: { width: `${100 * Math.max(0, Math.min(1, share))}%` } }));
const MOST_ROWS = 200;
const rest = (number, noun) => number > 0 ? el("p", { class: "dim" }, `and ${counted(number, `more ${noun}`)}`) : "";

function timeView() {
  const { title, ms: whole, tables } = data.profile;
  const modules = new Set(stages().flatMap(([, stage]) => [...stage.modules, ...stage.backward_of].map(([path]) => path)));
  const name = (what, text) => what === "module" && modules.has(text) ? link(text, "module", graphOf(text), "", text) : text;
  const cells = (what, [text, time, calls]) => [time.toFixed(3), percent(time / whole), bar(time / whole), String(calls), name(what, text)];
  return [el("h1", {}, "Where the time of a step goes"), el("p", {}, title),
    el("p", { class: "dim" }, "“Colour by time” shows it at the nodes of graphs and at drawn modules. How the time of a kernel is divided among "
      + "the nodes that it computes nobody can tell: each of them has the colour of all of it, a module that of equal parts."),
    tables.map(([what, rows]) => [el("h2", {}, `By ${what}`), table(["#ms", "#share", "", "#calls", what],
      rows.slice(0, MOST_ROWS).map(row => cells(what, row))), rest(rows.length - MOST_ROWS, "row")])];
}

const errorOrder = { byProgram: false };
function errorView() {
  const { verdict, errors, headers, rows, notes, numeric } = data.comparison;
  const shares = rows.map(row => row.share).filter(share => share !== null).sort((a, b) => b - a);
  let most = 0, sum = 0;
  for (; most < shares.length && sum < 0.9; most++) sum += shares[most];
  const shown = errorOrder.byProgram ? [...rows].sort((a, b) => a.place - b.place) : rows;
  const choose = byProgram => () => { errorOrder.byProgram = byProgram; show(); };
  const order = (label, byProgram) =>
    el("button", { type: "button", class: errorOrder.byProgram === byProgram ? "on" : "", onclick: choose(byProgram) }, label);
  const opCell = (row, text) => el(row.stands_out ? "b" : "span", {}, row.at ? inspectLink(text, ...row.at) : text);
  const cells = row => [...row.cells.slice(0, numeric), row.share === null ? "" : bar(row.share), opCell(row, row.cells[numeric]),
    ...row.cells.slice(numeric + 1)];
  const columns = [...headers.slice(0, numeric).map(header => `#${header}`), "", ...headers.slice(numeric)];
  return [el("h1", {}, "Which op makes it differ"), verdict.map((line, i) => el("p", { class: i ? "verdict" : "dim" }, line)),
    notes.map(note => el("p", {}, `note: ${note}`)),
    sum >= 0.9 ? el("p", {}, `${most === 1 ? "One row makes" : `${most} rows make`} 90 % of the error of the outputs and gradients.`) : "",
    el("div", { class: "row" }, "rows", order("most to blame first", false), order("in the order of the program", true)),
    table(columns, shown.slice(0, MOST_ROWS).map(cells)), rest(rows.length - MOST_ROWS, "row"),
    errors.length ? [el("h2", {}, "Outputs and gradients, the farthest off first"),
      table(["#error", "of"], errors.slice(0, MOST_ROWS).map(([name, error]) => [error, name])), rest(errors.length - MOST_ROWS, "gradient")] : ""];
}

/** Return how much of a step the kernels of a module take, in its forward and in its backward. */
function moduleTime(graph, path) {
  const own = data.graphs[graph].stages, running = own.filter(stage => stage.stage === "step" || !own.some(other => other.stage === "step"));
  if (!running.some(stage => stage.kernels.length)) return "";
  const below = node => !path || node.module === path || node.module.startsWith(`${path}.`);
  const [forward, backward] = [false, true].map(back => running.reduce((sum, stage) => sum + (numberOfAll(stage,
    [...parse(stage, lastCode(stage)).nodes.values()].filter(node => node.backward === back && below(node)), "time") || 0), 0));
  const split = path && forward && backward ? `: forward ${ms(forward)}, backward ${ms(backward)}` : "";
  return el("p", {}, `${ms(forward + backward)}, ${percent((forward + backward) / data.profile.ms)} of a step${split}`);
}
