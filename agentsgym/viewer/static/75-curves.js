// Means over the rollouts that pass the filters, by optimizer step and by turn, with intervals over tasks.

const CURVES = [
  ["rewards", "Reward", "from the environment"],
  ["advantages", "Advantage", "mean over the turn's tokens, as stored"],
  ["surprisals", "Surprisal", "mean −log p of the turn's tokens"],
  ["entropies", "Entropy", "mean over the turn's tokens"],
  ["invalid", "Invalid actions", "fraction of turns"],
];
const LEARNING = [
  ["Win rate", "training rollouts", (list, place) => ({ won: 1, lost: 0 })[list.value("outcome", place)]],
  ["Reward per episode", "training rollouts", (list, place) => list.number("final_reward", place)],
];
const SPLITS = [
  ["", "nothing"],
  ["outcome", "outcome"],
  ["env", "environment"],
  ["agent", "agent"],
  ["run", "run"],
];
const MAX_LINES = 5;
const MAX_TURNS = 200;

/** Means of a quantity by turn: [{turn, mean, low, high, count, tasks}].
 *
 * The interval is the mean ± 1.96 standard errors, clustered by task, since rollouts of the same task are not
 * independent. There is no interval for turns that fewer than two tasks reached.
 */
function meansByTurn(rows, tasks) {
  const turns = [];
  rows.forEach((values, index) =>
    (values ?? []).slice(0, MAX_TURNS).forEach((raw, turn) => {
      const value = numberOf(raw);
      if (!Number.isFinite(value)) return;
      (turns[turn] ??= []).push([value, tasks[index]]);
    }),
  );
  return turns.map((known, turn) => meanWithInterval(turn, known)).filter(Boolean);
}

function meanWithInterval(turn, known) {
  const count = known.length;
  const mean = known.reduce((sum, [value]) => sum + value, 0) / count;
  const byTask = new Map();
  for (const [value, task] of known) byTask.set(task, (byTask.get(task) ?? 0) + value - mean);
  const size = byTask.size;
  const squares = [...byTask.values()].reduce((sum, off) => sum + off * off, 0);
  const error = size > 1 ? (1.96 * Math.sqrt((squares * size) / (size - 1))) / count : NaN;
  return { turn, mean, low: mean - error, high: mean + error, count, tasks: size };
}

/** Means of a quantity of training rollouts by optimizer step, in the form of `meansByTurn`. */
function meansByStep(list, places, valueOf) {
  const steps = new Map();
  for (const place of places) {
    const [step, value] = [list.value("step", place), valueOf(list, place)];
    if (step === null || !Number.isFinite(value)) continue;
    if (!steps.has(step)) steps.set(step, []);
    steps.get(step).push([value, list.columns.task[place]]);
  }
  return [...steps].sort(([one], [other]) => one - other).map(([step, known]) => meanWithInterval(step, known));
}

/** The lines of a learning curve; none if there are fewer than two steps. */
function linesByStep(list, places, valueOf, split) {
  const isTrained = (place) => list.value("source", place) === "training";
  return partsOf(list, places, split)
    .map(([label, those], color) => ({ label, color, points: meansByStep(list, those.filter(isTrained), valueOf) }))
    .filter(({ points }) => points.length > 1);
}

/** The rollouts for each line of a plot: all, or those with each value of a column, the most frequent first. */
function partsOf(list, places, split) {
  const parts = new Map();
  for (const place of places) {
    const key = split ? String(list.value(split, place) ?? UNKNOWN) : "all";
    if (!parts.has(key)) parts.set(key, []);
    parts.get(key).push(place);
  }
  return [...parts].sort(([, one], [, other]) => other.length - one.length).slice(0, MAX_LINES);
}

/** Whether a line would have rollouts of several runs, which are never mixed. */
function mixesRuns(list, places, split) {
  const runs = new Map();
  return places.some((place) => {
    const [key, run] = [split ? list.value(split, place) : "all", list.value("run", place)];
    if (run !== null && !runs.has(key)) runs.set(key, run);
    return run !== null && runs.get(key) !== run;
  });
}

