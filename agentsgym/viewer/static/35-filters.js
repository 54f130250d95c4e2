// The selection of the rollouts that are shown, and their order.

const FACETS = [
  ["outcome", "Outcome"],
  ["stop_reason", "Stop reason"],
  ["env", "Environment"],
  ["agent", "Agent"],
  ["run", "Run"],
  ["source", "Source"],
];
const RANGES = [
  ["final_reward", "Reward"],
  ["step", "Step"],
  ["num_turns", "Turns"],
  ["num_agent_tokens", "Agent tokens"],
  ["num_tokens", "All tokens"],
];

/** The ranges by which a list can be filtered: the fixed ones, and one per metric. */
function rangesOf(list) {
  return [...RANGES, ...list.metrics.map((name) => [name, metricHeading(name)])];
}

const NEWEST_FIRST = "-row"; // the order if the address has none
const UNKNOWN = "–"; // stands for an unknown value in the address and among the choices

/** The result of the search for the text in the address; rows is null until there are results. */
const found = { text: "", rows: null, complete: true, error: null };

/** Parse a range such as "0.5..2"; either end may be omitted. */
function readRange(text) {
  const [low, high] = (text ?? "..").split("..");
  return [low === "" ? -Infinity : Number(low), high === "" || high === undefined ? Infinity : Number(high)];
}

/** The filters in the address as pairs [name, predicate of an index in the list]. */
function testsOf(list, given) {
  const tests = [];
  for (const [name] of FACETS) {
    const wanted = new Set(given.getAll(name));
    if (wanted.size) tests.push([name, (place) => wanted.has(String(list.value(name, place) ?? UNKNOWN))]);
  }
  for (const [name] of rangesOf(list)) {
    if (!given.has(name)) continue;
    const [low, high] = readRange(given.get(name));
    tests.push([name, (place) => list.number(name, place) >= low && list.number(name, place) <= high]);
  }
  for (const name of ["group", "task"]) {
    if (given.has(name)) tests.push([name, (place) => String(list.value(name, place)) === given.get(name)]);
  }
  if (given.get("text")) tests.push(["text", (place) => !found.rows || found.rows.has(list.columns.row[place])]);
  return tests;
}

/** Filter and sort the list by the address, and count the rollouts that each choice would leave.
 *
 * A choice is counted among the rollouts that pass all other filters, so the count is the number that it would show.
 */
function filtered(list, given) {
  const tests = testsOf(list, given);
  const counts = new Map(FACETS.map(([name]) => [name, new Map()]));
  const passing = new Map(rangesOf(list).map(([name]) => [name, []]));
  const places = [];
  for (let place = 0; place < list.size; place++) {
    const failed = tests.filter(([, test]) => !test(place)).slice(0, 2);
    if (!failed.length) places.push(place);
    if (failed.length > 1) continue;
    const only = failed.length ? failed[0][0] : null;
    for (const [name, count] of counts) {
      if (only !== null && only !== name) continue;
      const value = String(list.value(name, place) ?? UNKNOWN);
      count.set(value, (count.get(value) ?? 0) + 1);
    }
    for (const [name, those] of passing) if (only === null || only === name) those.push(place);
  }
  return { places: sorted(list, places, given.get("sort") ?? NEWEST_FIRST), counts, passing };
}

/** Sort indices by a column; "-reward" is descending. Unknown values always come last. */
function sorted(list, places, order) {
  const descending = order.startsWith("-");
  const name = descending ? order.slice(1) : order;
  if (!list.has(name)) return places;
  const direction = descending ? -1 : 1;
  const keys = new Map(places.map((place) => [place, list.value(name, place)]));
  const compare = (one, other) => {
    const [a, b] = [keys.get(one), keys.get(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    const difference =
      typeof a === "string" && !["inf", "-inf"].includes(a) && typeof b === "string"
        ? a.localeCompare(b, "en", { numeric: true })
        : numberOf(a) === numberOf(b)
          ? 0
          : numberOf(a) - numberOf(b);
    return direction * difference;
  };
  return [...places].sort(compare);
}

/** The metrics with a filter in the address. */
function metricsIn(given) {
  return [...given.keys()].filter(prefixOf);
}

/** Whether the address contains any filter. */
function isFiltered(given) {
  return (
    [...FACETS, ...RANGES].some(([name]) => given.has(name)) ||
    ["group", "task", "text"].some((name) => given.get(name)) ||
    metricsIn(given).length > 0
  );
}

/** The changes that remove every filter from the address. */
function noFilters() {
  const columns = [...FACETS, ...RANGES].map(([name]) => name);
  const names = [...columns, ...metricsIn(readAddress().given), "group", "task", "text"];
  return Object.fromEntries(names.map((name) => [name, null]));
}

/** Search for the text in the address, once per text; the view is updated as results arrive. */
function searchFor(list, text) {
  if (found.text === text) return;
  Object.assign(found, { text, rows: null, complete: !text, error: null });
  if (!text) return;
  const isCurrent = () => found.text === text;
  const update = (answer) => {
    if (!isCurrent()) return;
    Object.assign(found, { rows: new Set(answer.rows), complete: answer.complete, share: answer.share });
    show();
  };
  data
    .search(list, text, update, isCurrent)
    .then((answer) => update({ share: 1, ...answer }))
    .catch((error) => {
      if (!isCurrent()) return;
      Object.assign(found, { rows: new Set(), complete: false, error: error.message });
      show();
    });
}
