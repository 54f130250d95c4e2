// Two rollouts of the same task side by side, turn by turn: before and after, or any two.

/** Rollouts of the same task, earliest first: by step in training, otherwise by creation time. */
function sameTask(app, row) {
  const { list } = app;
  const age = (place) => [list.number("step", place), list.number("created_at", place), list.columns.row[place]];
  const known = (value) => (Number.isNaN(value) ? -Infinity : value);
  const places = list.related("task", list.places.get(row));
  return places
    .sort((one, other) => {
      const [a, b] = [age(one), age(other)];
      const at = a.findIndex((value, index) => known(value) !== known(b[index]));
      return at < 0 ? 0 : known(a[at]) - known(b[at]);
    })
    .map((place) => list.columns.row[place]);
}

/** The initial pair: the first and last rollout of the policy in training, or of all rollouts if there are fewer than two. */
function firstPair(list, rows) {
  const trained = rows.filter((row) => list.value("step", list.places.get(row)) !== null);
  const among = trained.length > 1 ? trained : rows;
  return [among[0], among[among.length - 1]];
}

/** The messages of a rollout by turn (those before the action, and the action), and the remaining messages. */
function byTurns(rollout) {
  const turns = rollout.turns.map(() => []);
  const rest = [];
  let waiting = [];
  for (const message of rollout.messages) {
    waiting.push(message);
    if (message.turn === null || message.turn === undefined || !turns[message.turn]) continue;
    turns[message.turn].push(...waiting);
    waiting = [];
  }
  rest.push(...waiting);
  return { turns, rest };
}

function pairSide(app, rows, row, side) {
  const words = (one) => {
    const place = app.list.places.get(one);
    const step = app.list.value("step", place);
    const made = app.list.value("created_at", place);
    return [
      step === null ? null : `step ${step}`,
      `#${one}`,
      app.list.value("agent", place),
      app.list.value("outcome", place),
      `reward ${brief(app.list.value("final_reward", place))}`,
      made === null ? null : moment(made).slice(0, 16),
    ]
      .filter(Boolean)
      .join(" · ");
  };
  const choose = el(
    "select.long",
    {
      "aria-label": `Rollout on the ${side}`,
      onchange: (event) => go({ [side]: rows[event.target.selectedIndex] }, { step: false }),
    },
    rows.map((one) => el("option", { selected: one === row }, words(one))),
  );
  return el("div.side-head", {}, choose, link("plain", { view: "conversation", row, ...RESET_ROLLOUT }, {}, "open"));
}

/** Remove a node's id: in a pair, ids of turns would not be unique. */
function withoutIds(node) {
  node.removeAttribute("id");
  return node;
}

async function pairView(app, row, given) {
  const rows = sameTask(app, row);
  if (rows.length < 2) {
    return el(
      "section.pair",
      {},
      el("p.empty", {}, "The list contains no other rollout of this task to compare with."),
    );
  }
  const chosen = (side, otherwise) =>
    rows.includes(Number(given.get(side) ?? NaN)) ? Number(given.get(side)) : otherwise;
  const [first, last] = firstPair(app.list, rows);
  const pair = [chosen("left", first), chosen("right", last)];
  const rollouts = await Promise.all(pair.map((one) => data.rollout(app.list, one)));
  const parts = rollouts.map(byTurns);
  const count = Math.max(...parts.map(({ turns }) => turns.length));
  const cell = (index, messages) =>
    el(
      "div.side",
      {},
      messages.map((message) => withoutIds(messageOf(rollouts[index], message))),
    );
  const lines = [];
  for (let turn = 0; turn < count; turn++) {
    lines.push(
      el(
        "div.pair-line",
        {},
        parts.map(({ turns, rest }, index) => {
          if (turns[turn]) return cell(index, turns[turn]);
          return turns.length === turn ? add(cell(index, rest), ending(rollouts[index])) : el("div.side");
        }),
      ),
    );
  }
  lines.push(
    el(
      "div.pair-line",
      {},
      parts.map(({ turns, rest }, index) =>
        turns.length === count ? add(cell(index, rest), ending(rollouts[index])) : el("div.side"),
      ),
    ),
  );
  return el(
    "section.pair",
    {},
    el(
      "p.faint",
      {},
      `The list contains ${counted(rows.length, "rollout")} of this task. By default, the earliest and the latest are shown `,
      "(of the policy in training, if it has at least two).",
    ),
    el(
      "div.pair-line.heads",
      {},
      pair.map((one, index) => pairSide(app, rows, one, index ? "right" : "left")),
    ),
    el(
      "div.pair-line",
      {},
      rollouts.map((rollout) =>
        el(
          "div.side",
          {},
          turnBar(rollout, () => {}),
        ),
      ),
    ),
    lines,
  );
}
