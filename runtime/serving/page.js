// Asks /status each second and shows it. Rates are differences between answers: the server keeps
// sums only, so that any number of pages may be open.
"use strict";

const PERIOD_MS = 1000;
const PATIENCE_MS = 4000;
const WINDOW_MS = 5000; // over which rates are taken: a slow model makes no token in most seconds
const KEPT = 120; // points of a curve: two minutes
const STATES = {
  p: ["pinned", "in use now"],
  c: ["cached", "here"],
  f: ["coming", "on its way, or here in part"],
  h: ["below", "in host memory, below the device"],
  ".": ["absent", "on disk only"],
};

// Not relative: an address with a key in it (http://:KEY@host/) would be refused by fetch.
const ADDRESS = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}status`;

const find = (id) => document.getElementById(id);
const history = { hits: [], tokens: [], moved: [], stalls: [], queue: [] };
let answers = []; // those of the last window and the one before it, with when they came
let cells = []; // what the map shows
let answered = null; // when the server answered last

// ---- numbers as people read them

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
  if (points.length > KEPT) points.shift();
  const known = points.filter((one) => one !== null);
  const highest = top ?? Math.max(...known, 1e-9);
  const x = (index) => 120 * (KEPT - points.length + index) / (KEPT - 1);
  const y = (one) => 31 - 30 * Math.min(1, one / highest);
  let trace = "", area = "", from = null;
  points.forEach((one, index) => {
    if (one === null) { from = null; return; }
    trace += `${from === null ? "M" : "L"}${x(index).toFixed(2)} ${y(one).toFixed(2)}`;
    if (from !== null) {
      area += `M${x(from).toFixed(2)} 32L${x(from).toFixed(2)} ${y(points[from]).toFixed(2)}` +
        `L${x(index).toFixed(2)} ${y(one).toFixed(2)}L${x(index).toFixed(2)} 32Z`;
    }
    from = index;
  });
  const svg = find(id).querySelector("svg");
  svg.replaceChildren(path("area", area), path("trace", trace));
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
  return [...text].filter((one) => letters.includes(one)).length;
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

// ---- one answer

// What a sum grew by, for each second of the window; null when there is nothing to compare with.
function rate(now, seconds, read) {
  const from = answers[0] && read(answers[0].status);
  return from === undefined || !seconds ? null : Math.max(0, read(now) - from) / seconds;
}

function show(now, seconds) {
  document.title = `${now.model} - moecast`;
  find("model").textContent = now.model;
  tell(now.state, now.state);
  showQueue(now);
  showTokens(now, rate(now, seconds, (one) => one.tokens.generated));
  tile("memory", bytes(now.memory.resident_bytes), "of the process");
  if (!now.experts) return;
  const { system, predictor, eviction } = now.served;
  find("served").textContent = `${system}, forecasts by ${predictor}, drops by ${eviction}`;
  showTraffic(now, (read) => rate(now, seconds, (one) => one.experts && read(one)));
  showMemory(now);
  showExperts(now);
  showPrefetch(now.experts);
  showFacts(now);
}

function showTraffic(now, per) {
  const { experts } = now;
  const asked = per((one) => one.experts.requests), hit = per((one) => one.experts.hits);
  const overall = percent(experts.hits, experts.requests);
  tile("hits", asked ? percent(hit, asked) : overall,
    asked ? `of ${number(asked)} experts a second; ${overall} in all` : "in all; nothing runs now");
  curve("hits", asked ? hit / asked : null, 1);
  const moved = per((one) => one.experts.bytes_moved) ?? 0;
  tile("moved", `${bytes(moved)}/s`, `${bytes(experts.bytes_moved)} in all`);
  curve("moved", moved);
  const stalled = Math.min(1, per((one) => one.seconds.stall) ?? 0);
  tile("stalls", percent(stalled, 1),
    `of the time; in all ${duration(now.seconds.stall)}, and ${duration(now.seconds.predictor)} in the predictor`);
  curve("stalls", stalled, 1);
}

function showQueue(now) {
  const { running, waiting, max_running, max_waiting } = now.queue;
  tile("queue", `${running} running`, `of ${max_running}; ${waiting} of ${max_waiting} waiting`);
  curve("queue", running + waiting, Math.max(1, max_running));
}

function showTokens(now, made) {
  tile("tokens", number(made ?? 0),
    `${number(now.tokens.generated)} generated, ${number(now.tokens.prompt)} of prompts`);
  curve("tokens", made);
}

function showMemory(now) {
  tile("memory", bytes(now.memory.resident_bytes), "of the process; arenas of experts:");
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
  find("cells-said").textContent =
    `${number(present)} of ${number(text.length)} experts are here (${percent(present, text.length)}): ` +
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
  find("prefetch-said").textContent = issued
    ? `${bytes(issued)} brought on forecasts, of which ${percent(experts.bytes_used, issued)} were then asked ` +
      `for; ${percent(experts.needed_predicted, experts.requests)} of the experts asked for had been forecast`
    : "nothing was brought on forecasts";
  bar(find("prefetch"),
    [["cached", experts.bytes_used], ["coming", pending], ["bad", experts.bytes_wasted]], issued);
  legend("prefetch-legend", [
    ["cached", `used: ${bytes(experts.bytes_used)}`],
    ["coming", `not asked for yet: ${bytes(pending)}`],
    ["bad", `wasted: ${bytes(experts.bytes_wasted)}`],
    [null, `besides, forecast but late: ${bytes(experts.bytes_late)}`],
  ]);
}

function showFacts(now) {
  const faults = Object.entries(now.faults).map(([kind, times]) => `${kind}: ${times}`).join(", ");
  const served = now.served;
  const facts = {
    "model": `${now.model}: ${served.num_layers} layers of ${served.num_experts} experts, top ${served.top_k}`,
    "system": served.system,
    "predictor": served.predictor,
    "eviction": served.eviction,
    "budget": now.tiers.map((tier) => `${tier.name} ${bytes(tier.budget_bytes)}`).join(", "),
    "prefetching": now.prefetching === null ? "as the system says" : now.prefetching ? "on" : "off: measured not to pay",
    "failed transfers": faults || "none",
    "threads that hang": number(now.lost_threads),
    "running for": duration(now.uptime_seconds),
    "version": now.version,
  };
  find("facts").replaceChildren(...Object.entries(facts).flatMap(
    ([name, value]) => [element("dt", name), element("dd", value)]));
}

// ---- asking

// Only when it changes: screen readers read it aloud each time that it is set.
function tell(text, kind) {
  if (find("state").textContent !== text) find("state").textContent = text;
  find("state").className = `state ${kind}`;
}

function lose(why) {
  tell(answered === null ? why : `${why}; shown is what it was at ${answered.toLocaleTimeString()}`, "lost");
  document.body.classList.add("lost-answer");
}

async function ask() {
  try {
    const answer = await fetch(ADDRESS, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) {
      lose(answer.status === 401 ? "the key is not accepted any more: reload the page"
        : `the server answers ${answer.status}`);
      return;
    }
    const status = await answer.json();
    const at = performance.now();
    document.body.classList.remove("lost-answer");
    answered = new Date();
    if (status.uptime_seconds < answers.at(-1)?.status.uptime_seconds) answers = []; // restarted
    show(status, answers.length ? (at - answers[0].at) / 1000 : 0);
    answers.push({ status, at });
    while (answers.length > 1 && at - answers[1].at >= WINDOW_MS) answers.shift();
  } catch (error) {
    lose(error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : `fault of this page: ${error}`);
  }
}

async function watch() {
  if (!document.hidden || !answers.length) await ask();
  setTimeout(watch, PERIOD_MS);
}

find("cells").addEventListener("pointermove", showTip);
find("cells").addEventListener("pointerleave", () => { find("tip").hidden = true; });
window.addEventListener("resize", drawCells);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCells);
watch();
