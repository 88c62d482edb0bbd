// What both views of a capture are governed with.

import { html } from "./vendor/preact-htm.js";

/** A select; `options`: a list, or an object from value to text. */
export function Choice({ label, value, options, onChange, disabled }) {
  const pairs = Array.isArray(options) ? options.map((each) => [each, each]) : Object.entries(options);
  return html`<label class="choice">${label}<select value=${value} disabled=${disabled} onChange=${(event) => onChange(event.target.value)}>
    ${pairs.map(([each, text]) => html`<option value=${each} selected=${each === value}>${text}</option>`)}</select></label>`;
}

/** Goes through a capture of `end` positions, `step` of which are shown at a time. */
export function Pager({ page, step, end, onChange, what = "positions" }) {
  if (end <= step) return null;
  const stop = Math.min((page + 1) * step, end);
  return html`<span class="pager"><button class="plain" aria-label=${`earlier ${what}`} disabled=${page === 0} onClick=${() => onChange(page - 1)}>‹</button>
    ${what} ${page * step}–${stop - 1} of ${end}
    <button class="plain" aria-label=${`later ${what}`} disabled=${stop >= end} onClick=${() => onChange(page + 1)}>›</button></span>`;
}
