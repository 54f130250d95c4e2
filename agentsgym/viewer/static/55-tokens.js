// Every token of a rollout, colored by one quantity at a time. Long rollouts are drawn in parts, when they are visible.

const PART = 1500; // tokens that are drawn together

// [key, heading, values by token (null: unknown), description]
const COLORS = [
  ["mask", "trained on", null, "Tokens that the agent produced and that it is trained on."],
  ["reward", "reward", (tokens) => tokens.rewards, "Reward from the environment, assigned to the token."],
  ["advantage", "advantage", (tokens) => tokens.advantages, "Stored advantage, by which the token's policy gradient is weighted."],
  [
    "logprob",
    "log-probability",
    (tokens) => tokens.logprobs,
    "Log-probability of the token when it was sampled; a stronger color means a less likely token.",
  ],
  ["entropy", "entropy", (tokens) => tokens.entropies, "Entropy of the distribution from which the token was sampled."],
  ["gap", "sampler/trainer gap", gapOf, "The trainer's log-probability minus the sampler's; 0 if they agree."],
];

function gapOf(tokens) {
  const { logprobs, trainer_logprobs: trainer } = tokens;
  return logprobs && trainer
    ? trainer.map((value, at) =>
        value === null || logprobs[at] === null ? null : numberOf(value) - numberOf(logprobs[at]),
      )
    : null;
}

/** Assign a named reward of each turn to its tokens; environment tokens get 0. */
function onTokens({ tokens, turns }, name) {
  const values = new Array(tokens.ids.length).fill(0);
  for (const { start, stop, components } of turns) values.fill(components?.[name] ?? 0, start, stop);
  return values;
}

class TokenView {
  constructor(rollout, given) {
    Object.assign(this, { rollout, tokens: rollout.tokens });
    this.turnAt = new Int32Array(this.tokens.ids.length).fill(-1);
    rollout.turns.forEach(({ start, stop }, turn) => this.turnAt.fill(turn, start, stop));
    const named = componentNames(rollout).map((name) => [
      `reward: ${name}`,
      `reward: ${name}`,
      () => onTokens(rollout, name),
      "Named reward from the environment, the whole amount on each token of its turn.",
    ]);
    const [mask, reward, ...others] = COLORS;
    this.columns = [mask, reward, ...named, ...others].map(([key, heading, of, note]) => ({
      key,
      heading,
      note,
      values: of ? of(this.tokens) : null,
    })).filter(({ key, values }) => key === "mask" || values);
    this.legend = el("div.legend");
    this.hint = el("div.hint", { role: "tooltip", id: "token-hint", hidden: true });
    this.stream = el("div.stream", {
      role: "group",
      "aria-label": "Tokens: the arrow keys move between them, and a tooltip shows the values",
      onmouseover: (event) => this.point(event.target.closest(".token")),
      onmouseleave: () => this.unpoint(),
      onfocusin: (event) => this.point(event.target.closest(".token")),
      onfocusout: () => this.unpoint(),
      onkeydown: (event) => this.key(event),
      onclick: (event) => event.target.closest(".token")?.focus({ preventScroll: true }),
    });
    this.seen = new IntersectionObserver(
      (entries) => entries.forEach((entry) => entry.isIntersecting && this.fill(entry.target)),
      { root: parts.content, rootMargin: "1500px" },
    );
    this.parts = this.blocks();
    add(
      this.stream,
      this.parts.map(({ node }) => node),
    );
    for (const { holders } of this.parts) for (const holder of holders) this.seen.observe(holder);
    this.choose(given.get("by"));
    this.node = el(
      "section.tokens",
      {},
      factsOf(rollout),
      turnBar(rollout, revealTurn),
      this.chooser(),
      this.legend,
      this.outNote(),
      this.stream,
      ending(rollout),
      this.hint,
    );
    this.first()?.setAttribute("tabindex", "0");
  }

  /** Split the tokens where turns begin and end, and where a rewritten history begins. */
  blocks() {
    const edges = new Set([0, this.tokens.ids.length]);
    this.segments = new Set(this.rollout.turns.map((turn) => turn.prompt_start).filter((start) => start > 0));
    for (const { start, stop } of this.rollout.turns) edges.add(start).add(stop);
    for (const start of this.segments) edges.add(start);
    const sortedEdges = [...edges].sort((one, other) => one - other);
    return sortedEdges.slice(0, -1).map((start, index) => this.block(start, sortedEdges[index + 1]));
  }

