// A trace: the timeline of its steps, and one step with its memory, what changed in it, and its prompt.

import { get, link, linkWith, runPath } from "./api.js";
import { changeStrip, stepTree } from "./charts.js";
import { h, prose, replaced } from "./dom.js";
import { count, flagName, number, percent, plural, seconds, short, signed } from "./format.js";

let showsChanges = true;

export async function tracePage(run, key, params) {
  const path = runPath(run.id, "traces", key);
  let trace = await get(path);
  let selected = Number(params.get("step") ?? Math.max(0, trace.steps.length - 1));
  selected = Math.min(Math.max(0, selected), Math.max(0, trace.steps.length - 1));
  let order = [];
  const list = h("ol", { class: "steps", "aria-label": "steps" });
  const detail = h("section", { class: "detail", "aria-live": "polite" });
  const strip = h("div", { class: "strip-holder" });
  const top = h("div", {});

  function drawTop() {
    replaced(top, heading(run, trace, select));
    drawStrip();
  }

  function drawStrip() {
    const isTree = trace.steps.some((step) => step.round || (step.inputs ?? []).length);
    replaced(
      strip,
      isTree ? [h("h2", {}, "Rounds"), stepTree(trace.steps, selected, select)] : null,
      trace.steps.length > 1 && !isTree ? changeStrip(trace.steps, selected, select) : null,
    );
  }

  function drawList() {
    const longest = Math.max(0.001, ...trace.steps.map((step) => step.seconds));
    order = readingOrder(trace.steps);
    replaced(list, order.map((place) => stepRow(trace.steps[place], place, longest, select)));
    mark();
  }

  function mark() {
    [...list.children].forEach((each, row) => {
      each.firstChild.setAttribute("aria-current", order[row] === selected ? "step" : "false");
    });
    for (const each of strip.querySelectorAll("[data-step]")) each.classList.toggle("selected", Number(each.dataset.step) === selected);
  }

  function move(by) {
    const row = Math.min(Math.max(0, order.indexOf(selected) + by), order.length - 1);
    return select(order[row]);
  }

  // scrolls the list and not the page
  function bringIntoView() {
    const row = list.children[order.indexOf(selected)];
    const side = list.parentElement;
    if (!row || !side) return;
    const [top, bottom] = [row.offsetTop - side.offsetTop, row.offsetTop - side.offsetTop + row.offsetHeight];
    if (top < side.scrollTop) side.scrollTop = top - 8;
    else if (bottom > side.scrollTop + side.clientHeight) side.scrollTop = bottom - side.clientHeight + 8;
  }

  let asked = 0;
  async function select(place) {
    if (!trace.steps.length) return;
    selected = Math.min(Math.max(0, place), trace.steps.length - 1);
    mark();
    bringIntoView();
    history.replaceState(null, "", linkWith({ step: selected }, "run", run.id, "trace", key));
    const mine = ++asked;
    try {
      const step = await get(`${path}/steps/${selected}`);
      if (mine === asked) replaced(detail, stepView(step, path, trace, select));
    } catch (error) {
      replaced(detail, h("p", { class: "error" }, error.message));
    }
  }

  drawTop();
  drawList();
  await select(selected);
  return {
    title: trace.question || run.what,
    trail: trailOf(run, key, trace),
    element: h(
      "section", { class: "page trace" },
      top,
      strip,
      trace.steps.length ? h("div", { class: "columns" }, h("nav", { class: "side", "aria-label": "steps" }, list), detail) : h("p", { class: "empty" }, "No step is finished yet."),
    ),
    shown: bringIntoView,
    keys: {
      j: () => move(1), ArrowDown: () => move(1),
      k: () => move(-1), ArrowUp: () => move(-1),
      Home: () => select(order[0]), End: () => select(order.at(-1)),
      d: () => { showsChanges = !showsChanges; select(selected); },
      p: () => detail.querySelector("details.prompt summary")?.click(),
      s: () => detail.querySelector("details.section summary")?.click(),
    },
    refresh: async () => {
      const wasAtEnd = selected === trace.steps.length - 1;
      const before = trace.steps.length;
      trace = await get(path);
      if (trace.steps.length === before && before) return;
      drawTop();
      drawList();
      if (wasAtEnd || before === 0) await select(trace.steps.length - 1);
      else mark();
    },
  };
}

