"""Documents of anything: what the renderers make of one that has nothing to do with training."""

import json

from browser import browser

from carbonopt.core.quality import ACCURACY
from carbonopt.report.caveats import caveat
from carbonopt.report.document import (
    Caveat,
    Code,
    Document,
    Level,
    Paragraph,
    RowFilter,
    Section,
    Step,
    Steps,
    Table,
    Tile,
    num,
    table,
    word,
)
from carbonopt.report.render import html, latex, markdown, terminal

TREES = (("oak", 21.5), ("ash", None), ("<b>fir</b>", 40.25))


def made(count: int = 5) -> Document:
    """Steps that fall: a tree is tall enough up to its height."""
    trees = table(
        "trees",
        "Trees",
        TREES,
        [
            word("Name", lambda row: row[0]),
            num("Height", lambda row: row[1], "{:.1f}".format, strong=lambda row: row[0] == "oak"),
            None,
        ],
        long=True,
        filter=RowFilter(
            label="Kind",
            groups=("a", "b", "a"),
            values_label="reaches",
            values=tuple(row[1] for row in TREES),
        ),
        paper="trees",
    )
    steps = (
        Step(begins=50.0, alone=False, number="50", label="above 40.25", text="No tree."),
        Step(begins=40.25, alone=False, number="40.25", label="21.5 to 40.25", text="The fir."),
        Step(begins=21.5, alone=False, number="21.5", label="to 21.5", text="The oak."),
    )
    slider = Steps(
        label="At least",
        steps=steps,
        own=20.0,
        chosen=2,
        lowest=0.0,
        rising=False,
        refusal="0 or more.",
    )
    blocks = (
        Paragraph(text="Some are *tall*."),
        slider,
        trees,
        Code(title="Raw", text="```", language="txt"),
    )
    return Document(
        name="forest",
        headline="Fir",
        details=("one line",),
        tiles=(Tile(label="Tallest", text="40.3", note="of 3"),),
        caveats=tuple(
            Caveat(key=f"k{number}", level=Level.NOTE, text=f"Beware {number}.", numbers={})
            for number in range(count)
        ),
        sections=(Section(key="trees-section", title="Trees", blocks=blocks),),
    )


def test_a_table_sorts_and_marks_as_its_columns_say() -> None:
    (trees,) = made().tables()
    assert isinstance(trees, Table) and [column.label for column in trees.columns] == [
        "Name",
        "Height",
    ]
    assert [[cell.text for cell in row] for row in trees.rows] == [
        ["oak", "21.5"],
        ["ash", "–"],
        ["<b>fir</b>", "40.2"],
    ]
    assert [row[1].sort for row in trees.rows] == [21.5, None, 40.25]
    assert [row[1].strong for row in trees.rows] == [True, False, False]


def test_each_format_escapes_and_shows_three_caveats_before_the_others() -> None:
    document = made()
    page, text, tex = (
        html.render(document),
        markdown.render(document, {}),
        latex.tables(document)["trees"],
    )
    assert "<b>fir" not in page and "<b>fir" not in text and r"<b>fir<\slash" not in tex
    assert r"Some are \*tall\*." in text and "````txt\n```\n````" in text
    assert (
        text.index("Beware 2.")
        < text.index("## Trees")
        < text.index("## More caveats")
        < text.index("Beware 3.")
    )
    assert page.index("Beware 2.") < page.index("All caveats: 2 more") < page.index("Beware 3.")
    assert (
        terminal.render(document).splitlines()[-1]
        == "  and 2 more caveats, in the report and in --json"
    )
    shown = json.loads(json.dumps(document.as_json()))
    assert [block["kind"] for block in shown["sections"][0]["blocks"]] == [
        "paragraph",
        "steps",
        "table",
        "code",
    ]
    assert len(shown["caveats"]) == 5 and shown["caveats"][0]["level"] == "note"


def test_a_caveat_has_its_level_its_numbers_and_a_plural() -> None:
    few = caveat(ACCURACY, "few_trials", completed=1)
    assert (few.level, few.numbers) == (Level.WARNING, {"completed": 1}) and "1 trial " in few.text


def test_a_slider_over_steps_that_fall_and_rows_that_reach_them(tmp_path) -> None:
    path = tmp_path / "index.html"
    path.write_text(html.render(made()), encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        tab.open(path)
        for typed, said, rows in (
            ("20", "The oak.", 2),
            ("21.5", "The oak.", 2),
            ("30", "The fir.", 1),
            ("45", "No tree.", 0),
        ):
            tab.run(
                f"(one => {{ one.value = '{typed}'; one.dispatchEvent(new Event('input')); }})"
                "(document.getElementById('step-number'))"
            )
            tab.run(
                "(one => { one.checked = true; one.dispatchEvent(new Event('change')); })"
                "(document.querySelector('[data-filter=value]'))"
            )
            assert tab.run("document.querySelector('#step-answer span').textContent") == said
            assert tab.run("document.querySelectorAll('#trees tbody tr').length") == rows
        assert tab.complaints() == []
