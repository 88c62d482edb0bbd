// What is watched of captures that run comes over one stream, however much it is: a browser has six connections.

import { ask, captureUrl, eventsOf, query } from "./service.js";

const AGAIN_MS = 400;
const watchers = new Set();
let open = new AbortController();
let timer;

/**
 * Calls `tell(event)` with a capture's events until the function that is returned is called: its rows at `site`, from
 * the first on, or, where that is null, how far it is.
 */
export function watch(capture, site, tell) {
  const watcher = { capture, site, tell };
  watchers.add(watcher);
  reopen();
  return () => {
    watchers.delete(watcher);
    reopen();
  };
}

/** Once for all that begins or ends to be watched in one turn; what is told again changes nothing. */
function reopen() {
  open.abort();
  clearTimeout(timer);
  if (watchers.size) timer = setTimeout(listen, 0);
}

async function listen() {
  const { signal } = (open = new AbortController());
  const [first, ...also] = new Set(Array.from(watchers, (each) => each.capture));
  const site = [...new Set(Array.from(watchers, (each) => each.site).filter(Boolean))];
  try {
    for await (const data of eventsOf(await ask(captureUrl(first, `/events${query({ also, site })}`), { signal }))) {
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      watchers.forEach((each) => each.capture === event.id && each.site === (event.site ?? null) && each.tell(event));
    }
  } catch (error) {
    if (error.name !== "AbortError") console.warn(error);
  }
  if (!signal.aborted) timer = setTimeout(listen, AGAIN_MS);
}
