// A probe's scores: the text in their colours, the tokens that score highest, a map of scores × tokens, one token's scores.

import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";
import { nameOf } from "./captures.js";
import { rangeOf, scaleOf, shown } from "./colours.js";
import { Choice, Pager } from "./controls.js";
import { difference, endOf, isRunning, reasonsOf, useTexts } from "./data.js";
import { HeatMap, Legend, MOVES, ValueTable, cellText, tokenText, visible } from "./heatmap.js";
import { MODES, SHOWN_MAX } from "./maps.js";
import { Largest } from "./row.js";
import { endOfRows, heldAtOnce, highest, probeOf, scoreMap, useScores } from "./scores.js";
import { captureUrl, json, query } from "./service.js";

const TOP = 10;
const COMPARISONS = { beside: "side by side", difference: "difference" };

export function ProbeView({ manifest, other, compared, otherError, site, sites, probe, how, onHow }) {
  const comparison = how.comparison in COMPARISONS ? how.comparison : "beside";
  const [page, setPage] = useState(0);
  const [score, setScore] = useState(0);
  const [selected, setSelected] = useState(null);
  const [opened, setOpened] = useState(null);
  const theirs = other && other.resolved?.layers?.[site] ? probeOf(other, site) : null;
  const alike = theirs?.names.length === probe.names.length;

  const step = Math.min(SHOWN_MAX, heldAtOnce(probe));
  const held = step * Math.floor(heldAtOnce(probe) / step);
  const from = Math.floor((page * step) / held) * held;
  const first = useScores(manifest, probe, from, from + held);
  const second = useScores(other, alike ? theirs : null, from, from + held);
  const ends = [Math.max(endOf(manifest), endOfRows(first.rows)), alike ? Math.max(endOf(other), endOfRows(second.rows)) : 0];
  const [start, end] = [page * step, Math.max(...ends)];
  const part = (of, about, scores, last) => scores.rows && about && scoreMap(of, about, scores.rows, start, Math.max(start, Math.min(start + step, last)));
  const map = useMemo(() => part(manifest, probe, first, ends[0]), [manifest, first, start, ends[0]]);
  const map2 = useMemo(() => part(other, alike && theirs, second, ends[1]), [other, second, alike, start, ends[1]]);
  const [texts, texts2] = [useTexts(manifest, start, start + step), useTexts(other, start, start + step)];

  const differs = comparison === "difference" && map && map2;
  const maps = useMemo(() => (differs ? [difference(map, map2)] : map ? [map, map2].filter(Boolean) : []), [map, map2, differs]);
  const rising = probe.activation === "sigmoid" && !differs && how.mode === "linear"; // from 0 to 1
  const scale = useMemo(() => maps.length && scaleOf(maps, { mode: how.mode, signed: true, rising, fixed: rising ? [0, 1] : undefined }), [maps, how.mode, rising]);

  const choose = (cell) => {
    setScore(cell.layer);
    setSelected(cell);
    setPage(Math.floor(cell.position / step));
  };
  const titles = differs ? [`${nameOf(other)} less ${nameOf(manifest)}`] : map2 ? [nameOf(manifest), nameOf(other)] : [`${probe.name}, scores × tokens`];
  const problem = first.error ?? otherError ?? second.error ?? (other && !alike ? { message: `${nameOf(other)} has no scores of this probe.` } : null);
  const unlike = alike && theirs.fingerprint !== probe.fingerprint;
  const texting = [differs ? Array.from({ length: end }, (_, at) => texts[at] ?? texts2[at]) : texts, texts2];
  const span = Math.max(0, ...maps.map((each) => each.stop - each.start));
  return html`
    <div class="controls">${sites}
      <${Choice} label="Score" value=${String(score)} options=${Object.fromEntries(probe.names.map((each, i) => [i, each]))}
        onChange=${(each) => { setScore(Number(each)); setSelected(selected && { ...selected, layer: Number(each) }); }} />
      ${compared && html`<${Choice} label="Comparison" value=${comparison} options=${COMPARISONS} onChange=${(each) => onHow({ comparison: each })} />`}
      <${Choice} label="Colours" value=${how.mode} options=${{ ...MODES, layer: "within each score" }} onChange=${(each) => onHow({ mode: each })} />
      <${Pager} page=${page} step=${step} end=${end} onChange=${setPage} />
    </div>
    ${problem && html`<p class="notice" role="alert">${problem.message}</p>`}
    ${unlike && html`<p class="notice">Under this name the two engines had probes of other numbers.</p>`}
    ${maps.length && scale && span ? html`
      <${Legend} scale=${scale} maps=${maps} name=${`scores of ${probe.name}`} range=${rangeOf(maps)} />
      <div class="reading"><div class=${maps.length > 1 ? "pair" : ""}>${maps.map((each, i) => html`<${ScoredText} key=${i} id=${`text-${i}`} title=${titles[i]} map=${each}
        live=${isRunning(i ? other : manifest)} score=${score} texts=${texting[i]} others=${i ? manifest : other} scale=${scale} prompt=${(i ? other : manifest).prompt_len} selected=${selected} onSelect=${choose} />`)}</div>
        <${Highest} manifest=${manifest} probe=${probe} rows=${first.rows} of=${end > held ? `positions ${from}–${Math.min(from + held, end) - 1}` : null} score=${score} texts=${texts} selected=${selected} onSelect=${choose} /></div>
      <div class=${maps.length > 1 ? "pair" : ""}>${maps.map((each, i) => html`<${HeatMap} key=${i} id=${`map-${i}`} title=${titles[i]} map=${each} span=${span}
        texts=${texting[i]} scale=${scale} prompt=${(i ? other : manifest).prompt_len} selected=${selected} onSelect=${choose} onOpen=${(cell) => setOpened({ ...cell, of: i })} />`)}</div>
      <details class="as-table"><summary>Values as a table</summary>${maps.map((each, i) => html`<${ValueTable} title=${titles[i]} map=${each} texts=${texting[i]} selected=${selected} />`)}</details>`
    : !problem && html`<p class="soft">${isRunning(manifest) ? "No scores yet." : "loading…"}</p>`}
    ${opened && maps[opened.of] && html`<${TokenScores} manifest=${opened.of ? other : manifest} probe=${probe} map=${maps[opened.of]} texts=${texting[opened.of]} position=${opened.position} onClose=${() => setOpened(null)} />`}`;
}

