// The page: the list on the left, a capture on the right; what is open stands in the address, so it can be shared.

import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { Captures, NewCapture } from "./captures.js";
import { json, key } from "./service.js";
import { OpenSweep, SweepView } from "./sweep.js";
import { View } from "./view.js";

const NOTHING = { armed: {}, probes: {}, limits: {}, engines: {}, model: null };

const opened = () => {
  const [ref, compared] = decodeURIComponent(location.hash.slice(1)).split("~");
  return { ref: ref || null, compared: compared || null };
};

function App() {
  const [{ ref, compared }, setOpened] = useState(opened);
  const [visit, setVisit] = useState(0); // another key: ask for everything again
  const [about, setAbout] = useState(NOTHING);
  const [sweep, setSweep] = useState(null); // of a file, so it stands in no address
  useEffect(() => {
    const moved = () => {
      setSweep(null);
      setOpened(opened());
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    Promise.all([json("v1/capabilities"), json("v1/models").catch(() => ({ data: [] }))])
      .then(([{ armed, probes, limits, engines = {} }, models]) =>
        setAbout({ armed, probes, limits, engines, model: models.data[0]?.id ?? null }))
      .catch((error) => setAbout({ ...NOTHING, error }));
  }, [visit]);
  const open = (id) => {
    setSweep(null);
    location.hash = encodeURIComponent(id);
  };
  const compare = (id) => { location.hash = encodeURIComponent(id ? `${ref}~${id}` : ref); };
  return html`
    <header class="top">
      <a class="brand" href="#" onClick=${() => setSweep(null)}><img src="page/icon.svg" alt="" width="22" height="22" /> vllm-tap</a>
      <span class="soft model">${about.model?.replace(/^\/.*\//, "") ?? (about.error ? "" : "no model")}</span>
      <${Engines} engines=${about.engines} />
      <${Key} onChange=${() => setVisit((n) => n + 1)} needed=${about.error?.status === 401} />
    </header>
    <div class="columns">
      <aside><${NewCapture} armed=${about.armed} probes=${about.probes} model=${about.model} onOpen=${open} />
        <${OpenSweep} onOpen=${setSweep} />
        <${Captures} open=${ref} compared=${compared} visit=${visit} onOpen=${open} onCompare=${compare} /></aside>
      <main>${sweep ? html`<${SweepView} key=${sweep.at} sweep=${sweep} onClose=${() => setSweep(null)} />`
    : ref ? html`<${View} ref_=${ref} compared=${compared} limits=${about.limits} visit=${visit} onCompare=${compare} />`
    : html`<section class="view welcome" id="capture"><h1>Read the inside of a model while it serves</h1>
        <p>Choose a capture on the left. Each is drawn as a map: tokens to the right, layers upwards, one number in each
        cell; the scores of a probe are drawn as its text in colours. Move with the mouse or the arrow keys; Enter opens a
        row; ⇄ holds a second capture against the first.</p></section>`}</main>
    </div>`;
}

// Of several engines behind the service which are up; one that is away says why.
function Engines({ engines }) {
  const names = Object.keys(engines);
  return names.length ? html`<ul class="engines" aria-label="engines">${names.map((name) => html`<li key=${name}
    class=${engines[name].up ? "soft" : "lack"} title=${engines[name].away ?? `serves ${engines[name].models.join(", ")}`}>
    ${name}${engines[name].up ? "" : " (away)"}</li>`)}</ul>` : null;
}

function Key({ needed, onChange }) {
  const [held, setHeld] = useState(Boolean(key.get()));
  const [typing, setTyping] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    key.set(new FormData(event.target).get("key").trim());
    setHeld(Boolean(key.get()));
    setTyping(false);
    onChange();
  };
  const forget = () => {
    key.set("");
    setHeld(false);
    onChange();
  };
  if (typing || (needed && !held)) {
    return html`<form class="key-form" onSubmit=${submit}><input name="key" type="password" autocomplete="off" aria-label="API key"
      placeholder="API key" required /><button class="primary">Use</button></form>`;
  }
  return held ? html`<span class="key-form">${needed && html`<span class="lack">this key is refused</span>`}
      <button class="plain" onClick=${forget}>Forget the key</button></span>`
    : html`<span class="key-form"><button class="plain" onClick=${() => setTyping(true)}>API key</button></span>`;
}

render(html`<${App} />`, document.getElementById("app"));
