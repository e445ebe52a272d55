// The style sheet's colours, for what is drawn on a canvas.

import { NUM_COLOURS } from "./identities.js";

export class Theme {
  #changed;

  /** `changed` is called after the colours have changed. */
  constructor(changed) {
    this.#changed = changed;
    this.#read();
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
      matchMedia(query).addEventListener("change", () => {
        this.#read();
        this.#changed();
      });
    }
  }

  #read() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.surface = colour("--surface");
    this.ink = colour("--ink");
    this.muted = colour("--muted");
    this.free = colour("--free");
    this.cached = colour("--cached");
    this.requests = Array.from({ length: NUM_COLOURS }, (_, i) => colour(`--request-${i}`));
  }
}

/** Whether the reader asked for little movement. */
export function isCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
