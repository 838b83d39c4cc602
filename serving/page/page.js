// The page: sends the form to POST /v1/completions, and shows the tokens as they arrive, with a statistic of the residual
// stream as the color of the text and in a heat map. Everything from the server is inserted as text, never as HTML.

const $ = (id) => document.getElementById(id);
const COLUMN = 11; // pixels of a cell of the heat map
const ROW = 14;
const LABELS = 60; // height of the tokens' labels above the cells; page.css has it as well

const tokens = []; // as the server sends them, each with the `span` of its text
let model = null;
let statistic = null; // of model.statistics: the one that is shown
let colors = null; // { lowest, highest, stops }: the range of the statistic, and the colors that divide it evenly
let isDrawing = false; // whether the next frame is drawn
let request = null; // an AbortController while text is generated

const element = (tag, text, properties = {}) => Object.assign(document.createElement(tag), { textContent: text, ...properties });
const values = (token) => token.statistics[statistic?.name] ?? [];
const shown = (value) => (value === null ? "none" : String(Number(value.toPrecision(4))));

// --- the model ---------------------------------------------------------------------------------------------------

async function loadModel() {
  model = (await (await fetch("/v1/models")).json()).data[0];
  const step = model.step === null ? "" : `step ${model.step.toLocaleString("en")} · `;
  $("facts").textContent = `${model.parameters.toLocaleString("en")} parameters · ${step}context of ${model.block_size} tokens`;
  $("title").textContent = document.title = model.id;
  const { stop, ...numbers } = model.defaults;
  for (const [name, value] of Object.entries(numbers)) $("form").elements[name].value = value ?? "";
  $("stop_strings").value = stop.map((text) => text.replaceAll("\n", "\\n")).join("\n");
  $("statistics").hidden = !model.statistics.length;
  $("statistic").replaceChildren(...model.statistics.map(({ name }) => element("option", name, { value: name })));
  if (model.statistics.length) chooseStatistic();
}

function chooseStatistic() {
  statistic = model.statistics[$("statistic").selectedIndex];
  const options = ["mean of all", ...statistic.sites];
  $("site").replaceChildren(...options.map((name, index) => element("option", name, { value: index })));
  $("sites").textContent = statistic.sites.join("\n");
  draw();
}

// --- colors ------------------------------------------------------------------------------------------------------

// The range of a statistic is the one it declares, or that of the numbers so far. A gate's colors show its regimes. The
// middle color is 0 if numbers can be negative; otherwise colors go from it to the highest.
function chooseColors() {
  const numbers = tokens.flatMap(values).filter((value) => value !== null);
  const extreme = (choose) => numbers.reduce((a, b) => choose(a, b), numbers[0] ?? null);
  let [lowest, highest] = statistic.range ?? [extreme(Math.min), extreme(Math.max)];
  let names = ["middle", "high"];
  if (statistic.gate || lowest < 0) names = ["low", "middle", "high"];
  if (!statistic.gate && lowest < 0) [lowest, highest] = [-Math.max(-lowest, highest), Math.max(-lowest, highest)];
  const style = getComputedStyle(document.documentElement);
  const stops = names.map((name) => {
    const hex = style.getPropertyValue(`--${name}`).trim();
    return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  });
  colors = { lowest, highest, stops };
  $("scale").style.background = `linear-gradient(to right, ${names.map((name) => `var(--${name})`).join(", ")})`;
  $("lowest").textContent = statistic.gate ? "0 keeps the state" : shown(lowest);
  $("highest").textContent = statistic.gate ? "2 reflects its component along k, which 1, in the middle, replaces" : shown(highest);
  $("legend").hidden = lowest === null;
}

// Return a number's color, linear between the stops.
function colorOf(value, alpha = 1) {
  const { lowest, highest, stops } = colors;
  const share = Math.min(Math.max((value - lowest) / (highest - lowest || 1), 0), 1);
  const place = share * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const rgb = stops[low].map((x, i) => Math.round(x + (place - low) * (stops[low + 1][i] - x)));
  return `rgb(${rgb.join(" ")} / ${alpha})`;
}

// Return the number that colors the text of a token; null if it is not finite.
function tint(token) {
  const numbers = values(token);
  const site = $("site").selectedIndex;
  if (site > 0) return numbers[site - 1];
  return numbers.includes(null) ? null : numbers.reduce((a, b) => a + b, 0) / numbers.length;
}

// --- drawing -----------------------------------------------------------------------------------------------------

// Draw in the next frame, however many tokens arrive until then.
function draw() {
  if (isDrawing || !statistic) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    chooseColors();
    for (const token of tokens) {
      const value = tint(token);
      token.span.style.backgroundColor = value === null ? "" : colorOf(value, 0.6);
    }
    drawMap();
  });
}

