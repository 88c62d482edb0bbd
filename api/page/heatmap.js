// The map: layers upwards, positions to the right, drawn on a canvas; moved through with mouse or arrow keys.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { shown } from "./colours.js";
import { REASONS, reasonsOf } from "./data.js";

const LABELS_PX = 74; // below the cells: tokens written upwards, where there is room
const NAMES_PX = 112; // beside the cells: the names of rows that are no layers
const NAME_CHARS = 16;
const TICKS_PX = 20;
const TALL_PX = 560; // beyond, the map scrolls
const JUMP = 10;

export const tokenText = (text, id) => (text === undefined || text === null ? `#${id ?? "?"}` : text);
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");

/** What a row of a map is of: a layer, or in a map with `names` what it names; `rowKind` says what they all are. */
export const rowName = (map, layer) => map.names?.[layer] ?? `layer ${layer}`;

/** What a cell says, in words. */
export function cellText(map, reasons, texts, layer, position) {
  const [row, column] = [map.layers.indexOf(layer), position - map.start];
  const value = map.values[row]?.[column];
  const token = visible(tokenText(texts[position], map.token_ids[column]));
  const gap = reasons[row]?.[column];
  const unshown = value === null ? map.told?.(row, column) : "";
  const what = value !== null && value !== undefined ? `${map.names && !map.rowKind ? "" : `${map.measure} `}${shown(value)}`
    : unshown ? unshown : gap ? `missing: ${REASONS[gap.reason] ?? gap.reason}${gap.capture && gap.capture !== map.capture ? " (in the other capture)" : ""}`
      : "no number";
  const [where, told] = map.rowKind ? [`position ${position}`, `${map.rowKind === "query" ? "from query " : ""}${rowName(map, layer)}: ${what}`]
    : map.names ? [`position ${position}`, `${rowName(map, layer)} ${what}`]
    : [`position ${position} · ${rowName(map, layer)}`, what];
  return { token, where, what: told, spoken: `token ${token}, position ${position}, ${map.names ? "" : `${rowName(map, layer)}, `}${told}` };
}

function sizes(map, room, span) {
  const width = Math.max(3, Math.min(30, Math.floor(room / Math.max(1, span))));
  const height = Math.max(6, Math.min(24, Math.floor(400 / Math.max(1, map.layers.length))));
  return { width, height, below: width >= 13 ? LABELS_PX : TICKS_PX };
}

function hatch(context, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = ink;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-3, 3, 9]) {
    pen.moveTo(shift - 4, 7);
    pen.lineTo(shift + 4, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function draw(canvas, gutter, { map, texts, scale, selected, size, prompt }) {
  const style = getComputedStyle(canvas);
  const [ink, soft, line] = ["--ink", "--ink-soft", "--line"].map((name) => style.getPropertyValue(name).trim());
  const columns = map.stop - map.start;
  const rows = map.layers.length;
  const [wide, high] = [columns * size.width, rows * size.height];
  const ratio = window.devicePixelRatio || 1;
  const pen = fit(canvas, wide, high + size.below, ratio);
  const missing = hatch(pen, soft);
  const gapX = size.width > 5 ? 1 : 0;
  const gapY = size.height > 8 ? 1 : 0;
  for (let row = 0; row < rows; row += 1) {
    const top = (rows - 1 - row) * size.height;
    for (let column = 0; column < columns; column += 1) {
      const value = map.values[row][column] ?? null;
      if (value === null && map.told?.(row, column)) continue; // nothing is missing there
      pen.fillStyle = value === null ? missing : scale.colour(value, row);
      pen.fillRect(column * size.width, top, size.width - gapX, size.height - gapY);
    }
  }
  if (prompt > map.start && prompt < map.stop) { // where generated tokens begin
    pen.fillStyle = ink;
    pen.fillRect((prompt - map.start) * size.width - 1, 0, 1.5, high + 5);
  }
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = soft;
  if (size.below === LABELS_PX) {
    for (let column = 0; column < columns; column += 1) {
      const position = map.start + column;
      pen.save();
      pen.translate((column + 0.5) * size.width + 3, high + 6);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "right";
      pen.fillStyle = selected?.position === position ? ink : soft;
      pen.fillText(visible(tokenText(texts[position], map.token_ids[column])).slice(0, 11), 0, 0);
      pen.restore();
    }
  } else {
    const every = [10, 20, 50, 100, 200, 500].find((n) => n * size.width > 46) ?? 1000;
    for (let at = Math.ceil(map.start / every) * every; at < map.stop; at += every) {
      pen.fillRect((at - map.start) * size.width, high, 1, 4);
      pen.fillText(String(at), (at - map.start) * size.width, high + 15);
    }
  }
  if (selected && map.layers.includes(selected.layer) && selected.position >= map.start && selected.position < map.stop) {
    const [x, y] = [(selected.position - map.start) * size.width, (rows - 1 - map.layers.indexOf(selected.layer)) * size.height];
    pen.lineWidth = 2;
    pen.strokeStyle = style.getPropertyValue("--ground").trim();
    pen.strokeRect(x - 1.5, y - 1.5, size.width + 2, size.height + 2);
    pen.strokeStyle = ink;
    pen.strokeRect(x - 0.5, y - 0.5, size.width, size.height);
  }
  const beside = map.names ? NAMES_PX : 34;
  const side = fit(gutter, beside, high + size.below, ratio);
  side.font = "11px system-ui, sans-serif";
  side.textAlign = "right";
  const each = Math.ceil(13 / size.height);
  for (let row = 0; row < rows; row += 1) {
    if (row % each && row !== rows - 1) continue;
    if (row === rows - 1 && row % each && row % each < each / 2) continue;
    side.fillStyle = selected?.layer === map.layers[row] ? ink : soft;
    const name = String(map.names?.[map.layers[row]] ?? map.layers[row]);
    side.fillText(name.length > NAME_CHARS ? `${name.slice(0, NAME_CHARS - 1)}…` : name, beside - 6, (rows - 0.5 - row) * size.height + 4);
  }
  side.fillStyle = line;
}

function fit(canvas, width, height, ratio) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return pen;
}

export const MOVES = {
  ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0], PageUp: [0, -JUMP], PageDown: [0, JUMP],
  Home: [0, -Infinity], End: [0, Infinity],
};