// Sections that were read at the same time stand in the order of the text, whichever was finished first.
function readingOrder(steps) {
  const places = steps.map((_, place) => place);
  const isSection = (place) => steps[place].round !== undefined;
  const rank = (place) => [steps[place].round ?? 0, steps[place].kind === "read" ? 0 : 1, steps[place].kind === "read" ? steps[place].start ?? 0 : place];
  if (!places.some(isSection)) return places;
  return places.sort((a, b) => {
    if (steps[a].kind === "answer" || steps[b].kind === "answer") return a - b;
    const [one, other] = [rank(a), rank(b)];
    return one[0] - other[0] || one[1] - other[1] || one[2] - other[2];
  });
}

function trailOf(run, key, trace) {
  const here = trace.item ? `item ${trace.item.number + 1}` : trace.rollout ? `step ${trace.rollout.step}, rollout ${trace.rollout.index + 1}` : "question";
  const first = [[run.what || run.name, link("run", run.id)]];
  if (key.startsWith("v")) return [...first, [`validation ${key.slice(1).split(".")[0]}`, linkWith({ validation: key.slice(1).split(".")[0] }, "run", run.id, "items")], [here, null]];
  if (key.startsWith("s")) return [["Training", linkWith({ step: trace.rollout?.step }, "run", run.id)], [here, null]];
  return [...first, [here, null]];
}

function heading(run, trace, onSelect) {
  const item = trace.item;
  const rollout = trace.rollout;
  const answer = trace.answer ?? item?.answer;
  const facts = [
    trace.source && h("span", {}, trace.source),
    trace.model && h("span", {}, trace.model),
    trace.totals.sections ? h("span", {}, plural(trace.totals.sections, "section")) : null,
    h("span", {}, `${short(trace.totals.prompt_tokens)} tokens in, ${short(trace.totals.completion_tokens)} out`),
    trace.totals.cached_tokens ? h("span", {}, `${short(trace.totals.cached_tokens)} cached`) : null,
    h("span", {}, `${seconds(trace.totals.seconds)} in calls`),
  ];
  const verdict = item ? verdictOf(item) : rollout ? rolloutVerdict(rollout) : null;
  const right = item ? item.score >= 1 : rollout ? rollout.reward >= 1 : null;
  return [
    h("h1", { dir: "auto", class: "question" }, trace.question || item?.id || run.what),
    h("p", { class: "facts" }, facts),
    h(
      "div", { class: `answer-card ${right === null ? "" : right ? "right" : "wrong"}` },
      h("h2", {}, answer === null || answer === undefined ? (run.is_complete ? "No answer" : "Reading …") : "Answer"),
      answer !== null && answer !== undefined ? prose(answer) : null,
      trace.citations.length ? citationsView(trace, onSelect) : null,
      verdict,
    ),
  ];
}

function citationsView(trace, onSelect) {
  return h("ul", { class: "quotes" }, trace.citations.map((each) => h(
    "li", {},
    h("q", { dir: "auto" }, each.text),
    h("button", { type: "button", class: "place link", onclick: async () => { await onSelect(each.step); showMark(each.start); } }, `[${each.number}] ${each.where || `step ${each.step + 1}`}`),
  )));
}

function verdictOf(item) {
  return h(
    "dl", { class: "verdict" },
    h("dt", {}, "Score"), h("dd", {}, `${number(item.score)} by ${item.grader}`),
    item.answers.length ? [h("dt", {}, "Accepted"), h("dd", { dir: "auto" }, item.answers.join(" · "))] : null,
    item.error ? [h("dt", {}, "Failed"), h("dd", {}, item.error)] : null,
    h("dt", {}, "Item"), h("dd", {}, `${item.task}, ${item.method}, number ${item.index}${item.sample ? `, sample ${item.sample}` : ""}`),
    item.depth !== null ? [h("dt", {}, "Depth of evidence"), h("dd", {}, `${percent(item.depth, 0)} %`)] : null,
    Object.entries(item.scores).map(([name, value]) => [h("dt", {}, `By ${name}`), h("dd", {}, number(value))]),
  );
}

