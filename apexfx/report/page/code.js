"use strict";
// Printed graphs: read as nodes, shown as coloured lines in lists that draw only what is in sight, and side by side.
const LINE_PX = 18, LONGEST = 1200; // a line's height; characters of a line that are shown
const TOKENS = /(#.*$)|("[^"]*"|'[^']*')|((?<![.\w])torch\.[\w.]+)|((?<![.\w])[A-Za-z_]\w*)/g;
const WORDS = /(?<![.\w"'])[A-Za-z_]\w*(?!\w*\s=)/g;

/**
 * Return {lines, of, scopes, nodes}: the node of each line, and what the names in it begin with in `nodes`: nodes by name, in order, each with its op, type, line, module, what it reads and
 * who reads it. `isAfter`: of no module, and behind the backward of one, as the update of a training step is.
 */
function parse(stage, index) {
  stage.parsed ??= {};
  return stage.parsed[index] ??= parseLines(stage, stage.codes[index][1].map(textOf));
}
function parseLines(stage, lines) {
  const nodes = new Map(), of = new Array(lines.length), scopes = [], bodies = {}, members = new Map();
  for (const [key, backward] of [["modules", false], ["backward_of", true]])
    for (const [path, names] of stage[key]) for (const name of names) members.set(textOf(name), [path, backward]);
  const flops = new Map(stage.flops.map(([name, n]) => [textOf(name), n]));
  let prefix = "", source = "", inputs = false;
  const add = (own, node) => {
    const name = prefix + own, [module, backward] = members.get(name) || ["", false];
    nodes.set(name, Object.assign(node, { name, own, module, backward, source, readers: [], flops: flops.get(name) || 0 }));
    of[node.line] ??= nodes.get(name);
  };
  lines.forEach((line, i) => {
    const body = line.match(/^\s*self\.([\w.]+) = .*self\.(\w+)\(\)\)/), scope = line.match(/^\s*class (\w+)\(/);
    if (body) bodies[body[2]] = body[1];
    if (scope) prefix = scope[1] in bodies ? bodies[scope[1]] + "." : "";
    scopes.push(prefix);
    if (/^\s*#/.test(line)) source = line.replace(/^\s*# (File: )?/, "");
    if (/^\s*def forward\(/.test(line)) { inputs = true; source = ""; }
    if (inputs) {
      for (const [, name, type] of line.replace("def forward(", "").matchAll(/(\w+)(?:: "([^"]*)")?\s*(?=[,)]|$)/g))
        if (name !== "self") add(name, { op: "input", type: type || "", line: i, reads: [], input: true });
      if (/\)(:| ->)/.test(line)) inputs = false;
      return;
    }
    const match = line.match(/^\s+(\w+)(?:: "?([^"=]*?)"?)? = (.*)$/);
    if (!match || scope || body) return;
    const [, own, type, expression] = match;
    const reads = [...new Set([...expression.matchAll(WORDS)].map(m => prefix + m[0]).filter(name => nodes.has(name)))];
    add(own, { op: opOf(expression), type: type || "", line: i, reads, expression, input: false });
    const node = nodes.get(prefix + own), sources = reads.map(read => nodes.get(read));
    node.isAfter = !node.backward && !node.module && (/_backward(_data)?$/.test(node.op) || sources.some(source => source.backward || source.isAfter));
    for (const read of reads) nodes.get(read).readers.push(prefix + own);
  });
  setLayers([...nodes.values()]);
  return { lines, of, scopes, nodes };
}
function opOf(expression) {
  const called = expression.match(/^([\w.]+)\(/);
  if (!called) return /^\w+\[/.test(expression) ? "getitem" : (expression.match(/^\S+ (\S+) \S+$/) || ["", "expression"])[1];
  const parts = called[1].split(".");
  if (!called[1].startsWith("torch.ops.")) return parts[parts.length - 1];
  return parts[2] === "aten" ? parts[3] : `${parts[2]}.${parts[3]}`;
}

/** Give each node its layer: its module's path up to the first number, or, of one that holds most of its list, a later one; or "". */
function setLayers(nodes) {
  const upToNumbers = new Map(), counts = new Map(), listOf = path => path.replace(/\d+$/, "*");
  for (const { module } of nodes) {
    if (!upToNumbers.has(module)) upToNumbers.set(module, [...module.matchAll(/(?:^|\.)\d+(?=\.|$)/g)].map(m => module.slice(0, m.index + m[0].length)));
    for (const key of upToNumbers.get(module).flatMap(path => [path, listOf(path)])) counts.set(key, (counts.get(key) || 0) + 1);
  }
  for (const node of nodes) {
    const paths = upToNumbers.get(node.module), layer = paths.find(path => counts.get(path) < 0.6 * counts.get(listOf(path))) ?? paths[0];
    node.layer = layer ? layer + (node.backward ? " (backward)" : "") : "";
  }
}

/** Return a line as coloured elements; names of nodes open the inspector. `scope`: of the line, as `parse` has it. */
function paint(line, scope, stage, index) {
  const parts = [], shown = line.length > LONGEST ? line.slice(0, LONGEST) : line;
  let end = 0;
  for (const m of shown.matchAll(TOKENS)) {
    parts.push(shown.slice(end, m.index));
    end = m.index + m[0].length;
    const dtype = m[2] && m[2].match(/^"(\w+)\[/);
    if (m[1]) parts.push(el("span", { class: "comment" }, m[1]));
    else if (m[2]) parts.push(el("span", { class: dtype ? dtypeClass(dtype[1]) : "string" }, m[2]));
    else if (m[3]) parts.push(el("span", { class: m[3].includes("_c10d") ? "comm" : "op" }, m[3]));
    else if (parse(stage, index).nodes.has(scope + m[4])) parts.push(el("span", { class: "name", "data-node": scope + m[4] }, m[4]));
    else parts.push(m[4]);
  }
  parts.push(shown.slice(end), line.length > LONGEST ? el("span", { class: "comment" }, ` ... and ${counted(line.length - LONGEST, "more character")}`) : "");
  return parts;
}

/** Return a list that draws the rows in sight; `draw(row)` returns an element. Its `show(rows)` replaces them, `goTo(i)` scrolls. */
function lineList(draw) {
  const inner = el("div"), list = el("div", { class: "lines code", tabindex: 0 }, inner);
  let rows = [], first = 0, last = -1; // first and last drawn
  const render = () => {
    const from = Math.max(0, Math.floor(list.scrollTop / LINE_PX) - 15), to = Math.min(rows.length, from + Math.ceil(list.clientHeight / LINE_PX) + 30);
    if (from === first && to === last) return;
    const focused = [...inner.children].indexOf(document.activeElement);
    inner.replaceChildren(...rows.slice(from, to).map((row, i) => {
      const line = draw(row);
      line.style.top = `${(from + i) * LINE_PX}px`;
      return line;
    }));
    if (focused >= 0) (inner.children[first + focused - from] || list).focus({ preventScroll: true });
    [first, last] = [from, to];
  };
  list.show = (newRows, characters) => {
    [rows, last] = [newRows, -1];
    Object.assign(inner.style, { height: `${rows.length * LINE_PX}px`, width: `${Math.min(characters, LONGEST + 40) + 4}ch` });
    render();
  };
  list.goTo = i => { list.scrollTop = Math.max(0, i * LINE_PX - list.clientHeight / 3); };
  list.addEventListener("scroll", render);
  new ResizeObserver(render).observe(list);
  return list;
}
const longest = lines => lines.reduce((most, line) => Math.max(most, line.length), 0);

/** A whole graph, layers folded. `focus`: the name of a node to show. */
function codeView(graph, stage, index, focus) {
  const { lines, of, scopes, nodes } = parse(stage, index), open = new Set(), runs = [];
  lines.forEach((line, i) => { // lines of one layer that follow each other; comments belong to the line below them
    let j = i;
    while (j < lines.length - 1 && !of[j] && /^\s*#/.test(lines[j])) j++;
    const key = of[j] && of[j].input ? "inputs" : of[j] ? of[j].layer : "", run = runs[runs.length - 1];
    if (run && run.key === key) run.lines.push(i); else runs.push({ key, lines: [i] });
  });
  for (let i = runs.length - 2; i > 0; i--) // a few lines of no layer amid one are shown with it
    if (!runs[i].key && runs[i].lines.length <= 3 && runs[i - 1].key === runs[i + 1].key) {
      runs[i - 1].lines.push(...runs[i].lines, ...runs[i + 1].lines);
      runs.splice(i, 2);
    }
  const at = focus && nodes.get(focus) ? nodes.get(focus).line : -1;
  runs.forEach((run, i) => { if (run.lines.includes(at)) open.add(i); });
  const list = lineList(row => row.fold === undefined ? codeLine(row.line) : foldLine(row.fold));
  const codeLine = i => {
    const node = of[i], style = node ? { borderLeftColor: nodeColour(stage, node) } : {};
    return el("div", { class: `line ${i === at ? "at" : ""}`, style }, numberCell(node && nodeNumber(stage, node)), paint(lines[i], scopes[i], stage, index));
  };
  const numberCell = text => isMeasured() ? el("span", { class: "measured" }, text) : "";
  const foldLine = i => {
    const inside = runs[i].lines.map(line => of[line]).filter(Boolean);
    const dtypes = Object.entries(count(inside.filter(n => n.type), n => n.type.split("[")[0])).flatMap(([d, n]) => [` ${n} `, chip(d)]);
    const measured = isMeasured() ? numberOfAll(stage, inside) : undefined, most = overlay.what === "time" ? totalTime(stage) : numbersOf(stage, overlay.what).most;
    return el("div", { class: "line fold", "data-fold": runs[i].key, "aria-expanded": open.has(i) ? "true" : "false", style: { borderLeftColor: heat(measured, most) },
      onclick: () => { open.has(i) ? open.delete(i) : open.add(i); show(); } }, numberCell(measured === undefined ? "" : numberText(overlay.what, measured)),
      `${open.has(i) ? "▾" : "▸"} ${runs[i].key}  ·  ${counted(inside.length, runs[i].key === "inputs" ? "input" : "op")} `, dtypes);
  };
  let rows = [];
  const show = () => {
    rows = runs.flatMap((run, i) => {
      const foldable = run.key && run.lines.length > 3, inside = run.lines.map(line => ({ line }));
      return foldable ? [{ fold: i }, ...(open.has(i) ? inside : [])] : inside;
    });
    list.show(rows, longest(lines));
  };
  list.addEventListener("click", event => inspectName(event, graph, stage, index));
  const all = () => { open.size < runs.length ? runs.forEach((_, i) => open.add(i)) : open.clear(); show(); };
  const copy = el("button", { type: "button", onclick: () => navigator.clipboard.writeText(lines.join("\n")) }, "copy as Python");
  setTimeout(() => { show(); if (at >= 0) list.goTo(rows.findIndex(row => row.line === at)); });
  return [el("div", { class: "row" }, el("button", { type: "button", id: "fold-all", onclick: all }, "fold / unfold all"), copy), list];
}

/** Two texts side by side, scrolled together; equal stretches collapsed. */
function diffView(graph, stage, before, after, edits) {
  const statements = index => {
    const { lines, of, scopes } = parse(stage, index), start = Math.max(0, lines.findIndex(line => line.startsWith("class ")));
    return lines.map((line, i) => ({ line: line.replace(/\b([0-9a-f]{7})[0-9a-f]{33}\b/g, "$1"), node: of[i], scope: scopes[i] })).slice(start).filter(row => !/^\s*#/.test(row.line));
  };
  const [left, right] = [statements(before), statements(after)], CONTEXT = 3, rows = [];
  let [a, b] = [0, 0];
  const equal = (end, atEnd) => {
    const n = end - a, stretch = Array.from({ length: n }, (_, i) => ({ left: left[a + i], right: right[b + i], kind: "" }));
    const head = a ? CONTEXT : 0, tail = atEnd ? 0 : CONTEXT;
    if (n > head + tail + 4) rows.push(...stretch.slice(0, head), { gap: stretch.slice(head, n - tail) }, ...stretch.slice(n - tail));
    else rows.push(...stretch);
  };
  for (const [a0, a1, b0, b1] of edits) {
    equal(a0, false);
    for (let i = 0; i < Math.max(a1 - a0, b1 - b0); i++)
      rows.push({ left: a0 + i < a1 ? left[a0 + i] : null, right: b0 + i < b1 ? right[b0 + i] : null, kind: "changed" });
    [a, b] = [a1, b1];
  }
  equal(left.length, true);
  const pane = (side, index, mark) => lineList(row => {
    if (row.gap) return el("div", { class: "line fold", onclick: () => { rows.splice(rows.indexOf(row), 1, ...row.gap); show(); } }, `▸ ${counted(row.gap.length, "line")} as before`);
    const own = row[side];
    const style = own && own.node && isMeasured() ? { borderLeftColor: nodeColour(stage, own.node) } : {};
    const cast = own && own.node && castOf(graph, stage, own.node), kind = !own ? "empty" : row.kind && mark;
    const marked = own && own.line.includes("_c10d_functional.") ? "collective" : cast ? "cast" : "";
    return el("div", { class: `line ${kind} ${marked}`, style, title: cast ? castText(cast) : undefined }, own ? paint(own.line, own.scope, stage, index) : "");
  });
  const panes = [pane("left", before, "removed"), pane("right", after, "added")];
  const widest = longest([...left, ...right].map(row => row.line)), show = () => panes.forEach(list => list.show(rows, widest));
  panes.forEach((list, i) => {
    list.addEventListener("scroll", () => { [panes[1 - i].scrollTop, panes[1 - i].scrollLeft] = [list.scrollTop, list.scrollLeft]; });
    list.addEventListener("click", event => inspectName(event, graph, stage, i ? after : before));
  });
  setTimeout(show);
  return el("div", { class: "panes" }, el("b", {}, `before: ${stage.codes[before][0]}`), el("b", {}, `after: ${stage.codes[after][0]}`), panes);
}

const castOf = (graph, stage, node) => stage.stage === "forward" ? casts.find(cast => cast.graph === graph && cast.node === node.name) : undefined;
const castText = cast => `${cast.op}: ${cast.tensor} ${cast.from} to ${cast.to}, ${size(cast.bytes)}; rule ${cast.rule}: ${cast.reason}`
  + `${cast.source && ` (${cast.source})`}${cast.removed && `; removed: ${cast.removed}`}`;

function inspectName(event, graph, stage, index) {
  const name = event.target.dataset && event.target.dataset.node;
  if (name) inspect(graph, stage, index, name);
}

/** Show all that is known of a node at the right. */
function inspect(graph, stage, index, name) {
  const node = parse(stage, index).nodes.get(name), panel = document.getElementById("inspector");
  if (!node) return;
  const go = other => el("a", { onclick: () => inspect(graph, stage, index, other) }, other);
  const list = names => names.length ? names.slice(0, 40).flatMap((n, i) => [i ? ", " : "", go(n)]).concat(names.length > 40 ? `, and ${names.length - 40} more` : "") : "nothing";
  const op = ops.find(row => row.graph === graph && row.node === name && stage.stage === "forward"), cast = castOf(graph, stage, node);
  const rows = [
    ["op", node.op], ["value", node.type && el("span", { class: dtypeClass(node.type) }, node.type)],
    [node.backward ? "backward of module" : "module", node.module && link(node.module, "module", graph, stage.stage, node.module)],
    ["where", node.source], ["why this dtype", op && `${op.rule && `${op.rule}: `}${op.reason}`], ["of", op && op.operands.join(", ")],
    ["to change it", op && op.override && el("code", {}, op.override)], ["cast", cast && castText(cast)],
    ["matrix product", node.flops && `${(node.flops / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MFLOP`],
    ...numberRows(stage, name),
    ["reads", list(node.reads)], ["read by", list(node.readers)], ["line", node.expression && el("code", {}, node.expression.slice(0, 2000))],
  ].filter(([, value]) => value);
  panel.replaceChildren(el("button", { class: "close", type: "button", onclick: () => { panel.hidden = true; } }, "close"), el("h1", {}, name),
    link("show in the graph", "code", graph, stage.stage, index, name), el("dl", {}, rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])));
  panel.hidden = false;
}

/** Return a link that shows what is known of a node of the graph that runs. */
function inspectLink(label, graph, stageName, name) {
  const stage = stageOf(graph, stageName);
  return el("a", { onclick: () => inspect(graph, stage, lastCode(stage), name) }, label);
}