/**
 * `selected` {layer, position} moves with keys and clicks (`onSelect`); Enter or a click opens the row (`onOpen`, where
 * there are any). Maps with the same `span`, the positions that there is room for, stand position below position.
 */
export function HeatMap({ id, title, map, span, texts, scale, prompt, selected, onSelect, onOpen }) {
  const [frame, canvas, gutter, area] = [useRef(), useRef(), useRef(), useRef()];
  const [room, setRoom] = useState(640);
  const [hover, setHover] = useState(null);
  const [theme, setTheme] = useState(0);
  const reasons = useMemo(() => reasonsOf(map), [map]);
  const size = sizes(map, room, span);

  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setRoom(entry.contentRect.width));
    watch.observe(area.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme((n) => n + 1);
    dark.addEventListener("change", changed);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", changed);
    };
  }, []);
  useLayoutEffect(() => draw(canvas.current, gutter.current, { map, texts, scale, selected, size, prompt }),
    [map, span, texts, scale, selected, room, prompt, theme]);
  useEffect(() => { // the chosen cell stays in view
    if (!selected) return;
    const [left, box] = [(selected.position - map.start) * size.width, area.current];
    if (left < box.scrollLeft) box.scrollLeft = left - size.width;
    if (left + size.width > box.scrollLeft + box.clientWidth) box.scrollLeft = left + 2 * size.width - box.clientWidth;
    const [top, body] = [(map.layers.length - 1 - map.layers.indexOf(selected.layer)) * size.height, box.parentElement];
    if (top < body.scrollTop) body.scrollTop = top;
    if (top + size.height > body.scrollTop + body.clientHeight) body.scrollTop = top + size.height - body.clientHeight;
  }, [selected?.position, selected?.layer]);

  const cellAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / size.width);
    const row = map.layers.length - 1 - Math.floor((event.clientY - box.top) / size.height);
    if (column < 0 || column >= map.stop - map.start || row < 0 || row >= map.layers.length) return null;
    return { layer: map.layers[row], position: map.start + column };
  };
  const onKey = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return selected && onOpen?.(selected);
    }
    const move = MOVES[event.key];
    if (!move || event.altKey || event.metaKey) return undefined;
    event.preventDefault();
    const from = selected ?? { layer: map.layers[0], position: map.start };
    const within = (value, low, high) => Math.max(low, Math.min(high, value));
    const row = within(map.layers.indexOf(from.layer) + move[0], 0, map.layers.length - 1);
    return onSelect({ layer: map.layers[row], position: within(from.position + move[1], map.start, map.stop - 1) });
  };
  const onMove = (event) => {
    const cell = cellAt(event);
    const box = frame.current.getBoundingClientRect();
    setHover(cell && { ...cell, x: event.clientX - box.left, y: event.clientY - box.top, flip: event.clientX > innerWidth - 260 });
  };
  const told = selected && cellText(map, reasons, texts, selected.layer, selected.position);
  const tip = hover && cellText(map, reasons, texts, hover.layer, hover.position);

  return html`
    <figure class="map" ref=${frame}>
      <figcaption id=${`${id}-title`}>${title}</figcaption>
      <div class=${map.layers.length * size.height > TALL_PX ? "map-body tall" : "map-body"}>
        <canvas class="gutter" ref=${gutter} aria-hidden="true"></canvas>
        <div class="map-area" ref=${area} id=${id} role="application" tabindex="0"
            aria-roledescription="heat map" aria-labelledby=${`${id}-title`} aria-describedby=${`${id}-how`}
            onKeyDown=${onKey} onFocus=${() => !selected && onSelect({ layer: map.layers[0], position: map.start })}>
          <canvas ref=${canvas} aria-hidden="true" data-columns=${map.stop - map.start} data-cell=${`${size.width}x${size.height}`} onMouseMove=${onMove} onMouseLeave=${() => setHover(null)}
            onClick=${(event) => { const cell = cellAt(event); if (cell) { onSelect(cell); onOpen?.(cell); } }}></canvas>
        </div>
      </div>
      <p class="sr" id=${`${id}-how`}>Arrow keys move by ${map.rowKind ?? (map.names ? "score" : "layer")} and token, Page Up and Page Down by ten tokens, Home and End
        to the ends${onOpen && `, ${map.rowKind === "head" ? "Enter shows the head" : "Enter opens the row"}`}.</p>
      <p class="sr" aria-live="polite" id=${`${id}-told`}>${told && told.spoken}</p>
      ${tip && html`<div class=${`tip${hover.flip ? " flip" : ""}`} role="presentation" style=${{ left: `${hover.x}px`, top: `${hover.y}px` }}>
        <b>${tip.token}</b><span>${tip.where}</span><span>${tip.what}</span></div>`}
    </figure>`;
}

