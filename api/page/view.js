// A capture as a map, alone or held against another: what is measured, how it is coloured, which part is shown.

import { html, useEffect, useMemo, useState } from "/page/vendor/preact-htm.js";
import { nameOf } from "/page/captures.js";
import { scaleOf, shown } from "/page/colours.js";
import { isRunning, useManifest, useMap, useTexts } from "/page/data.js";
import { HeatMap, Legend, ValueTable, tokenText, visible } from "/page/heatmap.js";
import { Row } from "/page/row.js";

const SHOWN_MAX = 512; // positions in one picture
const MEASURES = { norm: "norm", cosine: "cosine to a token", projection: "projection on a direction" };
const COMPARISONS = { beside: "side by side", difference: "difference", distance: "distance of the rows", cosine: "cosine of the rows" };
const MODES = { linear: "linear", log: "log", layer: "within each layer" };

const endOf = (manifest) => Math.max(manifest?.end ?? 0, (manifest?.total_len ?? 0) - 1);
const sitesOf = (manifest) => Object.keys(manifest?.resolved?.layers ?? {});

/** Every cell of `b` less that of `a`; a row missing in either is missing, with its reason. */
function difference(a, b) {
  const columns = Math.max(a.stop, b.stop) - a.start;
  const values = a.layers.map((layer, row) => {
    const other = b.values[b.layers.indexOf(layer)] ?? [];
    return Array.from({ length: columns }, (_, i) => {
      const [left, right] = [a.values[row][i] ?? null, other[i] ?? null];
      return left === null || right === null ? null : right - left;
    });
  });
  const past = (map) => (map.stop < a.start + columns
    ? map.layers.map((layer) => ({ layer, start: map.stop, stop: a.start + columns, reason: "past_the_end", capture: map.capture })) : []);
  return { ...a, stop: a.start + columns, values, measure: `difference of ${a.measure}`,
    token_ids: Array.from({ length: columns }, (_, i) => a.token_ids[i] ?? b.token_ids[i]),
    missing: [...a.missing, ...past(a), ...b.missing, ...past(b)] };
}

