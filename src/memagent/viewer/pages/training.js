// A training run: curves, validations, and the rollouts of a group side by side.

import { get, link, linkWith, runPath } from "./api.js";
import { lineChart } from "./charts.js";
import { h, prose, replaced } from "./dom.js";
import { count, number, plural, seconds, short, signed } from "./format.js";

const MAX_POINTS = 400;
const CURVES = [
  ["Reward", [["train", "reward", "rollouts"], ["validation", "reward", "validation"], ["train", "best_reward", "best of group"]]],
  ["KL to the start", [["train", "kl", "kl"], ["train", "mismatch_kl", "engine mismatch"], ["train", "drift_kl", "drift in a step"]]],
  ["Sampled tokens per rollout", [["train", "agent/sampled_tokens", "rollouts"], ["validation", "agent/sampled_tokens", "validation"]]],
  ["Tokens of memory", [["train", "agent/memory_tokens", "rollouts"], ["validation", "agent/memory_tokens", "validation"]]],
  ["Entropy", [["train", "entropy", "entropy"]]],
  ["Groups with signal", [["train", "signal", "share"], ["train", "group_std", "std of rewards"]]],
  ["Clipped tokens", [["train", "clip_low", "low"], ["train", "clip_high", "high"], ["train", "masked", "masked"]]],
  ["Gradient norm", [["train", "grad_norm", "norm"]]],
  ["Evidence in memory", [["train", "agent/captured", "ever"], ["train", "agent/retained", "at the end"], ["validation", "agent/retained", "validation"]]],
  ["Warm start loss", [["warm_start", "loss", "loss"]]],
];

export async function trainingPage(run, params) {
  let lines = [];
  let numLines = 0;
  const charts = h("div", { class: "charts" });
  const facts = h("p", { class: "facts" });
  const validations = h("div", {});
  const rollouts = h("section", {});
  let step = Number(params.get("step") ?? run.samples.at(-1) ?? 0);

  async function load() {
    const found = await get(runPath(run.id, "metrics"), { after: numLines });
    if (found.num_lines < numLines) { lines = []; numLines = 0; return load(); }
    lines = [...lines, ...found.lines];
    numLines = found.num_lines;
    replaced(charts, curves(lines));
    const last = lines.findLast((line) => line.kind === "train");
    replaced(facts, [run.model, last ? `step ${count(last.step)}${run.num_steps ? ` of ${count(run.num_steps)}` : ""}` : run.state, last?.["time/left"] > 0 && !run.is_complete ? `about ${seconds(last["time/left"])} left` : null].filter(Boolean).map((each) => h("span", {}, each)));
  }

  async function show(wanted) {
    step = wanted;
    if (!run.samples.length) return;
    history.replaceState(null, "", linkWith({ step }, "run", run.id));
    try {
      replaced(rollouts, rolloutsView(run, await get(runPath(run.id, "rollouts"), { step }), show));
    } catch (error) {
      replaced(rollouts, h("p", { class: "error" }, error.message));
    }
  }

  function neighbour(by) {
    const place = run.samples.indexOf(step) + by;
    if (place >= 0 && place < run.samples.length) show(run.samples[place]);
  }

  function drawValidations() {
    replaced(validations, run.validations.length ? h("p", { class: "validations" }, h("span", { class: "quiet" }, "Validations: "), run.validations.map((each) => h("a", { class: "chip", href: linkWith({ validation: each }, "run", run.id, "items") }, `step ${each}`))) : null);
  }

  await load();
  drawValidations();
  if (run.samples.length) await show(run.samples.includes(step) ? step : run.samples.at(-1));
  return {
    title: run.what || run.name,
    trail: [[run.what || run.name, null]],
    element: h("section", { class: "page" }, h("h1", {}, run.what || run.name), facts, charts, validations, rollouts),
    keys: { j: () => neighbour(1), k: () => neighbour(-1), ArrowRight: () => neighbour(1), ArrowLeft: () => neighbour(-1) },
    refresh: async () => {
      const wasLast = step === run.samples.at(-1);
      const fresh = await get(runPath(run.id));
      Object.assign(run, fresh);
      await load();
      drawValidations();
      if (run.samples.length && (wasLast || !run.samples.includes(step)) && run.samples.at(-1) !== step) await show(run.samples.at(-1));
    },
  };
}

