// The blocks as cells on a canvas. Only cells that look different from before are drawn again.

import { CACHED, FREE } from "./blocks.js";

const NO_LOOK = 0xffffffff;
// As many as fit into a look beside the rest.
const MAX_REFERENCES = 63;

export class Cells {
  #context;
  #looks = new Uint32Array(0);
  #shape;
  #theme;

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  /** Begin anew, after the shape or the colours have changed. */
  reset(shape, theme) {
    this.#shape = shape;
    this.#theme = theme;
    this.#looks = new Uint32Array(shape.numBlocks).fill(NO_LOOK);
    this.#context.clearRect(0, 0, this.#context.canvas.width, this.#context.canvas.height);
    this.#drawLabels();
  }

  draw(blocks, identities) {
    const colours = blocks.tables.map((table) => identities.colour(table.request_id));
    for (let block = 0; block < this.#looks.length; block += 1) {
      const look = this.#look(blocks, block, colours);
      if (look === this.#looks[block]) continue;
      this.#looks[block] = look;
      this.#drawCell(blocks, block, colours);
    }
  }

  /** All that a cell shows, as one number. */
  #look(blocks, block, colours) {
    const first = blocks.first[block];
    if (first < 0) return blocks.state[block];
    const other = blocks.other[block];
    const filled = this.#filledHeight(blocks, block);
    const references = Math.min(blocks.references[block], MAX_REFERENCES);
    const pair = (colours[first] << 4) | (other < 0 ? 15 : colours[other]);
    return ((pair << 16) | (filled << 8) | (references << 2) | blocks.state[block]) >>> 0;
  }

  #filledHeight(blocks, block) {
    return Math.ceil((Math.min(this.#shape.side, 255) * blocks.filled[block]) / blocks.blockSize);
  }

  #drawCell(blocks, block, colours) {
    const context = this.#context;
    const { cell, side } = this.#shape;
    const x = this.#shape.x(block);
    const y = this.#shape.y(block);
    context.clearRect(x, y, cell, cell);
    if (blocks.state[block] === FREE) this.#fill(x, y, side, this.#theme.free);
    else if (blocks.state[block] === CACHED) this.#drawCached(x, y, side);
    else this.#drawUsed(blocks, block, colours, x, y);
  }

  #fill(x, y, side, colour) {
    const context = this.#context;
    context.fillStyle = colour;
    if (side < 10 * this.#shape.ratio) {
      context.fillRect(x, y, side, side);
      return;
    }
    context.beginPath();
    context.roundRect(x, y, side, side, 2 * this.#shape.ratio);
    context.fill();
  }

  /** A block that may be found again: a smaller square on the free one's ground. */
  #drawCached(x, y, side) {
    this.#fill(x, y, side, this.#theme.free);
    const inset = side >= 5 ? Math.round(side / 5) : 0;
    this.#fill(x + inset, y + inset, side - 2 * inset, this.#theme.cached);
  }

  /** Pale where slots are still empty; of two colours if two requests share it. */
  #drawUsed(blocks, block, colours, x, y) {
    const context = this.#context;
    const { side } = this.#shape;
    const first = this.#theme.requests[colours[blocks.first[block]]];
    context.save();
    context.beginPath();
    if (side < 10 * this.#shape.ratio) context.rect(x, y, side, side);
    else context.roundRect(x, y, side, side, 2 * this.#shape.ratio);
    context.clip();
    const filled = this.#filledHeight(blocks, block);
    context.fillStyle = first;
    context.globalAlpha = 0.3;
    context.fillRect(x, y, side, side);
    context.globalAlpha = 1;
    context.fillRect(x, y + side - filled, side, filled);
    if (blocks.other[block] >= 0) {
      context.fillStyle = this.#theme.requests[colours[blocks.other[block]]];
      context.beginPath();
      context.moveTo(x + side, y);
      context.lineTo(x + side, y + side);
      context.lineTo(x, y + side);
      context.fill();
    }
    context.restore();
    if (blocks.isShared(block)) this.#drawShared(x, y, side, blocks.references[block]);
  }

  /** A hole, with the number of tables in it where there is room. */
  #drawShared(x, y, side, references) {
    const context = this.#context;
    const { ratio } = this.#shape;
    const text = references < MAX_REFERENCES ? String(references) : `${MAX_REFERENCES}+`;
    const hasRoom = side >= (12 + 4 * text.length) * ratio;
    const hole = hasRoom ? Math.round(side * 0.62) : Math.max(1, Math.round(side * 0.4));
    const inset = Math.floor((side - hole) / 2);
    context.fillStyle = this.#theme.surface;
    context.fillRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
    if (!hasRoom) return;
    context.fillStyle = this.#theme.ink;
    context.font = `600 ${Math.round(Math.min(12 * ratio, hole * 0.8))}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + side / 2, y + side / 2 + 0.5 * ratio);
  }

  /** The number of a row's first block, on its left. */
  #drawLabels() {
    const context = this.#context;
    const { ratio, left, top, cell, rows, columns, labelStep } = this.#shape;
    context.fillStyle = this.#theme.muted;
    context.font = `${11 * ratio}px ui-monospace, monospace`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = 0; row < rows; row += labelStep) {
      const y = top + row * cell + Math.max(this.#shape.side, 10 * ratio) / 2;
      context.fillText(String(row * columns), left - 8 * ratio, y);
    }
  }
}
