// Asks the gateway every two seconds, and shows what it says or that it says nothing.

const EVERY = 2000; // milliseconds
const PATIENCE = 8000;
const SMOOTH = 15; // slots: 30 seconds
const KEY = "ragcache-api-key";

const rateChart = new Chart(byId("rate-chart"), {
  series: [{ name: "found in the cache", look: "hit", area: true }],
  format: (share) => `${Math.round(100 * share)} %`,
  ceiling: 1,
  nothing: "No prompt in the last 10 minutes",
});
const ttftChart = new Chart(byId("ttft-chart"), {
  series: [{ name: "median", look: "hit" }, { name: "95 %", look: "second" }],
  format: (seconds) => (seconds === 0 ? "0" : span(seconds)),
  nothing: "No answer in the last 10 minutes",
});
const poolMap = new PoolMap(byId("pool"));
let heard = null; // when the gateway last answered
let asleep = null; // ends the wait for the next question

/** The share of hit tokens over the slots up to each; null where there was no prompt. */
function smoothed({ query, hit }) {
  return query.map((_, slot) => {
    const from = Math.max(0, slot - SMOOTH + 1);
    const sum = (line) => line.slice(from, slot + 1).reduce((total, n) => total + (n ?? 0), 0);
    const queried = sum(query);
    return queried ? sum(hit) / queried : null;
  });
}

function show(data) {
  say("model", data.model);
  showState(data.ready ? "live" : "waiting", data.ready ? "live" : "not ready");
  byId("ask").hidden = true;
  const main = document.querySelector("main");
  main.hidden = data.stats === null;
  main.classList.remove("stale");
  byId("notice").hidden = data.ready;
  if (!data.ready) say("notice", `No requests are answered: ${data.reason}.`);
  if (data.stats === null) return;
  showTiles(data);
  const { history, ttft, stats, misses } = data;
  rateChart.show([smoothed(history)], history.seconds);
  ttftChart.show([ttft.p50, ttft.p95], ttft.seconds);
  showPool(stats);
  byId("segments").replaceChildren(segmentBars(stats.segments));
  byId("branches").replaceChildren(branchTable(stats.prefixes, stats.tokens.hit));
  byId("misses").replaceChildren(missTable(misses, explain));
}

function showTiles({ stats, ttft, history }) {
  say("rate", percent(stats.hit_rate["5m"]));
  document.title = `${percent(stats.hit_rate["5m"])} · ragcache`;
  say("rate-1m", percent(stats.hit_rate["1m"]));
  say("rate-total", percent(stats.hit_rate.total));
  say("ttft", span(ttft["1m"].p50));
  say("ttft-p95", span(ttft["1m"].p95));
  say("saved", count(stats.saved.tokens));
  say("saved-time", stats.saved.seconds ? `tokens, about ${span(stats.saved.seconds)} of prefill` : "tokens");
  byId("requests").hidden = stats.running === undefined;
  if (stats.running === undefined) return;
  say("running", count(stats.running));
  say("waiting", count(stats.waiting));
  const lines = sparkline([history.running, history.waiting], ["hit", "held"], 10);
  byId("load").replaceChildren(...lines);
}

function showPool({ pool, host, evictions, block_size: size }) {
  byId("pool-panel").hidden = pool === undefined;
  if (pool === undefined) return;
  const tiers = [{ ...pool, name: "Device" }];
  if (host) tiers.push({ ...host.pool, name: "Host" });
  const perCell = poolMap.show(tiers);
  say("pool-scale", `a cell is ${plural(perCell, "block")} of ${size} tokens · ${plural(evictions, "eviction")}`);
}

function showState(state, text) {
  const pill = byId("state");
  if (pill.textContent === text && pill.dataset.state === state) return; // it is read aloud
  pill.dataset.state = state;
  pill.textContent = text;
}

function showLoss() {
  const since = heard === null ? "" : ` for ${rough((Date.now() - heard) / 1000)}`;
  showState("lost", `no answer${since}, trying again`);
  document.querySelector("main").classList.add("stale");
}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  return fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
}

async function ask() {
  try {
    const response = await get("dashboard/data");
    if (response.status === 401) askForKey();
    else if (response.ok) {
      show(await response.json());
      heard = Date.now();
    } else showLoss();
  } catch (error) { // the server is away, or something else answers in its place
    console.warn(error);
    showLoss();
  }
  byId("forget").hidden = sessionStorage.getItem(KEY) === null;
}

function askForKey() {
  byId("refused").hidden = sessionStorage.getItem(KEY) === null;
  sessionStorage.removeItem(KEY);
  byId("notice").hidden = document.querySelector("main").hidden = true;
  showState("waiting", "locked");
  if (byId("ask").hidden) {
    byId("ask").hidden = false;
    byId("key").focus();
  }
}

async function explain(id) {
  const response = await get(`cache/explain/${encodeURIComponent(id)}`);
  const found = await response.json();
  say("explanation-title", response.ok ? `Missed: ${found.reason.replace("_", " ")}` : "Forgotten");
  const body = response.ok ? explanationBody(found) : [element("p", {}, found.error.message)];
  byId("explanation-body").replaceChildren(...body);
  byId("explanation").showModal();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  asleep?.();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  asleep?.();
});

document.addEventListener("visibilitychange", () => asleep?.());

for (;;) {
  if (!document.hidden) await ask();
  await new Promise((resolve) => {
    asleep = resolve;
    setTimeout(resolve, EVERY);
  });
}
