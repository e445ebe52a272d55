// The page: one stream of views, and everything that shows them.

import { ApiKey } from "./api_key.js";
import { Ask } from "./ask.js";
import { BlockNote } from "./block_note.js";
import { Blocks } from "./blocks.js";
import { Connection } from "./connection.js";
import { blockSentence } from "./descriptions.js";
import { find, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Grid } from "./grid.js";
import { Identities } from "./identities.js";
import { Legend } from "./legend.js";
import { PoolText } from "./pool_text.js";
import { RequestList } from "./request_list.js";
import { bytes, counted } from "./words.js";

const identities = new Identities();
const key = new ApiKey(find("key"), () => connection.retry());
const connection = new Connection(key);
const figures = new Figures(find("figures"));
const legend = new Legend(find("legend"));
const note = new BlockNote(find("block"), identities);
const text = new PoolText(find("as-text"), find("pool-summary"), find("rows"), identities);
const grid = new Grid(find("grid"), identities, showBlock);
const requests = new RequestList(find("requests"), find("no-requests"), identities, light);
const ask = new Ask(key, markOurs, (answer) => {
  light(identities.findId((id) => answer?.owns(id)) ?? null);
});

let blocks = new Blocks(0, 1);
let litRequest = null;
let newest = null;

connection.addEventListener("line", ({ detail: line }) => {
  if (line.type === "About") showEngine(line);
  else if (line.type === "PoolView") queue(line);
});
connection.addEventListener("state", ({ detail: { state, sentence } }) => {
  const element = find("connection");
  element.dataset.state = state;
  setText(element, sentence);
  document.body.classList.toggle("stale", state !== "live");
  if (state !== "live") figures.stop();
});
connection.run();

function showEngine({ model_name, engine }) {
  ask.model = model_name;
  const attention = `${engine.attention} attention on ${engine.device}`;
  const size = `${counted(engine.num_blocks, "block")} of ${counted(engine.block_size, "token")}, ${bytes(engine.pool_nbytes)}`;
  const parts = [model_name, attention, `${engine.kv_format} KV`, size];
  setText(find("engine"), parts.join(" · "));
  if (blocks.numBlocks !== engine.num_blocks) showBlocks(new Blocks(engine.num_blocks, engine.block_size));
}

/** Draw the newest view once the browser draws anyway; what it replaces is never drawn. */
function queue(view) {
  grid.flash(view.copies);
  if (newest === null) requestAnimationFrame(drawNewest);
  newest = view;
}

function drawNewest() {
  const view = newest;
  newest = null;
  identities.update(view.tables.map((table) => table.request_id));
  showBlocks(Blocks.of(view));
  figures.show(view.stats);
}

function showBlocks(changed) {
  blocks = changed;
  grid.show(blocks);
  legend.show(blocks);
  requests.show(blocks);
  text.show(blocks);
  note.show(blocks, grid.block);
  markOurs();
}

function markOurs() {
  ask.colour(identities);
  const ours = new Set(blocksOf((id) => ask.owns(id)));
  grid.mark(ours, litRequest === null ? null : blocksOf((id) => id === litRequest));
}

function blocksOf(test) {
  return blocks.tables.filter((table) => test(table.request_id)).flatMap((table) => table.block_table);
}

function light(requestId) {
  litRequest = requestId;
  markOurs();
}

function showBlock(block, isByKeyboard) {
  note.show(blocks, block);
  if (isByKeyboard) setText(find("spoken-block"), block === null ? "" : blockSentence(blocks, block, identities));
}
