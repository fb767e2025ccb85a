// Elements made of text. What a model, a run or a file says enters the page here and nowhere else,
// as text nodes: there is no markup to escape because none is ever parsed.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "value") {
      element.value = value;
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A place inside the page; the parts may hold anything a folder's name may hold.
export function link(...parts) {
  return "#/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

let nextId = 0;

// A control with a label of its own, in this order.
export function labelled(text, control) {
  control.id ||= `control-${nextId++}`;
  return h("span", { class: "field" }, h("label", { for: control.id }, text), control);
}

export function select(options, chosen, onChange) {
  const control = h(
    "select",
    { on: { change: () => onChange(control.value) } },
    options.map(([value, text]) => h("option", { value }, text)),
  );
  control.value = chosen;
  return control;
}

export function button(text, onClick, attributes = {}) {
  return h("button", { type: "button", on: { click: onClick }, ...attributes }, text);
}

// A table that scrolls in a frame of its own. heads: [text, class] a column.
export function scrollTable(label, frame, classes, heads, rows) {
  const cells = heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
  const head = h("thead", {}, h("tr", {}, cells));
  const table = h("table", { class: classes }, head, h("tbody", {}, rows));
  return h("div", { class: frame, tabindex: "0", role: "region", "aria-label": label }, table);
}

// Waits for a pause, so that dragging a slider asks once and not a hundred times.
export function debounce(milliseconds, act) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, milliseconds);
  };
}
