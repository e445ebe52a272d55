// What lies over the cells: outlines of our own blocks, the block pointed at, and copies.

import { isCalm } from "./theme.js";

const COPY_MS = 900;
const CALM_COPY_MS = 1500;
const MAX_COPIES = 24;

export class Marks {
  #context;
  #shape;
  #theme;
  #copies = [];
  #frame = 0;
  #wake = 0;
  #cursor = null;
  #hasFocus = false;
  #outlined = new Set();
  #lit = null;
  #isBlank = true;

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  reset(shape, theme) {
    this.#shape = shape;
    this.#theme = theme;
    this.#copies = [];
    this.draw();
  }

  /** `outlined`: our own blocks; `lit`: those that stay bright while others fade, or null. */
  show(outlined, lit) {
    this.#outlined = outlined;
    this.#lit = lit;
    this.draw();
  }

  point(block, hasFocus) {
    this.#cursor = block;
    this.#hasFocus = hasFocus;
    this.draw();
  }

  /** Show that blocks were copied: pairs of source and destination. */
  addCopies(pairs) {
    if (!pairs.length || !this.#shape) return;
    const now = performance.now();
    for (const [source, destination] of pairs) {
      if (Math.max(source, destination) >= this.#shape.numBlocks) continue;
      this.#copies.push({ source, destination, start: now });
    }
    this.#copies = this.#copies.slice(-MAX_COPIES);
    this.draw();
  }

  draw() {
    if (!this.#shape) return;
    const now = performance.now();
    const duration = isCalm() ? CALM_COPY_MS : COPY_MS;
    this.#copies = this.#copies.filter((copy) => now - copy.start < duration);
    this.#clear();
    if (this.#lit) this.#fadeOthers(this.#lit);
    this.#outline(this.#outlined);
    for (const copy of this.#copies) this.#drawCopy(copy, (now - copy.start) / duration);
    if (this.#cursor !== null) this.#drawCursor(this.#cursor);
    this.#continue(duration);
  }

  #clear() {
    if (this.#isBlank) return;
    this.#context.clearRect(0, 0, this.#context.canvas.width, this.#context.canvas.height);
    this.#isBlank = true;
  }

  /** Draw again while something moves, and once when it is over if nothing may move. */
  #continue(duration) {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#wake);
    if (!this.#copies.length) return;
    if (isCalm()) this.#wake = setTimeout(() => this.draw(), duration);
    else this.#frame = requestAnimationFrame(() => this.draw());
  }

  #fadeOthers(lit) {
    const { left, width, height, cell } = this.#shape;
    const context = this.#context;
    context.save();
    context.globalAlpha = 0.72;
    context.fillStyle = this.#theme.surface;
    context.fillRect(left, 0, width - left, height);
    context.restore();
    for (const block of lit) {
      context.clearRect(this.#shape.x(block), this.#shape.y(block), cell, cell);
    }
    this.#isBlank = false;
  }

  /** A line around the blocks, and none between two of them. */
  #outline(blocks) {
    if (!blocks.size) return;
    const context = this.#context;
    const { cell, gap, columns, ratio } = this.#shape;
    const line = Math.max(1, Math.round((cell / ratio >= 12 ? 2 : 1) * ratio));
    const before = Math.floor((line + gap) / 2);
    context.fillStyle = this.#theme.ink;
    for (const block of blocks) {
      const x = this.#shape.x(block) - before;
      const y = this.#shape.y(block) - before;
      const column = block % columns;
      const length = cell + line;
      if (!blocks.has(block - columns)) context.fillRect(x, y, length, line);
      if (!blocks.has(block + columns)) context.fillRect(x, y + cell, length, line);
      if (column === 0 || !blocks.has(block - 1)) context.fillRect(x, y, line, length);
      if (column === columns - 1 || !blocks.has(block + 1)) context.fillRect(x + cell, y, line, length);
    }
    this.#isBlank = false;
  }

  #middle(block) {
    const half = this.#shape.side / 2;
    return [this.#shape.x(block) + half, this.#shape.y(block) + half];
  }

  /** An arc from the source, ahead of which a point runs, and a ring at the destination. */
  #drawCopy({ source, destination }, progress) {
    const context = this.#context;
    const { ratio, side } = this.#shape;
    const calm = isCalm();
    const [x0, y0] = this.#middle(source);
    const [x1, y1] = this.#middle(destination);
    const bend = Math.hypot(x1 - x0, y1 - y0) * 0.18;
    const isNearTop = Math.min(y0, y1) < bend;
    const [cx, cy] = [(x0 + x1) / 2, (y0 + y1) / 2 + (isNearTop ? bend : -bend)];
    const run = calm ? 1 : Math.min(1, progress / 0.55);
    const along = (t) => [
      (1 - t) ** 2 * x0 + 2 * (1 - t) * t * cx + t ** 2 * x1,
      (1 - t) ** 2 * y0 + 2 * (1 - t) * t * cy + t ** 2 * y1,
    ];
    context.save();
    context.globalAlpha = calm ? 1 : Math.min(1, 2.2 * (1 - progress));
    context.strokeStyle = this.#theme.ink;
    context.fillStyle = this.#theme.ink;
    context.lineWidth = 1.5 * ratio;
    context.beginPath();
    context.moveTo(x0, y0);
    for (let step = 1; step <= 16; step += 1) context.lineTo(...along((run * step) / 16));
    context.stroke();
    context.beginPath();
    context.arc(...along(run), 3 * ratio, 0, 2 * Math.PI);
    context.fill();
    if (run === 1) {
      const spread = calm ? 0.5 : (progress - 0.55) / 0.45;
      context.beginPath();
      context.arc(x1, y1, side * 0.5 + (2 + 8 * spread) * ratio, 0, 2 * Math.PI);
      context.stroke();
    }
    context.restore();
    this.#isBlank = false;
  }

  #drawCursor(block) {
    const context = this.#context;
    const { ratio, side } = this.#shape;
    const line = Math.round((this.#hasFocus ? 3 : 2) * ratio);
    const size = Math.max(side, 6 * ratio) + line;
    const [x, y] = this.#middle(block);
    const ring = (colour, length) => {
      context.strokeStyle = colour;
      context.strokeRect(x - length / 2, y - length / 2, length, length);
    };
    context.lineWidth = line;
    ring(this.#theme.surface, size - 2 * line);
    ring(this.#theme.ink, size);
    this.#isBlank = false;
  }
}
