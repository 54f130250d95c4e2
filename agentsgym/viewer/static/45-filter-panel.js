// The panel next to the list: a checkbox with a count for each choice, fields for each range, and the search.

const MAX_CHOICES = 7; // per filter, until "more" is pressed

class FilterPanel {
  constructor(list) {
    this.list = list;
    this.unfolded = new Set();
    this.text = el("input", {
      type: "search",
      placeholder: "Search messages  ( / )",
      "aria-label": "Search the messages of rollouts",
      oninput: () => {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.searched(), 250);
      },
      onkeydown: (event) => event.key === "Enter" && this.searched(),
    });
    this.ranges = rangesOf(list).filter(([name]) => list.has(name) && list.columns[name].some((value) => value !== null)).map(
      ([name, heading]) => new RangeFilter(list, name, heading),
    );
    this.choices = el("div.choices");
    this.count = el("p.count", { role: "status" });
    this.summary = el("summary");
    this.node = el(
      "details.filters",
      { open: innerWidth > 760 },
      this.summary,
      this.count,
      this.text,
      this.choices,
      this.ranges.map((range) => range.node),
    );
  }

  searched() {
    clearTimeout(this.timer);
    go({ text: this.text.value.trim() || null }, { step: false });
  }

  show(given, counts, passing) {
    this.given = given;
    this.counts = counts;
    if (document.activeElement !== this.text) this.text.value = given.get("text") ?? "";
    const focused = document.activeElement?.id;
    this.choices.replaceChildren();
    add(
      this.choices,
      ["group", "task"].filter((name) => given.has(name)).map((name) => this.chip(name)),
      FACETS.map(([name, heading]) => this.facet(name, heading)),
    );
    if (focused?.startsWith("choice-")) document.getElementById(focused)?.focus();
    for (const range of this.ranges) range.show(given, passing.get(range.name));
  }

  summarize(places) {
    const shown = places.length;
    const outcomes = places.map((place) => this.list.value("outcome", place));
    const won = outcomes.filter((one) => one === "won").length;
    const judged = won + outcomes.filter((one) => one === "lost").length; // rollouts with known success
    const { shown: size, total, note } = this.list.answer;
    const all = size < total ? `the newest ${grouped(size)} of ${grouped(total)}` : grouped(total);
    this.summary.textContent = `Filters: ${grouped(shown)} of ${all} rollouts`; // visible only in narrow windows
    this.count.replaceChildren();
    add(
      this.count,
      el("b", {}, grouped(shown)),
      shown === this.list.size && size === total ? " rollouts" : ` of ${all} rollouts`,
      isFiltered(this.given) ? button("link", () => go(noFilters()), {}, "clear") : null,
      judged ? el("span.note.won", {}, shareWon(won, judged)) : null,
      this.wonByRole(places).map(([role, won, played]) => el("span.note.role", {}, `role ${role}: ${shareWon(won, played)}`)),
      note ? el("span.note.faint", {}, note) : null,
    );
  }

  /** Each role with the numbers of rollouts that it won and played, as `agentsgym eval` counts; none with one role. */
  wonByRole(places) {
    const counts = new Map();
    for (const place of places) {
      const results = this.turns?.won[this.turns.places.get(this.list.columns.row[place])] ?? {};
      for (const role in results) {
        const [won, played, isKnown] = counts.get(role) ?? [0, 0, false];
        counts.set(role, [won + (results[role] === true), played + 1, isKnown || results[role] !== null]);
      }
    }
    const roles = [...counts.keys()].filter((role) => counts.get(role)[2]);
    roles.sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    return roles.length > 1 ? roles.map((role) => [role, ...counts.get(role)]) : [];
  }

  chip(name) {
    const value = this.given.get(name);
    return button("chip", () => go({ [name]: null }), { title: "Remove this filter" }, `${name} ${value} `, "×");
  }

  facet(name, heading) {
    const { list, given } = this;
    const wanted = given.getAll(name);
    const count = this.counts.get(name);
    if (!list.has(name) || (count.size < 2 && !wanted.length)) return null;
    for (const value of wanted) if (!count.has(value)) count.set(value, 0);
    const sizes = [...count].sort(([one, a], [other, b]) => b - a || one.localeCompare(other, "en", { numeric: true }));
    const seen = this.unfolded.has(name)
      ? sizes
      : sizes.filter(([value], index) => index < MAX_CHOICES || wanted.includes(value));
    const most = Math.max(1, ...count.values());
    const more = sizes.length - seen.length;
    const unfold = () => {
      this.unfolded.add(name);
      show();
    };
    return el(
      "fieldset.facet",
      {},
      el("legend", {}, heading),
      seen.map(([value, size]) => this.choice(name, value, size, most)),
      more > 0 ? button("link", unfold, {}, `${more} more`) : null,
    );
  }

  choice(name, value, size, most) {
    const wanted = this.given.getAll(name);
    const change = (event) => {
      const next = event.target.checked ? [...wanted, value] : wanted.filter((one) => one !== value);
      go({ [name]: next.length ? next : null }, { step: false });
    };
    const id = `choice-${name}-${value}`;
    const box = el("input", { type: "checkbox", id, checked: wanted.includes(value), onchange: change });
    const bar = el("span.bar", { "aria-hidden": "true" });
    bar.style.width = `${(100 * size) / most}%`;
    const label =
      name === "outcome"
        ? outcomeMark(value)
        : el("span.word", { title: value }, value === UNKNOWN ? "unknown" : value || "(empty)");
    return el("label.choice", {}, box, label, el("span.size", {}, grouped(size)), bar);
  }
}

