"use strict";
// Numbers and names as the page shows them.
const { h, html, render, useState, useEffect, useMemo, useRef } = htmPreact;

const REGIONS = {
  draft: ["draft", "The drafter, before the target"],
  inputs: ["inputs", "Which rows, tokens and positions the target reads"],
  embedding: ["embedding", "Token embeddings and rotary tables"],
  qkv: ["qkv", "Norm, query, key and value projections, rotary embedding, KV writes"],
  attention: ["attention", "Attention over the KV cache, or a recurrence"],
  projection: ["attention output", "The first linear after attention"],
  mlp: ["MLP", "The rest of a layer"],
  elementwise: ["elementwise", "What a compiled layer does between its linears and attention"],
  layers: ["layers", "Decoder layers as a whole"],
  lm_head: ["lm_head", "Final norm and logits"],
  choose: ["choose", "Sampling and acceptance"],
  commit: ["commit", "Writes accepted tokens and lengths"],
  propose: ["propose", "Drafts for the next step, and the drafter's own state"],
  other: ["other", "Between the calls of a step"],
  host: ["host", "Between two steps: the engine, in Python"],
};
const KINDS = {
  triton: "ours, Triton", "c++": "ours, C++", plain: "ours, of torch's ops", inductor: "written by Inductor",
  stock: "torch's own", body: "body",
};

const regionName = (region) => REGIONS[region][0];
const color = (region) => `var(--${region})`;

function ms(value, digits) {
  if (value === null || value === undefined) return "–";
  const places = digits ?? (value >= 100 ? 0 : value >= 10 ? 1 : value >= 0.1 ? 2 : 3);
  return `${value.toFixed(places)} ms`;
}

function bytes(value) {
  const sign = value < 0 ? "-" : "";
  let size = Math.abs(value);
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${sign}${unit === "B" ? size : size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
    size /= 1024;
  }
  return `${sign}${size.toFixed(2)} GiB`;
}

const times = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(2)}x`);
const percent = (value) => `${(100 * value).toFixed(0)}%`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// A call's op without the namespace of torch's own ops.
const shortOp = (op) => op.replace(/^aten\./, "").replace(/^speccompile\./, "");

function Swatch({ region }) {
  return html`<span class="swatch" style=${{ background: color(region) }} aria-hidden="true"></span>`;
}

function Section({ id, title, lead, children }) {
  return html`<section id=${id} aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}>${title}</h2>
    ${lead ? html`<p class="lead">${lead}</p>` : null}
    ${children}
  </section>`;
}

// A table whose columns can be sorted. Columns: {name, of (a value to sort by), show, number}.
function Sortable({ columns, rows, caption, initial = null, selected = () => false }) {
  const [order, setOrder] = useState(initial);
  const sorted = useMemo(() => {
    if (order === null) return rows;
    const value = columns[order.column].of;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return order.direction * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
    };
    return [...rows].sort(compare);
  }, [rows, order]);
  const sort = (column) => {
    const first = columns[column].number ? -1 : 1;
    setOrder(order?.column === column ? { column, direction: -order.direction } : { column, direction: first });
  };
  const state = (column) => (order?.column !== column ? "none" : order.direction > 0 ? "ascending" : "descending");
  return html`<div class="scroll"><table>
    <caption class="visually-hidden">${caption}</caption>
    <thead><tr>${columns.map((column, index) => html`<th class=${column.number ? "number" : ""} aria-sort=${state(index)}>
      <button onClick=${() => sort(index)}>${column.name}${{ none: "", ascending: " ▴", descending: " ▾" }[state(index)]}</button>
    </th>`)}</tr></thead>
    <tbody>${sorted.map((row) => html`<tr class=${selected(row) ? "selected" : ""}>${columns.map((column) =>
      html`<td class=${column.number ? "number" : ""}>${(column.show ?? column.of)(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
