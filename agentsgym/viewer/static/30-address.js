// The address (the part of the URL after #) determines what is shown: view, rollout and filters. It survives a reload,
// the back button works, and it can be shared as a link.

const VIEWS = ["list", "curves", "conversation", "tokens", "group", "pair"];

/** Parse the address. An unknown view means the list; a rollout is given by its row in the store. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const view = VIEWS.includes(given.get("view")) ? given.get("view") : "list";
  return { view, row: given.has("row") ? Number(given.get("row")) : null, given };
}

/** The address with some keys changed: null removes a key, an array sets several values. */
function addressWith(changes) {
  const next = new URLSearchParams(location.hash.slice(1));
  for (const [key, value] of Object.entries(changes)) {
    next.delete(key);
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined) next.append(key, one);
  }
  if (next.get("view") === "list") next.delete("view");
  return `#${next}`;
}

/** Change the address. Another view is a step that "back" undoes; a filter or a color is not. */
function go(changes, { step = true } = {}) {
  const address = addressWith(changes);
  if (address === (location.hash || "#")) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
  show();
}

/** Store a detail in the address without changing what is shown. */
function remember(changes) {
  history.replaceState(null, "", addressWith(changes));
  settle();
}

// Keys of the address that belong to one rollout and are dropped when another rollout is opened.
const RESET_ROLLOUT = { turn: null, token: null, left: null, right: null };

/** A link within the page, with an address, so that it can also be opened in another tab. */
function link(kind, changes, options, ...children) {
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(changes);
  };
  return el(`a.${kind}`, { href: addressWith(changes), onclick, ...options }, ...children);
}
