// All rollouts of a task group side by side, one row per turn, to show where they diverge.

/** A summary of a group in one line. */
function groupSummary(group) {
  const won = group.members.filter((member) => member.outcome === "won").length;
  const judged = group.members.filter((member) => ["won", "lost"].includes(member.outcome)).length;
  const rewards = group.members.map((member) => member.final_reward);
  const known = rewards.map(numberOf).filter(Number.isFinite);
  const range = known.length > 1 ? `, from ${brief(Math.min(...known))} to ${brief(Math.max(...known))}` : "";
  return el(
    "p.group-summary",
    {},
    el("b", {}, group.label ?? "one task"),
    ` · ${counted(group.members.length, "rollout")}`,
    judged ? ` · ${won} of ${judged} won` : "",
    ` · mean reward ${brief(meanOf(rewards))}${range}`,
  );
}

/** The header of a member's column: a link to the rollout, and its outcome. */
function memberHead(app, member, row) {
  const name = `#${member.row}`;
  return el(
    `th.member${member.row === row ? ".current" : ""}`,
    { scope: "col" },
    link(
      "open",
      { view: "conversation", row: member.row, ...RESET_ROLLOUT },
      { title: member.headline, "aria-label": `${name}: ${member.headline}` },
      name,
    ),
    member.row === row ? el("span.faint", {}, " (this one)") : null,
    el("div.how", {}, outcomeMark(member.outcome), " ", coloredNumber(member.final_reward)),
    el("div.faint", {}, member.stop_reason),
  );
}

/** A member's action in a turn. */
function memberCell(group, member, index, turn, unfolded) {
  const one = member.turns[turn];
  if (!one) {
    const ended = member.turns.length === turn;
    return el("td.over", {}, ended ? el("span.faint", {}, `stop reason: ${member.stop_reason}`) : null);
  }
  const diverges = group.diverges_at[index] === turn;
  const alike = turn < group.common_turns && group.members.length > 1;
  const cell = el(`td${diverges ? ".parts" : ""}${alike ? ".alike" : ""}${one.invalid ? ".invalid" : ""}`);
  const text = el(
    `div.action${unfolded ? "" : ".folded"}`,
    { title: unfolded ? null : "Click to expand" },
    longText(one.text, "span"),
    one.num_omitted ? el("span.faint", {}, ` … ${grouped(one.num_omitted)} more characters in the conversation`) : null,
  );
  text.addEventListener("click", () => getSelection().toString() || text.classList.toggle("folded"));
  return add(
    cell,
    el(
      "div.numbers",
      {},
      diverges
        ? el("span.mark", { title: `diverges from #${group.members[0].row} here`, "aria-label": "diverges here" }, "≠")
        : null,
      el("span.turn-reward", {}, coloredNumber(one.reward)),
      one.advantage === null ? null : el("span.note", {}, el("span.faint", {}, "adv "), coloredNumber(one.advantage)),
      one.invalid ? el("span.wrong", {}, "✗ invalid") : null,
    ),
    turn > 0 || !group.prompt ? el("div.seen", { title: "Observation before this action" }, one.observation) : null,
    text,
  );
}

/** A note on the number of members that diverge from the first member in a turn. */
function partsText(group, turn) {
  const count = group.members.filter(({ turns }, index) => group.diverges_at[index] === turn && turns[turn]).length;
  const words = `≠ ${count} of ${group.members.length} ${count === 1 ? "diverges" : "diverge"}`;
  return count ? el("div.faint", {}, words) : null;
}

async function groupView(app, row) {
  const group = await data.group(app.list, row);
  const numTurns = group.members.reduce((most, member) => Math.max(most, member.turns.length), 0);
  const table = el("table.group", {});
  const prompts = new Set(group.members.filter(({ turns }) => turns.length).map(({ turns }) => turns[0].observation));
  group.prompt = prompts.size === 1 ? [...prompts][0] : null; // shown only once if all prompts are equal
  let unfolded = false;
  const limit = largest(group.members.flatMap((member) => member.turns.map((turn) => turn.reward)));
  const body = () =>
    el(
      "tbody",
      {},
      Array.from({ length: numTurns }, (_, turn) =>
        el(
          "tr",
          {},
          el(
            "th",
            { scope: "row" },
            `turn ${turn}`,
            turn < group.common_turns && group.members.length > 1 ? el("div.faint", {}, "identical") : null,
            partsText(group, turn),
          ),
          group.members.map((member, index) => {
            const cell = memberCell(group, member, index, turn, unfolded);
            const kind = member.turns[turn] ? shade(member.turns[turn].reward, limit) : "";
            if (kind) cell.querySelector(".turn-reward").classList.add(kind);
            return cell;
          }),
        ),
      ),
    );
  add(
    table,
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "turn"),
        group.members.map((member) => memberHead(app, member, row)),
      ),
    ),
    body(),
  );
  const unfold = button(
    "link",
    () => {
      unfolded = !unfolded;
      unfold.textContent = unfolded ? "Collapse long actions" : "Expand all actions";
      table.replaceChild(body(), table.tBodies[0]);
    },
    {},
    "Expand all actions",
  );
  const common =
    group.members.length < 2
      ? "This group has only one rollout, so there is nothing to compare."
      : group.common_turns
        ? `Identical in the first ${group.common_turns === 1 ? "turn" : counted(group.common_turns, "turn")}.`
        : "The rollouts differ from the first turn.";
  return el(
    "section.group-view",
    {},
    groupSummary(group),
    group.settings ? el("p.faint", {}, `Stored advantages: ${group.settings}.`) : null,
    el(
      "p.faint",
      {},
      common,
      "  ",
      unfold,
      "  ",
      link("plain", { view: "list", group: groupKey(app, row) }, {}, "Show only this group in the list"),
    ),
    group.prompt ? el("details.prompt", { open: true }, el("summary", {}, "first prompt"), longText(group.prompt)) : null,
    el("div.wide", { tabIndex: 0, role: "region", "aria-label": "Rollouts of this group side by side" }, table),
  );
}

function groupKey(app, row) {
  return app.list.value("group", app.list.places.get(row));
}
