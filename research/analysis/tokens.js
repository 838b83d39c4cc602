// The page of `analyze.py tokens`. It stands after heatmap.js in one module, whose Colours and HeatMap it uses.
// The text goes into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const tokens = data.tokens; // each with text and label; of the chosen statistic `rows`; and `span`, its text
const losses = data.statistics.find((each) => each.name === "loss").rows[0][1];
let statistic = null;
let rowNames = []; // of the heat map
let tint = 0; // the row that colours the text
let colours = new Colours();
const map = new HeatMap($("heatmap"), $("spacer"), colours, tokens, (cell) => show(cell));

function element(tag, text, properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

// --- the statistic ---------------------------------------------------------------------------------------------------

// A row for each site, and, of several, their mean before them.
function choose(name) {
  statistic = data.statistics.find((each) => each.name === name);
  const [sites, rows] = [statistic.rows.map(([site]) => site), statistic.rows.map(([, values]) => values)];
  const mean = (i) => rows.reduce((sum, values) => sum + values[i], 0) / rows.length;
  rowNames = sites.length > 1 ? ["mean", ...sites] : sites;
  tokens.forEach((token, i) => {
    const values = rows.map((row) => row[i]);
    token.rows = sites.length > 1 ? [mean(i), ...values] : values;
  });
  colours = coloursOf(statistic, rows.flat().filter((value) => value !== null));
  map.colours = colours;
  map.setRows(rowNames.length);
  map.fit();
  describe();
  setUpRows();
}

function describe() {
  $("map_title").replaceChildren(`${statistic.name} `, element("span", "of every token at every site", { className: "muted" }));
  if (statistic.name === "loss") $("map_title").lastChild.textContent = "of every token given those before it, in nats";
  describeColours(colours, statistic.gate);
}

function setUpRows() {
  $("sites").style.paddingTop = "64px";
  $("sites").replaceChildren(
    ...rowNames.map((name, row) => {
      const button = element("button", name, { type: "button", title: `tint the text by ${rowTitle(row)}` });
      button.setAttribute("role", "radio");
      button.style.height = `${map.height}px`;
      button.addEventListener("click", () => setTint(row));
      return button;
    }),
  );
  setTint(0);
}

function rowTitle(row) {
  return statistic.name === "loss" ? "the loss" : `${statistic.name}, ${place(row)}`;
}

function place(row) {
  if (rowNames[row] === "mean") return "mean of all sites";
  const [block, site] = rowNames[row].split(" ");
  return `the ${site} site of block ${block}`;
}

function setTint(row) {
  show(null);
  tint = row;
  [...$("sites").children].forEach((button, i) => button.setAttribute("aria-checked", String(i === row)));
  $("tint_name").textContent = `tinted by ${rowTitle(row)}`;
  tokens.forEach(paint);
}

// --- tokens ----------------------------------------------------------------------------------------------------------

function paint(token) {
  const value = token.rows[tint];
  token.span.style.backgroundColor = value === null ? "" : colours.of(value, 0.6);
}

function addToken(token, index) {
  token.prompt = true;
  token.span = element("span", token.text);
  token.span.classList.toggle("special", index === 0);
  token.span.dataset.token = index;
  $("text").append(token.span);
}

// Point out a token in text and heat map, with its numbers: cell is [token, row], or null for none.
function show(cell, corner = null) {
  document.querySelector("#text .lit")?.classList.remove("lit");
  $("tip").hidden = cell === null;
  map.light(...(cell ?? [null]));
  if (cell === null) return;
  const [index, row] = cell;
  const token = tokens[index];
  token.span.classList.add("lit");
  const value = element("b", `${statistic.name} = ${shown(token.rows[row])}`);
  const loss = statistic.name === "loss" ? [] : [` · loss ${shown(losses[index])}`];
  const which = statistic.name === "loss" ? [] : [` ${place(row)}`];
  const label = element("code", JSON.stringify(token.label));
  $("tip").replaceChildren(value, ...which, element("br", ""), `token ${index} `, label, ...loss);
  placeTip($("tip"), corner ?? map.corner(...cell));
}

$("text").addEventListener("pointermove", (event) => {
  const index = event.target.dataset.token;
  if (index === undefined) return show(null);
  map.reveal(Number(index));
  show([Number(index), tint], [event.clientX, event.clientY + 10]);
});
$("text").addEventListener("pointerleave", () => show(null));
$("statistic").addEventListener("change", () => choose($("statistic").value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours.refresh();
  tokens.forEach(paint);
  map.redraw();
});

for (const [name, value] of Object.entries(data.about)) {
  const pair = document.createElement("div");
  pair.append(element("dt", name), element("dd", value));
  $("facts").append(pair);
}
tokens.forEach(addToken);
data.statistics.forEach(({ name }) => $("statistic").append(element("option", name, { value: name })));
if (data.statistics.length === 1) {
  $("no_statistics").textContent = `The writes of ${data.about.model} name no statistics.`;
  $("no_statistics").hidden = false;
}
choose(data.statistics[0].name);