function shareWon(won, number) {
  return `${((100 * won) / number).toFixed(1)}% won (${grouped(won)} of ${grouped(number)})`;
}

/** Two fields, and a small histogram of the rollouts that pass the other filters. */
class RangeFilter {
  constructor(list, name, heading) {
    Object.assign(this, { list, name });
    const field = (end) =>
      el("input", {
        type: "number",
        step: "any",
        "aria-label": `${heading}: ${end}`,
        onchange: () => this.changed(),
      });
    this.low = field("at least");
    this.high = field("at most");
    this.picture = drawn("svg", {
      class: "histogram",
      viewBox: "0 0 100 20",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    this.node = el(
      "fieldset.range",
      {},
      el("legend", {}, heading),
      this.picture,
      el("div.ends", {}, this.low, el("span.faint", {}, "to"), this.high),
    );
  }

  changed() {
    const range = `${this.low.value.trim()}..${this.high.value.trim()}`;
    go({ [this.name]: range === ".." ? null : range }, { step: false });
  }

  show(given, places) {
    const [written, above] = (given.get(this.name) ?? "..").split("..");
    if (document.activeElement !== this.low) this.low.value = written;
    if (document.activeElement !== this.high) this.high.value = above ?? "";
    const values = places.map((place) => this.list.number(this.name, place)).filter(Number.isFinite);
    const [least, most] = values.reduce(
      ([a, b], value) => [Math.min(a, value), Math.max(b, value)],
      [Infinity, -Infinity],
    );
    this.low.placeholder = values.length ? brief(least) : "";
    this.high.placeholder = values.length ? brief(most) : "";
    this.picture.replaceChildren();
    this.node.hidden = !given.has(this.name) && !(most > least);
    if (!(most > least)) return;
    const whole = values.every(Number.isInteger) && most - least < 25;
    const number = whole ? most - least + 1 : 25; // one bar per integer, so that no bar is empty just because of rounding
    const wide = (most - least) / (whole ? number - 1 : number);
    const start = whole ? least - 0.5 : least;
    const bins = new Array(number).fill(0);
    for (const value of values) bins[Math.min(number - 1, Math.floor((value - start) / wide))] += 1;
    const tallest = Math.max(...bins);
    const [from, to] = readRange(given.get(this.name));
    bins.forEach((count, bin) => {
      if (!count) return;
      const [low, high] = whole ? [least + bin, least + bin] : [start + bin * wide, start + (bin + 1) * wide];
      const tall = Math.max(1.5, (20 * count) / tallest);
      const kind = high >= from && low <= to ? "in" : "out";
      this.picture.append(
        drawn("rect", { class: kind, x: (100 * bin) / number, y: 20 - tall, width: 86 / number, height: tall }),
      );
    });
  }
}
