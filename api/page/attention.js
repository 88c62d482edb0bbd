// What the heads of a layer attend to: query against key, the heaviest keys of each, and how spread each head's weights are.

import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";
import { scaleOf, shown } from "./colours.js";
import { Choice, Pager } from "./controls.js";
import { endOf, isRunning, useTexts } from "./data.js";
import { HeatMap, Legend, ValueTable, tokenText, visible } from "./heatmap.js";
import { SHOWN_MAX } from "./maps.js";
import { captureUrl, json, query } from "./service.js";

export const ATTENTION = "attention"; // where a site's name stands in other views
const QUERIES_MAX = 64; // in one picture
const HEADS_MAX = 4; // shown at a time
const GROWTH = 16; // positions that a running capture grows by before it is asked for again
const KEPT = ["4", "8", "16", "32"];
const MODES = { linear: "linear", layer: "within each query" };

/** The layers of which a capture has both queries and keys. */
export function attendingLayers(manifest) {
  const { q_rot: queries = [], k_rot: keys = [] } = manifest?.resolved?.layers ?? {};
  return queries.filter((layer) => keys.includes(layer));
}

/** How many heads a layer has, by what its engine told; null where it told nothing. */
function headsOf(manifest, layer) {
  const told = manifest.engine?.attention?.find((each) => each.layers.includes(layer));
  const width = manifest.sites.find((each) => each.site === "q_rot")?.width;
  return told && width ? Math.floor(width / told.head_size) : null;
}

/** `{found, error}` of what `asked` of a capture's attention; null asks for nothing. */
function useAttention(manifest, asked) {
  const [state, setState] = useState({ of: null, found: null, error: null });
  const [running, end] = [isRunning(manifest), endOf(manifest)];
  const same = asked && JSON.stringify([manifest.id, asked]);
  useEffect(() => {
    if (!asked) return undefined;
    const ended = new AbortController();
    json(captureUrl(manifest.id, `/attention${query({ ...asked, missing: "leave_out", format: "json" })}`), { signal: ended.signal })
      .then((found) => setState({ of: same, found, error: null }))
      .catch((error) => error.name !== "AbortError" && setState({ of: same, found: null, error }));
    return () => ended.abort();
  }, [same, running, running ? Math.floor(end / GROWTH) : end]);
  return state.of === same ? state : { found: null, error: null };
}

/** Of every query in `[start, stop)` that was left out, why: by position. */
function leftOut(found, start, stop) {
  const reasons = new Map();
  for (const gap of found.unattended) {
    for (let at = Math.max(gap.start, start); at < Math.min(gap.stop, stop); at += 1) reasons.set(at, gap.missing.reason);
  }
  const there = new Set(found.positions);
  for (let at = start; at < stop; at += 1) if (!there.has(at) && !reasons.has(at)) reasons.set(at, found.status === "running" ? "pending" : "not_asked");
  return reasons;
}

/** A head as a map of queries (the first on top) × keys. Cells of keys that were not kept have no number: `told` says why. */
function pictureOf(manifest, found, head, part, texts) {
  const { start, stop, from, to } = part;
  const ids = [...manifest.prompt_token_ids, ...manifest.output_token_ids];
  const layers = Array.from({ length: stop - start }, (_, i) => stop - 1 - i);
  const [row, reasons] = [new Map(found.positions.map((at, i) => [at, i])), leftOut(found, start, stop)];
  const [place, kept] = [found.heads.indexOf(head), found.keys[0]?.[0]?.length ?? 0];
  const values = layers.map((at) => {
    const cells = Array(to - from).fill(null);
    found.keys[place]?.[row.get(at)]?.forEach((key, i) => {
      if (key >= from && key < to) cells[key - from] = found.weights[place][row.get(at)][i];
    });
    return cells;
  });
  const { window } = found.rule;
  const told = (index, column) => {
    const [at, key] = [layers[index], from + column];
    if (reasons.has(at)) return "";
    if (key > at) return "a later token, which it does not see";
    if (window !== null && key <= at - window) return "outside of the window, not seen";
    const least = found.weights[place][row.get(at)].at(-1);
    return `not among its ${kept} heaviest keys: at most ${shown(least)}`;
  };
  return { capture: manifest.id, site: ATTENTION, measure: "weight", rowKind: "query", layers, start: from, stop: to, values, told,
    names: Object.fromEntries(layers.map((at) => [at, `${at} ${visible(tokenText(texts[at], ids[at]))}`])),
    token_ids: Array.from({ length: to - from }, (_, i) => ids[from + i] ?? null),
    missing: [...reasons].map(([layer, reason]) => ({ layer, start: from, stop: to, reason, capture: manifest.id })) };
}

