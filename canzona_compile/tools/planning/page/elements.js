// What the page is made of. Text goes in as text nodes, never as markup: names are the user's.

const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const fill = (target, ...children) => target.replaceChildren(...children.flat());

/** Rows of cells; a cell is a text, a node, or {of, class}. On a narrow screen each cell carries its heading. */
function table(label, heads, rows) {
  const numeric = (head) => head.startsWith(">");
  const plain = (head) => head.replace(/^>/, "");
  const cell = (content, i) => {
    const own = content?.of === undefined ? { of: content } : content;
    const classes = [numeric(heads[i]) ? "number" : "", own.class ?? ""].join(" ").trim();
    const title = i && plain(heads[i]) ? plain(heads[i]) : null;
    return el("td", { role: "cell", class: classes || null, "data-label": title }, [own.of ?? ""].flat());
  };
  return el(
    "table",
    { role: "table", "aria-label": label },
    el(
      "thead",
      { role: "rowgroup" },
      el(
        "tr",
        { role: "row" },
        heads.map((head) =>
          el("th", { role: "columnheader", scope: "col", class: numeric(head) ? "number" : null }, plain(head)),
        ),
      ),
    ),
    el(
      "tbody",
      { role: "rowgroup" },
      rows.map((row) => el("tr", { role: "row", class: row.class ?? null }, (row.cells ?? row).map(cell))),
    ),
  );
}

/** A bar of parts, [name, value, colour], as long as their sum is of `whole`; what is longer fades out at the end. */
function stack(parts, whole, label) {
  const sum = parts.reduce((total, [, value]) => total + value, 0);
  const scale = whole ? 100 / Math.max(whole, sum) : 0;
  return el(
    "div",
    { class: sum > whole * 1.001 ? "stack cut" : "stack", role: "img", "aria-label": label },
    parts.map(([name, value, colour]) =>
      el("div", { title: name, style: { width: `${value * scale}%`, background: `var(${colour})` } }),
    ),
  );
}

/** How much a row of bars shows: all, unless the longest would make the shortest invisible. */
const scaleOf = (values) => Math.min(Math.max(...values), 5 * Math.min(...values.filter((value) => value > 0)));

function legend(target, entries) {
  fill(
    target,
    entries.map(([name, colour]) =>
      el("li", {}, el("span", { class: "swatch", style: { background: `var(${colour})` } }), name),
    ),
  );
}

const tag = (text, kind = "") => el("span", { class: `tag ${kind}`.trim() }, text);

/** Pairs of a term and what it is. */
const terms = (pairs) =>
  el(
    "dl",
    {},
    pairs.flatMap(([term, what]) => [el("dt", {}, term), el("dd", {}, what)]),
  );

/** The box beside the pointer: at a point of the window, or out of sight. */
const tip = {
  show(x, y, ...content) {
    const box = byId("tip");
    fill(box, ...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
    const below = y + 18 + height < innerHeight;
    box.style.transform = `translate(${Math.max(8, left)}px, ${below ? y + 18 : Math.max(8, y - height - 14)}px)`;
  },
  hide() {
    byId("tip").hidden = true;
  },
};

/** Colours of the scheme at work, read anew when it changes. */
const colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [
    "card",
    "ink",
    "soft",
    "line",
    "faint",
    "focus",
    "compute",
    "elementwise",
    "gather",
    "scatter",
    "exchange",
    "other",
    "idle",
    "buffers",
  ]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const name of ["compute", "elementwise", "gather", "scatter", "exchange", "other"]) {
    colours[`on ${name}`] = readableOn(colours[name]);
  }
}

/** White or near-black, whichever is easier to read on a #rrggbb. */
function readableOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#14171b" : "#ffffff";
}

/** Make a canvas as sharp as the screen; coordinates stay those of CSS. */
function sharp(canvas, width, height) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** At most once per frame. */
function paced(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

const FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
