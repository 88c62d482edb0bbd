// From a value to a colour: two scales that keep their order for every kind of eyesight, and what bounds them.

const SEQUENTIAL = [ // viridis
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99],
  [170, 220, 50], [253, 231, 37],
];
const DIVERGING = [[33, 102, 172], [103, 169, 207], [209, 229, 240], [247, 247, 247], [253, 219, 199], [239, 138, 98],
  [178, 24, 43]];
const STEPS = 256;

/** Black or white, whichever is read better on a colour. */
function inkOn(colour) {
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const table = (stops) => Array.from({ length: STEPS }, (_, i) => {
  const at = (i / (STEPS - 1)) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const mix = stops[low].map((from, c) => Math.round(from + (stops[low + 1][c] - from) * (at - low)));
  return { colour: `rgb(${mix})`, ink: inkOn(mix) };
});
const TABLES = { sequential: table(SEQUENTIAL), diverging: table(DIVERGING), rising: table(DIVERGING.slice(3)) };

/** Sorted numbers of rows, thinned out where there are very many. */
function sorted(rows) {
  const numbers = rows.flat().filter((value) => value !== null);
  return Float64Array.from(numbers).sort();
}
const quantile = (numbers, q) => numbers[Math.round(q * (numbers.length - 1))] ?? 0;

function bounds(rows, signed) {
  const numbers = sorted(rows);
  // A single outlying token (the first one, as a rule) must not take all the colours.
  const [low, high] = [quantile(numbers, 0.01), quantile(numbers, 0.985)];
  if (!signed) return low === high ? [low - 1, high + 1] : [low, high];
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return [-most, most];
}

/** The least and the greatest of the values of maps. */
export function rangeOf(maps) {
  const numbers = sorted(maps.flatMap((map) => map.values));
  return [numbers[0] ?? 0, numbers.at(-1) ?? 0];
}

/**
 * What colours the values of one or more maps. `mode`: linear, log (of the size, keeping the sign) or layer (each layer
 * in bounds of its own); `signed` values get two hues with white for 0, `rising` ones, from 0 on, the upper of them.
 */
export function scaleOf(maps, { mode, signed, rising, fixed }) {
  const warp = mode === "log" ? (v) => Math.sign(v) * Math.log1p(Math.abs(v)) : (v) => v;
  const unwarp = mode === "log" ? (v) => Math.sign(v) * Math.expm1(Math.abs(v)) : (v) => v;
  const warped = maps.map((map) => map.values.map((row) => row.map((v) => (v === null ? null : warp(v)))));
  const whole = fixed ?? bounds(warped.flat(), signed);
  const byLayer = mode === "layer"
    ? maps[0].layers.map((_, i) => bounds(warped.map((rows) => rows[i] ?? []), signed)) : null;
  const [least, most] = rangeOf(maps).map(warp);
  const colours = TABLES[rising ? "rising" : signed ? "diverging" : "sequential"];
  const index = (value, row) => {
    const [low, high] = byLayer?.[row] ?? whole;
    return Math.max(0, Math.min(STEPS - 1, Math.round(((warp(value) - low) / (high - low)) * (STEPS - 1))));
  };
  return {
    colours: colours.map((each) => each.colour),
    ends: byLayer ? ["low in its row", "high in its row"] : [
      `${least < whole[0] ? "≤ " : ""}${shown(unwarp(whole[0]))}`, `${most > whole[1] ? "≥ " : ""}${shown(unwarp(whole[1]))}`],
    colour: (value, row) => colours[index(value, row)].colour,
    ink: (value, row) => colours[index(value, row)].ink,
  };
}

export function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 4, useGrouping: false });
}
