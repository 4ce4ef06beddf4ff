// Answers of the server; in a page that holds a run, those inside the page.

const holder = document.getElementById("run-data");
const embedded = holder === null ? null : JSON.parse(holder.textContent);

export const isExport = embedded !== null;

export async function get(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (embedded !== null) {
    const names = given.map(([name, value]) => `${name}=${value}`).sort();
    const found = embedded[[path, ...names].join(" ")];
    if (found === undefined) throw new Error("this part of the run is not in this file");
    return found;
  }
  const query = given.length ? `?${new URLSearchParams(given)}` : "";
  const response = await fetch(`/api${path}${query}`, { headers: { Accept: "application/json" } });
  const values = await response.json();
  if (!response.ok) throw new Error(values.error ?? response.statusText);
  return values;
}

export function runPath(id, ...parts) {
  return ["/runs", id, ...parts].join("/");
}

export function link(...parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export function linkWith(params, ...parts) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${link(...parts)}?${new URLSearchParams(given)}` : link(...parts);
}
