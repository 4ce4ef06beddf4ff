// The frame: which page is shown, keys, light and dark, and following a run that goes on.

import { get, isExport, link, runPath } from "./api.js";
import { comparePage } from "./compare.js";
import { h, replaced } from "./dom.js";
import { evaluationPage, itemsPage } from "./evaluation.js";
import { readingPage } from "./reading.js";
import { runsPage } from "./runs.js";
import { tracePage } from "./trace.js";
import { trainingPage } from "./training.js";

const LIVE_MS = 1500;
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
const bar = document.getElementById("bar");
let page = null;
let shownRun = null;
let shownVersion = null;
let turn = 0;

async function open() {
  const mine = ++turn;
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const params = new URLSearchParams(query ?? "");
  try {
    const made = await chosen(parts, params);
    if (mine !== turn) return;
    page = made;
    replaced(main, page.element);
    document.title = `${page.title} · memagent`;
    drawBar(page.trail);
    if (parts.join("/") !== lastParts) window.scrollTo(0, 0);
    lastParts = parts.join("/");
    page.shown?.();
  } catch (error) {
    if (mine !== turn) return;
    page = { title: "Error", trail: [] };
    drawBar([]);
    replaced(main, h("section", { class: "page" }, h("h1", {}, "This cannot be shown"), h("p", { class: "error" }, error.message), h("p", {}, h("a", { href: "#/" }, "All runs"))));
  }
}
let lastParts = "";

async function chosen(parts, params) {
  shownRun = null;
  if (parts.length === 0) {
    const only = isExport && (await get("/runs")).runs;
    if (!only || only.length > 1) return runsPage();
    parts = ["run", only[0].id];
  }
  if (parts[0] === "compare" && parts.length === 3) return comparePage(parts[1], parts[2]);
  if (parts[0] !== "run" || parts.length < 2) throw new Error("there is no such page");
  const run = await get(runPath(parts[1]));
  if (!isExport) {
    shownRun = run;
    shownVersion = (await get(runPath(run.id, "version"))).version;
  }
  if (parts[2] === "trace" && parts.length === 4) return tracePage(run, parts[3], params);
  if (parts[2] === "items" && parts.length === 3) return itemsPage(run, params);
  if (parts.length > 2) throw new Error("there is no such page");
  if (run.kind === "ask") return readingPage(run, params);
  if (run.kind === "eval") return evaluationPage(run, params);
  if (run.kind === "train") return trainingPage(run, params);
  throw new Error(`runs of kind ${run.kind || "unknown"} are not shown`);
}

function drawBar(trail) {
  replaced(
    bar,
    h("nav", { class: "trail", "aria-label": "where you are" },
      h("a", { class: "brand", href: "#/" }, "memagent"),
      trail.map(([name, address]) => [h("span", { class: "slash", "aria-hidden": "true" }, "/"), address ? h("a", { href: address, dir: "auto" }, name) : h("span", { class: "here", dir: "auto" }, name)])),
    h("span", { class: "live", id: "live", role: "status" }),
    h("button", { type: "button", class: "icon", title: "Light or dark (t)", onclick: nextTheme }, themeName()),
    h("button", { type: "button", class: "icon", title: "Keys (?)", onclick: showKeys }, "?"),
  );
  drawLive();
}

// --- live -----------------------------------------------------------------------------------------

function drawLive() {
  const sign = document.getElementById("live");
  if (sign) replaced(sign, shownRun && shownRun.is_running ? [h("i", {}), "live"] : null);
}

async function follow() {
  try {
    if (!isExport && !document.hidden && page?.refresh) {
      if (page.every) await page.refresh();
      else if (shownRun && !shownRun.is_complete) {
        const mine = page;
        const { version, is_complete: isComplete } = await get(runPath(shownRun.id, "version"));
        if (version !== shownVersion) {
          shownVersion = version;
          shownRun.is_running = !isComplete;
          shownRun.is_complete = isComplete;
          if (mine === page) await page.refresh();
          drawLive();
        }
      }
    }
  } catch (error) {
    const sign = document.getElementById("live");
    if (sign) replaced(sign, "no connection");
  }
  setTimeout(follow, page?.every ?? LIVE_MS);
}

// --- light and dark -------------------------------------------------------------------------------

function themeName() {
  return { auto: "◐", light: "☀", dark: "☾" }[document.documentElement.dataset.theme ?? "auto"];
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("memagent-theme", theme);
  } catch {
    // a page from a file may have no storage
  }
  if (page) drawBar(page.trail);
}

// --- keys -----------------------------------------------------------------------------------------

const HELP = [
  ["j k or ↓ ↑", "next and previous step, run or item"],
  ["Enter", "open"],
  ["Backspace", "one level up"],
  ["/", "filter"],
  ["d", "changes or the plain memory"],
  ["p", "the full prompt"],
  ["s", "the text of the section"],
  ["t", "light, dark or as the system"],
  ["?", "this list"],
];

function showKeys() {
  const dialog = h("dialog", { class: "keys", onclose: () => dialog.remove() }, h("h2", {}, "Keys"), h("dl", {}, HELP.map(([keys, what]) => [h("dt", {}, keys.split(" ").map((each) => (each === "or" ? " or " : h("kbd", {}, each)))), h("dd", {}, what)])), h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close"));
  document.body.append(dialog);
  dialog.showModal();
}

function moveInList(by) {
  const links = [...main.querySelectorAll("a.go")];
  if (!links.length) return false;
  const place = links.indexOf(document.activeElement);
  const next = links[Math.min(Math.max(0, place + by), links.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function up() {
  const above = page?.trail.filter(([, address]) => address).at(-1);
  location.hash = above ? above[1] : "#/";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const common = {
    "?": showKeys, t: nextTheme, Backspace: up, u: up,
    "/": () => document.getElementById("search")?.focus(),
    j: () => moveInList(1), k: () => moveInList(-1), ArrowDown: () => moveInList(1), ArrowUp: () => moveInList(-1),
  };
  const action = page?.keys?.[event.key] ?? common[event.key];
  if (action && action() !== false) event.preventDefault();
});

document.addEventListener("click", (event) => {
  const row = event.target.closest("tr.row, li.row");
  if (!row || event.target.closest("a, button, input, label") || String(getSelection())) return;
  row.querySelector("a.go")?.click();
});

try {
  setTheme(localStorage.getItem("memagent-theme") ?? "auto");
} catch {
  setTheme("auto");
}
window.addEventListener("hashchange", open);
open().then(follow);
