"use strict";

// What the engine does now: /live is read twice a second, and shown over the last minute.

const PERIOD = 500;
const POINTS = 120;
const series = { rate: [], length: [], tier: [] };
let before = null;

/** The element of an id. */
function byId(id) {
  return document.getElementById(id);
}

/** Headers of every call; the key is kept for this tab alone. */
function authorization() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function showStatus(text, bad) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
}

/** The hue of a drafter, the same wherever its name is shown. */
function hueOf(name) {
  const hues = [205, 150, 35, 275, 0, 95];
  let hash = 0;
  for (const char of name) hash = (hash * 31 + char.codePointAt(0)) % 997;
  return hues[hash % hues.length];
}

async function look() {
  try {
    const answer = await fetch("live", { headers: authorization() });
    if (answer.status === 401) {
      byId("key-label").hidden = false;
      showStatus("The server needs an API key.", true);
    } else if (answer.ok) {
      show(await answer.json());
      showStatus("", false);
    } else {
      showStatus(`The server answers ${answer.status}.`, true);
    }
  } catch {
    showStatus("The server does not answer.", true);
  }
  setTimeout(look, PERIOD);
}

function show(now) {
  byId("model").textContent = now.model;
  showLegend(now.drafter);
  if (before) {
    const seconds = now.seconds - before.seconds;
    const emitted = now.emitted_tokens - before.emitted_tokens;
    const rows = now.row_steps - before.row_steps;
    const rate = seconds > 0 ? emitted / seconds : 0;
    push(series.rate, rate);
    push(series.length, rows ? emitted / rows : null);
    push(series.tier, rows ? now.tier : null);
    byId("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    if (rows) {
      byId("length").textContent = (emitted / rows).toFixed(2);
      byId("tier").textContent = now.tier;
      const drafted = now.draft_tokens - before.draft_tokens;
      const accepted = now.accepted_tokens - before.accepted_tokens;
      byId("share").textContent = drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–";
    }
    draw("rate-chart", series.rate, 0, false);
    draw("length-chart", series.length, 1, false);
    draw("tier-chart", series.tier, 0, true, Math.max(...now.tiers));
  }
  before = now;
  showSlots(now);
}

function push(values, value) {
  values.push(value);
  if (values.length > POINTS) values.shift();
}

/** A line over the last minute; null where nothing ran. */
function draw(id, values, least, steps, most) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(most ?? 0, least + 1, ...known);
  const x = (index) => ((POINTS - values.length + index) / (POINTS - 1)) * 240;
  const y = (value) => 52 - ((value - least) / (top - least)) * 46;
  let path = "";
  let last = null;
  values.forEach((value, index) => {
    if (value !== null) {
      const place = `${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      if (last === null) path += `M${place}h0.5`;
      else path += steps ? `H${x(index).toFixed(1)}V${y(value).toFixed(1)}` : `L${place}`;
    }
    last = value;
  });
  const chart = byId(id);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path || "M0 52");
  chart.replaceChildren(line);
  // Outside of the picture, which is stretched.
  if (known.length) chart.previousElementSibling.dataset.top = Number.isInteger(top) ? top : top.toFixed(1);
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

function showLegend(drafter) {
  if (byId("legend").children.length > 1) return;
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = "swatch drafted";
  swatch.style.setProperty("--hue", hueOf(drafter));
  item.append(swatch, ` drafted by ${drafter}, accepted`);
  byId("legend").append(item);
}

byId("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value));
look();
