"use strict";
// The page of a comparison of drafters: the table, then what each of its figures is made of.

const two = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const ends = (interval) => (interval === null || interval.low === null ? "" : `${two(interval.low)} to ${two(interval.high)}`);
const value = (interval) => (interval === null ? null : interval.value);
const isPlain = (line) => line.name === "K=0";
const range = ({ low, high }) => (high === null ? `${low} or more` : `${low} to ${high - 1}`);

// Lines keep their index, and thus their colour, on the whole page.
const indexed = (machine) => machine.lines.map((line, index) => ({ ...line, index }));
const drafting = (machine) => indexed(machine).filter((line) => line.positions.length);

function Lines({ machine }) {
  const columns = [
    { name: "line", of: (line) => line.name, show: (line) => html`<span class="swatch" style=${{ background: seriesColor(line.index) }} aria-hidden="true"></span>${line.name}` },
    { name: "tokens/s", number: true, of: (line) => line.figures.tokens_per_second, show: (line) => line.figures.tokens_per_second.toFixed(1) },
    { name: "speed over K=0", number: true, of: (line) => value(line.figures.speed), show: (line) => times(value(line.figures.speed)) },
    { name: "95%", number: true, of: (line) => value(line.figures.speed), show: (line) => (isPlain(line) ? "" : ends(line.figures.speed)) },
    { name: "acceptance length", number: true, of: (line) => value(line.figures.acceptance_length), show: (line) => two(value(line.figures.acceptance_length)) },
    { name: "95%", number: true, of: (line) => value(line.figures.acceptance_length), show: (line) => (isPlain(line) ? "" : ends(line.figures.acceptance_length)) },
    { name: "step cost", number: true, of: (line) => line.figures.step_cost, show: (line) => two(line.figures.step_cost) },
    { name: "texts equal", number: true, of: (line) => (line.compared ? line.same / line.compared : null), show: (line) => (line.compared ? `${line.same === line.compared ? "yes" : "no"}, ${line.same} of ${line.compared}${line.same === line.compared ? "" : ` (${percent(line.agreement)})`}` : "–") },
    { name: "step", number: true, of: (line) => line.figures.step_ms, show: (line) => ms(line.figures.step_ms) },
    { name: "first token", number: true, of: (line) => line.figures.first_token_ms, show: (line) => ms(line.figures.first_token_ms) },
  ];
  const kernels = machine.kernels;
  return html`<p class="muted">The speed over K=0 is the acceptance length over the step cost, the time of a step over that of K=0. Intervals are of prompts drawn with replacement. Speeds leave out the first token and the time to it. Texts are compared with those of K=0; where some differ, the share in brackets is that of the tokens before the first difference.
      ${kernels ? html` K=0 is ${times(kernels.value)} as fast as transformers' generate${kernels.low === null ? "" : ` (95% ${ends(kernels)})`}: that is the part of the kernels.` : null}</p>
    <${Sortable} caption="Lines" columns=${columns} rows=${indexed(machine)} />
    <div class="columns" style=${{ marginTop: "1rem" }}>
      <div class="card"><h3>Speed over K=0</h3><${Intervals} title="Speed over K=0" base=${1} format=${times}
        rows=${indexed(machine).filter((line) => line.figures.speed && !isPlain(line)).map((line) => ({ name: line.name, index: line.index, ...line.figures.speed }))} /></div>
      <div class="card"><h3>Acceptance length</h3><${Intervals} title="Acceptance length" base=${1} format=${two}
        rows=${drafting(machine).map((line) => ({ name: line.name, index: line.index, ...line.figures.acceptance_length }))} /></div>
    </div>`;
}

function Positions({ machine }) {
  const lines = drafting(machine);
  if (!lines.length) return null;
  const deepest = Math.max(...lines.map((line) => line.positions.length));
  const labels = Array.from({ length: deepest }, (_, index) => `${index + 1}`);
  const series = lines.map((line) => ({
    name: line.name, index: line.index,
    points: line.positions.map((item) => ({ x: item.position - 1, y: item.accepted / item.reached, title: `${line.name}, position ${item.position}: ${percent(item.accepted / item.reached)} of ${item.reached}` })),
  }));
  return html`<${Section} id="positions" title="Conditional acceptance by position" lead="The share that was accepted, of the drafts whose predecessors in the step were all accepted. A tree counts as a chain as deep as its tier.">
    <div class="columns"><div class="card"><${LineChart} title="Conditional acceptance by position" series=${series} labels=${labels} most=${1} format=${percent} /><${Legend} items=${lines} /></div>
    <div class="scroll"><table><caption class="visually-hidden">Conditional acceptance by position</caption>
      <thead><tr><th>line</th>${labels.map((label) => html`<th class="number">${label}</th>`)}</tr></thead>
      <tbody>${lines.map((line) => html`<tr><td>${line.name}</td>${labels.map((_, index) => {
        const item = line.positions[index];
        return html`<td class="number" title=${item ? `of ${count(item.reached, "step")}` : ""}>${item ? percent(item.accepted / item.reached) : "–"}</td>`;
      })}</tr>`)}</tbody></table></div></div>
  </${Section}>`;
}

function Matrix({ title, lines, names, of, show }) {
  return html`<h3>${title}</h3><div class="scroll"><table><caption class="visually-hidden">${title}</caption>
    <thead><tr><th>line</th>${names.map((name) => html`<th class="number">${name}</th>`)}</tr></thead>
    <tbody>${lines.map((line) => html`<tr><td>${line.name}</td>${names.map((name) => {
      const found = of(line, name);
      return html`<td class="number" title=${found && found.low !== null && found.low !== undefined ? `95% ${ends(found)}` : ""}>${found ? show(found.value) : "–"}</td>`;
    })}</tr>`)}</tbody></table></div>`;
}

function Categories({ machine }) {
  const names = [...new Set(machine.lines.flatMap((line) => Object.keys(line.categories)))];
  if (!names.length) return null;
  const prompts = names.map((name) => `${name}: ${machine.lines.find((line) => line.categories[name]).categories[name].prompts}`);
  const of = (field) => (line, name) => line.categories[name]?.[field] ?? null;
  return html`<${Section} id="categories" title="By category" lead="Point at a figure for its 95% interval.">
    <${Matrix} title="Acceptance length" lines=${drafting(machine)} names=${names} of=${of("acceptance_length")} show=${two} />
    <${Matrix} title="Speed over K=0" lines=${indexed(machine).filter((line) => !isPlain(line))} names=${names} of=${of("speed")} show=${times} />
    <p class="muted">Prompts: ${prompts.join(", ")}</p>
  </${Section}>`;
}

function Contexts({ machine }) {
  const lines = indexed(machine).filter((line) => line.contexts.length);
  const lows = [...new Set(lines.flatMap((line) => line.contexts.map((item) => item.low)))].sort((a, b) => a - b);
  const names = lows.map((low) => range(lines.flatMap((line) => line.contexts).find((item) => item.low === low)));
  const of = (field) => (line, name) => {
    const found = line.contexts.find((item) => range(item) === name);
    return found && found[field] !== null ? { value: found[field] } : null;
  };
  return html`<${Section} id="contexts" title="By context length" lead="Tokens before a step. The time of a step is that of the engine's step, without the host's part between two steps.">
    <div class="columns">
      <div><${Matrix} title="Acceptance length" lines=${lines.filter((line) => line.positions.length)} names=${names} of=${of("acceptance_length")} show=${two} /></div>
      <div><${Matrix} title="Speed over K=0" lines=${lines.filter((line) => !isPlain(line))} names=${names} of=${of("speed")} show=${times} /></div>
      <div><${Matrix} title="Time of a step" lines=${lines} names=${names} of=${of("step_ms")} show=${ms} /></div>
      <div><${Matrix} title="Steps" lines=${lines} names=${names} of=${of("steps")} show=${(steps) => steps.toLocaleString("en")} /></div>
    </div>
  </${Section}>`;
}

function Tiers({ machine }) {
  const rows = indexed(machine).flatMap((line) => line.tiers.map((tier) => ({ line: line.name, ...tier })));
  const columns = [
    { name: "line", of: (row) => row.line },
    { name: "tier", of: (row) => row.tier, show: (row) => (/^\d+$/.test(row.tier) ? `K=${row.tier}` : row.tier) },
    { name: "steps", number: true, of: (row) => row.steps, show: (row) => row.steps.toLocaleString("en") },
    { name: "tokens a step", number: true, of: (row) => row.acceptance_length, show: (row) => two(row.acceptance_length) },
    { name: "median step", number: true, of: (row) => row.median_ms, show: (row) => ms(row.median_ms) },
  ];
  return html`<${Section} id="tiers" title="Steps by tier" lead="A drafter that has found fewer drafts runs a smaller tier than the policy chose.">
    <${Sortable} caption="Steps by tier" columns=${columns} rows=${rows} />
    <${Drafters} machine=${machine} />
  </${Section}>`;
}

function Drafters({ machine }) {
  const rows = indexed(machine).filter((line) => Object.keys(line.drafters).length > 1).flatMap((line) => Object.entries(line.drafters).map(([drafter, [drafts, accepted]]) => ({ line: line.name, drafter, drafts, accepted })));
  if (!rows.length) return null;
  const columns = [
    { name: "line", of: (row) => row.line }, { name: "drafter", of: (row) => row.drafter },
    { name: "drafts", number: true, of: (row) => row.drafts, show: (row) => row.drafts.toLocaleString("en") },
    { name: "accepted", number: true, of: (row) => (row.drafts ? row.accepted / row.drafts : null), show: (row) => (row.drafts ? percent(row.accepted / row.drafts) : "–") },
  ];
  return html`<h3>Drafts by drafter</h3><${Sortable} caption="Drafts by drafter" columns=${columns} rows=${rows} />`;
}

function Calibration({ machine }) {
  const lines = indexed(machine).filter((line) => line.calibration);
  if (!lines.length) return null;
  const labels = Array.from({ length: 11 }, (_, index) => (index / 10).toFixed(1));
  const series = lines.map((line) => ({
    name: line.name, index: line.index,
    points: line.calibration.bins.map((bin) => ({ x: 10 * bin.score, y: bin.accepted, title: `${line.name}, scores of ${two(bin.low)} to ${two(bin.high)}: ${percent(bin.accepted)} of ${bin.drafts} accepted` })),
  }));
  const columns = [
    { name: "line", of: (line) => line.name },
    { name: "drafts with scores", number: true, of: (line) => line.calibration.drafts, show: (line) => line.calibration.drafts.toLocaleString("en") },
    { name: "expected calibration error", number: true, of: (line) => line.calibration.error, show: (line) => line.calibration.error.toFixed(3) },
    { name: "Brier score", number: true, of: (line) => line.calibration.brier, show: (line) => line.calibration.brier.toFixed(3) },
  ];
  return html`<${Section} id="calibration" title="Calibration" lead="A score is the drafter's probability that a draft and all before it are accepted. On the dashed line, scores are right.">
    <div class="columns"><div class="card"><${LineChart} title="Share of accepted drafts by score" series=${series} labels=${labels} most=${1} format=${percent} diagonal=${true} /><${Legend} items=${lines} /></div>
    <${Sortable} caption="Calibration" columns=${columns} rows=${lines} /></div>
  </${Section}>`;
}

function Settings({ summary, machine }) {
  const shown = (item) => (item !== null && typeof item === "object" ? JSON.stringify(item) : String(item));
  const list = (facts) => html`<dl class="facts-list">${Object.entries(facts).filter(([, item]) => item !== null).map(([name, item]) => html`<dt>${name}</dt><dd class="mono">${shown(item)}</dd>`)}</dl>`;
  return html`<${Section} id="settings" title="Settings">
    <div class="columns"><div class="card"><h3>All lines</h3>${list(summary.settings)}</div>
      ${Object.keys(machine.facts).length ? html`<div class="card"><h3>Machine</h3>${list(machine.facts)}</div>` : null}</div>
    ${machine.lines.map((line) => html`<details><summary>${line.name}</summary>${list(line.facts)}</details>`)}
  </${Section}>`;
}

function App({ summary }) {
  const [chosen, choose] = useState(summary.machines.at(-1).name);
  const machine = summary.machines.find((item) => item.name === chosen);
  const prompts = Math.max(...machine.lines.map((line) => line.figures.prompts));
  const sections = [["top", "Lines"], ["positions", "Positions"], ["categories", "Categories"], ["contexts", "Contexts"], ["tiers", "Steps"], ["calibration", "Calibration"], ["settings", "Settings"]];
  const present = { positions: drafting(machine).length, categories: machine.lines.some((line) => Object.keys(line.categories).length), calibration: machine.lines.some((line) => line.calibration) };
  return html`<nav aria-label="Sections">
      <div class="links">${sections.filter(([id]) => present[id] ?? true).map(([id, name]) => html`<a href=${`#${id}`}>${name}</a>`)}</div>
      ${summary.machines.length > 1 ? html`<div class="tiers" role="group" aria-label="Machine"><span class="muted">machine</span>${summary.machines.map((item) => html`<button aria-pressed=${item === machine} onClick=${() => choose(item.name)}>${item.name}</button>`)}</div>` : null}
    </nav>
    <main>
      <header class="top" id="top"><h1>${summary.settings.model}</h1><span class="muted">${machine.name} · ${count(prompts, "prompt")} · ${summary.settings.temperature ? `temperature ${summary.settings.temperature}` : "greedy"}</span></header>
      <${Lines} machine=${machine} />
      <${Positions} machine=${machine} />
      <${Categories} machine=${machine} />
      <${Contexts} machine=${machine} />
      <${Tiers} machine=${machine} />
      <${Calibration} machine=${machine} />
      <${Settings} summary=${summary} machine=${machine} />
      <footer>Written by speccompile bench. This file contains everything that it shows; it loads nothing.</footer>
    </main>`;
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const summary = await new Response(stream).json();
  const app = document.getElementById("app");
  app.replaceChildren();
  render(html`<${App} summary=${summary} />`, app);
  app.dataset.ready = "true";
}
start();
