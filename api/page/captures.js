// The list of captures, with its search, and the form that makes a new one.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { filtersOf, isRunning, listed, useCaptures } from "./data.js";
import { ask, eventsOf } from "./service.js";

const SETTLE_MS = 200;
const STATUSES = ["", "running", "complete", "empty", "incomplete", "failed"];

export function ago(ms) {
  const seconds = Math.max(0, (Date.now() - ms) / 1000);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(ms).toISOString().slice(0, 16).replace("T", " ");
}

export const shortId = (id) => `…${id.split(".")[0].slice(-6)}${id.includes(".") ? `.${id.split(".")[1]}` : ""}`;

/** What names a capture for a person: its own alias, else the end of its id. */
export const nameOf = (row) => row.aliases.find((alias) => !/^(chatcmpl|cmpl)-/.test(alias)) ?? shortId(row.id);

export function Captures({ open, compared, visit, onOpen, onCompare }) {
  const [text, setText] = useState("");
  const [asked, setAsked] = useState(""); // the text, once nothing was typed for a moment
  const [status, setStatus] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setAsked(text), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  const { rows, more, error } = useCaptures(filtersOf(asked, status), visit);
  const go = async (event) => { // a whole id or name can be opened as well, listed or not
    event.preventDefault();
    if (!text.trim()) return;
    const page = await listed(filtersOf(text, status), { limit: 1 }).catch(() => ({ data: [] }));
    onOpen(page.data[0]?.id ?? text.trim());
  };
  return html`<nav class="captures" aria-label="captures">
    <form role="search" onSubmit=${go}>
      <input type="search" aria-label="search captures" placeholder="Search" title="part of an id, a name or a tag; tag=value, site:resid_post, model:name" value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <select aria-label="status" value=${status} onChange=${(event) => setStatus(event.target.value)}>
        ${STATUSES.map((each) => html`<option value=${each}>${each || "any status"}</option>`)}</select>
    </form>
    ${error && html`<p class="notice">${error.status === 401 ? "A key is needed: enter it above." : error.message}</p>`}
    <p class="sr" aria-live="polite">${rows.length} captures</p>
    <ul>${rows.map((row) => html`<li key=${row.id} class=${row.id === open ? "open" : row.id === compared ? "compared" : ""}>
      <button class="entry" aria-current=${row.id === open ? "true" : undefined} onClick=${() => onOpen(row.id)}>
        <span class="entry-top"><i class=${`dot ${row.status}`} aria-hidden="true"></i><b>${nameOf(row)}</b><span class="soft">${ago(row.created_ms)}</span></span>
        <span class="entry-more">${row.status}${isRunning(row) ? "" : ` · ${row.total_len} tokens`} · ${row.sites.join(", ") || "no rows"}</span>
        ${Object.keys(row.tags).length ? html`<span class="entry-more">${Object.entries(row.tags).map(([name, value]) => html`<span class="tag">${name}=${value}</span>`)}</span>` : null}
      </button>
      ${open && row.id !== open && html`<button class="compare" aria-pressed=${row.id === compared ? "true" : "false"}
        aria-label=${`compare with ${nameOf(row)}`} title="compare" onClick=${() => onCompare(row.id === compared ? null : row.id)}>⇄</button>`}
    </li>`)}</ul>
    ${!rows.length && !error && html`<p class="soft empty">${asked.trim() || status ? "Nothing matches." : "No captures yet."}</p>`}
    ${more && html`<button class="plain more" onClick=${more}>Older captures</button>`}
  </nav>`;
}

/** What a filled form asks for: without a site but with a probe nothing but scores is taken. */
function chosen(form) {
  const [sites, probe] = [form.getAll("site"), form.getAll("probe")];
  return { ...(sites.length || !probe.length ? { sites } : {}), ...(probe.length ? { probe } : {}) };
}

/** A prompt for the model that serves here; the capture is opened as soon as it exists, and grows while it is watched. */
export function NewCapture({ armed, probes, model, onOpen }) {
  const [state, setState] = useState({ busy: false, text: "", error: null });
  const [sites, scored] = [Object.keys(armed), Object.keys(probes)];
  const send = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setState({ busy: true, text: "", error: null });
    try {
      const answer = await ask("v1/completions", {
        method: "POST", headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model, prompt: form.get("prompt"), max_tokens: Number(form.get("tokens")), stream: true,
          capture: { ...chosen(form), tags: { from: "page" } } }),
      });
      onOpen(answer.headers.get("X-Tap-Capture"));
      for await (const data of eventsOf(answer)) {
        if (data === "[DONE]") break;
        const piece = JSON.parse(data);
        if (piece.error) throw new Error(piece.error.message);
        const text = piece.choices?.[0]?.text;
        if (text) setState((now) => ({ ...now, text: now.text + text }));
      }
      setState((now) => ({ ...now, busy: false }));
    } catch (error) {
      setState((now) => ({ ...now, busy: false, error }));
    }
  };
  const box = (name, value, on) => html`<label class="inline"><input type="checkbox" name=${name} value=${value} defaultChecked=${on} /> ${value}</label>`;
  if (!model || !(sites.length || scored.length)) return null;
  return html`<details class="new"><summary>New capture</summary><form onSubmit=${send}>
    <label>Prompt<textarea name="prompt" rows="3" required>The capital of France is</textarea></label>
    <label class="inline">Tokens to generate <input name="tokens" type="number" min="1" max="2048" value="32" /></label>
    ${sites.length ? html`<fieldset><legend>Sites</legend>${sites.map((site, i) => box("site", site, i === 0 && !scored.length))}</fieldset>` : null}
    ${scored.length ? html`<fieldset><legend>Probes</legend>${scored.map((name, i) => box("probe", name, i === 0))}</fieldset>` : null}
    <button class="primary" disabled=${state.busy}>${state.busy ? "Generating…" : "Generate"}</button>
    ${state.error && html`<p class="notice" role="alert">${state.error.message}</p>`}
    ${state.text && html`<p class="generated">${state.text}</p>`}
  </form></details>`;
}