/** Colour bar, what it is of (`range`: from where to where that goes), and what the hatching means in these maps. */
export function Legend({ scale, maps, name, range }) {
  const bar = `linear-gradient(90deg, ${scale.colours.filter((_, i) => i % 16 === 0 || i === 255).join(",")})`;
  const reasons = [...new Set(maps.flatMap((map) => map.missing.map((gap) => gap.reason)))];
  return html`<div class="legend">
    <span>${scale.ends[0]}</span><span class="bar" role="img" aria-label=${`colours of ${name}`} style=${{ background: bar }}></span><span>${scale.ends[1]}</span>
    <span class="legend-name">${name}</span>${range && html`<span>from ${shown(range[0])} to ${shown(range[1])}</span>`}
    ${reasons.map((reason) => html`<span class="key"><i class="hatch" aria-hidden="true"></i>${REASONS[reason] ?? reason}</span>`)}
  </div>`;
}

/** The same numbers as a table, 24 positions around the chosen one. */
export function ValueTable({ title, map, texts, selected }) {
  const reasons = useMemo(() => reasonsOf(map), [map]);
  const first = Math.max(map.start, Math.min((selected?.position ?? map.start) - 12, map.stop - 24));
  const positions = Array.from({ length: Math.min(24, map.stop - first) }, (_, i) => first + i);
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${`values as a table: ${title}`}><table class="values">
    <thead><tr><th scope="col">${map.rowKind ?? (map.names ? "score" : "layer")}</th>${positions.map((at) => html`<th scope="col"><span class="position">${at}</span>
      ${visible(tokenText(texts[at], map.token_ids[at - map.start]))}</th>`)}</tr></thead>
    <tbody>${[...map.layers].reverse().map((layer) => {
    const row = map.layers.indexOf(layer);
    return html`<tr><th scope="row">${map.names?.[layer] ?? layer}</th>${positions.map((at) => {
      const value = map.values[row][at - map.start] ?? null;
      if (value === null && map.told?.(row, at - map.start)) return html`<td></td>`;
      return value === null ? html`<td class="hatch">${reasons[row][at - map.start]?.reason ?? "no number"}</td>` : html`<td>${shown(value)}</td>`;
    })}</tr>`;
  })}</tbody></table></div>`;
}
