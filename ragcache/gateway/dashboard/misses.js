// The latest prompts that missed something, and what to do about it.

const MISS_COLUMNS = [
  ["Ago", "number"],
  ["Why", ""],
  ["Where", ""],
  ["Lost", "number"],
  ["Found", "number roomy"],
  ["Response", "roomy"],
];

const ADVICE = {
  cold: "Nothing like it was computed here. The next prompt that begins alike will find it.",
  changed: "It equals an earlier prompt up to this place. Put what changes behind what stays.",
  evicted: "It was cached and gave way to others. A larger pool, or a cache marker, keeps it longer.",
  expired: "It was cached, and gave way after its marker's time had run out. A longer ttl keeps it.",
  below_block: "Less than one block is shared, and nothing smaller than a block ever is.",
  namespace: "It is cached under another salt of the same API key.",
};

function missTable(misses, explain) {
  if (!misses.length) {
    return empty("None: whatever could have been found in the cache was found.");
  }
  return table(MISS_COLUMNS, misses.map((miss) => [
    rough(miss.age),
    missLink(miss, explain),
    missPlace(miss),
    miss.lost_tokens ? count(miss.lost_tokens) : element("span", { class: "quiet" }, "–"),
    `${count(miss.hit_tokens)} of ${count(miss.prompt_tokens)}`,
    element("code", { class: "quiet" }, miss.id),
  ]));
}

function missPlace({ segment, token }) {
  if (token === null) return element("span", { class: "quiet" }, "–");
  return element("span", {}, segment ?? "prompt", element("span", { class: "quiet roomy" }, ` · token ${count(token)}`));
}

/** The reason, which leads to its explanation. */
function missLink({ id, reason }, explain) {
  const href = `cache/explain/${encodeURIComponent(id)}`;
  const link = element("a", { href, class: `reason ${reason}` }, reason.replace("_", " "));
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    explain(id);
  });
  return link;
}

/** What `/cache/explain/{id}` says, in words and as it is. */
function explanationBody(found) {
  const facts = Object.entries(found).filter(([, value]) => value !== null);
  return [
    element("p", {}, ADVICE[found.reason]),
    element("dl", {}, ...facts.flatMap(([name, value]) => [
      element("dt", {}, name === "id" ? "response" : name.replace("_", " ")),
      element("dd", {}, typeof value === "number" ? WHOLE.format(value) : String(value)),
    ])),
  ];
}
