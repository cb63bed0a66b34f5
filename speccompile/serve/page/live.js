"use strict";

// What the engine does now: /live is read twice a second, and shown over the last minute.

const PERIOD = 500;
const POINTS = 120;
/** Points that the figures are means of. */
const RECENT = 4;
/** The hue of each drafter, in the order of the mode. */
const HUES = [205, 145, 30, 280, 340, 60];
const counters = ["seconds", "emitted_tokens", "row_steps", "draft_tokens", "accepted_tokens"];
const series = { rate: [], length: [], tier: [] };
let recent = [];
/** Answers that are shown again after a reload need them before the server has answered. */
let drafters = JSON.parse(sessionStorage.getItem("drafters") ?? "[]");

/** The element of an id. */
function byId(id) {
  return document.getElementById(id);
}

/** Headers of every call; the key is kept for this tab alone. */
function authorization() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function showStatus(text, kind) {
  byId("status").textContent = text;
  byId("status").className = `status ${kind}`;
}

function hueOf(drafter) {
  return HUES[Math.max(0, drafters.indexOf(drafter)) % HUES.length];
}

async function look() {
  // Nothing is shown of a tab that is hidden.
  if (!document.hidden) await read();
  setTimeout(look, PERIOD);
}

async function read() {
  try {
    const answer = await fetch("live", { headers: authorization() });
    if (answer.status === 401) {
      byId("key-label").hidden = false;
      showStatus("needs an API key", "bad");
    } else if (answer.ok) {
      const now = await answer.json();
      show(now);
      const running = now.slots.filter(Boolean).length;
      showStatus(running ? `${running} running` : "idle", running ? "running" : "");
    } else {
      showStatus(`answers ${answer.status}`, "bad");
    }
  } catch {
    showStatus("server is gone", "bad");
  }
}

function show(now) {
  byId("model").textContent = `${now.model} · ${now.drafters.join(" + ")}`;
  drafters = now.drafters;
  sessionStorage.setItem("drafters", JSON.stringify(drafters));
  showLegend();
  const before = recent.at(-1);
  if (before) {
    const { seconds, emitted_tokens: emitted, row_steps: rows } = since(before, now);
    push(series.rate, seconds > 0 ? emitted / seconds : 0);
    push(series.length, rows ? emitted / rows : null);
    push(series.tier, rows ? now.tier : null);
    showFigures(since(recent[0], now), now);
    draw("rate-chart", series.rate, 0, false);
    draw("length-chart", series.length, 1, false);
    draw("tier-chart", series.tier, 0, true, Math.max(...now.tiers));
  }
  recent = [...recent, now].slice(-RECENT);
  showSlots(now);
}

/** What was counted between two looks. */
function since(before, now) {
  return Object.fromEntries(counters.map((name) => [name, now[name] - before[name]]));
}

function showFigures(counted, now) {
  const { seconds, emitted_tokens: emitted, row_steps: rows, draft_tokens: drafts } = counted;
  const rate = seconds > 0 ? emitted / seconds : 0;
  byId("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  if (!rows) return;
  byId("length").textContent = (emitted / rows).toFixed(2);
  byId("tier").textContent = now.tier;
  byId("share").textContent = drafts ? `${Math.round((100 * counted.accepted_tokens) / drafts)} %` : "–";
}

function push(values, value) {
  values.push(value);
  if (values.length > POINTS) values.shift();
}

/** A line over the last minute, and the area below it; null where nothing ran. */
function draw(id, values, least, steps, most) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(most ?? 0, least + 1, ...known);
  const x = (index) => (((POINTS - values.length + index) / (POINTS - 1)) * 240).toFixed(1);
  const y = (value) => (54 - ((value - least) / (top - least)) * 48).toFixed(1);
  let line = "";
  let area = "";
  let start = null;
  values.forEach((value, index) => {
    if (value === null) return;
    const begins = index === 0 || values[index - 1] === null;
    if (begins) {
      start = x(index);
      line += `M${start} ${y(value)}h0.5`;
      area += `M${start} 54V${y(value)}`;
    } else {
      const part = steps ? `H${x(index)}V${y(value)}` : `L${x(index)} ${y(value)}`;
      line += part;
      area += part;
    }
    if (index === values.length - 1 || values[index + 1] === null) area += `V54H${start}`;
  });
  byId(id).replaceChildren(path(area, "area"), path(line, "line"));
  // Outside of the picture, which is stretched.
  const caption = byId(id).previousElementSibling;
  if (known.length) caption.dataset.top = Number.isInteger(top) ? top : top.toFixed(1);
}

function path(data, kind) {
  const item = document.createElementNS("http://www.w3.org/2000/svg", "path");
  item.setAttribute("d", data || "M0 54");
  item.setAttribute("class", kind);
  return item;
}

function showSlots(now) {
  byId("waiting").textContent = now.waiting ? `${now.waiting} waiting` : "";
  const list = byId("slots");
  while (list.children.length < now.slots.length) {
    const item = document.createElement("li");
    item.append(document.createElement("span"), document.createElement("meter"));
    list.append(item);
  }
  now.slots.forEach((slot, index) => {
    const [text, meter] = list.children[index].children;
    const reads = slot && slot.read_tokens < slot.prompt_tokens - 1;
    if (!slot) text.textContent = `${index + 1}: free`;
    else if (reads) text.textContent = `${index + 1}: reads ${slot.read_tokens} of ${slot.prompt_tokens} prompt tokens`;
    else text.textContent = `${index + 1}: ${slot.new_tokens} of at most ${slot.max_new_tokens} tokens`;
    meter.max = slot ? (reads ? slot.prompt_tokens : slot.max_new_tokens) : 1;
    meter.value = slot ? (reads ? slot.read_tokens : slot.new_tokens) : 0;
  });
}

function showLegend() {
  const list = byId("legend");
  if (list.children.length > 1) return;
  for (const drafter of drafters) {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = "swatch drafted";
    swatch.style.setProperty("--hue", hueOf(drafter));
    item.append(swatch, ` drafted by ${drafter}, accepted`);
    list.append(item);
  }
}

byId("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value));
byId("panel-toggle").addEventListener("click", (event) => {
  const open = byId("main").classList.toggle("shows-panel");
  event.currentTarget.setAttribute("aria-expanded", String(open));
  event.currentTarget.textContent = open ? "Chat" : "Engine";
});
look();
