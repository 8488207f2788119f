"""The report as Markdown, for a repository or a pull request: the page's parts in the page's order. User text can't
become markup."""

import re

from carbonopt.report.stages import LONGER_RUNS
from carbonopt.report.view import Part, Table, View, shown_directions

NOTHING_TO_DRAW = "There is nothing to draw: no trial has both an evaluation and energy."
NO_TRIAL = "No trial has been started."

_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!$@])")


def escape(text: str) -> str:
    """Text on one line that no Markdown dialect reads as markup, HTML included."""
    one_line = " ".join(shown_directions(text).split())
    entities = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", entities)


def render(view: View, picture: str | None) -> str:
    """`picture`: where the front's figure lies, relative to the text; None: there is nothing to draw."""
    parts = [
        f"# {escape(view.name)}",
        f"**{escape(view.headline)}**",
        escape(view.lead),
        *([] if view.met else map(escape, view.answer)),
        "\n".join(f"- {tile.label}: **{escape(tile.text)}** ({escape(tile.note)})" for tile in view.tiles),
        "## Pareto front: emissions against perplexity",
        NOTHING_TO_DRAW if picture is None else f"![Pareto front]({picture})",
        escape(view.figure_note),
        "### Another target",
        "\n".join(f"- {escape(step.label)}: {escape(step.text)}" for step in view.targets),
        _captioned(view.trade_offs),
        *_part("What each parameter does", view.influence),
        *_part("The batch size", view.batch),
        *_part("Diminishing returns", view.returns),
    ]
    parts += ["## Where the energy went", *(_captioned(table) for table in (view.by_phase, view.by_state))]
    parts += [escape(view.closure), _captioned(view.by_stage), _captioned(view.speeds)]
    parts += [*map(escape, view.stopped_early)]
    parts += map(_captioned, (view.by_component, view.readings, view.components))
    if view.longer_runs.sentences:
        parts += _part(LONGER_RUNS, view.longer_runs, level=3)
    parts += _part("The same joules elsewhere and at other hours", view.regions)
    parts.append(escape(view.no_repricing) if view.repricing is None else _captioned(view.repricing))
    against = _part("Against the baseline", view.comparison)
    parts += [against[0], *(map(escape, view.answer) if view.met else ()), *against[1:]]
    if view.configuration is not None:
        parts += ["### Configuration", _table(view.configuration), escape(view.ready_to_use)]
    if view.sentence is not None:
        parts += ["### For a paper", f"> {escape(view.sentence)}"]
    parts += ["## Every trial", _table(view.trials) or NO_TRIAL]
    if view.constant_settings:
        parts.append(f"The same in every trial: {escape(view.constant_settings)}.")
    parts += [escape(view.audit), _captioned(view.repeats)]
    parts += ["## Provenance", _table(view.provenance)]
    parts += ["### The study file", _fenced(view.study_file)]
    parts += ["## What these figures can't tell", "\n".join(f"- {escape(limit)}" for limit in view.limits)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _part(title: str, part: Part, level: int = 2) -> list[str]:
    return [f"{'#' * level} {title}", *map(escape, part.sentences), *map(_captioned, (*part.tables, *part.folded))]


def _captioned(table: Table) -> str:
    if not table.rows:
        return ""
    return "\n\n".join(part for part in (f"{escape(table.caption)}:", _table(table), escape(table.note)) if part)


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = [escape(column.label) for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    body = [[f"**{escape(cell.text)}**" if cell.strong else escape(cell.text) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text = shown_directions(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"
