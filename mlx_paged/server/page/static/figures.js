// The engine in numbers, each with its last minute.

import { make, setText } from "./dom.js";
import { Rate } from "./rate.js";
import { Sparkline } from "./sparkline.js";
import { count, percent, rate } from "./words.js";

const INTERVAL_MS = 1000;

/** Name, what it is of a view's stats, how it is written, and the least top of its sparkline. */
const FIGURES = [
  ["Running", (stats) => stats.num_running, count, 1],
  ["Waiting", (stats) => stats.num_waiting, count, 1],
  ["Blocks used", (stats) => stats.num_blocks_used / stats.num_blocks, percent, 1],
  ["Slots filled", (stats) => stats.slot_share, percent, 1],
  ["Prefix hits", (stats) => hitRate(stats.prefix), percent, 1],
  ["Prompt tok/s", (_, rates) => rates.prompt.perSecond, rate, 1],
  ["Output tok/s", (_, rates) => rates.generated.perSecond, rate, 1],
  ["Preemptions", (stats) => stats.num_preemptions, count, 1],
  ["Blocks copied", (stats) => stats.counts.num_copies, count, 1],
];

function hitRate({ num_saved_tokens, num_query_tokens }) {
  return num_saved_tokens / Math.max(1, num_query_tokens);
}

export class Figures {
  #tiles;
  #rates = { prompt: new Rate(), generated: new Rate() };
  #stats = null;

  constructor(list) {
    this.#tiles = FIGURES.map(([name, valueOf, write, top]) => {
      const value = make("span", { class: "value" }, "–");
      const sparkline = new Sparkline(top);
      list.append(make("div", { class: "figure" }, make("dt", {}, name), make("dd", {}, value, sparkline.element)));
      return { valueOf, write, value, sparkline };
    });
    setInterval(() => this.#tick(), INTERVAL_MS);
  }

  show(stats) {
    this.#stats = stats;
    this.#count();
    this.#write();
  }

  /** The stream has broken: the numbers stand still. */
  stop() {
    this.#stats = null;
  }

  #count() {
    const now = performance.now();
    this.#rates.prompt.add(now, this.#stats.counts.num_prompt_tokens);
    this.#rates.generated.add(now, this.#stats.counts.num_generated_tokens);
  }

  #write() {
    for (const { valueOf, write, value } of this.#tiles) {
      setText(value, write(valueOf(this.#stats, this.#rates)));
    }
  }

  #tick() {
    if (!this.#stats || document.hidden) return;
    this.show(this.#stats);
    for (const { valueOf, sparkline } of this.#tiles) sparkline.add(valueOf(this.#stats, this.#rates));
  }
}
