"""How the page looks: the same shapes in light and dark."""

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5d6b7e;
  --line: #dfe4ea; --ours: #1463c4; --other: #c0662b; --held: #9fb0c4; --lost: #e4e8ee;
  --control: #8793a3; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1b212a; --text: #e7ebf0;
  --soft: #9aa7b8; --line: #313a47; --ours: #5aa2f5; --other: #e69a5f; --held: #56657a;
  --lost: #2a323d; --control: #7f8b9b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 840px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 20px; margin: 0 0 6px; }
h3 { font-size: 14px; margin: 18px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 0 0 12px; }
.soft, footer { color: var(--soft); font-size: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 26px 0; }
.card, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 16px; }
.card b { display: block; font-size: 23px; line-height: 1.3; white-space: nowrap;
  color: var(--ours); }
.card span { color: var(--soft); font-size: 13px; line-height: 1.4; display: block; }
section { padding: 24px; margin: 0 0 18px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 24px; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; font: 13px system-ui, sans-serif; }
svg text { fill: var(--text); }
svg .tick, svg .note { fill: var(--soft); }
svg .grid { stroke: var(--line); }
svg .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.ours { fill: var(--ours); } .line.ours { stroke: var(--ours); }
.other { fill: var(--other); } .line.other { stroke: var(--other); }
.control { fill: var(--control); } .line.control { stroke: var(--control); }
.held { fill: var(--held); } .lost { fill: var(--lost); }
svg .label { font-weight: 600; }
svg .label.ours { fill: var(--ours); } svg .label.other { fill: var(--other); }
svg .label.control { fill: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); }
.key svg { display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 0;
  vertical-align: -1px; }
details { font-size: 14px; margin-top: 10px; } summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 8px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
code { font-size: 13px; }
"""
