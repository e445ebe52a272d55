// One block table, as a strip of block ids in the order of the tokens.

import { make, setText } from "./dom.js";
import { count } from "./words.js";

const NUM_HEAD = 40;
const NUM_TAIL = 20;

export class Strip {
  #label = make("p", { class: "strip-label" });
  #list = make("ol", { class: "strip" });
  #index;

  constructor(index) {
    this.#index = index;
    this.element = make("div", { class: "sample" }, this.#label, this.#list);
  }

  show(table, blocks, isOneOfMany) {
    const name = isOneOfMany ? `Sample ${this.#index + 1}: ` : "";
    const tokens = `${count(table.num_tokens)} tokens, ${count(table.num_stored_tokens)} stored`;
    setText(this.#label, isOneOfMany ? `${name}${tokens}` : "");
    this.#list.setAttribute("aria-label", `Block table${isOneOfMany ? ` of sample ${this.#index + 1}` : ""}`);
    const entries = shortened(table.block_table);
    while (this.#list.childElementCount > entries.length) this.#list.lastElementChild.remove();
    entries.forEach((entry, i) => this.#showEntry(i, entry, table, blocks));
  }

  #showEntry(i, { block, position, numHidden }, table, blocks) {
    const item = this.#list.children[i] ?? this.#list.appendChild(make("li"));
    if (numHidden) {
      setText(item, `… ${count(numHidden)} more …`);
      item.className = "more";
      return;
    }
    setText(item, String(block));
    const isEmpty = position * blocks.blockSize >= table.num_stored_tokens;
    const isShared = blocks.isShared(block);
    item.className = `${isShared ? "shared" : ""} ${isEmpty ? "empty" : ""}`.trim();
    if (isShared) item.title = `shared by ${blocks.references[block]} tables`;
    else item.removeAttribute("title");
  }
}

/** The table's entries, without the middle of a long one. */
function shortened(table) {
  const entries = table.map((block, position) => ({ block, position }));
  const numHidden = table.length - NUM_HEAD - NUM_TAIL;
  if (numHidden <= 1) return entries;
  return [...entries.slice(0, NUM_HEAD), { numHidden }, ...entries.slice(-NUM_TAIL)];
}
