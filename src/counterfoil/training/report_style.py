"""The look of the run report: no fonts or scripts from elsewhere, light and dark."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #667085; --paper: #fbfaf7;
  --card: #ffffff; --line: #e4e1d8; --good: #2f855a; --bad: #c2410c; --brand: #b4541a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e1; --soft: #9aa4b2; --paper: #16181d;
  --card: #1e2128; --line: #333842; --good: #68d391; --bad: #fb923c; --brand: #f0a060; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
.brand { color: var(--brand); font-weight: 700; letter-spacing: .04em; margin: 0; }
h1 { margin: .1rem 0 .2rem; font-size: 1.9rem; } h2 { margin: 2.4rem 0 .8rem; font-size: 1.25rem; }
h3 { margin: 0 0 .6rem; font-weight: 500; font-size: 1.05rem; }
table { border-collapse: collapse; width: 100%; background: var(--card); margin-top: 1rem;
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
th, td { padding: .5rem .75rem; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; } th:first-child, td:first-child { text-align: left; }
tbody tr:last-child td { border-bottom: 0; }
.rule, .rank, small { color: var(--soft); font-size: .85rem; }
.search { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem; margin: .8rem 0; }
.search .row { display: grid; grid-template-columns: repeat(5, 1fr); gap: .6rem; }
.search figure { margin: 0; border: 3px solid transparent; border-radius: 8px; overflow: hidden;
  text-align: center; } figure.right { border-color: var(--good); }
.search img { width: 100%; display: block; } figcaption { font-size: .8rem; color: var(--soft); }
.pair { display: grid; grid-template-columns: 200px 1fr; gap: 1.2rem; align-items: start; }
.pair img { border-radius: 8px; } ol { margin: 0; padding-left: 1.4rem; }
li.right { color: var(--good); font-weight: 600; } .rank { margin: .5rem 0 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
.charts figure { margin: 0; background: #fff; color: #1d2430; color-scheme: light;
  border: 1px solid var(--line); border-radius: 10px; padding: .6rem; }
.charts img { width: 100%; height: auto; }
.nopixels { display: grid; place-items: center; min-height: 120px; background: var(--line);
  border-radius: 6px; font-size: .8rem; padding: .4rem; overflow-wrap: anywhere; }
details { margin-top: 2rem; } pre { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 1rem; overflow-x: auto; font-size: .85rem; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; }
  .search .row { grid-template-columns: repeat(3, 1fr); } }
"""