  block(start, stop) {
    const turn = this.turnAt[start];
    const holders = [];
    for (let from = start; from < stop; from += PART) {
      const to = Math.min(stop, from + PART);
      const holder = el("span.part");
      Object.assign(holder.dataset, { from, to });
      holder.style.minHeight = `${20 * Math.ceil((to - from) / 22)}px`; // an estimate, until the part is drawn
      holders.push(holder);
    }
    const count = el("span.note.faint", {}, counted(stop - start, "token"));
    const prompt = hasCalls(this.rollout) ? "new prompt" : "rewritten history";
    const label =
      turn >= 0
        ? turnNotes(this.rollout, turn, count)
        : [el("span.faint", {}, this.segments.has(start) ? prompt : "environment"), count];
    const node = el(
      `div.block.${turn >= 0 ? "agent" : "given"}`,
      { id: turn >= 0 ? `turn-${turn}` : null },
      el("div.who", {}, label),
      el("div.what", {}, holders),
    );
    return { node, holders };
  }

  /** Draw the tokens of a part. */
  fill(holder) {
    this.seen.unobserve(holder);
    if (holder.firstChild) return;
    const nodes = [];
    for (let at = Number(holder.dataset.from); at < Number(holder.dataset.to); at++) {
      const node = el("span.token", { tabIndex: -1 }, this.text(at));
      node.dataset.at = at;
      this.color(node, at);
      nodes.push(node);
    }
    holder.style.minHeight = "";
    holder.append(...nodes);
  }

  /** The text of a token, with marked newlines and tabs, ∅ if it is empty; without a tokenizer, the token's id. */
  text(at) {
    const text = this.tokens.texts?.[at];
    if (text === undefined || text === null) return String(this.tokens.ids[at]);
    return text === "" ? "∅" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  }

  choose(key) {
    this.column =
      this.columns.find((column) => column.key === key) ??
      this.columns.find((column) => column.key === "advantage") ??
      this.columns.find((column) => column.key === "reward") ??
      this.columns[0];
    const { values } = this.column;
    const known = values
      ? values
          .filter((_, at) => this.turnAt[at] >= 0)
          .map((value) => Math.abs(numberOf(value)))
          .filter(Number.isFinite)
      : [];
    const most = known.reduce((one, other) => Math.max(one, other), 0);
    const usual = percentile(known.filter(Boolean), 0.98);
    this.limit = most > 3 * usual && usual ? usual : most; // otherwise one outlier would make all other tokens pale
    this.stream.querySelectorAll(".token").forEach((node) => this.color(node, Number(node.dataset.at)));
    this.drawLegend(most);
  }

  color(node, at) {
    const isAgent = this.turnAt[at] >= 0;
    const { values } = this.column;
    const value = values?.[at];
    const kind = !isAgent
      ? ""
      : values
        ? value === null || value === undefined
          ? "unknown"
          : shade(value, this.limit)
        : this.isTrained(at)
          ? "trained"
          : "";
    node.className = `token${isAgent ? " agent" : ""}${kind ? ` ${kind}` : ""}`;
  }

  isTrained(at) {
    return Boolean(this.tokens.trained?.[at]);
  }

  /** Whether a token counted in the loss; outside training, whether it would have counted. */
  trainedText(at) {
    if (!this.isTrained(at)) return "no";
    if (this.tokens.is_trained === false) return "no: this rollout was excluded";
    return this.isOfTraining() ? "yes" : "no, but training would use it";
  }

  maskText() {
    if (this.tokens.is_trained === false) return "agent tokens of an excluded rollout";
    return this.isOfTraining() ? "agent tokens, trained on" : "agent tokens that training would use";
  }

  isOfTraining() {
    return this.tokens.is_trained ?? Boolean(this.tokens.advantages);
  }

  chooser() {
    const group = el("div.choose", { role: "radiogroup", "aria-label": "Color by" }, el("span.faint", {}, "Color by"));
    const draw = () =>
      group
        .querySelectorAll("button")
        .forEach((node) => node.setAttribute("aria-checked", String(node.dataset.key === this.column.key)));
    for (const { key, heading, note } of this.columns) {
      const node = button(
        "option",
        () => {
          this.choose(key);
          remember({ by: key });
          draw();
        },
        { role: "radio", title: note },
        heading,
      );
      node.dataset.key = key;
      group.append(node);
    }
    draw();
    return group;
  }

