// Small line charts.

import { svg } from "./dom.js";

const WIDTH = 280;
const HEIGHT = 44;
const SHORTEST = 15; // seconds

/** Up to two lines over at most the last `seconds`; values of null interrupt a line. */
export class Sparkline {
  constructor(label, seconds, series) {
    this.seconds = seconds;
    this.series = series; // names of a point's values
    this.lines = series.map((_, i) => svg("path", { class: `line line-${i}` }));
    this.area = svg("path", { class: "area" });
    this.element = svg(
      "svg",
      {
        class: "sparkline",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      svg("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      this.area,
      ...this.lines,
    );
  }

  /** Draw points of { time, ... } up to `now`; `top` is the least upper end of the axis. */
  draw(points, now, top = 0) {
    const values = points.flatMap((point) => this.series.map((name) => point[name] ?? 0));
    const most = Math.max(top, ...values) || 1;
    // The first seconds take the whole width, too.
    const seconds = Math.min(Math.max(now - (points[0]?.time ?? now), SHORTEST), this.seconds);
    const x = (time) => (WIDTH * (1 - (now - time) / seconds)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 5) * (value / most)).toFixed(1);
    this.series.forEach((name, i) => {
      const known = points.filter((point) => point[name] !== null);
      const path = known.map((point) => `${x(point.time)},${y(point[name])}`).join("L");
      this.lines[i].setAttribute("d", path ? `M${path}` : "");
      if (i === 0) {
        const [first, last] = [known[0], known.at(-1)];
        const closed = path && `M${x(first.time)},${HEIGHT}L${path}L${x(last.time)},${HEIGHT}Z`;
        this.area.setAttribute("d", closed || "");
      }
    });
  }
}
