// The list of runs.

import { get, isExport, link } from "./api.js";
import { h, replaced } from "./dom.js";
import { KINDS, count, kindName, when } from "./format.js";

const wanted = { text: "", kind: "", state: "" };
let chosen = [];

export async function runsPage() {
  let runs = (await get("/runs")).runs;
  const body = h("tbody", {});
  const summary = h("p", { class: "quiet", role: "status" });
  const compareBar = h("div", { class: "compare-bar" });

  function shown() {
    const text = wanted.text.toLowerCase();
    return runs.filter(
      (run) =>
        (!wanted.kind || run.kind === wanted.kind) &&
        (!wanted.state || stateOf(run) === wanted.state) &&
        (!text || `${run.name} ${run.what} ${run.state}`.toLowerCase().includes(text)),
    );
  }

  function draw() {
    const found = shown();
    summary.textContent = found.length === runs.length ? `${count(runs.length)} runs` : `${count(found.length)} of ${count(runs.length)} runs`;
    replaced(body, found.map((run) => row(run, drawCompare)));
    drawCompare();
  }

  function drawCompare() {
    chosen = chosen.filter((id) => runs.some((run) => run.id === id));
    if (chosen.length !== 2) {
      replaced(compareBar, chosen.length === 1 ? h("span", { class: "quiet" }, "choose a second evaluation to compare") : null);
      return;
    }
    replaced(compareBar, h("a", { class: "button", href: link("compare", ...chosen) }, "Compare the two"));
  }

  const search = h("input", {
    type: "search", id: "search", placeholder: "Filter runs", "aria-label": "Filter runs", value: wanted.text,
    oninput: (event) => { wanted.text = event.target.value; draw(); },
  });
  const kinds = chips("kind", [["", "All"], ...Object.entries(KINDS)], draw);
  const states = chips("state", [["", "Any state"], ["running", "Running"], ["unfinished", "Unfinished"], ["complete", "Complete"]], draw);
  draw();
  return {
    title: "Runs",
    trail: [],
    element: h(
      "section", { class: "page" },
      h("div", { class: "heading" }, h("h1", {}, "Runs"), summary),
      h("div", { class: "tools" }, search, kinds, states, compareBar),
      runs.length
        ? h("table", { class: "runs list" }, h("thead", {}, h("tr", {}, ["", "Run", "Kind", "Progress", "Started"].map((name) => h("th", { scope: "col" }, name)))), body)
        : h("p", { class: "empty" }, "There are no runs here yet. ", h("code", {}, "memagent ask FILE -q QUESTION"), " makes one."),
    ),
    every: 3000,
    refresh: async () => {
      const fresh = (await get("/runs")).runs;
      if (JSON.stringify(fresh) === JSON.stringify(runs)) return;
      runs = fresh;
      const focused = document.activeElement?.getAttribute("href");
      draw();
      if (focused) [...body.querySelectorAll("a.go")].find((each) => each.getAttribute("href") === focused)?.focus();
    },
  };
}

function row(run, onChoose) {
  const share = run.num_all ? Math.min(1, run.num_done / run.num_all) : run.is_complete ? 1 : null;
  const box = run.kind === "eval" && !isExport && h("input", {
    type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.includes(run.id),
    onchange: (event) => {
      chosen = chosen.filter((id) => id !== run.id);
      if (event.target.checked) chosen = [...chosen, run.id].slice(-2);
      for (const other of document.querySelectorAll("table.runs input[type=checkbox]")) other.checked = chosen.includes(other.value);
      onChoose();
    },
    value: run.id,
  });
  return h(
    "tr", { class: "row" },
    h("td", { class: "pick" }, box),
    h("td", { class: "main" }, h("a", { href: link("run", run.id), class: "go" }, h("span", { class: "what", dir: "auto" }, run.what || run.name)), h("span", { class: "name" }, run.name)),
    h("td", {}, h("span", { class: `badge ${run.kind || "damaged"}` }, kindName(run.kind))),
    h("td", { class: "progress" }, meter(share, run), h("span", { class: "state" }, run.state)),
    h("td", { class: "time" }, when(run.created)),
  );
}

export function meter(share, run) {
  if (share === null) return null;
  const name = run.is_running ? "running" : run.is_complete ? "complete" : "unfinished";
  return h("span", { class: `meter ${name}` }, h("i", { style: { width: `${(100 * share).toFixed(1)}%` } }));
}

export function stateOf(run) {
  return run.is_running ? "running" : run.is_complete ? "complete" : "unfinished";
}

function chips(name, choices, onChange) {
  const group = h("div", { class: "chips", role: "group", "aria-label": name });
  for (const [value, label] of choices) {
    group.append(h("button", {
      type: "button", "aria-pressed": String(wanted[name] === value),
      onclick: (event) => {
        wanted[name] = value;
        for (const each of group.children) each.setAttribute("aria-pressed", String(each === event.currentTarget));
        onChange();
      },
    }, label));
  }
  return group;
}
