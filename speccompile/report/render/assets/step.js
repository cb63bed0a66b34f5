"use strict";
// A step stage by stage: its passes, its graph, and its code.

const MOST_LINES = 4000;

function programsOf(report, tier) {
  return [
    { id: "model", title: "the model, for all tiers", program: report.model },
    ...tier.drafters.map((program, index) => ({ id: `drafter${index}`, title: program.name, program })),
    { id: "step", title: tier.program.name, program: tier.program },
  ];
}

function Step({ report, tier, state, choose }) {
  const programs = programsOf(report, tier);
  const { id, program } = programs.find((item) => item.id === state.program) ?? programs.at(-1);
  const found = program.stages.findIndex((stage) => stage.name === state.stage);
  const chosen = found >= 0;
  const stage = chosen ? found : program.stages.length - 1;
  const body = tier.bodies.find((item) => item.name === state.body);
  const calls = useMemo(
    () => (body ? body.nodes.filter(computes).map((node, place) => ({ ...node, place, layer: null, gone: false, added: false })) : callsAt(program, stage).filter((call) => chosen || !call.gone).map((call) => (chosen ? call : { ...call, added: false }))),
    [program, stage, body, chosen],
  );
  const marked = useMemo(() => {
    const groups = new Set();
    for (const region of new Set(calls.map((call) => call.region))) {
      const inside = calls.filter((call) => call.region === region);
      const close = inside.length <= 120 && inside.some((call) => call.added || call.gone || call.name === state.node);
      if (close || (body && inside.length <= 60)) groups.add(`region:${region}`);
    }
    return groups;
  }, [calls, state.node]);
  const [open, setOpen] = useState(marked);
  useEffect(() => setOpen(marked), [marked]);
  const call = calls.find((item) => item.name === state.node);
  const label = body ? `inside of ${body.name}, called by ${count(body.layers.length, "layer")}` : chosen ? `after ${program.stages[stage].name}: green was added, dashed red was removed` : "the finished step; dashed lines go through buffers";
  return html`<${Section} id="step" title=${`The step of ${tier.name}, pass by pass`}
      lead="Choose a pass for what it changed; choose a box to open it. Regions are folded. Arrow keys move through the graph, Enter opens a box.">
    <div class="step">
      <ol class="passes" aria-label="Passes">${programs.map((item) => html`<li class="group">${item.title}</li>
        ${item.program.stages.map((each) => {
          const [plus, minus] = [each.added, each.removed].map((ops) => sum(Object.values(ops)));
          const here = item.id === id && each.name === state.stage;
          return html`<li><button aria-pressed=${here} title=${each.summary} onClick=${() => choose(here ? { stage: null, node: null } : { program: item.id, stage: each.name, node: null, body: null, code: "diff" })}>
            <span>${each.name}</span><span class="delta">${plus ? html`<span class="plus">+${plus}</span> ` : null}${minus ? html`<span class="minus">−${minus}</span>` : null}</span></button></li>`;
        })}`)}
      </ol>
      <div>
        <div class="tools">
          ${body ? html`<button class="chip" onClick=${() => choose({ body: null, node: null })}>← back to the step</button>` : tier.bodies.map((item) => html`<button class="chip" onClick=${() => choose({ body: item.name, node: null, stage: null, program: "step" })}>open ${item.name}</button>`)}
        </div>
        <${Graph} key=${`${id}/${stage}/${body?.name}`} calls=${calls} open=${open} setOpen=${setOpen} selected=${state.node} label=${label}
          onCall=${(item) => choose({ node: item.name, code: "python" })} />
      </div>
    </div>
    ${call ? html`<${CallDetails} call=${call} body=${body} choose=${choose} program=${id} />` : null}
    <${Code} program=${program} stage=${program.stages[stage]} chosen=${chosen} node=${call} body=${body} show=${state.code} choose=${choose} />
  </${Section}>`;
}

