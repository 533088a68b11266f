"use strict";
// Tables, the list at the side, and search.
const lastCode = stage => stage.codes.length - 1 - (stage.codes[stage.codes.length - 1][0] === "lowered");
const stages = () => data.graphs.flatMap(g => g.stages.map(stage => [g, stage]));

function overview() {
  const computing = ops.filter(op => op.computes), plans = data.graphs.map(g => g.plan).filter(Boolean), memory = stages().map(([, s]) => s.memory).filter(Boolean);
  const kept = casts.filter(cast => !cast.removed).length;
  const card = (big, small) => el("div", {}, el("b", {}, big), small);
  const passes = stages().flatMap(([g, stage]) => stage.passes.map((entry, i) => [String(g.index), stage.stage + (stage.cached ? " (cached)" : ""),
    link(entry.name, "pass", g.index, stage.stage, i), String(entry.num_matches), `${entry.nodes[0]} → ${entry.nodes[1]}`, entry.ops, entry.ms.toFixed(1)]));
  return [el("h1", {}, "Overview"),
    el("div", { class: "cards" }, data.profile ? card(ms(data.profile.ms), "a step, as measured") : "",
      data.profile && data.profile.slowest ? card(percent(data.profile.slowest[1] / data.profile.ms), link(`of it in ${data.profile.slowest[0]}`, "profile")) : "", card(data.graphs.length, plural(data.graphs.length, "graph")),
      card(computing.length, computing.length === 1 ? "op that computes" : "ops that compute"), card(kept, plural(kept, "cast")),
      plans.length ? card(plans[0].buckets.length, `${plural(plans[0].buckets.length, "allreduce")} of ${size(plans[0].total_bytes)}`) : "", memory.length ? card(size(memory[0].peak), "alive at most, before fusion") : ""),
    shareBar(count(computing, op => op.dtype)), legend(count(computing, op => op.dtype)), el("p", {}, data.summaries[0]), data.comparison ? data.comparison.verdict.map(line => el("p", {}, line)) : "",
    data.remarks.map(line => el("p", { class: line.startsWith("warning") ? "warning" : "" }, line)),
    data.graphs.map(g => el("p", {}, el("b", {}, `graph ${g.index} `), g.identity)),
    el("h2", {}, "What the passes did"), table(["#graph", "stage", "pass", "#matches", "#nodes", "ops added (+), removed (−)", "#ms"], passes)];
}

function opsView() {
  const rows = data.kinds.map(([n, op, dtype, rule, module, reason]) => [String(n), link(op, "op", op), chip(dtype), rule, module, reason]);
  return [el("h1", {}, "Ops: which dtype, and why"), el("p", {}, data.summaries[0]), table(["#ops", "op", "dtype", "rule", "module", "why"], rows)];
}
const opRows = rows => [table(["op", "dtype", "module", "why", "of", "to change it"], rows.slice(0, MOST_ROWS).map(op => [
  inspectLink(op.op, op.graph, "forward", op.node), chip(op.dtype),
  op.where === "model" || op.where === "loss" ? op.where : link(op.where, "module", op.graph, "forward", op.where),
  `${op.rule && `${op.rule}: `}${op.reason}${op.source && ` (${op.source})`}`, op.operands.join(", "), op.override ? el("code", {}, op.override) : ""])), rest(rows.length - MOST_ROWS, "op")];
const opView = name => [el("h1", {}, name), opRows(ops.filter(op => op.op === name))];

function castsView() {
  const kinds = data.cast_kinds.map(([n, op, rule, from, to, reason, bytes, tensors]) => [String(n), op, rule, el("span", { class: "short" }, chip(from), " → ", chip(to)), size(bytes), tensors, reason]);
  const removed = casts.filter(cast => cast.removed).map(c => [c.op, c.tensor, `${c.from} → ${c.to}`, size(c.bytes), c.removed]);
  return [el("h1", {}, "Casts"), el("p", {}, data.summaries[1]), table(["#casts", "op", "rule", "dtypes", "#bytes a step", "tensors", "reason"], kinds),
    removed.length ? [el("h2", {}, "Removed again"), table(["op", "tensor", "dtypes", "#bytes", "why"], removed)] : ""];
}

function bucketsView(graph, wanted) {
  const { plan } = data.graphs[graph];
  return [el("h1", {}, `Bucket plan of graph ${graph}`),
    el("p", {}, `${counted(plan.buckets.length, "allreduce")}, ${size(plan.total_bytes)} a step, ${counted(plan.world_size, "rank")}, layout ${plan.layout}`),
    table(["#bucket", "gradients, as they lie in the buffer", "#bytes", "dtype", "divide", "starts after", "waits before"], plan.buckets.map((bucket, i) => [
      String(i), el("details", { open: bucket.slots.some(([name]) => name === wanted) },
        el("summary", {}, `${counted(bucket.slots.length, "gradient")}: ${bucket.slots[0][0]}${bucket.slots.length > 1 ? " ..." : ""}`),
        bucket.slots.map(([name, bytes]) => el("div", { class: name === wanted ? "f32" : "" }, `${name}  `, el("span", { class: "count" }, size(bytes))))),
      size(bucket.bytes), bucket.dtypes, bucket.divide, bucket.start, bucket.wait]))];
}