function curves(lines) {
  const found = CURVES.map(([title, wanted]) => lineChart(
    wanted.map(([kind, name, label]) => ({ name: label, kind, points: thinned(points(lines, kind, name)) })).filter((each) => each.points.length),
    { title, xName: "step" },
  ));
  const speeds = [...new Set(lines.flatMap((line) => Object.keys(line).filter((name) => name.startsWith("speed/"))))];
  const times = [...new Set(lines.flatMap((line) => Object.keys(line).filter((name) => name.startsWith("time/") && name !== "time/left")))];
  const all = (names, prefix) => names.map((name) => ({ name: name.slice(prefix), points: thinned(points(lines, "train", name)) })).filter((each) => each.points.length);
  return [
    ...found.filter((chart) => chart.querySelector("svg")),
    ...[["Throughput, tokens per second", all(speeds, 6), short], ["Seconds per step", all(times, 5), number]]
      .filter(([, series]) => series.length)
      .map(([title, series, format]) => lineChart(series, { title, xName: "step", format })),
  ];
}

function points(lines, kind, name) {
  return lines
    .filter((line) => line.kind === kind && typeof line[name] === "number")
    .map((line) => ({ x: line.step, y: line[name], low: line[`${name}_low`], high: line[`${name}_high`] }));
}

// Of many points, the mean of each stretch.
function thinned(found) {
  if (found.length <= MAX_POINTS) return found;
  const size = Math.ceil(found.length / MAX_POINTS);
  const kept = [];
  for (let start = 0; start < found.length; start += size) {
    const part = found.slice(start, start + size);
    kept.push({ x: part.at(-1).x, y: part.reduce((sum, point) => sum + point.y, 0) / part.length });
  }
  return kept;
}

function rolloutsView(run, found, onStep) {
  const chooser = h("select", { "aria-label": "step", onchange: (event) => onStep(Number(event.target.value)) }, run.samples.map((each) => h("option", { value: each, selected: each === found.step }, `step ${each}`)));
  return [
    h("div", { class: "heading" }, h("h2", {}, "Rollouts"), chooser, h("p", { class: "quiet" }, `${plural(found.groups.length, "group")} saved of this step`)),
    found.groups.map((group) => groupView(run, found.step, group)),
  ];
}

function groupView(run, step, group) {
  const rewards = group.group_rewards.length ? group.group_rewards : group.rollouts.map((each) => each.reward);
  const mean = rewards.reduce((sum, each) => sum + each, 0) / rewards.length;
  return h(
    "article", { class: "group" },
    h("h3", { dir: "auto" }, group.question || group.task_id),
    h("p", { class: "facts" }, h("span", {}, group.task_id), group.answers.length ? h("span", { dir: "auto" }, `accepted: ${group.answers.join(" · ")}`) : null, h("span", {}, `mean reward ${number(mean)} of ${rewards.length}`), h("span", { class: "rewards", "aria-label": "rewards of the group" }, rewards.map((each) => h("i", { class: each >= 1 ? "right" : each > 0 ? "part" : "wrong", title: number(each) })))),
    h("div", { class: "rollouts" }, group.rollouts.map((each) => h(
      "section", { class: `rollout ${each.status !== "ok" ? "failed" : each.reward >= 1 ? "right" : each.reward > 0 ? "part" : "wrong"}` },
      h("header", {}, h("a", { href: link("run", run.id, "trace", `s${step}.${each.number}`) }, `Rollout ${each.index + 1}`), h("span", { class: "reward" }, number(each.reward)), each.advantage !== null ? h("span", { class: `advantage ${each.advantage > 0 ? "plus" : each.advantage < 0 ? "minus" : ""}`, title: "advantage" }, signed(each.advantage)) : null),
      each.error ? h("p", { class: "error" }, each.error) : prose(each.answer ?? "(no answer)", { class: "answer" }),
      h("p", { class: "facts" }, h("span", {}, plural(each.totals.sections ?? 0, "section")), h("span", {}, `${short(each.totals.completion_tokens ?? 0)} tokens out`)),
      each.memories.length ? h("details", {}, h("summary", {}, "Memories"), h("ol", { class: "memories" }, each.memories.map((memory) => h("li", {}, prose(memory.memory || "(empty)"))))) : null,
    ))),
  );
}
