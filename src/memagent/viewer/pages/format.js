// Numbers, times and names as people read them.

const whole = new Intl.NumberFormat("en-US");

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(Math.round(value));
}

export function plural(value, one, many) {
  return `${count(value)} ${value === 1 ? one : many ?? `${one}s`}`;
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}K`;
  return count(value);
}

export function lengthName(tokens) {
  if (tokens === null || tokens === undefined) return "any";
  if (tokens % 1024 === 0 && tokens >= 1024) return tokens % 1048576 === 0 ? `${tokens / 1048576}M` : `${tokens / 1024}K`;
  return short(tokens);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(digits);
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return count(value);
  const size = Math.abs(value);
  if (size >= 1000) return short(value);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001 || size === 0) return value.toFixed(3);
  return value.toExponential(1);
}

export function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;
}

export function when(iso) {
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return iso;
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export const KINDS = { ask: "Reading", eval: "Evaluation", train: "Training" };

export function kindName(kind) {
  return KINDS[kind] ?? (kind || "damaged");
}

const FLAGS = {
  reply_cut: "reply cut by its limit",
  memory_cut: "memory cut to its budget",
  memory_kept: "memory kept",
  nothing: "nothing for the question",
  joined: "notes joined as they are",
  malformed: "reply out of format",
  enough: "says it knows enough",
  stopped_early: "answered before the end",
  citations_inferred: "citations inferred",
  carried: "taken over from an earlier run",
  withheld: "withheld by a content filter",
  refused: "refused by the model",
};

export function flagName(flag) {
  return FLAGS[flag] ?? flag;
}

function trimmed(value) {
  return value.toFixed(Math.abs(value) >= 100 ? 0 : 1).replace(/\.0$/, "");
}
