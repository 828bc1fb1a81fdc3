// Polls /status every second and shows it. Rates are differences between two polls: the server keeps
// totals only, so that any number of pages may be open.
"use strict";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 4000;
const WINDOW_MS = 5000; // window of the rates: a slow model generates no token in most seconds
const MAX_POINTS = 120; // of a curve: two minutes
const STATES = {
  p: ["pinned", "in use"],
  c: ["cached", "cached"],
  f: ["coming", "in flight or partly loaded"],
  h: ["below", "in host memory"],
  ".": ["absent", "on disk only"],
};

// An absolute URL: fetch rejects credentials in a URL, as in (http://:KEY@host/)
const ADDRESS = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}status`;

// Names come from folders, zoo entries and clients. Characters that nobody sees, or that turn the rest
// of a line around, are shown as a box.
const UNSEEN = /[\p{Cc}\p{Bidi_Control}\u2028\u2029]/gu;
const MAX_NAME = 200; // characters

const find = (id) => document.getElementById(id);
const SHOWN_ID = 12; // characters of a request's id
const history = { hits: [], tokens: [], moved: [], stalls: [], queue: [] };
let polls = []; // responses of the last window and the one before, with their times
let cells = []; // states of the experts on the map
let lastResponse = null; // time of the last response

// ---- formatting

function readable(text) {
  const short = text.length > MAX_NAME ? `${text.slice(0, MAX_NAME)}…` : text;
  return short.replace(UNSEEN, "\ufffd");
}

// For JSON.parse: every name of a response, but not the rows of `cells`, the only texts in lists.
function readableName(key, value) {
  return typeof value === "string" && !Array.isArray(this) ? readable(value) : value;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) { count /= 1024; power += 1; }
  return `${count.toFixed(count < 10 && power ? 1 : 0)} ${units[power]}`;
}

function number(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function percent(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)} %` : "-";
}

function milliseconds(seconds) {
  if (seconds === null) return "-";
  if (seconds >= 10) return duration(seconds);
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => seconds >= size);
  const [size, name] = parts[at];
  const rest = parts[at + 1];
  const left = rest ? Math.floor((seconds % size) / rest[0]) : 0;
  return `${Math.floor(seconds / size)} ${name}${left ? ` ${left} ${rest[1]}` : ""}`;
}

// ---- parts of the page

function tile(id, figure, note) {
  const box = find(id);
  box.querySelector(".figure").textContent = figure;
  box.querySelector(".note").textContent = note;
}

function curve(id, value, top) {
  const points = history[id];
  points.push(value);
  if (points.length > MAX_POINTS) points.shift();
  const known = points.filter((point) => point !== null);
  const highest = top ?? Math.max(...known, 1e-9);
  const x = (index) => 120 * (MAX_POINTS - points.length + index) / (MAX_POINTS - 1);
  const y = (point) => 31 - 30 * Math.min(1, point / highest);
  let trace = "", area = "", from = null;
  points.forEach((point, index) => {
    if (point === null) { from = null; return; }
    trace += `${from === null ? "M" : "L"}${x(index).toFixed(2)} ${y(point).toFixed(2)}`;
    if (from !== null) {
      area += `M${x(from).toFixed(2)} 32L${x(from).toFixed(2)} ${y(points[from]).toFixed(2)}` +
        `L${x(index).toFixed(2)} ${y(point).toFixed(2)}L${x(index).toFixed(2)} 32Z`;
    }
    from = index;
  });
  const svg = find(id).querySelector("svg");
  svg.replaceChildren(path("area", area), path("trace", trace));
}

// A column for each value, oldest first; the tallest has the whole height.
function columns(id, values) {
  const highest = Math.max(...values.map((value) => value ?? 0), 1e-9);
  const width = 120 / Math.max(20, values.length);
  const area = values.map((value, index) => {
    const height = 31 * (value ?? 0) / highest, left = index * width;
    return value === null ? "" : `M${left.toFixed(2)} 32v${(-height).toFixed(2)}h${(0.8 * width).toFixed(2)}V32Z`;
  });
  find(id).querySelector("svg").replaceChildren(path("column", area.join("")));
}