export function View({ ref_, compared, limits, visit, onCompare }) {
  const { manifest: found, error } = useManifest(ref_, visit);
  const manifest = found?.captures ? null : found; // else a name of several
  const { manifest: foundOther, error: otherError } = useManifest(compared, visit);
  const other = foundOther?.captures ? null : foundOther;
  const [site, setSite] = useState(null);
  const [measure, setMeasure] = useState("norm");
  const [comparison, setComparison] = useState("beside");
  const [mode, setMode] = useState("linear");
  const [anchor, setAnchor] = useState(0);
  const [direction, setDirection] = useState(null);
  const [page, setPage] = useState(0);
  const [selected, setSelected] = useState(null);
  const [opened, setOpened] = useState(null);
  useEffect(() => { setPage(0); setSelected(null); setOpened(null); setAnchor(0); }, [ref_]);

  const sites = sitesOf(manifest);
  const chosen = sites.includes(site) ? site : sites[0];
  const info = manifest?.sites.find((each) => each.site === chosen);
  const layers = manifest?.resolved?.layers?.[chosen]?.length ?? 1;
  const end = Math.max(endOf(manifest), compared ? endOf(other) : 0);
  const step = Math.max(1, Math.min(SHOWN_MAX, Math.floor((limits.map_numbers_max ?? 1e8) / (2 * layers * (info?.decoded_width || 1)))));
  const [start, stop] = [page * step, Math.min((page + 1) * step, Math.max(end, 1))];
  const rows = compared && (comparison === "distance" || comparison === "cosine");
  const ready = measure !== "projection" || direction;
  const base = ready && { site: chosen, start, stop, direction,
    measure: rows ? comparison : measure, position: !rows && measure === "cosine" ? anchor : null };
  const first = useMap(base && manifest && { ...base, ref: manifest.id, against: rows ? compared : null,
    end: rows ? end : endOf(manifest), status: manifest.status });
  const second = useMap(base && other && !rows && { ...base, ref: other.id, end: endOf(other), status: other.status });
  const [map, map2] = [first.map ?? (first.loading && first.before?.capture === manifest?.id ? first.before : null), compared && !rows ? second.map : null];
  const texts = useTexts(manifest, start, stop);
  const texts2 = useTexts(compared ? other : null, start, stop);

  const differs = compared && comparison === "difference" && map && map2;
  const maps = useMemo(() => (differs ? [difference(map, map2)] : [map, map2].filter(Boolean)), [map, map2, differs]);
  const signed = Boolean(differs || (!rows && measure !== "norm") || (rows && comparison === "cosine"));
  const fixed = maps[0]?.measure === "cosine" && mode === "linear" ? [-1, 1] : undefined;
  const scale = useMemo(() => maps.length && scaleOf(maps, { mode, signed, fixed }), [maps, mode, signed, fixed?.[0]]);

  if (error) return html`<section class="view" id="capture"><p class="notice" role="alert">${error.message}</p></section>`;
  if (!found) return html`<section class="view" id="capture"><p class="soft">loading…</p></section>`;
  if (!manifest) return html`<section class="view" id="capture"><h1>${found.captures.length} captures</h1>
    <ul class="samples">${found.captures.map((id) => html`<li><a href=${`#${id}`}>${id}</a></li>`)}</ul></section>`;

  const name = measure === "cosine" && !rows ? `cosine to position ${anchor}` : maps[0]?.measure ?? measure;
  const titles = compared && !differs && !rows ? [nameOf(manifest), other ? nameOf(other) : compared] : [
    differs ? `${nameOf(other)} less ${nameOf(manifest)}` : rows ? `${nameOf(manifest)} against ${other ? nameOf(other) : compared}` : "Layers × tokens"];
  const problem = first.error ?? (compared && (otherError ?? (rows ? null : second.error)));
  const either = differs || rows ? Array.from({ length: stop }, (_, at) => texts[at] ?? texts2[at]) : texts;
  const texting = [either, texts2];
  const span = Math.max(0, ...maps.map((each) => each.stop - each.start));
  return html`<section class="view" id="capture" aria-label="capture">
    <${Head} manifest=${manifest} />
    ${compared && html`<p class="against">compared with <b>${other ? nameOf(other) : compared}</b>
      <button class="plain" onClick=${() => onCompare(null)}>stop comparing</button></p>`}
    <div class="controls">
      <${Choice} label="Site" value=${chosen} options=${sites} onChange=${setSite} />
      <${Choice} label="Measure" value=${measure} options=${MEASURES} onChange=${setMeasure} disabled=${rows} />
      ${compared && html`<${Choice} label="Comparison" value=${comparison} options=${COMPARISONS} onChange=${setComparison} />`}
      <${Choice} label="Colours" value=${mode} options=${MODES} onChange=${setMode} />
      ${measure === "projection" && !rows && html`<${Upload} direction=${direction} onLoad=${setDirection} />`}
      ${measure === "cosine" && !rows && html`<button class="plain" disabled=${!selected} onClick=${() => setAnchor(selected.position)}>
        ${selected ? `Compare with the token at ${selected.position}` : "Choose a token in the map"}</button>`}
      ${end > step && html`<span class="pager"><button class="plain" aria-label="earlier positions" disabled=${page === 0} onClick=${() => setPage(page - 1)}>‹</button>
        positions ${start}–${stop - 1} of ${end}
        <button class="plain" aria-label="later positions" disabled=${stop >= end} onClick=${() => setPage(page + 1)}>›</button></span>`}
    </div>
    ${problem && html`<p class="notice" role="alert">${problem.message}</p>`}
    ${!ready && html`<p class="soft">Choose a file with a direction: npy, or safetensors with one tensor, of ${info?.width ?? "the site's"} numbers.</p>`}
    ${!sites.length && html`<p class="soft">${isRunning(manifest) ? "The engine has not begun yet." : "This capture asked for no rows."}</p>`}
    ${maps.length && scale ? html`<${Tokens} map=${maps[0]} texts=${either} others=${compared ? other : null} scale=${scale} prompt=${manifest.prompt_len} selected=${selected} onSelect=${setSelected} />
      <${Legend} scale=${scale} maps=${maps} name=${name} />
      <div class=${maps.length > 1 ? "pair" : ""}>${maps.map((each, i) => html`<${HeatMap} key=${i} id=${`map-${i}`} title=${titles[i]} map=${each} span=${span}
        texts=${texting[i]} scale=${scale} prompt=${(i ? other : manifest).prompt_len} selected=${selected} onSelect=${setSelected} onOpen=${(cell) => setOpened({ ...cell, of: i })} />`)}</div>
      <details class="as-table"><summary>Values as a table</summary>${maps.map((each, i) => html`<${ValueTable} title=${titles[i]} map=${each} texts=${texting[i]} selected=${selected} />`)}</details>` : null}
    ${opened && maps[opened.of] && html`<${Row} manifest=${opened.of ? other : manifest} less=${differs || rows ? other : null} map=${maps[opened.of]} texts=${texting[opened.of]} cell=${opened} onClose=${() => setOpened(null)} />`}
  </section>`;
}

