"use strict";
// From the address to what is shown: #pass/0/forward/1.
const routes = { __proto__: null, overview, ops: opsView, op: opView, casts: castsView, profile: timeView, error: errorView, buckets: bucketsView, pass: passView, code: codePage, module: moduleView, time: timelineView };

function show() {
  let content;
  try {
    const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent), graph = /^\d+$/.test(rest[0]) ? [Number(rest[0]), ...rest.slice(1)] : rest;
    content = (routes[name] || overview)(...graph);
  } catch (error) {
    content = [el("p", { class: "warning" }, `Nothing can be shown for ${location.hash} (${error.message}).`)];
  }
  document.getElementById("main").replaceChildren(...content.flat(Infinity).filter(part => part !== "" && part !== null));
  for (const entry of document.querySelectorAll("nav a")) entry.classList.toggle("on", entry.hash === (location.hash || "#overview"));
}

document.title = `apexfx: ${data.options}`;
document.getElementById("options").textContent = data.options;
const chosen = document.getElementById("overlay"), root = document.documentElement;
chosen.append(...overlays.map(what => el("option", {}, what)));
chosen.addEventListener("change", () => { overlay.what = chosen.value; show(); });
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
addEventListener("hashchange", show);
addEventListener("keydown", event => {
  if (event.key === "Escape") document.getElementById("inspector").hidden = true;
  if ((event.key === "Enter" || event.key === " ") && event.target.getAttribute("role") === "button") {
    event.preventDefault();
    event.target.dispatchEvent(new MouseEvent("click", { bubbles: true })); // a drawn box has no click()
  }
});
side();
startSearch();
show();
