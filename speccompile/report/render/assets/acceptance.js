"use strict";
// What drafts are worth: acceptance by position, a recorded trace, and the shape of a tree.

function Bars({ values, offered, title, fill }) {
  const [width, height, base] = [560, 190, 160];
  const step = Math.min(90, (width - 40) / Math.max(1, values.length));
  return html`<svg class="chart" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${title}>
    ${[0, 0.5, 1].map((tick) => html`<g><line class="axis" x1="34" x2=${width} y1=${base - 140 * tick} y2=${base - 140 * tick}></line>
      <text class="muted" x="0" y=${base - 140 * tick + 4}>${percent(tick)}</text></g>`)}
    ${values.map((value, index) => html`<g><title>position ${index + 1}: ${percent(value)}${offered ? ` of ${offered[index]}` : ""}</title>
      <rect x=${40 + index * step} y=${base - 140 * value} width=${step - 8} height=${Math.max(1, 140 * value)} rx="2" style=${{ fill }}></rect>
      <text x=${40 + index * step + (step - 8) / 2} y=${base - 140 * value - 5} text-anchor="middle">${value ? percent(value) : ""}</text>
      <text class="muted" x=${40 + index * step + (step - 8) / 2} y=${base + 16} text-anchor="middle">${index + 1}</text></g>`)}
  </svg>`;
}

function Acceptance({ report, tier }) {
  const { acceptance } = report;
  const drafted = tier.decoded && tier.draft_len > 0 && tier.decoded.per_position.length;
  if (!acceptance && !drafted) return null;
  const offered = acceptance ? acceptance.proposed_at.filter((proposed) => proposed) : [];
  const share = offered.map((proposed, index) => acceptance.accepted_at[index] / proposed);
  return html`<${Section} id="acceptance" title="Acceptance by position"
      lead="The share of the drafts offered at each position that were accepted. A step accepts a position only if all before it were accepted.">
    <div class="columns">
      ${drafted ? html`<div class="card"><h3>${tier.name}, ${count(tier.decoded.prompts, "prompt")}, ${count(tier.decoded.tokens, "token")}: acceptance length ${tier.decoded.acceptance_length.toFixed(2)}</h3>
        <${Bars} values=${tier.decoded.per_position} title=${`Acceptance by position at ${tier.name}`} fill=${color("draft")} /></div>` : null}
      ${acceptance ? html`<div class="card"><h3>All requests so far, ${count(acceptance.steps, "step")}: acceptance length ${acceptance.acceptance_length.toFixed(2)}</h3>
        <${Bars} values=${share} offered=${offered} title="Acceptance by position of all requests" fill=${color("qkv")} />
        <p class="muted">Steps by tier: ${Object.entries(acceptance.tier_steps).map(([name, steps]) => `${name}: ${steps}`).join(", ")}</p></div>` : null}
    </div>
  </${Section}>`;
}

