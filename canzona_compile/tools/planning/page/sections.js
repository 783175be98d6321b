// Everything but the two charts.

const RATE_WORDS = {
  products: "matrix products",
  factorizations: "factorizations",
  bandwidth: "memory bandwidth",
  memory: "memory of a rank",
  launch: "launch of an operator",
  node: "links within a node",
  network: "links between nodes",
};
const STRATEGY_WORDS = {
  owner: "one rank each",
  replicated: "every rank computes all",
  "batch-split": "each rank a part of a batch",
  gram: "by Gram matrices",
};

/** The rank whose processor works longest; what a step waits for shows there. */
function busiest(ranks) {
  let at = 0;
  for (let i = 1; i < ranks.compute.length; i++) if (ranks.compute[i] > ranks.compute[at]) at = i;
  return at;
}

function exposedOf(data) {
  const { ranks } = data.simulation;
  return data.alternatives.find((own) => own.chosen)?.exposed ?? ranks.exposed[busiest(ranks)] ?? 0;
}

function headline(data) {
  const { simulation, hardware } = data;
  const ranks = simulation.ranks.rank.length;
  const measured = hardware.measured;
  const assumed = hardware.rates.filter((name) => !measured.includes(name));
  byId("title").textContent = `${data.model} with ${data.optimizer} on ${plural(ranks, "rank")}`;
  const stands = measured.length
    ? `${plural(measured.length, "measured rate")} and ${plural(assumed.length, "assumed one")}`
    : `${plural(assumed.length, "rate")}, all of them assumed`;
  fill(
    byId("lead"),
    "A plan made offline: no step was run. Its times are predictions that stand on ",
    el("a", { href: "#rates" }, stands),
    ` of a machine called ${hardware.name}.`,
  );
  const exposed = exposedOf(data);
  const hidden = data.hidden ? `and ${duration(data.hidden)} beside the next forward pass` : "of the optimizer alone";
  const tiles = [
    ["predicted step", duration(simulation.seconds), hidden],
    [data.matrices === 1 ? "matrix" : "matrices", number(data.matrices), `${counted(data.elements)} elements`],
    ["ranks", number(ranks), data.mesh.map(([name, size]) => `${name} ${number(size)}`).join(", ")],
    ["max / mean load", ratio(data.imbalance), "1.00 is even"],
    ["exposed communication", duration(exposed), `${share(exposed, simulation.seconds)} of the step`],
    ["peak buffers", bytes(data.memory.buffers), `${share(data.memory.buffers, hardware.memory)} of a rank's memory`],
  ];
  fill(
    byId("tiles"),
    tiles.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value), el("small", {}, note))),
  );
  const facts = [
    ["fingerprint", el("code", {}, data.fingerprint)],
    ["machine", `${hardware.device}, ${hardware.backend}, ${plural(hardware.ranks_per_node, "rank")} a node`],
    ["micro-groups", `${number(data.groups.length)}, ${number(data.depth)} in flight`],
    ["collectives", `${number(data.collectives)} a step`],
    ["elementwise", plural(data.elementwise, "parameter")],
    ...data.options.map(([name, value]) => [name.replaceAll("_", " "), value]),
  ];
  fill(
    byId("facts"),
    facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

function comparison(data) {
  const found = data.alternatives;
  if (!found.length) {
    byId("comparison").hidden = true;
    return;
  }
  const most = scaleOf(found.map((own) => own.seconds ?? 0));
  const base = found.find((own) => own.chosen)?.seconds;
  const more = (own) => {
    if (!base || own.chosen || own.seconds === null) return "";
    if (own.seconds > 3 * base) return ` (${rounded(own.seconds / base)} times)`;
    const change = Math.round(100 * (own.seconds / base - 1));
    return change ? ` (${change > 0 ? "+" : "−"}${Math.abs(change)}%)` : " (the same)";
  };
  const rows = found.map((own) => {
    const exposed = Math.min(own.exposed ?? 0, own.seconds ?? 0);
    const label = `${own.name}: ${duration(own.seconds)}, of which ${duration(exposed)} exposed communication`;
    const parts = [
      ["not waiting for transfers", (own.seconds ?? 0) - exposed, "--compute"],
      ["exposed communication", exposed, "--gather"],
    ];
    return {
      class: own.chosen ? "chosen" : null,
      cells: [
        { of: [own.name, " ", own.chosen ? tag("chosen", "chosen") : "", el("small", {}, own.about)] },
        {
          of: [own.seconds === null ? "impossible" : duration(own.seconds) + more(own), stack(parts, most, label)],
          class: "meter",
        },
        duration(own.exposed),
        ratio(own.imbalance),
        bytes(own.sent),
        bytes(own.peak),
        number(own.groups),
      ],
    };
  });
  const key = el("ul", { class: "legend", "aria-label": "Colours" });
  legend(key, [
    ["computes, or waits for other ranks", "--compute"],
    ["exposed communication, on the busiest rank", "--gather"],
  ]);
  const heads = ["plan", "step", ">exposed", ">max / mean", ">sent, all ranks", ">peak buffers", ">micro-groups"];
  fill(byId("alternatives"), el("div", { class: "bar" }, key), table("Other plans", heads, rows));
}

function memory(data) {
  const own = data.memory;
  const whole = data.hardware.memory;
  byId("memory-about").textContent = `Bytes on the rank that has most; a rank of this machine has ${rate(whole, "B")}.`;
  const pair = (title, lines) => {
    const most = Math.max(...lines.map(([, value]) => value));
    const [[, here], [, otherwise]] = lines;
    const saved =
      otherwise > here
        ? `${share(otherwise - here, otherwise)} less`
        : otherwise < here
          ? "more than without"
          : "no difference";
    return el(
      "div",
      { class: "card" },
      el("header", {}, el("h3", {}, title), el("span", {}, saved)),
      lines.map(([name, value, colour]) =>
        el(
          "div",
          { class: "line" },
          el("div", {}, el("span", {}, name), el("span", {}, bytes(value))),
          stack([[name, value, colour]], most, `${name}: ${bytes(value)}, ${share(value, whole)} of the memory`),
        ),
      ),
    );
  };
  fill(
    byId("memory-bars"),
    pair("Buffers", [
      [`in ${plural(data.groups.length, "micro-group")}, as planned`, own.buffers, "--compute"],
      ["with all matrices in one micro-group", own.one_group, "--idle"],
    ]),
    pair("Optimizer state", [
      ["on fragments and owners, as planned", own.state, "--compute"],
      ["if every rank kept it whole", own.state_replicated, "--idle"],
    ]),
  );
}

function templates(data) {
  const cards = data.templates.map(templateCard);
  const rest = cards.splice(12);
  fill(byId("templates"), cards);
  if (rest.length)
    byId("templates").append(
      el("details", {}, el("summary", {}, `${plural(rest.length, "more template")}`), el("div", {}, rest)),
    );
  if (!data.templates.length) byId("strategies").hidden = true;
}

function templateCard(own) {
  const parts = (s) => [
    ["computes", s.compute ?? 0, "--compute"],
    ["gathers", s.gather ?? 0, "--gather"],
    ["scatters", s.scatter ?? 0, "--scatter"],
  ];
  const most = scaleOf(own.strategies.map((s) => s.seconds ?? 0));
  const rows = own.strategies.map((s) => {
    const possible = s.seconds !== null;
    const label = `${s.name}: ${parts(s)
      .map(([name, value]) => `${name} ${duration(value)}`)
      .join(", ")}`;
    return {
      class: s.chosen ? "chosen" : possible ? null : "impossible",
      cells: [
        { of: [s.name, " ", s.chosen ? tag("chosen", "chosen") : "", el("small", {}, STRATEGY_WORDS[s.name] ?? "")] },
        { of: possible ? [duration(s.seconds), stack(parts(s), most, label)] : "impossible", class: "meter" },
        possible ? duration(s.compute) : "",
        possible ? duration(s.gather) : "",
        possible ? duration(s.scatter) : "",
        s.runs ? "runs it" : "cannot yet",
        { of: s.note, class: "rest" },
      ],
    };
  });
  const line = (name, text, value) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, formula(text)), el("dd", { class: "value" }, value));
  const resident = own.resident.length ? `, ${own.resident.join(", ")} on the owner only` : "";
  return el(
    "article",
    { class: "card" },
    el(
      "header",
      {},
      el("h3", {}, own.name),
      el("span", {}, `${plural(own.tasks, "matrix", "matrices")} of ${dims(own.shape)}${resident}`),
    ),
    table(
      `Strategies of ${own.name}`,
      ["strategy", "in all", ">compute", ">gather", ">scatter", "runtime", "why"],
      rows,
    ),
    el(
      "dl",
      { class: "formulas", "aria-label": `Formulas of ${own.name}` },
      line("FLOPs", own.flops, `${flops(own.flops_value)}, ${duration(own.seconds)} on the owner`),
      line("bytes in memory", own.memory, bytes(own.memory_value)),
      line("bytes on the wire", own.wire, bytes(own.wire_value)),
    ),
  );
}

