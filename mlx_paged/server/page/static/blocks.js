// What each block of the pool is, worked out from one view.

export const FREE = 0;
export const CACHED = 1;
export const USED = 2;

export const STATE_NAMES = ["free", "cached", "in use"];

/**
 * Per block: its `state`; how many tables list it (`references`); how many of its slots hold a
 * token (`filled`); and the index in `tables` of the first table that lists it (`first`) and of
 * the first of another request (`other`), or -1.
 */
export class Blocks {
  constructor(numBlocks, blockSize, tables = [], cached = []) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.tables = tables;
    this.state = new Uint8Array(numBlocks);
    this.references = new Uint16Array(numBlocks);
    this.filled = new Uint16Array(numBlocks);
    this.first = new Int32Array(numBlocks).fill(-1);
    this.other = new Int32Array(numBlocks).fill(-1);
    for (const [start, length] of cached) this.state.fill(CACHED, start, start + length);
    tables.forEach((table, index) => this.#addTable(table, index));
    this.counts = this.#count();
  }

  static of(view) {
    return new Blocks(view.stats.num_blocks, view.stats.block_size, view.tables, view.cached);
  }

  #addTable(table, index) {
    table.block_table.forEach((block, position) => {
      if (block >= this.numBlocks) return;
      this.state[block] = USED;
      this.references[block] += 1;
      const filled = this.#numFilled(table, position);
      if (filled > this.filled[block]) this.filled[block] = filled;
      if (this.first[block] < 0) this.first[block] = index;
      else if (this.other[block] < 0) {
        const owner = this.tables[this.first[block]].request_id;
        if (owner !== table.request_id) this.other[block] = index;
      }
    });
  }

  #numFilled(table, position) {
    const rest = table.num_stored_tokens - position * this.blockSize;
    return Math.max(0, Math.min(this.blockSize, rest));
  }

  #count() {
    const counts = { free: 0, cached: 0, used: 0, shared: 0 };
    for (let block = 0; block < this.numBlocks; block += 1) {
      if (this.state[block] === FREE) counts.free += 1;
      else if (this.state[block] === CACHED) counts.cached += 1;
      else counts.used += 1;
      if (this.references[block] > 1) counts.shared += 1;
    }
    return counts;
  }

  isShared(block) {
    return this.references[block] > 1;
  }

  /** Who lists the block: the table, and which of its tokens belong there. */
  users(block) {
    if (this.first[block] < 0) return [];
    const users = [];
    for (const table of this.tables) {
      const position = table.block_table.indexOf(block);
      if (position < 0) continue;
      const first = position * this.blockSize;
      users.push({
        table,
        firstToken: first,
        lastToken: first + this.blockSize - 1,
        numStored: this.#numFilled(table, position),
      });
    }
    return users;
  }

  /** Runs of neighbours with the same state and requests. */
  *runs() {
    let start = 0;
    for (let block = 1; block <= this.numBlocks; block += 1) {
      if (block < this.numBlocks && this.#looksLike(block, start)) continue;
      yield { start, end: block - 1 };
      start = block;
    }
  }

  #looksLike(a, b) {
    return (
      this.state[a] === this.state[b] &&
      this.references[a] === this.references[b] &&
      this.#requestOf(this.first[a]) === this.#requestOf(this.first[b]) &&
      this.#requestOf(this.other[a]) === this.#requestOf(this.other[b])
    );
  }

  #requestOf(index) {
    return this.tables[index]?.request_id;
  }
}
