// The page as a whole: its header, the current view, keyboard shortcuts, the theme, and errors.

const KEYS = [
  ["j  k", "next or previous rollout"],
  ["Enter", "open the selected rollout"],
  ["Esc", "back to the list, or close this dialog"],
  ["/", "search the messages"],
  ["c", "conversation of the rollout"],
  ["t", "tokens of the rollout"],
  ["g", "task group of the rollout, side by side"],
  ["b", "before and after: two rollouts of the same task"],
  ["n  p", "next or previous turn"],
  ["← → ↑ ↓", "in the tokens view: previous or next token, previous or next turn"],
  ["v", "learning curves, and curves by turn"],
  ["l", "the list"],
  ["d", "switch the theme: dark, light, or system default"],
  ["?", "show these shortcuts"],
];
const VIEW_OF_KEY = { c: "conversation", t: "tokens", g: "group", b: "pair" };
const DRAW = {
  conversation: conversationView,
  tokens: tokensView,
  group: groupView,
  pair: pairView,
};

const app = { list: null, places: [], view: null };
const parts = {
  content: el("div.content", { tabIndex: -1 }),
  title: el("h1"),
  path: el("span.path.faint"),
  nav: el("nav.views", { "aria-label": "Views" }),
  help: null,
};

/** Show the view given by the address. Late responses for another view are discarded. */
function show() {
  const { view, row, given } = readAddress();
  searchFor(app.list, given.get("text") ?? "");
  const result = filtered(app.list, given);
  app.places = result.places;
  const known = view === "list" || view === "curves" || app.list.places.has(row);
  parts.nav.replaceChildren(
    ...[
      ["list", "Rollouts"],
      ["curves", "Curves"],
    ].map(([name, heading]) =>
      link(
        "tab",
        { view: name },
        { "aria-current": (name === "curves") === (view === "curves") ? "page" : null },
        heading,
      ),
    ),
  );
  app.listView.node.hidden = view !== "list";
  if (view === "list") {
    app.drawing = null;
    parts.content.removeAttribute("aria-busy");
    parts.content.replaceChildren();
    app.listView.show(given, result);
    settle();
    return;
  }
  const wanted = `${view} ${row} ${view === "curves" ? location.hash : ["left", "right"].map((key) => given.get(key))}`;
  if (app.drawing === wanted) return settle();
  app.drawing = wanted;
  draw(view, known ? row : undefined, given, wanted);
}

/** Mark the document with the address once everything has been shown; tests wait for this mark. */
function settle() {
  const root = document.documentElement;
  delete root.dataset.settled;
  const look = () => {
    const isSearching = found.text && !found.complete && !found.error && found.share !== 1;
    const isLoading = readAddress().view === "list" && app.listView.isLoading;
    if (!isSearching && !isLoading && !document.querySelector("[aria-busy]")) root.dataset.settled = location.hash;
  };
  requestAnimationFrame(() => requestAnimationFrame(look)); // after a new layout has taken effect
}

async function draw(view, row, given, wanted) {
  parts.content.setAttribute("aria-busy", "true");
  if (row === undefined) {
    parts.content.removeAttribute("aria-busy");
    parts.content.replaceChildren(
      errorBox(
        new Error(`Rollout ${given.get("row") ?? "(none)"} is not in this list.`),
        () => go({ view: "list", row: null }),
        "Back to the list",
      ),
    );
    settle();
    return;
  }
  const late = setTimeout(
    () => app.drawing === wanted && parts.content.replaceChildren(el("p.empty", { role: "status" }, "Loading …")),
    200,
  );
  let nodes;
  try {
    nodes = view === "curves" ? [await curvesView(app, given)] : await rolloutView(view, row, given);
  } catch (error) {
    nodes = [
      errorBox(
        error,
        () => {
          app.drawing = null;
          show();
        },
        "Try again",
      ),
    ];
    if (view !== "curves") nodes.unshift(rolloutHead(app, row, view));
  }
  clearTimeout(late);
  if (app.drawing !== wanted) return;
  parts.content.replaceChildren(...nodes);
  parts.content.removeAttribute("aria-busy");
  parts.content.scrollTop = 0;
  if (given.has("turn")) revealTurn(Number(given.get("turn")));
  settle();
}

async function rolloutView(view, row, given) {
  const body = await DRAW[view](app, row, given);
  return [rolloutHead(app, row, view), body];
}

/** An error message, with a button for a remedy. */
function errorBox(error, action, words) {
  return el(
    "div.trouble",
    { role: "alert" },
    el("p", {}, error.message || String(error)),
    action ? button("plain", action, {}, words) : null,
  );
}

