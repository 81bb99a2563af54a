// A chat with the model: streams the answer, draws its tokens as they arrive, and shows its trace at the end.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { call, callJson, events, reason } from "./api.js";
import { useMesh } from "./feed.js";
import { ms, percent, short } from "./format.js";
import { html } from "./html.js";
import { byRole, hasDecode, KillButton, share, STATES } from "./mesh.js";
import { useTrace } from "./trace.js";
import { Waterfall } from "./waterfall.js";

const TRACE_AFTER_MS = 700; // delay after the answer's end, until its spans have been exported
const SERVING_EVERY_MS = 500;
const RHYTHM_EVERY_MS = 100;
const NEAR_END_PX = 40;

function hex(size) {
  return [...crypto.getRandomValues(new Uint8Array(size))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Draws each token as a tick on a time line, and workers that the viewer killed in red.
function Rhythm({ times, deaths, tokens, startedAt, isOver, isWaiting }) {
  const canvas = useRef(null);
  const [, draw] = useState(0);
  useEffect(() => {
    if (isOver) return undefined;
    const timer = setInterval(() => draw((n) => n + 1), RHYTHM_EVERY_MS);
    return () => clearInterval(timer);
  }, [isOver]);
  useEffect(() => {
    const box = canvas.current;
    const scale = devicePixelRatio || 1;
    const [width, height] = [box.clientWidth, box.clientHeight];
    box.width = width * scale;
    box.height = height * scale;
    const pen = box.getContext("2d");
    const style = getComputedStyle(box);
    pen.scale(scale, scale);
    const end = Math.max((isOver ? times[times.length - 1] || startedAt : performance.now()) - startedAt, 1000);
    const x = (at) => ((at - startedAt) / end) * (width - 2) + 1;
    pen.fillStyle = style.getPropertyValue("--decode");
    for (const at of times) pen.fillRect(x(at), 6, 1, height - 6);
    pen.fillStyle = style.getPropertyValue("--bad");
    for (const { at } of deaths) pen.fillRect(x(at) - 1, 0, 2, height);
  });
  let gap = 0;
  for (let i = 1; i < times.length; i += 1) gap = Math.max(gap, times[i] - times[i - 1]);
  if (times.length && !isOver) gap = Math.max(gap, performance.now() - times[times.length - 1]);
  const seconds = times.length > 1 ? (times[times.length - 1] - times[0]) / 1000 : 0;
  const figures = [
    ["first token", times.length ? ms((times[0] - startedAt) / 1000) : "–"],
    ["tokens", short(tokens ?? times.length)],
    ["tokens/s", seconds > 0 ? short((times.length - 1) / seconds) : "–"],
    ["longest gap", gap > 0 ? ms(gap / 1000) : "–"],
  ];
  return html`<div class="rhythm">
    <canvas ref=${canvas} role="img" aria-label=${figures.map(([name, value]) => `${name} ${value}`).join(", ")}></canvas>
    <dl>${figures.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${isWaiting && html`<p class="death" role="status">waiting for a decode worker</p>`}
    ${deaths.map(({ at, name }) => html`<p key=${at} class="death">${name} killed at ${ms((at - startedAt) / 1000)}</p>`)}
  </div>`;
}

function Workers({ mayKill, serving, onKilled }) {
  const { instances } = useMesh();
  const roles = byRole(instances);
  const workers = [...roles.decode, ...roles.prefill];
  if (workers.length > 24) return html`<p class="soft">${workers.length} workers: choose one under Mesh to kill it.</p>`;
  return html`<ul class="workers" aria-label="Workers">
    ${workers.map(
      (of) => html`<li key=${of.id} data-id=${of.id} class=${of.state}>
        <i class=${`dot ${of.role}`} aria-hidden="true"></i>
        <span>${of.role} <code>${of.id}</code></span>
        <span class="soft">${of.state === "up" ? `${short(of.running || 0)} running · KV ${percent(share(of))}` : STATES[of.state]}</span>
        ${of.id === serving && html`<em>serves this answer</em>`}
        ${mayKill && html`<${KillButton} of=${of} onKilled=${onKilled} />`}
      </li>`,
    )}
    ${workers.length === 0 && html`<li class="none">no worker is registered</li>`}
  </ul>`;
}

// Returns the decode instance that generates the answer. Spans are exported at the end, so it polls the frontend.
function useServing(id, isOver) {
  const [serving, setServing] = useState("");
  useEffect(() => {
    setServing("");
    if (!id || isOver) return undefined;
    const ask = async () => {
      try {
        const { decode } = await callJson(`ui/api/serving/${id}`);
        if (decode) setServing(decode);
      } catch {
        // the frontend is unreachable, which the chat itself reports
      }
    };
    const timer = setInterval(ask, SERVING_EVERY_MS);
    return () => clearInterval(timer);
  }, [id, isOver]);
  return serving;
}

const IDLE = { traceId: "", times: [], tokens: null, deaths: [], startedAt: 0, isOver: true, fault: "" };

// Streams an answer. Returns the server's count of tokens, because a piece of text may have several.
async function stream(body, traceId, signal, onText) {
  const headers = { "content-type": "application/json", "traceparent": `00-${traceId}-${hex(8)}-01` };
  const answer = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  let tokens = null;
  for await (const [, data] of events(answer)) {
    if (data === "[DONE]") break;
    const piece = JSON.parse(data);
    if (piece.error) throw new Error(piece.error.message);
    const delta = piece.choices?.[0]?.delta;
    const text = (delta?.reasoning_content || "") + (delta?.content || "");
    if (text) onText(text);
    if (piece.usage) tokens = piece.usage.completion_tokens;
  }
  return tokens;
}

export function Chat({ shown, mayKill }) {
  const { about, instances } = useMesh();
  const roles = byRole(instances);
  const decodes = roles.decode.map((of) => `${of.id} ${of.state}`).join();
  const [models, setModels] = useState([]);
  const [turns, setTurns] = useState([]); // [{role, content}]
  const [run, setRun] = useState(IDLE);
  const [goesOn, setGoesOn] = useState(false);
  const [limit, setLimit] = useState(256);
  const stop = useRef(null);
  const log = useRef(null);
  const field = useRef(null);
  const atEnd = useRef(true); // the reader has not scrolled up
  const [draft, setDraft] = useState(""); // it outlives a look at another part
  const [chosen, setChosen] = useState("");
  const model = models.includes(chosen) ? chosen : models[0];
  const found = useTrace(run.isOver ? run.traceId : "", TRACE_AFTER_MS);
  const serving = useServing(run.traceId, run.isOver);
  useEffect(() => {
    if (!shown) return;
    const known = (list) => list.data.length && setModels(list.data.map((card) => card.id)); // keep the list if it is empty, because decode may soon be back
    callJson("v1/models").then(known, () => {});
  }, [shown, about.frontend, decodes]);
  useLayoutEffect(() => {
    if (log.current && atEnd.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns, shown]);

  const send = async (event) => {
    event.preventDefault();
    const text = draft.trim();
    if (!text || !run.isOver || !model) return;
    setDraft("");
    atEnd.current = true;
    const asked = [...turns, { role: "user", content: text }];
    const traceId = hex(16);
    const startedAt = performance.now();
    stop.current = new AbortController();
    let answer = "";
    const times = [];
    setTurns([...asked, { role: "assistant", content: "" }]);
    setRun({ ...IDLE, traceId, startedAt, times, isOver: false });
    const body = {
      model,
      messages: asked,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: limit || 256,
      ...(goesOn ? { ignore_eos: true } : {}),
    };
    let scheduled = false;
    const show = () => {
      scheduled = false;
      const box = log.current;
      atEnd.current = !box || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
      setTurns([...asked, { role: "assistant", content: answer }]);
    };
    try {
      const tokens = await stream(body, traceId, stop.current.signal, (piece) => {
        answer += piece;
        times.push(performance.now());
        if (!scheduled) {
          scheduled = true;
          requestAnimationFrame(show);
        }
      });
      setRun((was) => ({ ...was, tokens, isOver: true }));
    } catch (error) {
      const fault = error.name === "AbortError" ? "stopped" : reason(error);
      setRun((was) => ({ ...was, isOver: true, fault }));
      if (!answer) setDraft((since) => since || text);
    }
    if (answer) show();
    else setTurns(turns); // or each later request would have it, and an answer without text
    field.current?.focus();
  };
  const onKilled = (of, name) => {
    if (!run.isOver) setRun((was) => ({ ...was, deaths: [...was.deaths, { at: performance.now(), name }] }));
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  if (!shown) return null;
  return html`<div class="chat">
    <section class="talk" aria-label="Chat">
      <h1>Chat</h1>
      <div class="log" role="log" aria-live="polite" aria-label="Conversation" tabindex="0" ref=${log}>
        ${turns.length === 0 &&
        html`<p class="none">Ask the model something.${mayKill ? " While it answers, kill a worker: another one continues the stream." : ""}</p>`}
        ${turns.map(
          (turn, i) => html`<div key=${i} class=${`turn ${turn.role}`}>
            <b>${turn.role === "user" ? "You" : "Model"}</b>
            <p dir="auto">${turn.content}${turn.role === "assistant" && i === turns.length - 1 && !run.isOver && html`<span class="caret" aria-hidden="true"></span>`}</p>
          </div>`,
        )}
      </div>
      ${run.fault && html`<p class="fault" role="alert">${run.fault}</p>`}
      <form onSubmit=${send}>
        <textarea ref=${field} rows="2" dir="auto" aria-label="Message" placeholder="Message" value=${draft}
          onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown}></textarea>
        <div class="options">
          <label>Model <select value=${model} onChange=${(event) => setChosen(event.target.value)}>${models.map((name) => html`<option key=${name}>${name}</option>`)}</select></label>
          <label>At most <input type="number" min="1" max="4096" value=${limit} onInput=${(event) => setLimit(Number(event.target.value))} /> tokens</label>
          <label><input type="checkbox" checked=${goesOn} onChange=${(event) => setGoesOn(event.target.checked)} /> do not stop at the end of the answer</label>
          <span class="push">
            ${turns.length > 0 && run.isOver && html`<button type="button" class="plain" onClick=${() => { setTurns([]); setRun(IDLE); }}>Clear</button>`}
            ${run.isOver
              ? html`<button class="primary" type="submit" disabled=${!models.length}>Send</button>`
              : html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>`}
          </span>
        </div>
      </form>
    </section>
    <section class="beside" aria-label="Behind the answer">
      <h2>Workers</h2>
      <${Workers} mayKill=${mayKill} serving=${serving} onKilled=${onKilled} />
      ${run.traceId &&
      html`<h2>Tokens as they arrived</h2>
        <${Rhythm} times=${run.times} deaths=${run.deaths} tokens=${run.tokens} startedAt=${run.startedAt} isOver=${run.isOver} isWaiting=${!run.isOver && !hasDecode(roles)} />`}
      ${run.traceId && run.isOver && html`<h2>Trace</h2>`}
      ${!found.isWaiting && found.fault && html`<p class="soft">${found.fault}</p>`}
      ${run.traceId && run.isOver && found.isWaiting && html`<p class="soft">Waiting for its spans…</p>`}
      ${found.trace && run.isOver && html`<${Waterfall} key=${run.traceId} trace=${found.trace} />`}
    </section>
  </div>`;
}
