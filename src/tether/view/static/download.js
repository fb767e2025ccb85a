// Anything on the page as a file: a table as CSV, a chart as PNG with its name above it.

import { chartImage, resolved } from "./charts.js";
import { button, h } from "./dom.js";
import { t } from "./words.js";

const HEAD = 26; // pixels for the name, before scaling

// A name that every file system takes.
function fileName(name, suffix) {
  return `${String(name).replace(/[^\w.-]+/g, "_").slice(0, 80) || "tether"}.${suffix}`;
}

function save(name, href) {
  const link = document.createElement("a");
  link.href = href;
  link.download = name;
  link.click();
}

// A spreadsheet reads text that begins like a formula as one; a quote in front keeps it text.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  const tame = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(tame) ? `"${tame.replaceAll('"', '""')}"` : tame;
}

export function csvText(rows) {
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

// rows: a function that returns [[head, …], [cell, …], …] when the button is pressed.
export function csvButton(name, rows, attributes = {}) {
  const act = () => {
    const blob = new Blob(["\ufeff", csvText(rows())], { type: "text/csv;charset=utf-8" });
    const href = URL.createObjectURL(blob);
    save(fileName(name, "csv"), href);
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  };
  return button("CSV", act, { title: t("csv_help"), class: "quiet", ...attributes });
}

export function pngButton(name, plot) {
  return button("PNG", async () => save(fileName(name, "png"), await withName(name, plot())), {
    title: t("png_help"),
    class: "quiet",
  });
}

async function withName(name, element) {
  const scale = 2;
  const image = await loaded(await chartImage(element, scale));
  const canvas = h("canvas", { width: image.width, height: image.height + HEAD * scale });
  const pen = canvas.getContext("2d");
  pen.fillStyle = resolved("--surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = resolved("--ink");
  pen.font = `600 ${13 * scale}px system-ui, sans-serif`;
  pen.fillText(name, 10 * scale, 18 * scale);
  pen.drawImage(image, 0, HEAD * scale);
  return canvas.toDataURL("image/png");
}

function loaded(source) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = reject;
    image.src = source;
  });
}

// What a table on the page holds, its numbers in full.
export function tableCells(table) {
  return [...table.rows].map((row) =>
    [...row.cells].map((one) => {
      const full = one.classList.contains("num") && one.title !== "" ? Number(one.title) : NaN;
      return Number.isNaN(full) ? one.textContent : full;
    }),
  );
}
