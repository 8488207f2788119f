"""The page in a real browser."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from browser import Tab, browser
from documents import markdown_of
from facts_by_hand import BATCH, INFLUENCE, REGIONS, RETURNS, comparison
from small_studies import SAME, many, pruned, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.core.format import percent_text
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import TrialState
from carbonopt.report.assemble import whole
from carbonopt.report.document import Extract, Paragraph, Steps
from carbonopt.report.paper.references import measured_with
from carbonopt.report.render.html import render
from carbonopt.report.sections.front_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report

EVIL = "<script>alert(1)</script>"
ROWS = (
    "Array.from(document.querySelectorAll('#all-trials tbody tr'), row =>"
    " row.cells[%d].textContent)"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A study of 250 trials with every analysis, and its page."""
    data = many(250)
    rec = recommend(data)
    made = {
        "influence": INFLUENCE,
        "batch": BATCH,
        "diminishing_returns": RETURNS,
        "regions": REGIONS,
    }
    looked_at = StudyView(data, comparison=comparison(rec.trial, rec.baseline.trial), **made)
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(render(whole(looked_at)), encoding="utf-8")
    return data, path


ACTIVE = "(one => one.id || one.dataset.filter || one.tagName)(document.activeElement)"


def text_of(selector: str) -> str:
    return f"document.querySelector('{selector}').textContent"


def change(tab: Tab, name: str, assignment: str, event: str = "input") -> None:
    """As a person does it: the value, then the event that tells of it."""
    act = f"one => {{ one.{assignment}; one.dispatchEvent(new Event('{event}')); }}"
    tab.run(f"({act})(document.querySelector({json.dumps(name)}))")


def set_target(tab: Tab, value: str) -> None:
    change(tab, "#step-number", f"value = '{value}'")


def quiet(tab: Tab) -> bool:
    assert tab.complaints() == []  # which says what they were
    return True


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.slow
def test_nothing_leaves_the_page_and_nothing_complains(tab, page, width):
    _, path = page
    tab.open(path, width=width)
    assert tab.run("document.querySelectorAll('#interactive .main-svg').length") > 0
    assert quiet(tab)
    assert [address for address in tab.requests() if not address.startswith("data:")] == [
        path.as_uri()
    ]
    assert tab.run("document.documentElement.scrollWidth") <= width


