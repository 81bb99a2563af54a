// The page: its parts by address, the state of the feed, and the form for an API key.
import { render } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { apiKey, callJson, setApiKey, whenRefused } from "./api.js";
import { Chat } from "./chat.js";
import { follow, useMesh } from "./feed.js";
import { html } from "./html.js";
import { Load } from "./load.js";
import { MeshPicture } from "./mesh.js";
import { Requests } from "./requests.js";

const PARTS = [
  ["mesh", "Mesh"],
  ["requests", "Requests"],
  ["load", "Load"],
  ["chat", "Chat"],
];
const STATUS = { connecting: "connecting", live: "live", lost: "reconnecting", closed: "key needed" };

function address() {
  const [part, rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { part: PARTS.some(([name]) => name === part) ? part : "mesh", rest: rest || "" };
}

function useAddress() {
  const [at, move] = useState(address);
  // not useEffect, which would run after the first paint and miss a change before it
  useLayoutEffect(() => {
    const moved = () => move(address());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return at;
}

function KeyForm({ message, onKey }) {
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    onKey(field.current.value.trim());
  };
  return html`<main class="key">
    <form onSubmit=${submit}>
      <h1>API key</h1>
      <p>This mesh requires an API key. It is kept in this tab until you close it.</p>
      <label for="key">Key</label>
      <input id="key" ref=${field} type="password" autocomplete="off" required aria-describedby="key-fault" />
      <p id="key-fault" class="fault" role="alert">${message}</p>
      <button class="primary" type="submit">Continue</button>
    </form>
  </main>`;
}

function Header({ part, onForget }) {
  const { status, about } = useMesh();
  return html`<header class="top">
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <span class="brand" title=${about.version ? `version ${about.version}` : ""}>kvmesh</span>
    <nav aria-label="Parts">
      ${PARTS.map(
        ([name, title]) =>
          html`<a key=${name} href=${`#/${name}`} aria-current=${part === name ? "page" : null}>${title}</a>`,
      )}
    </nav>
    <span class="about">${about.model ? `${about.model} · ${about.namespace}` : ""}</span>
    ${apiKey() && html`<button class="plain" onClick=${onForget}>Forget key</button>`}
    <span class=${`status ${status}`} role="status"><i aria-hidden="true"></i>${STATUS[status]}</span>
  </header>`;
}

function Fault() {
  const { fault } = useMesh();
  return fault && html`<p class="fault" role="alert">${fault}</p>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function App() {
  const { part, rest } = useAddress();
  const [refused, setRefused] = useState(null); // why a key is required; null: it is not
  const [mayKill, setMayKill] = useState(false);
  const enter = () => {
    setRefused(null);
    callJson("ui/api/about").then(
      (about) => {
        setMayKill(about.may_kill);
        follow();
      },
      (error) => error.status !== 401 && follow(),
    );
  };
  useEffect(() => {
    whenRefused((message) => setRefused(message));
    enter();
  }, []);
  useEffect(() => {
    document.title = `${PARTS.find(([name]) => name === part)[1]} · kvmesh`;
  }, [part]);
  const onKey = (key) => {
    setApiKey(key);
    enter();
  };
  const onForget = () => {
    setApiKey("");
    location.reload();
  };
  if (refused !== null) return html`<${KeyForm} message=${refused} onKey=${onKey} />`;
  return html`<${Header} part=${part} onForget=${onForget} />
    <main id="main" tabindex="-1">
      <${Fault} />
      ${part === "mesh" && html`<${MeshPicture} selected=${rest} mayKill=${mayKill} />`}
      ${part === "requests" && html`<${Requests} selected=${rest} />`}
      ${part === "load" && html`<${Load} />`}
      <${Chat} shown=${part === "chat"} mayKill=${mayKill} />
    </main>`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
