"use strict";

// The live page of `mapstate serve`. It reads what any client can: /states, /states/NAME, /events, and values.

const byId = (id) => document.getElementById(id);
const states = new Map(); // by name: what /states says of it, with its reports, oldest first
const KEPT = 100; // reports, as many as a store keeps
const PATIENCE = 6_000; // milliseconds for the answer to one small read
const TOKEN = `mapstate-token ${location.pathname}`; // of this service: the host may have others
const trouble = { events: "connecting", store: "" }; // what the badge says, if anything
const named = () => location.hash.slice(1); // the name of a state needs no encoding, and what is damaged names none
let chosen = named();
let notice = ""; // why another state was not chosen
let asked = null; // the key that was looked up, and the txid for which it was read last
let wake = () => {}; // ends the pause before another try
let due; // the timer of the next drawing

// ---- calls

function headers() {
  const token = sessionStorage.getItem(TOKEN);
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

async function call(path, signal) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal });
  const text = await answer.text();
  byId("token").hidden = answer.status !== 401;
  const isJson = answer.headers.get("Content-Type")?.includes("json"); // else a proxy wrote it
  if (answer.ok && isJson) return parse(text);
  const problem = isJson ? parse(text) : { detail: `the service said ${answer.status}` };
  throw Object.assign(new Error(problem.detail), problem);
}

const isOfStore = (problem) => /^Store(Unavailable)?Error$/.test(problem?.error) || problem?.name === "TimeoutError";

// ---- words

