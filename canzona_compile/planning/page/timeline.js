
// The timeline: what is visible, and what pointers, wheel and keys do to it. `drawing.js` paints it.

const AXIS = 28; // pixels of the axis on top
const TITLE = 22; // of the line above a rank's lanes
const LANE = 20;
const GAP = 3;

const STREAM_WORDS = { compute: "computes", node: "links within the node", network: "links to other nodes" };
const KINDS = [
  ["compute", "computes matrices"],
  ["elementwise", "prepares, applies"],
  ["gather", "gathers"],
  ["scatter", "scatters"],
  ["exchange", "exchanges"],
  ["other", "other"],
];

function kindOf(act) {
  if (act === "compute") return "compute";
  if (act === "prepare" || act === "apply") return "elementwise";
  return ["gather", "scatter", "exchange"].find((word) => act.endsWith(word)) ?? "other";
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.total = data.simulation.seconds;
    this.spans = data.simulation.spans;
    this.from = 0;
    this.to = this.total;
    this.hovered = this.chosen = -1;
    this.pointers = new Map();
    this.frame = byId("lanes");
    this.canvas = byId("timeline-canvas");
    this.draw = paced(() => paintTimeline(this));
    if (!this.spans.rank.length || !(this.total > 0)) {
      byId("timeline").hidden = true;
      return;
    }
    this.kinds = this.spans.act.of.map(kindOf);
    this.arrange();
    const used = new Set(this.kinds);
    legend(byId("timeline-legend"), KINDS.filter(([kind]) => used.has(kind)).map(([kind, name]) => [name, `--${kind}`]));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.frame);
    this.show(0, this.total);
  }

  kind(i) {
    return this.kinds[this.spans.act.at[i]];
  }

  /** Lanes from top to bottom, their spans by time, and the spans of each collective. */
  arrange() {
    const { simulation } = this.data;
    const byLane = new Map();
    this.flows = new Map();
    let shortest = Infinity;
    for (let i = 0; i < this.spans.rank.length; i++) {
      const key = `${this.spans.rank[i]} ${this.spans.stream[i]} ${this.spans.row[i]}`;
      if (!byLane.has(key)) byLane.set(key, []);
      byLane.get(key).push(i);
      const flow = this.spans.flow[i];
      if (flow >= 0 && !this.flows.has(flow)) this.flows.set(flow, []);
      this.flows.get(flow)?.push(i);
      const length = this.spans.end[i] - this.spans.start[i];
      if (length > 0) shortest = Math.min(shortest, length);
    }
    this.narrowest = Math.min(this.total, Math.max(shortest / 2, this.total * 1e-7));
    const held = new Map();
    simulation.memory.rank.forEach((rank, i) => {
      if (!held.has(rank)) held.set(rank, []);
      held.get(rank).push(i);
    });
    this.mostHeld = simulation.memory.bytes.reduce((a, b) => Math.max(a, b), 0);
    const streams = simulation.streams.map((_, s) => Math.max(-1, ...this.rowsOf(s)));
    this.lanes = [];
    this.titles = [];
    let y = 4;
    for (const rank of simulation.shown) {
      this.titles.push({ rank, y });
      y += TITLE;
      simulation.streams.forEach((name, s) => {
        for (let row = 0; row <= streams[s]; row++, y += LANE + GAP) {
          const own = (byLane.get(`${rank} ${s} ${row}`) ?? []).sort((a, b) => this.spans.start[a] - this.spans.start[b]);
          this.lanes.push({ rank, name: row ? "" : name, y, spans: own });
        }
      });
      if (held.has(rank) && this.mostHeld) {
        this.lanes.push({ rank, name: "buffers", y, spans: [], held: held.get(rank) });
        y += LANE + GAP;
      }
      y += 8;
    }
    this.height = y + 4;
    byId("lanes-inside").style.height = `${this.height + AXIS}px`;
    const all = simulation.ranks.rank.length;
    const which = simulation.shown.length < all ? `${simulation.shown.length} of ${plural(all, "rank")}` : plural(all, "rank");
    byId("timeline-about").textContent =
      `What ${which} would do during one step. Where a lane is empty, the rank waits or its links are idle.`;
  }

  rowsOf(stream) {
    const rows = new Set();
    for (let i = 0; i < this.spans.row.length; i++) if (this.spans.stream[i] === stream) rows.add(this.spans.row[i]);
    return rows;
  }

  get gutter() {
    return this.frame.clientWidth < 600 ? 58 : 74;
  }

  get width() {
    return Math.max(40, this.frame.clientWidth - this.gutter - 10);
  }

  x(time) {
    return this.gutter + ((time - this.from) / (this.to - this.from)) * this.width;
  }

  time(x) {
    return this.from + ((x - this.gutter) / this.width) * (this.to - this.from);
  }

  show(from, to) {
    const length = Math.min(this.total, Math.max(this.narrowest, to - from));
    this.from = Math.min(Math.max(0, from), this.total - length);
    this.to = this.from + length;
    const [size, unit] = UNITS.find(([own]) => this.total >= own) ?? UNITS[3];
    const step = nice(length / 100);
    const all = length >= this.total;
    byId("range").textContent = all ? duration(this.total) : `${mark(this.from, step, size)} – ${mark(this.to, step, size)} ${unit}`;
    byId("map-window").style.width = `${(100 * length) / this.total}%`;
    byId("map-window").style.marginLeft = `${(100 * this.from) / this.total}%`;
    Object.assign(this.canvas.dataset, { from: this.from, to: this.to });
    byId("whole").disabled = byId("zoom-out").disabled = all;
    this.draw();
  }

  /** Show `factor` times as much, with one moment staying where it is. */
  zoom(factor, around = (this.from + this.to) / 2) {
    const length = Math.min(this.total, Math.max(this.narrowest, (this.to - this.from) * factor));
    const left = (around - this.from) / (this.to - this.from);
    this.show(around - left * length, around + (1 - left) * length);
  }

  move(seconds) {
    this.show(this.from + seconds, this.to + seconds);
  }

  listen() {
    const on = (target, kinds, run, options) => kinds.split(" ").forEach((k) => target.addEventListener(k, run, options));
    const step = () => (this.to - this.from) / 4;
    on(byId("zoom-in"), "click", () => this.zoom(0.5));
    on(byId("zoom-out"), "click", () => this.zoom(2));
    on(byId("earlier"), "click", () => this.move(-step()));
    on(byId("later"), "click", () => this.move(step()));
    on(byId("whole"), "click", () => this.show(0, this.total));
    on(this.frame, "scroll", () => this.draw());
    on(this.frame, "wheel", (event) => this.wheel(event), { passive: false });
    on(this.frame, "pointerdown", (event) => this.press(event));
    on(this.frame, "pointermove", (event) => this.drag(event));
    on(this.frame, "pointerup pointercancel", (event) => this.release(event));
    on(this.frame, "pointerleave", () => this.hover(-1));
    on(this.frame, "keydown", (event) => this.key(event));
    const map = byId("map");
    const jump = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const box = map.getBoundingClientRect();
      const half = (this.to - this.from) / 2;
      const at = ((event.clientX - box.left) / box.width) * this.total;
      this.show(at - half, at + half);
    };
    on(map, "pointerdown", (event) => map.setPointerCapture(event.pointerId));
    on(map, "pointerdown pointermove", jump);
    // A wheel that is scrolling the page goes on doing so when the timeline comes under the pointer.
    this.scrolled = -Infinity;
    on(window, "wheel", (event) => {
      if (!event.defaultPrevented) this.scrolled = event.timeStamp;
    }, { passive: true });
  }

  wheel(event) {
    const pinch = event.ctrlKey || event.metaKey;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const whole = this.to - this.from >= this.total;
    if (!pinch && event.timeStamp - this.scrolled < 250) return;
    if (!pinch && whole && (sideways || event.deltaY > 0)) return; // nothing to do: the page scrolls
    event.preventDefault();
    const line = event.deltaMode === 1 ? 16 : 1;
    const amount = (event.deltaX && sideways ? event.deltaX : event.deltaY) * line;
    if (sideways && !pinch) this.move((amount / this.width) * (this.to - this.from));
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, amount * (pinch ? 0.01 : 0.0025)))), this.time(this.local(event)[0]));
    this.hover(-1);
  }

  local(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  press(event) {
    if (event.button) return;
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.moved = this.pointers.size > 1;
    if (event.pointerType === "mouse") this.frame.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.point(event);
    const now = { x: event.clientX, y: event.clientY };
    if (!this.moved && Math.hypot(now.x - before.x, now.y - before.y) < 5) return;
    this.moved = true;
    this.hover(-1);
    this.frame.classList.add("dragging");
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    const left = this.canvas.getBoundingClientRect().left;
    if (other) {
      const apart = (p) => Math.max(12, Math.abs(p.x - other.x));
      const middle = this.time((before.x + other.x) / 2 - left);
      this.zoom(apart(before) / apart(now), middle);
      this.move(middle - this.time((now.x + other.x) / 2 - left));
    } else {
      this.move(((before.x - now.x) / this.width) * (this.to - this.from));
      if (event.pointerType === "mouse") this.frame.scrollTop += before.y - now.y;
    }
    this.pointers.set(event.pointerId, now);
  }

  release(event) {
    const known = this.pointers.delete(event.pointerId);
    this.frame.classList.remove("dragging");
    if (!known || this.moved || event.type === "pointercancel") return;
    this.choose(this.under(event));
    this.point(event);
  }

  laneAt(event) {
    const [x, y] = this.local(event);
    if (y < AXIS || x < this.gutter) return undefined;
    const inside = y - AXIS + this.frame.scrollTop;
    return this.lanes.find((own) => inside >= own.y - 1 && inside < own.y + LANE + GAP - 1);
  }

  /** Say what is under a pointer. */
  point(event) {
    this.hover(this.under(event), event.clientX, event.clientY);
    const lane = this.laneAt(event);
    if (!lane?.held) return;
    const time = this.time(this.local(event)[0]);
    const { at, bytes: held } = this.data.simulation.memory;
    const now = lane.held.filter((i) => at[i] <= time).pop();
    const pairs = [["time", duration(Math.max(0, time))], ["holds", bytes(now === undefined ? 0 : held[now])]];
    tip.show(event.clientX, event.clientY, el("strong", {}, `buffers of rank ${number(lane.rank)}`), terms(pairs));
  }

  /** The span under a pointer, or -1. */
  under(event) {
    const lane = this.laneAt(event);
    if (!lane) return -1;
    const [x] = this.local(event);
    const slack = (2 / this.width) * (this.to - this.from); // short spans are hard to hit
    const time = this.time(x);
    const last = this.lastBefore(lane.spans, time + slack);
    const candidates = [last, last - 1].map((k) => lane.spans[k]).filter((i) => i !== undefined);
    const away = (i) => Math.max(0, this.spans.start[i] - time, time - this.spans.end[i]);
    const nearest = candidates.sort((a, b) => away(a) - away(b))[0];
    return nearest !== undefined && away(nearest) <= slack ? nearest : -1;
  }

  /** Where the last span stands that starts before a moment. */
  lastBefore(spans, time) {
    let [low, high] = [0, spans.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.spans.start[spans[middle]] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  hover(i, x, y) {
    if (i < 0) tip.hide();
    else tip.show(x, y, ...this.describe(i, 8));
    if (i === this.hovered) return;
    this.hovered = i;
    this.draw();
  }

  choose(i) {
    this.chosen = i;
    byId("detail").hidden = i < 0;
    if (i >= 0) fill(byId("detail"), ...this.describe(i, 2000));
    this.draw();
  }

  describe(i, most) {
    const { rank, group, start, end, flow } = this.spans;
    const act = shortAct(pick(this.spans.act, i));
    const pairs = [
      ["rank", `${number(rank[i])}, ${STREAM_WORDS[this.data.simulation.streams[this.spans.stream[i]]]}`],
      ["time", `${duration(start[i])} to ${duration(end[i])}`],
      ["lasts", `${duration(end[i] - start[i])}, ${share(end[i] - start[i], this.total)} of the step`],
    ];
    if (flow[i] >= 0) {
      const members = new Set(this.flows.get(flow[i]).map((k) => rank[k])).size;
      pairs.push(["sends", bytes(this.spans.bytes[i])], ["collective", `${flow[i]}, ${plural(members, "rank")} of those shown`]);
    }
    const names = pick(this.spans.tasks, i);
    const out = [el("strong", {}, `${act}, micro-group ${group[i]}`), terms(pairs)];
    if (names.length) {
      const shown = names.slice(0, most).map((k) => el("li", {}, this.name(k)));
      if (names.length > most) shown.push(el("li", {}, `and ${plural(names.length - most, "more", "more")}`));
      out.push(el("ul", { "aria-label": "matrices" }, shown));
    }
    return out;
  }

  name(k) {
    const own = this.data.tasks.name;
    return k < own.length ? own[k] : this.data.simulation.others[k - own.length];
  }

  key(event) {
    const step = (this.to - this.from) / 5;
    const shifted = { ArrowLeft: () => this.move(-step), ArrowRight: () => this.move(step) };
    const plain = {
      ArrowLeft: () => this.walk(-1), ArrowRight: () => this.walk(1), ArrowUp: () => this.climb(-1), ArrowDown: () => this.climb(1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), _: () => this.zoom(2),
      0: () => this.show(0, this.total), Home: () => this.show(0, this.total),
      Escape: () => (this.hover(-1), this.choose(-1)),
    };
    const run = (event.shiftKey && shifted[event.key]) || plain[event.key];
    if (!run || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    run();
  }

  /** To the next or previous span of the lane. */
  walk(by) {
    const lane = this.lanes.find((own) => own.spans.includes(this.chosen)) ?? this.lanes.find((own) => own.spans.length);
    const at = lane.spans.indexOf(this.chosen);
    this.reveal(lane.spans[Math.min(lane.spans.length - 1, Math.max(0, at + by))]);
  }

  /** To the lane above or below, at about the same time. */
  climb(by) {
    const full = this.lanes.filter((own) => own.spans.length);
    const at = full.findIndex((own) => own.spans.includes(this.chosen));
    if (at < 0) return this.walk(1);
    const lane = full[Math.min(full.length - 1, Math.max(0, at + by))];
    this.reveal(lane.spans[Math.max(0, this.lastBefore(lane.spans, this.spans.start[this.chosen]))]);
  }

  /** Choose a span, and bring it into sight. */
  reveal(i) {
    const [start, end, length] = [this.spans.start[i], this.spans.end[i], this.to - this.from];
    if (start < this.from || end > this.to) {
      const middle = end - start > length ? start + length / 2.2 : (start + end) / 2;
      this.show(middle - length / 2, middle + length / 2);
    }
    const { y } = this.lanes.find((own) => own.spans.includes(i));
    const room = this.frame.clientHeight - AXIS - LANE - GAP;
    this.frame.scrollTop = Math.min(y, Math.max(y - room + TITLE, this.frame.scrollTop));
    this.choose(i);
  }
}
