// A live picture of the mesh: instances by role, and KV transfers from prefill to decode.
import { Component } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { call, reason } from "./api.js";
import { useMesh } from "./feed.js";
import { age, bytes, clock, ms, percent, rate, short } from "./format.js";
import { html } from "./html.js";

const MAX_CARDS = 8; // per role; if there are more, instances are shown as cells
const MAX_ARROWS = 30;
const MAX_WIDE = 12; // if there are more arrows, they are thin
const MAX_NAMED = 4; // if there are more arrows, their rates are not shown
const MAX_LINKS = 10; // links that are listed before "show all"
const COLUMNS = [
  ["entry", ["frontend", "bootstrap"]],
  ["prefill", ["prefill"]],
  ["decode", ["decode"]],
];
const TITLES = { frontend: "Frontend", bootstrap: "Bootstrap", prefill: "Prefill", decode: "Decode" };
export const STATES = {
  up: "up",
  warming: "warming up",
  draining: "draining",
  late: "late",
  silent: "silent",
  foreign: "other protocol",
};

export const share = (of) => (of.total ? of.held / of.total : 0);
const isWorker = (of) => of.role === "prefill" || of.role === "decode";

export function byRole(instances) {
  const roles = { frontend: [], bootstrap: [], prefill: [], decode: [] };
  for (const of of instances.values()) roles[of.role]?.push(of);
  for (const list of Object.values(roles)) list.sort((a, b) => a.started - b.started || (a.id < b.id ? -1 : 1));
  return roles;
}

// A draining instance finishes its requests, and a late one may recover.
export const hasDecode = (roles) => roles.decode.some((of) => ["up", "late", "draining"].includes(of.state));

function spoken(of) {
  const parts = [`${TITLES[of.role]} ${of.id}`, STATES[of.state]];
  if (of.total) parts.push(`KV ${percent(share(of))}`);
  if (of.running != null) parts.push(`${of.running} running, ${of.waiting} waiting`);
  if (of.rooms) parts.push(`${of.rooms} rooms in flight`);
  return parts.join(", ");
}

function Meter({ of }) {
  const held = 100 * share(of);
  const cached = of.total ? (100 * of.cached) / of.total : 0;
  return html`<span class="meter" aria-hidden="true">
    <i class="held" style=${{ width: `${held}%` }}></i><i class="cached" style=${{ width: `${cached}%` }}></i>
  </span>`;
}

// One instance: a button, which is redrawn only when its own fields have changed.
class Tile extends Component {
  shouldComponentUpdate(next) {
    return (
      next.of !== this.props.of ||
      next.compact !== this.props.compact ||
      next.isSelected !== this.props.isSelected ||
      next.isStop !== this.props.isStop
    );
  }

  render({ of, compact, isSelected, isStop, onSelect }) {
    const common = {
      "class": `${compact ? "cell" : "card"} ${of.role} ${of.state}`,
      "data-id": of.id,
      "aria-label": spoken(of),
      "aria-pressed": isSelected,
      "tabindex": isStop ? 0 : -1,
      "onClick": () => onSelect(of.id),
    };
    if (compact) {
      return html`<button ...${common} title=${spoken(of)}>
        <i class="level" style=${{ height: `${100 * share(of)}%` }}></i><b>${of.running || ""}</b>
      </button>`;
    }
    return html`<button ...${common}>
      <span class="name"><b>${of.id}</b>${of.state !== "up" && html`<em>${STATES[of.state]}</em>`}</span>
      ${isWorker(of) &&
      html`<${Meter} of=${of} />
        <span class="figures">
          <span><b>${percent(share(of))}</b> KV</span>
          <span><b>${short(of.running || 0)}</b> running</span>
          ${of.devices && html`<span><b>${of.devices.length}</b> devices</span>`}
          ${of.waiting > 0 && html`<span><b>${short(of.waiting)}</b> waiting</span>`}
          ${of.rooms > 0 && html`<span><b>${short(of.rooms)}</b> rooms</span>`}
          ${of.tps > 0 && html`<span><b>${short(of.tps)}</b> tok/s</span>`}
        </span>`}
      ${!isWorker(of) &&
      html`<span class="figures">
        ${of.running != null && html`<span><b>${short(of.running)}</b> running</span>`}
        ${of.rooms > 0 && html`<span><b>${short(of.rooms)}</b> rooms</span>`}
        ${of.tps > 0 && html`<span><b>${short(of.tps)}</b> tok/s</span>`}
        ${of.running == null && html`<span>pid ${of.pid}</span>`}
      </span>`}
    </button>`;
  }
}

