"use strict";
// A module drawn: its own ops and, as one box each, the modules below it. dagre places them.
const VIEWS = /^(view|_unsafe_view|reshape|t|transpose|permute|expand|getitem|detach|unsqueeze|squeeze|select|slice|alias|contiguous)$/;
const MOST_BOXES = 260;
const drawing = { backward: false, views: false };

/** Return boxes (key -> {label, sub, node, module, ...}) and edges of a module; ops of other modules at its border are "outside". */
function region(stage, path) {
  const backward = drawing.backward || stage.stage === "backward";
  const { nodes } = parse(stage, lastCode(stage)), boxes = new Map(), edges = new Map(), below = path ? `${path}.` : "";
  const inside = node => !node.input && Boolean(node.backward || node.isAfter) === backward && (node.module === path || node.module.startsWith(below) && (path || node.module));
  const keyOf = node => {
    const [first, second] = node.module === path ? [""] : node.module.slice(below.length).split(".");
    const rest = /^\d+$/.test(second) ? `${first}.${second}` : first; // the layers of a list, rather than the list
    return rest ? `module ${below}${rest}` : `node ${node.name}`;
  };
  const skipped = node => !drawing.views && inside(node) && node.module === path && VIEWS.test(node.op);
  const sources = (name, depth = 0) => { // what a node reads, through views that are not drawn
    const node = nodes.get(name);
    return skipped(node) && depth < 50 ? node.reads.flatMap(read => sources(read, depth + 1)) : [name];
  };
  for (const node of nodes.values()) {
    if (!inside(node) || skipped(node)) continue;
    const key = keyOf(node), child = key.startsWith("module");
    if (!boxes.has(key)) boxes.set(key, child ? { label: key.slice(7 + below.length), path: key.slice(7), members: [] } : { label: node.op, sub: node.type, node });
    if (child) boxes.get(key).members.push(node);
    for (const read of node.reads.flatMap(name => sources(name))) {
      const source = nodes.get(read);
      if (source.input && !/^(input|batch|x$)/.test(source.name) && source.readers.length < 40 && !inside(source) && source.name.includes("_")) continue; // parameters are in the inspector
      const from = inside(source) && !skipped(source) ? keyOf(source) : `outside ${read}`;
      if (from === key) continue;
      if (!boxes.has(from)) boxes.set(from, { label: source.own, sub: source.type, node: source, outside: true });
      edges.set(`${from}→${key}`, [from, key]);
    }
  }
  const linked = new Set([...edges.values()].flat());
  if (stage.stage === "step" && !path) for (const key of boxes.keys()) if (!linked.has(key)) boxes.delete(key); // counters of the update
  const sizeOf = type => (type.match(/\d+(?=[,\]])/g) || []).reduce((product, size) => product * size, 1);
  for (const box of boxes.values()) { // what leaves a module: the last of its largest results (no statistics) that are read outside of it
    if (!box.members) continue;
    const members = new Set(box.members.map(node => node.name)), leaves = node => node.type && node.readers.some(reader => !members.has(reader));
    box.sub = (box.members.filter(node => leaves(node) && nodes.get(node.readers[0]).backward === node.backward)
      .sort((a, b) => sizeOf(a.type) - sizeOf(b.type)).pop() || {}).type;
  }
  return { boxes, edges };
}

