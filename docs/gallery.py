"""The entries of docs/gallery.md, made from the reports that they show.

`<!-- report: text-to-sql -->` in the page stands for the headline, the critical caveats and the
picture of `reports/text-to-sql`, and a link to the whole report.
"""

import json
import re
from pathlib import Path
from typing import Any

from carbonopt.core.format import escape_markdown

REPORTS = Path(__file__).parents[1] / "reports"
MARKER = re.compile(r"^<!-- report: (\S+) -->$", re.MULTILINE)
_PICTURE = re.compile(r"!\[([^\]]*)\]\(((?:paper/figure-pareto|figure-steps)\.png)\)")


def with_reports(markdown: str) -> str:
    """Return a page with reports' entries in the markers' places."""
    return MARKER.sub(lambda marker: entry(marker[1]), markdown)


def entry(name: str) -> str:
    """Return what the gallery shows of a report.

    Raises:
        ValueError: if the report has no picture of its Pareto front or its steps, or no saving.
    """
    report = f"../reports/{name}/report.md"
    picture = _PICTURE.search((REPORTS / name / "report.md").read_text(encoding="utf-8"))
    if picture is None:
        raise ValueError(f"{report} must show figure-pareto.png or figure-steps.png, but doesn't.")
    (data,) = (REPORTS / name / "data").glob("[pr]*.json")  # of a pipeline or of a study
    document = json.loads(data.read_text(encoding="utf-8"))["document"]
    critical = [
        escape_markdown(it["text"]) for it in document["caveats"] if it["level"] == "critical"
    ]
    return "\n\n".join(
        [
            headline_sentence(document),
            "\n".join(f"- Critical: {text}" for text in critical),
            f"![{picture[1]}](../reports/{name}/{picture[2]})",
            f"[The whole report of {name}]({report})",
        ]
    )


# The spread of a saving and its baseline: a detail in reports of before 2026-11-25, since then the
# note of a tile.
_SPREAD = re.compile(
    r"Saving: (?P<spread1>.+); against (?P<baseline1>.+)\.$"
    r"|Saving on a run: against (?P<baseline2>[^:]+): (?P<spread2>[^;]+)"
)


def headline_sentence(document: dict[str, Any]) -> str:
    """Return the saving of a report in one sentence.

    Raises:
        ValueError: if the report has none.
    """
    saving = re.match(r"([\d.]+ % (?:less|more) CO2e) ", document["headline"])
    said = [
        *document["details"],
        *(f"{t['label']}: {t['note']}" for t in document.get("tiles", ())),
    ]
    known = next(filter(None, map(_SPREAD.match, said)), None)
    if saving is None or known is None:
        raise ValueError(f"a report must have a saving, but says {document['headline']!r}.")
    parts = known.groupdict()
    spread, baseline = (parts[f"{name}1"] or parts[f"{name}2"] for name in ("spread", "baseline"))
    return f"A run of the recommendation emits **{saving[1]}** than {baseline} ({spread})."
