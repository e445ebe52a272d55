// A number and a colour for each request, for as long as it is in the pool.

export const NUM_COLOURS = 12;

export class Identities {
  #known = new Map();
  #numSeen = 0;

  /** Keep those of these requests, and give new ones what is free. */
  update(requestIds) {
    const present = new Set(requestIds);
    for (const id of this.#known.keys()) if (!present.has(id)) this.#known.delete(id);
    for (const id of present) {
      if (this.#known.has(id)) continue;
      this.#numSeen += 1;
      this.#known.set(id, { number: this.#numSeen, colour: this.#freeColour() });
    }
  }

  /** The colour that the fewest others have. */
  #freeColour() {
    const uses = new Array(NUM_COLOURS).fill(0);
    for (const { colour } of this.#known.values()) uses[colour] += 1;
    return uses.indexOf(Math.min(...uses));
  }

  colour(requestId) {
    return this.#known.get(requestId)?.colour ?? 0;
  }

  /** "Request 7" */
  name(requestId) {
    return `Request ${this.#known.get(requestId)?.number ?? "?"}`;
  }

  /** The first of the present requests that the test takes. */
  findId(test) {
    for (const id of this.#known.keys()) if (test(id)) return id;
    return undefined;
  }
}
