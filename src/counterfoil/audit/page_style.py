"""The look of the audit page, on top of that of the run report."""

STYLE = """
.skip { position: absolute; left: -999px; } .skip:focus { left: 1rem; top: 1rem; z-index: 9;
  background: var(--card); padding: .5rem 1rem; border-radius: 8px; }
.counts { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; padding: 0; }
.counts div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .6rem 1rem; min-width: 8.5rem; } .counts dt { color: var(--soft); font-size: .85rem; }
.counts dd { margin: 0; font-size: 1.5rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.note { color: var(--soft); margin: .3rem 0; max-width: 75ch; }
.tools { position: sticky; top: 0; z-index: 2; background: var(--paper); padding: .8rem 0;
  border-bottom: 1px solid var(--line); display: flex; flex-wrap: wrap; gap: .5rem .8rem;
  align-items: center; }
.tools fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .4rem; }
.tools legend { position: absolute; left: -999px; }
.tools input[type=search], .tools select { font: inherit; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: .35rem .6rem; }
.tools input[type=search] { flex: 1 1 12rem; min-width: 0; }
.chip { position: relative; border: 1px solid var(--line); border-radius: 999px;
  background: var(--card); padding: .25rem .8rem; cursor: pointer; font-size: .9rem; }
.chip input { position: absolute; opacity: 0; inset: 0; margin: 0; cursor: pointer; }
.chip:has(:checked) { background: var(--ink); color: var(--paper); border-color: var(--ink); }
.chip:has(:focus-visible), .finding:focus-visible, .tools :focus-visible {
  outline: 3px solid var(--brand); outline-offset: 2px; }
.tabs { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1rem 0 0; }
.tabs[hidden] { display: none; }
.tabs button { font: inherit; color: inherit; cursor: pointer; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; padding: .4rem .9rem; }
.tabs button[aria-pressed=true] { border-color: var(--brand); color: var(--brand);
  font-weight: 650; }
#shown { color: var(--soft); font-size: .9rem; margin: .8rem 0 0; }
.finding { display: grid; grid-template-columns: 190px minmax(0, 1fr); gap: 1.1rem;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem;
  margin: .8rem 0; scroll-margin-top: 7rem; } .finding[hidden] { display: none; }
.finding img { width: 100%; display: block; border-radius: 8px; }
.finding h3 { margin: 0 0 .4rem; font-size: 1.15rem; overflow-wrap: anywhere; }
.finding header { display: flex; flex-wrap: wrap; gap: .3rem .8rem; align-items: baseline;
  color: var(--soft); font-size: .85rem; margin-bottom: .4rem; }
.bar { display: inline-block; width: 5rem; height: .5rem; border-radius: 4px;
  background: var(--line); overflow: hidden; vertical-align: middle; margin-right: .4rem; }
.bar i { display: block; height: 100%; background: var(--bad); }
.false-negative .bar i { background: var(--soft); }
.finding ul { margin: .3rem 0; padding-left: 1.2rem; } .finding dl { margin: .6rem 0 0;
  display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem .8rem; }
.finding dt { color: var(--soft); } .finding dd { margin: 0; overflow-wrap: anywhere; }
mark { background: color-mix(in srgb, var(--bad) 25%, transparent); color: inherit;
  border-radius: .25em; padding: 0 .15em; text-decoration: underline wavy var(--bad); }
.unknown { color: var(--soft); border-bottom: 2px dotted var(--soft); }
ins { color: var(--good); text-decoration: none; font-weight: 600; }
.row { display: flex; flex-wrap: wrap; gap: .5rem; align-items: flex-end; }
.small { width: 110px; } .small .nopixels { min-height: 60px; }
@media (max-width: 640px) { .finding { grid-template-columns: 1fr; }
  .finding > .own { max-width: 260px; } .finding dl { grid-template-columns: 1fr; gap: 0; }
  .finding dd { margin-bottom: .4rem; } .tools { position: static; } }
@media print { .tools, .tabs, .skip { display: none; } .finding { break-inside: avoid; } }
"""
