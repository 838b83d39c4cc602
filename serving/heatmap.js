// The heat map: a row for each site, a column for each token. The canvas is only as wide as its visible part, and is drawn
// again when that scrolls, so that a long text does not need a large canvas.

const COLUMN = 14; // pixels, as all sizes here
export const LABELS = 64; // height of the tokens' names above the columns

// Return the five colors --<name>-0 to --<name>-4 of the style sheet, [r, g, b] each.
function stops(name) {
  const style = getComputedStyle(document.documentElement);
  return [0, 1, 2, 3, 4].map((i) => {
    const hex = style.getPropertyValue(`--${name}-${i}`).trim();
    return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  });
}

export class Colors {
  // The five colors are spaced evenly from `lowest` to `highest`; by default from 0 to 2, the range of the gate beta.
  constructor(name = "gate", lowest = 0, highest = 2) {
    Object.assign(this, { name, lowest, highest });
    this.refresh();
  }

  refresh() {
    this.stops = stops(this.name);
  }

  // The color of a number, linear between the stops; alpha from 0 to 1.
  of(value, alpha = 1) {
    const share = (value - this.lowest) / (this.highest - this.lowest || 1);
    const place = Math.min(Math.max(share, 0), 1) * 4;
    const low = Math.min(Math.floor(place), 3);
    const rgb = this.stops[low].map((x, i) => Math.round(x + (place - low) * (this.stops[low + 1][i] - x)));
    return `rgb(${rgb.join(" ")} / ${alpha})`;
  }
}

// Return the colors of a statistic. The gate's show its regimes, from 0 to 2. If numbers can be negative, 0 has the neutral
// color in the middle; otherwise the colors go from the smallest number to the largest. range is the declared one, or null.
export function colorsOf({ gate, range }, values) {
  if (gate) return new Colors();
  const [low, high] = range ?? values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  if (low > high) return new Colors("ramp", 0, 1);
  const size = Math.max(Math.abs(low), Math.abs(high));
  return low < 0 ? new Colors("gate", -size, size) : new Colors("ramp", low, high);
}

// Format a number with four digits.
export function shown(value) {
  return value === null ? "none" : Number(value.toPrecision(4)).toString();
}

// Fill the legend: #lowest, #middle, #highest and the stripe #scale.
export function describeColors(colors, gate) {
  const text = (id, value) => (document.getElementById(id).textContent = value);
  text("lowest", gate ? "0 keeps the state" : shown(colors.lowest));
  text("highest", gate ? "2 reflects it" : shown(colors.highest));
  text("middle", gate ? "1 replaces its component along k" : colors.name === "gate" ? "0" : "");
  const stops = [0, 1, 2, 3, 4].map((i) => `var(--${colors.name}-${i})`);
  document.getElementById("scale").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
}

export class HeatMap {
  // tokens: the page's list, each with `label` and `rows` (a number or null for each row); shown: called with the cell under
  // the pointer, [token, row] or null.
  constructor(canvas, spacer, colors, tokens, shown) {
    Object.assign(this, { canvas, spacer, colors, tokens, shown });
    this.scroller = canvas.parentElement;
    this.rows = 0;
    this.lit = null; // [token, row]
    this.waiting = false;
    this.scroller.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(this.scroller);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.shown(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.shown(null));
  }

  setRows(rows) {
    this.rows = rows;
    this.height = rows > 17 ? 13 : 20;
    this.canvas.style.height = `${LABELS + rows * this.height}px`;
    this.redraw();
  }

  // Make the scrolled area as wide as all tokens.
  fit() {
    this.spacer.style.width = `${this.tokens.length * COLUMN}px`;
    this.redraw();
  }

  // Follow the newest token, unless the reader has scrolled back.
  grow() {
    const { scrollLeft, clientWidth, scrollWidth } = this.scroller;
    const atEnd = scrollLeft + clientWidth > scrollWidth - 3 * COLUMN;
    this.fit();
    if (atEnd) this.scroller.scrollLeft = this.scroller.scrollWidth;
  }

