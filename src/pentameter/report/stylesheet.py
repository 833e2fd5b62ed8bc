"""The page's style sheet: light and dark by the reader's setting, phone to desktop, and print."""

_LIGHT = """
  --page: #f5f6f9; --surface: #ffffff; --ink: #1c2430; --muted: #66707f; --grid: #e3e7ee;
  --train: #2f6bdb; --validation: #d9650c; --floor: #138a5e; --good: #138a5e; --bad: #c9302c;
  --run-1: #2f6bdb; --run-2: #dd6b10; --run-3: #138a5e; --run-4: #b0379a; --run-5: #8a6d00;
  --run-6: #0e8fa8; --run-7: #c9302c; --run-8: #5b4bb7;
  --shadow: 0 1px 2px rgb(20 30 50 / 6%), 0 4px 16px rgb(20 30 50 / 5%);
"""

STYLESHEET = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #0f1319; --surface: #171d26; --ink: #e6eaf0; --muted: #94a0b1; --grid: #2a3340;
    --train: #6d9eff; --validation: #ff9a4a; --floor: #4fc795; --good: #4fc795; --bad: #ff7b72;
    --run-1: #6d9eff; --run-2: #ff9a4a; --run-3: #4fc795; --run-4: #ea7fd5; --run-5: #d9b93b;
    --run-6: #4ecbe0; --run-7: #ff7b72; --run-8: #a89bff;
    --shadow: none;
  }}
}}
"""
    """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { margin: 0; font-size: 2rem; line-height: 1.15; letter-spacing: -.02em;
  overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .9rem; font-size: 1.2rem; letter-spacing: -.01em; }
h3 { margin: 0 0 .4rem; font-size: .9rem; font-weight: 600; }
p { margin: .4rem 0; }
.muted, .note { color: var(--muted); }
.note { font-size: .875rem; }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem .9rem; }
.badge {
  padding: .1rem .7rem; border: 1px solid currentcolor; border-radius: 99px;
  font-size: .8rem; font-weight: 600; color: var(--muted); white-space: nowrap;
}
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); }
.badge.live { color: var(--train); }
.card, .facts {
  background: var(--surface); border-radius: 14px; box-shadow: var(--shadow);
  border: 1px solid var(--grid);
}
.card { padding: 1.1rem 1.2rem; }
.facts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1px;
  margin: 1.6rem 0 0; overflow: hidden;
}
.facts > div { padding: .85rem 1.1rem; box-shadow: 1px 1px var(--grid); }
.facts dt { color: var(--muted); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.4rem; font-weight: 600; letter-spacing: -.015em;
  line-height: 1.3; font-variant-numeric: tabular-nums; }
.facts small { display: block; color: var(--muted); font-size: .8rem; font-weight: 400;
  letter-spacing: 0; line-height: 1.4; }
.facts .best dd { color: var(--validation); }
.outcome { margin: .7rem 0 .3rem; font-size: 1.05rem; }
.plot, .plot .tabs > div, .plot .tabs > div > div { position: relative; }
.hover {
  position: absolute; top: 0; pointer-events: none; padding: .35rem .6rem; border-radius: 8px;
  border: 1px solid var(--grid); background: var(--surface); box-shadow: var(--shadow);
  font-size: .8rem; line-height: 1.45; white-space: nowrap; font-variant-numeric: tabular-nums;
}
.hover i { display: inline-block; width: .6rem; height: .6rem; margin-right: .4rem;
  border-radius: 50%; }
.tabs > input { position: absolute; opacity: 0; }
.tabs > label { display: inline-block; margin: 0 .3rem .5rem 0; padding: .1rem .7rem;
  border: 1px solid var(--grid); border-radius: 99px; color: var(--muted); font-size: .8rem;
  cursor: pointer; }
