"""One HTML file of a BenchReport: everything is inside, it opens offline, and it is whole without a script.

Its plots are drawn here, as SVG, and by no plotting library: one that draws in the browser is megabytes of script in each
report, and shows nothing where scripts are off; one that draws pictures knows neither the reader's colour scheme nor the
width of the page. All texts of a report may come from elsewhere (a model's name, a peer's error): html.py escapes each, and
the page forbids itself to load or to run anything, should that ever fail.
"""

from __future__ import annotations

from ..report import BenchReport
from . import plain, ratios, tables, time
from .html import Markup, Part, join, tag
from .marks import definitions
from .style import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(report: BenchReport) -> str:
    """The report as one HTML document (UTF-8 where it is written)."""
    sections = [s for s in _sections(report) if s[2] is not None]
    links = (tag("li", tag("a", words, href=f"#{name}")) for name, words, _ in sections)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", report.title),
        tag("style", Markup(CSS)),
    )
    body = tag(
        "body",
        definitions(),
        tag(
            "header",
            tag("h1", report.title),
            tag("p", _where(report), class_="muted"),
            tag("nav", tag("ul", *links), aria_label="Parts of this page"),
        ),
        tag(
            "main", *(tag("section", tag("h2", words), content, id=name) for name, words, content in sections)
        ),
        tag("footer", tag("p", f"Made from a report of schema {report.schema_}, {report.created}.")),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _where(report: BenchReport) -> Markup:
    about = report.environment
    cores = about.get("cores")
    parts = [
        str(about.get("processor") or "an unknown processor"),
        f"{cores} core{'' if cores == 1 else 's'}" if cores else "",
        str(about.get("gpu") or ""),
        f"torch {about['torch']}" if about.get("torch") else "",
        report.created,
    ]
    return join((tag("span", p, class_="nowrap") for p in parts if p), " · ")


def _sections(report: BenchReport) -> list[tuple[str, str, Markup | None]]:
    def all_of(*parts: Markup | None) -> Markup | None:
        found: list[Part] = [p for p in parts if p is not None]
        return join(found) if found else None

    return [
        ("cost", "What privacy costs", all_of(ratios.headline(report), ratios.each_case(report))),
        ("cases", "All cases", tables.cases(report) if report.cases else None),
        ("time", "Where the time goes", all_of(time.phases(report), time.waiting(report))),
        ("layers", "By layer", time.by_layer(report)),
        ("size", "Backends and model sizes", ratios.by_size(report)),
        ("accuracy", "Accuracy and compression", ratios.by_accuracy(report)),
        ("offline", "Offline and online", time.against_offline(report)),
        ("plaintext", "Plaintext baselines", plain.baselines(report)),
        ("loads", "Loads, by MLPerf LoadGen", plain.loads(report)),
        ("energy", "Energy", plain.energy(report) if report.cases or report.loads else None),
        ("failures", "Failures", tables.failures(report)),
        ("words", "What the words mean", tables.definitions()),
        ("environment", "Command and environment", tables.environment(report)),
    ]
