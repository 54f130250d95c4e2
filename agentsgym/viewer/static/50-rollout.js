// One rollout: the header shared by all its views, and its conversation.

const TABS = [
  ["conversation", "Conversation", "c"],
  ["tokens", "Tokens", "t"],
  ["group", "Group", "g"],
  ["pair", "Before / after", "b"],
];
const MAX_CHARACTERS = 20_000; // of a text, until "show more" is pressed; a megabyte would freeze the page

/** The names of a rollout's named rewards, in the order of their first turns. */
const componentNames = (rollout) => [...new Set(rollout.turns.flatMap((turn) => Object.keys(turn.components ?? {})))];

/** The numbers of a turn: its reward, and the means of advantage, surprisal and entropy over its tokens. */
function turnNumbers(rollout, turn) {
  const { start, stop, reward, invalid } = rollout.turns[turn];
  const mean = (name) => (rollout.tokens?.[name] ? meanOf(rollout.tokens[name].slice(start, stop)) : NaN);
  return {
    reward: numberOf(reward),
    invalid,
    advantage: mean("advantages"),
    surprisal: -mean("logprobs"),
    entropy: mean("entropies"),
  };
}

/** One named reward of a turn; NaN if the turn lacks it. */
function componentOf(rollout, turn, name) {
  const components = rollout.turns[turn].components ?? {};
  return Object.hasOwn(components, name) ? numberOf(components[name]) : NaN;
}

/** The header of a rollout: its outcome, links to its neighbors in the list, and tabs for its views. */
function rolloutHead(app, row, view, rollout) {
  const { list, places } = app;
  const place = list.places.get(row);
  const index = places.indexOf(place);
  const neighbor = (by, sign, name) => {
    const other = index < 0 ? undefined : places[index + by];
    const there = { view, row: other === undefined ? null : list.columns.row[other], ...RESET_ROLLOUT };
    return button("step", () => go(there), { disabled: other === undefined, title: name, "aria-label": name }, sign);
  };
  const position = index < 0 ? "hidden by the filters" : `${grouped(index + 1)} of ${grouped(places.length)}`;
  const tabs = TABS.map(([name, heading, key]) =>
    link(
      "tab",
      { view: name, ...RESET_ROLLOUT },
      { "aria-current": name === view ? "page" : null, title: `key ${key}` },
      heading,
    ),
  );
  const outcome = list.value("outcome", place) ?? rollout?.outcome ?? "played";
  return el(
    "header.rollout-head",
    {},
    el(
      "div.line",
      {},
      link("back", { view: "list" }, { title: "key Esc" }, "← Rollouts"),
      el("h2", {}, outcomeMark(outcome), ` ${headlineOf(list, place)}`),
      el(
        "span.position",
        {},
        neighbor(-1, "‹", "Previous rollout (k)"),
        position,
        neighbor(1, "›", "Next rollout (j)"),
      ),
    ),
    el("nav.tabs", { "aria-label": "Views of this rollout" }, tabs),
  );
}

/** The identity of a rollout in one line. */
function headlineOf(list, place) {
  const value = (name) => list.value(name, place);
  const group = value("group_index"); // in training, a task's index is only its position in the batch
  const task = group === null ? `task ${brief(value("task_index"))}` : `task group ${group}`;
  const parts = [`#${value("row")}`, value("env"), task];
  if (value("step") !== null) parts.push(`step ${value("step")}`);
  parts.push(
    `reward ${brief(value("final_reward"))}`,
    `${counted(value("num_turns") ?? 0, "turn")} (${value("stop_reason") ?? "–"})`,
  );
  return parts.filter(Boolean).join(" · ");
}

/** The metadata of a rollout: short facts in a line, long ones collapsed. */
function factsOf(rollout) {
  const facts = (rollout.facts ?? []).filter(([, text]) => text !== null && text !== "");
  const folded = [
    ["configuration", rollout.env_config],
    ["task", rollout.task_data],
    ["info", rollout.info],
  ].filter(([, text]) => text && text !== "{}");
  return el(
    "div.facts",
    {},
    el(
      "dl",
      {},
      facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))),
    ),
    folded.map(([name, text]) => el("details", {}, el("summary", {}, name), longText(text))),
  );
}

/** A text of any length: its beginning, and the rest on request. */
function longText(text, kind = "pre.text") {
  const whole = String(text ?? "");
  if (whole.length <= MAX_CHARACTERS) return el(kind, {}, withBoards(whole));
  const inPair = /[\ud800-\udbff]/.test(whole[MAX_CHARACTERS - 1]); // do not split a surrogate pair
  const end = MAX_CHARACTERS - (inPair ? 1 : 0);
  const node = el(kind, {}, withBoards(whole.slice(0, end)));
  const rest = grouped(whole.length - end);
  const more = button("link", () => more.replaceWith(visible(whole.slice(end))), {}, ` … show ${rest} more characters`);
  return add(node, more);
}