function path(kind, data) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
  element.setAttribute("class", kind);
  element.setAttribute("d", data);
  return element;
}

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function legend(id, entries) {
  find(id).replaceChildren(...entries.map(([colour, text]) => {
    const item = element("li"), mark = element("i");
    mark.style.background = `var(--${colour})`;
    item.append(...(colour ? [mark, text] : [text]));
    return item;
  }));
}

function bar(target, parts, whole) {
  target.replaceChildren(...parts.map(([colour, amount]) => {
    const part = element("span");
    part.style.width = `${whole ? 100 * amount / whole : 0}%`;
    part.style.background = `var(--${colour})`;
    return part;
  }));
}

function count(text, letters) {
  return [...text].filter((letter) => letters.includes(letter)).length;
}

// ---- the map of experts: a row for each layer, a column for each expert

function drawCells() {
  const canvas = find("cells");
  const width = canvas.clientWidth;
  const columns = Math.max(1, ...cells.map((row) => row.length));
  if (!cells.length || !width) return;
  const left = 26, scale = window.devicePixelRatio || 1;
  const size = Math.max(2, (width - left) / columns), top = 4;
  const height = Math.max(4, Math.min(16, size, 520 / cells.length));
  canvas.height = Math.ceil((height * cells.length + 20) * scale);
  canvas.width = Math.ceil(width * scale);
  canvas.style.height = `${height * cells.length + 20}px`;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const gap = Math.min(1, size / 6);
  for (const [letter, [name]] of Object.entries(STATES)) {
    pen.fillStyle = colour(name);
    cells.forEach((row, layer) => {
      for (let expert = 0; expert < row.length; expert += 1) {
        if (row[expert] === letter) {
          pen.fillRect(left + expert * size, top + layer * height, size - gap, height - gap);
        }
      }
    });
  }
  pen.fillStyle = colour("muted");
  pen.font = "10px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.ceil(11 / height);
  cells.forEach((_, layer) => {
    if (layer % every === 0) pen.fillText(layer, left - 5, top + (layer + 0.5) * height);
  });
  pen.textAlign = "left";
  const step = columns > 40 ? 10 * Math.ceil(columns / 160) : 4;
  for (let expert = 0; expert < columns; expert += step) {
    pen.fillText(expert, left + expert * size, top + height * cells.length + 9);
  }
  canvas.geometry = { left, top, size, height };
}

function showTip(event) {
  const { left, top, size, height } = find("cells").geometry ?? {};
  const tip = find("tip");
  const expert = Math.floor((event.offsetX - left) / size);
  const layer = Math.floor((event.offsetY - top) / height);
  const letter = cells[layer]?.[expert];
  tip.hidden = letter === undefined || expert < 0;
  if (tip.hidden) return;
  tip.textContent = `layer ${layer}, expert ${expert}: ${STATES[letter][1]}`;
  const room = find("cells").clientWidth - tip.offsetWidth - 4;
  tip.style.left = `${Math.max(0, Math.min(room, event.offsetX + 12))}px`;
  tip.style.top = `${event.offsetY + 14}px`;
}

// ---- one response of /status

// Growth of a total per second of the window; null before the second poll.
function rate(now, seconds, read) {
  const from = polls[0] && read(polls[0].status);
  return from === undefined || !seconds ? null : Math.max(0, read(now) - from) / seconds;
}

function show(now, seconds) {
  document.title = `${now.model} - moecast`;
  find("model").textContent = now.model;
  find("model").title = now.model;
  setState(now.state, now.state);
  showQueue(now);
  showTokens(now, rate(now, seconds, (status) => status.tokens.generated));
  showLatency(now.latency, now.answers);
  showAnswers(now.answers);
  tile("memory", bytes(now.memory.resident_bytes), "resident");
  if (!now.experts) return;
  const { system, predictor, eviction } = now.served;
  find("served").textContent = `system ${system}, predictor ${predictor}, eviction ${eviction}`;
  showTraffic(now, (read) => rate(now, seconds, (status) => status.experts && read(status)));
  showMemory(now);
  showExperts(now);
  showPrefetch(now.experts);
  showFacts(now);
}

