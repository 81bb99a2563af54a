// Fetches one trace. Each process exports its own spans, so it is fetched repeatedly until it is complete.
import { useEffect, useState } from "preact/hooks";
import { callJson, reason } from "./api.js";

const EVERY_MS = 700;
const TRIES = 12; // attempts until the trace has the frontend's root span
const LATE_TRIES = 4; // further attempts, for spans of processes that export later
const NOTHING = { id: "", trace: null, fault: "", isWaiting: true };

// `id` is empty while there is no trace. `afterMs`: delay before the first attempt.
export function useTrace(id, afterMs = 0) {
  const [found, setFound] = useState(NOTHING);
  useEffect(() => {
    if (!id) return undefined;
    let left = TRIES;
    let hasFirst = false;
    const stop = new AbortController();
    const ask = async () => {
      left -= 1;
      try {
        const trace = await callJson(`ui/api/traces/${encodeURIComponent(id)}`, { signal: stop.signal });
        if (!hasFirst && trace.spans.some((span) => span.attributes["kvmesh.request_id"])) {
          hasFirst = true;
          left = LATE_TRIES;
        }
        const isSame = (was) =>
          was.id === id && was.trace?.spans.length === trace.spans.length && was.trace.left_out === trace.left_out;
        setFound((was) => (isSame(was) ? was : { id, trace, fault: "", isWaiting: false }));
      } catch (error) {
        if (stop.signal.aborted) return;
        const isWaiting = left > 0;
        setFound((was) => (was.id === id && was.trace ? was : { id, trace: null, fault: reason(error), isWaiting }));
      }
      if (left > 0 && !stop.signal.aborted) timer = setTimeout(ask, EVERY_MS);
    };
    let timer = setTimeout(ask, afterMs);
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return found.id === id ? found : NOTHING;
}
