// Tokens by part of the prompt: how many there were, and how many of them were found.

const PARTS = { tools: "Tools", system: "System", messages: "Messages", prompt: "Plain prompts" };

function segmentBars(segments) {
  const parts = Object.keys(PARTS).filter((name) => segments[name].query > 0);
  if (!parts.length) return empty("No request yet. Send one to /v1/chat/completions or /v1/messages.");
  const most = Math.max(...parts.map((name) => segments[name].query));
  const bars = element("dl", { class: "bars" }, ...parts.flatMap((name) => {
    const { query, hit, hit_rate: rate } = segments[name];
    return [
      element("dt", {}, PARTS[name]),
      element("dd", {}, bar(query / most, hit / query),
        element("small", {}, `${count(hit)} of ${count(query)}`)),
      element("dd", { class: "number" }, percent(rate.total)),
    ];
  }));
  const legend = element("ul", { class: "legend" },
    element("li", { class: "key-hit" }, "found in the cache"),
    element("li", { class: "key-free" }, "computed"));
  return element("div", { class: "segments" }, bars, legend);
}