function showTraffic(now, per) {
  const { experts } = now;
  const requested = per((status) => status.experts.requests), hit = per((status) => status.experts.hits);
  const overall = percent(experts.hits, experts.requests);
  tile("hits", requested ? percent(hit, requested) : overall,
    requested ? `of ${number(requested)} experts/s; ${overall} overall` : "overall; idle now");
  curve("hits", requested ? hit / requested : null, 1);
  const moved = per((status) => status.experts.bytes_moved) ?? 0;
  const { disk, host } = now.bytes_from;
  const sources = host ? `${bytes(disk)} from disk, ${bytes(host)} from host memory` : `${bytes(disk)} from disk`;
  tile("moved", `${bytes(moved)}/s`, `${sources}, in total`);
  curve("moved", moved);
  const stalled = Math.min(1, per((status) => status.seconds.stall) ?? 0);
  tile("stalls", percent(stalled, 1),
    `of the time; ${duration(now.seconds.stall)} in total, ${duration(now.seconds.predictor)} in the predictor`);
  curve("stalls", stalled, 1);
}

function showLatency(latency, answers) {
  for (const id of ["ttft", "tpot"]) {
    const known = latency[`${id}_seconds`];
    tile(id, known ? milliseconds(known.p50) : "-",
      known ? `p90 ${milliseconds(known.p90)}, p99 ${milliseconds(known.p99)}, last ` +
        `${number(latency.num_answers)} answers` : "no answer yet");
    columns(id, answers.map((answer) => answer[`${id}_seconds`]).reverse());
  }
}

function showAnswers(answers) {
  find("answers-summary").textContent = answers.length
    ? `The last ${answers.length} answers, the newest first. Prompts and texts are not kept.` : "None yet.";
  find("answers").replaceChildren(...answers.map((answer) => {
    const row = element("tr"), id = element("th", answer.id.slice(0, SHOWN_ID));
    const ended = new Date(answer.ended_at);
    id.scope = "row";
    id.title = answer.id;
    row.append(id, ...[
      ended.toLocaleTimeString(), number(answer.prompt_tokens), number(answer.new_tokens),
      milliseconds(answer.ttft_seconds), milliseconds(answer.tpot_seconds),
    ].map((value) => element("td", value)), element("td", answer.finish_reason, `reason ${answer.finish_reason}`));
    row.children[1].title = ended.toString();
    return row;
  }));
}

function showQueue(now) {
  const { running, waiting, max_running, max_waiting } = now.queue;
  tile("queue", `${running} running`, `of ${max_running}; ${waiting} of ${max_waiting} waiting`);
  curve("queue", running + waiting, Math.max(1, max_running));
}

function showTokens(now, throughput) {
  tile("tokens", `${number(throughput ?? 0)} tokens/s`,
    `${number(now.tokens.generated)} generated, ${number(now.tokens.prompt)} prompt tokens, ` +
      `${number(now.tokens.reused)} of them reused`);
  curve("tokens", throughput);
}

function showMemory(now) {
  tile("memory", bytes(now.memory.resident_bytes), `resident; KV caches of ended answers: ${bytes(now.memory.kept_kv_bytes)}; expert caches:`);
  find("tiers").replaceChildren(...now.tiers.map((tier) => {
    const line = element("div", undefined, "gauge");
    const filled = element("div", undefined, "bar");
    bar(filled, [["cached", tier.used_bytes]], tier.budget_bytes);
    line.append(`${tier.name}: ${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)}`, filled);
    return line;
  }));
}

function showExperts(now) {
  cells = now.cells;
  const text = cells.join("");
  const present = count(text, "pc");
  find("cells-summary").textContent =
    `${number(present)} of ${number(text.length)} experts are cached (${percent(present, text.length)}): ` +
    `${cells.length} layers from top to bottom, ${Math.max(...cells.map((row) => row.length))} experts each`;
  drawCells();
  const shown = Object.entries(STATES).filter(([letter]) => letter !== "h" || now.tiers.length > 1);
  legend("legend", shown.map(([letter, [colour, name]]) => [colour, `${name}: ${number(count(text, letter))}`]));
  find("layers").replaceChildren(...now.layers.map((layer, index) => {
    const row = element("tr"), states = cells[index];
    const values = [count(states, "pc"), count(states, "f"), count(states, "p"),
      percent(layer.hits, layer.requests), layer.recall === null ? "-" : percent(layer.recall, 1)];
    const head = element("th", index);
    head.scope = "row";
    row.append(head, ...values.map((value) => element("td", value)));
    return row;
  }));
}

