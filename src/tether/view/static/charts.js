// Plotly draws numbers and nothing else: it reads markup in names, labels and hover text, so no
// word of a run or a model is ever handed to it. Legends and titles are the page's own elements.

let plotly = null;

// Plotly takes a second to wake up, in which nothing else runs: call this once the first questions
// to the server are on their way. index.html has it fetched before.
export function wakeCharts() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "plotly.min.js";
    script.onload = () => resolve(globalThis.Plotly);
    script.onerror = () => reject(new Error("plotly.min.js is missing"));
    document.head.append(script);
  });
  return plotly;
}

// Okabe and Ito's colours, which most colour-blind eyes can tell apart; dashes help the rest.
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

export function lineStyle(index) {
  return {
    variable: COLOURS[index % COLOURS.length],
    dash: DASHES[Math.floor(index / COLOURS.length) % DASHES.length],
  };
}

// Plotly wants a colour, the style sheet holds a variable that follows the theme.
export function resolved(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function layout(extra) {
  const [ink, grid] = [resolved("--muted"), resolved("--line")];
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
  return {
    margin: { l: 8, r: 10, t: 8, b: 8 },
    height: 190,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: ink },
    showlegend: false,
    hovermode: "x",
    dragmode: "zoom",
    uirevision: "kept", // a zoom outlives the next drawing
    bargap: 0.04,
    ...extra,
    xaxis: { ...axis, type: "linear", tickformat: "d", rangemode: "tozero", ...extra.xaxis },
    yaxis: { ...axis, type: "linear", nticks: 5, ...extra.yaxis },
  };
}

const CONFIG = { displayModeBar: false, responsive: false };

// A chart follows the width of its card, which changes without the window's.
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.isConnected && target.layout && target.clientWidth) globalThis.Plotly.Plots.resize(target);
  }
});

// A damaged file may hold text where a number belongs; a chart never gets to see it.
function numbers(list) {
  return list.map((value) => (typeof value === "number" ? value : null));
}

// A trace of numbers in one of the style sheet's colours.
export function line(x, y, { variable, dash = "solid" }) {
  return {
    x: numbers(x),
    y: numbers(y),
    type: "scatter",
    mode: x.length > 60 ? "lines" : "lines+markers",
    line: { color: resolved(variable), width: 1.75, dash },
    marker: { size: 4 },
    hovertemplate: "%{x}: %{y:.5g}<extra></extra>",
  };
}

// The same line in the background: what a smoothed one was made from.
export function pale(trace) {
  return { ...trace, mode: "lines", opacity: 0.28, hoverinfo: "skip", hovertemplate: undefined };
}

// From the lowest to the highest of several seeds.
export function band(x, low, high, { variable }) {
  const colour = resolved(variable).replace("rgb(", "rgba(").replace(")", ", 0.18)");
  const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", x: numbers(x) };
  return [
    { ...edge, y: numbers(low) },
    { ...edge, y: numbers(high), fill: "tonexty", fillcolor: colour },
  ];
}

// A histogram whose bins were counted already.
export function bars(edges, counts, { variable }, opacity = 0.85) {
  const middle = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
  return {
    x: numbers(middle),
    y: numbers(counts),
    width: counts.map((_, i) => edges[i + 1] - edges[i]),
    type: "bar",
    opacity,
    marker: { color: resolved(variable) },
    hovertemplate: "%{x:.4g}: %{y}<extra></extra>",
  };
}

// Numbers over rows and tokens, with the colours of the chips.
export function heat(cells, centre, reach) {
  return {
    z: cells.map(numbers),
    type: "heatmap",
    zmin: centre - (reach || 1),
    zmax: centre + (reach || 1),
    colorscale: [
      [0, resolved("--below")],
      [0.5, resolved("--surface")],
      [1, resolved("--above")],
    ],
    showscale: false,
    xgap: cells[0]?.length < 80 ? 1 : 0,
    ygap: cells.length < 60 ? 1 : 0,
    hovertemplate: "%{z:.5g}<extra></extra>",
  };
}

// Points with their intervals.
export function points(x, mean, low, high, { variable }, symbol) {
  return {
    x: numbers(x),
    y: numbers(mean),
    type: "scatter",
    mode: "markers",
    marker: { size: 8, symbol, color: resolved(variable), line: { width: 1, color: resolved("--surface") } },
    error_y: {
      type: "data",
      symmetric: false,
      array: mean.map((m, i) => difference(high[i], m)),
      arrayminus: mean.map((m, i) => difference(m, low[i])),
      thickness: 1,
      width: 3,
      color: resolved(variable),
    },
    hovertemplate: "%{x}: %{y:.5g}<extra></extra>",
  };
}

function difference(a, b) {
  return typeof a === "number" && typeof b === "number" ? Math.max(0, a - b) : 0;
}

// Draws, or draws again in place; resolves when the lines are on the screen.
export async function draw(element, traces, extra = {}) {
  const Plotly = await wakeCharts();
  if (!element.isConnected) return;
  await Plotly.react(element, traces, layout(extra), CONFIG);
  widths.observe(element);
}

export async function zoomTo(element, range) {
  const Plotly = await wakeCharts();
  if (!element.isConnected || !element.layout) return;
  const change = range ? { "xaxis.range": [...range] } : { "xaxis.autorange": true, "yaxis.autorange": true };
  await Plotly.relayout(element, change);
}

// The chart as the address of a picture.
export async function chartImage(element, scale) {
  const Plotly = await wakeCharts();
  const size = { width: element.clientWidth, height: element.clientHeight };
  return Plotly.toImage(element, { format: "png", scale, ...size });
}

// A dotted line at x, where the reader looks.
export async function markAt(element, x) {
  const Plotly = await wakeCharts();
  if (!element.isConnected || !element.layout) return;
  const stroke = { width: 1, dash: "dot", color: resolved("--muted") };
  await Plotly.relayout(element, {
    shapes: [{ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: stroke }],
  });
}

export async function forget(element) {
  widths.unobserve(element);
  (await wakeCharts()).purge(element);
}
