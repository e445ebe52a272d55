// One request: how far it is, and the block tables of its samples.

import { make, setText } from "./dom.js";
import { Strip } from "./strip.js";
import { count, counted, percent } from "./words.js";

export class RequestRow {
  #details;
  #phase = make("span", { class: "phase" });
  #progress = make("progress", { max: "1", "aria-label": "Prefill" });
  #numbers = make("span", { class: "numbers" });
  #samples = make("div", { class: "samples" });
  #strips = new Map();
  #last = null;

  constructor(name, colour, requestId) {
    const title = make("strong", { title: requestId }, name);
    const summary = make(
      "summary",
      {},
      make("i", { class: `swatch colour-${colour}` }),
      title,
      this.#phase,
      this.#progress,
      this.#numbers,
    );
    this.#details = make("details", {}, summary, this.#samples);
    this.element = make("li", { class: `request edge-${colour}` }, this.#details);
    this.#details.addEventListener("toggle", () => this.#last && this.show(...this.#last));
  }

  set isOpen(value) {
    this.#details.open = value;
  }

  show(tables, blocks) {
    this.#last = [tables, blocks];
    const share = prefilledShare(tables);
    setText(this.#phase, phase(tables, share));
    this.#progress.classList.toggle("unseen", share === 1);
    this.#progress.value = share;
    setText(this.#numbers, numbers(tables, blocks));
    if (this.#details.open) this.#showStrips(tables, blocks);
  }

  #showStrips(tables, blocks) {
    const indexes = new Set(tables.map((table) => table.index));
    for (const [index, strip] of this.#strips) {
      if (indexes.has(index)) continue;
      strip.element.remove();
      this.#strips.delete(index);
    }
    for (const table of tables) {
      if (!this.#strips.has(table.index)) this.#addStrip(table.index);
      this.#strips.get(table.index).show(table, blocks, tables.length > 1);
    }
  }

  #addStrip(index) {
    const strip = new Strip(index);
    this.#strips.set(index, strip);
    const after = [...this.#strips.keys()].filter((other) => other > index).sort((a, b) => a - b)[0];
    this.#samples.insertBefore(strip.element, this.#strips.get(after)?.element ?? null);
  }
}

/** Share of the tokens to prefill that are stored; 1 once the request decodes. */
function prefilledShare(tables) {
  const shares = tables.map(({ num_tokens, num_prompt_tokens, num_stored_tokens }) => {
    const isDecoding = num_stored_tokens >= num_prompt_tokens && num_tokens - num_stored_tokens <= 2;
    return isDecoding ? 1 : num_stored_tokens / num_tokens;
  });
  return Math.min(...shares);
}

function phase(tables, share) {
  if (!tables.some((table) => table.is_running)) {
    return tables.some((table) => table.num_preemptions) ? "preempted" : "waiting";
  }
  return share < 1 ? `prefill ${percent(share)}` : "decode";
}

function numbers(tables, blocks) {
  const listed = new Set(tables.flatMap((table) => table.block_table));
  const numShared = [...listed].filter((block) => blocks.isShared(block)).length;
  const numPreemptions = Math.max(...tables.map((table) => table.num_preemptions));
  const [{ num_prompt_tokens, num_tokens, num_stored_tokens }] = tables;
  const parts = [counted(num_prompt_tokens, "prompt token")];
  if (tables.length > 1) parts.push(counted(tables.length, "sample"));
  else parts.push(`${counted(num_tokens, "token")} in all, ${count(num_stored_tokens)} stored`);
  parts.push(counted(listed.size, "block") + (numShared ? `, ${count(numShared)} shared` : ""));
  if (numPreemptions) parts.push(counted(numPreemptions, "preemption"));
  return parts.join(" · ");
}
