// A trace as a waterfall across processes, with the reasons why each instance was chosen.
import { useState } from "preact/hooks";
import { call } from "./api.js";
import { clock, ms, roleOf, short } from "./format.js";
import { html } from "./html.js";

const PERFETTO = "https://ui.perfetto.dev";
const HIDDEN = new Set(["kvmesh.route.compared"]); // shown as a table
const WHY = "kvmesh.route.why";
const WHY_LOCAL = "kvmesh.prefill.why_local";
const SHIFT = "kvmesh.clock_shift_ms";
const COMPARED = { cached: "cached tokens", queued: "queued tokens", running: "running", pages: "pages used", cost: "cost" };

// Returns [depth, span] in tree order, siblings by start time.
function inOrder(spans) {
  const known = new Set(spans.map((span) => span.id));
  const children = new Map();
  for (const span of spans) {
    const parent = known.has(span.parent) ? span.parent : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(span);
  }
  const rows = [];
  const walk = (id, depth) => {
    const of = (children.get(id) || []).sort((a, b) => a.start_us - b.start_us || b.end_us - a.end_us);
    for (const span of of) {
      rows.push([depth, span]);
      walk(span.id, depth + 1);
    }
  };
  walk("", 0);
  return rows;
}

function ticks(total) {
  const rough = total / 5;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || rough || 1;
  const found = [];
  for (let at = 0; at <= total * 0.97; at += step) found.push(at);
  return found;
}

const plainName = (name) => name.replace(/^kvmesh\./, "").replace(/^gen_ai\./, "");
const shown = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

function compared(text) {
  try {
    const rows = JSON.parse(text);
    return Array.isArray(rows) && rows.length ? rows : null;
  } catch {
    return null;
  }
}

function Compared({ rows, chosen }) {
  const columns = Object.keys(COMPARED).filter((name) => rows.some((row) => name in row));
  return html`<div class="scroll"><table class="compared">
    <thead>
      <tr><th scope="col">instance</th>${columns.map((name) => html`<th scope="col" class="n" key=${name}>${COMPARED[name]}</th>`)}</tr>
    </thead>
    <tbody>
      ${rows.map(
        (row) => html`<tr key=${row.instance} class=${row.instance === chosen ? "chosen" : ""}>
          <td class="id">${row.instance}${row.instance === chosen ? " ✓" : ""}</td>
          ${columns.map((name) => html`<td class="n" key=${name}>${typeof row[name] === "number" ? short(row[name]) : (row[name] ?? "–")}</td>`)}
        </tr>`,
      )}
    </tbody>
  </table></div>`;
}

// Returns the milliseconds by which processes' spans were shifted, because their clocks contradicted their callers'.
const shifts = (spans) =>
  Object.fromEntries(spans.filter((span) => SHIFT in span.attributes).map((span) => [span.service, span.attributes[SHIFT]]));

// Returns choices of instances, and moves between them, by time.
function choices(spans) {
  const found = [];
  for (const span of spans) {
    const a = span.attributes;
    if (a[WHY]) {
      const isPrefill = "kvmesh.prefill.instance" in a;
      const chosen = a[isPrefill ? "kvmesh.prefill.instance" : "kvmesh.decode.instance"];
      found.push({ at: span.start_us, role: isPrefill ? "prefill" : "decode", chosen, why: a[WHY], a });
    } else if (a[WHY_LOCAL]) {
      found.push({ at: span.start_us, role: "prefill", chosen: "", why: a[WHY_LOCAL], a });
    }
    for (const event of span.events) {
      if (event.name === "moved" || event.name === "recompute") found.push({ at: event.at_us, event });
    }
  }
  return found.sort((a, b) => a.at - b.at);
}

function Choice({ choice }) {
  if (choice.event) {
    const { from, cause } = choice.event.attributes;
    const what = choice.event.name === "moved" ? html`moved away from <code>${from || "?"}</code>` : "prompt computed again";
    return html`<li class="moved"><b>${ms(choice.at / 1e6)}</b> ${what}: ${cause}</li>`;
  }
  const { a, role, chosen, why } = choice;
  const rows = a["kvmesh.route.compared"] && compared(a["kvmesh.route.compared"]);
  const facts = [];
  if (a["kvmesh.route.candidates"] != null) facts.push(`of ${a["kvmesh.route.candidates"]}`);
  if (a["kvmesh.route.cached_tokens"]) facts.push(`${a["kvmesh.route.cached_tokens"]} tokens cached there`);
  return html`<li>
    <b>${ms(choice.at / 1e6)}</b> <i class=${`dot ${role}`} aria-hidden="true"></i>
    ${chosen ? html`${role} <code>${chosen}</code>` : "decode computes the prompt itself"}: ${why}
    ${facts.length > 0 && html` <span class="soft">(${facts.join(", ")})</span>`}
    ${rows && rows.length > 1 && html`<details><summary>compared with ${rows.length - 1} other${rows.length > 2 ? "s" : ""}</summary><${Compared} rows=${rows} chosen=${chosen} /></details>`}
  </li>`;
}

