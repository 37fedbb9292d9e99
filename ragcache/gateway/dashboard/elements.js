// Elements. Every string becomes a text node, so nothing that a client chose is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  return furnished(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, tag), attributes, children);
}

function furnished(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function say(id, text) {
  byId(id).textContent = text;
}

/** A bar of which a share is filled. */
function bar(share, filled = 1) {
  const inner = element("div");
  inner.style.width = `${100 * filled}%`;
  const outer = element("div", { class: "bar", "aria-hidden": "true" }, inner);
  outer.style.width = `${100 * share}%`;
  return outer;
}

function empty(text) {
  return element("p", { class: "empty" }, text);
}

/** A table; a column is [heading, class], a row a list of cells, each a node or a text. */
function table(columns, rows) {
  const heads = columns.map(([heading, look]) =>
    element("th", { scope: "col", class: look }, heading));
  const line = (cells) => element("tr", {}, ...cells.map((cell, i) =>
    element("td", { class: columns[i][1] }, cell)));
  return element("table", {},
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rows.map(line)));
}
