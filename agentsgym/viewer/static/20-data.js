// The data, from the server or from the document itself. Both return the same responses to the same requests.

const SERVED = document.body.dataset.mode === "served";

/** A cache of the most recently used responses; failed requests are retried. */
class Cache {
  constructor(most) {
    this.most = most;
    this.answers = new Map();
  }

  get(key, request) {
    let answer = this.answers.get(key);
    if (answer) this.answers.delete(key);
    else {
      answer = request();
      answer.catch(() => this.answers.delete(key));
    }
    this.answers.set(key, answer);
    if (this.answers.size > this.most) this.answers.delete(this.answers.keys().next().value);
    return answer;
  }
}

const caches = {
  rollouts: new Cache(64),
  groups: new Cache(32),
  chunks: new Cache(4),
  once: new Cache(4),
};

/** Request data from the server. Any failure is an Error with a readable message. */
async function requested(what, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  let response;
  try {
    response = await fetch(`data/${what}${query ? `?${query}` : ""}`);
  } catch {
    throw new Error("The server does not respond. Start `agentsgym view` again if it has stopped, then retry.");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`The server's response to ${what} cannot be parsed (status ${response.status}).`);
  }
  if (!response.ok) throw new Error(answer?.error ?? `The server rejected ${what} (status ${response.status}).`);
  return answer;
}

/** Decompress a part of a written page. */
async function inflated(id) {
  const node = document.getElementById(id);
  if (!node)
    throw new Error(`Part ${id} of this page is missing: the file is truncated or was changed after it was written.`);
  try {
    const bytes = Uint8Array.from(atob(node.textContent.trim()), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return await new Response(stream).json();
  } catch {
    throw new Error(
      `Part ${id} of this page cannot be decompressed: the file is damaged, or this browser was released before 2023.`,
    );
  }
}

function chunk(number) {
  return caches.chunks.get(number, () => inflated(`chunk-${number}`));
}

const METRICS = ["rewards/", "info/"]; // prefixes of the columns with named rewards and numbers of environments

/** The prefix of a metric's column; undefined for another column. */
const prefixOf = (name) => METRICS.find((prefix) => name.startsWith(prefix));

/** The heading of a metric's column. */
const metricHeading = (name) => (name.startsWith("info/") ? name.slice("info/".length) : name.replace("rewards/", "reward: "));

/** The list of rollouts by column. */
class List {
  constructor(answer) {
    this.answer = answer;
    this.columns = answer.columns;
    this.size = answer.columns.row.length;
    this.places = new Map(answer.columns.row.map((row, place) => [row, place]));
    this.metrics = Object.keys(answer.columns).filter(prefixOf);
  }

  has(name) {
    return Array.isArray(this.columns[name]);
  }

  /** The value of a rollout in a column: text for a text column, numbers unchanged, null if unknown. */
  value(name, place) {
    const value = this.columns[name]?.[place] ?? null;
    const words = this.answer.words?.[name];
    return words && value !== null ? words[value] : value;
  }

  number(name, place) {
    return numberOf(this.columns[name]?.[place]);
  }

  /** The rollouts of the same group (or task) as the given one, in the order of the list. */
  related(name, place) {
    const key = this.columns[name][place];
    const found = [];
    for (let other = 0; other < this.size; other++) if (this.columns[name][other] === key) found.push(other);
    return found;
  }
}

const data = {
  /** The list: one value per rollout in each column. */
  async list() {
    if (SERVED) return new List(await requested("list"));
    const node = document.getElementById("list");
    if (!node) throw new Error("This page has no list of rollouts: the file is truncated.");
    return new List(JSON.parse(node.textContent));
  },

  rollout(list, row) {
    return caches.rollouts.get(row, async () => {
      if (SERVED) return requested("rollout", { row });
      const found = (await chunk(list.value("chunk", list.places.get(row)))).rollouts[row];
      if (!found) throw new Error(`This page does not include rollout ${row}.`);
      return found;
    });
  },

  /** The group of a rollout. */
  group(list, row) {
    const place = list.places.get(row);
    const key = list.value("group", place);
    return caches.groups.get(key, async () => {
      if (SERVED) return requested("group", { key });
      const found = (await chunk(list.value("chunk", place))).groups[key];
      if (!found) throw new Error("This page does not include the group of this rollout.");
      return found;
    });
  },

  /** The rewards and means of every turn of every rollout, which are requested only once. */
  turns() {
    return caches.once.get("turns", async () => {
      const turns = SERVED ? await requested("turns") : await inflated("chunk-turns");
      turns.places = new Map(turns.row.map((row, place) => [row, place]));
      return turns;
    });
  },

  /** Find rollouts by their text; the search of a written page proceeds part by part and reports its progress. */
  async search(list, text, onProgress, isCurrent) {
    if (SERVED) return requested("search", { text });
    const numbers = [...new Set(list.columns.chunk)];
    const wanted = text.toLowerCase();
    const rows = [];
    for (const [index, number] of numbers.entries()) {
      const { rollouts } = await (caches.chunks.answers.get(number) ?? inflated(`chunk-${number}`));
      for (const [row, rollout] of Object.entries(rollouts)) if (mentions(rollout, wanted)) rows.push(Number(row));
      if (!isCurrent()) break;
      onProgress({ rows, complete: false, share: (index + 1) / numbers.length });
    }
    return { rows, complete: true };
  },
};

function mentions(rollout, wanted) {
  return rollout.messages.some((message) =>
    [message.content, message.reasoning, ...(message.calls ?? []).flatMap((call) => [call.name, call.arguments])].some(
      (text) => text && String(text).toLowerCase().includes(wanted),
    ),
  );
}