function groups(data) {
  const [summary, body] = byId("groups").children;
  summary.textContent = plural(data.groups.length, "micro-group");
  const size = (n) => (n ? bytes(n) : "–");
  const rows = data.groups.map((own) => [
    `micro-group ${own.index}`,
    `${own.replicas} × ${own.shards}`,
    number(own.tasks),
    size(own.gather_bytes),
    size(own.scatter_bytes),
    size(own.exchange_bytes),
    flops(own.makespan_flops),
  ]);
  const heads = ["", "replicas × shards", ">matrices", ">gather", ">scatter", ">exchange", ">busiest owner"];
  fill(
    body,
    el("p", { class: "hint" }, "Bytes that leave a rank for another, summed over all ranks."),
    table("Micro-groups", heads, rows),
  );
}

const MOST_ROWS = 100;

function matrices(data) {
  const { tasks } = data;
  const ownerOf = (i) => (tasks.owner[i] === null ? "every rank" : `rank ${tasks.owner[i]}`);
  const search = tasks.name.map((name, i) =>
    [name, pick(tasks.template, i), pick(tasks.strategy, i), ownerOf(i), `micro-group ${tasks.group[i]}`]
      .join("\n")
      .toLowerCase(),
  );
  const list = () => {
    const words = byId("find").value.trim().toLowerCase();
    // "rank 3" is not "rank 31".
    const ends = /\d$/.test(words) ? new RegExp(`${words.replace(/[^\w\s]/g, "\\$&")}(?!\\d)`) : null;
    const hits = [];
    for (let i = 0; i < search.length; i++) if (ends ? ends.test(search[i]) : search[i].includes(words)) hits.push(i);
    const cut = hits.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : "";
    byId("found").textContent = `${plural(hits.length, "matrix", "matrices")}${cut}`;
    const rows = hits
      .slice(0, MOST_ROWS)
      .map((i) => [
        { of: [tasks.name[i], el("small", {}, `${pick(tasks.template, i)}, ${pick(tasks.layout, i)}`)] },
        dims(pick(tasks.shape, i)),
        pick(tasks.strategy, i),
        tasks.owner[i] === null ? "every rank" : number(tasks.owner[i]),
        number(tasks.group[i]),
        flops(tasks.flops[i]),
      ]);
    const heads = ["matrix", "shape", "strategy", ">owner", ">micro-group", ">FLOPs"];
    fill(byId("matrix-rows"), table("Matrices", heads, rows));
  };
  byId("matrices").querySelector("summary").textContent = plural(tasks.name.length, "matrix", "matrices");
  byId("matrices").addEventListener("toggle", list, { once: true });
  byId("find").addEventListener("input", list);
}