function Row({ depth, span, total }) {
  const [open, setOpen] = useState(false);
  const left = (100 * span.start_us) / total;
  const width = Math.max((100 * (span.end_us - span.start_us)) / total, 0.15);
  const took = ms((span.end_us - span.start_us) / 1e6);
  const facts = Object.entries(span.attributes).filter(([name]) => !HIDDEN.has(name));
  return html`<li class=${`span ${span.error ? "failed" : ""}`}>
    <button aria-expanded=${open} onClick=${() => setOpen(!open)}
      aria-label=${`${span.name}, ${span.service}, from ${ms(span.start_us / 1e6)}, took ${took}${span.error ? `, ${span.error}` : ""}`}>
      <span class="what" style=${{ paddingLeft: `${Math.min(depth, 8) * 10}px` }}>${span.name}</span>
      <span class="where">${span.service}</span>
      <span class="bar" aria-hidden="true">
        <i class=${roleOf(span.service)} style=${{ left: `${Math.min(left, 99.8)}%`, width: `${Math.min(width, 100 - left)}%` }}></i>
        ${span.events.map((event) => html`<s key=${event.at_us} title=${event.name} style=${{ left: `${(100 * event.at_us) / total}%` }}></s>`)}
      </span>
      <span class="took">${took}</span>
    </button>
    ${open &&
    html`<dl class="facts">
      <div><dt>process</dt><dd>${span.service}</dd></div>
      <div><dt>begins at</dt><dd>${ms(span.start_us / 1e6)}</dd></div>
      ${span.error && html`<div class="bad"><dt>error</dt><dd>${span.error}</dd></div>`}
      ${facts.map(([name, value]) => html`<div key=${name}><dt>${plainName(name)}</dt><dd>${shown(value)}</dd></div>`)}
      ${span.events.map(
        (event) => html`<div key=${event.at_us}><dt>${event.name} at ${ms(event.at_us / 1e6)}</dt>
          <dd>${Object.entries(event.attributes).map(([name, value]) => `${name} ${value}`).join(", ")}</dd></div>`,
      )}
    </dl>`}
  </li>`;
}

// Opens ui.perfetto.dev and passes the trace within the browser, so that it does not leave this machine.
async function openInPerfetto(traceId, title, onFault) {
  const tab = window.open(PERFETTO); // at once, because browsers block a tab that is opened later
  if (!tab) return onFault("The browser has blocked the new tab.");
  try {
    const buffer = await (await call(`ui/api/traces/${traceId}/perfetto`)).arrayBuffer();
    const asking = setInterval(() => tab.postMessage("PING", PERFETTO), 100);
    setTimeout(() => clearInterval(asking), 60000);
    const onMessage = (event) => {
      if (event.origin !== PERFETTO || event.data !== "PONG") return;
      clearInterval(asking);
      removeEventListener("message", onMessage);
      tab.postMessage({ perfetto: { buffer, title } }, PERFETTO);
    };
    addEventListener("message", onMessage);
  } catch (error) {
    tab.close();
    onFault(error.message);
  }
  return undefined;
}

async function download(traceId, onFault) {
  try {
    const url = URL.createObjectURL(await (await call(`ui/api/traces/${traceId}/perfetto`)).blob());
    const link = document.createElement("a");
    link.href = url;
    link.download = `kvmesh-${traceId.slice(0, 12)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } catch (error) {
    onFault(error.message);
  }
}

export function Waterfall({ trace }) {
  const [fault, setFault] = useState("");
  const { spans, trace_id: id } = trace;
  const total = Math.max(...spans.map((span) => span.end_us), 1);
  const rows = inOrder(spans);
  const root = rows[0][1];
  const made = choices(spans);
  const services = [...new Set(spans.map((span) => span.service))];
  const refused = root.attributes["kvmesh.refused"];
  const requestId = spans.map((span) => span.attributes["kvmesh.request_id"]).find(Boolean);
  return html`<div class="waterfall">
    <p class="about-trace">
      <b>${root.name}</b> at ${clock(trace.at)}, ${ms(total / 1e6)}, ${spans.length} spans in ${services.length} processes
      <span class="ids">trace <code>${id}</code>${requestId && html` request <code>${requestId}</code>`}</span>
    </p>
    ${trace.left_out > 0 &&
    html`<p>
      ${trace.left_out} later spans are omitted, here and in the download.
      ${" "}<code>python -m services.inspect trace ${id.slice(0, 12)}</code> prints all of them; <code>--perfetto FILE</code> writes them to a file.
    </p>`}
    ${(root.error || refused) && html`<p class="fault">${root.error || refused}</p>`}
    ${Object.entries(shifts(spans)).map(
      ([service, by]) => html`<p class="soft" key=${service}>
        Clocks differ: ${service} is shown ${ms(Math.abs(by) / 1e3)} ${by > 0 ? "later" : "earlier"}, to begin with its caller.
      </p>`,
    )}
    <p class="actions">
      <button onClick=${() => openInPerfetto(id, `kvmesh ${id.slice(0, 12)}`, setFault)}>Open in Perfetto ↗</button>
      <button onClick=${() => download(id, setFault)}>Download trace</button>
      <span class="fault" role="alert">${fault}</span>
    </p>
    ${made.length > 0 &&
    html`<h3>Why these instances</h3>
      <ol class="choices">${made.map((choice, i) => html`<${Choice} key=${i} choice=${choice} />`)}</ol>`}
    <h3 class="unseen">Spans</h3>
    <div class="axis" aria-hidden="true">
      <span class="bar">${ticks(total).map((at) => html`<i key=${at} style=${{ left: `${(100 * at) / total}%` }}>${ms(at / 1e6)}</i>`)}</span>
    </div>
    <ol class="spans" aria-label="Spans by process and time">
      ${rows.map(([depth, span]) => html`<${Row} key=${span.id} depth=${depth} span=${span} total=${total} />`)}
    </ol>
    <p class="legend" aria-hidden="true">
      ${["frontend", "bootstrap", "prefill", "decode"].map((role) => html`<span key=${role}><i class=${`dot ${role}`}></i>${role}</span>`)}
    </p>
  </div>`;
}
