// Where each block lies: rows of square cells, in device pixels so that edges are crisp.

const MAX_CELL = 40;
const MAX_HEIGHT = 440;
const DIGIT_WIDTH = 6.7;
const LABEL_GAP = 12;
const LABEL_DISTANCE = 18;
// Room around the cells for what surrounds one of them.
const EDGE = 4;

export class GridShape {
  /** Fill `width` CSS pixels with `numBlocks` cells, at `ratio` device pixels each. */
  constructor(numBlocks, width, ratio) {
    this.numBlocks = numBlocks;
    this.ratio = ratio;
    const numDigits = String(numBlocks - 1).length;
    this.left = Math.round((numDigits * DIGIT_WIDTH + LABEL_GAP) * ratio);
    const room = Math.max(1, Math.floor((width - EDGE) * ratio) - this.left);
    this.cell = this.#largestCell(room);
    this.columns = Math.max(1, Math.floor(room / this.cell));
    if (this.cell >= 10 * ratio && this.columns >= 8) this.#roundColumns(room);
    this.rows = Math.ceil(numBlocks / this.columns);
    this.gap = this.#gap();
    this.width = this.left + this.columns * this.cell + Math.round(EDGE * ratio);
    this.top = Math.round(EDGE * ratio);
    this.height = this.rows * this.cell + 2 * this.top;
    this.labelStep = Math.ceil((LABEL_DISTANCE * ratio) / this.cell);
  }

  #largestCell(room) {
    const smallest = Math.max(3, Math.round(2 * this.ratio));
    for (let cell = Math.floor(MAX_CELL * this.ratio); cell > smallest; cell -= 1) {
      const rows = Math.ceil(this.numBlocks / Math.max(1, Math.floor(room / cell)));
      if (rows * cell <= MAX_HEIGHT * this.ratio) return cell;
    }
    return smallest;
  }

  /** Rows that begin at round numbers are easier to read. */
  #roundColumns(room) {
    const step = this.columns < 32 ? 4 : 8;
    this.columns = Math.ceil(this.columns / step) * step;
    this.cell = Math.floor(room / this.columns);
  }

  #gap() {
    const cell = this.cell / this.ratio;
    if (cell >= 24) return Math.round(3 * this.ratio);
    if (cell >= 12) return Math.round(2 * this.ratio);
    return this.cell >= 4 ? Math.max(1, Math.floor(this.cell / 6)) : 0;
  }

  /** Side of what is drawn in a cell. */
  get side() {
    return this.cell - this.gap;
  }

  x(block) {
    return this.left + (block % this.columns) * this.cell;
  }

  y(block) {
    return this.top + Math.floor(block / this.columns) * this.cell;
  }

  /** The block at a point given in CSS pixels, or null. */
  blockAt(x, y) {
    const column = Math.floor((x * this.ratio - this.left) / this.cell);
    const row = Math.floor((y * this.ratio - this.top) / this.cell);
    if (column < 0 || column >= this.columns || row < 0) return null;
    const block = row * this.columns + column;
    return block < this.numBlocks ? block : null;
  }
}
