"""RUN_DIR/report.html: what a run did, on one page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from importlib import resources
from pathlib import Path

from shardwise.report.charts import charts
from shardwise.report.headline import figures, status
from shardwise.report.results import Results, read_results
from shardwise.report.tables import evaluation_table, history, time_table

REPORT = "report.html"

# The browser itself refuses whatever would leave the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(out: Path, say: Callable[[str], None]) -> None:
    """Write the page into `out`. A failure costs the page and one line, never the run."""
    try:
        text = render(out)
        temporary = out / f"{REPORT}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out / REPORT)
    except Exception as error:
        say(f"{REPORT} was not written: {type(error).__name__}: {error}")
    else:
        say(f"report: {out / REPORT}")


def render(out: Path) -> str:
    """The page for a run directory, a function of its run.yaml, metrics.jsonl, evaluations.jsonl and events.jsonl."""
    results = read_results(out)
    title = results.run.model.name if results.run else results.name
    sections = [
        figures(results),
        charts(results),
        _section("Where the time went", time_table(results)),
        _section("Evaluations", evaluation_table(results)),
        _section("History", history(results)),
        _section("The resolved Run", f"<pre>{escape(results.run_text) or 'run.yaml could not be read'}</pre>"),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}: {escape(results.name)}</title>",
            f"<style>{resources.files(__package__).joinpath('page.css').read_text()}</style></head><body>",
            f"<header><h1>{escape(title)}</h1>{status(results)}</header><main>",
            *sections,
            f"</main><footer>{_footer(results)}</footer></body></html>\n",
        ]
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _footer(results: Results) -> str:
    left_out = "".join(
        f" {count} line{'s' * (count > 1)} of {name} could not be read and {'are' if count > 1 else 'is'} left out."
        for name, count in results.unreadable.items()
    )
    return (
        "Made by shardwise from run.yaml, metrics.jsonl, evaluations.jsonl and events.jsonl of "
        f"{escape(results.name)}.{left_out}"
    )
