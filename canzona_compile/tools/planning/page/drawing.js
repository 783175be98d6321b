// Paints the timeline. Only lanes in sight are visited, and spans thinner than a pixel share one.

function paintTimeline(line) {
  const [width, height] = [line.frame.clientWidth, Math.min(line.frame.clientHeight, line.height + AXIS)];
  line.canvas.style.height = `${height}px`;
  const g = sharp(line.canvas, width, height);
  const top = line.frame.scrollTop - AXIS;
  g.font = `12px ${FONT}`;
  g.textBaseline = "middle";
  paintMarks(g, line, height);
  const begun = performance.now();
  const marked = new Set(line.flows.get(line.spans.flow[line.hovered >= 0 ? line.hovered : line.chosen]) ?? []);
  for (const lane of line.lanes) {
    const y = lane.y - top;
    if (y > height || y + LANE < AXIS) continue;
    g.fillStyle = colours.soft;
    g.textAlign = "right";
    g.font = `11px ${FONT}`;
    g.fillText(lane.name, line.gutter - 8, y + LANE / 2 + 0.5);
    if (lane.held) paintHeld(g, line, lane, y);
    else paintLane(g, line, lane, y);
    for (const i of lane.spans) {
      if (marked.has(i) || i === line.chosen || i === line.hovered) paintFrame(g, line, i, y, i === line.chosen);
    }
  }
  paintTitles(g, line, top, width);
  paintAxis(g, line, width);
  line.canvas.dataset.spent = (performance.now() - begun).toFixed(1);
}

/** Moments of the axis: every so many seconds, at a distance that leaves room for their labels. */
function* moments(line) {
  const step = nice(((line.to - line.from) * 84) / line.width);
  for (let k = Math.ceil(line.from / step - 1e-9); k * step <= line.to + step * 1e-9; k++) yield [k * step, step];
}

function paintMarks(g, line, height) {
  g.strokeStyle = colours.faint;
  g.lineWidth = 1;
  g.beginPath();
  for (const [at] of moments(line)) {
    const x = Math.round(line.x(at)) + 0.5;
    g.moveTo(x, AXIS);
    g.lineTo(x, height);
  }
  g.stroke();
}

function paintAxis(g, line, width) {
  g.fillStyle = colours.card;
  g.fillRect(0, 0, width, AXIS);
  g.fillStyle = colours.line;
  g.fillRect(0, AXIS - 1, width, 1);
  g.fillStyle = colours.soft;
  g.font = `11px ${FONT}`;
  const [size, unit] = UNITS.find(([own]) => line.total >= own) ?? UNITS[3];
  g.textAlign = "right";
  g.fillText(unit, line.gutter - 8, AXIS / 2);
  g.textAlign = "center";
  for (const [at, step] of moments(line)) {
    const x = line.x(at);
    const text = mark(at, step, size);
    const half = g.measureText(text).width / 2;
    g.fillText(text, Math.max(line.gutter + half, Math.min(width - half - 6, x)), AXIS / 2);
    g.fillRect(Math.round(x), AXIS - 5, 1, 4);
  }
}

function paintTitles(g, line, top, width) {
  const { rank, compute, exposed, bubble } = line.data.simulation.ranks;
  g.textAlign = "left";
  for (const title of line.titles) {
    const y = title.y - top + TITLE / 2 + 2;
    if (y < AXIS - 8 || y > top + 1e6) continue;
    const at = rank[title.rank] === title.rank ? title.rank : rank.indexOf(title.rank);
    g.font = `600 12px ${FONT}`;
    g.fillStyle = colours.ink;
    const name = `rank ${number(title.rank)}`;
    g.fillText(name, 10, y);
    if (at < 0) continue;
    const after = 10 + Math.max(line.gutter - 10, g.measureText(name).width + 14);
    g.font = `11px ${FONT}`;
    g.fillStyle = colours.soft;
    const waits = `waits ${duration(exposed[at])} for transfers and ${duration(bubble[at])} for other ranks`;
    const long = `computes ${duration(compute[at])}, ${waits}`;
    const short = `${duration(compute[at])} busy, ${duration(exposed[at] + bubble[at])} waiting`;
    g.fillText(after + g.measureText(long).width < width - 8 ? long : short, after, y);
  }
}

