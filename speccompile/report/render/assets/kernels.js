"use strict";
// Kernels of a tier, and the buffers of the arena.

function Kernels({ tier }) {
  const columns = [
    { name: "called from", of: (kernel) => kernel.caller },
    { name: "kernel", of: (kernel) => kernel.name, show: (kernel) => html`<span class="mono long" title=${kernel.name}>${shortOp(kernel.name)}</span>` },
    { name: "whose", of: (kernel) => KINDS[kernel.kind], show: (kernel) => html`<span style=${{ whiteSpace: "nowrap" }}>${KINDS[kernel.kind]}</span>` },
    { name: "calls", number: true, of: (kernel) => kernel.calls },
    { name: "reads", number: true, of: (kernel) => kernel.nbytes, show: (kernel) => (kernel.nbytes ? bytes(kernel.nbytes) : "–") },
    { name: "time", number: true, of: (kernel) => kernel.ms, show: (kernel) => ms(kernel.ms) },
    { name: "memory needs", number: true, of: (kernel) => kernel.floor_ms, show: (kernel) => (kernel.floor_ms >= 0.001 ? ms(kernel.floor_ms) : "–") },
    { name: "times that", number: true, of: (kernel) => (kernel.floor_ms && kernel.ms ? kernel.ms / kernel.floor_ms : null),
      show: (kernel) => (kernel.floor_ms >= 0.01 && kernel.ms ? times(kernel.ms / kernel.floor_ms) : "–") },
  ];
  const initial = tier.measured ? { column: 5, direction: -1 } : null;
  return html`<${Section} id="kernels" title=${`Kernels of ${tier.name}`}
      lead="Calls are those of one run of the caller; bytes and times those of a whole step. Kernels that Inductor wrote are measured together.">
    <${Sortable} caption="Kernels" columns=${columns} rows=${tier.kernels} initial=${initial} key=${tier.name} />
    ${tier.collectives.length > 0 && html`<${Collectives} tier=${tier} />`}
  </${Section}>`;
}

function Collectives({ tier }) {
  const columns = [
    { name: "called from", of: (call) => call.caller },
    { name: "collective", of: (call) => call.name, show: (call) => html`<span class="mono">${call.name}</span>` },
    { name: "type and shape", of: (call) => call.shape.join(), show: (call) => html`<span class="mono">${call.dtype}[${call.shape.join(", ")}]</span>` },
    { name: "calls", number: true, of: (call) => call.calls },
    { name: "sends", number: true, of: (call) => call.nbytes, show: (call) => bytes(call.nbytes) },
  ];
  return html`<h3>Collectives</h3>
    <p class="muted">Calls and bytes are those of a whole step, sent by each rank.</p>
    <${Sortable} caption="Collectives" columns=${columns} rows=${tier.collectives} />`;
}

const OPEN_GROUPS = ["KV", "sequence", "drafter", "recurrent state"];

function Buffers({ report, tier }) {
  const [text, setText] = useState("");
  const users = useMemo(() => {
    const found = {};
    for (const node of tier.program.nodes.filter((item) => item.until === null)) {
      const who = node.body ? node.body : node.region;
      for (const name of node.reads) ((found[name] ??= {}).reads ??= new Set()).add(who);
      for (const name of node.writes) ((found[name] ??= {}).writes ??= new Set()).add(who);
    }
    return found;
  }, [tier]);
  const alike = useMemo(() => {
    const lines = new Map();
    for (const buffer of report.buffers) {
      const merge = ["KV", "recurrent state", "adapters"].includes(buffer.group) || /_\d+$/.test(buffer.name);
      const key = merge ? [buffer.group, buffer.name.replace(/\d+/, ""), buffer.shape, buffer.dtype].join() : buffer.name;
      if (!lines.has(key)) lines.set(key, []);
      lines.get(key).push(buffer);
    }
    return [...lines.values()].map((all) => ({
      name: all.length === 1 ? all[0].name : `${all[0].name} … ${all.at(-1).name} (${all.length})`,
      first: all[0], nbytes: sum(all.map((buffer) => buffer.nbytes)),
      reads: [...new Set(all.flatMap((buffer) => [...(users[buffer.name]?.reads ?? [])]))],
      writes: [...new Set(all.flatMap((buffer) => [...(users[buffer.name]?.writes ?? [])]))],
    }));
  }, [report, users]);
  const rows = alike.filter((line) => `${line.name} ${line.first.group}`.toLowerCase().includes(text.toLowerCase()));
  const named = (who) => who.map((name) => (REGIONS[name] ? regionName(name) : name)).join(", ") || "–";
  const columns = [
    { name: "buffer", of: (line) => line.name, show: (line) => html`<span class="mono">${line.name}</span>` },
    { name: "type and shape", of: (line) => line.first.shape.join(), show: (line) => html`<span class="mono">${line.first.dtype}[${line.first.shape.join(", ")}]</span>` },
    { name: "bytes", number: true, of: (line) => line.nbytes, show: (line) => bytes(line.nbytes) },
    { name: `read by (${tier.name})`, of: (line) => named(line.reads) },
    { name: "written by", of: (line) => named(line.writes) },
  ];
  const groups = [...new Set(rows.map((line) => line.first.group))];
  const size = (group) => sum(rows.filter((line) => line.first.group === group).map((line) => line.nbytes));
  return html`<${Section} id="buffers" title="Buffers of the arena"
      lead="All state of all slots, allocated once and shared by all tiers. Readers and writers are those of the chosen tier.">
    <div class="tools"><label>Find <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} placeholder="name or group" /></label>
      <span class="muted">${count(report.buffers.length, "tensor")}, ${bytes(sum(report.buffers.map((buffer) => buffer.nbytes)))}</span></div>
    ${groups.sort((a, b) => size(b) - size(a)).map((group) => html`<details class="group" open=${Boolean(text) || OPEN_GROUPS.includes(group)}>
      <summary><strong>${group}</strong> <span class="muted">${bytes(size(group))}</span></summary>
      <${Sortable} caption=${`Buffers: ${group}`} columns=${columns} rows=${rows.filter((line) => line.first.group === group)} />
    </details>`)}
  </${Section}>`;
}
