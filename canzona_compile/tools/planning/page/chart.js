// A column per rank, or per pixel where there are more ranks than pixels.

const AXIS_LABELS = 64; // pixels left of the columns

function metrics(data) {
  const { loads, simulation } = data;
  const ranks = simulation.ranks;
  const one = (colour) => (values) => [["", values, colour]];
  const found = [
    {
      name: "Work",
      unit: flops,
      step: nice,
      about: "FLOPs of the distributed matrices that a rank computes in a step",
      rank: loads.rank,
      parts: one("compute")(loads.flops),
      cuts: loads.by_group,
      more: (i) => [["matrices", number(loads.tasks[i])]],
    },
    {
      name: "Time",
      unit: duration,
      step: nice,
      about: "where the step goes on each rank",
      rank: ranks.rank,
      parts: [
        ["computes", ranks.compute, "compute"],
        ["waits for a transfer", ranks.exposed, "gather"],
        ["waits for other ranks", ranks.bubble, "idle"],
      ],
    },
    {
      name: "Buffers",
      unit: bytes,
      step: niceBytes,
      about: "most bytes of buffers at any time",
      rank: ranks.rank,
      parts: one("scatter")(ranks.peak),
    },
    {
      name: "Sent",
      unit: bytes,
      step: niceBytes,
      about: "bytes sent to other ranks in a step",
      rank: ranks.rank,
      parts: one("gather")(ranks.sent),
    },
  ];
  for (const metric of found) {
    metric.total = metric.rank.map((_, i) => metric.parts.reduce((sum, [, values]) => sum + values[i], 0));
    metric.most = metric.total.reduce((a, b) => Math.max(a, b), 0);
    metric.mean = metric.total.reduce((a, b) => a + b, 0) / Math.max(1, metric.total.length);
  }
  return found.filter((metric) => metric.rank.length);
}

class Chart {
  constructor(data) {
    this.frame = byId("load-chart");
    this.canvas = byId("load-canvas");
    this.metrics = metrics(data);
    this.metric = this.metrics[0];
    this.at = -1; // the column under the pointer or the keyboard
    this.draw = paced(() => this.paint());
    if (!this.metric) {
      byId("load").hidden = true;
      return;
    }
    this.offer();
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerdown", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.leave());
    new ResizeObserver(this.draw).observe(this.frame);
    this.choose(this.metric);
  }

  offer() {
    fill(
      byId("load-choice"),
      this.metrics.map((metric, i) => {
        const input = el("input", { type: "radio", name: "metric", checked: i === 0 });
        input.addEventListener("change", () => this.choose(metric));
        return el("label", {}, input, el("span", {}, metric.name));
      }),
    );
  }

  choose(metric) {
    this.metric = metric;
    this.leave();
    const { unit, rank, total, most, mean } = metric;
    const busiest = rank[total.indexOf(most)];
    const spread = mean ? `, ${ratio(most / mean)} times the mean of ${unit(mean)}` : "";
    const worst = `The most is ${unit(most)} on rank ${number(busiest)}${spread}.`;
    const text = `${plural(rank.length, "rank")}: ${metric.about}. ${worst}`;
    byId("load-about").textContent = text;
    this.frame.setAttribute("aria-label", `${text} Arrow keys go from rank to rank.`);
    const named = metric.parts.filter(([name]) => name);
    byId("load-legend").hidden = !named.length;
    legend(
      byId("load-legend"),
      named.map(([name, , colour]) => [name, `--${colour}`]),
    );
    this.classes();
    this.draw();
  }

