// A reading: its questions; one question is shown at once.

import { link } from "./api.js";
import { h } from "./dom.js";
import { plural, seconds, short } from "./format.js";
import { tracePage } from "./trace.js";

export async function readingPage(run, params) {
  if (run.questions.length === 1) return { ...(await tracePage(run, "q0", params)), trail: [[run.questions[0].question, null]] };
  return {
    title: run.document.source,
    trail: [[run.document.source, null]],
    element: h(
      "section", { class: "page" },
      h("h1", {}, run.document.source),
      h("p", { class: "facts" }, h("span", {}, run.model), h("span", {}, plural(run.questions.length, "question")), run.document.num_chars ? h("span", {}, `${short(run.document.num_chars)} characters`) : null),
      h("ul", { class: "cards" }, run.questions.map((each, number) => h(
        "li", { class: "row" },
        h("a", { class: "go", href: link("run", run.id, "trace", `q${number}`) }, h("span", { class: "what", dir: "auto" }, each.question)),
        h("p", { class: "answer", dir: "auto" }, each.answer ?? h("span", { class: "quiet" }, "no answer yet")),
        h("p", { class: "facts" }, h("span", {}, plural(each.totals.sections, "section")), h("span", {}, `${short(each.totals.prompt_tokens)} tokens in`), h("span", {}, seconds(each.totals.seconds))),
      ))),
    ),
  };
}
