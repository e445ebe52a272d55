// What the block pointed at holds.

import { stateOf, usersOf } from "./descriptions.js";
import { make } from "./dom.js";
import { count } from "./words.js";

const MAX_LINES = 4;

export class BlockNote {
  #element;
  #identities;
  #shown = null;

  constructor(element, identities) {
    this.#element = element;
    this.#identities = identities;
    this.show(null, null);
  }

  show(blocks, block) {
    const lines = block === null || block >= blocks.numBlocks ? [] : this.#lines(blocks, block);
    const text = JSON.stringify(lines);
    if (text === this.#shown) return;
    this.#shown = text;
    this.#element.replaceChildren(...(lines.length ? lines.map(asElement) : [hint()]));
  }

  #lines(blocks, block) {
    const users = usersOf(blocks, block, this.#identities);
    const lines = users.slice(0, MAX_LINES).map(({ table, name, tokens }) => ({
      colour: this.#identities.colour(table.request_id),
      name,
      text: tokens,
    }));
    const numMore = users.length - lines.length;
    if (numMore > 0) lines.push({ name: `and ${numMore} more`, text: "" });
    return [{ name: `Block ${count(block)}`, text: stateOf(blocks, block) }, ...lines];
  }
}

function asElement({ colour, name, text }, index) {
  const line = make("p", { class: index ? "user" : "what" }, make("strong", {}, name), ` ${text}`);
  if (colour !== undefined) line.prepend(make("i", { class: `swatch colour-${colour}` }), " ");
  return line;
}

function hint() {
  return make("p", { class: "quiet" }, "Point at a block, or move through them with the arrow keys, to see what it holds.");
}