CONTRAST = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(linear)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    const colour = parts(getComputedStyle(one).backgroundColor);
    return colour.length === 3 || !one.parentElement ? colour : ground(one.parentElement);
  };
  const ratios = [];
  for (const one of document.querySelectorAll("main *:not(#interactive *)")) {
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()) || !one.checkVisibility()) continue;
    const style = getComputedStyle(one);
    const pair = [parts(one.ownerSVGElement ? style.fill : style.color), ground(one)].map(light).sort((a, b) => b - a);
    if (!one.disabled) ratios.push((pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return [ratios.length, Math.min(...ratios)];
})()
"""  # WCAG 2.2's contrast ratio of every text, at its worst


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(tab, page, scheme):
    _, path = page
    tab.open(path, scheme=scheme)
    texts, worst = tab.run(CONTRAST)
    assert texts > 500 and worst >= 4.5


def test_nothing_moves_while_the_page_loads(tab, page):
    _, path = page
    tab.open(path)
    tab.run(
        "seen = []; new PerformanceObserver(list => seen.push(...list.getEntries().map(one =>"
        " one.value))).observe({type: 'layout-shift', buffered: true}); new Promise(done =>"
        " setTimeout(done, 300))"
    )
    assert sum(tab.run("seen")) < 0.01


def test_on_paper_the_picture_stands_in_and_controls_are_gone(tab, page, tmp_path):
    _, path = page
    tab.open(path, scheme="dark")
    tab.send("Emulation.setEmulatedMedia", media="print")
    hidden = ["#interactive", ".steps", ".filters", ".pager button"]
    seen = tab.run(
        f"{json.dumps(hidden)}.map(one => document.querySelector(one).checkVisibility())"
    )
    assert seen == [False] * 4
    assert tab.run("document.querySelector('.on-paper').checkVisibility()")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    tab.send("Emulation.setEmulatedMedia", media="")


def test_the_keyboard_reaches_all_controls_from_top_to_bottom(tab, page):
    _, path = page
    tab.open(path)
    focused = []
    for _ in range(60):
        tab.press("Tab")
        focused.append(tab.run(ACTIVE))
    wanted = ["step-number", "step-reset", "step-range", "text", "group", "value"]
    assert [name for name in dict.fromkeys(focused) if name in wanted] == wanted
    assert focused[focused.index("value") + 1 :].count("BUTTON") > 5  # on to the columns' heads


@pytest.mark.slow
def test_targets_that_overtake_each_other_leave_no_error(tab, page):
    data, path = page
    tab.open(path)
    for _ in range(5):
        tab.run(
            "for (let target = 4; target < 8; target += 0.05) {"
            " const field = document.getElementById('step-number'); field.value = String(target);"
            " field.dispatchEvent(new Event('input', { bubbles: true })); }"
        )
    set_target(tab, "6")
    rec = recommend(data, 6.0)
    star = "document.getElementById('interactive').data.find(trace => trace.meta === 'recommended')"
    tab.wait_for(f"{star}.y[0] === {json.dumps(rec.value)}")
    assert quiet(tab)


def test_the_target_gives_what_recommend_says(tab, page):
    data, path = page
    tab.open(path)
    perplexities = sorted(record.quality.value for record in data.records if record.quality.value)
    targets = [
        1.0,
        perplexities[0],
        math.nextafter(perplexities[0], 0),
        perplexities[-1],
        1000.0,
        5.8,
    ]
    targets += [round(4.5 + 0.2 * number, 2) for number in range(14)]
    plot = StudyView(data).plot
    for target in targets:
        set_target(tab, repr(target))
        rec = recommend(data, target)
        text = tab.run(text_of("#step-answer span"))
        line = tab.run("document.getElementById('interactive').layout.shapes[0].y0")
        assert line == target
        place = (
            [None, None] if rec.trial is None else [rec.emissions_kg_co2e * plot.per_kg, rec.value]
        )
        star = (
            "document.getElementById('interactive').data.find(trace => trace.meta ==="
            " 'recommended')"
        )
        tab.wait_for(
            f"(one => one.x[0] === {json.dumps(place[0])} && one.y[0] ==="
            f" {json.dumps(place[1])})({star})"
        )
        if rec.trial is None:
            assert text == "No trial meets such a target."
            continue
        assert text.startswith(f"Trial {rec.trial} (")
        if rec.trial != rec.baseline.trial:
            assert f"saves {percent_text(rec.saving_fraction)} against" in text.replace(
                "\N{NO-BREAK SPACE}", " "
            )
    assert quiet(tab)


def test_a_target_outside_the_frame_is_named_at_its_edge(tab, page):
    _, path = page
    tab.open(path)
    edge = "document.getElementById('interactive').layout.annotations[0]"
    for target, visible, at in (("1e9", True, 1), ("5.8", False, None), ("1", True, 0)):
        set_target(tab, target)
        tab.wait_for(f"{edge}.visible === {json.dumps(visible)}")
        if visible:
            assert tab.run(f"[{edge}.text, {edge}.y]") == [
                f"target {target}, outside the frame",
                at,
            ]
    assert quiet(tab)


def test_the_page_opens_with_the_name_of_a_target_outside_the_frame(tab, tmp_path):
    path = tmp_path / "index.html"
    data = study(trial(0, 1e-3, 5.9), trial(1, 4e-3, 4.0), target=1e9)
    path.write_text(render(whole(StudyView(data))), encoding="utf-8")
    tab.open(path)
    notes = "[...document.querySelectorAll('#interactive .annotation-text')]"
    tab.wait_for(f"{notes}.length === 1")
    assert tab.run(f"{notes}[0].textContent") == "target 1.000e+09, outside the frame"
    low, high = tab.run("document.getElementById('interactive').layout.yaxis.range")
    assert 3 < low < 4.0 and 5.9 < high < 7
    assert quiet(tab)


def test_the_star_is_drawn_where_the_answer_is(tab, page):
    """On the front's mark of that trial; away where nothing is recommended, and back again."""
    data, path = page
    tab.open(path)
    front = recommend(data).pareto_front
    middle = (
        "(one => { const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y +"
        " box.height / 2]; })"
    )
    traces = "[...document.querySelectorAll('.subplot.xy .scatterlayer .trace')]"
    star = f"{traces}.at(-1).querySelectorAll('.point')"
    of_front = f"{traces}.find(one => one.querySelectorAll('.point').length === {len(front)})"
    assert tab.run(f"dots = {of_front}.querySelectorAll('.point'); dots.length") == len(front)
    for target in (6.5, 1.0, 5.0, 5.8):
        set_target(tab, repr(target))
        trial = recommend(data, target).trial
        if trial is None:
            tab.wait_for(f"{star}.length === 0")
            continue
        near = "([x, y], [a, b]) => Math.hypot(x - a, y - b) < 1.5"
        tab.wait_for(
            f"{star}.length === 1 && ({near})({middle}({star}[0]),"
            f" {middle}(dots[{front.index(trial)}]))"
        )


