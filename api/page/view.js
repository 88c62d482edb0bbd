// A capture, alone or held against another: what it is, and the view that fits the chosen site.

import { html, useState } from "./vendor/preact-htm.js";
import { ATTENTION, AttentionView, attendingLayers } from "./attention.js";
import { nameOf } from "./captures.js";
import { Choice } from "./controls.js";
import { isRunning, useManifest } from "./data.js";
import { MapView } from "./maps.js";
import { ProbeView } from "./probe.js";
import { probeOf } from "./scores.js";

export function View({ ref_, compared, limits, visit, onCompare }) {
  const { manifest: found, error } = useManifest(ref_, visit);
  const { manifest: foundOther, error: otherError } = useManifest(compared, visit);
  const [site, setSite] = useState(null);
  const [how, setHow] = useState({ measure: "norm", comparison: "beside", mode: "linear", direction: null });

  if (error) return html`<section class="view" id="capture"><p class="notice" role="alert">${error.message}</p></section>`;
  if (!found) return html`<section class="view" id="capture"><p class="soft">loading…</p></section>`;
  if (found.captures) return html`<section class="view" id="capture"><h1>${found.captures.length} captures</h1>
    <ul class="samples">${found.captures.map((id) => html`<li><a href=${`#${id}`}>${id}</a></li>`)}</ul></section>`; // of one name

  const other = compared && foundOther && !foundOther.captures ? foundOther : null;
  const sites = Object.keys(found.resolved?.layers ?? {});
  if (attendingLayers(found).length) sites.push(ATTENTION);
  const chosen = sites.includes(site) ? site : sites[0];
  const probe = probeOf(found, chosen);
  const shared = { manifest: found, other, compared, otherError, limits, site: chosen, how,
    onHow: (part) => setHow((now) => ({ ...now, ...part })),
    sites: html`<${Choice} label="Site" value=${chosen} options=${sites} onChange=${setSite} />` };
  return html`<section class="view" id="capture" aria-label="capture">
    <${Head} manifest=${found} />
    ${compared && html`<p class="against">compared with <b>${other ? nameOf(other) : compared}</b>
      <button class="plain" onClick=${() => onCompare(null)}>stop comparing</button></p>`}
    ${!sites.length ? html`<p class="soft">${isRunning(found) ? "The engine has not begun yet." : "This capture asked for no rows."}</p>`
    : chosen === ATTENTION ? html`<${AttentionView} key=${found.id} ...${shared} />`
    : probe ? html`<${ProbeView} key=${`${found.id} ${chosen}`} ...${shared} probe=${probe} />` : html`<${MapView} key=${found.id} ...${shared} />`}
  </section>`;
}

function Head({ manifest }) {
  const [captured, expected] = [manifest.captured, manifest.expected];
  return html`<header class="head">
    <div><h1>${nameOf(manifest)}</h1><p class="soft id">${manifest.id}</p></div>
    <dl>
      <div><dt>status</dt><dd><i class=${`dot ${manifest.status}`} aria-hidden="true"></i>${manifest.status}${isRunning(manifest) ? html`<span class="live">live</span>` : null}</dd></div>
      <div><dt>model</dt><dd>${manifest.engine?.model?.split("/").at(-1) ?? "–"}${manifest.adapter ? ` + ${manifest.adapter}` : ""}</dd></div>
      ${manifest.engine?.name && html`<div><dt>engine</dt><dd>${manifest.engine.name}</dd></div>`}
      <div><dt>tokens</dt><dd>${manifest.prompt_len} + ${Math.max(0, manifest.total_len - manifest.prompt_len)}</dd></div>
      <div><dt>rows</dt><dd>${captured} of ${expected}${expected > captured ? html` <span class="lack">${expected - captured} missing</span>` : null}</dd></div>
      <div><dt>finish</dt><dd>${manifest.finish_reason ?? "–"}</dd></div>
    </dl>
  </header>`;
}
