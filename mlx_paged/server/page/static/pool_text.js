// The pool as a sentence and a table.

import { poolSentence, requestsOf, stateOf } from "./descriptions.js";
import { make, setText } from "./dom.js";
import { range } from "./words.js";

const MAX_ROWS = 200;
const INTERVAL_MS = 1000;

export class PoolText {
  #details;
  #sentence;
  #rows;
  #identities;
  #blocks = null;
  #shown = "";
  #timer = 0;

  constructor(details, sentence, rows, identities) {
    this.#details = details;
    this.#sentence = sentence;
    this.#rows = rows;
    this.#identities = identities;
    details.addEventListener("toggle", () => this.#write());
  }

  /** Once a second at most, which a reader can follow. */
  show(blocks) {
    this.#blocks = blocks;
    if (this.#timer) return;
    this.#write();
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#write();
    }, INTERVAL_MS);
  }

  #write() {
    if (!this.#blocks) return;
    setText(this.#sentence, poolSentence(this.#blocks));
    if (!this.#details.open) return;
    const rows = [...this.#cells()];
    const text = JSON.stringify(rows);
    if (text === this.#shown) return;
    this.#shown = text;
    this.#rows.replaceChildren(...rows.map(asRow));
  }

  *#cells() {
    let numRows = 0;
    for (const { start, end } of this.#blocks.runs()) {
      if (numRows === MAX_ROWS) {
        yield [`${range(start, this.#blocks.numBlocks - 1)}`, "not listed", ""];
        return;
      }
      numRows += 1;
      const requests = requestsOf(this.#blocks, start, this.#identities);
      yield [range(start, end), stateOf(this.#blocks, start), requests];
    }
  }
}

function asRow([blocks, state, requests]) {
  return make("tr", {}, make("th", { scope: "row" }, blocks), make("td", {}, state), make("td", {}, requests));
}
