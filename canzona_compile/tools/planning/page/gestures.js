// What pointers, wheel and keys do to the timeline.

class Gestures {
  constructor(line) {
    this.line = line;
    this.pointers = new Map(); // that are down, and where
    this.moved = false; // since then, so that letting go is no click
    this.scrolled = -Infinity; // when a wheel last scrolled the page
    this.listen();
  }

  listen() {
    const { line } = this;
    const on = (target, kinds, run, options) =>
      kinds.split(" ").forEach((k) => target.addEventListener(k, run, options));
    const step = () => (line.to - line.from) / 4;
    on(byId("zoom-in"), "click", () => line.zoom(0.5));
    on(byId("zoom-out"), "click", () => line.zoom(2));
    on(byId("earlier"), "click", () => line.move(-step()));
    on(byId("later"), "click", () => line.move(step()));
    on(byId("whole"), "click", () => line.show(0, line.total));
    on(line.frame, "scroll", () => line.draw());
    on(line.frame, "wheel", (event) => this.wheel(event), { passive: false });
    on(line.frame, "pointerdown", (event) => this.press(event));
    on(line.frame, "pointermove", (event) => this.drag(event));
    on(line.frame, "pointerup pointercancel", (event) => this.release(event));
    on(line.frame, "pointerleave", (event) => event.pointerType === "mouse" && line.hover(-1)); // a tap stays
    on(line.frame, "keydown", (event) => this.key(event));
    const map = byId("map");
    const jump = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const box = map.getBoundingClientRect();
      const half = (line.to - line.from) / 2;
      const at = ((event.clientX - box.left) / box.width) * line.total;
      line.show(at - half, at + half);
    };
    on(map, "pointerdown", (event) => map.setPointerCapture(event.pointerId));
    on(map, "pointerdown pointermove", jump);
    // A wheel that is scrolling the page goes on doing so when the timeline comes under the pointer.
    on(
      window,
      "wheel",
      (event) => {
        if (!event.defaultPrevented) this.scrolled = event.timeStamp;
      },
      { passive: true },
    );
  }

  wheel(event) {
    const { line } = this;
    const pinch = event.ctrlKey || event.metaKey;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const whole = line.to - line.from >= line.total;
    if (!pinch && event.timeStamp - this.scrolled < 250) return;
    if (!pinch && whole && (sideways || event.deltaY > 0)) return; // nothing to do: the page scrolls
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    const amount = (event.deltaX && sideways ? event.deltaX : event.deltaY) * unit;
    if (sideways && !pinch) line.move((amount / line.width) * (line.to - line.from));
    else
      line.zoom(Math.exp(Math.max(-1, Math.min(1, amount * (pinch ? 0.01 : 0.0025)))), line.time(line.local(event)[0]));
    line.hover(-1);
  }

  press(event) {
    const { line } = this;
    if (event.button) return;
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.moved = this.pointers.size > 1;
    if (event.pointerType === "mouse") line.frame.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const { line } = this;
    const before = this.pointers.get(event.pointerId);
    if (!before) return line.point(event);
    const now = { x: event.clientX, y: event.clientY };
    if (!this.moved && Math.hypot(now.x - before.x, now.y - before.y) < 5) return;
    this.moved = true;
    line.hover(-1);
    line.frame.classList.add("dragging");
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    const left = line.canvas.getBoundingClientRect().left;
    if (other) {
      const apart = (p) => Math.max(12, Math.abs(p.x - other.x));
      const middle = line.time((before.x + other.x) / 2 - left);
      line.zoom(apart(before) / apart(now), middle);
      line.move(middle - line.time((now.x + other.x) / 2 - left));
    } else {
      line.move(((before.x - now.x) / line.width) * (line.to - line.from));
      if (event.pointerType === "mouse") line.frame.scrollTop += before.y - now.y;
    }
    this.pointers.set(event.pointerId, now);
  }

  release(event) {
    const { line } = this;
    const known = this.pointers.delete(event.pointerId);
    line.frame.classList.remove("dragging");
    if (!known || this.moved || event.type === "pointercancel") return;
    line.choose(line.under(event));
    line.point(event);
  }

  key(event) {
    const { line } = this;
    const step = (line.to - line.from) / 5;
    const shifted = { ArrowLeft: () => line.move(-step), ArrowRight: () => line.move(step) };
    const plain = {
      ArrowLeft: () => this.walk(-1),
      ArrowRight: () => this.walk(1),
      ArrowUp: () => this.climb(-1),
      ArrowDown: () => this.climb(1),
      "+": () => line.zoom(0.5),
      "=": () => line.zoom(0.5),
      "-": () => line.zoom(2),
      _: () => line.zoom(2),
      0: () => line.show(0, line.total),
      Home: () => line.show(0, line.total),
      Escape: () => (line.hover(-1), line.choose(-1)),
    };
    const run = (event.shiftKey && shifted[event.key]) || plain[event.key];
    if (!run || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    run();
  }

  /** To the next or previous span of the lane. */
  walk(by) {
    const { line } = this;
    const lane =
      line.lanes.find((own) => own.spans.includes(line.chosen)) ?? line.lanes.find((own) => own.spans.length);
    const at = lane.spans.indexOf(line.chosen);
    line.reveal(lane.spans[Math.min(lane.spans.length - 1, Math.max(0, at + by))]);
  }

  /** To the lane above or below, at about the same time. */
  climb(by) {
    const { line } = this;
    const full = line.lanes.filter((own) => own.spans.length);
    const at = full.findIndex((own) => own.spans.includes(line.chosen));
    if (at < 0) return this.walk(1);
    const lane = full[Math.min(full.length - 1, Math.max(0, at + by))];
    line.reveal(lane.spans[Math.max(0, line.lastBefore(lane.spans, line.spans.start[line.chosen]))]);
  }
}