function rates(data) {
  const { hardware } = data;
  byId("rates-about").textContent =
    `What ${hardware.name} is taken to do per rank. Measured means: on the machine itself. ` +
    "An assumed rate is a public figure or an order of magnitude, and all that follows from it is no better.";
  const curve = (points) => {
    const [[small, low], [large, high]] = [points[0], points[points.length - 1]];
    if (points.length === 1) return rate(low, "FLOP/s");
    return `${rate(low, "FLOP/s")} at ${number(small)} to ${rate(high, "FLOP/s")} at ${number(large)}`;
  };
  const link = (own) =>
    `${rate(own.bandwidth, "B/s")}, ${duration(own.latency)} each, ${duration(own.per_peer)} more per peer`;
  const value = {
    products: () => Object.entries(hardware.products).map(([name, own]) => el("div", {}, `${name}: ${curve(own)}`)),
    factorizations: () =>
      Object.entries(hardware.factorizations).map(([name, own]) => el("div", {}, `${name}: ${curve(own)}`)),
    bandwidth: () => rate(hardware.bandwidth, "B/s"),
    memory: () => rate(hardware.memory, "B"),
    launch: () => duration(hardware.launch),
    node: () => link(hardware.node),
    network: () => link(hardware.network),
  };
  const rows = hardware.rates.map((name) => [
    {
      of: [
        RATE_WORDS[name] ?? name,
        " ",
        hardware.measured.includes(name) ? tag("measured", "measured") : tag("assumed", "assumed"),
      ],
    },
    { of: value[name]?.() ?? "", class: "whole" },
    { of: hardware.sources[name] ?? "no source given", class: "whole" },
  ]);
  fill(byId("rate-rows"), table("Rates", ["rate", "value", "source"], rows));
}

function closing(data) {
  const own = [...data.assumptions];
  own.push(
    data.hardware.overlap
      ? "transfers run beside computation, on links of their own"
      : "transfers take the processors that compute: nothing overlaps",
  );
  fill(
    byId("assumption-list"),
    own.map((text) => el("li", {}, text)),
  );
  byId("footer").textContent =
    `Fingerprint ${data.fingerprint}, rates ${data.hardware.digest}. ` +
    "A run that makes the same plan has the same fingerprint. This file is complete: it loads nothing.";
}
