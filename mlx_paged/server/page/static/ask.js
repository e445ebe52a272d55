// The form that sends prompts, and the answers below it.

import { Answer } from "./answer.js";
import { find, setText } from "./dom.js";

const MAX_ANSWERS = 12;
const NUM_FORKS = 4;

export class Ask {
  #key;
  #whenChanged;
  #answers = [];
  model = "";

  /** `whenChanged` is called when one of our requests begins, is named, or ends. */
  constructor(key, whenChanged) {
    this.#key = key;
    this.#whenChanged = whenChanged;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    find("fork").addEventListener("click", () => {
      find("samples").value = NUM_FORKS;
      this.#send();
    });
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#send();
    });
  }

  /** Whether a request in the pool was sent from here. */
  owns(requestId) {
    return this.#answers.some((answer) => !answer.isOver && answer.owns(requestId));
  }

  /** Give answers the colours of their requests. */
  colour(identities) {
    for (const answer of this.#answers) {
      if (answer.isOver) continue;
      const id = identities.findId((known) => answer.owns(known));
      if (id !== undefined) answer.wear(identities.colour(id));
    }
  }

  #send() {
    const problem = this.#problem();
    setText(find("ask-problem"), problem?.sentence ?? "");
    if (problem) {
      problem.field.focus();
      return;
    }
    const answer = new Answer(
      {
        kind: find("kind").value,
        prompt: find("prompt").value,
        model: this.model,
        max_tokens: Number(find("max-tokens").value),
        temperature: Number(find("temperature").value),
        n: Number(find("samples").value),
      },
      (text) => setText(find("spoken"), text),
    );
    this.#answers.unshift(answer);
    find("answers").prepend(answer.element);
    this.#dropOld();
    answer.run(this.#key.headers, this.#whenChanged);
  }

  #problem() {
    if (!find("prompt").value.trim()) return { field: find("prompt"), sentence: "Write a prompt first." };
    for (const id of ["max-tokens", "temperature", "samples"]) {
      const field = find(id);
      if (field.checkValidity()) continue;
      const name = field.labels[0].textContent.trim();
      return { field, sentence: `${name} must be from ${field.min} to ${field.max}.` };
    }
    return null;
  }

  #dropOld() {
    for (const answer of this.#answers.slice(MAX_ANSWERS)) {
      if (!answer.isOver) continue;
      answer.element.remove();
      this.#answers.splice(this.#answers.indexOf(answer), 1);
    }
  }
}
