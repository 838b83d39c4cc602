// The page: sends the form to POST /generate, and shows the tokens as they arrive, with a statistic of the residual stream as
// the color of the text and in a heat map. Everything from the server is inserted as text, never as HTML.

const $ = (id) => document.getElementById(id);
const [COLUMN, ROW] = [8, 14]; // pixels of a cell of the heat map
const tokens = []; // as the server sends them, with `span`, their text
let model = null;
let statistic = null; // of model.statistics: the one that is shown
let scale = [0, 2]; // the numbers with the lowest and the highest color
let stops = []; // the colors of the lowest, the middle and the highest number, [r, g, b] each
let waiting = false; // whether the next frame is drawn
let running = null; // an AbortController while text is generated

const element = (tag, text, properties = {}) => Object.assign(document.createElement(tag), { textContent: text, ...properties });
const values = (token) => (statistic && token.statistics[statistic.name]) || [];
const shown = (value) => (value === null ? "none" : String(Number(value.toPrecision(4))));

// --- the model ---------------------------------------------------------------------------------------------------

async function loadModel() {
  model = await (await fetch("/model")).json();
  const step = model.step === null ? [] : [`step ${model.step.toLocaleString("en")}`];
  const facts = [`${model.parameters.toLocaleString("en")} parameters`, ...step, `context of ${model.block_size} tokens`];
  $("facts").textContent = facts.join(" · ");
  $("title").textContent = document.title = model.model;
  const { stop, ...numbers } = model.defaults;
  for (const [name, value] of Object.entries(numbers)) $("form").elements[name].value = value ?? "";
  $("stop_strings").value = stop.map((text) => text.replaceAll("\n", "\\n")).join("\n");
  $("statistics").hidden = !model.statistics.length;
  $("statistic").replaceChildren(...model.statistics.map(({ name }) => element("option", name, { value: name })));
  if (model.statistics.length) chooseStatistic();
}

function chooseStatistic() {
  statistic = model.statistics[$("statistic").selectedIndex];
  const sites = ["mean of all", ...statistic.sites];
  $("site").replaceChildren(...sites.map((name, index) => element("option", name, { value: index })));
  color();
}

// --- colors ------------------------------------------------------------------------------------------------------

function readStops() {
  const style = getComputedStyle(document.documentElement);
  stops = ["low", "middle", "high"].map((name) => {
    const hex = style.getPropertyValue(`--${name}`).trim();
    return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  });
}

// Return a number's color, linear between the stops.
function colorOf(value, alpha = 1) {
  const place = Math.min(Math.max((value - scale[0]) / (scale[1] - scale[0] || 1), 0), 1) * 2;
  const low = place < 1 ? 0 : 1;
  const rgb = stops[low].map((x, i) => Math.round(x + (place - low) * (stops[low + 1][i] - x)));
  return `rgb(${rgb.join(" ")} / ${alpha})`;
}

// The number of a token that colors its text; null if it is not finite.
function tint(token) {
  const numbers = values(token);
  if ($("site").selectedIndex > 0) return numbers[$("site").selectedIndex - 1];
  return numbers.includes(null) ? null : numbers.reduce((a, b) => a + b, 0) / numbers.length;
}

// Color everything. Without a declared range, the colors span the numbers so far.
function color() {
  const numbers = tokens.flatMap(values).filter((value) => value !== null);
  const extreme = (choose) => (numbers.length ? numbers.reduce((a, b) => choose(a, b)) : 0);
  scale = statistic.range ?? [extreme(Math.min), extreme(Math.max)];
  $("lowest").textContent = statistic.gate ? "0 keeps the state" : shown(scale[0]);
  $("highest").textContent = statistic.gate ? "2 reflects it (1 overwrites)" : shown(scale[1]);
  draw();
}

// Draw in the next frame, however many tokens arrive until then.
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    readStops();
    const canvas = $("heatmap");
    [canvas.width, canvas.height] = [COLUMN * Math.max(tokens.length, 1), ROW * (statistic?.sites.length ?? 0)];
    tokens.forEach(drawToken);
  });
}

function drawToken(token, column) {
  const context = $("heatmap").getContext("2d");
  values(token).forEach((value, row) => {
    if (value === null) return;
    context.fillStyle = colorOf(value);
    context.fillRect(COLUMN * column, ROW * row, COLUMN - 1, ROW - 1);
  });
  const value = statistic ? tint(token) : null;
  token.span.style.backgroundColor = value === null ? "" : colorOf(value, 0.6);
}

// Describe a cell, and mark its token in the text; null describes none.
function describe(token, row) {
  document.querySelector("#text .lit")?.classList.remove("lit");
  $("tip").textContent = "\u00a0"; // keeps the height of its line
  if (!token || !statistic) return;
  token.span.classList.add("lit");
  const value = row === undefined ? tint(token) : values(token)[row];
  const place = row === undefined ? $("site").selectedOptions[0].textContent : statistic.sites[row];
  $("tip").textContent = `${statistic.name} = ${shown(value)} at ${place}, token ${tokens.indexOf(token)} ${JSON.stringify(token.label)}`;
}

// --- a generation ------------------------------------------------------------------------------------------------

// Return the body of the request, whose values the server checks.
function request() {
  const body = { prompt: $("prompt").value };
  for (const { name, value } of $("form").querySelectorAll("input")) body[name] = value === "" ? null : Number(value);
  body.stop = $("stop_strings").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
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

function addTokens(added) {
  for (const token of added) {
    token.span = element("span", token.text, { className: token.prompt ? "prompt" : "" });
    token.span.token = token;
    tokens.push(token);
    $("text").append(token.span);
  }
  if (statistic) color();
  for (const box of [$("text"), $("scroller")]) box.scrollTo(box.scrollWidth, box.scrollHeight);
}

async function follow(response) {
  const started = performance.now();
  let [made, seed, ended] = [0, null, false];
  for await (const event of lines(response)) {
    if (event.message) throw new Error(event.message);
    seed ??= event.seed;
    if (event.tokens) addTokens(event.tokens);
    if (event.end) $("text").append(event.text);
    ended ||= event.end;
    made += event.tokens?.filter((token) => !token.prompt).length ?? 0;
    const speed = (made / (performance.now() - started)) * 1000;
    $("status").textContent = [`${made} tokens`, `${speed.toFixed(1)} tokens/s`, `seed ${seed}`, event.end].filter(Boolean).join(" · ");
  }
  if (!ended) throw new Error("The server closed the connection before the text was complete; see its terminal.");
}

async function generate() {
  if (running) return;
  running = new AbortController();
  [$("generate").disabled, $("stop").disabled, $("error").hidden] = [true, false, true];
  $("status").textContent = "Processing the prompt…";
  tokens.length = 0;
  $("text").replaceChildren();
  try {
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(request()), signal: running.signal };
    const response = await fetch("/generate", options);
    if (!response.ok) throw new Error((await response.json()).message);
    await follow(response);
  } catch (error) {
    if (error.name === "AbortError") $("status").textContent += " · stopped";
    else [$("error").textContent, $("error").hidden, $("status").textContent] = [error.message, false, ""];
  }
  [running, $("generate").disabled, $("stop").disabled] = [null, false, true];
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  if (event.key === "Escape") running?.abort();
});
$("statistic").addEventListener("change", chooseStatistic);
$("site").addEventListener("change", draw);
$("text").addEventListener("pointermove", (event) => describe(event.target.token));
$("heatmap").addEventListener("pointermove", (event) => {
  describe(tokens[Math.floor(event.offsetX / COLUMN)], Math.floor(event.offsetY / ROW));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
loadModel();
