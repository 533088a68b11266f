"use strict";
// Time and memory along a graph: compute by layer, communication between its start and its wait, bytes alive by kind.
const KINDS = { parameters: "#0072b2", buffers: "#56b4e9", "optimizer state": "#009e73", inputs: "#8a8f98", activations: "#e69f00", gradients: "#d55e00" };
const WIDTH = 1200, axis = { by: "nodes" };

function timelineView(graph, stageName) {
  const stage = stageOf(graph, stageName), nodes = [...parse(stage, lastCode(stage)).nodes.values()].filter(node => !node.name.includes(".") && !node.input);
  const weights = { nodes: () => 1, flops: node => node.flops, time: node => numbersOf(stage, "time").share.get(node.name) || 0 };
  const total = nodes.reduce((sum, node) => sum + weights[axis.by](node), 0) || 1;
  let sum = 0; // every node is at least a little wide, so that none hides behind another
  const at = [0, ...nodes.map(node => sum += 0.9 * weights[axis.by](node) / total + 0.1 / nodes.length)].map(x => WIDTH * x / (sum || 1));
  const place = new Map(nodes.map((node, i) => [node.name, i]));
  const picture = svg("svg", { class: "timeline", role: "img", tabindex: 0 });
  let y = 14;
  const label = text => { picture.append(svg("text", { x: 0, y, class: "dim" }, text)); y += 6; };
  label("compute, by layer (lighter: backward)");
  for (const [key, from, to] of layerRuns(nodes)) picture.append(block(at[from], at[to], y, 22, layerColour(key), key, `${key || "no layer"}: ${counted(to - from, "node")}`));
  y += 44;
  if (stage.windows.length) {
    label("communication, from start to wait");
    const ends = [];
    for (const window of stage.windows) {
      const from = at[place.get(window.start)], to = at[place.get(window.wait) + 1], name = window.bucket === null ? "collective" : `bucket ${window.bucket}`;
      if (from === undefined || to === undefined) continue;
      let lane = ends.findIndex(end => end <= from);
      if (lane < 0) lane = ends.length;
      ends[lane] = to;
      const plan = data.graphs[graph].plan, bytes = plan && plan.buckets[window.bucket] ? `, ${size(plan.buckets[window.bucket].bytes)}` : "";
      picture.append(block(from, to, y + 20 * lane, 16, "#a8247f", name + bytes,
        `${name}${bytes}: ${window.start} to ${window.wait}, ${counted(window.nodes, "node")} and ${(window.flops / 1e6).toFixed(1)} MFLOP in between`));
    }
    y += 20 * ends.length + 22;
  }
  const kinds = stage.memory ? memoryKinds(stage.memory) : {}, memoryAt = stage.memory ? new Map(stage.memory.nodes.map((n, i) => [textOf(n), i])) : null;
  if (stage.memory) {
    label(`memory, at most ${size(stage.memory.peak)} before anything is fused`);
    picture.append(...areas(kinds, nodes.map(node => memoryAt.get(node.name)), at, y, 220, stage.memory.peak));
    y += 225;
  }
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${y}`);
  const cursor = svg("line", { class: "cursor", y1: 0, y2: y, x1: -9, x2: -9 }), here = el("p", { id: "here", class: "dim" }, "Point at the picture, or take the arrow keys: the op there. Click or Enter: all about it.");
  picture.append(cursor);
  const nearest = event => {
    const box = picture.getBoundingClientRect(), x = WIDTH * (event.clientX - box.left) / box.width;
    let [low, high] = [0, nodes.length - 1];
    while (low < high) { const middle = (low + high + 1) >> 1; if (at[middle] <= x) low = middle; else high = middle - 1; }
    return low;
  };
  let pointed = 0;
  const point = i => {
    pointed = i;
    const node = nodes[i], m = memoryAt && memoryAt.get(node.name);
    cursor.setAttribute("x1", at[i]);
    cursor.setAttribute("x2", at[i]);
    const alive = Object.entries(kinds).map(([kind, bytes]) => [kind, bytes[m]]).filter(([, bytes]) => bytes);
    here.replaceChildren(el("b", {}, node.name), ` ${node.op} `, chip(node.type), ` ${node.module && `of ${node.module}${node.backward ? " (backward)" : ""}`} ${node.source}`, el("br"),
      alive.length ? `alive: ${size(alive.reduce((sum, [, bytes]) => sum + bytes, 0))} = ${alive.map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(" + ")}` : "");
  };
  const inspectPointed = () => inspect(graph, stage, lastCode(stage), nodes[pointed].name);
  picture.addEventListener("pointermove", event => point(nearest(event)));
  picture.addEventListener("click", event => { point(nearest(event)); inspectPointed(); });
  picture.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter") inspectPointed();
    if (!step) return;
    event.preventDefault();
    point(Math.max(0, Math.min(nodes.length - 1, pointed + step)));
  });
  const by = (key, text) => el("button", { type: "button", class: axis.by === key ? "on" : "", onclick: () => { axis.by = key; show(); } }, text);
  return [el("h1", {}, `Time and memory of graph ${graph}, ${stageName}`),
    el("div", { class: "row" }, "along", by("nodes", "nodes in order"), nodes.some(node => node.flops) ? by("flops", "FLOP of matrix products") : "", stage.kernels.length ? by("time", "measured time") : "",
      el("span", { class: "legend" }, Object.keys(kinds).map(kind => el("span", { style: { borderColor: KINDS[kind] } }, kind)))), here, picture];
}

function* layerRuns(nodes) {
  for (let from = 0, i = 1; i <= nodes.length; i++)
    if (i === nodes.length || nodes[i].layer !== nodes[from].layer) { yield [nodes[from].layer, from, i]; from = i; }
}
function layerColour(key) {
  if (!key) return "var(--line)";
  const number = Number((key.match(/(\d+)( \(backward\))?$/) || [0, 0])[1]);
  return `hsl(${215 + 30 * (number % 2)} 55% ${key.endsWith("(backward)") ? 68 : 52}%)`;
}
function block(from, to, y, height, colour, text, title) {
  const short = text.replace(" (backward)", "").split(".").slice(-2).join("."), fits = (to - from) > 6.2 * short.length;
  return svg("g", {}, svg("rect", { x: from, y, width: Math.max(to - from - 0.5, 0.6), height, rx: 2, style: { fill: colour } }), svg("title", {}, title),
    fits ? svg("text", { x: from + 4, y: y + height - 5, style: { fill: "#fff" } }, short) : "");
}
function memoryKinds(memory) {
  const kinds = {};
  for (const [kind, steps] of Object.entries(memory.steps)) { let alive = 0; kinds[kind] = steps.map(step => alive += step); }
  return kinds;
}
/** Return a polygon for each kind, stacked. `index[i]`: where node i is in the timeline; `at[i]`: where it is drawn. */
function areas(kinds, index, at, top, height, peak) {
  let below = index.map(() => 0);
  return Object.entries(kinds).map(([kind, bytes]) => {
    const above = below.map((sum, i) => sum + (bytes[index[i]] || 0)), y = sum => (top + height * (1 - sum / peak)).toFixed(1);
    const steps = sums => sums.flatMap((sum, i) => [`${at[i].toFixed(1)},${y(sum)}`, `${at[i + 1].toFixed(1)},${y(sum)}`]);
    const polygon = svg("polygon", { points: [...steps(above), ...steps(below).reverse()].join(" "), fill: KINDS[kind] });
    below = above;
    return polygon;
  });
}