.tabs > input:checked + label { border-color: currentcolor; color: var(--ink); }
.tabs > input:focus-visible + label { outline: 2px solid var(--train); }
.tabs > div { display: none; }
.tabs > input:nth-of-type(1):checked ~ div:nth-of-type(1),
.tabs > input:nth-of-type(2):checked ~ div:nth-of-type(2),
.tabs > input:nth-of-type(3):checked ~ div:nth-of-type(3),
.tabs > input:nth-of-type(4):checked ~ div:nth-of-type(4) { display: block; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
.pair > * { min-width: 0; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit; font-variant-numeric: tabular-nums; }
figure .narrow { display: none; }
.sample pre, .log pre {
  margin: 0; max-height: 19rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .8rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
.sample h3 { display: flex; justify-content: space-between; gap: 1rem; margin-bottom: .6rem; }
.sample h3 span { color: var(--muted); font-weight: 400; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; }
th, td { padding: .34rem 0; text-align: left; vertical-align: top;
  border-top: 1px solid var(--grid); }
tr:first-child > * { border-top: 0; }
table.keys th { padding-right: 1rem; font-weight: 400; color: var(--muted); white-space: nowrap; }
table.keys td { text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
table.rows th, table.rows td { padding-right: 1.25rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
table.rows :is(th, td):last-child { padding-right: 0; }
table.rows td.text { white-space: normal; min-width: 8rem; overflow-wrap: anywhere; width: 60%; }
.tag { margin-left: .5rem; color: var(--validation); font-size: .8rem; }
table.rows thead th { color: var(--muted); font-weight: 400; }
table.rows thead + tbody tr:first-child > * { border-top: 1px solid var(--grid); }
table.rows .number { text-align: right; }
.columns { columns: 20rem 3; column-gap: 1rem; }
.columns > .card { break-inside: avoid; margin-bottom: 1rem; }
.key { display: inline-block; width: .7rem; height: .7rem; margin-right: .45rem;
  border-radius: 50%; }
.run-1 { background: var(--run-1); }
.run-2 { background: var(--run-2); }
.run-3 { background: var(--run-3); }
.run-4 { background: var(--run-4); }
.run-5 { background: var(--run-5); }
.run-6 { background: var(--run-6); }
.run-7 { background: var(--run-7); }
.run-8 { background: var(--run-8); }
.runs { margin: 1rem 0 0; padding: 0; list-style: none; }
.runs li { margin: .45rem 0; }
.runs .badge { margin: 0 .5rem 0 .3rem; }
.runs li > span:last-child { color: var(--muted); }
table.settings thead th { color: var(--ink); font-weight: 600; }
table.settings tbody th { font-weight: 400; }
table.settings .best { color: var(--good); font-weight: 600; }
table.settings .muted { color: var(--muted); }
table.settings td { overflow-wrap: anywhere; white-space: normal; min-width: 5rem; }
summary { cursor: pointer; }
details[open] > summary { margin-bottom: .8rem; }
footer { margin-top: 3rem; color: var(--muted); font-size: .8rem; }
@media (max-width: 40rem) {
  main { padding: 1.4rem .9rem 3rem; }
  h1 { font-size: 1.6rem; }
  h2 { margin-top: 2.1rem; }
  .card { padding: .9rem .85rem; border-radius: 12px; }
  .facts { grid-template-columns: 1fr 1fr; border-radius: 12px; }
  .facts > div { padding: .7rem .85rem; }
  .facts dd { font-size: 1.2rem; }
  figure .wide { display: none; }
  figure .narrow { display: block; }
  table { font-size: .8rem; }
  table.rows th, table.rows td { padding-right: .7rem; }
  table.rows.settings th { white-space: normal; }
}
"""
    f"""
@media print {{
  @page {{ margin: 14mm 12mm; }}
  :root {{ color-scheme: light; {_LIGHT} --page: #fff; --shadow: none; }}
"""
    """
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 1.4rem; break-after: avoid; }
  .facts { grid-template-columns: repeat(4, 1fr); }
  .facts, .badge, .card { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .facts dd { font-size: 1.15rem; }
  .facts, .plot, .sample, .scroll, tr { break-inside: avoid; }
  .pair { grid-template-columns: 1fr 1fr; gap: .7rem; }
  .columns { columns: 2; }
  .sample pre { max-height: none; overflow: hidden; font-size: 7.5pt; }
  .scroll { overflow: visible; }
  figure .wide { display: block; }
  figure .narrow { display: none; }
  .log, .tabs > label { display: none; }
}
"""
)
