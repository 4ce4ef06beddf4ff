// An evaluation: its table, its plots, and the items behind a cell.

import { get, isExport, link, linkWith, runPath } from "./api.js";
import { lineChart } from "./charts.js";
import { h, replaced } from "./dom.js";
import { count, lengthName, number, percent, plural, seconds, short } from "./format.js";

export async function evaluationPage(run, params) {
  const holder = h("div", {});
  let grader = params.get("grader") ?? "";
  async function draw() {
    const found = await get(runPath(run.id, "cells"), { grader });
    const all = h("p", {}, h("a", { class: "button", href: linkWith({ grader }, "run", run.id, "items") }, "All items"));
    replaced(holder, graders(found.graders, grader, choose), table(run, found.cells, grader), plots(found), all);
  }
  function choose(name) {
    grader = name;
    history.replaceState(null, "", linkWith({ grader }, "run", run.id));
    return draw();
  }
  await draw();
  return {
    title: run.what || run.name,
    trail: [[run.what || run.name, null]],
    element: h(
      "section", { class: "page" },
      h("h1", {}, run.what || run.name),
      h("p", { class: "facts" }, [run.model, run.methods.join(", "), run.state, run.seed === null ? null : `seed ${run.seed}`, run.length_tokenizer && `lengths by ${run.length_tokenizer}`].filter(Boolean).map((each) => h("span", {}, each))),
      holder,
    ),
    refresh: draw,
  };
}

// The graders that an answer can be scored by: as the evaluation names them, and others.
function graders(names, chosen, onChoose) {
  if (!names.length) return null;
  return h("div", { class: "tools" },
    h("span", { class: "quiet" }, "Graded"),
    h("div", { class: "chips", role: "group", "aria-label": "graded by" }, ["", ...names].map((name) => h("button", {
      type: "button", "aria-pressed": String(name === chosen), onclick: () => onChoose(name),
    }, name ? `by ${name}` : "as evaluated"))));
}

