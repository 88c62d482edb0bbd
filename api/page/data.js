// What the page shows of captures, kept up to date: the list, a manifest, its tokens, a map of it.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { captureUrl, json, query } from "./service.js";
import { watch } from "./watch.js";

const LIST_PAUSE_MS = 3000;
const LIVE_PAUSE_MS = 400;
const RUNNING = new Set(["pending", "running"]);

export const isRunning = (capture) => RUNNING.has(capture?.status);
/** One past the last position that has a row, or is to have one. */
export const endOf = (manifest) => Math.max(manifest?.end ?? 0, (manifest?.total_len ?? 0) - 1);

/** Runs `work(signal)` now and again `pause()` ms after it ended, until the component goes or pause() is 0. */
export function useRepeated(work, pause, inputs) {
  useEffect(() => {
    const ended = new AbortController();
    let timer;
    const turn = async () => {
      await work(ended.signal).catch((error) => error.name !== "AbortError" && console.warn(error));
      const wait = pause();
      if (!ended.signal.aborted && wait) timer = setTimeout(turn, wait);
    };
    turn();
    return () => {
      ended.abort();
      clearTimeout(timer);
    };
  }, inputs);
}

/** The parameters of a list that words ask for: `name=value` is a tag, `site:` and `model:` say so, the rest is text. */
export function filtersOf(words, status) {
  const parts = words.trim().split(/\s+/).filter(Boolean);
  const after = (prefix) => parts.find((part) => part.startsWith(prefix))?.slice(prefix.length);
  const special = (part) => part.includes("=") || part.startsWith("site:") || part.startsWith("model:");
  return { status, site: after("site:"), model: after("model:"), tag: parts.filter((part) => part.includes("=")),
    text: parts.filter((part) => !special(part)).join(" ") };
}

export const listed = async (filters, more = {}, options = {}) => json(`v1/captures${query({ ...filters, limit: 100, ...more })}`, options);

/** `{rows, more(), error}`: the newest captures that fit, older ones where they were asked for. */
export function useCaptures(filters, visit) {
  const none = { first: [], older: [], next: null, error: null };
  const [pages, setPages] = useState(none);
  const same = JSON.stringify(filters);
  useEffect(() => setPages(none), [same, visit]);
  useRepeated(async (signal) => {
    try {
      const page = await listed(filters, {}, { signal });
      setPages((now) => ({ first: page.data, older: now.older, error: null, next: now.older.length ? now.next : page.next }));
    } catch (error) {
      if (error.name !== "AbortError") setPages({ ...none, error });
    }
  }, () => LIST_PAUSE_MS, [same, visit]);
  const more = async () => {
    const page = await listed(filters, { before: pages.next });
    setPages((now) => ({ ...now, older: [...now.older, ...page.data], next: page.next }));
  };
  const known = new Map([...pages.first, ...pages.older].map((row) => [row.id, row]));
  return { rows: [...known.values()], more: pages.next ? more : null, error: pages.error };
}

/** `{manifest, error}`; while the capture runs it is asked for again whenever the service tells of progress. */
export function useManifest(ref, visit) {
  const none = { manifest: null, error: null };
  const [state, setState] = useState(none);
  useEffect(() => setState(none), [ref, visit]);
  const there = useRef(false);
  const look = async (signal) => {
    try {
      const manifest = await json(captureUrl(ref), { signal });
      there.current = true;
      setState({ manifest, error: null });
    } catch (error) {
      const deleted = error.status === 404;
      if (error.name !== "AbortError" && (deleted || !there.current)) setState({ manifest: null, error });
    }
  };
  useRepeated((signal) => {
    there.current = false;
    return ref ? look(signal) : Promise.resolve();
  }, () => (ref && !there.current ? LIVE_PAUSE_MS : 0), [ref, visit]);
  const running = isRunning(state.manifest);
  useEffect(() => {
    if (!running) return undefined;
    const ended = new AbortController();
    const stop = watch(state.manifest.id, null, oneByOne(() => look(ended.signal)));
    return () => {
      ended.abort();
      stop();
    };
  }, [ref, visit, state.manifest?.id, running]);
  return state;
}

/** Does `work()` when called, one at a time: calls that come meanwhile are one more turn. */
function oneByOne(work) {
  let [busy, again] = [false, false];
  return async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again) {
      again = false;
      await work();
    }
    busy = false;
  };
}