const FORMAT = new Intl.NumberFormat("en-US");
const number = (value) => (value === null || value === undefined ? "unknown" : FORMAT.format(value));
const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(milliseconds < 10_000 ? 2 : 1)} s`;

function long(past) {
  const units = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([size]) => past >= size) ?? [1, "s"];
  return `${Math.floor(past / size)} ${unit}`;
}

const since = (time) => Math.max(0, (Date.now() - Date.parse(time)) / 1000);
const ago = (time) => (time ? `${long(since(time))} ago` : "unknown");

// Rows per second from the first of the last commits to the last of them. A state stands still after a minute, or after
// three times the usual pause between its batches.
function rate(state) {
  const last = (state.reports ?? []).slice(-11);
  const times = last.map((report) => Date.parse(report.at) / 1000);
  const pauses = times.slice(1).map((time, at) => time - times[at]).sort((a, b) => a - b);
  const still = since(state.as_of.committed_at);
  if (still >= Math.max(60, 3 * (pauses[pauses.length >> 1] ?? 0))) return `none for ${long(still)}`;
  const rows = last.slice(1).reduce((sum, report) => sum + Number(report.rows), 0);
  const span = times.at(-1) - times[0];
  return span > 0 ? number(Math.round(rows / span)) : "–";
}

// ---- what is shown

const make = (name, properties) => Object.assign(document.createElement(name), properties);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // a selection stays, and a reader is not told again
}

function drawTrouble() {
  const text = trouble.events || trouble.store;
  byId("connection").dataset.is = text ? "away" : "live";
  setText(byId("connection"), text || "live");
  const problem = notice || states.get(chosen)?.problem?.detail;
  byId("problem").hidden = !problem;
  setText(byId("problem"), problem ?? "");
}

const COLUMNS = {
  type: (state) => state.type,
  "last batch": (state) => (state.as_of.batch_id === null ? "none" : number(state.as_of.batch_id)),
  committed: (state) => ago(state.as_of.committed_at),
  rows: (state) => number(state.rows),
  "rows/s": rate,
  "keys held": (state) => number(state.keys_held),
};

function newRow(name) {
  const row = make("tr");
  const button = make("button", { type: "button", textContent: name, onclick: () => choose(name) });
  row.dataset.state = button.dataset.state = name;
  row.insertCell().append(button);
  row.cells[0].dataset.name = "state";
  return row;
}

function drawRow(row, state) {
  const texts = state.problem ? { problem: () => state.problem.detail } : COLUMNS;
  if (!(row.lastChild.dataset.name in texts)) {
    while (row.cells.length > 1) row.deleteCell(1);
    for (const name of Object.keys(texts)) row.insertCell().dataset.name = name;
    row.lastChild.colSpan = state.problem ? Object.keys(COLUMNS).length : 1;
  }
  for (const cell of [...row.cells].slice(1)) setText(cell, texts[cell.dataset.name](state));
  row.ariaCurrent = state.name === chosen ? "true" : null;
}

function drawStates() {
  const body = byId("states").tBodies[0];
  const part = byId("filter").value.trim().toLowerCase();
  for (const row of [...body.rows]) if (!states.has(row.dataset.state)) row.remove();
  let [next, shown] = [body.firstChild, 0];
  for (const name of [...states.keys()].sort()) {
    const row = next?.dataset.state === name ? next : body.insertBefore(newRow(name), next);
    next = row.nextSibling;
    row.hidden = !name.toLowerCase().includes(part);
    if (row.hidden) continue;
    drawRow(row, states.get(name));
    shown += 1;
  }
  byId("find").hidden = states.size < 10;
  const all = states.size < 1_000 ? states.size : "the first 1,000; Enter opens another by its name"; // no more are listed
  setText(byId("count"), `${number(shown)} of ${all}`);
  byId("no-states").hidden = states.size > 0 || Boolean(trouble.events || trouble.store);
}

function fact(name) {
  const group = make("div");
  group.append(make("dt", { textContent: name }), make("dd"));
  group.lastChild.dataset.fact = name;
  return group;
}

const hasTimes = (state) => state.has_windows || state.rolling_windows;
const PARAMETERS = { windows: /^(min_batch|wait|since|until)$/, rolling: /^(min_batch|wait|at)$/, values: /^(min_batch|wait)$/ };

function drawFacts(state, reports) {
  const [last, late] = [reports.at(-1), reports.reduce((sum, report) => sum + (report.rows_late ?? 0), 0)];
  const facts = {
    type: `${state.type}, reads ${state.reads}`,
    key: state.keys.map((key) => `${key.name} ${key.type}`).join(", ") || "none",
    fields: state.fields.map((field) => `${field.name}: ${field.aggregator}`).join(", "),
    ...(state.rolling_windows && { "rolling windows": state.rolling_windows.windows.map((one) => one.name).join(", ") }),
    ...(state.rolling_windows && { "may be asked from": String(state.rolling_windows.horizon ?? "any time") }),
    ...Object.fromEntries(["last batch", "committed", "rows/s", "keys held"].map((name) => [name, COLUMNS[name](state)])),
    ...(last && { "rows of it": number(last.rows), "keys written": number(last.keys_written) }),
    ...(last && { "time of it": seconds(last.milliseconds), attempt: number(last.attempt) }),
    ...(hasTimes(state) && { watermark: String(state.watermark ?? "not there yet") }),
    ...(hasTimes(state) && { [`late rows of ${reports.length} batches`]: number(late) }),
  };
  const shown = byId("facts").getElementsByTagName("dd");
  if ([...shown].map((value) => value.dataset.fact).join() !== Object.keys(facts).join()) {
    byId("facts").replaceChildren(...Object.keys(facts).map(fact));
  }
  for (const value of shown) setText(value, facts[value.dataset.fact]);
}

// The chart ends at twice the upper quartile, so that one slow batch does not flatten the others: its bar is pointed.
function drawChart(reports) {
  const of = JSON.stringify([chosen, reports.length, reports.at(-1)?.txid]);
  if (byId("chart").dataset.of === of) return;
  byId("chart").dataset.of = of;
  const sorted = reports.map((report) => report.milliseconds).sort((a, b) => a - b);
  const top = Math.max(1, Math.min(sorted.at(-1) ?? 1, 2 * sorted[Math.floor((sorted.length - 1) * 0.75)]));
  const width = 600 / Math.max(20, reports.length);
  const bars = reports.map((report, at) => {
    const [bar, title] = ["path", "title"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
    const [left, right, isAbove] = [at * width, (at + 0.8) * width, report.milliseconds > top];
    const height = 120 - Math.max(2, (Math.min(report.milliseconds, top) / top) * 100);
    bar.setAttribute("d", `M${left} 120V${height}${isAbove ? `L${(left + right) / 2} 0L${right} ${height}` : `H${right}`}V120`);
    if (report.attempt > 1) bar.classList.add("retried");
    title.textContent = `batch ${report.batch_id}: ${seconds(report.milliseconds)}, ${number(report.rows)} rows, attempt ${report.attempt}`;
    bar.append(title);
    return bar;
  });
  byId("chart").replaceChildren(...bars);
  const range = `${seconds(sorted[0])} to ${seconds(sorted.at(-1))}, median ${seconds(sorted[sorted.length >> 1])}`;
  const above = sorted.at(-1) > top ? ` Pointed: more than ${seconds(top)}, where the chart ends.` : "";
  byId("chart-text").textContent = sorted.length
    ? `The last ${sorted.length} batches: ${range}. Red: committed at a later attempt.${above}`
    : "This state has no reports of batches.";
}

function drawLookUp(state) {
  const columns = state.has_windows ? state.keys.slice(1) : state.keys;
  const inputs = columns.map((key, at) => {
    const name = key.name.replace(PARAMETERS[state.has_windows ? "windows" : state.rolling_windows ? "rolling" : "values"], "key.$1");
    const group = make("div");
    group.append(make("label", { htmlFor: `key-${at}`, textContent: `${key.name} (${key.type})` }));
    group.append(make("input", { id: `key-${at}`, name, autocomplete: "off" }));
    return group;
  });
  const button = make("button", { textContent: state.has_windows ? "Show its windows" : "Show its value" });
  byId("look-up").replaceChildren(...inputs, button);
  byId("value").textContent = "";
  asked = null;
}

function drawChosen() {
  const state = states.get(chosen);
  byId("state").hidden = !state?.keys || (state.problem && !isOfStore(state.problem));
  if (byId("state").hidden) return;
  setText(byId("state-title"), state.name);
  drawFacts(state, state.reports ?? []);
  drawChart(state.reports ?? []);
  const of = JSON.stringify([state.name, state.keys, state.has_windows]);
  if (byId("look-up").dataset.of !== of) drawLookUp(state);
  byId("look-up").dataset.of = of;
  if (asked && asked.txid !== state.as_of.txid && !asked.isUnderWay && !trouble.store) lookUp();
}

function draw() {
  due = clearTimeout(due);
  drawTrouble();
  drawStates();
  drawChosen();
}

const drawSoon = () => (due ??= setTimeout(draw, 100)); // many events at one time

// ---- what happens

async function choose(name) {
  const before = chosen;
  [chosen, notice] = [name, ""];
  const error = await load(name);
  if (!states.has(name)) [chosen, notice] = [before, error.message];
  else history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  draw();
  if (chosen === name) byId("state").scrollIntoView({ block: "nearest" });
}

const failed = (error) => (trouble.store = isOfStore(error) ? "the store does not answer; trying again" : error.message);
const isNewer = (one, other) => (one?.as_of?.txid ?? -1) > (other.as_of.txid ?? -1);

// The error, if there is one. What came as events while the answer was under way is kept.
async function load(name) {
  drawSoon();
  try {
    const found = await call(`states/${encodeURIComponent(name)}`, AbortSignal.timeout(PATIENCE));
    const known = states.get(name);
    const newer = (known?.reports ?? []).filter((report) => report.txid > (found.reports[0]?.txid ?? -1));
    const reports = [...found.reports.reverse(), ...newer].slice(-KEPT);
    states.set(name, { ...found, ...(isNewer(known, found) && known), problem: undefined, reports });
    if (!states.has(chosen)) chosen = name;
    trouble.store = "";
  } catch (error) {
    if (isOfStore(error)) failed(error);
    else if (error.status === 404) states.delete(name);
    else if (error.error && states.has(name)) states.get(name).problem = error;
    return error;
  }
}

async function loadAll() {
  try {
    const found = (await call("states")).states;
    const names = new Set(found.map((state) => state.name));
    for (const name of states.keys()) if (!names.has(name) && name !== chosen) states.delete(name);
    const kept = (state) => !state.problem && isNewer(states.get(state.name), state);
    for (const state of found) states.set(state.name, { ...states.get(state.name), problem: undefined, ...(!kept(state) && state) });
    trouble.store = "";
    if (chosen) await load(chosen);
    if (!states.has(chosen) && found.length) await load((chosen = found[0].name));
  } catch (error) {
    failed(error);
  }
}

// Events say nothing of a store that hangs, nor of one without states.
async function check() {
  if (!trouble.events && !document.hidden) await (trouble.store || !states.has(chosen) ? loadAll() : load(chosen));
}

function onEvent(event) {
  const known = states.get(event.state);
  if (event.event === "problem") {
    if (known) known.problem = event.problem;
    if (event.state === chosen) check();
  } else if (!known?.keys || event.event !== "commit" || (known.problem && !isOfStore(known.problem))) {
    load(event.state); // new, back, or another one
  } else {
    delete known.problem;
    known.as_of = event.as_of;
    if (event.keys_held !== null) known.keys_held = event.keys_held;
    if (event.report) {
      known.rows = event.report.rows;
      known.reports = [...(known.reports ?? []).filter((one) => one.txid < event.report.txid), event.report].slice(-KEPT);
    }
    if (event.state === chosen && (trouble.store || hasTimes(known))) load(event.state); // no report has the watermark as a time
  }
  drawSoon();
}

async function lookUp() {
  const [mine, state] = [asked, states.get(chosen)];
  [mine.txid, mine.isUnderWay] = [state.as_of.txid, true];
  const write = (value) => JSON.stringify(value, (_, one) => (typeof one === "bigint" ? JSON.rawJSON?.(String(one)) ?? String(one) : one), 2);
  const text = await call(mine.path, AbortSignal.timeout(5 * PATIENCE)).then(
    (found) => {
      const value = state.has_windows ? found.windows : found.value;
      const end = found.as_of.end ? `, the windows end at ${found.as_of.end}` : "";
      return `${value === null || value.length === 0 ? "absent" : write(value)}\nas of batch ${found.as_of.batch_id}${end}`;
    },
    (error) => {
      if (!(error.status < 500)) mine.txid = undefined; // to be asked again
      return error.message;
    },
  );
  mine.isUnderWay = false;
  if (mine === asked) setText(byId("value"), text);
}

// The stream of events by fetch, because EventSource sends no token.
async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 8_000)) {
    const control = new AbortController();
    try {
      const answer = await fetch("events", { headers: headers(), cache: "no-store", signal: control.signal });
      byId("token").hidden = answer.status !== 401;
      if (!answer.ok) throw new Error(answer.status === 401 ? "a token is needed" : `the service said ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      await loadAll(); // behind the start of the events, so that no commit falls in between
      trouble.events = "";
      draw();
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
      trouble.events = `not connected (${error.message}); trying again`;
      draw();
    }
    control.abort(); // else the connections of a browser to one host are soon used up
    await new Promise((resolve) => setTimeout((wake = resolve), pause));
  }
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token-text").value);
  byId("token-text").value = "";
  wake();
});

byId("look-up").addEventListener("submit", (event) => {
  event.preventDefault();
  const kind = states.get(chosen).has_windows ? "windows" : "values";
  asked = { path: `states/${encodeURIComponent(chosen)}/${kind}?${new URLSearchParams(new FormData(event.target))}` };
  byId("value").textContent = "";
  lookUp();
});

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  choose(byId("states").querySelector("tbody tr:not([hidden])")?.dataset.state ?? byId("filter").value.trim());
});

byId("filter").addEventListener("input", draw);
window.addEventListener("hashchange", () => named() && choose(named()));
setInterval(draw, 1_000);
const checkLater = () => setTimeout(() => check().finally(checkLater), 5_000);
checkLater();
listen();
