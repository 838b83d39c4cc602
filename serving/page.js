// The page: sends the form to POST /generate, and shows the tokens as they arrive, with their statistics as colors of the
// text and in a heat map. Everything from the server is inserted as text, never as HTML.

import { Colors, HeatMap, LABELS, colorsOf, describeColors, placeTip, shown } from "./heatmap.js";

const $ = (id) => document.getElementById(id);
const tokens = []; // as the server sends them, with `rows` (mean, then each site's number) and `span`, their text
const map = new HeatMap($("heatmap"), $("spacer"), new Colors(), tokens, (cell) => show(cell));
let model = null;
let statistic = null; // of model.statistics: the one that is shown
let rowNames = []; // of the heat map
let tint = 0; // the row that colors the text
let running = null; // an AbortController while text is generated
const PROCESSING = "Processing the prompt…"; // the status until the first token
const SUBLAYERS = { attn: "attention", mlp: "MLP" };

function element(tag, text, properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

// --- the model ---------------------------------------------------------------------------------------------------

async function loadModel() {
  model = await (await fetch("/model")).json();
  const facts = [
    ["parameters", model.parameters.toLocaleString("en")],
    ["step", model.step?.toLocaleString("en")],
    ["weights", model.weights ?? undefined],
    ["best interim validation loss", model.best_validation_loss?.toFixed(3)],
    ["tokenizer", model.tokenizer],
    ["context", model.block_size],
  ];
  for (const [name, value] of facts.filter(([, value]) => value !== undefined)) {
    const pair = document.createElement("div");
    pair.append(element("dt", name), element("dd", value));
    $("facts").append(pair);
  }
  document.title = `${model.model} · Deep Delta Learning`;
  $("title").textContent = model.model;
  fillForm();
  if (model.statistics.length) {
    model.statistics.forEach(({ name }) => $("statistic").append(element("option", name, { value: name })));
    choose(model.statistics[0].name);
  } else {
    $("no_statistics").textContent = `${model.model} reports no statistics of its residual stream.`;
    for (const id of ["no_statistics", "map", "legend", "choice"]) $(id).hidden = id !== "no_statistics";
  }
}

// The fields start with the values of the command line.
function fillForm() {
  const { stop, ...numbers } = model.defaults;
  for (const [name, value] of Object.entries(numbers)) $("form").elements[name].value = value ?? "";
  $("form").elements.max_new_tokens.max = model.most_new_tokens;
  $("stop_strings").value = stop.map((text) => text.replaceAll("\n", "\\n")).join("\n");
}

// --- the statistic -------------------------------------------------------------------------------------------------

function choose(name) {
  show(null);
  statistic = model.statistics.find((each) => each.name === name);
  rowNames = statistic.sites.length > 1 ? ["mean", ...statistic.sites] : statistic.sites;
  tokens.forEach((token) => (token.rows = rowsOf(token)));
  map.setRows(rowNames.length);
  $("map_title").replaceChildren(`${name} `, element("span", "of each token at each sublayer", { className: "muted" }));
  setUpRows();
  color();
}

// A number for each row; null for a number that is not finite.
function rowsOf(token) {
  const values = token.statistics[statistic.name];
  const mean = values.includes(null) ? null : values.reduce((a, b) => a + b) / values.length;
  return values.length > 1 ? [mean, ...values] : values;
}

// If a statistic declares no range, the colors span the numbers so far.
function color() {
  map.colors = colorsOf(statistic, tokens.flatMap((token) => token.rows).filter((value) => value !== null));
  describeColors(map.colors, statistic.gate);
  tokens.forEach(paint);
  map.redraw();
}

function setUpRows() {
  $("sites").style.paddingTop = `${LABELS}px`;
  $("sites").replaceChildren(
    ...rowNames.map((name, row) => {
      const button = element("button", name, { type: "button", title: `color the text by ${rowTitle(row)}` });
      button.setAttribute("role", "radio");
      button.style.height = `${map.height}px`;
      button.addEventListener("click", () => setTint(row));
      return button;
    }),
  );
  // a single site: the mean over all of them is pale
  setTint(rowNames.length - 1);
}

function place(row) {
  if (rowNames[row] === "mean") return "mean of all sublayers";
  const [block, site, again] = rowNames[row].split(" ");
  return `${SUBLAYERS[site] ?? site} of block ${block}${again ? ` ${again}` : ""}`;
}

function rowTitle(row) {
  return `${statistic.name}, ${place(row)}`;
}

function setTint(row) {
  tint = row;
  [...$("sites").children].forEach((button, i) => button.setAttribute("aria-checked", String(i === row)));
  $("tint_name").textContent = `colored by ${rowTitle(row)}`;
  tokens.forEach(paint);
}

// --- tokens --------------------------------------------------------------------------------------------------------

function paint(token) {
  const value = token.rows[tint] ?? null;
  token.span.style.backgroundColor = value === null ? "" : map.colors.of(value, 0.6);
}

function addToken(token) {
  token.rows = statistic ? rowsOf(token) : [];
  token.span = element("span", token.text);
  token.span.classList.toggle("prompt_token", token.prompt);
  token.span.classList.toggle("special", token.id === model.end_of_text);
  token.span.dataset.token = tokens.length;
  tokens.push(token);
  paint(token);
  $("text").append(token.span);
}

function addTokens(added) {
  const box = $("text");
  const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  added.forEach(addToken);
  if (statistic && !statistic.gate && !statistic.range) color();
  if (atEnd) box.scrollTop = box.scrollHeight;
  map.grow();
}

function clear() {
  show(null);
  tokens.length = 0;
  $("text").replaceChildren();
  map.grow();
}

// Highlight a token in the text and the heat map, and show its number. cell is [token, row]; null highlights none.
function show(cell, corner = null) {
  document.querySelector("#text .lit")?.classList.remove("lit");
  $("tip").hidden = cell === null;
  map.light(...(cell ?? [null]));
  if (cell === null) return;
  const [token, row] = [tokens[cell[0]], cell[1]];
  token.span.classList.add("lit");
  $("tip").replaceChildren(`token ${cell[0]} `, element("code", JSON.stringify(token.label)));
  if (token.rows.length) {
    $("tip").prepend(element("b", `${statistic.name} = ${shown(token.rows[row])}`), ` ${place(row)}`, element("br", ""));
  }
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

// --- a generation --------------------------------------------------------------------------------------------------

// Return the body of the request, whose values the server checks. Throws an Error with one line.
function request() {
  const body = { prompt: $("prompt").value };
  for (const input of $("form").querySelectorAll("input")) {
    if (input.validity.badInput) throw new Error(`${input.name}: give a number`);
    body[input.name] = input.value === "" ? null : Number(input.value);
  }
  const unescaped = (line) => line.replaceAll("\\n", "\n");
  body.stop = $("stop_strings").value.split("\n").filter((line) => line).map(unescaped);
  return body;
}

async function* lines(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts.map((line) => JSON.parse(line));
  }
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
  if (!message) return;
  $("status").textContent = "";
  $("error").scrollIntoView({ block: "nearest" }); // on a phone it may be out of view
}

async function generate() {
  if (running) return;
  fail("");
  running = new AbortController();
  setRunning(true);
  try {
    const body = JSON.stringify(request());
    const headers = { "content-type": "application/json" };
    const response = await fetch("/generate", { method: "POST", headers, body, signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).message);
    await follow(response);
  } catch (error) {
    if (error.name === "AbortError") stopped();
    else fail(error instanceof TypeError ? "The server does not respond; see its terminal." : error.message);
  } finally {
    running = null;
    setRunning(false);
  }
}

async function follow(response) {
  const started = performance.now();
  let [made, seed, ended] = [0, null, false];
  for await (const event of lines(response)) {
    if (event.message) throw new Error(event.message);
    if (event.seed !== undefined) {
      clear();
      seed = event.seed;
    }
    if (event.tokens) {
      addTokens(event.tokens);
      made += event.tokens.filter((token) => !token.prompt).length;
      say(made, (performance.now() - started) / 1000, seed, "");
    }
    if (event.end) {
      ended = true;
      say(event.new_tokens, event.seconds, seed, event.end);
    }
  }
  if (!ended) throw new Error("The server closed the connection before the text was complete; see its terminal.");
}

function say(made, seconds, seed, end) {
  const speed = made ? [`${(made / seconds).toFixed(1)} tokens/s`] : [];
  $("status").textContent = [`${made} tokens`, ...speed, `seed ${seed}`, ...(end ? [end] : [])].join(" · ");
}

function stopped() {
  const status = $("status").textContent;
  $("status").textContent = status === PROCESSING ? "stopped" : `${status} · stopped`;
}

function setRunning(on) {
  $("generate").disabled = on;
  $("stop").disabled = !on;
  document.body.classList.toggle("running", on);
  if (on) $("status").textContent = PROCESSING;
}

function stop() {
  running?.abort();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  if (event.key === "Escape") stop();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  map.colors.refresh();
  tokens.forEach(paint);
  map.redraw();
});

loadModel().catch(() => fail("The server does not respond; see its terminal."));
