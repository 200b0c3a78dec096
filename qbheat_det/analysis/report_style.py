# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How reports look: one column on a phone, light or dark as the reader's screen is, and on paper.

Wide pictures and tables scroll in themselves, so that the page never does sideways; a shade at the
edge of a table says that there is more of it.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --quiet: #63676e;
  --line: #e4e4e1; --accent: #1f6feb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121316; --card: #1a1c20; --ink: #e8e9eb; --quiet: #9aa0a8;
    --line: #2c2f35; --accent: #6ea8fe;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%;
  overflow-wrap: anywhere;
}
main { max-width: 70rem; margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2rem); }
h1 {
  margin: 0; font-size: clamp(1.7rem, 4.5vw, 2.4rem); line-height: 1.2; font-weight: 650;
  letter-spacing: -0.02em; text-wrap: balance;
}
h2 { margin: 0 0 0.75rem; font-size: 1.3rem; font-weight: 620; letter-spacing: -0.01em; }
p { margin: 0 0 1rem; max-width: 44rem; }
.lead { margin-top: 0.75rem; color: var(--quiet); font-size: 1.1rem; }
.figures {
  display: flex; flex-wrap: wrap; gap: 1px; margin: 2rem 0 0; overflow: hidden;
  background: var(--line); border: 1px solid var(--line); border-radius: 12px;
}
.figures div { flex: 1 1 9rem; padding: 1.1rem 1.25rem; background: var(--card); }
dt { color: var(--quiet); font-size: 0.85rem; }
dd { margin: 0; }
.value {
  font-size: 1.7rem; line-height: 1.3; font-weight: 640; letter-spacing: -0.02em;
  white-space: nowrap;
  font-variant-numeric: tabular-nums;
}
.note { color: var(--quiet); font-size: 0.8rem; }
nav { margin-top: 2rem; }
nav ol { margin: 0; padding-left: 1.4rem; columns: 16rem; column-gap: 2.5rem; }
nav li { padding: 0.15rem 0; break-inside: avoid; color: var(--quiet); }
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: 0.2em; }
section { margin-top: clamp(2.5rem, 6vw, 4rem); scroll-margin-top: 1rem; }
.grid {
  display: grid; gap: 1.25rem; margin: 1.25rem 0; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
  grid-auto-flow: dense;
}
figure {
  margin: 0; overflow: hidden; break-inside: avoid;
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
figure.wide { grid-column: 1 / -1; }
.pan { position: relative; overflow: auto; }
.pan label { display: block; cursor: zoom-in; }
.pan input { position: absolute; opacity: 0; }
.pan input:focus-visible + picture img { outline: 2px solid var(--accent); outline-offset: -2px; }
.wide img { min-width: 38rem; }
img { display: block; width: 100%; height: auto; }
.pan :checked + picture img {
  width: max(100%, var(--full, 0px)); max-width: none; cursor: zoom-out;
}
figcaption { padding: 0.65rem 0.9rem; color: var(--quiet); font-size: 0.875rem; line-height: 1.45; }
.scroll {
  overflow-x: auto; margin: 1.25rem 0;
  background:
    linear-gradient(to left, var(--page) 30%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll;
}
table { border-collapse: collapse; min-width: min(100%, 24rem); font-size: 0.95rem; }
th, td {
  overflow-wrap: normal;
  padding: 0.5rem 1.5rem 0.5rem 0; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums;
}
th:first-child { text-align: left; }
tr > :last-child { padding-right: 0; }
tbody th:first-child, thead th:first-child {
  position: sticky; left: 0; background: var(--page); overflow-wrap: anywhere;
  min-width: min(11rem, 38vw);
}
th.words, td.words { text-align: left; }
.prose th, .prose td { text-align: left; vertical-align: top; }
.prose td { white-space: normal; min-width: 14rem; }
thead th { color: var(--quiet); font-size: 0.85rem; font-weight: 500; }
tbody th { font-weight: 500; }
pre {
  margin: 1.25rem 0; padding: 1rem 1.25rem; overflow-x: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  font: 0.875rem/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
footer {
  margin-top: clamp(2.5rem, 6vw, 4rem); padding-top: 1.25rem;
  border-top: 1px solid var(--line); color: var(--quiet); font-size: 0.875rem;
}
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
@media print {
  figure, pre, .figures { border-color: #ccc; }
  section { break-inside: auto; }
  h2 { break-after: avoid; }
  .wide img { min-width: 0; }
  .pan :checked + picture img { width: 100%; }
  .pan, .scroll { overflow: visible; }
  pre { white-space: pre-wrap; }
}
"""
