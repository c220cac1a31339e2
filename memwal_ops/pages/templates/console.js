// What the pages of memwal-ops do in place: filter, sort and turn pages, and refresh what is shown, without a reload.
// Every page works without this module: each link is an address, each form a request.
const REFRESH_SECONDS = 15;
const live = () => document.querySelector("[data-live]");
let asked = 0;

function busy() {
  const selected = document.getSelection();
  const at = document.activeElement;
  const asks = live()?.querySelector("details.ask[open]");
  return asks || (selected && !selected.isCollapsed) || (at && at.matches("input:not([type=hidden]), select, textarea"));
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
function refresh() {
  if (live() && !document.hidden && !busy()) show(location.href).catch(() => {});
}

setInterval(refresh, REFRESH_SECONDS * 1000);
document.addEventListener("visibilitychange", refresh);

// The amount of a chart where the pointer is; of one with the focus at a place that the arrow keys move.
function point(figure, at) {
  const points = JSON.parse(figure.dataset.points);
  const place = Math.max(0, Math.min(points.length - 1, at(points)));
  const [when, text] = points[place];
  const out = figure.querySelector("output");
  out.dataset.summary ??= out.textContent;
  out.textContent = `${text}, ${new Date(when * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  figure.dataset.at = place;
}

document.addEventListener("pointermove", (event) => {
  const figure = event.target.closest?.("figure[data-points]");
  for (const other of document.querySelectorAll("figure[data-at]")) if (other !== figure) summary(other);
  if (!figure) return;
  const box = figure.querySelector("img").getBoundingClientRect();
  const [left, width, start, end] = JSON.parse(figure.dataset.plot);
  const when = start + (((event.clientX - box.left) / box.width - left) / width) * (end - start);
  point(figure, (points) => points.findLastIndex(([time]) => time <= when));
});

function summary(figure) {
  const out = figure.querySelector("output");
  out.textContent = out.dataset.summary ?? out.textContent;
  delete figure.dataset.at;
}

document.addEventListener("focusin", (event) => event.target.matches("figure[data-points]") && point(event.target, (points) => points.length - 1));
document.addEventListener("focusout", (event) => event.target.matches("figure[data-points]") && summary(event.target));
document.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !event.target.matches("figure[data-points]")) return;
  event.preventDefault();
  point(event.target, () => Number(event.target.dataset.at) + step);
});
