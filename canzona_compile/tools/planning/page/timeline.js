// The timeline: what is visible, and what is where. `drawing.js` paints it, `gestures.js` moves it.

const AXIS = 28; // pixels of the axis on top
const TITLE = 22; // of the line above a rank's lanes
const LANE = 20;
const GAP = 3;

const STREAM_WORDS = { compute: "processor", node: "links within the node", network: "links to other nodes" };
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
    legend(
      byId("timeline-legend"),
      KINDS.filter(([kind]) => used.has(kind)).map(([kind, name]) => [name, `--${kind}`]),
    );
    new Gestures(this);
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
          const own = (byLane.get(`${rank} ${s} ${row}`) ?? []).sort(
            (a, b) => this.spans.start[a] - this.spans.start[b],
          );
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
    const which =
      simulation.shown.length < all ? `${simulation.shown.length} of ${plural(all, "rank")}` : plural(all, "rank");
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
    byId("range").textContent = all
      ? duration(this.total)
      : `${mark(this.from, step, size)} – ${mark(this.to, step, size)} ${unit}`;
    byId("map").classList.toggle("all", all);
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

  local(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
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
    const pairs = [
      ["time", duration(Math.max(0, time))],
      ["holds", bytes(now === undefined ? 0 : held[now])],
    ];
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
    const stream = this.data.simulation.streams[this.spans.stream[i]];
    const pairs = [
      ["rank", `${number(rank[i])}, ${STREAM_WORDS[stream] ?? stream}`],
      ["time", `${duration(start[i])} to ${duration(end[i])}`],
      ["lasts", `${duration(end[i] - start[i])}, ${share(end[i] - start[i], this.total)} of the step`],
    ];
    if (flow[i] >= 0) {
      const members = new Set(this.flows.get(flow[i]).map((k) => rank[k])).size;
      pairs.push(
        ["sends", bytes(this.spans.bytes[i])],
        ["collective", `${flow[i]}, ${plural(members, "rank")} of those shown`],
      );
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
