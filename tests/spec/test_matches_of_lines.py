"""Numbers that a pattern finds in a script's output."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY, quality_of
from carbonopt.core.script_reports import Lines
from carbonopt.spec.matches_of_lines import LONGEST_LINE, Value, find
from carbonopt.spec.quality_source import NoQuality, QualitySource


def matches(pattern: str, path: Path) -> list[tuple[Value | None, Value]]:
    """The last match of each step."""
    return [(step.step, step.values[-1]) for step in find(pattern, path)]


LOSS = quality_of("val_loss", "minimize")


@pytest.mark.parametrize(
    ("pattern", "line", "value"),
    [
        ("loss ([0-9.]+)", "loss 3.1e+02", ("3.1", "3.1e+02")),
        ("loss=-?([0-9.]+)", "step 3 loss=-0.5", ("0.5", "-0.5")),
        ("loss ([0-9.]+)", "loss 1,234.5", ("1", "1,234.5")),
        ("loss ([0-9.]+)", "loss 2,345", ("2", "2,345")),
        ("acc ([0-9]+)", "acc 0,95", ("0", "0,95")),
        ("loss ([0-9.]+)", "loss 0.95,acc 3", "0.95"),
        ("^[0-9]+,([0-9]+)", "12,95", "95"),
        ("^([0-9]+),", "12,95", "12"),
        (r"\[([0-9.]+)", "[95,12]", "95"),
        ("top ([0-9])", "top 12", ("1", "12")),
        ("loss ([0-9.]+)", "loss nan acc 0.3", "nan"),
        ("loss ([0-9]+[.][0-9]+)", "loss -inf", "nan"),
        (r"loss (\S+)", "loss inf", "inf"),
        ("acc ([0-9][.][0-9]{2})", "acc 0.8567", ("0.85", "0.8567")),
        ("loss ([0-9]+)", "loss 150.9", ("150", "150.9")),
        ("loss ([0-9]+)", "loss 150.0", "150"),
        ("loss ([0-9.]+)", "loss 1e400", ("1", "1e400")),
        ("loss ([0-9.]+)", "loss 0x1", ("0", "0x1")),
        ("loss ([0-9.]+)", "loss 0_9", ("0", "0_9")),
        ("loss ([0-9.]+)", "loss 0.93D-01", ("0.93", "0.93D-01")),
        ("loss ([0-9.]+)", "loss 1/10", ("1", "1/10")),
        ("loss ([0-9.]+)", "loss 1.00%", ("1.00", "1.00%")),
        ("loss ([0-9.]+)", "loss 0.98 %", ("0.98", "0.98 %")),
        ("loss ([0-9.]+) *%", "loss 0.98 %", "0.98"),
        ("loss ([0-9.]+) *%?", "loss 0.98%", ("0.98", "0.98%")),
        ("loss ([0-9.]+).*", "loss 0.98%", ("0.98", "0.98%")),
        ("loss ([0-9.]+)", "loss 1.234,5", ("1.234", "1.234,5")),
        ("loss ([0-9.]+)", "loss 1 234.5", ("1", "1 234.5")),
        ("loss ([0-9.]+)", "loss 1'234.5", ("1", "1'234.5")),
        ("loss ([0-9.]+)", "loss 1.5k", ("1.5", "1.5k")),
        ("loss ([0-9.]+)k", "loss 1.5k", "1.5"),
        ("loss ([0-9.]+)[a-z]*", "loss 12ms", ("12", "12ms")),
        ("loss ([0-9.]+)ms", "loss 12ms", "12"),
        ("loss ([0-9.]+)", "loss 1:30", ("1", "1:30")),
        ("loss ([0-9.]+)", "loss 10²", ("10", "10²")),
        ("([0-9.]+) tokens", "3 loss 1 234 tokens", ("234", "1 234")),
        ("([0-9.]+)$", "loss 1/10", ("10", "1/10")),
        ("([0-9.]+)$", "loss \u22120.5", ("0.5", "\u22120.5")),
        (r"\(([0-9]+)", "loss (2,345)", ("2", "2,345")),
        ("^[0-9]+,([0-9.]+)", "3,100.5", "100.5"),
        ("^[0-9]+ ([0-9]+)", "5 128 0.3", "128"),
        ("loss ([0-9.]+)", "loss 0.93 128", "0.93"),
        ("loss: ([0-9.]+)", '{"loss: 0.93", 3}', "0.93"),
        ("acc-([0-9.]+)", "acc-0.5", "0.5"),
        ("^[0-9]+,([0-9.]+)", "3,0.5", "0.5"),
        ("loss ([0-9.e-]+)", "loss 5e-4", "5e-4"),
    ],
)
def test_a_part_of_a_number_is_told_and_no_number_is_none(
    pattern: str, line: str, value: Value, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(f"loss 2.0\ntop 2\nacc 0.1\nloss=0.1\n{line}\n")
    assert matches(pattern, tmp_path / "log")[-1] == (None, value)


def last(tmp_path: Path, line: str, **source: object) -> float | None:
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{line}\n")
    return (
        QualitySource.model_validate(source)
        .read(tmp_path / "log", tmp_path, LOSS, 10)
        .points[-1]
        .value
    )


def test_a_diverged_training_has_no_quality_of_before(tmp_path: Path) -> None:
    pattern = "step (?P<step>[0-9]+) loss (?P<value>[0-9.]+)"
    assert last(tmp_path, "step 2 loss 1.5", pattern=pattern) == 1.5
    assert last(tmp_path, "step 2 loss NaN", pattern=pattern) is None
    with pytest.raises(BadInput, match=r"3\.1e\+02"):
        last(tmp_path, "step 2 loss 3.1e+02", pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"acc: (0\.[0-9]+)", "acc: 0.9123"),
        (r"acc: ([01]\.[0-9]{3})", "acc: 0.912"),
        (r"acc: ([0-9]{2}\.[0-9]{2}) *%", "acc: 91.23 %"),
        (r"loss ([0-9]+\.[0-9]{4}),", "loss 0.1234, acc 1"),
    ],
)
def test_a_pattern_for_some_numbers_alone_finds_nan_as_well(
    pattern: str, line: str, tmp_path: Path
) -> None:
    number = re.search(r"[0-9.]+", line)[0]
    (tmp_path / "log").write_text(f"{line}\n{line.replace(number, 'nan')}\n")
    assert matches(pattern, tmp_path / "log") == [(None, "nan")]
    (tmp_path / "log").write_text(f"{line}\nother nan {number}\n")
    assert matches(pattern, tmp_path / "log") == [(None, number)]


@pytest.mark.parametrize("pattern", [r"acc.*?([0-9.]+)", r"acc: ([0-9.]+)$", r"acc: (\S+)"])
@pytest.mark.parametrize("end", ["\x1b[0m", "\x1b[0m\x1b[K", "\x1b]0;epoch 3\x07"])
def test_a_colour_is_no_part_of_a_line(pattern: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"\x1b[2K\x1b[1;32macc:\x1b[39m \x1b[1m0.5{end}\n")
    assert matches(pattern, tmp_path / "log") == [(None, "0.5")]


def test_a_pattern_may_name_a_colour(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("acc \x1b[32m0.5\x1b[0m\nacc \x1b[31m0.1\x1b[0m\n")
    assert matches(r"acc \x1b\[32m([0-9.]+)", tmp_path / "log") == [(None, "0.5")]


@pytest.mark.parametrize("step", ["1,000", "1e1", "1k", "1.5", "1 000"])
def test_a_step_that_is_taken_in_part_is_refused(step: str, tmp_path: Path) -> None:
    pattern = r"step (?P<step>[0-9]+).* loss (?P<value>\S+)"
    with pytest.raises(BadInput, match=f"takes 1 of '{step}'"):
        last(tmp_path, f"step {step} loss 1.5", pattern=pattern)
    assert last(tmp_path, "step 2/100 loss 1.5", pattern=pattern) == 1.5


@pytest.mark.parametrize("step", ["10²", "²", "x", "-1", "١٢"])
def test_a_step_that_is_no_number_is_refused(step: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="step"):
        last(tmp_path, f"step {step} loss 1.5", pattern=r"step (?P<step>\S+) loss (?P<value>\S+)")


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ('{"acc": 0.9}\n{"acc": null}\n', None),
        ('{"acc": 0.9}\n{"acc": 0.5, "note": "a\u2028b", "step": null}\n', 0.5),
    ],
)
def test_null_is_how_loggers_write_nan(lines: str, value: float | None, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(lines)
    source = QualitySource(file="log.jsonl", key="acc")
    assert source.read(tmp_path / "log", tmp_path, LOSS, 10).points[-1].value == value


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"acc": 0.9, "acc": 0.7}\n')
    with pytest.raises(BadInput, match="'acc' twice"):
        QualitySource(file="log.jsonl", key="acc").read(tmp_path / "log", tmp_path, LOSS, 10)


def test_a_file_may_begin_with_a_byte_order_mark_but_no_number_is_endless(tmp_path: Path) -> None:
    source = QualitySource(file="log.json", key="acc")
    (tmp_path / "log.json").write_text('{"acc": 0.9}', encoding="utf-8-sig")
    assert source.read(tmp_path / "log", tmp_path, LOSS, 10).points[-1].value == 0.9
    (tmp_path / "log.json").write_text(f'{{"acc": {"9" * 5000}}}')
    with pytest.raises(BadInput, match="has 5000") as refused:
        source.read(tmp_path / "log", tmp_path, LOSS, 10)
    assert "sys" not in str(refused.value)


def test_digits_with_an_underscore_are_no_number(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"acc": "0_9"}')
    with pytest.raises(BadInput, match="0_9"):
        QualitySource(file="log.json", key="acc").read(tmp_path / "log", tmp_path, LOSS, 10)


def test_a_number_that_the_end_of_what_is_looked_at_cuts_is_not_taken(tmp_path: Path) -> None:
    log, pattern = tmp_path / "log.txt", "acc ([0-9.]+)"
    log.write_text("acc 0.5".rjust(LONGEST_LINE) + "\n")
    assert matches(pattern, log) == [(None, "0.5")]
    for cut in range(1, 6):
        log.write_text("acc 0.9876".rjust(LONGEST_LINE + cut) + " more\n")
        assert matches(pattern, log) == [(None, ("0.9876"[:-cut], "0.9876"))]
    log.write_text("acc 0.9876".rjust(LONGEST_LINE + 6))
    assert matches(pattern, log) == []


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("acc 0.9\n", encoding="utf-8-sig")
    assert matches("^acc ([0-9.]+)$", log) == [(None, "0.9")]


LACKING = [
    "N/A",
    "n/a",
    "NA",
    "None",
    "null",
    "--",
    "-",
    "diverged",
    "???",
    "failed",
    "-, loss 3",
    "None loss 3",
]


@pytest.mark.parametrize("word", LACKING)
@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("acc ([0-9.]+)", "acc {}"),
        (r"acc: (0\.[0-9]+)", "acc: {}"),
        ("acc=([0-9.]+) *%", "acc={}%"),
    ],
)
def test_a_word_in_the_last_value_s_place_is_no_number(
    pattern: str, line: str, word: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    first, then = line.format("0.5"), line.format(word)
    log.write_text(f"{first}\n{then}\n")
    with pytest.raises(BadInput, match="must find a number"):
        QualitySource(pattern=pattern).read(log, tmp_path, LOSS, 10)
    log.write_text(f"{first}\n{then}\n{first}\n")
    read = QualitySource(pattern=pattern).read(log, tmp_path, LOSS, 10)
    assert [point.value for point in read.points]


def test_a_percentage_that_is_nan_has_diverged(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("acc 50 %\nacc nan\n")
    source = QualitySource(pattern="acc ([0-9.]+) *%", scale=0.01)
    (point,) = source.read(log, tmp_path, LOSS, 10).points
    assert point.value is None


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("is ([0-9.]+)", "Final accuracy is 0.91."),
        ("is ([0-9.]+)", "Final accuracy is 0.91. Saved."),
        ("acc ([0-9.]+)/", "acc 0.91/0.95 (val/train)"),
    ],
)
def test_a_number_ends_where_its_sentence_does(pattern: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line)
    (point,) = QualitySource(pattern=pattern).read(tmp_path / "log", tmp_path, LOSS, 10).points
    assert point.value == 0.91


@pytest.mark.parametrize("number", ["0.91.5", "0.91/0.95", "1.2.3."])
def test_a_part_of_a_version_or_fraction_is_no_number(number: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"acc {number}")
    with pytest.raises(BadInput):
        QualitySource(pattern="acc ([0-9.]+)").read(tmp_path / "log", tmp_path, LOSS, 10)


@pytest.mark.parametrize(
    ("pattern", "first", "then"),
    [
        ("acc ([0-9.]+)", "acc 0.5", "best acc so far saved to model.pt"),
        ("acc ([0-9.]+)", "acc 0.5", "acc - done"),
        ("acc ([0-9.]+)", "acc 0.5", "acc failed to improve"),
        ("loss ([0-9.]+)", "loss 0.5", "loss function: cross-entropy"),
        ("([0-9.]+)$", "acc 0.5", "--\nerror\n---"),
        ("^([0-9.]+)$", "0.5", "---"),
        ("acc ([0-9.]+)", "acc 0.5, best None", "done; errors: None"),
    ],
)
def test_a_line_without_a_value_s_place_hides_no_value(
    pattern: str, first: str, then: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"{first}\n{then}\n")
    (point,) = QualitySource(pattern=pattern).read(log, tmp_path, LOSS, 10).points
    assert point.value == 0.5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"acc": 0.5}\n\n{"acc": 0.6}\n{"acc', "line 4"),
        ('{"acc": 0.5}\n{"acc": }\n{"acc": 0.6}', "line 2"),
        ('{"acc": 0.5,\n "loss": }', "line 2"),
    ],
)
def test_the_line_that_is_no_json_is_named(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=named):
        QualitySource(file=str(path), key="acc").read(path, tmp_path, LOSS, 10)


@pytest.mark.parametrize(
    ("text", "named"),
    [('[{"acc": 0.5}, {"acc": 0.6}]', "a list of 2"), ("{}", "no names"), ("0.5", "only 0.5")],
)
def test_what_a_file_has_instead_of_the_key_is_named(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(NoQuality, match=named):
        QualitySource(file=str(path), key="acc").read(path, tmp_path, LOSS, 10)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"key": "acc"}, '{{"step": {}, "acc": {}}}\n'),
        ({"pattern": r"step (?P<step>[0-9]+) acc (?P<value>\S+)"}, "step {} acc {}\n"),
    ],
)
@pytest.mark.parametrize(
    ("before", "after", "own", "steps"),
    [
        # appended to a file that all trials share
        ([(93, 0.8)], [(93, 0.8), (93, 0.7), (186, 0.9)], "trial", [93, 186]),
        ([(93, 0.8)], [(93, 0.8), (50, 0.7), (93, 0.9)], "trial", [50, 93]),
        # written anew
        ([(93, 0.8)], [(50, 0.7), (93, 0.9), (186, 0.9)], "trial", [50, 93, 186]),
        ([(93, 0.8)], [(93, 0.8), (93, 0.8)], ".", [93]),
        # an earlier attempt's, from whose checkpoint the trial goes on
        ([(50, 0.7)], [(50, 0.7), (93, 0.8), (186, 0.9)], ".", [50, 93, 186]),
    ],
)
def test_what_other_trials_have_left_in_a_file_is_not_read(
    source: dict, line: str, before: list, after: list, own: str, steps: list, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    read_from = QualitySource(file="log", **source)
    file.write_text("".join(line.format(*each) for each in before))
    state = read_from.state(tmp_path, tmp_path / own)
    file.write_text("".join(line.format(*each) for each in after))
    points = read_from.read(file, tmp_path, LOSS, 10, state).points
    assert [point.step for point in points] == steps
    assert points[-1].value == after[-1][1]


STEPS = r"step (?P<step>[0-9]+).* acc (?P<value>[0-9.]+)"


@pytest.mark.parametrize(
    ("pattern", "text", "named"),
    [
        ("acc ([0-9.]+)", "acc 0.1\nval acc 0.5 train acc 0.9\n", "0.5 and 0.9"),
        (
            STEPS,
            "".join(
                f"step {s} {d} acc 0.{s}{n}\n"
                for s in (1, 2, 3)
                for d, n in (("val", 1), ("train", 2))
            ),
            "step 1 comes",
        ),
        (
            STEPS,
            "".join(
                f"step {s} {d} acc 0.{n}{s}\n"
                for s in range(1000)
                for d, n in (("val", 1), ("train", 2))
            ),
            "step [0-9]+ comes",
        ),
    ],
)
def test_values_of_which_none_is_known_to_count_are_refused(
    pattern: str, text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(BadInput, match=named):
        QualitySource(pattern=pattern).read(tmp_path / "log", tmp_path, LOSS, 10)


@pytest.mark.parametrize(
    ("pattern", "text", "value", "lines"),
    [
        ("acc ([0-9.]+)", "epoch 1 acc 0.5\nepoch 2 acc 0.7\nbest acc 0.7\n", 0.7, 3),
        ("acc ([0-9.]+)", "acc 0.7\nbest acc 0.7\n", 0.7, None),
        ("acc ([0-9.]+)", "acc 0.7, best acc 0.7\n", 0.7, None),
        (".*acc ([0-9.]+)", "acc 0.6, best acc 0.7\n", 0.7, None),
        ("acc=([0-9.]+)", "\r 1/2 acc=0.1\r 2/2 acc=0.5\n", 0.5, None),
        ("acc=([0-9.]+)", "\r1/2 acc=0.1\r2/2 acc=0.5\n\r1/2 acc=0.5\r2/2 acc=0.7\n", 0.7, 2),
        # Lightning's bar shows the last epoch's value until the next evaluation
        (
            r"Epoch (?P<step>[0-9]+): .*acc=(?P<value>[0-9.]+)",
            "\rEpoch 1: 1/2 acc=0.1\rEpoch 1: 2/2 acc=0.5\n\rEpoch 2: 1/2 acc=0.5\rEpoch 2: 2/2 acc=0.7\n",
            0.7,
            None,
        ),
        (STEPS, "step 1 acc 0.5\nstep 2 acc 0.6\nstep 2 best acc 0.7\n", 0.7, 2),
        (STEPS, "step 1 acc 0.5\nstep 1 acc 0.5\nstep 2 acc 0.7\nstep 2 acc 0.7\n", 0.7, None),
    ],
)
def test_the_last_line_counts_and_the_number_of_lines_is_told(
    pattern: str, text: str, value: float, lines: int | None, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text, newline="")
    read = QualitySource(pattern=pattern).read(tmp_path / "log", tmp_path, LOSS, 10)
    assert read.points[-1].value == value
    assert (None if read.lines is None else read.lines.count) == lines
    assert read.lines is None or text.endswith(f"{read.lines.last}\n")


def test_json_lines_with_several_values_are_told_and_the_training_s_refused(tmp_path: Path) -> None:
    rows = [{"split": split, "acc": acc} for split, acc in (("train", 0.9), ("val", 0.5))]
    path, source = tmp_path / "log.jsonl", QualitySource(file="log.jsonl", key="acc")
    path.write_text("\n".join(map(json.dumps, rows)))
    read = source.read(tmp_path / "log", tmp_path, LOSS, 10)
    assert read.lines == Lines(2, *map(json.dumps, rows)) and read.points[-1].value == 0.5
    path.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(BadInput, match="'split' is 'train'"):
        source.read(tmp_path / "log", tmp_path, LOSS, 10)


def test_a_file_that_begins_as_before_is_read_whole_unless_a_line_ended_there(
    tmp_path: Path,
) -> None:
    source = QualitySource(file="result.txt", pattern="([0-9.]+)")
    file = tmp_path / "result.txt"
    file.write_text("0.9")
    state = source.state(tmp_path, tmp_path / "trial")
    file.write_text("0.91")
    (point,) = source.read(file, tmp_path, LOSS, 10, state).points
    assert point.value == 0.91
    file.write_text("acc: 0.9\n")
    state = source.state(tmp_path, tmp_path / "trial")
    file.write_text("acc: 0.9\nno value\n")
    with pytest.raises(NoQuality, match="has added"):
        source.read(file, tmp_path, LOSS, 10, state)


def test_rows_of_other_data_have_no_value_in_a_table_of_json_lines(tmp_path: Path) -> None:
    rows = [
        {"step": 10 * epoch, "split": split, "acc": accuracy}
        for epoch in (1, 2, 3)
        for split, accuracy in (("val", 0.5 + epoch / 10), ("train", None))
    ]
    (tmp_path / "log").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = QualitySource(file="log", key="acc")
    points = source.read(tmp_path / "log", tmp_path, LOSS, 10).points
    assert [(point.step, point.value) for point in points] == [(10, 0.6), (20, 0.7), (30, 0.8)]


def test_the_line_of_nan_is_shown_as_it_was_printed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("acc: nan\nacc: 0.5\n")
    lines = QualitySource(pattern="acc: ([0-9.]+)").read(tmp_path / "log", tmp_path, LOSS, 9).lines
    assert lines is not None and (lines.first, lines.last) == ("acc: nan", "acc: 0.5")


@pytest.mark.parametrize(
    ("source", "is_loss"),
    [
        ({"key": "experiment.val_loss", "file": "f"}, True),
        ({"key": "eval_ppl_from_loss", "file": "f"}, False),
        ({"pattern": "step [0-9]+ val loss ([0-9.]+)"}, True),
        ({"pattern": r"perplexity \(val loss\) = ([0-9.]+)"}, False),
        ({"pattern": r"loss [0-9.]+ \| ([0-9.]+)"}, False),
        ({"pattern": r"e\^loss ([0-9.]+)"}, False),
    ],
)
def test_a_loss_is_told_by_its_name(source: dict, is_loss: bool) -> None:
    with pytest.raises(BadInput) if is_loss else contextlib.nullcontext():
        QualitySource(**source).check_quality(PERPLEXITY)


@pytest.mark.parametrize(
    ("pattern", "text", "unmatched"),
    [
        ("reward: ([0-9.]+)", "1 reward: 1.1\n2 reward: -0.3\n", "2 reward: -0.3"),
        (r"acc: (\d\d\.\d)%", "acc: 87.2%\nacc: 100.0%\nend\n", "acc: 100.0%"),
        (r"loss (0\.\d+)", "loss 0.5\nloss 1.02\n", "loss 1.02"),
        (r"loss (0\.\d+)", "loss 0.5\nloss 1.02\nloss 0.4\n", ""),  # the last one is known
        (r"ppl (\d+\.\d+)", "ppl 1.5\nppl 1,234.5\n", "ppl 1,234.5"),
        (r"lr [0-9.]+ acc ([0-9.]+)", "lr 0.001 acc 0.8\nlr 5e-05 acc 0.9\n", "lr 5e-05 acc 0.9"),
        ("loss   ([0-9.]+)", "loss   9.5\nloss  10.5\n", "loss  10.5"),
        (r"step (?P<step>\d+) acc (?P<value>\S+)", "step 900 acc 1\nstep 1e+03 acc 2\n", None),
        # A pattern that names a number, or another place in the line, means no other one.
        ("class 3: f1 ([0-9.]+)", "class 3: f1 0.5\nclass 4: f1 0.6\n", ""),
        ("^accuracy ([0-9.]+)", "accuracy 0.5\n  accuracy 0.6\n", ""),
        ("cat ([0-9.]+)", "cat 0.5\ndog 0.6\n", ""),
    ],
)
def test_a_later_line_of_the_same_form_that_does_not_match_is_noted(
    pattern: str, text: str, unmatched: str | None, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    last = find(pattern, log)[-1]
    assert last.unmatched == ("step 1e+03 acc 2" if unmatched is None else unmatched)
    source = QualitySource(pattern=pattern)
    with pytest.raises(BadInput) if last.unmatched else contextlib.nullcontext():
        source.read(log, tmp_path, LOSS, 9)


def test_a_number_beside_the_value_may_be_nan(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("loss 0.5 acc 0.85\nloss nan acc 0.09\nval 1.#INF\n")
    assert matches("loss [0-9.]+ acc ([0-9.]+)", log) == [(None, "0.09")]
    assert matches("val ([0-9.]+)", log) == [(None, "nan")]


def test_a_progress_bar_between_two_lines_hides_neither(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("fold 1 acc 0.9\n 50%|###   |\rfold 2 acc 0.8\n", newline="")
    (found,) = find("acc ([0-9.]+)", log)
    assert (found.lines, found.first) == (2, "fold 1 acc 0.9")
    log.write_text("acc 0.1\r 50%|###   |\racc 0.8\n", newline="")
    (found,) = find("acc ([0-9.]+)", log)
    assert (found.lines, found.values) == (1, ["0.8"])
