// The advantages of a group under another estimator, discount, scale or turn credit.

const SETTING_KEYS = ["estimator", "options", "discount", "scale", "turn_credit"];

/** Parse the settings in the address (wi = JSON); null if there are none or they are invalid. */
function readSettings(given) {
  try {
    const settings = JSON.parse(given.get("wi"));
    if (!settings || !SETTING_KEYS.every((key) => key in settings)) return null;
    return Object.fromEntries(SETTING_KEYS.map((key) => [key, settings[key]])); // the settings of a run may have more keys
  } catch {
    return null;
  }
}

/** A description of settings in one line. */
function settingsText(settings) {
  const options = Object.entries(settings.options ?? {}).map(([name, value]) => `${name} ${value}`);
  return [
    settings.estimator,
    ...options,
    `discount ${settings.discount}`,
    `scale ${settings.scale}`,
    `turn credit ${settings.turn_credit}`,
  ].join(" · ");
}

/** The initial settings: those of the run, but with another common estimator. */
function firstSettings(app, group) {
  const choices = app.list.answer.what_if;
  const other = group.settings?.estimator === "grpo" ? "return_to_go" : "grpo";
  if (!SERVED) {
    const written = writtenWhatIfs(group).map((one) => one.settings);
    return (
      written.find((one) => one.estimator === other && one.turn_credit === (group.settings ?? one).turn_credit) ??
      written[0] ??
      null
    );
  }
  const estimator = choices.estimators.find(({ name }) => name === other) ?? choices.estimators[0];
  if (!estimator) return null;
  const stored = group.settings ?? {};
  return {
    estimator: estimator.name,
    options: defaultsOf(estimator),
    discount: stored.discount ?? choices.discount,
    scale: stored.scale ?? (choices.scales.includes("group") ? "group" : choices.scales[0]),
    turn_credit: stored.turn_credit ?? choices.turn_credits[0],
  };
}

function defaultsOf(estimator) {
  return Object.fromEntries(Object.entries(estimator.options ?? {}).map(([name, option]) => [name, option.default]));
}

/** The controls; any change calls `changed` with the complete settings. */
function settingControls(app, group, settings, changed) {
  const choices = app.list.answer.what_if;
  const field = (heading, node) => el("label.field", {}, el("span.faint", {}, heading), node);
  const select = (names, value, use) =>
    el(
      "select",
      { onchange: (event) => use(names[event.target.selectedIndex]) },
      names.map((name) => el("option", { selected: String(name) === String(value) }, String(name))),
    );
  if (!SERVED) {
    const written = writtenWhatIfs(group).map((one) => one.settings);
    const index = written.findIndex((one) => sameSettings(one, settings));
    const node = el(
      "select.long",
      { onchange: (event) => changed(written[event.target.selectedIndex]) },
      written.map((one, at) => el("option", { selected: at === index }, settingsText(one))),
    );
    return el("div.controls", {}, field("settings computed when the page was written", node));
  }
  const estimator = choices.estimators.find(({ name }) => name === settings.estimator);
  const update = (change) => changed({ ...settings, ...change });
  const another = (name) =>
    update({ estimator: name, options: defaultsOf(choices.estimators.find((one) => one.name === name)) });
  const options = Object.entries(estimator?.options ?? {}).map(([name, option]) =>
    field(
      name,
      optionField(name, option, settings.options[name], (value) =>
        update({ options: { ...settings.options, [name]: value } }),
      ),
    ),
  );
  const discount = el("input", {
    type: "number",
    min: "0",
    max: "1",
    step: "any",
    value: settings.discount,
    onchange: (event) => update({ discount: Number(event.target.value) }),
  });
  return el(
    "div.controls",
    {},
    field(
      "estimator",
      select(
        choices.estimators.map(({ name }) => name),
        settings.estimator,
        another,
      ),
    ),
    options,
    field("discount", discount),
    field(
      "scale",
      select(choices.scales, settings.scale, (scale) => update({ scale })),
    ),
    field(
      "turn credit",
      select(choices.turn_credits, settings.turn_credit, (credit) => update({ turn_credit: credit })),
    ),
    estimator?.summary ? el("p.faint", {}, estimator.summary.replaceAll("`", "")) : null,
  );
}

/** A form field for an estimator's option: a menu, a checkbox, a number or a text. */
function optionField(name, option, value, use) {
  if (option.choices) {
    return el(
      "select",
      { onchange: (event) => use(option.choices[event.target.selectedIndex]) },
      option.choices.map((one) => el("option", { selected: one === value }, String(one))),
    );
  }
  if (typeof option.default === "boolean")
    return el("input", { type: "checkbox", checked: Boolean(value), onchange: (event) => use(event.target.checked) });
  if (typeof option.default === "number")
    return el("input", { type: "number", step: "any", value, onchange: (event) => use(Number(event.target.value)) });
  const read = (text) => {
    try {
      return text === "" ? option.default : JSON.parse(text);
    } catch {
      return text;
    }
  };
  return el("input", {
    type: "text",
    value: value === null ? "" : String(value),
    onchange: (event) => use(read(event.target.value.trim())),
  });
}

/** A turn's advantage: a number, or the mean over its tokens. */
function ofTurn(value) {
  return Array.isArray(value) ? meanOf(value) : numberOf(value);
}

/** Whether two advantages differ by more than rounding errors, since stored advantages were float32. */
function differ(one, other) {
  if (Number.isNaN(one) || Number.isNaN(other)) return false;
  return Math.abs(one - other) > 1e-5 * Math.max(1, Math.abs(one), Math.abs(other));
}

