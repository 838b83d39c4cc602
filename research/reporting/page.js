"use strict";
// The curves of a report: what is drawn is in #data, what is shown is chosen in #choices.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const kinds = ["training", "validation", "difference"];
const choice = id => document.getElementById(id).value;
const color = group => dark.matches ? group.dark : group.light;
const faded = hex => "rgba(" + [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join() + ",0.18)";

function pointsOf(group, kind) {
  const curve = group.curves[kind];
  const scale = kind !== "difference" && choice("unit") === "bits" ? curve.bits : 1;
  return {
    x: curve.x[choice("x")],
    mean: curve.mean.map(value => value * scale),
    half: curve.half && curve.half.map(value => value * scale),
    runs: curve.runs,
  };
}

function tracesOf(group, kind) {
  const {x, mean, half, runs} = pointsOf(group, kind);
  const few = x.length <= 20;
  const of = ` (${runs} ${kind === "difference" ? "pair" : "run"}${runs > 1 ? "s" : ""})`;
  const said = mean.map((value, i) => value.toFixed(4) + (half ? " ± " + half[i].toFixed(4) : "") + of);
  const line = {
    x, y: mean, name: group.name, mode: few ? "lines+markers" : "lines", text: said,
    line: {color: color(group), dash: group.dash, width: 2}, marker: {symbol: group.symbol, size: 6},
    hovertemplate: `<b>${group.label}</b><br>%{text}<br>${data.axes[choice("x")]} %{x:,.4~s}<extra></extra>`,
  };
  if (!half) return [line];
  const edge = {x, mode: "lines", line: {width: 0}, hoverinfo: "skip"};
  const low = {...edge, y: mean.map((value, i) => value - half[i])};
  const high = {...edge, y: mean.map((value, i) => value + half[i]), fill: "tonexty", fillcolor: faded(color(group))};
  return [low, high, line];
}

// As in print: what falls in the first tenth of training would leave the rest no room.
function rangeOf(groups, kind) {
  const begin = 0.1 * Math.max(...groups.flatMap(group => group.curves[kind].x.steps.slice(-1)));
  const values = groups.flatMap(group => {
    const {mean, half} = pointsOf(group, kind), steps = group.curves[kind].x.steps;
    const late = i => steps[i] >= begin;
    const spread = i => half && kind === "difference" ? half[i] : 0;
    return mean.flatMap((value, i) => late(i) ? [value - spread(i), value + spread(i)] : []);
  });
  const [low, high] = [Math.min(...values), Math.max(...values)], margin = 0.05 * (high - low) || 0.1;
  return [low - margin, high + margin];
}

function layoutOf(groups, kind) {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--line"), linecolor: of("--line"), zerolinecolor: of("--soft"), automargin: true};
  const unit = choice("unit") === "bits" ? "bits per byte" : "nats per token";
  const y = kind === "difference" ? "difference" : `${kind} loss (${unit})`;
  return {
    showlegend: false, margin: {l: 10, r: 10, t: 10, b: 10}, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: of("--text"), size: 13},
    xaxis: {...axis, type: choice("scale"), title: {text: data.axes[choice("x")]}, exponentformat: "SI"},
    yaxis: {...axis, title: {text: y}, range: groups.length ? rangeOf(groups, kind) : undefined},
    hoverlabel: {bgcolor: of("--card"), bordercolor: of("--line"), font: {color: of("--text")}},
  };
}

function draw() {
  const bits = choice("unit") === "bits";
  for (const kind of kinds) {
    const shown = data.groups.filter((group, i) => document.getElementById(`group-${i}`).checked);
    const groups = shown.filter(({curves}) => curves[kind] && (kind === "difference" || !bits || curves[kind].bits));
    const plot = document.getElementById(`plot-${kind}`);
    plot.parentElement.hidden = !data.groups.some(group => group.curves[kind]);
    if (plot.parentElement.hidden) continue;
    const traces = groups.flatMap(group => tracesOf(group, kind));
    Plotly.react(plot, traces, layoutOf(groups, kind), {responsive: true, displayModeBar: false});
  }
}

function swatch(group) {
  const dashes = {solid: "", dash: "6 3", dashdot: "6 2 2 2", dot: "2 2"}[group.dash];
  return `<svg width="28" height="10" aria-hidden="true"><line x1="0" y1="5" x2="28" y2="5" stroke-width="3"
    stroke="${color(group)}" stroke-dasharray="${dashes}"/></svg>`;
}

function choices() {
  const boxes = data.groups.map((group, i) => {
    const checked = document.getElementById(`group-${i}`)?.checked ?? true;
    return `<label><input type="checkbox" id="group-${i}" ${checked ? "checked" : ""}>${swatch(group)}${group.label}</label>`;
  });
  document.getElementById("groups").innerHTML = boxes.join("");
}

// A click on a heading sorts by the number that a cell begins with, or by its text.
function sortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    headings.forEach(each => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[column].textContent.replaceAll(",", "");
    const number = row => { const value = parseFloat(key(row)); return Number.isNaN(value) ? Infinity : value; };
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [one, two] = [number(a), number(b)];
      const order = one === two ? key(a).localeCompare(key(b)) : one - two;
      return down && Number.isFinite(one) && Number.isFinite(two) ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}

document.querySelectorAll("table").forEach(sortable);
if (data.groups.length) {
  document.getElementById("interactive").hidden = false;
  document.getElementById("difference-caption").textContent = data.difference;
  const x = document.getElementById("x");
  x.innerHTML = Object.entries(data.axes).map(([key, label]) => `<option value="${key}">${label}</option>`).join("");
  x.value = data.x;
  choices();
  draw();
  document.getElementById("choices").addEventListener("change", draw);
  dark.addEventListener("change", () => { choices(); draw(); });
}
