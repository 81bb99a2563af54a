// Lists of recent, slow and failed requests, and the trace of one.
import { useEffect, useState } from "preact/hooks";
import { callJson, reason } from "./api.js";
import { clock, ms } from "./format.js";
import { html } from "./html.js";
import { useTrace } from "./trace.js";
import { Waterfall } from "./waterfall.js";

const LISTS = [
  ["recent", "Recent"],
  ["slow", "Slow"],
  ["failed", "Failed"],
];
const EVERY_MS = 2000;
const NONE = {
  recent: "No request has been traced yet. Send one, for example under Chat.",
  slow: "There are no traces of slow requests.",
  failed: "There are no traces of failed requests.",
};

function usePolled(path, everyMs) {
  const [found, setFound] = useState({ data: null, fault: "" });
  useEffect(() => {
    let timer = 0;
    const stop = new AbortController();
    const ask = async () => {
      try {
        if (!document.hidden) setFound({ data: await callJson(path, { signal: stop.signal }), fault: "" });
      } catch (error) {
        if (stop.signal.aborted) return;
        setFound((was) => ({ ...was, fault: reason(error) }));
      }
      if (!stop.signal.aborted) timer = setTimeout(ask, everyMs);
    };
    setFound({ data: null, fault: "" });
    ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path]);
  return found;
}

const OUTCOMES = { ok: "ok", running: "in progress", refused: "refused", cancelled: "cancelled", error: "failed" };

function Row({ trace, isSelected }) {
  const outcome = OUTCOMES[trace.status];
  const instances = [trace.prefill_ids.join(", ") || "–", trace.decode_ids.join(" → ") || "–"];
  return html`<tr class=${`${trace.status} ${isSelected ? "selected" : ""}`}>
    <td class="time"><a href=${`#/requests/${trace.trace_id}`} aria-current=${isSelected ? "true" : null}
      aria-label=${`${trace.name} at ${clock(trace.started_unix_s)}, ${outcome}`}>${clock(trace.started_unix_s)}</a></td>
    <td class="outcome">${outcome}</td>
    <td class="request">${trace.name}<span class="tags">
      ${trace.moved && html`<em class="moved">moved</em>`}${trace.slow && html`<em class="slow">slow</em>`}
      ${trace.error && html`<em class=${trace.status} title=${trace.error}>${trace.error}</em>`}
    </span></td>
    <td class="n ttft" data-label="TTFT">${ms(trace.ttft_s)}</td>
    <td class="n total" data-label="total">${trace.request_id ? ms(trace.duration_s) : "–"}</td>
    <td class="id prefill" data-label="prefill">${instances[0]}</td>
    <td class="id decode" data-label="decode">${instances[1]}</td>
  </tr>`;
}

export function Requests({ selected }) {
  const [which, setWhich] = useState("recent");
  const { data, fault } = usePolled(`ui/api/requests?which=${which}`, EVERY_MS);
  const opened = useTrace(selected);
  return html`<div class=${`requests ${selected ? "with-trace" : ""}`}>
    <section class="list" aria-label="Requests">
      <div class="bar-of-lists">
        <h1>Requests</h1>
        <div role="group" aria-label="Which requests" class="switch">
          ${LISTS.map(
            ([name, title]) =>
              html`<button key=${name} aria-pressed=${which === name} onClick=${() => setWhich(name)}>${title}</button>`,
          )}
        </div>
        ${data && html`<span class="soft" title=${data.place}>${data.traces.length} kept traces${data.tenant ? ` of ${data.tenant}` : ""}</span>`}
      </div>
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
      ${data && data.traces.length === 0 && html`<p class="none">${NONE[which]}</p>`}
      ${data &&
      data.traces.length > 0 &&
      html`<table class="traces">
        <thead>
          <tr>
            <th scope="col">began</th><th scope="col">outcome</th><th scope="col">request</th><th scope="col" class="n">TTFT</th>
            <th scope="col" class="n">total</th><th scope="col">prefill</th><th scope="col">decode</th>
          </tr>
        </thead>
        <tbody>
          ${data.traces.map((trace) => html`<${Row} key=${trace.trace_id} trace=${trace} isSelected=${trace.trace_id === selected} />`)}
        </tbody>
      </table>`}
    </section>
    ${selected &&
    html`<section class="one" aria-label="Trace">
      <a class="back" href="#/requests">← All requests</a>
      ${opened.fault && html`<p class="fault" role="alert">${opened.fault}</p>`}
      ${opened.trace && html`<${Waterfall} key=${selected} trace=${opened.trace} />`}
    </section>`}
  </div>`;
}