def test_the_slider_goes_over_the_answers_by_keys(tab, page):
    data, path = page
    (steps,) = (
        block.steps for block in section(StudyView(data)).blocks if isinstance(block, Steps)
    )
    tab.open(path)
    tab.run("range = document.getElementById('step-range'); range.focus()")
    tab.press("Home")
    said = []
    for _ in steps:
        said.append(
            tab.run(
                "[range.getAttribute('aria-valuetext'),"
                " document.getElementById('step-number').value]"
            )
        )
        tab.press("ArrowRight")
    assert said == [[step.label, step.number] for step in steps]
    assert len(said) > 5
    for (_, number), step in zip(said, steps, strict=True):  # each number lies in its own range
        set_target(tab, number)
        assert tab.run(text_of("#step-answer span")) == step.text
    tab.run("document.getElementById('step-reset').click()")
    assert tab.run("document.getElementById('step-number').value") == "5.8"
    set_target(tab, "0.5")
    assert tab.run(text_of("#step-answer")) == f"Perplexity is {PERPLEXITY.bounds_text}."


def test_trials_are_sorted(tab, page):
    data, path = page
    tab.open(path)
    complete = sorted(record.quality.value for record in data.records if record.quality.value)
    last = [
        record.evals[-1].value
        for record in data.records
        if record.evals and not record.quality.value
    ]
    expected = [f"{value:#.4g}" for value in sorted([*complete, *last])]
    tab.run("document.querySelectorAll('#all-trials th button')[2].click()")
    shown = [text.partition(" ")[0] for text in tab.run(ROWS % 2)]
    assert shown == expected[:100]
    assert (
        tab.run("document.querySelectorAll('#all-trials th')[2].getAttribute('aria-sort')")
        == "ascending"
    )
    tab.run("document.querySelectorAll('#all-trials th button')[2].click()")
    assert [text.partition(" ")[0] for text in tab.run(ROWS % 2)] == expected[::-1][:100]
    tab.run(
        "for (const _ of [1, 2]) document.querySelector('.pager[data-for=all-trials]"
        ' [data-turn="1"]\').click()'
    )
    none = sum(not record.evals for record in data.records)
    assert tab.run(ROWS % 2)[-none:] == ["–"] * none and none > 0  # last both ways
    assert tab.run(text_of(".pager[data-for=all-trials] span")) == "201–250 of 250"