// Draw the part of the heat map that is visible.
function drawMap() {
  const canvas = $("heatmap");
  const left = $("scroller").scrollLeft;
  $("spacer").style.width = `${COLUMN * tokens.length}px`;
  canvas.width = $("scroller").clientWidth;
  canvas.height = LABELS + ROW * statistic.sites.length;
  const context = canvas.getContext("2d");
  context.font = "10px ui-monospace, monospace";
  const style = getComputedStyle(document.documentElement);
  for (let column = Math.floor(left / COLUMN); column < tokens.length; column++) {
    const x = COLUMN * column - left;
    if (x > canvas.width) break;
    values(tokens[column]).forEach((value, row) => {
      context.fillStyle = value === null ? "transparent" : colorOf(value);
      context.fillRect(x, LABELS + ROW * row, COLUMN - 1, ROW - 1);
    });
    context.save();
    context.translate(x + COLUMN - 3, LABELS - 4);
    context.rotate(-Math.PI / 2);
    context.fillStyle = style.getPropertyValue(tokens[column].prompt ? "--muted" : "--ink");
    context.fillText(shorten(tokens[column].label), 0, 0);
    context.restore();
  }
}

// Return a label of at most nine characters, with visible white space.
function shorten(label) {
  const characters = [...label.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·")];
  return characters.length > 9 ? `${characters.slice(0, 8).join("")}…` : characters.join("");
}

// Describe a token at a row, or at the chosen site, and mark it in the text.
function describe(token, row) {
  document.querySelector("#text .lit")?.classList.remove("lit");
  $("tip").textContent = "\u00a0"; // keeps the height of its line
  const site = row === undefined ? $("site").selectedOptions[0]?.textContent : statistic.sites[row];
  if (!token || site === undefined) return;
  token.span.classList.add("lit");
  const value = row === undefined ? tint(token) : values(token)[row];
  $("tip").textContent = `${statistic.name} = ${shown(value)} at ${site}, token ${tokens.indexOf(token)} ${JSON.stringify(token.label)}`;
}

// --- a generation ------------------------------------------------------------------------------------------------

// Return the body of the request, whose values the server checks.
function readForm() {
  const body = { prompt: $("prompt").value, stream: true };
  for (const { name, value } of $("form").querySelectorAll("input")) body[name] = value === "" ? null : Number(value);
  const stop = $("stop_strings").value.split("\n").filter(Boolean);
  return { ...body, stop: stop.map((line) => line.replaceAll("\\n", "\n")) };
}

// Yield the chunks of a response, whose events may arrive in parts.
async function* readChunks(response) {
  let rest = "";
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
    }
  }
}

function addTokens(added) {
  const scroller = $("scroller");
  const isAtEnd = scroller.scrollLeft + scroller.clientWidth > scroller.scrollWidth - 3 * COLUMN;
  for (const token of added) {
    token.span = element("span", token.text, { className: token.prompt ? "prompt" : "", token });
    tokens.push(token);
    $("text").append(token.span);
  }
  $("text").scrollTo(0, $("text").scrollHeight);
  $("spacer").style.width = `${COLUMN * tokens.length}px`;
  if (isAtEnd) scroller.scrollLeft = scroller.scrollWidth; // unless the reader has scrolled back
  draw();
}

async function follow(response) {
  const start = performance.now();
  let count = 0;
  let reason = null;
  for await (const chunk of readChunks(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const [choice] = chunk.choices;
    reason = choice.finish_reason;
    addTokens(chunk.tokens);
    if (reason) $("text").append(choice.text);
    count += chunk.tokens.filter((token) => !token.prompt).length;
    const speed = (1000 * count) / (performance.now() - start);
    $("status").textContent = `${count} tokens · ${speed.toFixed(1)} tokens/s · seed ${chunk.seed}${reason ? ` · ${reason}` : ""}`;
  }
  if (!reason) throw new Error("The server closed the connection before the text was complete; see its terminal.");
}

async function generate() {
  if (request) return;
  request = new AbortController();
  $("generate").disabled = true;
  $("stop").disabled = false;
  $("error").hidden = true;
  $("status").textContent = "Processing the prompt…";
  tokens.length = 0;
  $("text").replaceChildren();
  try {
    const response = await fetch("/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(readForm()),
      signal: request.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await follow(response);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    $("error").hidden = isStopped;
    $("error").textContent = error.message;
    $("status").textContent = isStopped ? `${$("status").textContent} · stopped` : "";
  }
  request = null;
  $("generate").disabled = false;
  $("stop").disabled = true;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("stop").addEventListener("click", () => request?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  if (event.key === "Escape") request?.abort();
});
$("statistic").addEventListener("change", chooseStatistic);
$("site").addEventListener("change", draw);
$("scroller").addEventListener("scroll", draw);
$("text").addEventListener("pointermove", (event) => describe(event.target.token));
$("heatmap").addEventListener("pointermove", (event) => {
  const row = Math.floor((event.offsetY - LABELS) / ROW);
  const column = Math.floor((event.offsetX + $("scroller").scrollLeft) / COLUMN);
  describe(row < 0 ? undefined : tokens[column], row);
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
loadModel();
