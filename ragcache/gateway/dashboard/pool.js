// The KV pool as cells: each stands for as many blocks as it takes to show them all.

const CELL = 11; // pixels, with the gap
const ROWS = 12;

class PoolMap {
  constructor(host) {
    this.host = host;
    this.tiers = new Map();
  }

  /** `tiers` are {name, free, cached, held, total, retained?}; the name is shown for several. */
  show(tiers) {
    const shown = tiers.map((tier) => this.tier(tier, tiers.length > 1));
    if (shown.some((node, i) => node !== this.host.children[i])) this.host.replaceChildren(...shown);
    return this.perCell;
  }

  tier(pool, named) {
    if (!this.tiers.has(pool.name)) this.tiers.set(pool.name, newTier(pool.name, named));
    const { root, picture, legend } = this.tiers.get(pool.name);
    this.perCell = fillCells(picture, pool, this.host.clientWidth);
    const item = (look, number, name) => element("li", { class: `key-${look}` },
      element("b", {}, count(number)), name);
    legend.replaceChildren(item("held", pool.held, "held"), item("hit", pool.cached, "cached"),
      item("free", pool.free, "free"));
    if (pool.retained) legend.append(item("none", pool.retained, "kept by markers"));
    picture.setAttribute("aria-label", `${pool.name}: ${legend.textContent}`);
    return root;
  }
}

function newTier(name, named) {
  const picture = drawn("svg", { class: "cells", role: "img" });
  const legend = element("ul", { class: "legend" });
  const root = element("div", { class: "tier" }, picture, legend);
  if (named) root.prepend(element("h3", {}, name));
  return { root, picture, legend };
}

/** Colour the cells, held ones first; returns how many blocks a cell stands for. */
function fillCells(picture, pool, width) {
  const columns = Math.max(10, Math.floor(width / CELL));
  const perCell = Math.max(1, Math.ceil(pool.total / (columns * ROWS)));
  const cells = Math.ceil(pool.total / perCell);
  const held = Math.ceil(pool.held / perCell); // one held block is seen, however large the pool
  const used = Math.min(cells, Math.max(held, Math.round((pool.held + pool.cached) / perCell)));
  if (picture.childElementCount !== cells || picture.columns !== columns) {
    picture.columns = columns;
    picture.setAttribute("viewBox", `0 0 ${columns * CELL - 2} ${Math.ceil(cells / columns) * CELL - 2}`);
    picture.replaceChildren(...Array.from({ length: cells }, (_, i) => drawn("rect", {
      x: (i % columns) * CELL, y: Math.floor(i / columns) * CELL,
      width: CELL - 2, height: CELL - 2, rx: 2,
    })));
  }
  Array.from(picture.children).forEach((cell, i) => {
    cell.setAttribute("class", i < held ? "held" : i < used ? "cached" : "free");
  });
  return perCell;
}