function CallDetails({ call, body, choose, program }) {
  const list = (names) => (names.length ? names.map((name) => html`<span class="chip mono">${name}</span> `) : "–");
  return html`<div class="card" style=${{ marginTop: "0.8rem" }} aria-live="polite">
    <h3><${Swatch} region=${call.region} /><span class="mono">${call.name}</span></h3>
    <dl class="facts-list">
      <dt>calls</dt><dd><span class="mono">${call.op}</span>${call.body ? html` <button class="chip" onClick=${() => choose({ body: call.body, node: null, stage: null, program: "step" })}>open it</button>` : null}</dd>
      ${call.value ? html`<dt>result</dt><dd class="mono">${call.value}</dd>` : null}
      ${body ? null : html`<dt>added by</dt><dd><button class="chip" onClick=${() => choose({ stage: call.added_by, program: call.since < 0 ? "model" : program, code: "diff" })}>${call.added_by}</button></dd>`}
      <dt>reads</dt><dd>${list(call.reads)}${call.nbytes ? bytes(call.nbytes) : ""}</dd>
      <dt>writes</dt><dd>${list(call.writes)}</dd>
      ${call.ms === null ? null : html`<dt>time</dt><dd>${ms(call.ms)} in a step${body ? ", all layers together" : ""}</dd>`}
    </dl></div>`;
}

function Code({ program, stage, chosen, node, body, show, choose }) {
  const target = useRef();
  const wanted = node ? new RegExp(`^    ${node.name.replace(/[^\w]/g, "")} = `) : null;
  const diff = chosen && !body && show !== "python";
  const text = diff ? stage.diff : stage.python;
  const lines = useMemo(() => {
    const all = text.split("\n");
    if (!body) return all;
    const start = all.findIndex((line) => line.startsWith(`def ${body.name}(`));
    const length = all.slice(start + 1).findIndex((line) => /^\S/.test(line));
    return all.slice(start, length < 0 ? undefined : start + 1 + length);
  }, [text, body]);
  const [whole, setWhole] = useState(false);
  useEffect(() => target.current?.scrollIntoView({ block: "nearest" }), [node?.name, lines]);
  const kind = (line) => {
    if (diff) return /^(---|\+\+\+|@@)/.test(line) ? "hunk" : line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : "";
    return /^\s*#/.test(line) ? "comment" : "";
  };
  const shown = whole ? lines : lines.slice(0, MOST_LINES);
  const at = wanted && !diff ? shown.findIndex((line) => wanted.test(line)) : -1;
  const unchanged = diff && !text;
  return html`<div class="code" id="code">
    <header>
      <strong class="mono">${body ? body.name : stage.name}</strong>
      ${chosen && !body ? html`<span>${stage.summary} <span class="muted">${stage.note}</span></span>` : html`<span class="muted">${body ? "The printed function of a layer." : "The printed step: a file that runs."}</span>`}
      ${chosen && !body ? html`<span class="bar" role="group" aria-label="What to show" style=${{ marginLeft: "auto" }}>
        <button aria-pressed=${diff} onClick=${() => choose({ code: "diff" })}>what it changed</button>
        <button aria-pressed=${!diff} onClick=${() => choose({ code: "python" })}>the whole stage</button></span>` : null}
    </header>
    ${chosen && !body ? html`<div style=${{ padding: "0.4rem 0.8rem" }} class="facts">
      ${stage.requires.length ? html`<span class="muted">requires</span>${stage.requires.map((fact) => html`<span class="chip">${fact}</span>`)}` : null}
      ${stage.provides.length ? html`<span class="muted">provides</span>${stage.provides.map((fact) => html`<span class="chip">${fact}</span>`)}` : null}
      ${Object.entries(stage.added).slice(0, 8).map(([op, number]) => html`<span class="chip mono"><span class="plus">+${number}</span> ${shortOp(op)}</span>`)}
      ${Object.entries(stage.removed).slice(0, 8).map(([op, number]) => html`<span class="chip mono"><span class="minus">−${number}</span> ${shortOp(op)}</span>`)}
    </div>` : null}
    ${unchanged ? html`<p style=${{ padding: "0.5rem 0.8rem" }}>The printed code is the same.</p>` : html`<pre tabindex="0" aria-label="Code">${shown.map((line, index) => html`<span class=${index === at ? "target" : kind(line)} ref=${index === at ? target : null}>${line || " "}</span>`)}</pre>`}
    ${shown.length < lines.length ? html`<p style=${{ padding: "0.2rem 0.8rem" }}><button class="chip" onClick=${() => setWhole(true)}>Show all ${lines.length.toLocaleString("en")} lines</button></p>` : null}
  </div>`;
}