const BOARD_LINE = /[│┃║|#+─═┼█▒░].*[│┃║|#+─═┼█▒░]|\S {2,}\S|^\s*(\S ){3,}\S?\s*$/;

/** Separate the lines that draw a board or a table, so that their columns stay aligned and they scroll sideways. */
function withBoards(text) {
  const parts = [];
  for (const line of text.split("\n")) {
    const board = line.length < 400 && BOARD_LINE.test(line);
    const last = parts[parts.length - 1];
    if (last && last.board === board) last.lines.push(line);
    else parts.push({ board, lines: [line] });
  }
  return parts.map(({ board, lines }, index) => {
    const end = index < parts.length - 1 ? "\n" : "";
    return board && lines.length > 1 ? el("span.board", {}, lines.join("\n") + end) : lines.join("\n") + end;
  });
}

/** Join the lines of short JSON. Its line breaks are only layout, since line breaks in strings are escaped. */
function inOneLine(text) {
  const whole = String(text ?? "");
  const line = whole
    .replace(/([{[])\n\s*/g, "$1")
    .replace(/\n\s*([}\]])/g, "$1")
    .replace(/\n\s*/g, " ");
  return /^[{[]/.test(whole) && line.length < 160 ? line : whole;
}

/** One message: its role, its numbers if it is a turn, its reasoning (collapsed), its tool calls. */
function messageOf(rollout, message) {
  const turn = message.turn ?? null;
  const calls = (message.calls ?? []).map((call) =>
    el("div.call", {}, el("b", {}, call.name || "(no name)"), "(", longText(inOneLine(call.arguments), "span"), ")"),
  );
  const words = message.reasoning ? message.reasoning.trim().split(/\s+/).length : 0;
  return el(
    `article.message.${turn === null ? "given" : "agent"}`,
    { id: turn === null ? null : `turn-${turn}` },
    el(
      "div.who",
      {},
      el("span.role", {}, message.role ?? "?", message.name ? ` ${message.name}` : ""),
      turn === null ? null : turnNotes(rollout, turn),
    ),
    el(
      "div.what",
      {},
      message.reasoning
        ? el(
            "details.thought",
            {},
            el("summary", {}, `reasoning, ${counted(words, "word")}`),
            longText(message.reasoning),
          )
        : null,
      message.content || !calls.length ? longText(message.content) : null,
      calls,
      message.num_omitted
        ? el("p.faint", {}, `… ${grouped(message.num_omitted)} characters of this message are omitted`)
        : null,
      turn === null ? null : judgmentsOf(rollout, turn),
    ),
  );
}

/** The judgments of a turn, or of the whole rollout (turn null): scores, reason, and the full answer (collapsed). */
function judgmentsOf(rollout, turn) {
  const own = (rollout.judgments ?? []).filter((one) => (one.turn ?? null) === turn);
  return own.map(({ judge, scores, reason, answers, error }) =>
    el(
      "div.judgment",
      {},
      el("b", {}, judge || "judge"),
      Object.entries(scores ?? {}).map(([name, score]) =>
        el("span.note", {}, el("span.faint", {}, ` ${name} `), coloredNumber(score)),
      ),
      error ? el("pre.error", { tabIndex: 0 }, error) : null,
      reason ? el("p", {}, reason) : null,
      (answers ?? []).map((answer) => el("details", {}, el("summary", {}, "answer"), longText(answer))),
    ),
  );
}

/** Whether a turn follows another one in a tree of calls. */
const isCalled = ({ parent }) => parent !== undefined;

/** Whether the turns of a rollout are calls that form a tree. */
const hasCalls = (rollout) => rollout.turns.some(isCalled);

/** The depth of each turn in the tree of calls; a turn that continues a conversation is as deep as its parent. */
function depthsOf(turns) {
  const depths = [];
  for (const turn of turns) depths.push(isCalled(turn) ? depths[turn.parent] + (turn.continues ? 0 : 1) : 0);
  return depths;
}

/** The notes on a turn: its index, reward, mean advantage, and anything unusual. */
function turnNotes(rollout, turn, extra = null) {
  const numbers = turnNumbers(rollout, turn);
  const { exact: isExact, note: isNote, role, rewritten, episode, parent, continues } = rollout.turns[turn];
  const known = (name, value) =>
    Number.isNaN(value) ? null : el("span.note", {}, el("span.faint", {}, `${name} `), coloredNumber(value));
  const hasEpisodes = rollout.turns.some((one) => one.episode);
  const history = hasCalls(rollout) ? "" : "a rewritten history of ";
  return [
    el("span.turn-number", {}, `turn ${turn}`),
    isCalled(rollout.turns[turn]) ? el("span.note", {}, `${continues ? "continues" : "child of"} turn ${parent}`) : null,
    extra,
    el("span.break"),
    known("reward", numbers.reward),
    componentNames(rollout).map((name) => known(name, componentOf(rollout, turn, name))),
    known("advantage", numbers.advantage),
    role ? el("span.note", {}, `as role ${role}`) : null,
    hasEpisodes ? el("span.note.faint", {}, `episode ${episode}`) : null,
    isNote ? el("span.note", { title: "It replaces the history before it" }, "writes a note") : null,
    numbers.invalid ? el("span.wrong", {}, "✗ invalid") : null,
    isExact === false
      ? el(
          "span.note.faint",
          { title: "These tokens were encoded from the text afterwards; they may differ from the sampled tokens" },
          "tokenized from text",
        )
      : null,
    rewritten ? el("span.note.faint", {}, `prompt: ${history}${counted(rewritten, "message")}`) : null,
  ];
}

/** A number with a sign, colored by it. */
function coloredNumber(value) {
  const number = numberOf(value);
  return el(`span.value${number > 0 ? ".up" : number < 0 ? ".down" : ""}`, { title: exact(value) }, signed(value));
}

/** The stop reason, with the error if there was one. */
function ending(rollout) {
  return el(
    "div.ending",
    {},
    el("p", {}, el("b", {}, `stop reason: ${rollout.stop_reason}`), ` after ${counted(rollout.turns.length, "turn")}`),
    rollout.error ? el("pre.error", { tabIndex: 0 }, rollout.error) : null,
    judgmentsOf(rollout, null),
  );
}

/** The turns as a row of bars: rewards above, then each named reward, and advantages below; a click on a bar scrolls to its turn. */
function turnBar(rollout, onTurn) {
  if (rollout.turns.length < 2) return null;
  const numbers = rollout.turns.map((_, turn) => turnNumbers(rollout, turn));
  const named = componentNames(rollout).map((name) => [name, numbers.map((_, turn) => componentOf(rollout, turn, name))]);
  const own = (name) => [name, numbers.map((one) => one[name])];
  const known = [own("reward"), ...named, own("advantage")]
    .filter(([, values]) => values.some((value) => !Number.isNaN(value)))
    .map(([name, values]) => ({ name, values, limit: largest(values) }));
  const bar = ({ values, limit }, turn) => {
    const part = el(`span.half.${values[turn] < 0 ? "down" : "up"}`);
    const size = limit ? Math.min(1, Math.abs(values[turn]) / limit) : 0;
    part.style.setProperty("--size", Number.isFinite(size) ? size : 0);
    return el("span.bars", {}, part);
  };
  const columns = numbers.map((one, turn) => {
    const words = known.map(({ name, values }) => `${name} ${brief(values[turn])}`).join(", ");
    return button(
      `turn${one.invalid ? ".wrong" : ""}`,
      () => onTurn(turn),
      {
        title: `turn ${turn}: ${words}${one.invalid ? ", invalid" : ""}`,
        "aria-label": `Go to turn ${turn}: ${words}`,
      },
      known.map((quantity) => bar(quantity, turn)),
      el("span.index", {}, one.invalid ? `✗${turn}` : String(turn)),
    );
  });
  return el(
    "div.turn-bar",
    { role: "group", "aria-label": "Turns" },
    el(
      "div.names.faint",
      {},
      known.map(({ name }) => el("span", { title: name }, name)),
    ),
    el("div.columns", {}, columns),
  );
}

/** Scroll to a turn and highlight it. */
function revealTurn(turn) {
  const node = document.getElementById(`turn-${turn}`);
  if (!node) return;
  document.querySelector(".here")?.classList.remove("here");
  node.classList.add("here");
  node.scrollIntoView({
    block: "start",
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
  });
  remember({ turn });
}

async function conversationView(app, row) {
  const rollout = await data.rollout(app.list, row);
  const depths = depthsOf(rollout.turns);
  let depth = depths.at(-1);
  const indented = (message) => {
    depth = depths[message.turn] ?? depth; // what a turn sees is indented like the turn
    const node = messageOf(rollout, message);
    if (depth) node.style.setProperty("--depth", depth);
    return node;
  };
  return el(
    "section.conversation",
    {},
    factsOf(rollout),
    turnBar(rollout, revealTurn),
    [...rollout.messages].reverse().map(indented).reverse(),
    ending(rollout),
  );
}