  /** How many ranks have how much, where there are too many to compare one by one. */
  classes() {
    const { unit, total, most } = this.metric;
    if (total.length <= 64) {
      fill(byId("load-classes"));
      return;
    }
    const least = total.reduce((a, b) => Math.min(a, b), Infinity);
    const counts = new Array(most > least ? 32 : 1).fill(0);
    const width = (most - least) / counts.length || 1;
    for (const value of total) counts[Math.min(counts.length - 1, Math.floor((value - least) / width))]++;
    const top = Math.max(...counts);
    const name = (n, i) => `${plural(n, "rank")} with ${unit(least + i * width)} to ${unit(least + (i + 1) * width)}`;
    fill(
      byId("load-classes"),
      el("h3", { style: { marginTop: "1.2rem" } }, "Ranks by how much"),
      el(
        "div",
        {
          class: "classes",
          role: "img",
          "aria-label": counts
            .map((n, i) => n && name(n, i))
            .filter(Boolean)
            .join("; "),
        },
        counts.map((n, i) =>
          el("div", {
            title: counts.length > 1 ? name(n, i) : `${plural(n, "rank")} with ${unit(least)}`,
            style: {
              height: `${n ? Math.max(2, (100 * n) / top) : 0}%`,
              background: `var(--${this.metric.parts[0][2]})`,
            },
          }),
        ),
      ),
      el(
        "div",
        { class: "ends" },
        el("span", {}, unit(least)),
        el("span", {}, `tallest: ${plural(top, "rank")}`),
        el("span", {}, unit(most)),
      ),
    );
  }

