// Scores of a probe: those that are stored, and of a capture that is being made its rows as they come.

import { useEffect, useState } from "./vendor/preact-htm.js";
import { isRunning } from "./data.js";
import { captureUrl, json, query } from "./service.js";
import { watch } from "./watch.js";

const PREFIX = "probe.";
const NUMBERS_MAX = 1 << 18; // held at a time

/** `{name, site, names, activation, fingerprint}` of the probe whose scores a site of a capture is; null for other sites. */
export function probeOf(manifest, site) {
  if (!site?.startsWith(PREFIX)) return null;
  const width = manifest.sites.find((each) => each.site === site)?.width ?? 1;
  const about = manifest.engine?.armed?.probes?.[site.slice(PREFIX.length)] ?? {};
  return { names: Array.from({ length: width }, (_, i) => String(i)), ...about, name: site.slice(PREFIX.length), site };
}

/** So many positions of a probe's scores are held at a time. */
export const heldAtOnce = (probe) => Math.max(1, Math.floor(NUMBERS_MAX / probe.names.length));

const floatsOf = (text) => new Float32Array(Uint8Array.from(atob(text), (byte) => byte.charCodeAt(0)).buffer);
const number = (value) => (Number.isFinite(value) ? value : null);

/** Pairs [position, {token, values}] of an event of live rows. */
function rowsOf({ positions, token_ids: tokens, values }) {
  const numbers = floatsOf(values);
  const k = numbers.length / positions.length;
  return positions.map((at, i) => [at, { token: tokens[i], values: Array.from(numbers.subarray(i * k, (i + 1) * k), number) }]);
}

async function stored(id, site, from, to, signal) {
  const part = await json(captureUrl(id, `/activations${query({ site, start: from, stop: to, format: "json" })}`), { signal });
  const [values] = Object.values(part.arrays);
  return part.positions.map((at, i) => [at, { token: part.token_ids[i], values: values[i] }]);
}

/**
 * `{rows, error}`: what there is of a probe's scores at positions `[from, to)`, as a Map from position to {token, values};
 * rows is null before anything is known. While the capture runs rows are added as they are made; then they are read anew.
 */
export function useScores(manifest, probe, from, to) {
  const [state, setState] = useState({ of: null, rows: null, error: null });
  const running = isRunning(manifest);
  const same = probe && JSON.stringify([manifest.id, probe.site, from, to]);
  useEffect(() => {
    if (!probe || !running) return undefined;
    return watch(manifest.id, probe.site, (event) => {
      const come = rowsOf(event).filter(([at]) => from <= at && at < to);
      if (!come.length) return;
      setState((now) => { // the same Map: it may be long, and there are many events
        const rows = now.of === same && now.rows ? now.rows : new Map();
        come.forEach(([at, row]) => rows.set(at, row));
        return { of: same, rows, error: null };
      });
    });
  }, [same, running]);
  useEffect(() => {
    if (!probe || running) return undefined;
    const ended = new AbortController();
    stored(manifest.id, probe.site, from, to, ended.signal)
      .then((pairs) => setState({ of: same, rows: new Map(pairs), error: null }))
      .catch((error) => error.name !== "AbortError" && setState({ of: same, rows: null, error }));
    return () => ended.abort();
  }, [same, running]);
  return state.of === same ? state : { rows: null, error: null };
}

/** Scores as a map as those of layers are, its rows being the scores: the first on top. */
export function scoreMap(manifest, probe, rows, start, stop) {
  const layers = probe.names.map((_, i) => probe.names.length - 1 - i);
  const there = Array.from({ length: stop - start }, (_, i) => rows.get(start + i));
  const known = [...manifest.prompt_token_ids, ...manifest.output_token_ids];
  const gaps = manifest.rows.find((each) => each.site === probe.site)?.missing ?? [];
  const missing = there.flatMap((row, i) => {
    const at = start + i;
    if (row) return [];
    const reason = gaps.find((gap) => gap.start <= at && at < gap.stop)?.reason ?? (at < manifest.end ? "not_asked" : "pending");
    return layers.map((layer) => ({ layer, start: at, stop: at + 1, reason, capture: manifest.id }));
  });
  return { capture: manifest.id, site: probe.site, measure: "score", names: probe.names, layers, start, stop, missing,
    token_ids: there.map((row, i) => row?.token ?? known[start + i] ?? null),
    values: layers.map((layer) => there.map((row) => row?.values[layer] ?? null)) };
}

/** One past the last position of which there are scores. */
export function endOfRows(rows) {
  let end = 0;
  for (const at of rows?.keys() ?? []) end = Math.max(end, at + 1);
  return end;
}

/** The positions of the highest of one score, the highest first. */
export const highest = (rows, score, count) => [...rows.entries()].filter(([, row]) => row.values[score] !== null)
  .sort(([, a], [, b]) => b.values[score] - a.values[score]).slice(0, count).map(([at]) => at);
