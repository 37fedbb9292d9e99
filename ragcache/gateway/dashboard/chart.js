// Lines over the last minutes, as SVG. Pointing at a place shows its values in the legend.

const HEIGHT = 190;
const EDGE = { left: 46, right: 6, top: 10, bottom: 24 };
const WINDOWS = [120, 240, 600]; // seconds; the shortest that shows all there is
const GAP = 30; // seconds without a value that a line crosses

/** 1, 2 or 5 times a power of ten, so that some four of them reach `most`. */
function niceStep(most) {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

/** Small lines on one scale in a picture of 100 by 40: means of so many slots; none of zeros. */
function sparkline(lines, looks, slots) {
  const all = lines.map((line) => means(line.filter((value) => value !== null), slots));
  const top = Math.max(1, ...all.flat());
  const points = (line) => line.map((value, i) =>
    `${(100 * i) / Math.max(1, line.length - 1)},${39 - (38 * value) / top}`).join(" ");
  return all.flatMap((line, i) => (line.some((value) => value > 0)
    ? [drawn("polyline", { class: looks[i], points: points(line) })]
    : []));
}

function means(values, size) {
  const found = [];
  for (let end = values.length; end > 0; end -= size) {
    const group = values.slice(Math.max(0, end - size), end);
    found.unshift(group.reduce((sum, value) => sum + value, 0) / group.length);
  }
  return found;
}

class Chart {
  /**
   * `series` are {name, look, area}; `format` writes a value; `ceiling` is the top of the scale,
   * left out where it follows the values; `nothing` is what an empty chart says.
   */
  constructor(host, { series, format, ceiling, nothing }) {
    Object.assign(this, { series, format, ceiling, nothing, lines: [], pointed: null });
    this.legend = element("ul", { class: "legend" });
    this.picture = drawn("svg", { role: "img" });
    host.append(this.legend, this.picture);
    new ResizeObserver(() => this.draw()).observe(this.picture);
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.point(null));
  }

  /** `lines` has, for each series, a value or null for each slot of `seconds`, oldest first. */
  show(lines, seconds) {
    Object.assign(this, { lines, seconds });
    this.draw();
  }

  draw() {
    const { lines } = this;
    this.width = this.picture.clientWidth;
    if (!lines.length || !this.width) return;
    const slots = lines[0].length;
    const first = Math.min(...lines.map((line) => {
      const found = line.findIndex((value) => value !== null);
      return found < 0 ? slots : found;
    }));
    const past = (slots - first) * this.seconds;
    this.span = WINDOWS.find((window) => past <= window) ?? WINDOWS.at(-1);
    this.scale(lines.flatMap((line) => line.slice(slots - this.span / this.seconds)));
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.picture.replaceChildren(...this.axes(), ...(first < slots ? this.curves() : [this.note()]));
    this.tell();
  }

  scale(values) {
    const most = this.ceiling ?? (Math.max(...values.map((value) => value ?? 0)) || 1);
    this.step = this.ceiling ? this.ceiling / 4 : niceStep(most);
    this.top = this.step * Math.ceil(most / this.step - 1e-9);
  }

  x(slot) {
    const ago = (this.lines[0].length - 1 - slot) * this.seconds;
    return this.width - EDGE.right - (ago / this.span) * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    return HEIGHT - EDGE.bottom - (value / this.top) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  axes() {
    const marks = [];
    for (let value = 0; value <= this.top + 1e-9; value += this.step) {
      const y = this.y(value);
      marks.push(drawn("line", { class: "grid", x1: EDGE.left, x2: this.width, y1: y, y2: y }));
      marks.push(drawn("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" },
        this.format(value)));
    }
    const parts = this.width < 420 ? 2 : this.span === 600 ? 5 : 4;
    for (let part = 0; part <= parts; part += 1) {
      const ago = (this.span * part) / parts;
      const x = this.x(this.lines[0].length - 1 - ago / this.seconds);
      const anchor = part === 0 ? "end" : part === parts ? "start" : "middle";
      const label = ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
      marks.push(drawn("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, label));
    }
    return marks;
  }

  curves() {
    return this.series.flatMap(({ look, area }, i) =>
      this.runs(this.lines[i]).flatMap((run) => this.curve(run, look, area)));
  }

  /** The stretches of a line that are to be drawn in one go, as points. */
  runs(line) {
    const start = line.length - this.span / this.seconds;
    const runs = [];
    let last = -Infinity;
    line.forEach((value, slot) => {
      if (value === null || slot < start) return;
      if ((slot - last) * this.seconds > GAP) runs.push([]);
      runs.at(-1).push([this.x(slot), this.y(value)]);
      last = slot;
    });
    return runs;
  }

  curve(points, look, area) {
    const [[left, y], [right]] = [points[0], points.at(-1)];
    if (points.length === 1) return [drawn("circle", { class: look, cx: left, cy: y, r: 2.5 })];
    const path = `M${points.map((point) => point.map((n) => n.toFixed(1)).join()).join("L")}`;
    const shapes = [drawn("path", { class: look, d: path })];
    if (area) {
      const floor = this.y(0);
      shapes.unshift(drawn("path", { class: "area", d: `${path}L${right},${floor}L${left},${floor}Z` }));
    }
    return shapes;
  }

  note() {
    const middle = { x: (this.width + EDGE.left) / 2, y: HEIGHT / 2 - 4 };
    return drawn("text", { class: "note", "text-anchor": "middle", ...middle }, this.nothing);
  }

  point(x) {
    if (x === null || !this.lines.length) this.pointed = null;
    else {
      const share = (this.width - EDGE.right - x) / (this.width - EDGE.left - EDGE.right);
      const back = Math.round((share * this.span) / this.seconds);
      this.pointed = Math.min(Math.max(back, 0), this.span / this.seconds - 1);
    }
    this.draw();
  }

  /** The values of the place that is pointed at, or the latest ones. */
  tell() {
    const slots = this.lines[0].length;
    const slot = slots - 1 - (this.pointed ?? 0);
    const values = this.lines.map((line) =>
      this.pointed === null ? line.findLast((value) => value !== null) ?? null : line[slot]);
    const items = this.series.map(({ name, look }, i) => element("li", { class: `key-${look}` },
      `${name} `, element("b", {}, values[i] === null ? "–" : this.format(values[i]))));
    if (this.pointed !== null) {
      const x = this.x(slot);
      this.picture.append(drawn("line",
        { class: "rule", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
      const at = new Date(Date.now() - 1000 * this.pointed * this.seconds);
      items.push(element("li", { class: "when" }, at.toLocaleTimeString()));
    }
    this.legend.replaceChildren(...items);
    this.picture.setAttribute("aria-label", items.map((item) => item.textContent).join(", "));
  }
}
