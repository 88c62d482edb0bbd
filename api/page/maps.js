// A site as a map of layers × tokens: what is measured, how it is coloured, which part is shown.

import { html, useMemo, useState } from "./vendor/preact-htm.js";
import { nameOf } from "./captures.js";
import { scaleOf, shown } from "./colours.js";
import { Choice, Pager } from "./controls.js";
import { difference, endOf, useMap, useTexts } from "./data.js";
import { HeatMap, Legend, ValueTable, tokenText, visible } from "./heatmap.js";
import { Row } from "./row.js";

export const SHOWN_MAX = 512; // positions in one picture
const MEASURES = { norm: "norm", cosine: "cosine to a token", projection: "projection on a direction" };
const COMPARISONS = { beside: "side by side", difference: "difference", distance: "distance of the rows", cosine: "cosine of the rows" };
export const MODES = { linear: "linear", log: "log", layer: "within each layer" };

export function MapView({ manifest, other, compared, otherError, limits, site, sites, how, onHow }) {
  const { measure, comparison, mode, direction } = how;
  const [anchor, setAnchor] = useState(0);
  const [page, setPage] = useState(0);
  const [selected, setSelected] = useState(null);
  const [opened, setOpened] = useState(null);

  const info = manifest.sites.find((each) => each.site === site);
  const layers = manifest.resolved.layers[site].length;
  const end = Math.max(endOf(manifest), compared ? endOf(other) : 0);
  const step = Math.max(1, Math.min(SHOWN_MAX, Math.floor((limits.map_numbers_max ?? 1e8) / (2 * layers * (info?.decoded_width || 1)))));
  const [start, stop] = [page * step, Math.min((page + 1) * step, Math.max(end, 1))];
  const rows = compared && (comparison === "distance" || comparison === "cosine");
  const ready = measure !== "projection" || direction;
  const base = ready && { site, start, stop, direction,
    measure: rows ? comparison : measure, position: !rows && measure === "cosine" ? anchor : null };
  const first = useMap(base && { ...base, ref: manifest.id, against: rows ? compared : null,
    end: rows ? end : endOf(manifest), status: manifest.status });
  const second = useMap(base && other && !rows && { ...base, ref: other.id, end: endOf(other), status: other.status });
  const [map, map2] = [first.map ?? (first.loading && first.before?.capture === manifest.id ? first.before : null), compared && !rows ? second.map : null];
  const texts = useTexts(manifest, start, stop);
  const texts2 = useTexts(other, start, stop);

  const differs = compared && comparison === "difference" && map && map2;
  const maps = useMemo(() => (differs ? [difference(map, map2)] : [map, map2].filter(Boolean)), [map, map2, differs]);
  const signed = Boolean(differs || (!rows && measure !== "norm") || (rows && comparison === "cosine"));
  const fixed = maps[0]?.measure === "cosine" && mode === "linear" ? [-1, 1] : undefined;
  const scale = useMemo(() => maps.length && scaleOf(maps, { mode, signed, fixed }), [maps, mode, signed, fixed?.[0]]);

  const name = measure === "cosine" && !rows ? `cosine to position ${anchor}` : maps[0]?.measure ?? measure;
  const titles = compared && !differs && !rows ? [nameOf(manifest), other ? nameOf(other) : compared] : [
    differs ? `${nameOf(other)} less ${nameOf(manifest)}` : rows ? `${nameOf(manifest)} against ${other ? nameOf(other) : compared}` : "Layers × tokens"];
  const problem = first.error ?? (compared && (otherError ?? (rows ? null : second.error)));
  const either = differs || rows ? Array.from({ length: stop }, (_, at) => texts[at] ?? texts2[at]) : texts;
  const texting = [either, texts2];
  const span = Math.max(0, ...maps.map((each) => each.stop - each.start));
  return html`
    <div class="controls">${sites}
      <${Choice} label="Measure" value=${measure} options=${MEASURES} onChange=${(each) => onHow({ measure: each })} disabled=${rows} />
      ${compared && html`<${Choice} label="Comparison" value=${comparison} options=${COMPARISONS} onChange=${(each) => onHow({ comparison: each })} />`}
      <${Choice} label="Colours" value=${mode} options=${MODES} onChange=${(each) => onHow({ mode: each })} />
      ${measure === "projection" && !rows && html`<${Upload} direction=${direction} onLoad=${(each) => onHow({ direction: each })} />`}
      ${measure === "cosine" && !rows && html`<button class="plain" disabled=${!selected} onClick=${() => setAnchor(selected.position)}>
        ${selected ? `Compare with the token at ${selected.position}` : "Choose a token in the map"}</button>`}
      <${Pager} page=${page} step=${step} end=${end} onChange=${setPage} />
    </div>
    ${problem && html`<p class="notice" role="alert">${problem.message}</p>`}
    ${!ready && html`<p class="soft">Choose a file with a direction: npy, or safetensors with one tensor, of ${info?.width ?? "the site's"} numbers.</p>`}
    ${maps.length && scale ? html`<${Tokens} map=${maps[0]} texts=${either} others=${other} scale=${scale} prompt=${manifest.prompt_len} selected=${selected} onSelect=${setSelected} />
      <${Legend} scale=${scale} maps=${maps} name=${name} />
      <div class=${maps.length > 1 ? "pair" : ""}>${maps.map((each, i) => html`<${HeatMap} key=${i} id=${`map-${i}`} title=${titles[i]} map=${each} span=${span}
        texts=${texting[i]} scale=${scale} prompt=${(i ? other : manifest).prompt_len} selected=${selected} onSelect=${setSelected} onOpen=${(cell) => setOpened({ ...cell, of: i })} />`)}</div>
      <details class="as-table"><summary>Values as a table</summary>${maps.map((each, i) => html`<${ValueTable} title=${titles[i]} map=${each} texts=${texting[i]} selected=${selected} />`)}</details>` : null}
    ${opened && maps[opened.of] && html`<${Row} manifest=${opened.of ? other : manifest} less=${differs || rows ? other : null} map=${maps[opened.of]} texts=${texting[opened.of]} cell=${opened} onClose=${() => setOpened(null)} />`}`;
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