function rolloutVerdict(rollout) {
  return h(
    "dl", { class: "verdict" },
    h("dt", {}, "Reward"), h("dd", {}, number(rollout.reward)),
    rollout.advantage !== null ? [h("dt", {}, "Advantage"), h("dd", {}, signed(rollout.advantage))] : null,
    rollout.answers.length ? [h("dt", {}, "Accepted"), h("dd", { dir: "auto" }, rollout.answers.join(" · "))] : null,
    rollout.error ? [h("dt", {}, "Failed"), h("dd", {}, rollout.error)] : null,
    Object.keys(rollout.record ?? {}).length ? [h("dt", {}, "Record"), h("dd", {}, h("code", {}, JSON.stringify(rollout.record)))] : null,
  );
}

// Places without the folders of their files, which hide the rest where there is little room.
function fileNames(where) {
  return where.replace(/(^|, )(?:[^/,]*\/)+/g, "$1");
}

// Sections that are read at the same time are finished in another order than that of the text.
function sectionName(step, steps) {
  const starts = [...new Set(steps.map((each) => each.start).filter((start) => start !== null))].sort((a, b) => a - b);
  const number = starts.indexOf(step.start) + 1;
  return number === step.index + 1 ? `Section ${number}` : `Section ${number}, step ${step.index + 1}`;
}

function stepRow(step, place, longest, onSelect) {
  const name = step.kind === "answer" ? "Answer" : step.kind === "merge" ? `Merge ${(step.inputs ?? []).map((each) => each + 1).join(", ")}` : fileNames(step.where) || `Section ${step.index + 1}`;
  const changes = step.kind === "answer" ? null : step.flags.includes("memory_kept") ? h("span", { class: "kept" }, "kept") : step.flags.includes("nothing") ? h("span", { class: "kept" }, "nothing") : !step.added && !step.removed ? h("span", { class: "kept" }, "same") : h("span", { class: "delta" }, h("b", { class: "plus" }, `+${step.added}`), h("b", { class: "minus" }, `−${step.removed}`));
  return h("li", {}, h(
    "button", { type: "button", class: `step ${step.kind}`, onclick: () => onSelect(place) },
    h("span", { class: "number" }, step.kind === "answer" ? "A" : step.index + 1),
    h("span", { class: "where", title: step.where || name }, name),
    changes,
    h("span", { class: "bar", title: seconds(step.seconds) }, h("i", { style: { width: `${Math.max(1, (100 * step.seconds) / longest)}%` } })),
  ));
}

