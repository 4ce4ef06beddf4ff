// Two evaluations side by side.

import { get, link } from "./api.js";
import { h } from "./dom.js";
import { lengthName, percent, plural } from "./format.js";
import { scoreBadge, traceKey } from "./evaluation.js";

export async function comparePage(first, second) {
  const found = await get("/compare", { first, second });
  const [one, other] = found.runs;
  const body = h("tbody", {}, found.items.map((pair) => pairRow(pair, one, other)));
  let num = found.items.length;
  const more = h("button", {
    type: "button", class: "button", hidden: num >= found.num_differing,
    onclick: async () => {
      const next = await get("/compare", { first, second, offset: num });
      body.append(...next.items.map((pair) => pairRow(pair, one, other)));
      num += next.items.length;
      more.hidden = num >= found.num_differing;
    },
  }, "More");
  return {
    title: "Comparison",
    trail: [["Comparison", null]],
    element: h(
      "section", { class: "page" },
      h("h1", {}, "Comparison"),
      h("dl", { class: "sides" }, h("dt", {}, "A"), h("dd", {}, h("a", { href: link("run", one.id) }, one.what || one.name), h("span", { class: "name" }, one.name)), h("dt", {}, "B"), h("dd", {}, h("a", { href: link("run", other.id) }, other.what || other.name), h("span", { class: "name" }, other.name))),
      found.num_shared
        ? [
          h("div", { class: "scroll" }, h("table", { class: "cells" },
            h("caption", {}, `Score in % on the ${plural(found.num_shared, "item")} that both have.`),
            h("thead", {}, h("tr", {}, ["Task", "Method", "Length", "A", "B", "B − A", "Better", "Worse", "p"].map((name, place) => h("th", { scope: "col", class: place > 1 ? "num" : "" }, name)))),
            h("tbody", {}, found.cells.map(cellRow)))),
          h("div", { class: "heading" }, h("h2", {}, "Items with different scores"), h("p", { class: "quiet" }, `${plural(found.num_differing, "item")}; those that B gets wrong come first`)),
          h("div", { class: "scroll" }, h("table", { class: "items pairs list" }, h("thead", {}, h("tr", {}, ["A", "B", "Answer of A", "Answer of B", "Accepted", "Task"].map((name) => h("th", { scope: "col" }, name)))), body)),
          more,
        ]
        : h("p", { class: "empty" }, "The two have no item in common: the same task, method, length and number."),
    ),
  };
}

function cellRow(cell) {
  const { value, low, high } = cell.difference;
  const kind = low > 0 ? "plus" : high < 0 ? "minus" : "";
  return h(
    "tr", { class: "first" },
    h("th", { scope: "row" }, cell.task), h("td", { class: "method" }, cell.method), h("td", { class: "num" }, lengthName(cell.tokens)),
    h("td", { class: "num" }, percent(cell.first.value)), h("td", { class: "num" }, percent(cell.second.value)),
    h("td", { class: `num ${kind}` }, `${value > 0 ? "+" : ""}${percent(value)}`, h("small", {}, ` ${percent(low, 0)} to ${percent(high, 0)}`)),
    h("td", { class: "num" }, cell.num_better), h("td", { class: "num" }, cell.num_worse), h("td", { class: "num" }, cell.p_value < 0.001 ? "<0.001" : cell.p_value.toFixed(3)),
  );
}

function pairRow(pair, one, other) {
  return h(
    "tr", { class: "row" },
    h("td", { "data-label": "A" }, scoreBadge(pair.first)), h("td", { "data-label": "B" }, scoreBadge(pair.second)),
    h("td", { class: "main", "data-label": "A" }, h("a", { class: "go", dir: "auto", href: link("run", one.id, "trace", traceKey(pair.first)) }, pair.first.answer.trim() || pair.first.error || "(empty)")),
    h("td", { class: "main", "data-label": "B" }, h("a", { dir: "auto", href: link("run", other.id, "trace", traceKey(pair.second)) }, pair.second.answer.trim() || pair.second.error || "(empty)")),
    h("td", { class: "accepted", dir: "auto", "data-label": "accepted" }, pair.first.answers.join(" · ")),
    h("td", {}, h("span", { class: "task" }, pair.first.task), h("span", { class: "name" }, `${pair.first.method}, ${lengthName(pair.first.tokens)}, ${pair.first.index}`)),
  );
}