/** Entropy in nats as a map of heads (the first on top) × queries. */
function spreadOf(manifest, found, start, stop) {
  const ids = [...manifest.prompt_token_ids, ...manifest.output_token_ids];
  const [column, reasons] = [new Map(found.positions.map((at, i) => [at, i])), leftOut(found, start, stop)];
  const layers = [...found.heads].reverse();
  return { capture: manifest.id, site: ATTENTION, measure: "entropy", rowKind: "head", layers, start, stop,
    names: Object.fromEntries(layers.map((head) => [head, `head ${head}`])),
    values: layers.map((head) => Array.from({ length: stop - start }, (_, i) =>
      (column.has(start + i) ? found.entropy[found.heads.indexOf(head)][column.get(start + i)] : null))),
    token_ids: Array.from({ length: stop - start }, (_, i) => ids[start + i] ?? null),
    missing: [...reasons].flatMap(([at, reason]) => layers.map((layer) => ({ layer, start: at, stop: at + 1, reason, capture: manifest.id }))) };
}

export function AttentionView({ manifest, compared, limits, sites }) {
  const layers = attendingLayers(manifest);
  const [layer, setLayer] = useState(layers[0]);
  const [heads, setHeads] = useState([0]);
  const [kept, setKept] = useState("8");
  const [mode, setMode] = useState("linear");
  const [page, setPage] = useState(0);
  const [keyPage, setKeyPage] = useState(0);
  const [selected, setSelected] = useState(null); // {of: a head, layer: a query, position: a key}
  const [spread, setSpread] = useState(null); // {layer: a head, position: a query}

  const end = endOf(manifest);
  const count = headsOf(manifest, layer);
  const step = Math.max(1, Math.min(QUERIES_MAX, Math.floor((limits.attention_weights_max ?? 2 ** 26) / ((count ?? 32) * Math.max(1, end)))));
  const [start, stop] = [page * step, Math.min((page + 1) * step, end)];
  const [from, to] = [keyPage * SHOWN_MAX, Math.min((keyPage + 1) * SHOWN_MAX, end)];
  const asked = end > 0 && layers.length ? { layer, start, stop } : null;
  const every = useAttention(manifest, asked && { ...asked, top: 1 });
  const some = useAttention(manifest, asked && { ...asked, top: Number(kept), heads: heads.join(",") });
  const [texts, keyTexts] = [useTexts(manifest, start, stop), useTexts(manifest, from, to)];

  const maps = useMemo(() => (some.found ? heads.map((head) => pictureOf(manifest, some.found, head, { start, stop, from, to }, texts)) : []),
    [some.found, heads, start, stop, from, to, texts, manifest.total_len]);
  const spreads = useMemo(() => (every.found ? spreadOf(manifest, every.found, start, stop) : null), [every.found, start, stop, manifest.total_len]);
  const scale = useMemo(() => maps.length && scaleOf(maps, { mode, fixed: [0, 1] }), [maps, mode]);
  const spreadScale = useMemo(() => spreads && scaleOf([spreads], { mode: "linear" }), [spreads]);
  const problem = some.error ?? every.error;
  const chooseHead = (cell) => {
    setSpread(cell);
    setHeads([cell.layer]);
  };
  return html`
    <div class="controls">${sites}
      <${Choice} label="Layer" value=${String(layer)} options=${layers.map(String)} onChange=${(each) => { setLayer(Number(each)); setHeads([0]); }} />
      <${Heads} key=${heads.join()} heads=${heads} count=${count} onChange=${setHeads} />
      <${Choice} label="Keys kept" value=${kept} options=${KEPT} onChange=${setKept} />
      <${Choice} label="Colours" value=${mode} options=${MODES} onChange=${setMode} />
      <${Pager} page=${page} step=${step} end=${end} what="queries" onChange=${setPage} />
      <${Pager} page=${keyPage} step=${SHOWN_MAX} end=${end} what="keys" onChange=${setKeyPage} />
    </div>
    ${compared && html`<p class="soft">Attention is drawn of one capture: stop comparing, or open the other.</p>`}
    ${problem && html`<p class="notice" role="alert">${problem.message}</p>`}
    ${maps.length && scale ? html`<${Legend} scale=${scale} maps=${maps} name="weight of a key" />
      <div class=${maps.length > 1 ? "pair" : ""}>${maps.map((map, i) => html`<${HeatMap} key=${heads[i]} id=${`map-${i}`}
        title=${`layer ${layer}, head ${heads[i]}: queries × keys`} map=${map} span=${to - from} texts=${keyTexts} scale=${scale} prompt=${manifest.prompt_len}
        selected=${selected?.of === heads[i] ? selected : null} onSelect=${(cell) => setSelected({ ...cell, of: heads[i] })} />`)}</div>
      ${selected && html`<${Heaviest} found=${some.found} head=${selected.of} at=${selected.layer} texts=${keyTexts} ids=${[...manifest.prompt_token_ids, ...manifest.output_token_ids]} />`}
      <details class="as-table"><summary>Weights as a table</summary>${maps.map((map, i) => html`<${ValueTable} title=${`head ${heads[i]}`} map=${map} texts=${keyTexts}
        selected=${selected?.of === heads[i] ? selected : null} />`)}</details>` : null}
    ${spreads && spreadScale ? html`<${HeatMap} id="spread" title=${`layer ${layer}: entropy of each head (nats); Enter shows the head`} map=${spreads} span=${stop - start} texts=${texts}
        scale=${spreadScale} prompt=${manifest.prompt_len} selected=${spread} onSelect=${setSpread} onOpen=${chooseHead} />
      <${Legend} scale=${spreadScale} maps=${[spreads]} name="entropy" />
      <details class="as-table"><summary>Entropy as a table</summary><${ValueTable} title="entropy" map=${spreads} texts=${texts} selected=${spread} /></details>` : null}
    <p class="soft code-line">In Python: <code>Client().capture("${manifest.id}").attention(${layer}, heads=[${heads.join(", ")}])</code></p>`;
}

