"use strict";
// Line charts with a legend. Series: {name, points: [{x, y, title}]}; a series keeps its colour in all charts.

const COLORS = ["qkv", "attention", "mlp", "lm_head", "draft", "embedding", "choose", "commit", "propose", "host"];
const seriesColor = (index) => color(COLORS[index % COLORS.length]);

function LineChart({ title, series, labels, most, format, diagonal = false }) {
  const [left, top, width, height] = [44, 12, 500, 190];
  const x = (value) => left + (width * value) / Math.max(1, labels.length - 1);
  const y = (value) => top + height - (height * Math.min(value, most)) / most;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => share * most);
  const shown = labels.length > 12 ? Math.ceil(labels.length / 12) : 1;
  return html`<svg class="chart" viewBox=${`0 0 ${left + width + 24} ${top + height + 26}`} role="img" aria-label=${title}>
    ${ticks.map((tick) => html`<g><line class="axis" x1=${left} x2=${left + width} y1=${y(tick)} y2=${y(tick)}></line>
      <text class="muted" x=${left - 6} y=${y(tick) + 4} text-anchor="end">${format(tick)}</text></g>`)}
    ${labels.map((label, index) => (index % shown ? null : html`<text class="muted" x=${x(index)} y=${top + height + 18} text-anchor="middle">${label}</text>`))}
    ${diagonal ? html`<line class="axis" x1=${x(0)} y1=${y(0)} x2=${x(labels.length - 1)} y2=${y(most)} stroke-dasharray="4 4" style=${{ stroke: "var(--muted)" }}></line>` : null}
    ${series.map(({ index, points }) => html`<g>
      <polyline fill="none" stroke-width="2" style=${{ stroke: seriesColor(index) }} points=${points.map((point) => `${x(point.x)},${y(point.y)}`).join(" ")}></polyline>
      ${points.map((point) => html`<circle cx=${x(point.x)} cy=${y(point.y)} r="4" style=${{ fill: seriesColor(index) }}><title>${point.title}</title></circle>`)}
    </g>`)}
  </svg>`;
}

// Values with their 95% intervals, one row each, on one scale.
function Intervals({ title, rows, base, format }) {
  const [left, width, tall] = [230, 380, 26];
  const ends = rows.flatMap((row) => [row.low ?? row.value, row.high ?? row.value]);
  const most = 1.05 * Math.max(base ?? 0, ...ends, 1e-9);
  const x = (value) => left + (width * value) / most;
  return html`<svg class="chart" viewBox=${`0 0 ${left + width + 70} ${rows.length * tall + 8}`} role="img" aria-label=${title}>
    ${base === null ? null : html`<line class="axis" x1=${x(base)} x2=${x(base)} y1="0" y2=${rows.length * tall + 8}></line>`}
    ${rows.map((row, at) => {
      const middle = at * tall + tall / 2 + 4;
      return html`<g><title>${row.name}: ${format(row.value)}${row.low === null ? "" : `, 95% interval ${format(row.low)} to ${format(row.high)}`}</title>
        <text x=${left - 8} y=${middle + 4} text-anchor="end">${row.name.length > 28 ? `${row.name.slice(0, 27)}…` : row.name}</text>
        <rect x=${left} y=${middle - 7} width=${Math.max(1, x(row.value) - left)} height="14" rx="2" style=${{ fill: seriesColor(row.index), fillOpacity: 0.85 }}></rect>
        ${row.low === null ? null : html`<path d=${`M${x(row.low)} ${middle - 5}v10M${x(row.low)} ${middle}H${x(row.high)}M${x(row.high)} ${middle - 5}v10`} fill="none" stroke-width="1.5" style=${{ stroke: "var(--text)" }}></path>`}
        <text x=${x(Math.max(row.high ?? 0, row.value)) + 6} y=${middle + 4}>${format(row.value)}</text></g>`;
    })}
  </svg>`;
}

function Legend({ items }) {
  return html`<div class="legend">${items.map(({ name, index }) => html`<span><span class="swatch" style=${{ background: seriesColor(index) }}></span>${name}</span>`)}</div>`;
}
