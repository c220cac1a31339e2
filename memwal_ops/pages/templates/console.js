// What the pages of memwal-ops do in place: filter, sort and turn pages, and refresh what is shown, without a reload.
// Every page works without this module: each link is an address, each form a request.
const REFRESH_SECONDS = 15, BUSY_SECONDS = 2;
const live = () => document.querySelector("[data-live]");
let asked = 0;

function busy() {
  const selected = document.getSelection();
  const at = document.activeElement;
  const asks = live()?.querySelector("details.ask[open]");
  const chosen = live()?.querySelector('input[name="tables"]:checked');
  return asks || chosen || (selected && !selected.isCollapsed) || at?.matches("input:not([type=hidden]), select, textarea, .story figure") || live()?.querySelector("figure[data-at]");
}

// Show what the service answers in place of the part that is shown, with focus, open details and position as they were.
async function show(address, { push = false, focus = null } = {}) {
  const number = ++asked;
  const answer = await fetch(address, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const part = fresh.querySelector("[data-live]");
  if (number !== asked) return;
  if (!part || !live()) { location.assign(address); return; }
  const open = new Set([...live().querySelectorAll("details[open] > summary")].map((one) => one.textContent));
  const kept = focus ?? document.activeElement?.id;
  const caret = document.activeElement?.selectionStart;
  live().replaceWith(document.importNode(part, true));
  for (const one of live().querySelectorAll("details > summary")) one.parentElement.open ||= open.has(one.textContent);
  document.title = fresh.title;
  if (push) history.pushState(null, "", answer.url);
  const again = kept && document.getElementById(kept);
  if (again) { again.focus({ preventScroll: true }); if (caret != null && again.setSelectionRange) again.setSelectionRange(caret, caret); }
}

const go = (address, options) => show(address, options).catch(() => location.assign(address));

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("[data-live] a[href]");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || address.pathname !== location.pathname || address.hash) return;
  event.preventDefault();
  go(address.href, { push: true });
});

function filter(form, focus) {
  const given = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  go(`${form.getAttribute("action")}?${given}`, { push: true, focus });
}

document.addEventListener("submit", (event) => {
  if (!event.target.matches("form.filter")) return;
  event.preventDefault();
  filter(event.target);
});

let typing;
document.addEventListener("input", (event) => {
  const form = event.target.closest?.("form.filter");
  if (!form) return;
  clearTimeout(typing);
  typing = setTimeout(() => form.isConnected && filter(form, event.target.id), event.target.matches("select") ? 0 : 300);
});

addEventListener("popstate", () => go(location.href));
async function refresh() {
  if (live() && !document.hidden && !busy()) await show(location.href).catch(() => {});
}

// What runs is shown as it goes.
let next;
function later() {
  clearTimeout(next);
  next = setTimeout(() => refresh().then(later), 1000 * (live()?.querySelector("[data-busy]") ? BUSY_SECONDS : REFRESH_SECONDS));
}
later();
document.addEventListener("visibilitychange", refresh);

// The amounts of all lanes at the time of the pointer; of the lane with the focus those at a place that the arrow keys move.
function point(figure, at) {
  const points = JSON.parse(figure.dataset.points);
  const place = Math.max(0, Math.min(points.length - 1, at(points)));
  const [when, text] = points[place];
  const out = figure.querySelector("output");
  out.dataset.summary ??= out.textContent;
  out.textContent = `${text}, ${new Date(when * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  figure.dataset.at = place;
  return when;
}

function mark(story, when) {
  const [start, end] = JSON.parse(story.dataset.span);
  const x = when == null ? "" : `M${(1000 * Math.min(1, Math.max(0, (when - start) / (end - start)))).toFixed(1)} 0V100`;
  for (const cursor of story.querySelectorAll(".cursor")) cursor.setAttribute("d", x);
}

function summary(figure) {
  const out = figure.querySelector("output");
  out.textContent = out.dataset.summary ?? out.textContent;
  delete figure.dataset.at;
}

document.addEventListener("pointermove", (event) => {
  const story = event.target.closest?.(".story");
  for (const other of document.querySelectorAll(".story")) {
    if (other === story || !other.querySelector("figure[data-at]")) continue;
    other.querySelectorAll("figure[data-at]").forEach(summary);
    mark(other, null);
  }
  const plot = story?.querySelector(".plot")?.getBoundingClientRect();
  if (!plot) return;
  const [start, end] = JSON.parse(story.dataset.span);
  const when = start + ((event.clientX - plot.left) / plot.width) * (end - start);
  for (const figure of story.querySelectorAll("figure")) point(figure, (points) => points.findLastIndex(([time]) => time <= when));
  mark(story, when);
});

document.addEventListener("focusin", (event) => event.target.matches(".story figure") && mark(event.target.parentElement, point(event.target, (points) => points.length - 1)));
document.addEventListener("focusout", (event) => { if (event.target.matches(".story figure")) { summary(event.target); mark(event.target.parentElement, null); } });
document.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !event.target.matches(".story figure")) return;
  event.preventDefault();
  mark(event.target.parentElement, point(event.target, () => Number(event.target.dataset.at) + step));
});

// Choose all tables that are shown.
document.addEventListener("change", (event) => {
  if (event.target.id !== "choose-all") return;
  for (const box of document.querySelectorAll('input[name="tables"]')) box.checked = event.target.checked;
});