// Instances of one role. The group is one tab stop; arrow keys move within it.
function Group({ role, instances, selected, onSelect }) {
  const [stop, setStop] = useState("");
  const compact = instances.length > MAX_CARDS;
  const stopId = instances.some((of) => of.id === stop) ? stop : instances[0]?.id;
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = instances.findIndex((of) => of.id === stopId);
    const next = event.key === "Home" ? 0 : event.key === "End" ? instances.length - 1 : step && at + step;
    if (next == null || !instances[next]) return;
    event.preventDefault();
    setStop(instances[next].id);
    event.currentTarget.querySelector(`[data-id="${CSS.escape(instances[next].id)}"]`)?.focus();
  };
  return html`<section class="group" aria-label=${TITLES[role]}>
    <h2><i class=${`dot ${role}`} aria-hidden="true"></i>${TITLES[role]} <span>${instances.length}</span></h2>
    <div class=${compact ? "cells" : "cards"} role="group" aria-label=${`${TITLES[role]} instances`} onKeyDown=${onKeyDown}>
      ${instances.map(
        (of) =>
          html`<${Tile}
            key=${of.id}
            of=${of}
            compact=${compact}
            isSelected=${of.id === selected}
            isStop=${of.id === stopId}
            onSelect=${onSelect}
          />`,
      )}
      ${instances.length === 0 && html`<p class="none">none</p>`}
    </div>
  </section>`;
}

function busiest(links) {
  return [...links.values()].sort((a, b) => b.bytes_per_s - a.bytes_per_s || b.transfers - a.transfers);
}

// Curves between tiles, whose positions are measured after drawing. A line's width grows with the logarithm of its rate.
function Arrows({ links, layout, box, selected }) {
  const [shapes, setShapes] = useState([]);
  const shown = busiest(links)
    .filter((link) => link.bytes_per_s > 0 || link.from === selected || link.to === selected)
    .slice(0, MAX_ARROWS);
  const signature = shown.map((l) => `${l.from}>${l.to}:${Math.round(2 * Math.log10(1 + l.bytes_per_s))}`).join();
  useLayoutEffect(() => {
    const root = box.current;
    if (!root || getComputedStyle(root.querySelector("svg")).display === "none") return;
    const base = root.getBoundingClientRect();
    const edge = (id, side) => {
      const tile = root.querySelector(`[data-id="${CSS.escape(id)}"]`);
      if (!tile) return null;
      const at = tile.getBoundingClientRect();
      const around = tile.parentElement.getBoundingClientRect(); // a line begins beside the group of cells, not within it
      return { x: (side === "right" ? around.right : around.left) - base.left, y: at.top + at.height / 2 - base.top };
    };
    const most = shown.length > MAX_WIDE ? 2.5 : 8;
    setShapes(
      shown.flatMap((link) => {
        const a = edge(link.from, "right");
        const b = edge(link.to, "left");
        if (!a || !b) return [];
        const mid = (a.x + b.x) / 2;
        const width = link.bytes_per_s > 0 ? Math.min(most, 1 + Math.log10(1 + link.bytes_per_s / 1e4)) : 1;
        return [{ link, width, path: `M${a.x},${a.y}C${mid},${a.y} ${mid},${b.y} ${b.x},${b.y}`, x: mid, y: (a.y + b.y) / 2 }];
      }),
    );
  }, [signature, layout, selected]);
  const named = shapes.length <= MAX_NAMED;
  return html`<svg class="arrows" aria-hidden="true">
    ${shapes.map(
      ({ link, width, path, x, y }) => html`<g key=${`${link.from}>${link.to}`} class=${[
        link.bytes_per_s > 0 ? "flows" : "",
        selected && (link.from === selected || link.to === selected) ? "own" : "",
      ].join(" ")}>
        <path d=${path} stroke-width=${width} />
        ${named &&
        link.bytes_per_s > 0 &&
        html`<text x=${x} y=${y - 5}>${rate(links.get(`${link.from}>${link.to}`)?.bytes_per_s)}</text>`}
      </g>`,
    )}
  </svg>`;
}