  /** The legend, with the values of the strongest colors. */
  drawLegend(most) {
    const { key, values, note } = this.column;
    const swatch = (kind, words) =>
      el("span.key", {}, el(`span.token.${kind}`, { "aria-hidden": "true" }, "  "), words);
    const beyond = most > this.limit ? " or more" : "";
    const scale = (sign) =>
      el(
        "span.scale",
        {},
        [1, 3, 5, 8].map((step) => el(`span.token.agent.${sign}${step}`, { "aria-hidden": "true" }, "  ")),
      );
    const has = (test) => values?.some((value, at) => this.turnAt[at] >= 0 && test(numberOf(value)));
    this.legend.replaceChildren();
    add(
      this.legend,
      swatch("given", "environment tokens"),
      key === "mask"
        ? [
            swatch("agent.trained", this.maskText()),
            this.tokens.trained?.every((one, at) => one || this.turnAt[at] < 0)
              ? null
              : swatch("agent", "agent tokens, excluded"),
          ]
        : [
            swatch("agent", `agent tokens, ${this.column.heading} 0`),
            has((value) => value > 0) ? el("span.key", {}, scale("p"), `up to +${brief(this.limit)}${beyond}`) : null,
            has((value) => value < 0) ? el("span.key", {}, scale("n"), `down to −${brief(this.limit)}${beyond}`) : null,
            has(Number.isNaN) ? swatch("agent.unknown", "unknown") : null,
          ],
      el("span.note", {}, note),
    );
  }

  outNote() {
    const notes = [];
    if (this.tokens.is_trained === false)
      notes.push("This rollout was excluded from training, so none of its tokens counted in the loss.");
    if (!this.tokens.texts)
      notes.push("The store has no tokenizer for this rollout, so tokens are shown as ids.");
    return notes.length ? el("p.notice", {}, notes.join(" ")) : null;
  }

  /** Show all values of a token in the tooltip, with all digits. */
  point(node) {
    if (!node || !node.dataset.at) return;
    const at = Number(node.dataset.at);
    const turn = this.turnAt[at];
    const rows = [
      ["token", `${at}`],
      ["id", exact(this.tokens.ids[at])],
      ["turn", turn < 0 ? "none: an environment token" : String(turn)],
      ["trained on", this.trainedText(at)],
      ...(turn < 0
        ? []
        : this.columns.filter(({ values }) => values).map(({ heading, values }) => [heading, exact(values[at])])),
    ];
    const text = this.tokens.texts?.[at];
    this.hint.replaceChildren(
      el("p.token-text", {}, text === undefined || text === null ? "" : JSON.stringify(text).slice(0, 200)),
      el(
        "dl",
        {},
        rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-name": name }, value)]),
      ),
    );
    this.hint.hidden = false;
    const box = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.hint;
    this.hint.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 8))}px`;
    const isLow = box.bottom + height + 8 > innerHeight;
    this.hint.style.top = `${isLow ? Math.max(4, box.top - height - 6) : box.bottom + 6}px`;
    this.pointed?.removeAttribute("aria-describedby");
    this.pointed = node;
    node.setAttribute("aria-describedby", "token-hint");
  }

  unpoint() {
    this.hint.hidden = true;
  }

  first() {
    const part = this.parts.find(({ node }) => node.classList.contains("agent")) ?? this.parts[0];
    if (part) this.fill(part.holders[0]);
    return part?.node.querySelector(".token");
  }

  key(event) {
    const node = event.target.closest(".token");
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const turns = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!node || (!by && !turns)) return;
    event.preventDefault();
    const at = Number(node.dataset.at);
    const wanted = by ? at + by : this.rollout.turns[this.turnNear(at, turns)]?.start;
    const holder = this.parts
      .flatMap(({ holders }) => holders)
      .find(({ dataset }) => wanted >= Number(dataset.from) && wanted < Number(dataset.to));
    if (!holder) return;
    this.fill(holder);
    const next = holder.children[wanted - Number(holder.dataset.from)];
    node.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  /** The turn after or before a token. */
  turnNear(at, way) {
    const { turns } = this.rollout;
    if (this.turnAt[at] >= 0) return this.turnAt[at] + way;
    const next = turns.findIndex(({ start }) => start > at);
    return way > 0 ? next : (next < 0 ? turns.length : next) - 1;
  }
}

async function tokensView(app, row, given) {
  const rollout = await data.rollout(app.list, row);
  if (!rollout.tokens) {
    return el(
      "section.tokens",
      {},
      factsOf(rollout),
      turnBar(rollout, revealTurn),
      el(
        "p.empty",
        {},
        "This rollout has no tokens, because it was recorded without a tokenizer. See the conversation instead.",
      ),
    );
  }
  return new TokenView(rollout, given).node;
}
