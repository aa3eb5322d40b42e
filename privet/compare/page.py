"""The comparison as one self-contained page: it works offline, printed, in light and in dark, and asks nobody.

Everything that comes from a run is escaped, and the page's policy forbids every request to elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from privet.compare.lines import Comparable, Comparison, Line, show
from privet.compare.plots import MISSING, Plot
from privet.compare.runs import Run
from privet.compare.style import CSS, SCRIPT
from privet.compare.table import Column, columns, count_text, setting_columns, size
from privet.compare.verdict import findings, headline

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
_SHOWN_FAILURES = 20
_SHOWN_NODES = 20


def page(comparison: Comparison, plots: Sequence[Sequence[Plot]] | None) -> str:
    """Return the page's HTML.

    Parameters
    ----------
    plots : sequence of sequences of Plot, or None
        The plots of every set; None where they could not be drawn.
    """
    body = [
        "<header>",
        f"<h1>{_counted(comparison)}</h1>",
        _tag("p", headline(comparison), "headline"),
        *(_tag("p", _capital(text) + ".", "warning") for text in comparison.warnings),
        "</header>",
        "<main>",
        *_findings(comparison),
        *_table(comparison),
        *_plots(comparison, plots),
        *_methods(comparison),
        *_apart(comparison.apart),
        "</main>",
        "<footer>",
        "<p class='quiet'>Made by <code>privet compare</code> from the files of the runs; nothing was run again. The "
        "epsilons hold for adding or removing one row of one node; a row is not a person, and choosing settings on "
        "private data is not in them.</p>",
        "</footer>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'>",
            "<head>",
            "<meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            "<title>Comparison of runs - Privet</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            *body,
            f"<script>{SCRIPT}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


# --- what it shows -------------------------------------------------------------------------------


def _counted(comparison: Comparison) -> str:
    runs = sum(len(line.runs) for line in comparison.lines)
    apart = f", {_many(len(comparison.apart), 'run')} without a result" if comparison.apart else ""
    sets = " &middot; ".join(dict.fromkeys(escape(group.title) for group in comparison.sets))
    return f"{_many(runs, 'run')} of {_many(len(comparison.lines), 'configuration')}{apart}" + (
        f" &middot; {sets}" if sets else ""
    )


def _findings(comparison: Comparison) -> list[str]:
    out = []
    for group in comparison.sets:
        if len(comparison.sets) > 1:
            out.append(_tag("h3", group.title))
        out.append(_list(findings(group)))
    if comparison.lines:
        out.append(
            "<p class='quiet'>&ldquo;Level&rdquo; means that a difference is below its standard error, "
            "&ldquo;ahead&rdquo; or &ldquo;behind&rdquo; that it is at least twice as large. The error holds the test "
            "rows (binomial, for shares) and, with several seeds, their scatter. Many comparisons at once make one "
            "that looks clear by chance more likely.</p>"
        )
    return out


def _table(comparison: Comparison) -> list[str]:
    if not comparison.lines:
        return []
    head = columns(comparison)
    settings = setting_columns(comparison)
    out = [
        "<h2>Results</h2>",
        _rows(head, comparison.lines, sortable=True),
        "<p class='quiet'>Scores are means &plusmn; one sample standard deviation over runs that differ in their seed "
        "alone. Epsilon spent is the largest over nodes and runs. Numbers up / down are the adapter numbers of one "
        "client and round; bytes are those of all messages of a whole run, heads, one-off material and repeated "
        "requests included; bytes and seconds are means over runs. Scores named global or personal, if there are any, "
        "are means over the clients.</p>",
        *(_tag("p", _capital(text) + ".", "quiet") for text in comparison.remarks),
    ]
    if settings:
        keys = head[: 2 + len(comparison.telling)]
        out += [
            "<h3>Other settings that differ</h3>",
            _rows([*keys, *settings], comparison.lines, sortable=True),
        ]
    return out


def _rows(shown: Sequence[Column], lines: Iterable[Line], *, sortable: bool) -> str:
    out = [f"<div class='scroll'><table{' class=sortable' if sortable else ''}><thead><tr>"]
    for column in shown:
        kind = " class=n" if column.number else ""
        title = escape(column.title).replace(" %", "&nbsp;%")
        out.append(f"<th scope=col{kind}><button type=button>{title}</button></th>")
    out.append("</tr></thead><tbody>")
    for line in lines:
        cells = []
        for column in shown:
            kind = " class=n" if column.number else ""
            value = column.value(line)
            text = escape(column.cell(line))
            if text == "not private":
                text = f"<span class=alarm>{text}</span>"
            cells.append(f'<td{kind} data-v="{escape("" if value is None else str(value))}">{text}</td>')
        out.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*out, "</tbody></table></div>"])


def _plots(comparison: Comparison, plots: Sequence[Sequence[Plot]] | None) -> list[str]:
    if not comparison.lines:
        return []
    out = ["<h2>Plots</h2>"]
    if plots is None:
        return [*out, _tag("p", _capital(MISSING) + ".")]
    for group, drawn in zip(comparison.sets, plots, strict=True):
        if len(comparison.sets) > 1:
            out.append(_tag("h3", group.title))
        out += [_figure(plot, group) for plot in drawn]
    if not any(plots):
        out.append("<p>No run has a score, so there is nothing to draw.</p>")
    return out


def _figure(plot: Plot, group: Comparable) -> str:
    text = escape(f"{plot.title}, {group.title}")
    dark, light = (base64.b64encode(data).decode() for data in (plot.dark, plot.light))
    return (
        "<figure><picture>"
        f"<source media='screen and (prefers-color-scheme: dark)' srcset='data:image/png;base64,{dark}'>"
        f'<img alt="{text}" src="data:image/png;base64,{light}">'
        f"</picture><figcaption><strong>{escape(plot.title)}.</strong> {escape(plot.caption)}</figcaption></figure>"
    )


# --- one method ----------------------------------------------------------------------------------


def _methods(comparison: Comparison) -> list[str]:
    if not comparison.lines:
        return []
    out = ["<h2>One by one</h2>"]
    for group in comparison.sets:
        for line in group.lines:
            place = f", {group.title}" if len(comparison.sets) > 1 else ""
            out += _line(comparison, line, place)
    return out


def _line(comparison: Comparison, line: Line, place: str) -> list[str]:
    first = line.first
    seeds = ", ".join(show(s) for s in line.seeds)
    settings = [
        f"{escape(key)} = {escape(show(line.setting(key)))}"
        for key in [*comparison.telling, *comparison.differing]
        if key in first.settings
    ]
    failures = [f for run in line.runs for f in run.failures]
    void = sum(run.void_rounds for run in line.runs)
    out = [
        _tag("h3", f"{line.label}, {line.budget.text}{place}"),
        "<dl>",
        *_term("Privacy", _privacy(line)),
        *_term("Communication", _communication(line)),
        *_term("Rounds", [_rounds_text(line, void, len(failures))]),
        *_term("Settings that differ", ["<br>".join(settings)] if settings else []),
        *_term(
            "Runs",
            [f"{_many(len(line.runs), 'run')}, seed{'s' if len(line.seeds) > 1 else ''} {escape(seeds)}"],
        ),
        "</dl>",
    ]
    if failures:
        shown = [
            f"round {f.get('round')}, {f.get('phase')}: {f.get('node') or 'a node'}: {f.get('reason')}"
            for f in failures[:_SHOWN_FAILURES]
        ]
        rest = len(failures) - len(shown)
        more = [f"and {rest} more, in the runs' summary.json"] if rest else []
        out.append(
            _details(f"{_many(len(failures), 'failed reply', 'failed replies')}", _list([*shown, *more]))
        )
    if first.private or first.target is not None:
        out.append(_details("Epsilon of every node", _nodes(line)))
    files = _list([f"{r.path} (seed {show(r.seed)})" for r in line.runs])
    versions = ", ".join(f"{k} {v}" for k, v in first.versions.items())
    config = f"<pre>{escape(first.config_text)}</pre>"
    note = (
        "<p class=quiet>Of the first run; the others differ in their seed alone.</p>"
        if len(line.runs) > 1
        else ""
    )
    made = _tag("p", f"Made with {versions}.", "quiet") if versions else ""
    return [*out, _details("Resolved configuration", files + note + config + made)]


def _privacy(line: Line) -> list[str]:
    """What was promised and spent, and every remark of ``privacy.json`` as it stands there."""
    run = line.first
    out = []
    if not line.budget.private:
        out.append("<span class=alarm>Not private.</span>")
    if run.target is not None:
        spent = line.largest(lambda r: r.epsilon)
        delta = "" if run.delta is None else f", delta {run.delta:g}"
        largest = (
            "nothing is recorded as spent"
            if spent is None
            else f"spent {spent:.3f}, the most of any node and run"
        )
        words = f"Promised epsilon {run.target:g}{delta}; {largest}"
        by = run.privacy.get("accountant")
        out.append(escape(words + (f" ({str(by).upper()} accountant)" if by else "") + "."))
        out.append(escape(f"Neighbouring data sets: {run.adjacency or 'not said'}."))
        if run.privacy.get("mechanism"):
            out.append(escape(f"Mechanism: {run.privacy['mechanism']}."))
        if run.privacy.get("excludes_tuning"):
            out.append("Choosing hyper-parameters on private data is not in this epsilon.")
    texts = dict.fromkeys(str(text) for r in line.runs for text in _sequence(r.privacy.get("warnings")))
    return [*out, *(f"<span class=alarm>{escape(text)}</span>" for text in texts)]


def _communication(line: Line) -> list[str]:
    up, down = line.largest(lambda r: r.upload_numbers), line.largest(lambda r: r.download_numbers)
    whole = line.mean(lambda r: r.bytes)
    head = line.mean(lambda r: sum(n for k, n in r.totals.items() if k.endswith("_bytes_head")))
    once = line.mean(lambda r: sum(n for k, n in r.totals.items() if k.endswith("_bytes_once")))
    again = line.mean(lambda r: sum(n for k, n in r.totals.items() if k.startswith("requery_bytes")))
    parts = [f"heads {size(head)}", f"one-off material {size(once)}"]
    if again:
        parts.append(f"repeated requests {size(again)}")
    return [
        escape(f"{count_text(up)} adapter numbers up and {count_text(down)} down per client and round."),
        escape(f"{size(whole)} in all over a run ({', '.join(parts)})."),
    ]


def _rounds_text(line: Line, void: int, failures: int) -> str:
    rounds = sum(len(r.rounds) for r in line.runs)
    what = [
        f"{void} void" if void else "none void",
        f"{failures} failed replies" if failures else "no failed reply",
    ]
    each = f" over {_many(len(line.runs), 'run')}" if len(line.runs) > 1 else ""
    return escape(f"{rounds}{each}: {', '.join(what)}.")


def _nodes(line: Line) -> str:
    """Per node: the largest epsilon over the runs."""
    found: dict[str, dict[str, Any]] = {}
    for run in line.runs:
        for node in _sequence(run.privacy.get("nodes")):
            if not isinstance(node, Mapping):
                continue
            entry = found.setdefault(
                str(node.get("node")), {"examples": node.get("examples"), "steps": 0, "epsilon": 0.0}
            )
            for key in ("steps", "epsilon"):
                value = node.get(key)
                if isinstance(value, (int, float)):
                    entry[key] = max(entry[key], value)
    ranked = sorted(found.items(), key=lambda item: -item[1]["epsilon"])
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class=n>{escape(show(n['examples']))}</td><td class=n>{n['steps']}</td>"
        f"<td class=n>{n['epsilon']:.4f}</td></tr>"
        for name, n in ranked[:_SHOWN_NODES]
    )
    rest = len(ranked) - _SHOWN_NODES
    more = (
        _tag("p", f"The {_SHOWN_NODES} nodes with the largest epsilon, of {len(ranked)}.", "quiet")
        if rest > 0
        else ""
    )
    return (
        "<div class=scroll><table><thead><tr><th scope=col>node</th><th scope=col class=n>rows</th>"
        "<th scope=col class=n>steps</th><th scope=col class=n>epsilon</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _apart(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return []
    return ["<h2>Runs without a result</h2>", _list([f"{run.path}: {run.problem}" for run in runs])]


# --- small parts ---------------------------------------------------------------------------------


def _tag(name: str, text: str, kind: str = "") -> str:
    return f"<{name}{f' class={kind}' if kind else ''}>{escape(text)}</{name}>"


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(_tag('li', text) for text in texts)}</ul>" if texts else ""


def _term(name: str, parts: Sequence[str]) -> list[str]:
    """A term of a definition list; its parts are HTML."""
    return [f"<dt>{escape(name)}</dt><dd>{'<br>'.join(parts)}</dd>"] if parts else []


def _details(name: str, inner: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{inner}</details>"


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _many(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
