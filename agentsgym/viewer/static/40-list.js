// The list of rollouts. Only the visible rows are in the document, however many rollouts there are.

const ROW_HEIGHT = 27; // pixels, as in viewer.css

// [column, heading, width, kind, rank: in narrow windows, columns with the highest rank are hidden first (0: never)]
const COLUMNS = [
  ["row", "#", "52px", "number", 0],
  ["outcome", "outcome", "82px", "outcome", 0],
  ["final_reward", "reward", "68px", "number", 0],
  ["num_turns", "turns", "50px", "number", 0],
  ["strip", "reward by turn", "minmax(120px, 1.6fr)", "strip", 3],
  ["task_data", "task data", "minmax(120px, 1.6fr)", "word", 3],
  ["stop_reason", "stop reason", "90px", "word", 4],
  ["env", "environment", "minmax(112px, 1fr)", "word", 2],
  ["agent", "agent", "minmax(80px, 1fr)", "word", 5],
  ["run", "run", "minmax(72px, 1fr)", "word", 6],
  ["source", "source", "80px", "word", 9],
  ["step", "step", "52px", "number", 2],
  ["task_index", "task", "50px", "number", 7],
  ["group_index", "group", "54px", "number", 7],
  ["rollout_index", "rollout", "62px", "number", 8],
  ["seed", "seed", "minmax(60px, 96px)", "number", 11],
  ["num_agent_tokens", "tokens", "64px", "number", 10],
  ["created_at", "created", "128px", "moment", 12],
];
const metricColumn = (name) => {
  const heading = metricHeading(name);
  return [name, heading, `${Math.min(176, Math.max(84, 20 + 7 * heading.length))}px`, "number", 8];
};
const ALWAYS = new Set(["row", "outcome", "final_reward", "num_turns", "strip"]);

class ListView {
  constructor(list) {
    this.list = list;
    this.turns = null; // rewards by turn, null until they are loaded
    this.drawnRows = new Map();
    this.places = [];
    this.selected = 0;
    this.columns = [];
    this.all = [...COLUMNS, ...list.metrics.map(metricColumn)];
    this.varied = this.all.filter(([name]) => ALWAYS.has(name) || this.varies(name));
    this.filters = new FilterPanel(list);
    this.head = el("div.head", { role: "row" });
    this.body = el("div.rows", { role: "rowgroup" });
    this.scroller = el("div.scroller", { tabIndex: 0, onscroll: () => this.draw() }, this.head, this.body);
    assign(this.scroller, { role: "grid", "aria-label": "Rollouts", "aria-describedby": "keys-of-list" });
    this.summary = el("p.summary.faint");
    this.empty = el("p.empty", { hidden: true });
    const keys = el("p.unseen", { id: "keys-of-list" }, "j and k move the selection, Enter opens a rollout, ? lists all keys");
    this.node = el(
      "section.list",
      { "aria-label": "List of rollouts" },
      this.filters.node,
      el("div.table", {}, this.summary, this.empty, this.scroller, keys),
    );
    this.body.addEventListener("click", (event) => this.opened(event));
    // Rebuild the columns only if the width changes, since replacing a pressed element would lose its click.
    new ResizeObserver(() => (this.scroller.clientWidth === this.width ? this.draw() : this.fit())).observe(this.scroller);
    this.loadTurns();
  }

  /** Whether a column has different values; a value common to all rollouts is shown once, above the list. */
  varies(name) {
    const values = this.list.columns[name];
    return Boolean(values) && values.some((value) => value !== values[0]);
  }

  /** Load the rewards of every turn, unless there are too many turns. */
  loadTurns() {
    const total = this.list.columns.num_turns.reduce((sum, count) => sum + (count ?? 0), 0);
    if (total > 400_000) return;
    this.isLoading = true;
    data
      .turns()
      .then((turns) => {
        this.turns = this.filters.turns = turns;
        this.filters.summarize(this.places);
        this.limit = percentile(
          turns.rewards.flat().map((value) => Math.abs(numberOf(value))),
          0.98,
        );
        for (const [index, node] of this.drawnRows)
          node.querySelector(".cell.strip")?.replaceChildren(this.strip(this.places[index]) ?? "");
      })
      .catch(() => {}) // the list works without them; the curves view shows the error
      .finally(() => {
        this.isLoading = false;
        settle();
      });
  }

