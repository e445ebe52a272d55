// Numbers and blocks in words.

const whole = new Intl.NumberFormat("en");
const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** 12,345 */
export function count(number) {
  return whole.format(number);
}

/** "1 block", "2,000 blocks" */
export function counted(number, noun) {
  return `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** 12.3 below a hundred, 1,234 above. */
export function rate(number) {
  return number < 100 ? rounded.format(number) : whole.format(Math.round(number));
}

/** "43 %" of a share from 0 to 1. */
export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** "3.1 GB", never broken between number and unit. */
export function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (number >= 1000 && power < units.length - 1) {
    number /= 1000;
    power += 1;
  }
  return `${rounded.format(number)}\u00a0${units[power]}`;
}

/** "7" or "7 to 12" */
export function range(first, last) {
  return first === last ? count(first) : `${count(first)} to ${count(last)}`;
}

/** Items of a list, the last after "and". */
export function listed(items) {
  if (items.length < 2) return items.join("");
  return `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
}

/** With a capital and a full stop. */
export function asSentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