def test_trials_are_filtered(tab, page):
    data, path = page
    tab.open(path)

    def choose(name: str, value: str, event: str = "change") -> list[str]:
        change(tab, f"[data-filter={name}]", value, event)
        return tab.run(ROWS % 0)

    infeasible = [
        str(record.trial) for record in data.records if record.state is TrialState.INFEASIBLE
    ]
    options = tab.run(
        "Array.from(document.querySelector('[data-filter=group]').options, one => one.textContent)"
    )
    assert options == ["all", "complete", "pruned", "infeasible", "diverged"]
    assert choose("group", "value = '2'") == infeasible
    choose("group", "value = ''")
    meeting = [
        str(record.trial) for record in data.records if record.meets(data.config.target.at())
    ]
    assert choose("value", "checked = true") == meeting and meeting
    set_target(tab, "5.2")
    fewer = [
        str(record.trial) for record in data.records if record.meets(data.config.target.at(5.2))
    ]
    assert tab.run(ROWS % 0) == fewer and 0 < len(fewer) < len(meeting)
    assert choose("text", "value = 'Recommended'", "input") == []  # which misses 5.2
    choose("value", "checked = false")
    assert tab.run(ROWS % 0) == [str(recommend(data).trial)]
    assert choose("text", "value = 'no such words'", "input") == []
    assert tab.run(text_of(".pager[data-for=all-trials] span")) == "none"


def test_a_click_on_a_mark_shows_its_trial(tab, page):
    data, path = page
    tab.open(path)
    tab.run("document.getElementById('interactive').scrollIntoView()")
    box = (
        "document.querySelector('.subplot.xy .scatterlayer .trace:last-child"
        " .point').getBoundingClientRect()"
    )
    x, y = tab.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
    tab.move(x, y)
    assert f"Trial {recommend(data).trial}" in tab.wait_for(
        "document.querySelector('.hoverlayer').textContent"
    )
    tab.click(x, y)
    shown = tab.wait_for("document.getElementById('details').innerText")
    assert (
        f"Trial\n{recommend(data).trial}\n" in shown
        and "learning_rate" in shown
        and "The same in every trial" in shown
    )


@pytest.mark.slow
def test_sections_without_anything_to_show_are_not_there(tab, tmp_path):
    data = study(pruned(0), pruned(1))
    write_report(data, tmp_path)
    tab.open(tmp_path / "index.html", width=390)
    text = tab.run("document.body.innerText")
    for sentence in (
        "trials stopped early, the target out of reach",
        "No trial meets such a target.",
    ):
        assert sentence in text
    shown = tab.run(
        "Array.from(document.querySelectorAll('h2[id], h3[id]'), heading => heading.id)"
    )
    sections = ("front", "comparison", "influence", "energy", "trials", "provenance")
    assert shown == [f"section-{key}" for key in sections]
    assert quiet(tab)


@pytest.mark.slow
def test_ten_thousand_trials_stay_light_and_quick(tab, tmp_path):
    data = many(10_000)
    path = tmp_path / "index.html"
    path.write_text(render(whole(StudyView(data, influence=INFLUENCE))), encoding="utf-8")
    assert path.stat().st_size < 8e6
    tab.open(path)
    assert (
        1000 < tab.run("document.querySelectorAll('#interactive .point').length") < 4000
    )  # one where many lie on one another
    assert tab.run(text_of(".pager[data-for=all-trials] span")) == "1–100 of 10,000"
    took = (
        "(act => Math.min(...[1, 2, 3, 4].map(() => { const start = performance.now(); act();"
        " document.body.offsetHeight; return performance.now() - start; })))"
    )
    search = (
        "const one = document.querySelector('[data-filter=text]'); one.value = 'front';"
        " one.dispatchEvent(new Event('input'))"
    )
    sort = "document.querySelectorAll('#all-trials th button')[3].click()"
    for act in (search, sort, search.replace("front", "")):
        assert tab.run(f"{took}(() => {{ {act}; }})") < 100  # ms, layout included


@pytest.mark.parametrize("records", [(), (trial(0),)], ids=["no trial", "one trial"])
@pytest.mark.slow
def test_small_studies_have_a_page_without_complaints(tab, tmp_path, records):
    write_report(study(*records), tmp_path)
    tab.open(tmp_path / "index.html")
    assert quiet(tab)