function stepView(step, path, trace, onSelect) {
  const isAnswer = step.kind === "answer";
  const hasDiff = step.diff !== null && !isAnswer;
  const toggle = hasDiff && h(
    "div", { class: "chips small", role: "group", "aria-label": "how the memory is shown" },
    [["Changes", true], ["Plain", false]].map(([name, value]) => h("button", {
      type: "button", "aria-pressed": String(showsChanges === value),
      onclick: () => { showsChanges = value; onSelect(step.number); },
    }, name)),
  );
  const memory = step.memory === "" && !(hasDiff && showsChanges && step.diff.length)
    ? h("p", { class: "quiet" }, "The memory is empty.")
    : hasDiff && showsChanges ? prose(step.diff.map(([kind, text]) => kind === "same" ? text : h(kind === "new" ? "ins" : "del", {}, text)), { class: "memory diff" }) : prose(step.memory, { class: "memory" });
  return [
    h("header", { class: "step-head" },
      h("h2", {}, isAnswer ? "Answer" : step.kind === "merge" ? `Merge, step ${step.index + 1}` : sectionName(step, trace.steps)),
      step.where && h("p", { class: "where" }, step.where),
      h("p", { class: "facts" },
        step.tokens ? h("span", {}, `${count(step.tokens)} tokens of text`) : null,
        h("span", {}, `${count(step.prompt_tokens)} in${step.cached_tokens ? ` (${count(step.cached_tokens)} cached)` : ""}, ${count(step.completion_tokens)} out${step.is_estimated ? ", estimated" : ""}`),
        h("span", {}, seconds(step.seconds)),
        step.num_attempts > 1 ? h("span", {}, `${step.num_attempts} attempts`) : null,
        step.round ? h("span", {}, `round ${step.round}`) : null,
        step.flags.map((flag) => h("span", { class: "flag" }, flagName(flag))),
      )),
    (step.inputs ?? []).length ? h("p", { class: "inputs" }, "Merged from ", step.inputs.map((input) => h("button", { type: "button", class: "chip", onclick: () => onSelect(trace.steps.findIndex((each) => each.index === input)) }, `step ${input + 1}`))) : null,
    isAnswer ? [h("h3", {}, "Answer"), prose(step.reply, { class: "reply" })] : null,
    h("div", { class: "label-row" }, h("h3", {}, isAnswer ? "From this memory" : step.round && step.kind === "read" ? "Note" : "Memory after this step"), toggle),
    memory,
    step.missing ? [h("h3", {}, "Still missing"), prose(step.missing)] : null,
    step.quotes.length ? quotesView(step) : null,
    step.cited && step.cited.length ? h("p", { class: "quiet" }, `Rests on quotes ${step.cited.join(", ")}.`) : null,
    step.unread.length ? h("p", { class: "quiet" }, `Not read: ${step.unread.map(([a, b]) => `${count(a)}–${count(b)}`).join(", ")} (characters).`) : null,
    step.reply !== null && !isAnswer ? lazy("Reply as the model wrote it", "reply", async () => prose(step.reply)) : null,
    step.reasoning ? lazy("Reasoning", "reasoning", async () => prose(step.reasoning)) : null,
    step.has_text ? lazy("Text of the section", "section", async () => sectionView(await get(`${path}/steps/${step.number}/section`))) : null,
    lazy("Full prompt", "prompt", async () => promptView(await get(`${path}/steps/${step.number}/prompt`), step)),
  ];
}

function quotesView(step) {
  return [
    h("h3", {}, "Evidence"),
    h("ul", { class: "quotes" }, step.quotes.map((quote) => h(
      "li", { class: quote.start === null ? "unfound" : "" },
      h("q", { dir: "auto" }, quote.text),
      quote.item ? h("span", { class: "flag" }, quote.value ? `${quote.item}: ${quote.value}` : quote.item) : null,
      quote.start === null
        ? h("span", { class: "place" }, "not in the text")
        : h("button", { type: "button", class: "place link", disabled: !step.has_text, onclick: () => showMark(quote.start) }, quote.where || `characters ${count(quote.start)}–${count(quote.end)}`),
    ))),
  ];
}

function showMark(start) {
  const holder = document.querySelector(".detail details.section");
  if (!holder) return;
  holder.open = true;
  const find = () => {
    const mark = holder.querySelector(`mark[data-start="${start}"]`);
    if (mark) mark.scrollIntoView({ block: "center" });
    return mark;
  };
  if (!find()) holder.addEventListener("filled", find, { once: true });
}

function sectionView(section) {
  const parts = [];
  let end = 0;
  for (const [start, stop] of section.marks) {
    if (start < end) continue;
    parts.push(section.text.slice(end, start), h("mark", { "data-start": section.start + start }, section.text.slice(start, stop)));
    end = stop;
  }
  parts.push(section.text.slice(end));
  return prose(parts, { class: "source" });
}

function promptView(prompt, step) {
  const advice = step.kind === "read" && !step.has_text ? "; start the viewer with --text FILE to see it" : "";
  return [
    prompt.note ? h("p", { class: "quiet" }, prompt.note + advice) : null,
    prompt.messages.map((message) => [h("p", { class: "role" }, message.role), h("pre", { dir: "auto" }, message.content)]),
  ];
}

function lazy(name, kind, fill) {
  const body = h("div", { class: "inside" });
  let isFilled = false;
  return h("details", {
    class: kind,
    ontoggle: async (event) => {
      if (!event.target.open || isFilled) return;
      isFilled = true;
      try {
        replaced(body, await fill());
      } catch (error) {
        replaced(body, h("p", { class: "quiet" }, error.message));
      }
      event.target.dispatchEvent(new Event("filled"));
    },
  }, h("summary", {}, name), body);
}
