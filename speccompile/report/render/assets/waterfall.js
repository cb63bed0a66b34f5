"use strict";
// Where the time of a step goes: regions as rows, tiers as columns, one scale; and why a tier takes the time that it takes.

function regionsOf(tiers) {
  return Object.keys(REGIONS).filter((region) => tiers.some((tier) => tier.regions.some((cost) => cost.region === region)));
}

function total(tier) {
  return sum(tier.regions.map((cost) => cost.ms ?? 0));
}

function Waterfall({ report, tier, region, choose }) {
  const tiers = report.tiers;
  const regions = regionsOf(tiers);
  const measured = tiers.some((item) => item.measured);
  const longest = Math.max(...tiers.map((item) => (measured ? total(item) : item.nbytes)), 1e-9);
  const value = (cost) => (measured ? cost.ms ?? 0 : cost.nbytes);
  const starts = tiers.map((item) => {
    let at = 0;
    return Object.fromEntries(regions.map((name) => {
      const cost = item.regions.find((other) => other.region === name);
      const place = [cost, at];
      at += cost ? value(cost) : 0;
      return [name, place];
    }));
  });
  const width = (amount) => `${(100 * amount) / longest}%`;
  const shown = (cost) => (measured ? ms(cost.ms) : bytes(cost.nbytes));
  const columns = `minmax(8.5rem, max-content) repeat(${tiers.length}, minmax(9.5rem, 1fr))`;
  return html`<div class="waterfall" style=${{ gridTemplateColumns: columns }} role="group"
      aria-label=${measured ? "Time of a step by region and tier" : "Bytes that a step reads, by region and tier"}>
    <div class="head corner">${measured ? "ms of one step" : "bytes of one step"}</div>
    ${tiers.map((item) => html`<button class="head" aria-pressed=${item === tier} onClick=${() => choose({ tier: item.name, region: null })}>
      <strong>${item.name}</strong> ${measured ? ms(item.measured?.step_ms) : bytes(item.nbytes)}
      <div class="muted">${item.cost === null ? `${item.rows} x ${item.width} tokens` : item.draft_len === 0 ? "plain decoding" : `${times(item.cost)} of K=0`}</div>
    </button>`)}
    ${regions.map((name) => html`
      <div class="row" title=${REGIONS[name][1]}><${Swatch} region=${name} />${regionName(name)}</div>
      ${tiers.map((item, column) => {
        const [cost, start] = starts[column][name];
        if (!cost) return html`<div class="cell"></div>`;
        const end = start + value(cost);
        const label = end < 0.72 * longest ? { left: `calc(${width(end)} + 0.3rem)` } : { right: `calc(100% - ${width(start)} + 0.3rem)` };
        const need = measured && cost.floor_ms > 0.004 * longest ? html`<span class="need" style=${{ left: width(start), width: width(cost.floor_ms) }}></span>` : null;
        const chosen = item === tier && name === region;
        return html`<button class=${`cell ${chosen ? "selected" : ""}`} aria-label=${`${item.name}, ${regionName(name)}: ${shown(cost)}`}
            onClick=${() => choose({ tier: item.name, region: name })}>
          <span class="piece" style=${{ left: width(start), width: width(value(cost)), background: color(name) }}></span>
          ${need}<span class="label" style=${label}>${shown(cost)}</span>
        </button>`;
      })}`)}
  </div>
  ${measured ? html`<div class="legend"><span><span class="need-key"></span>the time that memory needs for the bytes of a region</span>
    ${report.machine.bandwidth ? html`<span>memory: ${(report.machine.bandwidth / 1e9).toFixed(1)} GB/s</span>` : null}
    <span>measured with ${tier.measured.context} tokens a row; the fastest of ${tier.measured.runs} runs</span></div>` : null}`;
}

