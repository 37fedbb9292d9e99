// Numbers as people read them; null is "–".

const WHOLE = new Intl.NumberFormat("en");
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function count(number) {
  if (number === null) return "–";
  return number < 10_000 ? WHOLE.format(number) : COMPACT.format(number);
}

function percent(share) {
  if (share === null) return "–";
  if (share === 0 || share === 1) return `${100 * share} %`;
  return `${Math.min(100 * share, 99.9).toFixed(1)} %`; // 100 is said of all only
}

/** How long something took. */
function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  return rough(seconds);
}

/** How long something has been, or will be. */
function rough(seconds) {
  if (seconds === null) return "–";
  const units = [["s", 60], ["min", 60], ["h", 48], ["days", Infinity]];
  let amount = seconds;
  for (const [unit, most] of units) {
    if (amount < most - 0.5) return `${Math.round(amount)} ${unit}`;
    amount /= unit === "h" ? 24 : 60;
  }
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
