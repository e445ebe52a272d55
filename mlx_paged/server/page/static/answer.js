// One prompt that was sent, and its answers as they come.

import { streamCompletion } from "./completion.js";
import { make, setText } from "./dom.js";
import { Refusal } from "./refusal.js";

const ENDS = { length: "reached max tokens", stop: "ended", error: "failed", abort: "cut off" };

export class Answer {
  #stop = new AbortController();
  #request;
  #swatch = make("i", { class: "swatch" });
  #state = make("span", { class: "state" }, "sent");
  #cancel = make("button", { type: "button" }, "Cancel");
  #samples;
  #speak;
  #name = "";
  #doing = "sent";
  requestId = null;
  isOver = false;

  /** `speak(text)` says an answer that is complete to who can't see it. */
  constructor(request, speak) {
    this.#request = request;
    this.#speak = speak;
    this.#samples = Array.from({ length: request.n }, (_, index) => new SampleText(index, request.n));
    const title = make("h3", {}, request.prompt);
    const list = make("ol", { class: "texts" }, ...this.#samples.map((sample) => sample.element));
    this.element = make(
      "article",
      { class: "answer", "aria-label": `Answer to: ${request.prompt.slice(0, 80)}` },
      title,
      make("div", { class: "answer-top" }, this.#swatch, this.#state, this.#cancel),
      list,
    );
    this.#cancel.addEventListener("click", () => this.#stop.abort());
  }

  /** Runs until the answers are complete, cancelled or failed. Returns the error, if any. */
  async run(headers, whenHeard) {
    try {
      for await (const piece of streamCompletion({ ...this.#request, headers, signal: this.#stop.signal })) {
        this.requestId ??= piece.id;
        whenHeard();
        this.#take(piece);
      }
      this.#finish("done");
    } catch (error) {
      this.#fail(error);
      return error;
    } finally {
      whenHeard();
    }
  }

  /** Wear name and colour of the request in the pool. */
  wear(name, colour) {
    if (name === this.#name) return;
    this.#name = name;
    this.#swatch.className = `swatch colour-${colour}`;
    this.#say(this.#doing);
  }

  owns(requestId) {
    return this.requestId !== null && (requestId === this.requestId || requestId.startsWith(`${this.requestId}-`));
  }

  #take({ index, text, finishReason }) {
    const sample = this.#samples[index];
    if (!sample) return;
    this.#say("answering");
    sample.add(text);
    if (!finishReason) return;
    sample.finish(ENDS[finishReason] ?? finishReason);
    this.#speak(`${sample.name}: ${sample.text}`);
  }

  #say(doing) {
    this.#doing = doing;
    setText(this.#state, this.#name ? `${this.#name}, ${doing}` : doing);
  }

  #finish(doing) {
    this.isOver = true;
    this.#say(doing);
    this.#cancel.remove();
  }

  #fail(error) {
    const isOurs = error.name === "AbortError";
    this.#finish(isOurs ? "cancelled" : "failed");
    if (isOurs) return;
    const text = error instanceof Refusal ? error.message : "The connection to the server broke.";
    this.element.append(make("p", { class: "problem", role: "alert" }, text));
  }
}

class SampleText {
  #text = make("p", { class: "text", dir: "auto" });
  #end = make("p", { class: "end" });

  constructor(index, numSamples) {
    this.name = numSamples > 1 ? `Answer ${index + 1} of ${numSamples}` : "Answer";
    this.element = make("li", { "aria-label": this.name }, this.#text, this.#end);
  }

  get text() {
    return this.#text.textContent;
  }

  add(text) {
    if (text) this.#text.append(text);
  }

  finish(reason) {
    this.#text.normalize();
    setText(this.#end, reason);
  }
}