function drawRegion(graph, stage, path) {
  const { boxes, edges } = region(stage, path);
  if (!boxes.size) return el("p", { class: "dim" }, `No op of ${path || "the model"} is in this part of the graph.`);
  if (boxes.size > MOST_BOXES) return el("p", {}, `${boxes.size} boxes are too many to read; choose a module below it at the side.`);
  const numbers = [...boxes.values()].map(box => box.number = isMeasured() && !box.outside ? numberOfAll(stage, box.members || [box.node]) : undefined);
  const most = overlay.what === "time" ? numbers.reduce((most, x) => x > most ? x : most, 0) : numbersOf(stage, overlay.what).most;
  for (const box of boxes.values()) if (box.number !== undefined) box.sub = [box.sub, numberText(overlay.what, box.number)].filter(Boolean).join(" · ");
  const layout = new dagre.graphlib.Graph().setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, marginx: 12, marginy: 12 }).setDefaultEdgeLabel(() => ({}));
  for (const [key, box] of boxes) layout.setNode(key, { width: 24 + 6.6 * Math.max(box.label.length, (box.sub || "").length), height: box.sub ? 36 : 24 });
  for (const [from, to] of edges.values()) layout.setEdge(from, to);
  dagre.layout(layout);
  const open = box => box.path ? () => { location.hash = address("module", graph, stage.stage, box.path); } : () => inspect(graph, stage, lastCode(stage), box.node.name);
  const shapes = [...boxes].map(([key, box]) => {
    const { x, y, width, height } = layout.node(key), kind = `${box.path ? "module" : box.outside ? "outside" : ""} ${box.number > 0 ? "hot" : ""}`;
    const dtype = overlay.what === "dtype" ? `var(--${dtypeClass(box.sub || "")})` : "var(--other)";
    return svg("g", { class: kind, transform: `translate(${x - width / 2} ${y - height / 2})`, style: { color: dtype }, onclick: open(box), "aria-label": box.path || box.node.name },
      svg("rect", { width, height, rx: 6, style: box.number > 0 ? { fill: heat(box.number, most) } : {} }), svg("text", { x: width / 2, y: 15 }, box.label), box.sub ? svg("text", { class: "sub", x: width / 2, y: 29 }, box.sub) : "",
      svg("title", {}, box.path ? `${box.path}: ${counted(box.members.length, "op")}` : box.node.name));
  });
  const lines = layout.edges().map(edge => svg("path", { d: "M" + layout.edge(edge).points.map(p => `${p.x} ${p.y}`).join("L"), "marker-end": "url(#arrow)" }));
  const { width, height } = layout.graph();
  return panned(svg("svg", { class: "drawing", id: "drawing" }, svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8z" }))), lines, shapes), width, height);
}

/** Let the wheel zoom and dragging move a drawing; at first it is shown whole, or its top where it is long. */
function panned(picture, width, height) {
  let view;
  const apply = () => picture.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
  new ResizeObserver((_, observer) => {
    const { clientWidth: w, clientHeight: h } = picture, scale = Math.max(0.8, Math.min(1.25, w / width, h / height));
    view = { x: (width - w / scale) / 2, y: height * scale < h ? (height - h / scale) / 2 : 0, w: w / scale, h: h / scale };
    apply();
    observer.disconnect();
  }).observe(picture);
  picture.addEventListener("wheel", event => {
    event.preventDefault();
    const factor = Math.exp(event.deltaY / 500), box = picture.getBoundingClientRect();
    const [fx, fy] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    view = { x: view.x + fx * view.w * (1 - factor), y: view.y + fy * view.h * (1 - factor), w: view.w * factor, h: view.h * factor };
    apply();
  }, { passive: false });
  picture.addEventListener("pointermove", event => {
    if (!(event.buttons & 1)) return;
    view.x -= event.movementX * view.w / picture.clientWidth;
    view.y -= event.movementY * view.h / picture.clientHeight;
    apply();
  });
  return picture;
}

function moduleView(graph, stageName, path) {
  const own = data.graphs[graph].stages, stage = stageName ? stageOf(graph, stageName) : own[own.length - 1];
  const parts = path.split("."), crumbs = path ? parts.map((part, i) => [" . ", link(part, "module", graph, stage.stage, parts.slice(0, i + 1).join("."))]) : [];
  const toggle = (label, key) => el("button", { type: "button", class: drawing[key] ? "on" : "", onclick: () => { drawing[key] = !drawing[key]; show(); } }, label);
  const below = ops.filter(op => op.graph === graph && op.computes && (!path || op.where === path || op.where.startsWith(`${path}.`)));
  return [el("h1", {}, link("model", "module", graph, stage.stage, ""), crumbs),
    el("div", { class: "row" }, own.map(s => el("a", { class: `tab ${s === stage ? "on" : ""}`, href: address("module", graph, s.stage, path) }, s.stage)),
      stage.stage === "step" && stage.backward_of.length ? toggle("its backward", "backward") : "", toggle("views, too", "views"),
      el("span", { class: "dim" }, "thick: a module, click to go in · dashed: from outside · drag, wheel to zoom")),
    moduleTime(graph, path), drawRegion(graph, stage, path), below.length ? [el("h2", {}, `${counted(below.length, "op")} that ${below.length === 1 ? "computes" : "compute"}`), opRows(below)] : ""];
}