  show(given, { places, counts, passing }) {
    this.given = given;
    const order = places.length !== this.places.length || places.some((place, index) => place !== this.places[index]);
    this.places = places;
    this.filters.show(given, counts, passing);
    this.filters.summarize(places);
    this.summarize(given);
    const wanted = this.list.places.get(Number(given.get("row")));
    const index = given.has("row") ? places.indexOf(wanted) : -1;
    this.selected = Math.max(0, index >= 0 ? index : Math.min(this.selected, places.length - 1));
    if (order) this.scroller.scrollTop = 0;
    this.fit();
    if (index >= 0) this.reveal();
  }

  summarize(given) {
    const { list } = this;
    const same = this.all.filter(
      ([name]) => !["row", "strip", "created_at"].includes(name) && list.has(name) && !this.varies(name),
    )
      .map(([name, heading]) => [heading, list.value(name, 0)])
      .filter(([, value]) => value !== null);
    const facts = this.list.size
      ? same.map(([heading, value]) => [el("span", {}, `${heading} `), el("b", {}, String(value)), "  "])
      : [];
    const state =
      found.error ??
      (!given.get("text")
        ? null
        : !found.rows
          ? "searching …"
          : !found.complete
            ? found.share
              ? `searching … ${Math.round(100 * found.share)}%`
              : "the search stopped early: more rollouts may match"
            : null);
    this.summary.replaceChildren();
    add(this.summary, facts.length ? ["Same for all: ", facts] : null, state && el("span.state", { role: "status" }, state));
    this.summary.hidden = !this.summary.childNodes.length;
    this.empty.hidden = this.places.length > 0;
    this.empty.replaceChildren();
    add(
      this.empty,
      list.size
        ? ["No rollouts match these filters. ", button("link", () => go(noFilters()), {}, "Clear filters")]
        : "This store contains no rollouts yet.",
    );
  }

  /** Choose the columns that fit in the window, by rank. */
  fit() {
    const width = this.scroller.clientWidth;
    if (!width) return;
    this.width = width;
    const least = ([, , wide]) => Number(/\d+/.exec(wide)[0]) + 12;
    let columns = this.varied;
    while (columns.reduce((sum, column) => sum + least(column), 0) > width && columns.some(([, , , , rank]) => rank)) {
      const last = columns.reduce((one, other) => (other[4] > one[4] ? other : one));
      columns = columns.filter((column) => column !== last);
    }
    this.columns = columns;
    this.scroller.style.setProperty("--columns", columns.map(([, , wide]) => wide).join(" "));
    this.head.replaceChildren(...columns.map((column) => this.heading(column)));
    this.redraw();
  }

  heading([name, heading, , kind]) {
    const order = this.given?.get("sort") ?? NEWEST_FIRST;
    const way = order === name ? "ascending" : order === `-${name}` ? "descending" : "none";
    const ascending = way === "none" ? kind === "word" || kind === "outcome" : way === "descending";
    const sort = () => go({ sort: ascending ? name : `-${name}` }, { step: false });
    const sign = way === "none" ? null : el("span", { "aria-hidden": "true" }, way === "ascending" ? " ▲" : " ▼");
    return el(
      `div.cell.${kind}`,
      { role: "columnheader", "aria-sort": name === "strip" ? null : way },
      name === "strip" ? heading : button("sort", sort, { title: `Sort by ${heading}` }, heading, sign),
    );
  }

  redraw() {
    this.body.replaceChildren();
    this.drawnRows.clear();
    this.body.style.height = `${ROW_HEIGHT * this.places.length}px`;
    assign(this.scroller, { "aria-rowcount": String(this.places.length + 1) });
    this.draw();
  }

