// Why the server refused a request, as a sentence.

import { asSentence } from "./words.js";

export class Refusal extends Error {
  constructor(status, message) {
    super(asSentence(message));
    this.status = status;
  }

  static async of(response) {
    const detail = (await response.json().catch(() => null)) ?? {};
    const said = detail.error?.message ?? detail.detail;
    const message = typeof said === "string" ? said : `The server answered with status ${response.status}.`;
    const seconds = Number(response.headers.get("Retry-After"));
    const advice = response.status === 503 && seconds > 0 ? ` Try again in ${seconds} s.` : "";
    return new Refusal(response.status, asSentence(message) + advice);
  }
}