  light(token, row) {
    this.lit = token === null ? null : [token, row];
    this.redraw();
  }

  reveal(token) {
    const left = token * COLUMN;
    const { scrollLeft, clientWidth } = this.scroller;
    if (left < scrollLeft || left + COLUMN > scrollLeft + clientWidth) {
      this.scroller.scrollLeft = left - clientWidth / 2;
    }
  }

  // Return the lower right corner of a cell on the screen.
  corner(token, row) {
    const box = this.canvas.getBoundingClientRect();
    return [box.left + (token + 1) * COLUMN - this.scroller.scrollLeft, box.top + LABELS + (row + 1) * this.height];
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const [width, height] = [this.scroller.clientWidth, LABELS + this.rows * this.height];
    const scale = window.devicePixelRatio;
    if (!width || !this.rows) return;
    this.canvas.style.width = `${width}px`;
    [this.canvas.width, this.canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.scale(scale, scale);
    context.translate(-this.scroller.scrollLeft, 0);
    context.font = `10.5px ${style.getPropertyValue("--mono")}`;
    context.textBaseline = "middle";
    const first = Math.floor(this.scroller.scrollLeft / COLUMN);
    const last = Math.min(first + Math.ceil(width / COLUMN) + 1, this.tokens.length);
    for (let i = first; i < last; i++) this.drawColumn(context, style, i);
    if (this.lit) this.drawLit(context, style);
  }

  drawColumn(context, style, i) {
    const token = this.tokens[i];
    token.rows.forEach((value, row) => {
      if (value === null) return;
      context.fillStyle = this.colors.of(value);
      const gap = row === 0 ? 3 : 1; // the mean stands a little apart
      context.fillRect(i * COLUMN, LABELS + row * this.height, COLUMN - 1, this.height - gap);
    });
    const lit = this.lit && this.lit[0] === i;
    context.save();
    context.translate(i * COLUMN + COLUMN / 2 - 1, LABELS - 5);
    context.rotate(-Math.PI / 2);
    context.fillStyle = style.getPropertyValue(lit || token.prompt ? "--ink" : "--muted");
    context.fillText(shortened(token.label), 0, 0);
    context.restore();
  }

  drawLit(context, style) {
    const [token, row] = this.lit;
    context.strokeStyle = style.getPropertyValue("--ink");
    context.lineWidth = 1;
    context.strokeRect(token * COLUMN - 0.5, LABELS - 0.5, COLUMN, this.rows * this.height);
    context.lineWidth = 2;
    context.strokeRect(token * COLUMN, LABELS + row * this.height, COLUMN - 1, this.height - 1);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const token = Math.floor((event.clientX - box.left + this.scroller.scrollLeft) / COLUMN);
    const row = Math.floor((event.clientY - box.top - LABELS) / this.height);
    const inside = token < this.tokens.length && row >= 0 && row < this.rows;
    this.shown(inside ? [token, row] : null);
  }

  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    const within = (x, count) => Math.min(Math.max(x, 0), count - 1);
    const [token, row] = this.lit ?? [0, 0];
    const next = this.lit ? [within(token + step[0], this.tokens.length), within(row + step[1], this.rows)] : [0, 0];
    this.reveal(next[0]);
    this.shown(next);
  }
}

// Return the name of a token above its column, at most 8 characters, with visible white space.
function shortened(label) {
  const visible = label.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return [...visible].length > 8 ? `${[...visible].slice(0, 7).join("")}…` : visible;
}

// Put the tip below a position on the screen, or above it if there is no room, within the window.
export function placeTip(tip, [left, top]) {
  const { width, height } = tip.getBoundingClientRect();
  const below = top + 8 + height < window.innerHeight;
  tip.style.left = `${Math.max(Math.min(left + 4, window.innerWidth - width - 8), 8)}px`;
  tip.style.top = `${below ? top + 8 : top - height - 30}px`;
}