function Head({ manifest }) {
  const [captured, expected] = [manifest.captured, manifest.expected];
  return html`<header class="head">
    <div><h1>${nameOf(manifest)}</h1><p class="soft id">${manifest.id}</p></div>
    <dl>
      <div><dt>status</dt><dd><i class=${`dot ${manifest.status}`} aria-hidden="true"></i>${manifest.status}${isRunning(manifest) ? html`<span class="live">live</span>` : null}</dd></div>
      <div><dt>model</dt><dd>${manifest.engine?.model?.split("/").at(-1) ?? "–"}</dd></div>
      <div><dt>tokens</dt><dd>${manifest.prompt_len} + ${Math.max(0, manifest.total_len - manifest.prompt_len)}</dd></div>
      <div><dt>rows</dt><dd>${captured} of ${expected}${expected > captured ? html` <span class="lack">${expected - captured} missing</span>` : null}</dd></div>
      <div><dt>finish</dt><dd>${manifest.client_finish_reason ?? manifest.finish_reason ?? "–"}</dd></div>
    </dl>
  </header>`;
}

function Choice({ label, value, options, onChange, disabled }) {
  const pairs = Array.isArray(options) ? options.map((each) => [each, each]) : Object.entries(options);
  return html`<label class="choice">${label}<select value=${value} disabled=${disabled} onChange=${(event) => onChange(event.target.value)}>
    ${pairs.map(([each, text]) => html`<option value=${each} selected=${each === value}>${text}</option>`)}</select></label>`;
}

function Upload({ direction, onLoad }) {
  const load = async (event) => {
    const [file] = event.target.files;
    if (file) onLoad({ name: file.name, bytes: await file.arrayBuffer(), at: Date.now() });
  };
  return html`<label class="choice">Direction<input type="file" accept=".npy,.safetensors" onChange=${load} />
    ${direction && html`<span class="soft">${direction.name}</span>`}</label>`;
}

/** The text itself, each token in the colour of its value in the chosen layer. */
function Tokens({ map, texts, others, scale, prompt, selected, onSelect }) {
  const layer = selected && map.layers.includes(selected.layer) ? selected.layer : map.layers.at(-1);
  const row = map.layers.indexOf(layer);
  const tokens = others && [...others.prompt_token_ids, ...others.output_token_ids];
  return html`<div class="tokens" role="group" aria-label=${`tokens, coloured by layer ${layer}`}>
    ${map.token_ids.map((id, i) => {
    const position = map.start + i;
    const value = map.values[row]?.[i] ?? null;
    const differs = tokens && tokens[position] !== undefined && id !== null && tokens[position] !== id;
    const kind = [selected?.position === position && "chosen", value === null && "hatch", position >= prompt && "made", differs && "differs"].filter(Boolean);
    return html`<span class=${["tok", ...kind].join(" ")} key=${position} title=${`position ${position}, layer ${layer}: ${value === null ? "no row" : shown(value)}${differs ? ", another token in the other capture" : ""}`}
      onClick=${() => onSelect({ layer, position })}><i style=${{ background: value === null ? "" : scale.colour(value, row) }}></i>${visible(tokenText(texts[position], id))}</span>`;
  })}</div>`;
}
