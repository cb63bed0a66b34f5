"use strict";
// A graph of calls, laid out by dagre. Regions and layers are folded until they are opened.

const BOX = { height: 38, least: 96, most: 250 };

// The calls of a program as one of its stages has them, in running order; those that the stage removed are marked.
function callsAt(program, stage) {
  return program.nodes
    .filter((node) => node.since <= stage && (node.until === null || node.until >= stage))
    .map((node) => ({ ...node, gone: node.until === stage, added: node.since === stage && stage >= 0 }))
    .filter(computes)
    .sort((a, b) => a.place - b.place);
}

// Arithmetic on sizes computes no tensor, and is not drawn.
const computes = (node) => node.value || node.writes.length || node.body;

// What is drawn of the calls: boxes (calls, or folded groups), clusters (opened groups) and edges.
function fold(calls, open) {
  const boxes = new Map();
  const clusters = new Map();
  const box = new Map();
  for (const call of calls) {
    const region = `region:${call.region}`;
    const layer = call.layer !== null && !call.body ? `layer:${call.region}:${call.layer}` : null;
    const path = [region, ...(layer ? [layer] : [])];
    const closed = path.find((group) => !open.has(group));
    const id = closed ?? `call:${call.name}`;
    box.set(call.name, id);
    if (!boxes.has(id)) {
      const opened = closed ? path.slice(0, path.indexOf(closed)) : path;
      opened.forEach((group, depth) => clusters.set(group, { id: group, parent: opened[depth - 1], region: call.region, layer: call.layer }));
      boxes.set(id, { id, calls: [], parent: opened.at(-1), group: closed, region: call.region });
    }
    boxes.get(id).calls.push(call);
  }
  const edges = new Map();
  const connect = (from, to, memory) => {
    if (from === undefined || to === undefined || from === to) return;
    const key = `${from}>${to}`;
    if (!edges.has(key) || !memory) edges.set(key, { from, to, memory });
  };
  const writers = new Map();
  for (const call of calls) {
    for (const name of call.inputs) connect(box.get(name), box.get(call.name), false);
    if (call.gone) continue;
    for (const name of call.reads) connect(box.get(writers.get(name)), box.get(call.name), true);
    for (const name of call.writes) writers.set(name, call.name);
  }
  return { boxes: [...boxes.values()], clusters: [...clusters.values()], edges: [...edges.values()] };
}

function textOf(box) {
  const { calls } = box;
  const timed = sum(calls.map((call) => call.ms ?? 0));
  if (!box.group) {
    const call = calls[0];
    return [call.body ? `${call.body}${call.layer === null ? "" : ` ${call.layer}`}` : shortOp(call.op), [call.value || call.writes.join(", "), call.ms >= 0.05 ? ms(call.ms) : ""].filter(Boolean).join(" · ")];
  }
  const bodies = calls.filter((call) => call.body);
  const layers = new Set(calls.map((call) => call.layer)).size;
  const what = bodies.length ? `${bodies.length} x ${[...new Set(bodies.map((call) => call.body))].join(", ")}` : layers > 1 ? `${layers} layers, ${calls.length} calls` : count(calls.length, "call");
  const title = box.group.startsWith("layer:") ? `layer ${calls[0].layer}` : regionName(box.region);
  return [title, timed ? `${what} · ${ms(timed)}` : what];
}

function layOut(folded) {
  const graph = new dagre.graphlib.Graph({ compound: true });
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 30, marginx: 16, marginy: 16 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const cluster of folded.clusters) graph.setNode(cluster.id, {});
  for (const box of folded.boxes) {
    const text = textOf(box);
    const marked = box.group && box.calls.some((call) => call.added || call.gone) ? 40 : 0;
    const longest = Math.max(...text.map((line, index) => line.length * (index ? 6.1 : 7.2))) + (box.group ? 22 : 0) + marked;
    graph.setNode(box.id, { marked, width: Math.min(BOX.most, Math.max(BOX.least, longest + 26)), height: BOX.height });
  }
  for (const item of [...folded.clusters, ...folded.boxes]) if (item.parent) graph.setParent(item.id, item.parent);
  for (const edge of folded.edges) graph.setEdge(edge.from, edge.to, {});
  dagre.layout(graph);
  return graph;
}

function pathOf(points) {
  const [first, ...rest] = points;
  const middle = rest.slice(0, -1).map((point, index) => {
    const next = rest[index + 1];
    return `Q${point.x},${point.y} ${(point.x + next.x) / 2},${(point.y + next.y) / 2}`;
  });
  const last = rest.at(-1);
  return `M${first.x},${first.y}${middle.join("")}L${last.x},${last.y}`;
}

