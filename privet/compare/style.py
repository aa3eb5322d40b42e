"""The look of the comparison's page, and the script that sorts its table."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --ink: #222222; --quiet: #5c6166; --rule: #d9dcdf; --faint: #f5f6f7; --alarm: #8a3b00;
  --alarm-ground: #fff4e8;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #1b1d1f; --ink: #e4e4e0; --quiet: #a3a8ad; --rule: #3a3d40; --faint: #242729; --alarm: #ffb987;
    --alarm-ground: #33261a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 68rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1, h2, h3 { line-height: 1.25; text-wrap: balance; }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--quiet); margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
ul { padding-left: 1.2rem; }
li { margin: .25rem 0; }
.headline { font-size: 1.55rem; line-height: 1.3; font-weight: 600; max-width: 46rem; margin: 0 0 1.25rem;
  text-wrap: pretty; }
.quiet, figcaption { color: var(--quiet); font-size: .875rem; }
.warning { border-left: 4px solid var(--alarm); background: var(--alarm-ground); padding: .6rem .9rem;
  max-width: 46rem; margin: .75rem 0; }
.alarm { color: var(--alarm); font-weight: 600; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap;
  vertical-align: baseline; }
th:first-child, td:first-child { padding-left: 0; }
.n { text-align: right; }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; vertical-align: bottom; white-space: normal; }
thead button { all: unset; cursor: pointer; font: inherit; }
thead button::after { content: "\\2195"; color: var(--quiet); font-weight: 400; padding-left: .3em; }
th[aria-sort=ascending] button::after { content: "\\2191"; color: inherit; }
th[aria-sort=descending] button::after { content: "\\2193"; color: inherit; }
thead button:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
tbody tr:hover { background: var(--faint); }
figure { margin: 1.5rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { max-width: 46rem; margin-top: .5rem; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .3rem 1.25rem; max-width: 52rem;
  margin: .75rem 0; font-size: .9375rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font: .8125rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--faint); padding: .75rem 1rem; overflow-x: auto; margin: .5rem 0; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
footer { margin-top: 3.5rem; }
@media print {
  @page { margin: 16mm 14mm; }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  table { font-size: 7.5pt; }
  th, td { padding: .25rem .4rem; white-space: normal; }
  thead button::after { content: none; }
  .scroll { overflow: visible; }
  figure, tr, dl, .warning { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.v;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const numbers = !isNaN(x) && !isNaN(y);
      const order = numbers ? x - y : x.localeCompare(y);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