function Links({ links, isAsked }) {
  const [all, setAll] = useState(false);
  const sorted = busiest(links);
  const shown = all ? sorted : sorted.slice(0, MAX_LINKS);
  if (!sorted.length) {
    return html`<section class="links"><h2>KV transfers</h2><p class="none">${isAsked ? "no transfer between these instances yet" : "…"}</p></section>`;
  }
  return html`<section class="links">
    <h2>KV transfers <span>${sorted.length} ${sorted.length === 1 ? "link" : "links"}</span></h2>
    <div class="scroll">
      <table>
        <thead>
          <tr>
            <th scope="col">prefill → decode</th>
            <th scope="col" class="n">now</th>
            <th scope="col" class="n">transfers</th>
            <th scope="col" class="n">failed</th>
            <th scope="col" class="n extra">mean</th>
            <th scope="col" class="n extra">in total</th>
          </tr>
        </thead>
        <tbody>
          ${shown.map(
            (link) => html`<tr key=${`${link.from}>${link.to}`}>
              <td class="id">${link.from} → ${link.to}</td>
              <td class="n">${link.bytes_per_s > 0 ? rate(link.bytes_per_s) : "–"}</td>
              <td class="n">${short(link.transfers)}</td>
              <td class=${`n ${link.failures ? "bad" : ""}`}>${link.failures}</td>
              <td class="n extra">${link.transfers ? ms(link.seconds / link.transfers) : "–"}</td>
              <td class="n extra">${bytes(link.bytes)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${sorted.length > MAX_LINKS &&
    html`<button class="plain" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${sorted.length}`}</button>`}
  </section>`;
}

export async function kill(id) {
  const body = JSON.stringify({ instance: id });
  const headers = { "content-type": "application/json", "x-kvmesh-ui": "1" };
  return (await (await call("ui/api/kill", { method: "POST", headers, body })).json()).killed;
}

export function KillButton({ of, onKilled }) {
  const [note, setNote] = useState("");
  const press = async () => {
    setNote("…");
    try {
      const name = await kill(of.id);
      setNote("killed");
      onKilled?.(of, name);
    } catch (error) {
      setNote(reason(error));
    }
  };
  return html`<button class="danger" onClick=${press} disabled=${note === "…" || note === "killed"} aria-label=${`Kill ${of.role} ${of.id}`}>
      Kill</button
    >${note && html`<span class="note" role="status">${note}</span>`}`;
}

function pairs(of) {
  const rows = [["state", of.why ? `${STATES[of.state]}: ${of.why}` : STATES[of.state]]];
  const add = (name, value) => value !== "" && value != null && rows.push([name, value]);
  if (of.total) {
    add("KV pages", `${short(of.held)} held, ${short(of.cached)} cached, ${short(of.free)} free of ${short(of.total)}`);
    if (of.exposed != null) add("exposed pages", short(of.exposed));
  }
  if (of.running != null) add("requests", `${of.running} running, ${of.waiting} waiting`);
  if (of.reserved) add("KV being received", `${of.reserved} requests`);
  if (of.queued_tokens) add("prompt tokens queued", short(of.queued_tokens));
  if (of.rooms != null) add("rooms in flight", of.rooms);
  if (of.tps != null) add("tokens/s", short(of.tps));
  for (const [name, count] of Object.entries(of.queues || {})) {
    add(`in state ${name}`, `${count}${of.oldest?.[name] ? `, oldest ${of.oldest[name]} s` : ""}`);
  }
  for (const [peer, state] of Object.entries(of.breakers || {})) add(`breaker of ${peer}`, state);
  if (of.beat_age) add("last heartbeat", `${age(of.beat_age)} ago`);
  if (of.lag_ms != null) add("event loop lag", `${of.lag_ms} ms`);
  if (of.etcd_age != null) add("contact", `etcd ${age(of.etcd_age)} ago, NATS ${age(of.nats_age)} ago`);
  add("devices", of.devices?.join(", "));
  add("KV transfer", of.kv);
  add("KV layout", of.layout);
  add("model", of.model);
  add("serves clients at", of.url);
  add("metrics at", of.metrics);
  add("process", `pid ${of.pid} on ${of.host}`);
  add("up", `${age(Date.now() / 1000 - of.started)}, since ${clock(of.started)}`);
  add("version", of.version);
  return rows;
}

function Detail({ of, id, links, mayKill, onClose }) {
  const box = useRef(null);
  useEffect(() => box.current?.focus(), [id]);
  if (!of) {
    return html`<aside class="detail" tabindex="-1" ref=${box} aria-label="Instance">
      <h2>${id}</h2>
      <p>This instance is gone.</p>
      <button onClick=${onClose}>Close</button>
    </aside>`;
  }
  const own = busiest(links).filter((link) => link.from === id || link.to === id);
  return html`<aside class="detail" tabindex="-1" ref=${box} aria-label=${`${TITLES[of.role]} ${id}`}
    onKeyDown=${(event) => event.key === "Escape" && onClose()}>
    <h2><i class=${`dot ${of.role}`} aria-hidden="true"></i>${TITLES[of.role]} <code>${id}</code></h2>
    <dl>${pairs(of).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${own.length > 0 &&
    html`<h3>KV</h3>
      <ul>
        ${own.slice(0, 8).map(
          (link) =>
            html`<li key=${link.from + link.to}>
              ${link.from === id ? html`to <code>${link.to}</code>` : html`from <code>${link.from}</code>`}:
              ${" "}${rate(link.bytes_per_s)}, ${short(link.transfers)} transfers${link.failures ? `, ${link.failures} failed` : ""}
            </li>`,
        )}
      </ul>`}
    <p class="actions">
      ${mayKill && isWorker(of) && html`<${KillButton} key=${id} of=${of} />`}
      <button onClick=${onClose}>Close</button>
    </p>
  </aside>`;
}

function Summary({ roles, links, samples, about }) {
  const workers = [...roles.prefill, ...roles.decode];
  const all = [...roles.frontend, ...roles.bootstrap, ...workers];
  const sum = (list, name) => list.reduce((total, of) => total + (of[name] || 0), 0);
  const latest = samples[samples.length - 1];
  const unwell = all.filter((of) => of.state !== "up");
  const total = sum(roles.decode, "total");
  const queued = sum(roles.decode, "waiting") + (latest?.waiting || 0);
  const stuck = hasDecode(roles) ? 0 : sum(roles.frontend, "running"); // requests that were admitted, but have no instance to compute them
  const counts = {};
  for (const of of unwell) counts[of.state] = (counts[of.state] || 0) + 1;
  const hasNone = all.length > 0 && !roles.decode.some((of) => of.state === "up" || of.state === "late");
  const isDown = hasNone || about.nats_away > 0;
  const words = Object.entries(counts).map(([state, n]) => `${n} ${STATES[state]}`);
  if (hasNone) words.unshift("no decode worker");
  if (about.nats_away) words.splice(0, words.length, `no answer from NATS for ${age(about.nats_away)}`);
  const figures = [
    ["instances", `${all.length}`],
    ["requests running", short(sum(roles.decode, "running"))],
    ["waiting", short(queued + stuck)],
    ["KV on decode", total ? percent(sum(roles.decode, "held") / total) : "–"],
    ["rooms in flight", short(sum(roles.bootstrap, "rooms") || sum(roles.decode, "rooms"))],
    ["tokens/s", short(sum(roles.decode, "tps") || latest?.out || 0)],
    ["KV moving", rate(sum([...links.values()], "bytes_per_s"))],
  ];
  return html`<dl class="summary" aria-label="Summary">
    ${figures.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    <div class=${isDown ? "down" : words.length ? "unwell" : ""}>
      <dt>state</dt>
      <dd>${words.join(", ") || (all.length ? "all up" : "–")}</dd>
    </div>
  </dl>`;
}

export function MeshPicture({ selected, mayKill }) {
  const { instances, links, samples, about } = useMesh();
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const roles = byRole(instances);
  const select = (id) => {
    location.hash = id === selected ? "#/mesh" : `#/mesh/${id}`;
  };
  const close = () => {
    location.hash = "#/mesh";
    box.current?.querySelector(`[data-id="${CSS.escape(selected)}"]`)?.focus();
  };
  const layout = `${width} ${[...instances.keys()].length} ${roles.prefill.map((of) => of.id)} ${roles.decode.map((of) => of.id)}`;
  return html`<div class=${`mesh ${selected ? "with-detail" : ""}`}>
    <h1 class="unseen">Mesh</h1>
    <${Summary} roles=${roles} links=${links} samples=${samples} about=${about} />
    <div class="flow" ref=${box}>
      <${Arrows} links=${links} layout=${layout} box=${box} selected=${selected} />
      ${COLUMNS.map(
        ([name, of]) => html`<div key=${name} class=${`column ${name}`}>
          ${of.map(
            (role) =>
              html`<${Group} key=${role} role=${role} instances=${roles[role]} selected=${selected} onSelect=${select} />`,
          )}
        </div>`,
      )}
    </div>
    ${selected &&
    html`<${Detail} of=${instances.get(selected)} id=${selected} links=${links} mayKill=${mayKill} onClose=${close} />`}
    <${Links} links=${links} isAsked=${about.asked} />
    <p class="legend" aria-hidden="true">
      <span><i class="swatch held"></i>KV held by requests</span>
      <span><i class="swatch cached"></i>prefix cache</span>
      <span><i class="swatch draining"></i>draining</span>
      <span><i class="swatch silent"></i>silent</span>
      <span><i class="swatch warming"></i>warming up</span>
    </p>
  </div>`;
}