function Why({ report, tier, region, choose }) {
  const plain = report.tiers.find((item) => item.draft_len === 0);
  const before = Object.fromEntries((plain?.regions ?? []).map((cost) => [cost.region, cost.ms]));
  const rows = tier.regions.filter((cost) => cost.ms !== null || cost.nbytes);
  const step = tier.measured?.step_ms;
  const against = tier.draft_len !== 0 && plain;
  const columns = [
    { name: "region", of: (cost) => regionName(cost.region), show: (cost) => html`<button title=${REGIONS[cost.region][1]}
        onClick=${() => choose({ region: cost.region })}><${Swatch} region=${cost.region} />${regionName(cost.region)}</button>` },
    { name: "time", number: true, of: (cost) => cost.ms, show: (cost) => ms(cost.ms) },
    { name: "share", number: true, of: (cost) => cost.ms, show: (cost) => (step && cost.region !== "host" ? percent(cost.ms / step) : "–") },
    ...(against ? [{ name: "against K=0", number: true, of: (cost) => cost.ms - (before[cost.region] ?? 0),
      show: (cost) => (cost.ms === null ? "–" : `${cost.ms - (before[cost.region] ?? 0) >= 0 ? "+" : "−"}${ms(Math.abs(cost.ms - (before[cost.region] ?? 0)))}`) }] : []),
    { name: "reads", number: true, of: (cost) => cost.nbytes, show: (cost) => (cost.nbytes ? bytes(cost.nbytes) : "–") },
    { name: "memory needs", number: true, of: (cost) => cost.floor_ms, show: (cost) => (cost.floor_ms >= 0.001 ? ms(cost.floor_ms) : "–") },
  ];
  return html`<div class="columns why">
    <div class="card" id="why">
      <h3>Why ${tier.name} takes this time</h3>
      ${tier.explanation.map((sentence) => html`<p>${sentence}</p>`)}
      ${tier.measured ? html`<p class="muted">${tier.measured.how}</p>` : null}
      <${Sortable} caption="Regions of a step" columns=${columns} rows=${rows} selected=${(cost) => cost.region === region} />
    </div>
    <div class="card"><${RegionCalls} tier=${tier} region=${region} choose=${choose} /></div>
  </div>`;
}

// The calls of one region, the longest first.
function RegionCalls({ tier, region, choose }) {
  const step = tier.program.nodes.filter((node) => node.until === null);
  const inside = tier.bodies.flatMap((body) => body.nodes.map((node) => ({ ...node, where: body.name })));
  const all = [...step.map((node) => ({ ...node, where: "step" })), ...inside];
  const calls = all.filter((node) => (region ? node.region === region : !node.body) && (node.ms || node.nbytes > 1024 || (region && !tier.measured)));
  const list = [...calls].sort((a, b) => (b.ms ?? 0) - (a.ms ?? 0) || b.nbytes - a.nbytes).slice(0, 14);
  const empty = {
    host: "The engine in Python, between two steps: results are read, tokens delivered, the policy asked.",
    other: "Python between the calls of a step.",
    elementwise: "Inductor's kernels inside of a layer. They are measured together: see Kernels.",
  };
  return html`<h3>${region ? html`<${Swatch} region=${region} />${regionName(region)}: its calls` : "The longest calls of a step"}</h3>
    ${region ? html`<p class="muted">${REGIONS[region][1]}.</p>` : html`<p class="muted">Choose a region for its calls alone.</p>`}
    ${list.length ? html`<div class="scroll"><table>
      <thead><tr><th>call</th><th>where</th><th class="number">time</th><th class="number">reads</th></tr></thead>
      <tbody>${list.map((node) => html`<tr><td><button class="mono" onClick=${() => choose({ node: node.name, body: node.where === "step" ? null : node.where, section: "step" })}>${shortOp(node.op)}</button></td>
        <td class="muted">${node.where}</td><td class="number">${ms(node.ms)}</td><td class="number">${node.nbytes ? bytes(node.nbytes) : "–"}</td></tr>`)}</tbody>
    </table></div>${calls.length > list.length ? html`<p class="muted">and ${calls.length - list.length} shorter ones</p>` : null}` : html`<p>${empty[region] ?? "No call of it was measured."}</p>`}`;
}
