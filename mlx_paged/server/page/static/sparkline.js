// The last minute of one number, as a line.

import { makeSvg } from "./dom.js";

const NUM_POINTS = 60;
const HEIGHT = 20;

export class Sparkline {
  #values = [];
  #line = makeSvg("polyline", { "vector-effect": "non-scaling-stroke" });
  #least;

  /** The line's top is the largest value, but at least `least`. */
  constructor(least) {
    this.#least = least;
    this.element = makeSvg(
      "svg",
      {
        class: "sparkline",
        viewBox: `0 -1 ${NUM_POINTS - 1} ${HEIGHT + 2}`,
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      },
      this.#line,
    );
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > NUM_POINTS) this.#values.shift();
    const top = Math.max(this.#least, ...this.#values);
    const start = NUM_POINTS - this.#values.length;
    const points = this.#values.map((y, i) => `${start + i},${(HEIGHT * (1 - y / top)).toFixed(1)}`);
    const text = points.join(" ");
    if (this.#line.getAttribute("points") !== text) this.#line.setAttribute("points", text);
  }
}
