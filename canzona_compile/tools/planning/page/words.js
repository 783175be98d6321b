// How figures read.

const THIN = "\u2009";

function rounded(x) {
  return Math.abs(x) >= 100 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)));
}

function scaled(x, units) {
  const [size, unit] = units.find(([size]) => Math.abs(x) >= size * 0.9995) ?? units[units.length - 1];
  return `${rounded(x / size)} ${unit}`;
}

const UNITS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const duration = (s) => (s === null ? "–" : s === 0 ? "0" : scaled(s, UNITS));
const bytes = (n) =>
  scaled(n, [
    [2 ** 50, "PiB"],
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
    [1, "B"],
  ]);
const METRIC = [
  [1e18, "E"],
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];
const flops = (n) =>
  scaled(
    n,
    METRIC.map(([size, unit]) => [size, `${unit}FLOP`]),
  );
const rate = (n, unit) =>
  scaled(
    n,
    METRIC.map(([size, prefix]) => [size, `${prefix}${unit}`]),
  );
const counted = (n) =>
  scaled(n, [
    [1e12, "trillion"],
    [1e9, "billion"],
    [1e6, "million"],
    [1, ""],
  ]).trim();
const number = (n) => n.toLocaleString("en");
const share = (part, whole) => (whole ? `${rounded((100 * part) / whole)}%` : "0%");
const ratio = (x) => (x === null ? "–" : x < 100 ? x.toFixed(2) : number(Math.round(x)));
const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
const dims = (shape) => shape.map(number).join(" × ");
const shortAct = (act) => act.replace(/^start /, "");

/** A moment on an axis whose marks are `step` apart, without its unit. */
function mark(at, step, size) {
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return (at / size).toFixed(Math.min(12, digits));
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((f) => f * power >= least * (1 - 1e-9));
}

/** The same for bytes: powers of two. */
const niceBytes = (least) => 2 ** Math.ceil(Math.log2(Math.max(1, least)));

/** `10*m**3 + 2*m*n`, typeset. */
function formula(text) {
  const out = el("span", { class: "formula" });
  const tokens = text.match(/\*\*|[A-Za-z_]\w*|\d+(?:\.\d+)?|\s+|./gs) ?? [];
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i];
    if (token === "**") {
      let depth = 0;
      const power = [];
      do {
        i++;
        depth += (tokens[i] === "(") - (tokens[i] === ")");
        power.push(tokens[i]);
      } while (depth > 0 && i + 1 < tokens.length);
      out.append(el("sup", {}, ...power.map(symbol)));
    } else if (token === "*") {
      out.append(THIN);
    } else if (token === "-") {
      out.append("−");
    } else {
      out.append(symbol(token));
    }
  }
  return out;
}

const symbol = (token) => (/^[a-z]\d*$/.test(token) ? el("i", {}, token) : (token ?? ""));

/** The text at `i` of a column that holds each of its values once. */
const pick = (column, i) => column.of[column.at[i]];
