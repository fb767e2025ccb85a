// The one way to data: get(path). From `tether view` it is a request; in an exported folder, where
// a page may not read files, each answer is a script that puts itself into `tether_export`.

const isExport = document.body.dataset.export === "true";
globalThis.tether_export ??= {};

export class Refused extends Error {} // the server's own sentence
export class Gone extends Error {} // no server

export function exported() {
  return isExport;
}

export function get(path) {
  return isExport ? load(path.split("?")[0]) : request(path);
}

export function runPath(run, ...parts) {
  return ["/api/runs", run, ...parts].map((part, i) => (i ? encodeURIComponent(part) : part)).join("/");
}

async function request(path) {
  let response;
  try {
    response = await fetch(path, { headers: { Accept: "application/json" } });
  } catch {
    throw new Gone();
  }
  let body;
  try {
    body = await response.json();
  } catch {
    throw response.ok ? new Gone() : new Refused(`HTTP ${response.status}`);
  }
  if (!response.ok) throw new Refused(body.error ?? `HTTP ${response.status}`);
  return body;
}

// The name that the export gave the file of an answer: no slash, no percent sign.
function exportedFile(path) {
  const name = path.replace("/api/", "").replaceAll("/", "+").replaceAll("%", "=");
  return `data/${name}.js`;
}

const loading = new Map();

function load(path) {
  if (!loading.has(path)) loading.set(path, append(path));
  return loading.get(path);
}

function append(path) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = exportedFile(path);
    script.onload = () =>
      path in globalThis.tether_export
        ? resolve(globalThis.tether_export[path])
        : reject(new Refused(path));
    script.onerror = () => reject(new Refused(path));
    document.head.append(script);
  });
}
