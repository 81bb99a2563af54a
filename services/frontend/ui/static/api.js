// Requests to this frontend, with the API key if one was entered. The key is kept until the tab is closed.

const KEY = "kvmesh.key";
let onRefused = () => {};

export const apiKey = () => sessionStorage.getItem(KEY) || "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// Sets a callback, which gets a message when the server requires a key.
export function whenRefused(callback) {
  onRefused = callback;
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Browsers have words of their own for a lost connection: "Failed to fetch", "network error".
export const reason = (error) => (error instanceof TypeError ? "The connection to the frontend was lost." : error.message);

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  const answer = await fetch(path, { ...options, headers, credentials: "omit" });
  if (answer.ok) return answer;
  const message = await messageOf(answer);
  if (answer.status === 401) onRefused(apiKey() ? "Invalid API key." : "");
  throw new ApiError(answer.status, message);
}

export async function callJson(path, options) {
  return (await call(path, options)).json();
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`.trim();
  }
}

// Yields the server-sent events of an answer as [event, data] pairs.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end = text.indexOf("\n\n");
    let from = 0;
    while (end >= 0) {
      yield parsed(text.slice(from, end));
      from = end + 2;
      end = text.indexOf("\n\n", from);
    }
    text = text.slice(from);
  }
}

function parsed(block) {
  let event = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return [event, data];
}