/** The text of each token by position (null where unknown); asks only for what it does not have. */
export function useTexts(manifest, start, stop) {
  const [texts, setTexts] = useState({ ref: null, known: [] });
  const shown = useRef();
  shown.current = manifest?.id;
  const running = isRunning(manifest);
  const last = Math.min(stop, running ? manifest.end : manifest?.total_len ?? 0);
  useEffect(() => {
    // Those of a capture that runs may be guesses that are taken back: once it is final all are asked for again.
    const has = texts.ref === manifest?.id && texts.running === running ? texts.known : [];
    let from = start;
    while (from < last && has[from] !== undefined) from += 1;
    if (!manifest || last <= from) return;
    json(captureUrl(manifest.id, `/tokens${query({ start: from, stop: last })}`))
      .then((page) => page.capture === shown.current && setTexts((now) => {
        const filled = now.ref === page.capture ? [...now.known] : [];
        page.texts.forEach((text, i) => { filled[page.start + i] = text; });
        return { ref: page.capture, running, known: filled };
      }))
      .catch(() => {});
  }, [manifest?.id, running, start, last]);
  return texts.ref === manifest?.id ? texts.known : [];
}

/** One map after another of the same capture: rows that came meanwhile are added, nothing is asked for twice. */
function grown(map, more) {
  const offset = more.start - map.start;
  const joined = (old, fresh) => [...old.slice(0, offset), ...fresh];
  return {
    ...more,
    start: map.start,
    token_ids: joined(map.token_ids, more.token_ids),
    values: more.values.map((row, i) => joined(map.values[i], row)),
    missing: [...map.missing.filter((gap) => gap.stop <= more.start), ...more.missing],
  };
}

/**
 * `{map, error, loading}` of `asked` = {ref, site, measure, position, against, start, stop, direction, end, status}.
 * While the capture runs, `end` and `status` change and only what is new is fetched.
 */
export function useMap(asked) {
  const [state, setState] = useState({ map: null, error: null, loading: false, of: null });
  const same = asked && JSON.stringify([asked.ref, asked.site, asked.measure, asked.position, asked.against, asked.start,
    asked.stop, asked.direction?.name, asked.direction?.at]);
  const last = asked && Math.min(asked.stop, asked.end);
  useEffect(() => {
    if (!asked?.ref || !asked.site || last <= asked.start) return undefined;
    const ended = new AbortController();
    const kept = state.of === same ? state.map : null;
    const holes = kept?.missing.filter((gap) => gap.reason === "pending").map((gap) => gap.start) ?? [];
    const from = kept ? Math.max(asked.start, Math.min(kept.stop, ...holes)) : asked.start;
    if (kept && from >= last) return undefined;
    setState((now) => ({ ...now, loading: true }));
    const { ref, site, measure, position, against, direction } = asked;
    const body = direction && measure === "projection" ? { method: "POST", body: direction.bytes } : {};
    json(captureUrl(ref, `/map${query({ site, measure, position, against, start: from, stop: last })}`),
      { ...body, signal: ended.signal })
      .then((map) => setState({ map: kept ? grown(kept, map) : map, error: null, loading: false, of: same }))
      .catch((error) => error.name !== "AbortError"
        && setState({ map: null, error, loading: false, of: same }));
    return () => ended.abort();
  }, [same, last, asked?.status]);
  return { ...state, map: state.of === same ? state.map : null, before: state.map };
}

/** Every cell of `b` less that of `a`; a row missing in either is missing, with its reason. */
export function difference(a, b) {
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
    names: a.names?.map((name) => `difference of ${name}`),
    token_ids: Array.from({ length: columns }, (_, i) => a.token_ids[i] ?? b.token_ids[i]),
    missing: [...a.missing, ...past(a), ...b.missing, ...past(b)] };
}

/** Why there is no number in a cell: the reason of the missing row, by [layer index][position - start]. */
export function reasonsOf(map) {
  const reasons = map.layers.map(() => []);
  const index = new Map(map.layers.map((layer, i) => [layer, i]));
  for (const gap of map.missing) {
    for (let at = Math.max(gap.start, map.start); at < Math.min(gap.stop, map.stop); at += 1) {
      reasons[index.get(gap.layer)][at - map.start] ??= gap;
    }
  }
  return reasons;
}

export const REASONS = {
  prefix_cached: "taken from the prefix cache, not computed",
  dropped: "dropped under pressure",
  aborted: "the request was aborted first",
  not_armed: "no tap there",
  engine_lost: "the engine was lost",
  part_lost: "the sender of one of the engine's ranks was lost",
  rejected_draft: "a rejected draft of speculative decoding",
  fenced: "a copy of the engine had them, and its stream was another's",
  elsewhere: "in another writer's store",
  deleted: "deleted",
  pending: "not there yet",
  not_asked: "not asked for",
  past_the_end: "past the end of the sequence",
};
