// The live feed: a snapshot, then changes. Views are drawn at most ten times a second.
import { useEffect, useReducer } from "preact/hooks";
import { call, events } from "./api.js";

const DRAW_EVERY_MS = 100;
const HIDDEN_FOR_MS = 30000; // a tab that is hidden for longer stops the feed
const RETRY_MS = [500, 1000, 2000, 5000];
const KEPT_SAMPLES = 450;

export const mesh = {
  instances: new Map(), // by id; an object is replaced when it changes
  links: new Map(), // by "prefill>decode"
  about: {},
  samples: [],
  status: "connecting", // or live, lost, closed
  fault: "", // why the server refused the feed
  updates: 0,
};

const listeners = new Set();
let drawnAt = 0;
let scheduled = false;
let running = null;

export function useMesh() {
  const [, draw] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    listeners.add(draw);
    return () => listeners.delete(draw);
  }, []);
  return mesh;
}

function changed() {
  if (scheduled) return;
  scheduled = true;
  const wait = DRAW_EVERY_MS - (performance.now() - drawnAt);
  if (wait > 0) setTimeout(() => requestAnimationFrame(draw), wait);
  else requestAnimationFrame(draw);
}

function draw() {
  scheduled = false;
  drawnAt = performance.now();
  for (const listener of listeners) listener();
}

function setStatus(status) {
  mesh.status = status;
  changed();
}

export function apply(event, fields) {
  mesh.updates += 1;
  if (event === "snapshot") {
    mesh.instances = new Map(Object.entries(fields.instances).map(([id, of]) => [id, { ...of, id }]));
    mesh.links = new Map(Object.entries(fields.links));
    mesh.about = fields.about;
    mesh.samples = fields.samples;
  } else {
    merge(mesh.instances, fields.instances, fields.instances_gone, true);
    merge(mesh.links, fields.links, fields.links_gone, false);
    if (fields.about) mesh.about = { ...mesh.about, ...fields.about };
    if (fields.samples) mesh.samples = joined(mesh.samples, fields.samples);
  }
  changed();
}

// Merges samples. A sample is sent again if another frontend's part arrives later.
function joined(known, samples) {
  const byTime = new Map(known.map((sample) => [sample.t, sample]));
  for (const sample of samples) byTime.set(sample.t, sample);
  return [...byTime.values()].sort((a, b) => a.t - b.t).slice(-KEPT_SAMPLES);
}

function merge(all, some, gone, named) {
  for (const [id, fields] of Object.entries(some || {})) {
    const known = all.get(id);
    all.set(id, known ? { ...known, ...fields } : named ? { ...fields, id } : fields);
  }
  for (const id of gone || []) all.delete(id);
}

export function follow() {
  if (running) running.abort();
  running = new AbortController();
  read(running.signal);
}

async function read(signal) {
  let failures = 0;
  while (!signal.aborted) {
    try {
      const answer = await call("ui/api/feed", { signal });
      failures = 0;
      mesh.fault = "";
      setStatus("live");
      for await (const [event, data] of events(answer)) apply(event, JSON.parse(data));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return setStatus("closed");
      mesh.fault = error.status ? error.message : ""; // such as a Host that is not allowed
    }
    setStatus("lost");
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => {
      running?.abort();
      running = null;
    }, HIDDEN_FOR_MS);
  } else if (!running) follow();
});