/** The heads that are shown, by number: at most four. */
function Heads({ heads, count, onChange }) {
  const [problem, setProblem] = useState(null);
  const submit = (event) => {
    const wanted = [...new Set(event.target.value.split(/[\s,]+/).filter(Boolean).map(Number))];
    const fits = wanted.length && wanted.length <= HEADS_MAX && wanted.every((head) => Number.isInteger(head) && head >= 0 && (count === null || head < count));
    setProblem(fits ? null : `1 to ${HEADS_MAX} numbers${count === null ? "" : ` below ${count}`}`);
    if (fits) onChange(wanted);
  };
  return html`<label class="choice">Heads<input class="short" size="8" value=${heads.join(", ")} onChange=${submit} aria-invalid=${problem ? "true" : undefined} />
    ${problem && html`<span class="lack" role="alert">${problem}</span>`}</label>`;
}

/** The heaviest keys of one query and head. */
function Heaviest({ found, head, at, texts, ids }) {
  const row = found.positions.indexOf(at);
  const place = found.heads.indexOf(head);
  if (row < 0 || place < 0) return null;
  const [keys, weights] = [found.keys[place][row], found.weights[place][row]];
  const token = (position) => visible(tokenText(texts[position], ids[position]));
  return html`<section class="row-panel" aria-label="heaviest keys" id="heaviest"><h2><span class="token">${token(at)}</span> query ${at}, head ${head}</h2>
    <table class="largest"><thead><tr><th scope="col">key</th><th scope="col">position</th><th scope="col">weight</th><th scope="col"><span class="sr">size</span></th></tr></thead>
      <tbody>${keys.map((key, i) => (key < 0 ? null : html`<tr><td><span class="token">${token(key)}</span></td><td class="number">${key}</td><td class="number">${shown(weights[i])}</td>
        <td><i class="size" style=${{ width: `${100 * weights[i]}%` }}></i></td></tr>`))}</tbody></table></section>`;
}