  paint() {
    const box = { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
    const g = sharp(this.canvas, box.width, box.height);
    const { rank, most, mean, unit, step } = this.metric;
    const [left, top, bottom] = [AXIS_LABELS, 18, box.height - 22];
    const room = bottom - top;
    g.font = `11px ${FONT}`;
    g.textBaseline = "alphabetic";
    const grid = step(Math.max(most, 1e-30) / 4);
    for (let value = 0; value <= most * 1.0001; value += grid) {
      const y = Math.round(bottom - (value / (most || 1)) * room) + 0.5;
      g.strokeStyle = colours.line;
      g.lineWidth = 1;
      g.beginPath();
      g.moveTo(left, y);
      g.lineTo(box.width, y);
      g.stroke();
    }
    this.each = (box.width - left) / rank.length;
    this.wide = this.each >= 2.5;
    const columns = this.columns();
    for (let i = 0; i < columns; i++) this.column(g, i, columns, left, bottom, room);
    g.fillStyle = colours.soft;
    g.textAlign = "right";
    for (let value = 0; value <= most * 1.0001; value += grid) {
      g.fillText(unit(value), left - 8, bottom - (value / (most || 1)) * room + 4);
    }
    const y = Math.round(bottom - (mean / (most || 1)) * room) + 0.5;
    g.setLineDash([5, 4]);
    g.strokeStyle = colours.ink;
    g.lineWidth = 1.25;
    g.beginPath();
    g.moveTo(left, y);
    g.lineTo(box.width, y);
    g.stroke();
    g.setLineDash([]);
    this.label(g, `mean ${unit(mean)}`, box.width - 4, y - 5);
    g.textAlign = "center";
    const every = Math.max(1, Math.round(nice((rank.length * 44) / (box.width - left))));
    for (let i = 0; i < rank.length; i += every) {
      g.fillText(number(rank[i]), Math.min(Math.max(left + (i + 0.5) * this.each, 8), box.width - 16), box.height - 6);
    }
    g.textAlign = "left";
  }

  /** Text with a halo, since it may stand on a column. */
  label(g, text, x, y) {
    g.strokeStyle = colours.card;
    g.lineWidth = 3.5;
    g.lineJoin = "round";
    g.strokeText(text, x, y);
    g.fillText(text, x, y);
  }

  column(g, i, columns, left, bottom, room) {
    const { rank, parts, cuts, total, most } = this.metric;
    const scale = room / (most || 1);
    g.globalAlpha = this.at < 0 || this.at === i ? 1 : 0.55;
    if (!this.wide) {
      const [from, to] = this.range(i, columns);
      let [sum, largest] = [0, 0];
      for (let r = from; r < to; r++) [sum, largest] = [sum + total[r], Math.max(largest, total[r])];
      g.fillStyle = colours[parts[0][2]];
      g.globalAlpha *= 0.4;
      g.fillRect(left + i, bottom - largest * scale, 1, largest * scale);
      g.globalAlpha /= 0.4;
      let y = bottom;
      for (const [, values, colour] of parts) {
        let own = 0;
        for (let r = from; r < to; r++) own += values[r];
        g.fillStyle = colours[colour];
        g.fillRect(left + i, y - (own / (to - from)) * scale, 1, (own / (to - from)) * scale);
        y -= (own / (to - from)) * scale;
      }
      g.globalAlpha = 1;
      return;
    }
    const gap = this.each > 12 ? Math.min(10, this.each * 0.22) : this.each > 4 ? 1 : 0;
    const [from, to] = [Math.round(left + i * this.each), Math.round(left + (i + 1) * this.each)]; // no blurred edges
    const width = Math.min(to - from - gap, 64);
    const x = from + (to - from - width) / 2;
    let y = bottom;
    const pieces = cuts
      ? cuts[i].map(([group, value]) => ["", value, parts[0][2], group % 2])
      : parts.map((p) => [p[0], p[1][i], p[2], 0]);
    for (const [, value, colour, odd] of pieces) {
      g.fillStyle = colours[colour];
      const shade = g.globalAlpha;
      g.globalAlpha = shade * (odd ? 0.78 : 1);
      const height = value * scale;
      g.fillRect(x, y - height, width, Math.max(0, height - (height > 4 && pieces.length > 1 ? 1 : 0)));
      y -= height;
      g.globalAlpha = shade;
    }
    g.globalAlpha = 1;
  }

  columns() {
    return this.wide ? this.metric.rank.length : Math.floor(this.canvas.clientWidth - AXIS_LABELS);
  }

  /** Ranks behind a column of a pixel. */
  range(i, columns) {
    const all = this.metric.rank.length;
    const from = Math.min(all - 1, Math.floor((i * all) / columns));
    return [from, Math.max(from + 1, Math.floor(((i + 1) * all) / columns))];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const columns = this.columns();
    const i = Math.floor(((event.clientX - box.left - AXIS_LABELS) / (box.width - AXIS_LABELS)) * columns);
    if (i < 0 || i >= columns) return this.leave();
    this.show(i, columns, event.clientX, event.clientY);
  }

  show(i, columns, x, y) {
    const { rank, parts, total, unit, more, cuts, mean } = this.metric;
    this.at = i;
    const [from, to] = this.wide ? [i, i + 1] : this.range(i, columns);
    let heaviest = from;
    for (let r = from; r < to; r++) if (total[r] > total[heaviest]) heaviest = r;
    const against = mean ? ` (${ratio(total[heaviest] / mean)} × mean)` : "";
    const title =
      to - from > 1 ? `Ranks ${number(rank[from])} to ${number(rank[to - 1])}` : `Rank ${number(rank[from])}`;
    const pairs = [
      [to - from > 1 ? `most, rank ${number(rank[heaviest])}` : "in all", unit(total[heaviest]) + against],
    ];
    for (const [name, values] of parts) if (name) pairs.push([name, unit(values[heaviest])]);
    if (more) pairs.push(...more(heaviest));
    if (cuts)
      for (const [group, value] of cuts[heaviest].slice(0, 12)) pairs.push([`micro-group ${group}`, unit(value)]);
    tip.show(x, y, el("strong", {}, title), terms(pairs));
    byId("load-now").textContent = `${title}: ${pairs.map((pair) => pair.join(" ")).join(", ")}`;
    this.draw();
  }

  leave() {
    if (this.at < 0) return;
    this.at = -1;
    tip.hide();
    this.draw();
  }

  key(event) {
    const columns = this.columns();
    const jumps = {
      ArrowLeft: this.at - 1,
      ArrowRight: this.at + 1,
      Home: 0,
      End: columns - 1,
      PageUp: this.at - Math.ceil(columns / 10),
      PageDown: this.at + Math.ceil(columns / 10),
    };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in jumps)) return;
    event.preventDefault();
    const i = Math.min(columns - 1, Math.max(0, jumps[event.key]));
    const box = this.canvas.getBoundingClientRect();
    const x = box.left + AXIS_LABELS + ((i + 0.5) * (box.width - AXIS_LABELS)) / columns;
    this.show(i, columns, x, box.top + box.height / 3);
  }
}