function paintLane(g, line, lane, y) {
  const { start, end, group } = line.spans;
  g.fillStyle = colours.faint;
  g.fillRect(line.gutter, y, line.width, LANE);
  g.textAlign = "center";
  let painted = -Infinity; // up to this x
  let kindBefore = "";
  // A span from before the view may reach into it; those of a lane do not overlap, so only the last one can.
  for (let k = Math.max(0, line.lastBefore(lane.spans, line.from)); k < lane.spans.length; k++) {
    const i = lane.spans[k];
    if (start[i] > line.to) break;
    if (end[i] < line.from) continue;
    const kind = line.kind(i);
    const left = Math.max(line.gutter, line.x(start[i]));
    const right = Math.min(line.gutter + line.width, Math.max(line.x(end[i]), left + 1));
    if (right <= painted + 0.5 && kind === kindBefore) continue;
    g.fillStyle = colours[kind];
    g.globalAlpha = group[i] % 2 ? 0.82 : 1; // neighbours of the same kind stay apart
    const room = right - left;
    if (room > 6) {
      g.beginPath();
      g.roundRect(left, y, room - 0.75, LANE, 2.5);
      g.fill();
    } else {
      g.fillRect(left, y, Math.max(1, room - (room > 3 ? 0.75 : 0)), LANE);
    }
    g.globalAlpha = 1;
    [painted, kindBefore] = [right, kind];
    if (room > 15) paintLabel(g, line, i, kind, left, room, y);
  }
}

function paintLabel(g, line, i, kind, left, room, y) {
  const act = shortAct(pick(line.spans.act, i));
  const names = pick(line.spans.tasks, i);
  const group = line.spans.group[i];
  const single = names.length === 1 ? line.name(names[0]) : "";
  const texts = [
    `${act} ${group}: ${single || plural(names.length, "matrix", "matrices")}`,
    `${act} ${group}`,
    `${act[0]}${group}`,
    `${group}`,
  ];
  g.font = `11px ${FONT}`;
  const text = texts.slice(names.length ? 0 : 1).find((own) => g.measureText(own).width < room - 8);
  if (!text) return;
  g.fillStyle = colours[`on ${kind}`];
  g.fillText(text, left + room / 2, y + LANE / 2 + 0.5);
}

function paintFrame(g, line, i, y, strong) {
  const left = Math.max(line.gutter, line.x(line.spans.start[i]));
  const right = Math.min(line.gutter + line.width, Math.max(line.x(line.spans.end[i]), left + 2));
  if (right < line.gutter || left > line.gutter + line.width || right <= left) return;
  g.strokeStyle = colours.ink;
  g.lineWidth = strong ? 2 : 1.25;
  g.beginPath();
  g.roundRect(left - 0.5, y - 0.5, right - left + 0.5, LANE + 1, 3);
  g.stroke();
}

/** Bytes of buffers over time: a curve of steps. */
function paintHeld(g, line, lane, y) {
  const { at, bytes: held } = line.data.simulation.memory;
  g.fillStyle = colours.faint;
  g.fillRect(line.gutter, y, line.width, LANE);
  g.save();
  g.beginPath();
  g.rect(line.gutter, y, line.width, LANE);
  g.clip();
  g.fillStyle = colours.buffers;
  lane.held.forEach((i, k) => {
    const end = k + 1 < lane.held.length ? at[lane.held[k + 1]] : line.total;
    if (end < line.from || at[i] > line.to || !held[i]) return;
    const height = Math.max(1, (held[i] / line.mostHeld) * LANE);
    g.fillRect(line.x(at[i]), y + LANE - height, line.x(end) - line.x(at[i]) + 0.3, height);
  });
  g.restore();
}
