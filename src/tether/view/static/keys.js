// The keyboard from end to end: single keys for what the mouse does, and "?" for their list.

import { button, h } from "./dom.js";
import { t } from "./words.js";

const TYPED_INTO = "input:not([type=range]):not([type=checkbox]), select, textarea, [contenteditable]";

// of: () => [[key, words, act]], the view's own and the page's.
export function listenForKeys(of) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.matches?.(TYPED_INTO)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const found = [...of(), ["?", t("key_help"), () => showHelp(of())]].find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}

export function showHelp(keys) {
  const lines = [...keys, ["Esc", t("key_close")], ["←→ Home End", t("token_help")]];
  const close = () => dialog.close();
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": t("keys"), on: { close: () => dialog.remove() } },
    h("h2", {}, t("keys")),
    h("dl", { class: "keys" }, lines.flatMap(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)])),
    button(t("close"), close, { autofocus: true }),
  );
  document.body.append(dialog);
  dialog.showModal();
}
