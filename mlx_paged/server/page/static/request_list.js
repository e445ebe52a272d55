// The running and waiting requests, one row each.

import { RequestRow } from "./request_row.js";

const MAX_ROWS = 60;
const MAX_OPEN = 4;

export class RequestList {
  #list;
  #empty;
  #identities;
  #whenLit;
  #rows = new Map();

  /** `whenLit(request id or null)` follows the row that is pointed at or has the focus. */
  constructor(list, empty, identities, whenLit) {
    this.#list = list;
    this.#empty = empty;
    this.#identities = identities;
    this.#whenLit = whenLit;
  }

  show(blocks) {
    const groups = byRequest(blocks.tables);
    for (const [id, row] of this.#rows) if (!groups.has(id)) this.#remove(id, row);
    for (const [id, tables] of groups) {
      if (!this.#rows.has(id)) this.#add(id);
      this.#rows.get(id)?.show(tables, blocks);
    }
    const numHidden = groups.size - this.#rows.size;
    this.#empty.hidden = groups.size > 0 && numHidden === 0;
    this.#empty.textContent = numHidden ? `And ${numHidden} more.` : "No request is running.";
  }

  #add(id) {
    if (this.#rows.size >= MAX_ROWS) return;
    const row = new RequestRow(this.#identities.name(id), this.#identities.colour(id), id);
    row.isOpen = this.#rows.size < MAX_OPEN;
    const { element } = row;
    for (const type of ["pointerenter", "focusin"]) element.addEventListener(type, () => this.#whenLit(id));
    for (const type of ["pointerleave", "focusout"]) element.addEventListener(type, () => this.#whenLit(null));
    this.#rows.set(id, row);
    this.#list.append(element);
  }

  #remove(id, row) {
    if (row.element.matches(":hover, :focus-within")) this.#whenLit(null);
    row.element.remove();
    this.#rows.delete(id);
  }
}

function byRequest(tables) {
  const groups = new Map();
  for (const table of tables) {
    if (!groups.has(table.request_id)) groups.set(table.request_id, []);
    groups.get(table.request_id).push(table);
  }
  return groups;
}
