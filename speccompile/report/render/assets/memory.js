"use strict";
// Memory as a treemap, and what other options would save. Build times as a flame.

const MEMORY_COLORS = { model: "--qkv", "packed copies": "--mlp", drafter: "--draft", constants: "--other", arena: "--attention" };

function treeOf(items) {
  const root = { name: "all", children: [] };
  for (const item of items) {
    let place = root;
    for (const name of item.path) {
      let child = place.children.find((other) => other.name === name);
      if (!child) place.children.push((child = { name, children: [], top: item.path[0] }));
      place = child;
    }
    place.nbytes = item.nbytes;
    place.count = item.count;
  }
  return root;
}

function Treemap({ memory }) {
  const [hovered, setHovered] = useState(null);
  const [width, height] = [1200, 380];
  const root = useMemo(() => {
    const tree = d3.hierarchy(treeOf(memory.items), (node) => (node.children.length ? node.children : null))
      .sum((node) => node.nbytes ?? 0).sort((a, b) => b.value - a.value);
    return d3.treemap().size([width, height]).paddingTop((node) => (node.depth === 1 ? 18 : 0)).paddingInner(1).round(true)(tree);
  }, [memory]);
  const name = (leaf) => leaf.ancestors().reverse().slice(1).map((node) => node.data.name).join(" / ");
  const label = (leaf) => `${name(leaf)}${leaf.data.count > 1 ? ` (${leaf.data.count} tensors)` : ""}: ${bytes(leaf.value)}`;
  return html`<svg class="chart" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label="Memory by what holds it">
      ${root.children?.map((node) => html`<g>
        <text x=${node.x0 + 3} y=${node.y0 + 13}>${node.x1 - node.x0 > 60 ? `${node.data.name}, ${bytes(node.value)}` : ""}</text></g>`)}
      ${root.leaves().filter((leaf) => leaf.x1 > leaf.x0 && leaf.y1 > leaf.y0).map((leaf) => {
        const [w, tall] = [leaf.x1 - leaf.x0, leaf.y1 - leaf.y0];
        const depth = leaf.parent.children.indexOf(leaf);
        return html`<g class="tile" onMouseEnter=${() => setHovered(leaf)}>
          <title>${label(leaf)}</title>
          <rect x=${leaf.x0} y=${leaf.y0} width=${w} height=${tall} style=${{ fill: `var(${MEMORY_COLORS[leaf.data.top] ?? "--other"})`, fillOpacity: Math.max(0.82, 1 - 0.03 * depth) }}></rect>
          ${w > 70 && tall > 32 ? html`<text x=${leaf.x0 + 5} y=${leaf.y0 + 15}>${leaf.data.name.slice(0, w / 7)}</text><text x=${leaf.x0 + 5} y=${leaf.y0 + 29}>${bytes(leaf.value)}</text>` : null}
        </g>`;
      })}
    </svg>
    <p class="muted" aria-hidden="true">${hovered ? label(hovered) : "Point at a tile for its name."}</p>`;
}