/** Switch between the light, dark and system theme, and save the choice if the browser allows it. */
function switchTheme(wanted) {
  const root = document.documentElement;
  const order = { undefined: "dark", dark: "light", light: undefined };
  const next = wanted === undefined ? order[root.dataset.theme] : wanted;
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  parts.theme.replaceChildren(el("span.label", {}, "theme: "), next ?? "system");
  try {
    localStorage.setItem("agentsgym-theme", next ?? "");
  } catch {
    /* storage may be disabled for local files */
  }
}

function savedTheme() {
  try {
    return localStorage.getItem("agentsgym-theme") || null;
  } catch {
    return null;
  }
}

function helpDialog() {
  const close = () => dialog.close();
  const dialog = el(
    "dialog.help",
    { "aria-label": "Keyboard shortcuts", onclick: (event) => event.target === dialog && close() },
    el("h2", {}, "Keyboard shortcuts"),
    el(
      "dl",
      {},
      KEYS.flatMap(([key, does]) => [
        el(
          "dt",
          {},
          key.split("  ").map((one) => el("kbd", {}, one)),
        ),
        el("dd", {}, does),
      ]),
    ),
    button("plain", close, {}, "Close"),
  );
  return dialog;
}

function openSelected(view) {
  const { row } = readAddress();
  if (row !== null && app.list.places.has(row)) go({ view, ...RESET_ROLLOUT });
  else if (app.places.length)
    go({ view, row: app.list.columns.row[app.places[app.listView.selected] ?? app.places[0]], ...RESET_ROLLOUT });
}

/** Go to the next or previous rollout of the list, in the current view. */
function step(by) {
  const { view, row } = readAddress();
  if (view === "list") return app.listView.move(by);
  const index = app.places.indexOf(app.list.places.get(row));
  const next = app.places[index + by];
  if (view !== "curves" && index >= 0 && next !== undefined) go({ row: app.list.columns.row[next], ...RESET_ROLLOUT });
}

function stepTurn(by) {
  const turns = [...parts.content.querySelectorAll("[id^='turn-']")].map((node) => Number(node.id.slice(5)));
  const here = Number(readAddress().given.get("turn") ?? (by > 0 ? -1 : turns.length));
  if (turns.includes(here + by)) revealTurn(here + by);
}

const ACTIONS = {
  j: () => step(1),
  k: () => step(-1),
  n: () => stepTurn(1),
  p: () => stepTurn(-1),
  l: () => go({ view: "list" }),
  v: () => go({ view: "curves" }),
  d: () => switchTheme(),
  "?": () => parts.help.showModal(),
  "/": () => {
    go({ view: "list" });
    app.listView.filters.node.open = true;
    app.listView.filters.text.focus();
  },
  Escape: () => go({ view: "list" }),
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || parts.help.open) return;
  const within = event.target.closest?.("input, select, textarea");
  if (within && event.key === "Escape") return within.blur();
  if (within && within.type !== "checkbox") return;
  const inList = readAddress().view === "list";
  const onRow = event.target.closest?.(".scroller") || event.target === document.body || event.target === parts.content;
  if (inList && onRow && ["ArrowDown", "ArrowUp"].includes(event.key))
    app.listView.move(event.key === "ArrowDown" ? 1 : -1);
  else if (inList && onRow && event.key === "Enter") app.listView.open();
  else if (VIEW_OF_KEY[event.key]) openSelected(VIEW_OF_KEY[event.key]);
  else if (ACTIONS[event.key]) ACTIONS[event.key]();
  else return;
  event.preventDefault();
}

async function start() {
  const main = document.getElementById("app");
  parts.theme = button("plain", () => switchTheme(), { title: "Light, dark, or system default (key d)" });
  parts.help = helpDialog();
  main.replaceChildren(
    el(
      "header.page-head",
      {},
      parts.title,
      parts.path,
      parts.nav,
      el(
        "span.right",
        {},
        parts.theme,
        button("plain", () => parts.help.showModal(), { title: "key ?", "aria-label": "Keyboard shortcuts" }, "?"),
      ),
    ),
    parts.content,
    parts.help,
  );
  switchTheme(savedTheme());
  try {
    app.list = await data.list();
  } catch (error) {
    parts.content.replaceChildren(errorBox(error, () => location.reload(), "Try again"));
    return;
  }
  const { title, path } = app.list.answer;
  document.title = visible(title || "Rollouts");
  parts.title.textContent = visible(title || "Rollouts");
  parts.path.textContent = visible(path ?? "");
  app.listView = new ListView(app.list);
  parts.content.before(app.listView.node);
  addEventListener("popstate", show);
  addEventListener("hashchange", show);
  addEventListener("keydown", pressed);
  show();
  document.documentElement.dataset.ready = "list"; // for the benchmark
}

start();