function showPrefetch(experts) {
  const issued = experts.bytes_prefetched;
  const pending = Math.max(0, issued - experts.bytes_used - experts.bytes_wasted);
  find("prefetch-summary").textContent = issued
    ? `${bytes(issued)} prefetched, ${percent(experts.bytes_used, issued)} of it requested afterwards; ` +
      `${percent(experts.needed_predicted, experts.requests)} of the requested experts had been predicted`
    : "nothing was prefetched";
  bar(find("prefetch"),
    [["cached", experts.bytes_used], ["coming", pending], ["bad", experts.bytes_wasted]], issued);
  legend("prefetch-legend", [
    ["cached", `used: ${bytes(experts.bytes_used)}`],
    ["coming", `not requested yet: ${bytes(pending)}`],
    ["bad", `wasted: ${bytes(experts.bytes_wasted)}`],
    [null, `predicted but late (not prefetched): ${bytes(experts.bytes_late)}`],
  ]);
}

function describeDrift(drift) {
  if (drift === null) return "not compared: the predictor has no card";
  if (drift.mean_drop === null) return "not measured yet";
  const change = `${Math.abs(drift.mean_drop).toFixed(3)} ${drift.mean_drop > 0 ? "below" : "above"} its card`;
  return drift.has_drifted ? `${change}: it no longer fits, see the log` : change;
}

function showFacts(now) {
  const faults = Object.entries(now.faults).map(([kind, times]) => `${readable(kind)}: ${times}`).join(", ");
  const served = now.served;
  const facts = {
    "model": `${now.model}: ${served.num_layers} layers of ${served.num_experts} experts, top ${served.top_k}`,
    "system": served.system,
    "predictor": served.predictor,
    "eviction": served.eviction,
    "budget": now.tiers.map((tier) => `${tier.name} ${bytes(tier.budget_bytes)}`).join(", "),
    "prefetching": now.prefetching === null ? "not adaptive" : now.prefetching ? "on" : "off: it slowed decoding",
    "accuracy of forecasts": describeDrift(now.predictor_drift),
    "failed transfers": faults || "none",
    "hung threads": number(now.lost_threads),
    "uptime": duration(now.uptime_seconds),
    "version": now.version,
  };
  find("facts").replaceChildren(...Object.entries(facts).flatMap(
    ([name, value]) => [element("dt", name), element("dd", value)]));
}

// ---- polling

// Set only on a change: screen readers read it aloud each time.
function setState(text, kind) {
  if (find("state").textContent !== text) find("state").textContent = text;
  find("state").className = `state ${kind}`;
}

function showDisconnected(reason) {
  const since = lastResponse === null ? "" : `; last update at ${lastResponse.toLocaleTimeString()}`;
  setState(reason + since, "disconnected");
  document.body.classList.add("disconnected");
}

async function poll() {
  try {
    const response = await fetch(ADDRESS, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) {
      showDisconnected(response.status === 401 ? "the key is no longer accepted: reload the page"
        : `the server answers ${response.status}`);
      return;
    }
    const status = JSON.parse(await response.text(), readableName);
    const at = performance.now();
    document.body.classList.remove("disconnected");
    lastResponse = new Date();
    if (status.uptime_seconds < polls.at(-1)?.status.uptime_seconds) polls = []; // restarted
    show(status, polls.length ? (at - polls[0].at) / 1000 : 0);
    polls.push({ status, at });
    while (polls.length > 1 && at - polls[1].at >= WINDOW_MS) polls.shift();
  } catch (error) {
    showDisconnected(error instanceof TypeError || error.name === "TimeoutError"
      ? "the server does not answer" : `error of this page: ${error}`);
  }
}

async function watch() {
  if (!document.hidden || !polls.length) await poll();
  setTimeout(watch, PERIOD_MS);
}

find("cells").addEventListener("pointermove", showTip);
find("cells").addEventListener("pointerleave", () => { find("tip").hidden = true; });
window.addEventListener("resize", drawCells);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCells);
watch();