function Memory({ report }) {
  const { memory } = report;
  const total = sum(memory.items.map((item) => item.nbytes));
  const [places, setPlaces] = useState(memory.max_len);
  const cache = (length) => memory.kv_bytes_per_token * memory.slots * length;
  return html`<${Section} id="memory" title="Memory" lead=${`${bytes(total)} in all, each tensor once. All tiers share it: a tier adds nothing.`}>
    <${Treemap} memory=${memory} />
    <div class="columns">
      <div class="card"><h3>What other options would save</h3>
        <table><thead><tr><th>option</th><th class="number">saves</th><th>how</th></tr></thead><tbody>
        ${memory.savings.map((saving) => html`<tr><td class="mono">${saving.option}</td><td class="number">${bytes(saving.nbytes)}</td><td>${saving.reason}</td></tr>`)}
        ${memory.savings.length ? null : html`<tr><td colspan="3">Nothing more to save.</td></tr>`}
      </tbody></table></div>
      ${memory.pages ? html`<div class="card"><h3>The pool of KV</h3>
        <p>${memory.pages.toLocaleString("en")} pages of ${memory.page_tokens} tokens, ${bytes(memory.pages * memory.page_tokens * memory.kv_bytes_per_token)}. A request holds pages for its tokens, and shares the whole pages of a beginning that is known.</p>
        <p class="muted">${bytes(memory.kv_bytes_per_token)} a token. A sequence has at most ${memory.max_len.toLocaleString("en")} tokens.</p>
      </div>` : html`<div class="card"><h3>The cache by max_len</h3>
        <div class="slider"><label for="places">max_len</label>
          <input id="places" type="range" min="64" max=${Math.max(4096, 2 * memory.max_len)} step="64" value=${places} onInput=${(event) => setPlaces(Number(event.target.value))} />
          <output for="places" class="number">${places.toLocaleString("en")} tokens: ${bytes(cache(places))}</output></div>
        <p class="muted">${bytes(memory.kv_bytes_per_token)} a token and slot, ${memory.slots} slots (one of them is for padding rows). Now: ${memory.max_len.toLocaleString("en")} tokens, ${bytes(cache(memory.max_len))}.</p>
      </div>`}
    </div>
    <details><summary>As a table</summary>
      <${Sortable} caption="Memory" rows=${memory.items} columns=${[
        { name: "what", of: (item) => item.path.join(" / ") },
        { name: "tensors", number: true, of: (item) => item.count },
        { name: "bytes", number: true, of: (item) => item.nbytes, show: (item) => bytes(item.nbytes) },
      ]} initial=${{ column: 2, direction: -1 }} />
    </details>
  </${Section}>`;
}

function Build({ report }) {
  const [width, row] = [1200, 30];
  const root = useMemo(() => {
    if (!report.build) return null;
    // A part's own time is what its parts leave.
    const tree = d3.hierarchy(report.build, (span) => (span.parts.length ? span.parts : null));
    tree.eachAfter((node) => { node.value = Math.max(node.data.seconds, sum((node.children ?? []).map((child) => child.value))); });
    return d3.partition().size([width, row * (tree.height + 1)])(tree);
  }, [report]);
  const shades = ["--inputs", "--qkv", "--embedding"];
  const explanation = Object.entries(report.subject.explanation);
  return html`<${Section} id="build" title="Build" lead="What wrap did, in seconds, and what it chose and why.">
    ${root ? html`<svg class="chart" viewBox=${`0 0 ${width} ${row * (root.height + 1)}`} role="img" aria-label="Build times">
      ${root.descendants().map((node) => html`<g class="tile"><title>${node.data.name}: ${node.data.seconds.toFixed(2)} s</title>
        <rect x=${node.x0} y=${node.y0} width=${Math.max(0.5, node.x1 - node.x0)} height=${row - 2} style=${{ fill: `var(${shades[node.depth] ?? "--other"})` }}></rect>
        ${node.x1 - node.x0 > 7 * node.data.name.length + 55 ? html`<text x=${node.x0 + 5} y=${node.y0 + 18}>${node.data.name} ${node.data.seconds.toFixed(1)} s</text>` : node.x1 - node.x0 > 48 ? html`<text x=${node.x0 + 5} y=${node.y0 + 18}>${node.data.name.slice(0, (node.x1 - node.x0) / 8)}</text>` : null}
      </g>`)}
    </svg>` : null}
    ${explanation.length ? html`<div class="card" style=${{ marginTop: "0.8rem" }}><dl class="facts-list">${explanation.map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl></div>` : null}
    <details style=${{ marginTop: "0.8rem" }}><summary>All executables</summary>
      <${Sortable} caption="Executables" rows=${report.executables} columns=${[
        { name: "executable", of: (item) => item.name },
        { name: "rows x width", of: (item) => item.rows * item.width, show: (item) => `${item.rows} x ${item.width}` },
        { name: "ops", number: true, of: (item) => item.ops },
        { name: "bodies", of: (item) => Object.entries(item.bodies).map(([body, calls]) => `${calls} x ${body}`).join(", ") },
      ]} />
    </details>
  </${Section}>`;
}
