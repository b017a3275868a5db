// Keeps the page current: takes the parts that have changed, says when the connection is lost, and makes another.
const SILENCE = 12_000; // milliseconds: two of the pings that come when nothing happens
const AGAIN = 2_000; // milliseconds between two tries
const MINUTE = 60, HOUR = 60 * MINUTE, DAY = 24 * HOUR; // seconds

const live = document.getElementById("live");
const node = document.getElementById("host").textContent;
const assets = document.body.dataset.assets;
let seen = document.body.dataset.seen;
const byHand = new WeakSet(); // troubles that a person has opened or closed
let source, silence, lostAt;

// --- what the server draws becomes what is shown ---

/** Make an element's content like another's, keeping what is the same: focus, what is open, what is selected. */
function liken(shown, drawn) {
  const wanted = new Set(Array.from(drawn.children, (child) => child.id).filter(Boolean));
  for (const child of [...shown.children]) {
    if (child.id && !wanted.has(child.id)) child.remove();
  }
  let next = shown.firstChild;
  for (const child of [...drawn.childNodes]) {
    const same = child.id ? shown.querySelector(`:scope > #${child.id}`) : isLike(next, child) ? next : null;
    if (!same) {
      shown.insertBefore(child, next);
      continue;
    }
    if (same === next) next = next.nextSibling;
    else shown.insertBefore(same, next);
    likenNode(same, child);
  }
  while (next) {
    const surplus = next;
    next = next.nextSibling;
    surplus.remove();
  }
}

function isLike(node, other) {
  return node && node.nodeName === other.nodeName && !node.id && !other.id;
}

function likenNode(shown, drawn) {
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.data !== drawn.data) shown.data = drawn.data;
    return;
  }
  const isOurs = (name) => name !== "open" || (shown.closest(".troubles") && !byHand.has(shown));
  for (const { name } of [...shown.attributes]) {
    if (!drawn.hasAttribute(name) && isOurs(name)) shown.removeAttribute(name);
  }
  for (const { name, value } of drawn.attributes) {
    if (shown.getAttribute(name) !== value && isOurs(name)) shown.setAttribute(name, value);
  }
  if (shown.classList.contains("tile")) return; // what is in it comes as a part of its own
  liken(shown, drawn);
}

/** A tile that stands elsewhere now is drawn empty, and has what it had. */
function furnish(tile, content) {
  if (tile && !tile.hasChildNodes()) tile.append(...content);
}

function show(parts) {
  for (const [id, html] of Object.entries(parts)) {
    const element = document.getElementById(id);
    if (!element) continue;
    const drawn = document.createElement("template");
    drawn.innerHTML = html;
    const focused = document.activeElement;
    const tiles = Array.from(element.querySelectorAll(".tile"), (tile) => [tile.id, [...tile.childNodes]]);
    liken(element, drawn.content);
    for (const [name, content] of tiles) furnish(document.getElementById(name), content);
    if (focused !== document.activeElement && focused.isConnected) focused.focus();
  }
  tellTimes();
  tellTitle();
}

// --- small things ---

function ago(seconds) {
  if (seconds < MINUTE) return `${Math.max(0, Math.floor(seconds))} s ago`;
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)} min ago`;
  if (seconds < 2 * DAY) return `${Math.floor(seconds / HOUR)} h ago`;
  return `${Math.floor(seconds / DAY)} days ago`;
}

/** Say of each time how long ago it was; leave out the date if it is today's. */
function tellTimes() {
  const now = new Date();
  for (const time of document.querySelectorAll("time")) {
    const [date, clock] = time.dateTime.replace("Z", "").split("T");
    const text = `${date === now.toISOString().slice(0, 10) ? "" : `${date} `}${clock} UTC, ${ago((now - new Date(time.dateTime)) / 1000)}`;
    if (time.textContent !== text) time.textContent = text;
  }
}

function tellTitle() {
  const word = document.querySelector("#verdict .word");
  document.title = `${lostAt ? "Disconnected · " : ""}${word ? word.textContent : ""} · Fairlead ${node}`;
}

// --- the connection ---

function heard() {
  clearTimeout(silence);
  silence = setTimeout(lost, SILENCE);
  if (lostAt || !live.classList.contains("live")) {
    lostAt = undefined;
    live.className = "live";
    live.textContent = "Live";
    tellTitle();
  }
}

function lost() {
  clearTimeout(silence);
  source.close();
  if (!lostAt) {
    lostAt = new Date();
    live.className = "lost";
    live.textContent = `Disconnected since ${lostAt.toISOString().slice(11, 19)} UTC: this is how it was then. Trying again every ${AGAIN / 1000} s.`;
    tellTitle();
  }
  silence = setTimeout(connect, AGAIN);
}

function connect() {
  source = new EventSource(`events?seen=${encodeURIComponent(seen)}`);
  silence = setTimeout(lost, SILENCE);
  source.addEventListener("error", lost);
  source.addEventListener("hello", (event) => {
    if (JSON.parse(event.data) !== assets) location.reload(); // another version of this page
    heard();
  });
  source.addEventListener("ping", heard);
  source.addEventListener("parts", (event) => {
    show(JSON.parse(event.data));
    if (event.lastEventId) seen = event.lastEventId;
    heard();
  });
}

// --- the keyboard: arrows go from device to device, Escape closes one ---

document.addEventListener("keydown", (event) => {
  const device = event.target.closest?.(".device > summary");
  if (!device || event.altKey || event.ctrlKey || event.metaKey) return;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step) {
    const every = [...document.querySelectorAll(".device > summary")];
    every[every.indexOf(device) + step]?.focus();
    event.preventDefault();
  } else if (event.key === "Escape") {
    device.parentElement.open = false;
  }
});

/** A link to a device opens it and puts the focus on it. */
function visit() {
  const device = document.getElementById(location.hash.slice(1))?.querySelector?.(":scope > .device");
  if (!device) return;
  device.open = true;
  device.firstElementChild.focus();
}
addEventListener("hashchange", visit);
document.addEventListener("click", (event) => {
  const trouble = event.target.closest?.(".troubles summary");
  if (trouble) byHand.add(trouble.parentElement);
  const link = event.target.closest?.(".which a");
  if (link && link.hash === location.hash) setTimeout(visit);
});

live.textContent = "Connecting…";
tellTimes();
tellTitle();
setInterval(tellTimes, 10_000);
connect();
visit();