function Graph({ calls, open, setOpen, selected, onCall, label }) {
  const [zoom, setZoom] = useState(1);
  const frame = useRef();
  const folded = useMemo(() => fold(calls, open), [calls, open]);
  const graph = useMemo(() => layOut(folded), [folded]);
  const { width, height } = graph.graph();
  // What a pass changed, or what was chosen, is brought into view.
  useEffect(() => {
    const box = frame.current.querySelector(".box.selected, .box.added, .box.gone");
    if (!box) return;
    const [inner, outer] = [box.getBoundingClientRect(), frame.current.getBoundingClientRect()];
    frame.current.scrollTo({ left: frame.current.scrollLeft + inner.left - outer.left - outer.width / 3, top: frame.current.scrollTop + inner.top - outer.top - outer.height / 3 });
  }, [graph]);
  const toggle = (group) => {
    const next = new Set(open);
    if (!next.delete(group)) next.add(group);
    setOpen(next);
  };
  const act = (box) => (box.group ? toggle(box.group) : onCall(box.calls[0]));
  // Arrow keys move along edges and, sideways, to the nearest box.
  const move = (event, box) => {
    const at = graph.node(box.id);
    const others = folded.boxes.filter((item) => item !== box).map((item) => ({ item, place: graph.node(item.id) }));
    const next = {
      ArrowDown: () => graph.successors(box.id)?.[0],
      ArrowUp: () => graph.predecessors(box.id)?.[0],
      ArrowRight: () => others.filter((other) => other.place.x > at.x && Math.abs(other.place.y - at.y) < 60).sort((a, b) => a.place.x - b.place.x)[0]?.item.id,
      ArrowLeft: () => others.filter((other) => other.place.x < at.x && Math.abs(other.place.y - at.y) < 60).sort((a, b) => b.place.x - a.place.x)[0]?.item.id,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") act(box);
    else if (next) frame.current.querySelector(`[data-box="${CSS.escape(next() ?? box.id)}"]`)?.focus();
    else return;
    event.preventDefault();
  };
  const fit = () => setZoom(Math.max(0.25, Math.min(1.5, (frame.current.clientWidth - 4) / width)));
  const groups = [...new Set(calls.map((call) => `region:${call.region}`))];
  return html`<div class="tools bar" role="group" aria-label="The graph">
      <button onClick=${() => setOpen(new Set())}>Fold all</button>
      <button onClick=${() => setOpen(new Set(groups.filter((group) => calls.filter((call) => `region:${call.region}` === group).length < 200)))}>Open regions</button>
      <button onClick=${() => setZoom(zoom / 1.25)} aria-label="Smaller">−</button>
      <button onClick=${() => setZoom(zoom * 1.25)} aria-label="Larger">+</button>
      <button onClick=${fit}>Fit width</button>
      <span class="muted">${label}</span>
    </div>
    <div class="graph" ref=${frame}>
    <svg width=${width * zoom} height=${height * zoom} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="Calls of a step, and what they read of one another" style=${{ margin: width * zoom < 700 ? "0 auto" : 0 }}>
      <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="arrow" d="M0,0L8,4L0,8z"></path></marker></defs>
      ${folded.clusters.map((cluster) => {
        const place = graph.node(cluster.id);
        const name = cluster.id.startsWith("layer:") ? `layer ${cluster.layer}` : regionName(cluster.region);
        return html`<g class="cluster box" tabindex="0" role="button" aria-label=${`Fold ${name}`} onClick=${() => toggle(cluster.id)}
            onKeyDown=${(event) => { if (event.key === "Enter" || event.key === " ") { toggle(cluster.id); event.preventDefault(); } }}>
          <rect class="frame" x=${place.x - place.width / 2} y=${place.y - place.height / 2} width=${place.width} height=${place.height} rx="6"></rect>
          <text x=${place.x - place.width / 2 + 8} y=${place.y - place.height / 2 + 13}>− ${name}</text></g>`;
      })}
      ${folded.edges.map((edge) => {
        const found = graph.edge(edge.from, edge.to);
        return found?.points ? html`<path class="edge" d=${pathOf(found.points)} marker-end="url(#arrow)" stroke-dasharray=${edge.memory ? "3 4" : null}></path>` : null;
      })}
      ${folded.boxes.map((box) => {
        const place = graph.node(box.id);
        const [left, top] = [place.x - place.width / 2, place.y - BOX.height / 2];
        const [title, detail] = textOf(box);
        const [added, gone] = ["added", "gone"].map((mark) => box.calls.filter((call) => call[mark]).length);
        const kind = !box.group ? (gone ? "gone" : added ? "added" : "") : "";
        const chosen = !box.group && box.calls[0].name === selected ? "selected" : "";
        const room = place.width - 20 - place.marked;
        const fits = (text, size) => (text.length * size > room ? `${text.slice(0, room / size - 1)}…` : text);
        return html`<g class=${`box ${kind} ${chosen}`} data-box=${box.id} tabindex="0" role="button"
            aria-label=${`${title}, ${detail}${box.group ? ", folded" : ""}${added ? `, ${added} added` : ""}${gone ? `, ${gone} removed` : ""}`} onClick=${() => act(box)} onKeyDown=${(event) => move(event, box)}>
          <title>${title} ${detail}${box.group ? "" : `\n${box.calls[0].name}, added by ${box.calls[0].added_by || "the model"}`}</title>
          <rect class="frame" x=${left} y=${top} width=${place.width} height=${BOX.height} rx="5"></rect>
          <rect x=${left} y=${top} width="6" height=${BOX.height} rx="3" style=${{ fill: color(box.region), stroke: "none" }}></rect>
          <text x=${left + 13} y=${top + 16} font-weight=${box.group ? 600 : 400}>${fits((box.group ? "+ " : "") + title, 7)}</text>
          <text class="small" x=${left + 13} y=${top + 30}>${fits(detail, 5.8)}</text>
          ${box.group && added ? html`<text class="small" x=${left + place.width - 6} y=${top + 14} text-anchor="end" style=${{ fill: "var(--good)" }}>+${added}</text>` : null}
          ${box.group && gone ? html`<text class="small" x=${left + place.width - 6} y=${top + 30} text-anchor="end" style=${{ fill: "var(--bad)" }}>−${gone}</text>` : null}
        </g>`;
      })}
    </svg></div>`;
}