/** The lines of a plot by turn. */
function linesByTurn(list, places, turns, name, split) {
  return partsOf(list, places, split)
    .map(([label, those], color) => {
      const known = those.filter((place) => turns.places.has(list.columns.row[place]));
      const rows = known.map((place) => turns[name]?.[turns.places.get(list.columns.row[place])]);
      return {
        label,
        color,
        points: meansByTurn(
          rows,
          known.map((place) => list.columns.task[place]),
        ),
      };
    })
    .filter(({ points }) => points.length);
}

const PLOT = { width: 420, height: 180, left: 46, right: 10, top: 10, bottom: 34 };

/** Round tick values for an axis, at most about five. */
function ticks(low, high) {
  const span = high - low || 1;
  const size = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => span / one <= 5);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * span; at++)
    found.push(Number((at * step).toPrecision(12)));
  return found;
}

function plot(heading, lines, axisName) {
  const points = lines.flatMap((line) => line.points);
  const lastTurn = Math.max(1, ...points.map(({ turn }) => turn));
  const ends = points.flatMap(({ mean, low, high }) => [mean, low, high]).filter(Number.isFinite);
  const [least, most] = ends.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [0, 0]);
  const span = most - least > 1e-9 ? most - least : 1; // do not magnify rounding errors
  const pad = span * 0.04;
  const { width, height, left, right, top, bottom } = PLOT;
  const x = (turn) => left + ((width - left - right) * turn) / lastTurn;
  const y = (value) => top + ((height - top - bottom) * (least + span + pad - value)) / (span + 2 * pad);
  const path = (those, value) =>
    those
      .map((point, index) => `${index ? "L" : "M"}${x(point.turn).toFixed(1)} ${y(value(point)).toFixed(1)}`)
      .join("");
  const axis = [
    ...ticks(least, least + span).map((value) => [
      drawn("line", { class: value ? "grid" : "zero", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      drawn("text", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, brief(value)),
    ]),
    ...ticks(0, lastTurn)
      .filter(Number.isInteger)
      .map((turn) => drawn("text", { x: x(turn), y: height - bottom + 15, "text-anchor": "middle" }, String(turn))),
    drawn("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, axisName),
  ];
  const shapes = lines.map(({ points: those, color }) => {
    const known = those.filter(({ low }) => Number.isFinite(low));
    const band =
      known.length > 1
        ? `${path(known, ({ high }) => high)}${path([...known].reverse(), ({ low }) => low).replace("M", "L")}Z`
        : null;
    return drawn(
      "g",
      { class: `line line-${color}` },
      band && drawn("path", { class: "band", d: band }),
      drawn("path", { class: "mean", d: path(those, ({ mean }) => mean) }),
      those.length < 40 ? those.map((point) => drawn("circle", { cx: x(point.turn), cy: y(point.mean), r: 2 })) : null,
    );
  });
  const picture = drawn(
    "svg",
    {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${heading} by ${axisName}; the table below contains the numbers`,
    },
    axis,
    shapes,
  );
  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  return {
    picture,
    cursor,
    x,
    turnAt: (share) => {
      const at = ((share * width - left) / (width - left - right)) * lastTurn;
      const turns = points.map(({ turn }) => turn);
      return turns.reduce((one, other) => (Math.abs(other - at) < Math.abs(one - at) ? other : one));
    },
  };
}

function curve(heading, note, lines, axisName = "turn") {
  const { picture, cursor, x, turnAt } = plot(heading, lines, axisName);
  const readout = el("p.readout", { role: "status" });
  const rest = () => {
    cursor.setAttribute("visibility", "hidden");
    readout.replaceChildren();
    const { count, turn } = lines[0].points[0];
    add(
      readout,
      el(
        "span.faint",
        {},
        `n = ${grouped(count)}${lines.length > 1 ? ` (${lines[0].label})` : ""} at ${axisName} ${turn}; `,
        `hover over a ${axisName} for its numbers`,
      ),
    );
  };
  const showAt = (event) => {
    const box = picture.getBoundingClientRect();
    const turn = turnAt((event.clientX - box.left) / box.width);
    const at = lines
      .map((line) => [line.label, line.points.find((point) => point.turn === turn)])
      .filter(([, point]) => point);
    assign(cursor, { x1: x(turn), x2: x(turn), visibility: "visible" });
    readout.replaceChildren();
    add(
      readout,
      el("b", {}, `${axisName} ${turn}`),
      at.map(([label, { mean, low, high, count }]) =>
        el(
          "span.one",
          {},
          lines.length > 1 ? `${label} ` : "",
          brief(mean),
          Number.isFinite(low) ? el("span.faint", {}, ` [${brief(low)}, ${brief(high)}]`) : null,
          el("span.faint", {}, ` n ${grouped(count)}`),
        ),
      ),
    );
  };
  picture.addEventListener("pointermove", showAt);
  picture.addEventListener("pointerleave", rest);
  rest();
  const numbers = lines.flatMap(({ label, points }) =>
    points.map((point) =>
      el(
        "tr",
        {},
        [
          lines.length > 1 ? label : null,
          String(point.turn),
          exact(point.mean),
          Number.isFinite(point.low) ? exact(point.low) : "–",
          Number.isFinite(point.high) ? exact(point.high) : "–",
          String(point.count),
        ]
          .filter((text) => text !== null)
          .map((text) => el("td", {}, text)),
      ),
    ),
  );
  const heads = [lines.length > 1 ? "series" : null, axisName, "mean", "low", "high", "n"].filter(Boolean);
  return el(
    "figure.curve",
    {},
    el("figcaption", {}, el("b", {}, heading), el("span.faint", {}, `  ${note}`)),
    picture,
    readout,
    el(
      "details",
      {},
      el("summary", {}, "numbers"),
      el(
        "div.wide",
        {},
        el(
          "table.numbers-of-curve",
          {},
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              heads.map((head) => el("th", {}, head)),
            ),
          ),
          el("tbody", {}, numbers),
        ),
      ),
    ),
  );
}

async function curvesView(app, given) {
  const { list, places } = app;
  const turns = await data.turns();
  const splits = SPLITS.filter(([name]) => !mixesRuns(list, places, name));
  const [split] = splits.find(([name]) => name === given.get("split")) ?? splits[0];
  const choose = el(
    "select",
    {
      "aria-label": "Split by",
      onchange: (event) => go({ split: splits[event.target.selectedIndex][0] || null }, { step: false }),
    },
    splits.map(([name, heading]) => el("option", { selected: name === split }, heading)),
  );
  const learning = LEARNING.map(([heading, note, valueOf]) => [
    heading,
    note,
    linesByStep(list, places, valueOf, split),
    "step",
  ]);
  const byTurn = CURVES.map(([name, heading, note]) => [
    heading,
    note,
    linesByTurn(list, places, turns, name, split),
    "turn",
  ]);
  const curves = [...learning, ...byTurn].filter(([, , lines]) => lines.length);
  const legend =
    split && curves.length
      ? el(
          "p.legend",
          {},
          partsOf(list, places, split).map(([label], color) =>
            el(`span.key.line-${color}`, {}, el("span.stroke", { "aria-hidden": "true" }), label),
          ),
        )
      : null;
  return el(
    "section.curves",
    {},
    el(
      "div.curves-head",
      {},
      el(
        "p",
        {},
        `Means over ${counted(places.length, "rollout")}${isFiltered(given) ? " that pass the filters" : ""}, `,
        "with 95% confidence intervals over tasks.",
        splits[0][0] ? " They are of several runs: select one in the filters to split them in other ways." : "",
      ),
      el("label.field", {}, el("span.faint", {}, "split by"), choose),
    ),
    legend,
    curves.length
      ? el(
          "div.grid-of-curves",
          {},
          curves.map((one) => curve(...one)),
        )
      : el("p.empty", {}, "No rollout that passes the filters has turns."),
  );
}
