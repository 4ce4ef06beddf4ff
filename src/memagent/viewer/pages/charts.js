// Plots as SVG: lines with intervals, bars of what changed, a tree of steps.

import { h, s } from "./dom.js";
import { number } from "./format.js";

const WIDTH = 420;
const HEIGHT = 190;
const PAD = { left: 44, right: 12, top: 10, bottom: 26 };
const NUM_COLOURS = 6;

// series: [{name, points: [{x, y, low, high}]}]; options: {title, unit, xName, log, band, domain, format}
export function lineChart(series, options = {}) {
  const shown = series.map((each) => ({ ...each, points: each.points.filter((point) => point.y !== null && point.y !== undefined) }));
  const points = shown.flatMap((each) => each.points);
  const format = options.format ?? number;
  const figure = h("figure", { class: "chart" }, options.title && h("figcaption", { title: options.about }, options.title));
  if (!points.length) {
    figure.append(h("p", { class: "quiet" }, "no values yet"));
    return figure;
  }
  const xs = points.map((point) => point.x);
  const ys = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
  const x = scale(Math.min(...xs), Math.max(...xs), PAD.left, WIDTH - PAD.right, options.log);
  const [low, high] = options.domain ?? spread(Math.min(...ys), Math.max(...ys));
  const y = scale(low, high, HEIGHT - PAD.bottom, PAD.top);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": options.title ?? "plot" });
  for (const tick of ticks(low, high)) {
    svg.append(
      s("line", { class: "grid", x1: PAD.left, x2: WIDTH - PAD.right, y1: y(tick), y2: y(tick) }),
      s("text", { class: "tick", x: PAD.left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, format(tick)),
    );
  }
  const xTicks = options.xTicks ?? ticks(Math.min(...xs), Math.max(...xs), 4).filter(Number.isInteger).map((value) => [value, number(value)]);
  for (const [value, name] of xTicks) {
    svg.append(s("text", { class: "tick", x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, name));
  }
  shown.forEach((each, place) => svg.append(drawn(each, x, y, place)));
  const guide = s("line", { class: "guide", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  svg.append(guide);
  const readout = h("p", { class: "readout" }, legend(shown));
  addReadout(svg, readout, shown, { x, guide, format, xName: options.xName });
  figure.append(svg, readout);
  return figure;
}

function drawn(each, x, y, place) {
  const colour = `c${place % NUM_COLOURS}`;
  const group = s("g", { class: `series ${colour} ${each.kind ?? ""}` });
  const withBand = each.points.filter((point) => point.low !== undefined && point.low !== null);
  if (withBand.length > 1) {
    const upper = withBand.map((point) => `${x(point.x)},${y(point.high)}`);
    const lower = withBand.map((point) => `${x(point.x)},${y(point.low)}`).reverse();
    group.append(s("polygon", { class: "band", points: [...upper, ...lower].join(" ") }));
  } else {
    for (const point of withBand) {
      group.append(s("line", { class: "whisker", x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high) }));
    }
  }
  const path = each.points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ");
  group.append(s("polyline", { class: "line", points: path }));
  if (each.points.length <= 24) {
    for (const point of each.points) group.append(s("circle", { class: "dot", cx: x(point.x), cy: y(point.y), r: 2.4 }));
  }
  return group;
}

function legend(series) {
  return series.map((each, place) => h("span", { class: `key c${place % NUM_COLOURS}` }, h("i", {}), each.name));
}

function addReadout(svg, readout, series, { x, guide, format, xName }) {
  const all = [...new Set(series.flatMap((each) => each.points.map((point) => point.x)))].sort((a, b) => a - b);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    const nearest = all.reduce((best, value) => (Math.abs(x(value) - place) < Math.abs(x(best) - place) ? value : best), all[0]);
    guide.setAttribute("x1", x(nearest));
    guide.setAttribute("x2", x(nearest));
    guide.setAttribute("visibility", "visible");
    readout.replaceChildren(
      h("span", { class: "at" }, `${xName ?? ""} ${number(nearest)}`),
      ...series.map((each, at) => {
        const point = each.points.find((one) => one.x === nearest);
        return h("span", { class: `key c${at % NUM_COLOURS}` }, h("i", {}), `${each.name} ${point ? format(point.y) : "–"}`);
      }),
    );
  });
  svg.addEventListener("pointerleave", () => {
    guide.setAttribute("visibility", "hidden");
    readout.replaceChildren(...legend(series));
  });
}

function scale(low, high, start, end, isLog = false) {
  const [a, b] = isLog ? [Math.log(Math.max(low, 1)), Math.log(Math.max(high, 1))] : [low, high];
  const span = b - a || 1;
  const middle = b === a ? 0.5 : 0;
  return (value) => start + (((isLog ? Math.log(Math.max(value, 1)) : value) - a) / span + middle) * (end - start);
}

function spread(low, high) {
  if (low === high) return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const margin = (high - low) * 0.06;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function ticks(low, high, wanted = 4) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw) ?? raw;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

// What each step added to the memory and took from it; a click chooses the step.
export function changeStrip(steps, selected, onSelect) {
  const height = 46;
  const most = Math.max(4, ...steps.map((step) => Math.max(step.added, step.removed)));
  const size = (value) => (value ? 2 + (Math.sqrt(value) / Math.sqrt(most)) * (height / 2 - 3) : 0);
  const svg = s("svg", { class: "strip", viewBox: `0 0 ${steps.length * 10} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "words added to and removed from the memory, by step" });
  steps.forEach((step, place) => {
    const column = s(
      "g",
      { class: `column ${place === selected ? "selected" : ""}`, "data-step": place },
      s("title", {}, `step ${step.index + 1}: ${step.added} words new, ${step.removed} gone`),
      s("rect", { class: "back", x: place * 10, y: 0, width: 10, height }),
      s("rect", { class: step.kind === "answer" ? "answer" : "added", x: place * 10 + 1, width: 8, y: height / 2 - (step.kind === "answer" ? 8 : size(step.added)), height: step.kind === "answer" ? 16 : size(step.added) }),
      s("rect", { class: "removed", x: place * 10 + 1, width: 8, y: height / 2, height: size(step.removed) }),
    );
    svg.append(column);
  });
  svg.append(s("line", { class: "axis", x1: 0, x2: steps.length * 10, y1: height / 2, y2: height / 2 }));
  svg.addEventListener("click", (event) => {
    const column = event.target.closest(".column");
    if (column) onSelect(Number(column.dataset.step));
  });
  return svg;
}

// Rounds of a parallel reading: sections below, what merges them above, joined by lines.
export function stepTree(steps, selected, onSelect) {
  const places = new Map(steps.map((step, place) => [step.index, place]));
  const levels = steps.map(() => 0);
  steps.forEach((step, place) => {
    for (const input of step.inputs ?? []) levels[place] = Math.max(levels[place], (levels[places.get(input)] ?? 0) + 1);
    if (step.kind === "answer") levels[place] = Math.max(0, ...levels.slice(0, place)) + 1;
  });
  const leaves = steps
    .map((_, place) => place)
    .filter((place) => !(steps[place].inputs ?? []).length && steps[place].kind !== "answer")
    .sort((a, b) => (steps[a].round ?? 0) - (steps[b].round ?? 0) || (steps[a].start ?? 0) - (steps[b].start ?? 0));
  const x = new Map(leaves.map((place, column) => [place, 14 + column * 26]));
  steps.forEach((step, place) => {
    if (x.has(place)) return;
    const inputs = (step.inputs ?? []).map((input) => x.get(places.get(input))).filter((value) => value !== undefined);
    x.set(place, inputs.length ? inputs.reduce((a, b) => a + b, 0) / inputs.length : (x.get(place - 1) ?? 14));
  });
  const top = Math.max(...levels);
  const y = (place) => 16 + (top - levels[place]) * 44;
  const width = Math.max(60, leaves.length * 26 + 4);
  const svg = s("svg", { class: "tree", viewBox: `0 0 ${width} ${top * 44 + 32}`, width, height: top * 44 + 32, role: "img", "aria-label": "which steps were merged into which" });
  steps.forEach((step, place) => {
    const inputs = step.kind === "answer" && !(step.inputs ?? []).length ? [place - 1] : (step.inputs ?? []).map((input) => places.get(input));
    for (const input of inputs) {
      if (x.has(input)) svg.append(s("path", { class: "edge", d: `M${x.get(input)},${y(input)} C${x.get(input)},${y(input) - 22} ${x.get(place)},${y(place) + 22} ${x.get(place)},${y(place)}` }));
    }
  });
  steps.forEach((step, place) => {
    const node = s(
      "g",
      { class: `node ${step.kind} ${place === selected ? "selected" : ""} ${step.flags.includes("nothing") ? "nothing" : ""}`, "data-step": place },
      s("title", {}, `${step.kind} ${step.index + 1}${step.round ? `, round ${step.round}` : ""}${step.where ? `, ${step.where}` : ""}`),
      s("circle", { cx: x.get(place), cy: y(place), r: 9 }),
      s("text", { x: x.get(place), y: y(place) + 3, "text-anchor": "middle" }, step.kind === "answer" ? "A" : String(step.index + 1)),
    );
    node.addEventListener("click", () => onSelect(place));
    svg.append(node);
  });
  return h("div", { class: "tree-scroll" }, svg);
}
