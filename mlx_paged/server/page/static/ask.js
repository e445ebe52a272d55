// The form that sends prompts, and the answers below it.

import { Answer } from "./answer.js";
import { find, make, setText } from "./dom.js";

const MAX_ANSWERS = 12;
const MAX_SPOKEN = 8;
const NUM_FORKS = 4;

export class Ask {
  #key;
  #whenChanged;
  #whenLit;
  #answers = [];
  model = "";

  /**
   * `whenChanged()` is called when one of our requests is named or ends, `whenLit(answer or null)`
   * when an answer is pointed at.
   */
  constructor(key, whenChanged, whenLit) {
    this.#key = key;
    this.#whenChanged = whenChanged;
    this.#whenLit = whenLit;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    find("kind").addEventListener("change", () => {
      find("system-part").hidden = find("kind").value !== "chat";
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
      if (id !== undefined) answer.wear(identities.name(id), identities.colour(id));
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
        system: find("system").value,
        prompt: find("prompt").value,
        model: this.model,
        max_tokens: Number(find("max-tokens").value),
        temperature: Number(find("temperature").value),
        n: Number(find("samples").value),
      },
      speak,
    );
    this.#answers.unshift(answer);
    this.#listen(answer);
    find("answers").prepend(answer.element);
    find("answers").scrollTop = 0;
    this.#dropOld();
    this.#run(answer);
  }

  async #run(answer) {
    const error = await answer.run(this.#key.headers, this.#whenChanged);
    if (error?.status === 401) this.#key.ask();
  }

  #listen(answer) {
    answer.element.addEventListener("pointerenter", () => this.#whenLit(answer));
    answer.element.addEventListener("pointerleave", () => this.#whenLit(null));
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

/** Say a text after those that are being said. */
function speak(text) {
  const log = find("spoken");
  log.append(make("p", {}, text));
  while (log.childElementCount > MAX_SPOKEN) log.firstElementChild.remove();
}