@pytest.mark.slow
def test_names_stay_text(tab, tmp_path):
    data = study(trial(0), trial(1, 2e-3, 4.0), trial(2, **SAME), name=EVIL)
    provenance = data.provenance.model_copy(update={"study_file": f"{EVIL}\n# %_&$ </script>\n"})
    write_report(data.model_copy(update={"provenance": provenance}), tmp_path)
    tab.open(tmp_path / "index.html")
    assert tab.run("document.querySelectorAll('script').length") == 3
    assert EVIL in tab.run(text_of(".eyebrow"))
    assert "# %_&$ </script>" in tab.run(text_of("body"))
    assert "dialog" not in json.dumps(tab.events) and quiet(tab)


# ------------------------------------------------------------------------------------------------
# what a reader takes along

BUTTON, SAVES, EXTRACT = "button[data-copies]", "button[data-saves]", "#extract"
NOTE = text_of(".extract [role=status]")
HOSTILE = f"</pre></details>{EVIL}\n\t<img src=x onerror=alert(1)> &amp; \\u{{1}} \"' 𝄞\n"


def test_a_button_copies_the_sentence_and_what_it_was_measured_with(tab, page):
    data, path = page
    tab.open(path)
    expected = tab.run(text_of(EXTRACT))
    tab.press_on(BUTTON)
    assert tab.wait_for(NOTE) == "Copied."
    assert tab.pasted() == expected
    text, _, bibtex = expected.partition("\n\n")
    assert text == tab.run(text_of("blockquote")).replace("\N{NO-BREAK SPACE}", " ")
    assert bibtex == measured_with(data)
    assert re.findall(r"@\w+\{([^,]+),", bibtex) == ["carbonopt", "courty2024codecarbon", "nvml"]
    assert quiet(tab)


def test_where_a_page_may_not_copy_the_text_is_selected(tab, page):
    _, path = page
    tab.open(path)
    tab.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.press_on(BUTTON)
    assert tab.wait_for(NOTE)
    selected = tab.run("getSelection().toString()")
    assert selected.split() == tab.run(text_of(EXTRACT)).split() != []
    assert tab.run(f"document.querySelector('{EXTRACT}').checkVisibility()")
    assert quiet(tab)


def test_the_figure_is_saved_as_an_svg_of_its_own(tab, page, tmp_path):
    _, path = page
    tab.open(path)
    text = tab.saved(SAVES, tmp_path / "figure-pareto.svg")
    picture = ElementTree.fromstring(text)
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = (float(picture.attrib[name].removesuffix("pt")) for name in ("width", "height"))
    assert [0, 0, width, height] == [float(end) for end in picture.attrib["viewBox"].split()]
    assert not re.search(r"var\(|currentColor", text)
    assert quiet(tab)


@pytest.mark.slow
def test_hostile_text_is_copied_and_never_run(tab, page, tmp_path):
    data, _ = page
    document = whole(StudyView(data))
    sections = []
    for part in document.sections:
        blocks = part.blocks
        if part.key == "citation":
            extract = Extract(title=EVIL, text=HOSTILE, picture_name='"><b>', svg="")
            blocks = (Paragraph(text=EVIL, style="quote", extract=extract),)
        sections.append(part.model_copy(update={"blocks": blocks}))
    path = tmp_path / "index.html"
    path.write_text(render(document.model_copy(update={"sections": tuple(sections)})))
    tab.open(path)
    tab.press_on(BUTTON)
    assert tab.wait_for(NOTE) == "Copied."
    assert tab.pasted() == HOSTILE
    assert tab.run(f"document.querySelectorAll('{SAVES}').length") == 0
    assert quiet(tab)


@pytest.mark.slow
def test_other_formats_have_nothing_of_it(page):
    data, _ = page
    document = whole(StudyView(data))
    assert sum("extract" in part for part in map(str, document.as_json()["sections"])) == 0
    assert "@misc" not in markdown_of(data)
