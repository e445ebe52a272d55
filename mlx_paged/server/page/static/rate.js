// How fast a count grows.

const WINDOW_MS = 3000;

export class Rate {
  #points = [];

  /** The count at a time in milliseconds. One that shrinks begins anew: the engine did. */
  add(time, total) {
    const points = this.#points;
    if (points.length && total < points.at(-1).total) points.length = 0;
    points.push({ time, total });
    while (points.length > 2 && points[1].time <= time - WINDOW_MS) points.shift();
  }

  /** Per second, over the last seconds; 0 until two times are known. */
  get perSecond() {
    if (this.#points.length < 2) return 0;
    const first = this.#points[0];
    const last = this.#points.at(-1);
    return last.time > first.time ? (1000 * (last.total - first.total)) / (last.time - first.time) : 0;
  }
}
