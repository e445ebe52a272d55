// What the cells mean, with how many there are of each.

import { make, setText } from "./dom.js";
import { count } from "./words.js";

const ENTRIES = [
  ["free", "free"],
  ["cached", "cached"],
  ["used", "in use"],
  ["shared", "shared"],
];

export class Legend {
  #numbers = {};

  constructor(list) {
    for (const [key, name] of ENTRIES) {
      this.#numbers[key] = make("b", { class: "number" }, "–");
      const swatch = make("i", { class: `swatch is-${key}` });
      list.append(make("li", {}, swatch, " ", name, " ", this.#numbers[key]));
    }
  }

  show({ counts }) {
    for (const [key] of ENTRIES) setText(this.#numbers[key], count(counts[key]));
  }
}
