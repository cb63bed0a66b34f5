"use strict";
// The page: what is chosen is kept in the address, so that a link leads to it.

const DEFAULTS = { tier: null, region: null, program: "step", stage: null, node: null, body: null, code: "diff", section: null };

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, given.get(name) ?? value]));
}

function writeAddress(state) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (value !== null && value !== DEFAULTS[name]) given.set(name, value);
  history.replaceState(null, "", `#${given}`);
}

function App({ report }) {
  const [state, setState] = useState(readAddress);
  const tier = report.tiers.find((item) => item.name === state.tier) ?? report.tiers.at(-1);
  const choose = (change) => setState((before) => ({ ...before, section: null, ...change }));
  useEffect(() => writeAddress(state), [state]);
  useEffect(() => {
    if (state.section) document.getElementById(state.section)?.scrollIntoView();
  }, [state.section, state.node]);
  const sections = [
    ["top", "Verdict"], ["time", "Time"], ["step", "Step"], ["kernels", "Kernels"], ["buffers", "Buffers"], ["memory", "Memory"],
    ...(report.acceptance || tier.decoded ? [["acceptance", "Acceptance"]] : []), ...(report.trace ? [["trace", "Trace"]] : []),
    ...(tier.tree ? [["tree", "Tree"]] : []), ["build", "Build"],
  ];
  const go = (event, section) => {
    event.preventDefault();
    document.getElementById(section)?.scrollIntoView();
  };
  return html`<a class="skip" href="#verdict" onClick=${(event) => go(event, "verdict")}>Skip to the verdict</a>
    <nav aria-label="Sections">
      <div class="links">${sections.map(([id, name]) => html`<a href=${`#section=${id}`} onClick=${(event) => go(event, id)}>${name}</a>`)}</div>
      <div class="tiers" role="group" aria-label="Tier"><span class="muted">tier</span>${report.tiers.map((item) => html`<button aria-pressed=${item === tier} onClick=${() => choose({ tier: item.name })}>${item.name}</button>`)}</div>
    </nav>
    <main>
      <${Overview} report=${report} tier=${tier} choose=${choose} />
      <${Section} id="time" title="Where the time of a step goes" lead="Each column is a tier, each row a part of its step, one after another on one scale. Choose a cell for its calls, or a tier for why it takes this time.">
        <${Waterfall} report=${report} tier=${tier} region=${state.region} choose=${choose} />
        <${Why} report=${report} tier=${tier} region=${state.region} choose=${choose} />
      </${Section}>
      <${Step} report=${report} tier=${tier} state=${state} choose=${choose} />
      <${Kernels} tier=${tier} />
      <${Buffers} report=${report} tier=${tier} />
      <${Memory} report=${report} />
      <${Acceptance} report=${report} tier=${tier} />
      <${Trace} report=${report} />
      <${Trees} tier=${tier} />
      <${Build} report=${report} />
      <footer>Written by speccompile ${report.machine.versions.speccompile}. This file contains everything that it shows; it loads nothing.</footer>
    </main>`;
}

// The report's texts are lists of runs of lines of one table: [first line, count, ...].
function unpack(data) {
  const { lines, report } = data;
  const joined = (runs) => {
    const found = [];
    for (let index = 0; index < runs.length; index += 2) found.push(...lines.slice(runs[index], runs[index] + runs[index + 1]));
    return found.join("\n");
  };
  const programs = [report.model, ...report.tiers.flatMap((tier) => [tier.program, ...tier.drafters])];
  for (const stage of programs.flatMap((program) => program.stages)) {
    for (const name of ["python", "diff"]) {
      const runs = stage[name];
      let text = null;
      Object.defineProperty(stage, name, { get: () => (text ??= joined(runs)) });
    }
  }
  return report;
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const report = unpack(await new Response(stream).json());
  const app = document.getElementById("app");
  app.replaceChildren();
  render(html`<${App} report=${report} />`, app);
  app.dataset.ready = "true";
}
start();
