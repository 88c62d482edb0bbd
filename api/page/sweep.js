// A sweep of activation patching, from the file that `sweep.to_json` writes: read here, sent nowhere.

import { html, useMemo, useState } from "./vendor/preact-htm.js";
import { rangeOf, scaleOf, shown } from "./colours.js";
import { Pager } from "./controls.js";
import { HeatMap, Legend, ValueTable, visible } from "./heatmap.js";
import { SHOWN_MAX } from "./maps.js";

const FILE_MIB_MAX = 64;
const TRY = "choose the file that sweep.to_json(path) has written";

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number";
const isCount = (value) => Number.isInteger(value) && value >= 0;
const listOf = (what) => (value) => Array.isArray(value) && value.length > 0 && value.every(what);
const rises = (value) => value.every((each, i) => i === 0 || each > value[i - 1]);

/** The sweep that a file's text is; an Error names the field and what to do. */
export function sweepOf(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    const begun = text.startsWith('{"sweep":');
    throw new Error(begun ? `this is the file that a sweep goes on from (results=…): ${TRY}` : `this is no JSON: ${TRY}`);
  }
  const check = (name, what, fits) => {
    if (!fits(found?.[name])) throw new Error(`${name}: ${what} is needed there; ${TRY}`);
  };
  check("sites", "a list of names", listOf(isText));
  check("layers", "a list of rising numbers from 0", (value) => listOf(isCount)(value) && rises(value));
  for (const name of ["clean", "corrupted"]) check(name, "a list of token ids", listOf(isCount));
  check("positions", `a list of rising numbers below the ${found.corrupted.length} tokens of the prompts`,
    (value) => listOf(isCount)(value) && rises(value) && value.at(-1) < Math.min(found.clean.length, found.corrupted.length));
  check("measure", "the name of what was measured", isText);
  for (const name of ["clean_metric", "corrupted_metric"]) check(name, "a number", isNumber);
  const sizes = [found.sites, found.layers, found.positions].map((each) => each.length);
  const nested = ([size, ...rest]) => (value) => (size === undefined ? value === null || isNumber(value)
    : Array.isArray(value) && value.length === size && value.every(nested(rest)));
  check("values", `numbers, or null, of ${sizes[0]} sites × ${sizes[1]} layers × ${sizes[2]} positions`, nested(sizes));
  check("words", `left out, or ${sizes[2]} texts`, (value) => value === undefined || (listOf(isText)(value) && value.length === sizes[2]));
  return found;
}

/** Chooses a file; what it holds goes to `onOpen`. */
export function OpenSweep({ onOpen }) {
  const [problem, setProblem] = useState(null);
  const load = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      if (file.size > FILE_MIB_MAX * 2 ** 20) throw new Error(`the file has more than ${FILE_MIB_MAX} MiB; choose fewer positions`);
      onOpen({ ...sweepOf(await file.text()), name: file.name, at: Date.now() });
      setProblem(null);
    } catch (error) {
      setProblem(`${file.name}: ${error.message}`);
    }
    event.target.value = ""; // the same file may be chosen again
  };
  return html`<details class="new"><summary>Patching sweep</summary>
    <label>File of a sweep<input type="file" accept=".json,application/json" onChange=${load} /></label>
    <p class="soft">What <code>sweep.to_json(path)</code> of <code>client.patch_sweep</code> has written. It stays in this tab.</p>
    ${problem && html`<p class="notice" role="alert">${problem}</p>`}</details>`;
}

/** One site from position `start` up to `stop` as a map; positions between those of the sweep have no numbers. */
function siteMap(sweep, site, start, stop) {
  const column = new Map(sweep.positions.map((position, i) => [position, i]));
  const positions = Array.from({ length: Math.max(0, stop - start) }, (_, i) => start + i);
  const apart = positions.filter((position) => !column.has(position));
  return {
    layers: sweep.layers, start, stop, measure: "gives back",
    token_ids: positions.map((position) => sweep.corrupted[position]),
    values: sweep.values[sweep.sites.indexOf(site)].map((row) => positions.map((position) => row[column.get(position)] ?? null)),
    missing: sweep.layers.flatMap((layer) => apart.map((at) => ({ layer, start: at, stop: at + 1, reason: "not_asked" }))),
  };
}

/** How much of the clean prompt's measure each row gives back: a map of layers × positions for each site. */
export function SweepView({ sweep, onClose }) {
  const [selected, setSelected] = useState(null);
  const [first, end] = [sweep.positions[0], sweep.positions.at(-1) + 1];
  const [page, setPage] = useState(Math.floor(first / SHOWN_MAX));
  const [start, stop] = end > SHOWN_MAX ? [page * SHOWN_MAX, Math.min(end, (page + 1) * SHOWN_MAX)] : [first, end];
  const maps = useMemo(() => sweep.sites.map((site) => siteMap(sweep, site, start, stop)), [sweep, start, stop]);
  const range = useMemo(() => rangeOf(sweep.values.map((values) => ({ values }))), [sweep]);
  const most = Math.max(...range.map(Math.abs)) || 1;
  const scale = useMemo(() => scaleOf(maps, { mode: "linear", signed: true, fixed: [-most, most] }), [maps, most]);
  const texts = useMemo(() => {
    const known = [];
    sweep.words?.forEach((word, i) => { known[sweep.positions[i]] = word; });
    return known;
  }, [sweep]);
  const differs = sweep.corrupted.flatMap((id, at) => (id === sweep.clean[at] ? [] : [at]));
  const named = (position) => (texts[position] === undefined ? "" : ` ${visible(texts[position])}`);
  return html`<section class="view" id="capture" aria-label="patching sweep">
    <header class="head"><div><h1>${sweep.name}</h1><p class="soft">${sweep.measure}</p></div><dl>
      <div><dt>clean prompt</dt><dd>${shown(sweep.clean_metric)}</dd></div>
      <div><dt>corrupted prompt</dt><dd>${shown(sweep.corrupted_metric)}</dd></div>
      <div><dt>tokens</dt><dd>${sweep.corrupted.length}</dd></div></dl>
      <button class="plain" onClick=${onClose}>Close the sweep</button></header>
    <p>How much of the clean answer comes back when one row of the corrupted prompt is set to what it was in the clean one: 1 is
      the clean prompt's measure, 0 the corrupted one's.</p>
    ${differs.length > 0 && differs.length <= 8 && html`<p class="soft">The prompts differ ${differs.map((at, i) => html`${i ? ", " : ""}at
      position ${at}${named(at)} (#${sweep.corrupted[at]}, clean #${sweep.clean[at]})`)}.</p>`}
    <${Pager} page=${page} step=${SHOWN_MAX} end=${end} onChange=${setPage} />
    <${Legend} scale=${scale} maps=${maps} name="given back" range=${range} />
    <div class=${maps.length > 1 ? "pair" : ""}>${maps.map((map, i) => html`<${HeatMap} key=${sweep.sites[i]} id=${`map-${i}`} title=${sweep.sites[i]}
      map=${map} span=${stop - start} texts=${texts} scale=${scale} selected=${selected?.of === i ? selected : null}
      onSelect=${(cell) => setSelected({ ...cell, of: i })} />`)}</div>
    <details class="as-table"><summary>Values as a table</summary>${maps.map((map, i) => html`<${ValueTable} title=${sweep.sites[i]} map=${map}
      texts=${texts} selected=${selected?.of === i ? selected : null} />`)}</details>
  </section>`;
}
