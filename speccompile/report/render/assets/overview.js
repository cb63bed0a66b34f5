"use strict";
// The first screen: what was wrapped, the verdict, fallbacks, and a line for each tier.

function Overview({ report, tier, choose }) {
  const { subject, machine } = report;
  const what = [
    count(subject.layers, "layer"), subject.dtype, `mode ${subject.mode}`,
    subject.backend ? `backend ${subject.backend}` : "not lowered",
    `${count(subject.max_batch, "slot")} of ${subject.max_len.toLocaleString("en")} tokens`,
  ];
  return html`<header class="top" id="top">
      <h1>${subject.model}</h1><span class="muted">${what.join(" · ")}</span>
    </header>
    <p class="muted">${machine.processor} · ${machine.device} · ${count(machine.threads, "thread")} · ${Object.entries(machine.versions).map(([name, version]) => `${name} ${version}`).join(" · ")}</p>
    <div class="verdict" id="verdict" role="region" aria-label="Verdict">
      <p class="first">${report.verdict[0]}</p>
      <ul>${report.verdict.slice(1).map((sentence) => html`<li>${sentence}</li>`)}</ul>
    </div>
    ${report.fallbacks.length ? html`<div class="fallbacks" role="alert">
      <h2>${count(report.fallbacks.length, "fallback")}</h2>
      <ul>${report.fallbacks.map((item) => html`<li><strong>${item.what}</strong>: ${item.reason}. ${item.advice}</li>`)}</ul>
    </div>` : null}
    <${TierTable} report=${report} tier=${tier} choose=${choose} />`;
}

// The acceptance length of the steps of a tier, where it is known.
function acceptanceOf(report, tier) {
  if (tier.decoded) return tier.decoded.own_length;
  const steps = report.trace?.steps.filter((step) => step.draft_len === tier.draft_len) ?? [];
  const rows = sum(steps.map((step) => step.requests.length));
  if (rows) return sum(steps.map((step) => sum(step.emitted))) / rows;
  return tier.draft_len === 0 ? 1 : null;
}

// How many times as fast as K=0: as decoded, else by acceptance and cost.
function gainOf(report, tier) {
  const plain = report.tiers.find((item) => item.draft_len === 0);
  if (tier.decoded && plain?.decoded?.tokens_per_second) return tier.decoded.tokens_per_second / plain.decoded.tokens_per_second;
  const length = acceptanceOf(report, tier);
  return tier.cost && length ? length / tier.cost : null;
}

function TierTable({ report, tier, choose }) {
  const gain = (item) => gainOf(report, item);
  const fixed = (value) => (value === null ? "–" : value.toFixed(2));
  const columns = [
    { name: "tier", of: (item) => item.draft_len, show: (item) => html`<button aria-pressed=${item === tier} onClick=${() => choose({ tier: item.name })}>${item.name}</button>` },
    { name: "rows x width", of: (item) => item.width, show: (item) => `${item.rows} x ${item.width}` },
    { name: "step", number: true, of: (item) => item.measured?.step_ms ?? null, show: (item) => ms(item.measured?.step_ms) },
    { name: "memory needs", number: true, of: (item) => item.floor_ms, show: (item) => ms(item.floor_ms) },
    { name: "breaks even at", number: true, of: (item) => item.cost, show: (item) => fixed(item.cost === null ? null : Math.max(item.cost, 1)) },
    { name: "acceptance length", number: true, of: (item) => acceptanceOf(report, item), show: (item) => fixed(acceptanceOf(report, item)) },
    { name: "as fast as K=0", number: true, of: gain, show: (item) => times(gain(item)) },
    { name: "tokens/s", number: true, of: (item) => item.decoded?.tokens_per_second ?? null, show: (item) => item.decoded?.tokens_per_second.toFixed(1) ?? "–" },
  ];
  return html`<p class="muted">A tier breaks even at the acceptance length that equals its step time over that of K=0. The acceptance length is that of the steps which ran the tier.</p>
    <${Sortable} caption="Tiers" columns=${columns} rows=${report.tiers} />`;
}
