// One row: the vector as bars, its largest entries, and the shown measure through the layers of its token.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { shown } from "./colours.js";
import { REASONS } from "./data.js";
import { tokenText, visible } from "./heatmap.js";
import { captureUrl, json, query } from "./service.js";

const TOP = 12;

/** The row's numbers, or why there are none. */
async function rowOf(manifest, map, cell, signal) {
  const answer = await json(captureUrl(manifest.id, `/activations${query({
    site: map.site, layer: cell.layer, start: cell.position, stop: cell.position + 1, format: "json" })}`), { signal });
  const [values] = answer.arrays[`${map.site}.${cell.layer}`];
  if (values) return { values };
  const gap = map.missing.find((each) => each.layer === cell.layer && each.start <= cell.position
    && cell.position < each.stop && (each.capture ?? map.capture) === manifest.id);
  return { why: gap ? REASONS[gap.reason] ?? gap.reason : "missing" };
}

/** The row at a cell; with `less`, another capture's row at the same place less this one. */
export function Row({ manifest, less, map, texts, cell, onClose }) {
  const [row, setRow] = useState(null);
  useEffect(() => {
    const ended = new AbortController();
    setRow(null);
    Promise.all([manifest, less].filter(Boolean).map((each) => rowOf(each, map, cell, ended.signal)))
      .then(([mine, theirs]) => setRow(!theirs || mine.why ? mine : theirs.why ? { why: `${theirs.why} (in the other capture)` }
        : { values: theirs.values.map((value, i) => value - mine.values[i]) }))
      .catch((error) => error.name !== "AbortError" && setRow({ why: error.message }));
    return () => ended.abort();
  }, [manifest.id, less?.id, map.site, cell.layer, cell.position, manifest.status]);
  const token = visible(tokenText(texts[cell.position], map.token_ids[cell.position - map.start]));
  return html`<section class="row-panel" aria-label="row" id="row">
    <header><h2><span class="token">${token}</span> ${less ? "difference of " : ""}${map.site}, layer ${cell.layer}, position ${cell.position}</h2>
      <button class="plain" onClick=${onClose} aria-label="close the row">✕</button></header>
    ${row === null ? html`<p class="soft">loading…</p>` : row.why ? html`<p class="notice hatch-soft">No row here: ${row.why}.</p>` : html`
      <${Bars} numbers=${row.values} codec=${map.codec} />`}
    <div class="row-parts">
      ${row?.values && html`<${Largest} numbers=${row.values} />`}
      <${ThroughLayers} map=${map} cell=${cell} />
    </div>
    <p class="soft code-line">In Python: <code>Client().capture("${manifest.id}")["${map.site}", ${cell.layer}]</code></p>
  </section>`;
}

/** The indices of the finite numbers, those of the largest first. */
const bySize = (numbers) => numbers.map((_, i) => i).filter((i) => numbers[i] !== null)
  .sort((a, b) => Math.abs(numbers[b]) - Math.abs(numbers[a]));

/** Of the numbers of a row; `names` where they have some. */
export function Largest({ numbers, names }) {
  const top = bySize(numbers).slice(0, TOP);
  const most = Math.abs(numbers[top[0]]) || 1;
  return html`<div><h3>Largest entries</h3>
    <table class="largest"><thead><tr><th scope="col">${names ? "score" : "dimension"}</th><th scope="col">value</th><th scope="col"><span class="sr">size</span></th></tr></thead>
      <tbody>${top.map((i) => html`<tr><td>${names?.[i] ?? i}</td><td class="number">${shown(numbers[i])}</td>
        <td><i class=${numbers[i] < 0 ? "size negative" : "size"} style=${{ width: `${(100 * Math.abs(numbers[i])) / most}%` }}></i></td></tr>`)}</tbody></table></div>`;
}

/** Every dimension from left to right, the largest marked. */
function Bars({ numbers, codec }) {
  const canvas = useRef();
  const order = bySize(numbers);
  const most = Math.abs(numbers[order[0]]) || 1;
  useLayoutEffect(() => {
    const [width, height] = [canvas.current.parentElement.clientWidth, 120];
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas.current, { width: width * ratio, height: height * ratio });
    const pen = canvas.current.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas.current);
    const each = width / numbers.length;
    pen.fillStyle = style.getPropertyValue("--line");
    pen.fillRect(0, height / 2, width, 1);
    order.forEach((_, k) => { // the largest last, on top of their neighbours
      const i = order[order.length - 1 - k];
      const size = (numbers[i] / most) * (height / 2 - 4);
      pen.fillStyle = style.getPropertyValue(k >= order.length - TOP ? "--accent" : "--accent-soft");
      pen.fillRect(i * each, size > 0 ? height / 2 - size : height / 2, Math.max(1, each - (each > 3 ? 1 : 0)), Math.abs(size));
    });
  }, [numbers]);
  const norm = Math.hypot(...order.map((i) => numbers[i]));
  const mean = order.reduce((sum, i) => sum + numbers[i], 0) / Math.max(1, order.length);
  return html`<p class="facts">${numbers.length} numbers · norm ${shown(norm)} · mean ${shown(mean)} · stored as ${codec}</p>
    <div class="bars"><canvas ref=${canvas} role="img" aria-label=${`the ${numbers.length} numbers of the row as bars; the table lists the largest`}></canvas></div>`;
}

function ThroughLayers({ map, cell }) {
  const column = cell.position - map.start;
  const values = map.values.map((row) => row[column] ?? null);
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known, 0), Math.max(...known)];
  const x = (i) => 6 + (i / (values.length - 1)) * 288;
  const y = (value) => 64 - ((value - low) / (high - low || 1)) * 56;
  let pen = "M";
  const path = values.map((value, i) => {
    if (value === null) { pen = "M"; return ""; }
    const step = `${pen}${x(i)} ${y(value)}`;
    pen = "L";
    return step;
  }).join(" ");
  const at = map.layers.indexOf(cell.layer);
  return html`<div><h3>${map.measure} through the layers</h3>
    <svg class="line" viewBox="0 0 300 72" role="img" aria-label=${`${map.measure} of this token from layer ${map.layers[0]} (${shown(values[0])}) to layer ${map.layers.at(-1)} (${shown(values.at(-1))})`}>
      <path d="M6 64H294" class="axis" /><path d=${path} class="curve" />
      ${values[at] !== null && html`<circle cx=${x(at)} cy=${y(values[at])} r="4" />`}
    </svg></div>`;
}
