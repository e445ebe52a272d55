// Elements, without any text ever being read as HTML.

/** An element with attributes (`class`, `aria-label`, ...) and children, text or elements. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** An SVG element. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The element of that id. */
export function find(id) {
  return document.getElementById(id);
}

/** Replace an element's text, if it differs: an equal one costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