  /** Update the document so that it contains the visible rows and a few around them. */
  draw() {
    const height = this.scroller.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.places.length, Math.ceil((this.scroller.scrollTop + height) / ROW_HEIGHT) + 8);
    for (const [index, node] of this.drawnRows) {
      if (index >= first && index < last) continue;
      node.remove();
      this.drawnRows.delete(index);
    }
    for (let index = first; index < last; index++) {
      if (this.drawnRows.has(index)) continue;
      const node = this.row(index);
      this.drawnRows.set(index, node);
      this.body.append(node);
    }
  }

  row(index) {
    const place = this.places[index];
    const node = el(
      "div.row",
      { role: "row", id: `row-${index}`, "aria-rowindex": String(index + 2) },
      this.columns.map((column) => this.cell(column, place)),
    );
    node.dataset.place = place;
    node.style.top = `${index * ROW_HEIGHT}px`;
    if (index === this.selected) this.mark(node);
    return node;
  }

  cell([name, , , kind], place) {
    const { list } = this;
    const node = el(`div.cell.${kind}`, { role: "gridcell" });
    if (kind === "outcome") return add(node, outcomeMark(list.value(name, place) ?? "played"));
    if (kind === "strip") return add(node, this.strip(place));
    const value = list.value(name, place);
    if (name === "row")
      return add(node, link("open", { view: "conversation", row: value, ...RESET_ROLLOUT }, { tabIndex: -1 }, value));
    if (kind === "moment") return add(node, value === null ? "–" : moment(value).slice(5, 16));
    const isWhole = kind === "word" || name === "seed"; // a seed must not be rounded
    const written = name === "final_reward" ? signed(value) : isWhole ? String(value ?? "–") : brief(value);
    return add(assign(node, { title: isWhole ? written : null }), written);
  }

  strip(place) {
    const at = this.turns?.places.get(this.list.columns.row[place]);
    return at === undefined ? null : turnStrip(this.turns.rewards[at], this.turns.invalid[at], this.limit);
  }

  mark(node) {
    const before = this.body.querySelector(".row.selected");
    before?.classList.remove("selected");
    before?.removeAttribute("aria-selected");
    node.classList.add("selected");
    assign(node, { "aria-selected": "true" });
    assign(this.scroller, { "aria-activedescendant": node.id });
  }

  opened(event) {
    const row = event.target.closest(".row");
    if (!row || event.target.closest("a") || getSelection().toString()) return;
    this.open(Number(row.dataset.place));
  }

  open(place = this.places[this.selected]) {
    if (place !== undefined) go({ view: "conversation", row: this.list.columns.row[place], ...RESET_ROLLOUT });
  }

  /** Move the selection and scroll it into view. */
  move(by) {
    if (!this.places.length) return;
    this.selected = Math.min(this.places.length - 1, Math.max(0, this.selected + by));
    this.reveal();
    remember({ row: this.list.columns.row[this.places[this.selected]] });
  }

  reveal() {
    const top = this.selected * ROW_HEIGHT;
    const room = this.scroller.clientHeight - this.head.offsetHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW_HEIGHT > this.scroller.scrollTop + room) this.scroller.scrollTop = top + ROW_HEIGHT - room;
    this.draw();
    const node = this.drawnRows.get(this.selected);
    if (node) this.mark(node);
  }
}

/** A percentile of the finite values, for a share in [0, 1]; 0 if there are none. */
function percentile(values, share) {
  const known = values.filter(Number.isFinite).sort((one, other) => one - other);
  return known.length
    ? known[Math.min(known.length - 1, Math.floor(share * known.length))] || known[known.length - 1]
    : 0;
}

/** A bar per turn: up for a positive and down for a negative reward, a dash for 0; invalid actions are marked. */
function turnStrip(rewards, invalid, limit) {
  const wide = Math.max(2, Math.min(7, Math.floor(240 / Math.max(1, rewards.length))));
  const paths = { up: "", down: "", none: "", wrong: "" };
  rewards.forEach((value, turn) => {
    const reward = numberOf(value);
    const left = turn * wide;
    if (invalid?.[turn]) paths.wrong += `M${left} 0h${wide - 1}v2h${1 - wide}z`;
    if (!reward) paths.none += `M${left} 9.5h${wide - 1}v1h${1 - wide}z`;
    else {
      const tall = Math.max(2, 8 * Math.min(1, Math.abs(reward) / (limit || 1)));
      paths[reward > 0 ? "up" : "down"] += `M${left} 10h${wide - 1}v${reward > 0 ? -tall : tall}h${1 - wide}z`;
    }
  });
  const label = `rewards by turn: ${rewards.map(brief).join(", ")}`;
  return drawn(
    "svg",
    {
      class: "strip",
      width: rewards.length * wide,
      height: 20,
      viewBox: `0 0 ${Math.max(1, rewards.length * wide)} 20`,
      preserveAspectRatio: "none", // a narrow column compresses the strip rather than cutting it off
      role: "img",
      "aria-label": label.slice(0, 400),
    },
    Object.entries(paths)
      .filter(([, path]) => path)
      .map(([kind, path]) => drawn("path", { class: kind, d: path })),
  );
}
