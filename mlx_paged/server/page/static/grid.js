// The pool as a grid: shape, cells and marks together, with pointer and keyboard.

import { Blocks } from "./blocks.js";
import { Cells } from "./cells.js";
import { GridShape } from "./grid_shape.js";
import { Marks } from "./marks.js";
import { Theme } from "./theme.js";

const KEPT_KEYS = {
  ArrowLeft: () => -1,
  ArrowRight: () => 1,
  ArrowUp: (shape) => -shape.columns,
  ArrowDown: (shape) => shape.columns,
  PageUp: (shape) => -10 * shape.columns,
  PageDown: (shape) => 10 * shape.columns,
};

export class Grid {
  #element;
  #canvases;
  #cells;
  #marks;
  #theme = new Theme(() => this.#reset());
  #shape = null;
  #blocks = new Blocks(0, 1);
  #identities;
  #pointed = null;
  #cursor = null;
  #whenPointed;

  /** `whenPointed(block or null, whether by keyboard)` follows pointer and keyboard. */
  constructor(element, identities, whenPointed) {
    this.#element = element;
    this.#identities = identities;
    this.#whenPointed = whenPointed;
    this.#canvases = [...element.querySelectorAll("canvas")];
    this.#cells = new Cells(this.#canvases[0]);
    this.#marks = new Marks(this.#canvases[1]);
    new ResizeObserver(() => this.#reset()).observe(element);
    this.#followRatio();
    this.#listen();
  }

  /** The block pointed at, or else the one that the keyboard is on. */
  get block() {
    return this.#pointed ?? this.#cursor;
  }

  show(blocks) {
    const isSameSize = blocks.numBlocks === this.#blocks.numBlocks;
    this.#blocks = blocks;
    if (!isSameSize || !this.#shape) this.#reset();
    else this.#cells.draw(blocks, this.#identities);
  }

  mark(outlined, lit) {
    this.#marks.show(outlined, lit);
  }

  flash(copies) {
    this.#marks.addCopies(copies);
  }

  #followRatio() {
    matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener(
      "change",
      () => {
        this.#followRatio();
        this.#reset();
      },
      { once: true },
    );
  }

  #reset() {
    const width = this.#element.clientWidth;
    if (!width || !this.#blocks.numBlocks) return;
    const shape = new GridShape(this.#blocks.numBlocks, width, devicePixelRatio);
    this.#shape = shape;
    for (const canvas of this.#canvases) {
      canvas.width = shape.width;
      canvas.height = shape.height;
      canvas.style.width = `${shape.width / shape.ratio}px`;
      canvas.style.height = `${shape.height / shape.ratio}px`;
    }
    this.#cursor = this.#cursor === null ? null : Math.min(this.#cursor, shape.numBlocks - 1);
    this.#cells.reset(shape, this.#theme);
    this.#cells.draw(this.#blocks, this.#identities);
    this.#marks.reset(shape, this.#theme);
  }

  #listen() {
    const element = this.#element;
    element.addEventListener("pointermove", (event) => this.#point(this.#blockUnder(event)));
    element.addEventListener("pointerleave", () => this.#point(null));
    element.addEventListener("click", (event) => this.#moveTo(this.#blockUnder(event), false));
    element.addEventListener("keydown", (event) => this.#press(event));
    element.addEventListener("focus", () => {
      if (element.matches(":focus-visible")) this.#moveTo(this.#cursor ?? 0, true);
    });
    element.addEventListener("blur", () => this.#changed(false));
  }

  #blockUnder(event) {
    const box = this.#canvases[0].getBoundingClientRect();
    return this.#shape?.blockAt(event.clientX - box.left, event.clientY - box.top) ?? null;
  }

  #point(block) {
    if (block === this.#pointed) return;
    this.#pointed = block;
    this.#changed(false);
  }

  #moveTo(block, byKeyboard) {
    if (byKeyboard) this.#pointed = null;
    this.#cursor = block;
    this.#changed(byKeyboard);
  }

  #press(event) {
    if (!this.#shape || event.altKey || event.metaKey) return;
    const target = this.#target(event);
    if (target === undefined) return;
    event.preventDefault();
    this.#moveTo(target, true);
  }

  /** Where a key leads: a block, null to let go, undefined if it means nothing here. */
  #target({ key, ctrlKey }) {
    const shape = this.#shape;
    const cursor = this.#cursor ?? 0;
    const last = shape.numBlocks - 1;
    if (key === "Escape") return null;
    if (key === "Home") return ctrlKey ? 0 : cursor - (cursor % shape.columns);
    if (key === "End") {
      const end = cursor - (cursor % shape.columns) + shape.columns - 1;
      return ctrlKey ? last : Math.min(last, end);
    }
    if (!(key in KEPT_KEYS) || ctrlKey) return undefined;
    const target = cursor + KEPT_KEYS[key](shape);
    return target < 0 || target > last ? cursor : target;
  }

  #changed(byKeyboard) {
    this.#marks.point(this.block, document.activeElement === this.#element && this.#pointed === null);
    this.#whenPointed(this.block, byKeyboard);
  }
}
