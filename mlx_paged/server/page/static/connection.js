// The stream of the pool's lines, taken up again whenever it breaks.

import { Refusal } from "./refusal.js";
import { textLines } from "./text_lines.js";

const SILENCE_MS = 6000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;
const HIDDEN_MS = 5000;

export class Connection extends EventTarget {
  #key;
  #stop = null;
  #wake = () => {};
  #isHidden = false;

  /** Dispatches "line" (detail: a parsed line) and "state" (detail: {state, sentence}). */
  constructor(key) {
    super();
    this.#key = key;
    this.#followVisibility();
  }

  async run() {
    for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
      try {
        await this.#read(() => (wait = FIRST_WAIT_MS));
        this.#report("wait", "The server has ended the stream. Connecting again.");
      } catch (error) {
        if (error instanceof Refusal && error.status === 401) {
          await this.#askForKey();
          continue;
        }
        if (!this.#isHidden) this.#report("error", `${sentence(error)} Trying again.`);
      }
      await (this.#isHidden ? this.#sleep(2 ** 31 - 1) : this.#sleep(wait));
    }
  }

  /** Connect at once, with what has changed. */
  retry() {
    this.#stop?.abort();
    this.#wake();
  }

  async #read(whenHeard) {
    this.#stop = new AbortController();
    let timer = setTimeout(() => this.#stop.abort(), SILENCE_MS);
    try {
      const { signal } = this.#stop;
      const response = await fetch("pool", { headers: this.#key.headers, signal, cache: "no-store" });
      if (!response.ok) throw await Refusal.of(response);
      for await (const text of textLines(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => this.#stop.abort(), SILENCE_MS);
        whenHeard();
        if (text) this.#take(JSON.parse(text));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #take(line) {
    if (line.type === "NotReady") this.#report("wait", line.reason);
    else if (line.type !== "Alive") this.#report("live", "Live");
    this.dispatchEvent(new CustomEvent("line", { detail: line }));
  }

  async #askForKey() {
    this.#report("error", this.#key.isKnown ? "The server refuses this API key." : "The server asks for its API key.");
    this.#key.ask();
    await this.#sleep(2 ** 31 - 1);
  }

  #report(state, text) {
    this.dispatchEvent(new CustomEvent("state", { detail: { state, sentence: text } }));
  }

  #sleep(milliseconds) {
    return new Promise((resolve) => {
      this.#wake = resolve;
      setTimeout(resolve, milliseconds);
    });
  }

  /** Nobody watches a hidden page, and the engine need not tell it anything. */
  #followVisibility() {
    let timer = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (document.hidden) {
        timer = setTimeout(() => {
          this.#isHidden = true;
          this.#stop?.abort();
        }, HIDDEN_MS);
      } else if (this.#isHidden) {
        this.#isHidden = false;
        this.#wake();
      }
    });
  }
}

function sentence(error) {
  if (error instanceof Refusal) return error.message;
  return error.name === "AbortError" ? "The server is silent." : "The server does not answer.";
}
