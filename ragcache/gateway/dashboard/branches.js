// The hottest branches as a tree, each below the one that it goes on from.

const BRANCH_COLUMNS = [
  ["Prefix", "name"],
  ["Tokens", "number"],
  ["Hits", "number"],
  ["Tokens read", "number roomy"],
  ["Share of all hits", "share"],
  ["Age", "number roomy"],
  ["Kept for", "number roomy"],
];

/** Lines of {prefix, depth}, parents before their children. */
function treeLines(prefixes, parent = null, depth = 0) {
  return prefixes.filter((prefix) => prefix.parent === parent).flatMap((prefix) =>
    [{ prefix, depth }, ...treeLines(prefixes, prefix.fingerprint, depth + 1)]);
}

function branchTable(prefixes, allHitTokens) {
  if (!prefixes.length) {
    return empty("No prefix was hit yet. Prompts share what they have in common from the first "
      + "token on: put what is stable first (system prompt, tools, passages) and ask twice.");
  }
  return table(BRANCH_COLUMNS, treeLines(prefixes).map(({ prefix, depth }) => [
    branchName(prefix, depth),
    count(prefix.tokens),
    count(prefix.hits),
    count(prefix.hit_tokens),
    bar(1, Math.min(1, prefix.hit_tokens / Math.max(allHitTokens, 1))),
    rough(prefix.age),
    prefix.retention === null ? element("span", { class: "quiet" }, "–") : rough(prefix.retention),
  ]));
}

function branchName(prefix, depth) {
  const name = element("span", {}, element("code", {}, prefix.fingerprint));
  name.style.paddingLeft = `${18 * Math.max(0, Math.min(depth, 6) - 1)}px`;
  if (depth) name.prepend(element("span", { class: "turn", "aria-hidden": "true" }, "└"));
  return name;
}
