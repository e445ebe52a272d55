// The pool and its blocks in sentences.

import { STATE_NAMES, USED } from "./blocks.js";
import { count, counted, listed, range } from "./words.js";

/** "in use", "in use, shared by 3 tables", ... */
export function stateOf(blocks, block) {
  const name = STATE_NAMES[blocks.state[block]];
  return blocks.isShared(block) ? `${name}, shared by ${blocks.references[block]} tables` : name;
}

/** "Request 3", or "Request 3, sample 2" where it has several. */
export function nameOf(table, tables, identities) {
  const name = identities.name(table.request_id);
  const isAlone = tables.every((other) => other === table || other.request_id !== table.request_id);
  return isAlone ? name : `${name}, sample ${table.index + 1}`;
}

/** One line for each user of a block: its table, name and tokens. */
export function usersOf(blocks, block, identities) {
  return blocks.users(block).map(({ table, firstToken, lastToken, numStored }) => ({
    table,
    name: nameOf(table, blocks.tables, identities),
    tokens: `tokens ${range(firstToken, lastToken)}, ${count(numStored)} stored`,
  }));
}

/** All about one block, to be spoken. */
export function blockSentence(blocks, block, identities) {
  const users = usersOf(blocks, block, identities).map(({ name, tokens }) => `${name}, ${tokens}.`);
  return [`Block ${count(block)}, ${stateOf(blocks, block)}.`, ...users.slice(0, 4)].join(" ");
}

/** The whole pool in one sentence. */
export function poolSentence(blocks) {
  const { free, cached, used, shared } = blocks.counts;
  const size = `Of ${counted(blocks.numBlocks, "block")} of ${counted(blocks.blockSize, "token")}`;
  return `${size}, ${count(used)} are in use (${count(shared)} of them shared), ${count(cached)} free and cached, and ${count(free)} free.`;
}

/** Which requests use a run of blocks, in a few words. */
export function requestsOf(blocks, block, identities) {
  if (blocks.state[block] !== USED) return "";
  const names = new Set(blocks.users(block).map(({ table }) => identities.name(table.request_id)));
  return listed([...names]);
}