function passView(graph, stageName, i) {
  const stage = stageOf(graph, stageName), all = i === "all", entry = all ? null : stage.passes[i];
  const edits = all ? stage.edits : entry.edits, after = all ? stage.passes.length : Number(i) + 1, before = all ? 0 : Number(i);
  const places = all ? [] : entry.places;
  return [el("div", { class: "row" }, el("h1", {}, all ? "All passes" : entry.name), el("span", { class: "dim" }, `graph ${graph}, ${stageName}`),
      link("the whole graph after it", "code", graph, stageName, after)),
    entry && entry.warning ? el("p", { class: "warning" }, `rewrote nothing: ${entry.warning}`) : "",
    places.length ? el("details", { open: places.length <= 6 }, el("summary", {}, `rewrote ${counted(entry.num_matches, "place")}${places.length < entry.num_matches ? `, ${counted(places.length, "kind")}` : ""}`),
      el("div", { style: { maxHeight: "9em", overflow: "auto" } }, places.map(([n, place]) => el("div", { class: "code" }, `${n} × ${place}`)))) : "",
    edits.length ? diffView(graph, stage, before, after, edits) : el("p", {}, "left the graph as it was")];
}

function codePage(graph, stageName, index, focus) {
  const stage = stageOf(graph, stageName);
  return [el("h1", {}, `graph ${graph}, ${stageName}: ${index > 0 ? "after " : ""}${stage.codes[index][0]}`), codeView(graph, stage, Number(index), focus)];
}

/** Return the first graph that a module has ops in. */
const firstGraphs = new Map(stages().reverse().flatMap(([g, stage]) => stage.modules.map(([path]) => [path, g.index])));
const graphOf = path => firstGraphs.get(path) ?? 0;

// Modules as a tree, with the dtypes of the ops below each; siblings that are equal but for their number are one entry.
function moduleTree() {
  const root = { path: "", name: "model", children: new Map(), dtypes: {} };
  const visit = (path, dtype) => {
    let at = root;
    for (const name of path ? path.split(".") : []) {
      if (!at.children.has(name)) at.children.set(name, { path: at.path ? `${at.path}.${name}` : name, name, children: new Map(), dtypes: {} });
      at = at.children.get(name);
      if (dtype) at.dtypes[dtype] = (at.dtypes[dtype] || 0) + 1;
    }
  };
  for (const [g, stage] of stages()) for (const [path] of stage.modules) visit(path);
  for (const op of ops) if (op.computes && op.graph === graphOf(op.where) && op.where !== "loss" && op.where !== "model") visit(op.where, op.dtype);
  inOrder(root);
  return root;
}
/** Order numbered modules, which come as the graph reads them, by number. */
function inOrder(at) {
  const below = [...at.children.values()];
  if (below.every(child => /^\d+$/.test(child.name))) at.children = new Map(below.sort((a, b) => a.name - b.name).map(child => [child.name, child]));
  below.forEach(inOrder);
}
const signatures = new Map(); // of a module, with what is below it -> a number
function signature(module) {
  const text = JSON.stringify([module.dtypes, [...module.children.values()].map(child => [child.name, signature(child)])]);
  if (!signatures.has(text)) signatures.set(text, signatures.size);
  return module.signature ??= signatures.get(text);
}
function moduleEntry(module) {
  const head = [link(module.name, "module", graphOf(module.path), "", module.path), shareBar(module.dtypes)];
  const row = el("span", { class: "module" }, head);
  return module.children.size ? lazy(row, () => moduleEntries(module)) : el("div", { class: "leaf" }, row);
}
function moduleEntries(module) {
  const groups = [];
  for (const child of module.children.values()) {
    const like = /^\d+$/.test(child.name) ? signature(child) : null, last = groups[groups.length - 1];
    if (like && last && last.like === like) last.members.push(child); else groups.push({ like, members: [child] });
  }
  return groups.map(({ members }) => members.length < 3 ? members.map(moduleEntry)
    : lazy(`{${members[0].name}..${members[members.length - 1].name}} × ${members.length} equal`, () => members.map(moduleEntry)));
}
function lazy(summary, children) {
  const details = el("details", {}, el("summary", {}, summary));
  details.addEventListener("toggle", () => { if (details.childElementCount === 1) details.append(...children().flat()); });
  return details;
}

