"use strict";

// The live page of `mapstate serve`. It reads what any client can: /states, /states/NAME, /events, and values.

const byId = (id) => document.getElementById(id);
const states = new Map(); // by name: what /states says of it, with its reports, oldest first
const KEPT = 100; // reports, as many as a store keeps
let chosen = decodeURIComponent(location.hash.slice(1));

// ---- calls

function headers() {
  const token = sessionStorage.getItem("mapstate-token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// Integers beyond 2**53 stay exact, where the browser says what stood in the text.
function parse(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")
      ? BigInt(context.source)
      : value,
  );
}

async function call(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  const body = parse(await answer.text());
  byId("token").hidden = answer.status !== 401;
  if (!answer.ok) throw Object.assign(new Error(body.detail), { status: answer.status });
  return body;
}

// ---- words

const number = (value) => (value === null || value === undefined ? "unknown" : value.toLocaleString("en-US"));
const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(milliseconds < 10_000 ? 2 : 1)} s`;

function ago(time) {
  if (!time) return "unknown";
  const past = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  for (const [unit, size] of [["d", 86_400], ["h", 3_600], ["min", 60]]) {
    if (past >= size) return `${Math.floor(past / size)} ${unit} ago`;
  }
  return `${Math.floor(past)} s ago`;
}

// Rows per second over the last batches, from the first commit among them to the last.
function rate(state) {
  const last = (state.reports ?? []).slice(-11);
  if (last.length < 2) return null;
  const span = (Date.parse(last.at(-1).at) - Date.parse(last[0].at)) / 1000;
  const rows = last.slice(1).reduce((sum, report) => sum + Number(report.rows), 0);
  return span > 0 ? Math.round(rows / span) : null;
}

function timeOf(mark) {
  return mark === null || mark === undefined ? "not there yet" : String(mark);
}

// ---- what is shown

function show(problem) {
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem ?? "";
}

function connection(is, text) {
  byId("connection").dataset.is = is;
  byId("connection").textContent = text;
}

function cell(row, name, content) {
  const made = row.insertCell();
  made.dataset.name = name;
  made.append(content);
}

function drawStates() {
  const focused = document.activeElement?.dataset?.state;
  const rows = document.createElement("tbody");
  for (const state of [...states.values()].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const row = rows.insertRow();
    row.dataset.state = state.name;
    if (state.name === chosen) row.setAttribute("aria-current", "true");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = state.name;
    button.dataset.state = state.name;
    button.addEventListener("click", () => choose(state.name));
    cell(row, "state", button);
    if (state.problem) {
      cell(row, "problem", state.problem.detail);
      row.lastChild.colSpan = 6;
      continue;
    }
    cell(row, "type", state.type);
    cell(row, "last batch", state.as_of.batch_id === null ? "none" : number(state.as_of.batch_id));
    cell(row, "committed", ago(state.as_of.committed_at));
    cell(row, "rows", number(state.rows));
    cell(row, "rows/s", rate(state) === null ? "–" : number(rate(state)));
    cell(row, "keys held", number(state.keys_held));
  }
  byId("states").tBodies[0].replaceWith(rows);
  byId("no-states").hidden = states.size > 0;
  if (focused !== undefined) {
    [...rows.querySelectorAll("button")].find((one) => one.dataset.state === focused)?.focus();
  }
}

function fact(name, text) {
  const group = document.createElement("div");
  const [term, value] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  value.textContent = text;
  value.dataset.fact = name;
  group.append(term, value);
  return group;
}

function drawFacts(state) {
  const last = state.reports?.at(-1);
  const facts = [
    fact("reads", state.reads),
    fact("key", state.keys.map((key) => `${key.name} ${key.type}`).join(", ") || "none"),
    fact("fields", state.fields.map((field) => `${field.name}: ${field.aggregator}`).join(", ")),
    fact("last batch", state.as_of.batch_id === null ? "none" : number(state.as_of.batch_id)),
    fact("committed", ago(state.as_of.committed_at)),
    fact("keys held", number(state.keys_held)),
  ];
  if (last) {
    facts.push(fact("rows of it", number(last.rows)), fact("keys written", number(last.keys_written)));
    facts.push(fact("time of it", seconds(last.milliseconds)), fact("attempt", number(last.attempt)));
  }
  if (state.has_windows) {
    const late = (state.reports ?? []).reduce((sum, report) => sum + (report.rows_late ?? 0), 0);
    facts.push(fact("watermark", timeOf(state.watermark)), fact(`late rows of ${state.reports?.length ?? 0} batches`, number(late)));
  }
  byId("facts").replaceChildren(...facts);
}

function drawChart(reports) {
  const space = "http://www.w3.org/2000/svg";
  const most = Math.max(1, ...reports.map((report) => report.milliseconds));
  const width = 600 / Math.max(20, reports.length);
  const bars = reports.map((report, at) => {
    const height = Math.max(1, (report.milliseconds / most) * 115);
    const bar = document.createElementNS(space, "rect");
    const places = { x: at * width, y: 120 - height, width: width * 0.8, height };
    for (const [name, value] of Object.entries(places)) bar.setAttribute(name, value);
    if (report.attempt > 1) bar.classList.add("retried");
    const title = document.createElementNS(space, "title");
    title.textContent = `batch ${report.batch_id}: ${seconds(report.milliseconds)}, ${number(report.rows)} rows, attempt ${report.attempt}`;
    bar.append(title);
    return bar;
  });
  byId("chart").replaceChildren(...bars);
  const sorted = reports.map((report) => report.milliseconds).sort((a, b) => a - b);
  byId("chart-text").textContent = sorted.length
    ? `The last ${sorted.length} batches: ${seconds(sorted[0])} to ${seconds(sorted.at(-1))}, median ${seconds(sorted[sorted.length >> 1])}. Red: committed at a later attempt.`
    : "This state has no reports of batches.";
}

function drawLookUp(state) {
  const columns = state.has_windows ? state.keys.slice(1) : state.keys;
  const inputs = columns.map((key, at) => {
    const [group, label, input] = ["div", "label", "input"].map((name) => document.createElement(name));
    input.id = label.htmlFor = `key-${at}`;
    input.name = key.name.replace(state.has_windows ? /^(min_batch|wait|since|until)$/ : /^(min_batch|wait)$/, "key.$1");
    input.autocomplete = "off";
    label.textContent = `${key.name} (${key.type})`;
    group.append(label, input);
    return group;
  });
  const button = document.createElement("button");
  button.textContent = state.has_windows ? "Show its windows" : "Show its value";
  byId("look-up").replaceChildren(...inputs, button);
  byId("value").textContent = "";
}

function drawChosen({ isNew = false } = {}) {
  const state = states.get(chosen);
  byId("state").hidden = !state || Boolean(state.problem);
  if (byId("state").hidden) return;
  byId("state-title").textContent = state.name;
  if (!state.keys) return;
  drawFacts(state);
  drawChart(state.reports ?? []);
  if (isNew) drawLookUp(state);
}

// ---- what happens

async function choose(name) {
  chosen = name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  await load(name, { isNew: true });
}

// Reports that came as events while the answer was under way are kept.
async function load(name, { isNew = false } = {}) {
  if (!states.has(chosen)) [chosen, isNew] = [name, true];
  try {
    const found = await call(`states/${encodeURIComponent(name)}`);
    const newer = (states.get(name)?.reports ?? []).filter((report) => report.txid > (found.reports[0]?.txid ?? -1));
    const isOld = (states.get(name)?.as_of?.txid ?? -1) > (found.as_of.txid ?? -1);
    states.set(name, { ...found, ...(isOld ? states.get(name) : {}), reports: [...found.reports.reverse(), ...newer].slice(-KEPT) });
    show();
  } catch (error) {
    show(error.message);
  }
  drawStates();
  drawChosen({ isNew });
}

async function loadAll() {
  const found = (await call("states")).states;
  const names = new Set(found.map((state) => state.name));
  for (const name of states.keys()) if (!names.has(name)) states.delete(name);
  for (const state of found) states.set(state.name, { reports: states.get(state.name)?.reports, ...state });
  if (!states.has(chosen)) chosen = found[0]?.name ?? "";
  drawStates();
  if (chosen) await load(chosen, { isNew: !byId("look-up").children.length });
}

function onEvent(event) {
  if (event.event === "problem") {
    if (states.has(event.state)) states.get(event.state).problem = event.problem;
    show(`${event.state}: ${event.problem.detail}`);
  } else {
    const known = states.get(event.state);
    if (!known || known.problem || !known.keys) {
      load(event.state, { isNew: event.state === chosen }); // new, or back
      return;
    }
    known.as_of = event.as_of;
    if (event.keys_held !== null) known.keys_held = event.keys_held;
    if (event.report) {
      known.rows = event.report.rows;
      known.reports = [...(known.reports ?? []).filter((one) => one.txid < event.report.txid), event.report].slice(-KEPT);
    }
    if (known.has_windows && event.state === chosen) load(event.state); // whose watermark is in no report as a time
    show();
  }
  drawStates();
  drawChosen();
}

// The stream of events by fetch, because EventSource sends no token.
async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 8_000)) {
    try {
      const answer = await fetch("events", { headers: headers(), cache: "no-store" });
      byId("token").hidden = answer.status !== 401;
      if (!answer.ok) throw new Error(answer.status === 401 ? "a token is needed" : `the service said ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      await loadAll(); // behind the start of the events, so that no commit falls in between
      connection("live", "live");
      pause = 500;
      for (let rest = ""; ; ) {
        const { done, value } = await reader.read();
        if (done) throw new Error("the connection ended");
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const data = part.split("\n").find((text) => text.startsWith("data: "));
          if (data) onEvent(parse(data.slice(6)));
        }
      }
    } catch (error) {
      connection("away", `not connected (${error.message}); trying again`);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("mapstate-token", byId("token-text").value);
  byId("token-text").value = "";
});

byId("look-up").addEventListener("submit", async (event) => {
  event.preventDefault();
  const state = states.get(chosen);
  const query = new URLSearchParams(new FormData(event.target));
  const write = (value) => JSON.stringify(value, (_, one) => (typeof one === "bigint" ? JSON.rawJSON?.(String(one)) ?? String(one) : one), 2);
  try {
    const found = await call(`states/${encodeURIComponent(chosen)}/${state.has_windows ? "windows" : "values"}?${query}`);
    const value = state.has_windows ? found.windows : found.value;
    const isAbsent = value === null || value.length === 0;
    byId("value").textContent = `${isAbsent ? "absent" : write(value)}\nas of batch ${found.as_of.batch_id}`;
  } catch (error) {
    byId("value").textContent = error.message;
  }
});

window.addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))));
setInterval(() => {
  for (const element of document.querySelectorAll('[data-name="committed"], [data-fact="committed"]')) {
    const name = element.closest("tr")?.dataset.state ?? chosen;
    element.textContent = ago(states.get(name)?.as_of?.committed_at);
  }
}, 1000);
listen();