/** A token as it is read: a line ends where it ends one. */
const readable = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "    ");

/** The text, each token in the colour of one score; the arrow keys go from token to token. */
function ScoredText({ id, title, map, live, score, texts, others, scale, prompt, selected, onSelect }) {
  const [hover, setHover] = useState(null);
  const row = map.layers.indexOf(score);
  const reasons = useMemo(() => reasonsOf(map), [map]);
  const tokens = others && [...others.prompt_token_ids, ...others.output_token_ids];
  const at = hover ?? selected?.position;
  const told = at >= map.start && at < map.stop ? cellText(map, reasons, texts, score, at) : null;
  const go = (position) => onSelect({ layer: score, position });
  const onKey = (event) => {
    const [, step] = MOVES[event.key] ?? [0, 0];
    if (!step || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(Math.max(map.start, Math.min(map.stop - 1, (selected?.position ?? map.start) + step)));
  };
  return html`<div class="scored">
    <div class="text" id=${id} role="application" tabindex="0" aria-roledescription="text in colours" aria-describedby=${`${id}-how`}
      aria-label=${`${title}, coloured by ${map.names[score]}`} onKeyDown=${onKey} onFocus=${() => !selected && go(map.start)} onMouseLeave=${() => setHover(null)}>
      ${map.token_ids.map((token, i) => {
    const position = map.start + i;
    const value = map.values[row]?.[i] ?? null;
    const text = live && texts[position] === undefined ? "…" : tokenText(texts[position], token);
    const differs = tokens && tokens[position] !== undefined && token !== null && tokens[position] !== token;
    const kind = [selected?.position === position && "chosen", value === null && "hatch", differs && "differs"].filter(Boolean);
    return html`${(i === 0 || position === prompt) && html`<b class="part">${position < prompt ? "Prompt" : "Answer"}</b>`}<span key=${position}
      class=${["word", ...kind].join(" ")} style=${value === null ? {} : { background: scale.colour(value, row), color: scale.ink(value, row) }}
      onMouseEnter=${() => setHover(position)} onClick=${() => go(position)}>${readable(text)}</span>${text.includes("\n") && html`<br />`}`;
  })}</div>
    <p class="readout" aria-hidden="true">${told ? html`<b>${told.token}</b> ${told.where} · ${told.what}` : "Point at a token, or go to it with the arrow keys."}</p>
    <p class="sr" id=${`${id}-how`}>Arrow keys move by token, Page Up and Page Down by ten, Home and End to the ends.</p>
  </div>`;
}

/** The texts of some positions, those that `texts` lacks from the service. */
function useTextsAt(manifest, positions, texts) {
  const [more, setMore] = useState({});
  const lacking = positions.filter((at) => texts[at] === undefined && more[at] === undefined);
  useEffect(() => setMore({}), [manifest.id, manifest.status]);
  useEffect(() => {
    const ended = new AbortController();
    lacking.forEach((at) => json(captureUrl(manifest.id, `/tokens${query({ start: at, stop: at + 1 })}`), { signal: ended.signal })
      .then((page) => setMore((now) => ({ ...now, [at]: page.texts[0] }))).catch(() => {}));
    return () => ended.abort();
  }, [manifest.id, lacking.join()]);
  return (at) => texts[at] ?? more[at];
}

/** The tokens with the highest of one score, of all that are held (`rows`, `of` these positions); choosing one goes to it. */
function Highest({ manifest, probe, rows, of, score, texts, selected, onSelect }) {
  const top = highest(rows, score, TOP);
  const textAt = useTextsAt(manifest, top, texts);
  const name = probe.names[score];
  const most = Math.max(...top.map((at) => Math.abs(rows.get(at).values[score]))) || 1;
  return html`<section class="highest" aria-label=${`highest ${name}`}><h2>Highest ${name}${of && html` <span class="soft">of ${of}</span>`}</h2>
    <ol>${top.map((at) => {
    const [value, token] = [rows.get(at).values[score], visible(tokenText(textAt(at), rows.get(at).token))];
    return html`<li key=${at}><button class="entry" aria-current=${selected?.position === at ? "true" : undefined}
      aria-label=${`token ${token}, position ${at}, ${name} ${shown(value)}`} onClick=${() => onSelect({ layer: score, position: at })}>
      <b>${token}</b><span class="soft">${at}</span><span class="number">${shown(value)}</span>
      <i class=${value < 0 ? "size negative" : "size"} style=${{ width: `${(100 * Math.abs(value)) / most}%` }}></i></button></li>`;
  })}</ol>
    ${!top.length && html`<p class="soft">No scores yet.</p>`}</section>`;
}

/** All the scores of one token. */
function TokenScores({ manifest, probe, map, texts, position, onClose }) {
  const column = position - map.start;
  const numbers = map.names.map((_, i) => map.values[map.layers.indexOf(i)]?.[column] ?? null);
  const told = cellText(map, reasonsOf(map), texts, 0, position);
  return html`<section class="row-panel scores" aria-label="row" id="row">
    <header><h2><span class="token">${told.token}</span> ${probe.name}, position ${position}</h2>
      <button class="plain" onClick=${onClose} aria-label="close the row">✕</button></header>
    ${numbers.every((value) => value === null) ? html`<p class="notice hatch-soft">No scores here: ${told.what}.</p>`
    : html`<div class="row-parts"><${Largest} numbers=${numbers} names=${map.names} /></div>`}
    <p class="soft code-line">In Python: <code>Client().capture("${manifest.id}").probe("${probe.name}")</code></p>
  </section>`;
}