// A recorded trace: a lane for each request, a bar for each of its steps, as high as the tokens that it emitted.
function Trace({ report }) {
  const { trace } = report;
  const [hovered, setHovered] = useState(null);
  const laid = useMemo(() => {
    if (!trace) return null;
    const lanes = new Map();
    let at = 0;
    const timed = trace.steps.every((step) => step.ms !== null);
    for (const [index, step] of trace.steps.entries()) {
      const length = timed ? step.ms : 1;
      step.requests.forEach((request, row) => {
        if (!lanes.has(request)) lanes.set(request, []);
        lanes.get(request).push({ index, at, length, draft_len: step.draft_len, ms: step.ms, proposed: step.proposed[row], accepted: step.accepted[row], emitted: step.emitted[row] });
      });
      at += length;
    }
    return { lanes: [...lanes], end: at, timed };
  }, [trace]);
  if (!trace) return null;
  const most = Math.max(...trace.draft_lens) + 1;
  const [left, width, tall] = [90, 1110, 64];
  const x = (value) => left + (width * value) / laid.end;
  const shade = (draft_len) => 0.25 + (0.75 * draft_len) / Math.max(1, most - 1);
  const shown = laid.lanes.slice(0, 24);
  const emitted = sum(trace.steps.map((step) => sum(step.emitted)));
  const rows = sum(trace.steps.map((step) => step.requests.length));
  return html`<${Section} id="trace" title="A recorded trace"
      lead=${`${count(trace.steps.length, "step")} of ${count(laid.lanes.length, "request")}: ${count(emitted, "token")}, acceptance length ${(emitted / rows).toFixed(2)}. A bar is a step; its height is the tokens that it emitted, its shade the draft length${laid.timed ? ", its width the time that it took" : ""}. A red foot marks rejected drafts.`}>
    <div class="scroll"><svg class="chart" style=${{ minWidth: "44rem" }} viewBox=${`0 0 ${left + width} ${shown.length * tall + 24}`} role="img" aria-label="Steps of each request over time">
      ${shown.map(([request, steps], lane) => {
        const base = lane * tall + tall - 10;
        const tokens = sum(steps.map((step) => step.emitted));
        return html`<g><text x="0" y=${base - 24}>request ${lane + 1}</text><text class="muted" x="0" y=${base - 9}>${tokens} tokens</text>
          <line class="axis" x1=${left} x2=${left + width} y1=${base} y2=${base}></line>
          ${steps.map((step) => {
            const high = ((tall - 18) * step.emitted) / most;
            const wide = Math.max(0.8, x(step.at + step.length) - x(step.at) - 0.6);
            return html`<g onMouseEnter=${() => setHovered({ ...step, lane })}><title>step ${step.index + 1}: K=${step.draft_len}, ${step.proposed} drafts, ${step.accepted} accepted, ${step.emitted} emitted${step.ms === null ? "" : `, ${ms(step.ms)}`}</title>
              <rect x=${x(step.at)} y=${base - high} width=${wide} height=${high} style=${{ fill: color("qkv"), fillOpacity: shade(step.draft_len) }}></rect>
              ${step.proposed > step.accepted ? html`<rect x=${x(step.at)} y=${base + 1} width=${wide} height=${(6 * (step.proposed - step.accepted)) / (most - 1)} style=${{ fill: "var(--bad)" }}></rect>` : null}</g>`;
          })}</g>`;
      })}
      <text class="muted" x=${left} y=${shown.length * tall + 16}>0</text>
      <text class="muted" x=${left + width} y=${shown.length * tall + 16} text-anchor="end">${laid.timed ? `${(laid.end / 1000).toFixed(2)} s in steps` : count(laid.end, "step")}</text>
    </svg></div>
    <div class="legend">${trace.draft_lens.map((draft_len) => html`<span><span class="swatch" style=${{ background: color("qkv"), opacity: shade(draft_len) }}></span>K=${draft_len}: ${count(trace.steps.filter((step) => step.draft_len === draft_len).length, "step")}</span>`)}
      ${laid.lanes.length > shown.length ? html`<span>${laid.lanes.length - shown.length} further requests are not drawn</span>` : null}</div>
    <p class="muted" aria-hidden="true">${hovered ? `Request ${hovered.lane + 1}, step ${hovered.index + 1}: K=${hovered.draft_len}, ${hovered.accepted} of ${hovered.proposed} drafts accepted, ${hovered.emitted} emitted${hovered.ms === null ? "" : `, ${ms(hovered.ms)}`}` : "Point at a bar for its numbers."}</p>
  </${Section}>`;
}

function Trees({ tier }) {
  const { tree } = tier;
  if (!tree) return null;
  let drawing = html`<pre class="tree">${tree.drawing}</pre>`;
  if (tree.parents) {
    const children = new Map();
    tree.parents.forEach((parent, index) => children.set(parent, [...(children.get(parent) ?? []), index + 1]));
    const root = d3.tree().nodeSize([34, 58])(d3.hierarchy(0, (node) => children.get(node)));
    const [low, high] = [Math.min(...root.descendants().map((node) => node.x)), Math.max(...root.descendants().map((node) => node.x))];
    const width = Math.max(320, high - low + 60);
    drawing = html`<div class="scroll"><svg class="chart" style=${{ maxWidth: `${width}px` }} viewBox=${`${low - (width - (high - low)) / 2} -24 ${width} ${58 * root.height + 50}`} role="img" aria-label=${`A tree of ${tree.nodes} draft tokens`}>
      ${root.links().map((link) => html`<line class="axis" style=${{ stroke: "var(--muted)" }} x1=${link.source.x} y1=${link.source.y} x2=${link.target.x} y2=${link.target.y}></line>`)}
      ${root.descendants().map((node) => html`<g><title>node ${node.data}${node.data ? `, child of ${tree.parents[node.data - 1]}` : ", the newest committed token"}</title>
        <circle cx=${node.x} cy=${node.y} r="14" style=${{ fill: node.data ? "var(--draft)" : "var(--qkv)" }}></circle>
        <text x=${node.x} y=${node.y + 4} text-anchor="middle" style=${{ fill: "#fff" }}>${node.data}</text></g>`)}
    </svg></div>`;
  }
  return html`<${Section} id="tree" title="The tree of drafts" lead=${`${tree.nodes} draft tokens, ${tree.depth} deep, at most ${tree.branches} after one token. Node 0 is the newest committed token.`}>
    <div class="card">${drawing}</div>
  </${Section}>`;
}
