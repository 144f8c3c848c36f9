"use strict";
// A small line chart on a canvas: any number of series, smoothing for noisy ones, a tip under the mouse. No dependencies.

const COLOURS = ["#2563eb", "#e4632a", "#1a9c6b", "#b03ab8", "#c99a06", "#0f98b3", "#d63b5c", "#6b7a99", "#7b5bd6", "#5f8f1f"];

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  for (const child of children) node.append(child);
  return node;
}

function shortNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value * 10) / 10);
  if (size >= 0.01) return value.toPrecision(3);
  return size === 0 ? "0" : value.toExponential(1);
}

function clock(seconds) {
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return (seconds / 60).toFixed(1) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

function smooth(points, strength) {
  // Exponential mean with the start corrected, so that the first points are not pulled to zero.
  let sum = 0, weight = 0;
  return points.map((point) => {
    sum = sum * strength + point.y; weight = weight * strength + 1;
    return { x: point.x, y: sum / weight };
  });
}

function thin(points, most) {
  if (points.length <= most) return points;
  const step = points.length / most, out = [];
  for (let i = 0; i < most; i++) {
    const part = points.slice(Math.floor(i * step), Math.floor((i + 1) * step));
    out.push({ x: part[part.length - 1].x, y: part.reduce((sum, p) => sum + p.y, 0) / part.length });
  }
  return out;
}

class LineChart {
  constructor(parent, title, options = {}) {
    this.options = options;
    this.series = [];
    this.canvas = element("canvas");
    this.legend = element("div", { class: "legend" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.box = element("div", { class: "chart" }, element("h2", { text: title }), this.canvas, this.legend, this.tip);
    this.box.dataset.title = title;
    parent.append(this.box);
    this.canvas.addEventListener("mousemove", (event) => this.showTip(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  // series: [{name, points: [{x, y}]}]; points in order of x
  update(series, byStep) {
    this.byStep = byStep;
    this.series = series.map((one, index) => {
      const points = thin(this.options.smooth ? smooth(one.points, this.options.smooth) : one.points, 600);
      return { name: one.name, points, colour: COLOURS[index % COLOURS.length] };
    });
    this.draw();
  }

  bounds() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { points } of this.series) for (const { x, y } of points) {
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    }
    if (x0 === Infinity) return null;
    if (this.options.zero) y0 = Math.min(0, y0);
    if (y0 === 0 && y1 === 0) y1 = 1;
    if (y1 - y0 < 1e-9) { y1 += Math.max(1e-6, Math.abs(y1) * 0.1); y0 -= this.options.zero ? 0 : Math.max(1e-6, Math.abs(y0) * 0.1); }
    return { x0, x1: x1 > x0 ? x1 : x0 + 1, y0, y1: y1 + (y1 - y0) * 0.06 };
  }

  draw() {
    const style = getComputedStyle(document.documentElement);
    const dim = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
    const width = this.canvas.clientWidth || 340, height = this.canvas.clientHeight || 170, ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui";
    this.legend.replaceChildren();
    const bounds = this.bounds();
    if (!bounds) { pen.fillStyle = dim; pen.fillText("nothing yet", 8, 20); return; }
    const left = 50, bottom = height - 16, right = width - 6, top = 6;
    this.place = (x, y) => [left + (x - bounds.x0) / (bounds.x1 - bounds.x0) * (right - left), bottom - (y - bounds.y0) / (bounds.y1 - bounds.y0) * (bottom - top)];
    pen.strokeStyle = line; pen.fillStyle = dim;
    for (let i = 0; i <= 3; i++) {
      const y = bounds.y0 + (bounds.y1 - bounds.y0) * i / 3, at = this.place(bounds.x0, y)[1];
      pen.beginPath(); pen.moveTo(left, at); pen.lineTo(right, at); pen.stroke();
      pen.fillText(shortNumber(y), 2, at + 3);
    }
    for (let i = 0; i <= 3; i++) {
      const x = bounds.x0 + (bounds.x1 - bounds.x0) * i / 3, label = this.byStep ? shortNumber(Math.round(x)) : clock(x);
      pen.textAlign = i === 0 ? "left" : i === 3 ? "right" : "center";
      pen.fillText(label, this.place(x, 0)[0], height - 3);
    }
    pen.textAlign = "left";
    for (const { name, points, colour } of this.series) {
      pen.strokeStyle = colour; pen.lineWidth = 1.6; pen.beginPath();
      points.forEach((point, index) => { const [x, y] = this.place(point.x, point.y); index ? pen.lineTo(x, y) : pen.moveTo(x, y); });
      pen.stroke();
      if (points.length === 1) { const [x, y] = this.place(points[0].x, points[0].y); pen.fillStyle = colour; pen.fillRect(x - 2, y - 2, 4, 4); pen.fillStyle = dim; }
      const swatch = element("i"); swatch.style.background = colour;
      const last = points.length ? points[points.length - 1].y : null;
      this.legend.append(element("span", {}, swatch, name + " " + shortNumber(last)));
    }
  }

  showTip(event) {
    if (!this.series.length || !this.place) return;
    const box = this.canvas.getBoundingClientRect(), at = event.clientX - box.left;
    const lines = [];
    for (const { name, points } of this.series) {
      let best = null, distance = Infinity;
      for (const point of points) { const d = Math.abs(this.place(point.x, point.y)[0] - at); if (d < distance) { distance = d; best = point; } }
      if (best) lines.push((this.byStep ? "step " + Math.round(best.x) : clock(best.x)) + "  " + name + ": " + shortNumber(best.y));
    }
    this.tip.textContent = lines.slice(0, 12).join("\n");
    this.tip.hidden = false;
    this.tip.style.left = Math.min(at + 12, box.width - 120) + "px";
    this.tip.style.top = "2rem";
  }
}