function side() {
  const graphs = data.graphs.map(g => el("details", { open: data.graphs.length <= 3 }, el("summary", { title: g.identity }, `graph ${g.index} `, el("span", { class: "quiet" }, g.identity)),
    g.stages.map(stage => el("details", { open: true }, el("summary", {}, stage.stage),
      link("captured", "code", g.index, stage.stage, 0),
      stage.passes.map((entry, i) => el("a", { href: address("pass", g.index, stage.stage, i) }, `${entry.name} `, el("span", { class: "count" }, entry.num_matches || ""))),
      stage.passes.length > 1 ? link("all passes, before and after", "pass", g.index, stage.stage, "all") : "",
      link("the graph that runs", "code", g.index, stage.stage, lastCode(stage)),
      lastCode(stage) < stage.codes.length - 1 ? link("lowered", "code", g.index, stage.stage, stage.codes.length - 1) : "",
      stage.memory || stage.windows.length ? link("time and memory", "time", g.index, stage.stage) : "")),
    g.plan ? link("buckets", "buckets", g.index) : ""));
  document.getElementById("side").append(link("Overview", "overview"), link("Ops and dtypes", "ops"), casts.length ? link("Casts", "casts") : "",
    data.profile ? link("Time of a step", "profile") : "", data.comparison ? link("Error", "error") : "",
    el("h2", {}, "GRAPHS"), ...graphs, el("h2", {}, "MODULES"), legend(Object.fromEntries(Object.keys(count(ops.filter(op => op.computes), op => op.dtype)).map(dtype => [dtype, 0]))), link("model", "module", 0, "", ""), ...moduleEntries(moduleTree()).flat());
}

/** What can be searched for: [kind, label, detail, route], made at the first search. */
let searchItems;
function searchIndex() {
  if (searchItems) return searchItems;
  const modules = new Set(stages().flatMap(([, stage]) => stage.modules.map(([path]) => path)).filter(Boolean));
  const nodes = stages().flatMap(([g, stage]) => [...parse(stage, lastCode(stage)).nodes.values()].map(node => [g, stage, node]));
  const item = ([g, stage, node]) => ["node", node.name, `${node.op} ${node.type}  ·  graph ${g.index}, ${stage.stage}  ·  ${node.source}`,
    ["code", g.index, stage.stage, lastCode(stage), node.name]];
  return searchItems = [
    ...[...modules].map(path => ["module", path, "", ["module", graphOf(path), "", path]]),
    ...stages().flatMap(([g, stage]) => stage.passes.map((entry, i) => ["pass", entry.name, `graph ${g.index}, ${stage.stage}`, ["pass", g.index, stage.stage, i]])),
    ...data.graphs.flatMap(g => (g.plan ? g.plan.buckets : []).flatMap((bucket, i) => bucket.slots.map(([name]) => ["parameter", name, `bucket ${i}`, ["buckets", g.index, name]]))),
    ...[...new Set(ops.map(op => op.op))].map(op => ["op", op, "", ["op", op]]),
    ...nodes.filter(([, , node]) => !node.input).map(item), ...nodes.filter(([, , node]) => node.input).map(item), // inputs last
  ];
}
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean), hits = [];
  for (const item of searchIndex()) {
    const where = `${item[0]} ${item[1]} ${item[2]}`.toLowerCase();
    if (words.every(word => where.includes(word))) hits.push(item);
  }
  return hits;
}
function startSearch() {
  const input = document.getElementById("search"), results = document.getElementById("results");
  const close = () => { results.hidden = true; };
  let at = 0;
  input.addEventListener("input", () => {
    const hits = input.value.trim() ? search(input.value) : [];
    at = 0;
    results.hidden = !input.value.trim();
    results.replaceChildren(...hits.slice(0, 60).map(([kind, label, detail, route], i) => {
      const row = link(label, ...route);
      row.prepend(el("i", {}, kind));
      row.append(el("span", { class: "count" }, detail));
      row.className = i ? "" : "on";
      return row;
    }), el("a", { class: "count" }, hits.length > 60 ? `${hits.length - 60} more` : hits.length ? "" : "nothing is called so"));
  });
  input.addEventListener("keydown", event => {
    const rows = results.querySelectorAll("a[href]");
    if (event.key === "Escape") close();
    if (event.key === "Enter" && rows[at]) { location.hash = rows[at].hash; close(); }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && rows.length) {
      event.preventDefault();
      rows[at].className = "";
      at = (at + step + rows.length) % rows.length;
      rows[at].className = "on";
      rows[at].scrollIntoView({ block: "nearest" });
    }
  });
  results.addEventListener("click", close);
  document.addEventListener("click", event => { if (!event.target.closest("#searching")) close(); });
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) { event.preventDefault(); input.focus(); input.select(); }
  });
}
