// The frame of the page: header, banner, which view is shown, and the two-second tick.

import { Gone, Refused, exported } from "./api.js";
import { diffView } from "./configdiff.js";
import { button, h, link } from "./dom.js";
import { heldoutView } from "./heldout.js";
import { heldoutPromptView, promptView } from "./history.js";
import { iterationView } from "./iteration.js";
import { listenForKeys, showHelp } from "./keys.js";
import { currentPlace } from "./place.js";
import { isDark, startPreferences, switchLanguage, switchTheme } from "./preferences.js";
import { configView, eventsView } from "./records.js";
import { rowView } from "./row.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { tableView } from "./table.js";
import { timelineView } from "./timeline.js";
import { spoken, t } from "./words.js";

const TICK_MILLISECONDS = 2000;

let shown = null; // the view on the screen
let turn = 0; // counts navigations: an answer for a view that was left is dropped
let busy = false;
let gone = false;
let problems = [];

const page = {
  problems(list) {
    problems = [...new Set(list)];
    banner();
  },
  soon: () => guarded(() => shown?.tick?.()),
  run: (act) => guarded(act),
};

function viewOf([first, id, kind, n, rowKind, row]) {
  if (first === undefined) return runsView(page);
  if (first === "table") return tableView(page);
  if (first === "diff" && kind !== undefined) return diffView(page, id, kind);
  if (first !== "run" || id === undefined) return null;
  if (kind === undefined) return runView(page, id);
  if (kind === "events") return eventsView(page, id);
  if (kind === "config") return configView(page, id);
  if (kind === "heldout") return n === undefined ? heldoutView(page, id) : heldoutPromptView(page, id, n);
  if (kind === "timeline") return timelineView(page, id, n);
  if (kind === "prompt" && n !== undefined) return promptView(page, id, n);
  if (kind === "iteration" && rowKind === "row") return rowView(page, id, n, row);
  return kind === "iteration" ? iterationView(page, id, n) : null;
}

async function show() {
  const mine = ++turn;
  shown = null;
  header();
  page.problems([]);
  await guarded(async () => {
    const view = (await viewOf(currentPlace().parts)) ?? nowhere(t("no_place"));
    if (mine !== turn) return;
    place(view);
    await view.start?.(); // charts need to know how wide they are
    if (mine === turn) shown = view;
  });
}

function place(view) {
  document.getElementById("main").replaceChildren(view.element);
}

function nowhere(sentence) {
  return { element: h("div", {}, h("p", {}, sentence), h("p", {}, h("a", { href: "#/" }, t("back")))) };
}

// A server that is gone may come back; anything else it says is for the reader.
async function guarded(act) {
  try {
    await act();
    gone = false;
  } catch (error) {
    gone = error instanceof Gone;
    if (!gone && !(error instanceof Refused)) console.error(error);
    if (!gone && !shown) place(nowhere(error.message));
    else if (!gone) problems = [error.message];
  }
  banner();
}

async function tick() {
  if (document.hidden || busy || exported()) return;
  busy = true;
  if (shown) await guarded(() => shown?.tick?.());
  else if (gone) await show();
  busy = false;
}

function banner() {
  const items = gone ? [h("p", { class: "gone" }, t("gone"))] : [];
  if (problems.length) {
    const named = problems.slice(0, 8).map((text) => h("li", { class: "model-text" }, text));
    items.push(h("p", {}, t("problems")), h("ul", {}, named));
  }
  const place = document.getElementById("banner");
  if (place.textContent !== items.map((item) => item.textContent).join("")) place.replaceChildren(...items);
}

function header() {
  const { parts } = currentPlace();
  const crumbs = [[t("runs"), "#/"]];
  if (parts[0] === "run" && parts[1] !== undefined) crumbs.push([parts[1], link("run", parts[1])]);
  const trail = crumbs.map(([text, href]) => h("a", { href, class: "model-text" }, text));
  const other = spoken() === "zh" ? "en" : "zh-Hans";
  document.title = ["tether", ...parts.slice(1)].join(" · ");
  document.getElementById("skip").textContent = t("skip");
  document.getElementById("header").replaceChildren(
    h("a", { class: "brand", href: "#/" }, "tether"),
    h("nav", { class: "crumbs", "aria-label": t("runs") }, trail),
    h(
      "div",
      { class: "switches" },
      button(t("language"), () => again(switchLanguage), { lang: other, id: "language" }),
      button(t(isDark() ? "theme_light" : "theme_dark"), () => again(switchTheme), { id: "theme" }),
      button("?", () => showHelp(keys()), { id: "keys", "aria-label": t("keys"), title: t("keys") }),
    ),
  );
}

async function again(change) {
  const focused = document.activeElement?.id;
  change();
  await show();
  document.getElementById(focused)?.focus();
}

// The view's own keys come first.
function keys() {
  const { parts } = currentPlace();
  const places = [
    ["r", t("runs"), () => (location.hash = "#/")],
    ["t", t("table_of_runs"), () => (location.hash = "#/table")],
  ];
  if (parts[0] === "run" && parts[1] !== undefined) {
    const to = (...rest) => () => (location.hash = link("run", parts[1], ...rest));
    places.push(["c", t("curves"), to()], ["w", t("look"), to("iteration", "last")]);
    places.push(["h", t("heldout_tab"), to("heldout")], ["m", t("timeline"), to("timeline")]);
    places.push(["e", t("events"), to("events")]);
  }
  const switches = [
    ["d", t("key_theme"), () => again(switchTheme)],
    ["l", t("key_language"), () => again(switchLanguage)],
  ];
  return [...(shown?.keys ?? []), ...places, ...switches];
}

function skip(event) {
  event.preventDefault(); // the hash is the address of a view
  document.getElementById("main").focus();
}

startPreferences();
document.getElementById("skip").addEventListener("click", skip);
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
document.addEventListener("visibilitychange", tick);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
listenForKeys(keys);
setInterval(tick, TICK_MILLISECONDS);
show();