/** A sentence on the differences between stored and new advantages. */
function differenceText(group, answer) {
  let [known, changed, turned] = [0, 0, 0];
  group.members.forEach((member, index) =>
    member.turns.forEach((turn, k) => {
      const [stored, other] = [numberOf(turn.advantage), ofTurn(answer.advantages[index]?.[k])];
      if (Number.isNaN(stored) || Number.isNaN(other)) return;
      known += 1;
      if (differ(stored, other)) changed += 1;
      if (differ(stored, other) && stored * other < 0) turned += 1;
    }),
  );
  if (!known)
    return "No advantages are stored for this group, because it was not trained on. The numbers below are the advantages that training would have computed.";
  if (!changed) return `These settings reproduce the stored advantages of ${known === 1 ? "the only turn" : `all ${counted(known, "turn")}`}.`;
  return `${changed} of ${counted(known, "turn")} differ${turned ? `, ${turned} of them in sign` : ""}.`;
}

/** The sentence on differences, and a note if more rollouts were compared than the page shows. */
function comparedTexts(group, answer) {
  const shown = group.members.length;
  const words = differenceText(group, answer);
  if (!(answer.compared > shown)) return [words];
  return [words, `Computed with all ${grouped(answer.compared)} rollouts whose advantages were estimated together.`];
}

/** A warning that some rollouts of the batch are missing. */
function missingText({ note }) {
  return `Not exact: ${note}, so these numbers may differ from those in training.`;
}

function whatIfTable(app, group, answer, row, settings) {
  const numTurns = group.members.reduce((most, member) => Math.max(most, member.turns.length), 0);
  const values = group.members.map((_, index) =>
    group.members[index].turns.map((_turn, k) => ofTurn(answer.advantages[index]?.[k])),
  );
  const limit = largest([
    ...values.flat(),
    ...group.members.flatMap((member) => member.turns.map((turn) => turn.advantage)),
  ]);
  const tint = (kind, value) =>
    el(`span.${kind}${shade(value, limit) ? `.${shade(value, limit)}` : ""}`, { title: exact(value) }, signed(value));
  const cell = (member, index, turn) => {
    const one = member.turns[turn];
    if (!one) return el("td.over");
    const [stored, other] = [numberOf(one.advantage), values[index][turn]];
    const changed = differ(stored, other);
    const sign = changed ? (stored * other < 0 ? "⇅ " : "≠ ") : "";
    return el(
      `td${changed ? ".differs" : ""}`,
      { title: one.text.slice(0, 300) },
      el("span.sign", { "aria-label": sign ? "differs" : null }, sign),
      tint("stored", stored),
      el("span.faint", {}, " → "),
      tint("new", other),
    );
  };
  return el(
    "table.what-if",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "turn"),
        group.members.map((member) => {
          const head = memberHead(app, member, row);
          add(
            head,
            link(
              "plain",
              { view: "tokens", row: member.row, ...RESET_ROLLOUT, by: "difference", wi: JSON.stringify(settings) },
              {},
              "tokens",
            ),
          );
          return head;
        }),
      ),
    ),
    el(
      "tbody",
      {},
      Array.from({ length: numTurns }, (_, turn) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, `turn ${turn}`),
          group.members.map((member, index) => cell(member, index, turn)),
        ),
      ),
    ),
  );
}

async function whatIfView(app, row, given) {
  const group = await data.group(app.list, row);
  const first = readSettings(given) ?? firstSettings(app, group);
  const choices = app.list.answer.what_if;
  const section = el("section.what-if-view", {}, groupSummary(group));
  if (!first) return add(section, el("p.empty", {}, choices?.note ?? "No other settings are available for this group."));
  const controls = el("div");
  const result = el("div.wide", { tabIndex: 0, role: "region", "aria-label": "Stored and new advantages by turn" });
  const words = el("p.difference", { role: "status" });
  let latest = 0;
  const use = async (settings, isChange = true) => {
    const number = ++latest;
    result.setAttribute("aria-busy", "true"); // the table still shows the previous settings
    if (isChange) remember({ wi: JSON.stringify(settings) });
    const focused = [...controls.querySelectorAll("select, input")].indexOf(document.activeElement);
    controls.replaceChildren(settingControls(app, group, settings, use));
    if (focused >= 0) controls.querySelectorAll("select, input")[focused]?.focus();
    try {
      const answer = await data.whatIf(group, settings);
      if (number !== latest) return;
      words.replaceChildren(...comparedTexts(group, answer).map((text, index) => el(`span${index ? ".faint" : ""}`, {}, text, " ")));
      if (answer.note) words.append(el("strong.missing", {}, missingText(answer)));
      result.replaceChildren(whatIfTable(app, group, answer, row, settings));
    } catch (error) {
      if (number === latest) showIn(words, result, error);
    }
    if (number === latest) result.removeAttribute("aria-busy");
    settle();
  };
  const showIn = (status, place, error) => {
    status.replaceChildren(el("span.error-text", {}, error.message));
    place.replaceChildren();
  };
  await use(first, false);
  const stored = group.settings
    ? `Stored: ${settingsText(group.settings)}.`
    : "The settings of the stored advantages are unknown.";
  return add(
    section,
    controls,
    el("p.faint", {}, stored),
    words,
    result,
    el("p.faint", {}, "Each cell shows stored → new advantage; ≠ means that they differ, ⇅ that their signs differ. ", choices?.note ?? ""),
  );
}