function table(run, cells, grader) {
  const lengths = [...new Set(cells.map((cell) => cell.tokens))].sort((a, b) => (a ?? 0) - (b ?? 0));
  const rows = new Map();
  for (const cell of cells) {
    const name = `${cell.task}\n${cell.method}`;
    rows.set(name, { ...(rows.get(name) ?? {}), task: cell.task, method: cell.method, [cell.tokens]: cell });
  }
  let last = null;
  const lines = [...rows.values()].map((row) => {
    const isNew = row.task !== last;
    last = row.task;
    return h(
      "tr", { class: isNew ? "first" : "" },
      h("th", { scope: "row" }, isNew ? row.task : h("span", { class: "visually-hidden" }, row.task)),
      h("td", { class: "method" }, row.method),
      lengths.map((tokens) => cellView(run, row[tokens], grader)),
    );
  });
  return h(
    "div", { class: "scroll" },
    h("table", { class: "cells" },
      h("caption", {}, `Score in %${grader ? ` by ${grader}` : ""} with its 95 % interval. Failed items count as wrong. A cell opens its items.`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Task"), h("th", { scope: "col" }, "Method"), lengths.map((tokens) => h("th", { scope: "col", class: "num" }, lengthName(tokens))))),
      h("tbody", {}, lines)),
  );
}

function cellView(run, cell, grader) {
  if (!cell) return h("td", { class: "cell none" }, "");
  const { value, low, high } = cell.score;
  const more = `${plural(cell.num_items, "item")}, ${cell.num_failed} failed, ${number(cell.mean_calls)} calls, ${short(cell.mean_tokens)} tokens and ${seconds(cell.mean_seconds)} each`;
  return h(
    "td", { class: `cell heat${heat(value)}` },
    h("a", { href: linkWith({ task: cell.task, method: cell.method, tokens: cell.tokens, grader }, "run", run.id, "items"), title: more },
      h("b", {}, percent(value)),
      h("small", {}, `${percent(low, 0)}–${percent(high, 0)}`),
      cell.num_failed ? h("small", { class: "failed" }, `${cell.num_failed} failed`) : null),
  );
}

function heat(value) {
  return Math.min(9, Math.max(0, Math.floor(value * 10)));
}

function plots({ cells, depths }) {
  const charts = [];
  for (const task of new Set(cells.map((cell) => cell.task))) {
    const mine = cells.filter((cell) => cell.task === task);
    const lengths = [...new Set(mine.map((cell) => cell.tokens))].filter((each) => each !== null).sort((a, b) => a - b);
    if (lengths.length > 1) {
      charts.push(lineChart(
        [...new Set(mine.map((cell) => cell.method))].map((method) => ({
          name: method,
          points: mine.filter((cell) => cell.method === method && cell.tokens !== null).map((cell) => ({ x: cell.tokens, y: cell.score.value, low: cell.score.low, high: cell.score.high })).sort((a, b) => a.x - b.x),
        })),
        { title: `${task}: score by length`, log: true, domain: [0, 1], format: (value) => percent(value, 0), xName: "tokens", xTicks: lengths.map((each) => [each, lengthName(each)]) },
      ));
    }
    const deep = depths.filter((each) => each.task === task);
    if (deep.length) {
      charts.push(lineChart(
        deep.map((each) => ({ name: each.method, points: each.buckets.map((bucket) => ({ x: Math.round(50 * (bucket.start + bucket.end)), y: bucket.score?.value ?? null, low: bucket.score?.low, high: bucket.score?.high })) })),
        { title: `${task}: score by depth of the evidence`, domain: [0, 1], format: (value) => percent(value, 0), xName: "depth %", xTicks: [[5, "start"], [50, "middle"], [95, "end"]] },
      ));
    }
  }
  return charts.length ? h("div", { class: "charts" }, charts) : null;
}

// --- items ---------------------------------------------------------------------------------------

export async function itemsPage(run, params) {
  const validation = params.get("validation");
  const grader = params.get("grader");
  const wanted = { task: params.get("task"), method: params.get("method"), tokens: params.get("tokens"), status: params.get("status"), text: "" };
  const path = runPath(run.id, "items");
  const body = h("tbody", {});
  const summary = h("p", { class: "quiet", role: "status" });
  const more = h("button", { type: "button", class: "button", onclick: () => load(false) }, "More");
  let num = 0;

  async function load(isFirst) {
    const found = await get(path, { ...wanted, step: validation, grader, offset: isFirst ? null : num });
    const rows = found.items.map((item) => itemRow(run, item, validation));
    if (isFirst) replaced(body, rows);
    else body.append(...rows);
    num = (isFirst ? 0 : num) + found.items.length;
    more.hidden = isExport || num >= found.num_items;
    summary.textContent = `${plural(found.num_items, "item")}, wrong ones first${num < found.num_items ? `; ${count(num)} shown` : ""}`;
  }

  let waiting = null;
  const search = h("input", {
    type: "search", id: "search", placeholder: "Filter by answer or id", "aria-label": "Filter items",
    oninput: (event) => { wanted.text = event.target.value; clearTimeout(waiting); waiting = setTimeout(() => load(true), 150); },
  });
  const states = h("div", { class: "chips", role: "group", "aria-label": "which items" }, [["", "All"], ["wrong", "Wrong"], ["failed", "Failed"], ["right", "Right"]].map(([value, name]) => h("button", {
    type: "button", "aria-pressed": String((wanted.status ?? "") === value),
    onclick: (event) => {
      wanted.status = value;
      for (const each of event.currentTarget.parentElement.children) each.setAttribute("aria-pressed", String(each === event.currentTarget));
      load(true);
    },
  }, name)));
  await load(true);
  const title = [wanted.task, wanted.method, wanted.tokens && lengthName(Number(wanted.tokens)), grader && `by ${grader}`].filter(Boolean).join(", ") || "All items";
  return {
    title,
    trail: [[run.what || run.name, linkWith({ grader }, "run", run.id)], ...(validation ? [[`validation ${validation}`, linkWith({ validation }, "run", run.id, "items")]] : []), [title, null]],
    element: h(
      "section", { class: "page" },
      h("div", { class: "heading" }, h("h1", {}, title), summary),
      h("div", { class: "tools" }, isExport ? null : search, states),
      h("div", { class: "scroll" }, h("table", { class: "items list" }, h("thead", {}, h("tr", {}, ["Score", "Answer", "Accepted", "Task", "Length", "Calls", "Time"].map((name) => h("th", { scope: "col" }, name)))), body)),
      more,
    ),
  };
}

export function traceKey(item, validation) {
  return validation ? `v${validation}.${item.number}` : `i${item.number}`;
}

function itemRow(run, item, validation) {
  return h(
    "tr", { class: "row" },
    h("td", {}, scoreBadge(item)),
    h("td", { class: "main" }, h("a", { class: "go", dir: "auto", href: link("run", run.id, "trace", traceKey(item, validation)) }, item.answer.trim() || item.error || "(empty)")),
    h("td", { class: "accepted", dir: "auto", "data-label": "accepted" }, item.answers.join(" · ")),
    h("td", {}, h("span", { class: "task" }, item.task), h("span", { class: "name" }, `${item.method}, ${item.index}`)),
    h("td", { class: "num" }, lengthName(item.tokens)),
    h("td", { class: "num", "data-label": "calls" }, count(item.num_calls)),
    h("td", { class: "num" }, seconds(item.seconds)),
  );
}

export function scoreBadge(item) {
  if (item.status !== "ok") return h("span", { class: "score failed" }, "failed");
  const kind = item.score >= 1 ? "right" : item.score > 0 ? "part" : "wrong";
  return h("span", { class: `score ${kind}` }, number(item.score));
}
