"""Values that a user's script may report, and those that only look like numbers."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from carbonopt.core.errors import BadInput
from carbonopt.core.quality import ACCURACY, PERPLEXITY
from carbonopt.core.script_reports import (
    Lines,
    check_data,
    evaluation,
    number,
    printed_evaluations,
    whole,
)


@pytest.mark.parametrize(
    "value",
    [
        np.complex64(0.9 + 3j),
        0.9 + 0j,
        torch.tensor(0.9 + 0j),
        np.bool_(True),
        np.array(True),
        torch.tensor(True),
        b"0.9",
        bytearray(b"0.9"),
        np.array("0.9"),
        np.timedelta64(1),
    ],
)
def test_only_real_numbers_are_qualities_and_counts(value: object) -> None:
    for read in (lambda: number("accuracy", value), lambda: whole("count", value, 1)):
        with pytest.raises(BadInput, match="number"):
            read()


def test_numbers_of_any_library_are_read() -> None:
    values = [np.float16(0.5), np.array(0.5), torch.tensor(0.5), Decimal("0.5"), 0.5]
    assert [number("accuracy", value) for value in values] == [0.5] * len(values)
    assert number("accuracy", torch.tensor(0.5, dtype=torch.bfloat16)) == 0.5
    assert number("accuracy", np.int8(1)) == number("accuracy", torch.tensor(1)) == 1.0


@pytest.mark.parametrize(
    ("value", "shown", "of_percent"), [(1.0000001, "1.0000001", False), (93.0, "0.93", True)]
)
def test_a_share_above_1_is_shown_with_the_digits_that_exceed_it(
    value: float, shown: str, of_percent: bool
) -> None:
    with pytest.raises(BadInput, match=shown) as refused:
        evaluation(ACCURACY, {"accuracy": value}, None, 1)
    assert ("percent" in str(refused.value)) == of_percent


@pytest.mark.parametrize("key", ["accuracy", "count", "step"])
def test_a_printed_line_has_each_key_once(key: str) -> None:
    line = '{"accuracy": 0.9, "count": 5, "step": 3, "KEY": 1}'.replace("KEY", key)
    with pytest.raises(BadInput, match=f"'{key}' twice"):
        printed_evaluations(line, ACCURACY, 10)


def printed(*points: tuple[int | None, float]) -> str:
    steps = ("" if step is None else f', "step": {step}' for step, _ in points)
    lines = (
        f'{{"accuracy": {value}{step}}}' for (_, value), step in zip(points, steps, strict=True)
    )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("points", "named"),
    [
        ([(100, 0.5), (100, 0.7)], "step 100 comes with 0.5 and with 0.7"),
        ([(100, 0.5), (None, 0.6), (100, 0.6), (100, 0.7)], "step 100 comes with 0.5 and with 0.6"),
        ([(50, 0.5), (100, 0.6), (50, 0.7), (100, 0.8)], "step 50 comes after step 100"),
        ([(50, 0.5), (100, 0.6), (50, 0.5), (100, 0.8)], "step 100 comes after step 100"),
        ([(50, 0.5), (100, 0.6), (50, 0.5), (75, 0.8)], "step 75 comes after step 100"),
        ([(50, 0.1), (100, 0.1), (50, 0.1), (100, 0.1)], "step 50 comes after step 100"),
        ([(50, 0.5), (50, 0.9), (100, 0.6), (100, 0.95)], "step 50 comes with 0.5 and with 0.9"),
        (
            [(50, 0.5), (50, 0.9), *((s, 0.1) for s in range(60, 99)), (100, 0.6), (100, 0.95)],
            "step 50",
        ),
    ],
)
def test_printed_steps_are_those_of_the_whole_training(points: list, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        printed_evaluations(printed(*points), ACCURACY, 10)


@pytest.mark.parametrize(
    ("points", "step"),
    [
        ([(100, 0.7), (100, 0.7)], 100),
        ([(50, 0.5), (100, 0.6), (100, 0.7)], 100),
        ([(100, 0.5), (100, 0.6), (None, 0.7)], 10),
        ([(100, 7.0), (50, 0.7)], 50),
        # saved at 50, cut at 150, went on
        ([(50, 0.5), (100, 0.6), (150, 0.65), (100, 0.6), (150, 0.65), (200, 0.7)], 200),
    ],
)
def test_the_last_printed_line_counts(points: list, step: int) -> None:
    (last,) = printed_evaluations(printed(*points), ACCURACY, 10).points
    assert (last.step, last.value) == (step, 0.7)


VAL, TRAIN = '"split": "val", "accuracy": 0.75}', '"split": "train", "accuracy": 0.9}'


@pytest.mark.parametrize(
    "lines",
    [
        [f"{{{VAL}", f"{{{TRAIN}"],
        ['{"step": 10, "accuracy": 0.5}', f'{{"step": 20, {VAL}', f'{{"step": 20, {TRAIN}'],
    ],
)
def test_the_training_s_value_behind_another_data_s_is_refused(lines: list[str]) -> None:
    with pytest.raises(BadInput, match="'split' is 'train', behind one of 'val'"):
        printed_evaluations("\n".join(lines), ACCURACY, 10)
    lines[-2:] = lines[:-3:-1]
    read = printed_evaluations("\n".join(lines), ACCURACY, 10)
    assert ([point.value for point in read.points], read.lines.last) == ([0.75], lines[-1])


@pytest.mark.parametrize(
    ("earlier", "last", "is_refused"),
    [
        ({"meta": {"split": "test"}}, {"meta": {"split": "train"}}, True),
        ({"stage": "validation"}, {"stage": "fit"}, True),
        ({"stage": "warmup"}, {"stage": "train"}, False),
    ],
)
def test_what_follows_an_evaluation_s_value_may_not_be_the_training_s(
    earlier: dict, last: dict, is_refused: bool
) -> None:
    with pytest.raises(BadInput) if is_refused else contextlib.nullcontext():
        check_data([earlier, last])


@pytest.mark.parametrize("step", ["", ', "step": 9'])
def test_lines_with_several_values_of_one_evaluation_are_told(step: str) -> None:
    lines = [f'{{"fold": {fold}, "accuracy": 0.{fold}{step}}}' for fold in (5, 6, 7)]
    before = '{"accuracy": 0.1, "step": 3}\n'
    read = printed_evaluations(before + "\n".join(lines), ACCURACY, 10)
    assert read.lines == Lines(3, lines[0], lines[2])
    assert printed_evaluations("\n".join(lines[:1] * 2), ACCURACY, 10).lines is None


@pytest.mark.parametrize("value", [1.1e100, -1e300, float("inf"), float("nan")])
def test_a_value_that_would_overflow_counts_as_infinite(value: float) -> None:
    loss = replace(PERPLEXITY, name="loss", value_of_mean="identity", lowest=-float("inf"))
    assert evaluation(loss, {"loss": value}, None, 1).value is None
    assert evaluation(loss, {"loss": -1e99}, None, 1).value == -1e99


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_a_text_s_own_end_of_line_hides_no_later_evaluation(sign: str) -> None:
    said = f'{{"accuracy": 0.1}}\r\n{{"note": "a{sign}b", "accuracy": 0.9}}\r\n'
    (last,) = printed_evaluations(said, ACCURACY, 10).points
    assert last.value == 0.9


@pytest.mark.parametrize(
    "last",
    [
        '\x1b[32m{"accuracy": 0.75}\x1b[0m',
        '\x1b[2K{"accuracy": \x1b[1m0.75\x1b[0m}',
        '\r 50%|#####     | 1/2 [00:01<00:01,  1.00it/s]{"accuracy": 0.75}',
        'epoch: 3it [1:00:01, ?it/s, loss=0.1] {"accuracy": 0.75}',
    ],
)
def test_a_line_in_colours_or_behind_a_progress_bar_is_the_last_one(last: str) -> None:
    (point,) = printed_evaluations(f'{{"accuracy": 0.25}}\n{last}\n', ACCURACY, 10).points
    assert point.value == 0.75
    (of_nan,) = printed_evaluations(
        f'{{"accuracy": 0.25}}\n{last.replace("0.75", "NaN")}\n', ACCURACY, 10
    ).points
    assert of_nan.value is None


@pytest.mark.parametrize(
    "later",
    [
        'INFO:root:{"accuracy": 0.95}',
        '2026-01-01 12:00:00 {"accuracy": 0.95}',
        "{'accuracy': 0.95}",
        "{'accuracy': np.float64(0.95)}",
        '0: {"accuracy": 0.95}',
        '{\n  "loss": 0.1,\n  "accuracy": 0.95\n}',
        '{"accuracy": 0.95} done',
        '[{"accuracy": 0.95}]',
        "{'accuracy': nan}",
        "{'loss': 0.1, 'accuracy': '95%'}",
    ],
)
def test_a_later_value_in_another_form_is_not_passed_over(later: str) -> None:
    with pytest.raises(BadInput, match="accuracy"):
        printed_evaluations(f'{{"accuracy": 0.55}}\n{later}\n', ACCURACY, 10)


@pytest.mark.parametrize(
    "beside",
    [
        'INFO:root:{"accuracy": 0.55}',
        "{'accuracy': 0.55}",
        '{"metric": "accuracy", "value": 3}',
        '{"val_accuracy": 0.95}',
        "{'accuracy': 'higher is better'}",
        "accuracy: 0.95",
        '{"loss": 0.1}',
    ],
)
def test_what_says_no_other_value_may_follow_the_last_one(beside: str) -> None:
    (point,) = printed_evaluations(f'{{"accuracy": 0.55}}\n{beside}\n', ACCURACY, 10).points
    assert point.value == 0.55
    (last,) = printed_evaluations(f'{beside}\n{{"accuracy": 0.6}}', ACCURACY, 10).points
    assert last.value == 0.6


@pytest.mark.parametrize("value", ["null", "NaN"])
def test_a_printed_null_has_diverged_as_nan_has(value: str) -> None:
    (point,) = printed_evaluations(
        f'{{"accuracy": 0.5}}\n{{"accuracy": {value}}}', ACCURACY, 10
    ).points
    assert point.value is None


@pytest.mark.parametrize(
    "of",
    [
        int, float, Decimal, Fraction, np.float64, np.float32, np.float16, np.int64, np.uint8, np.array, torch.tensor,
        lambda value: torch.tensor(float(value)), lambda value: torch.tensor([value]),
        lambda value: torch.tensor(value, dtype=torch.bfloat16), lambda value: np.array(float(value)),
    ],
)  # fmt: skip
def test_a_whole_number_of_any_type_is_a_count(of: Callable[[int], object]) -> None:
    assert whole("count", of(3), 1) == 3
    with pytest.raises(BadInput, match="from 1"):
        whole("count", of(0), 1)


@pytest.mark.parametrize(
    "value", [2.5, np.float32(2.5), torch.tensor(2.5), Decimal("2.5"), math.nan, torch.tensor(math.inf), "3", None,
              torch.tensor([1, 2]), np.array([]), [3]],
)  # fmt: skip
def test_what_is_not_whole_is_no_count(value: object) -> None:
    with pytest.raises(BadInput, match="whole number"):
        whole("count", value, 1)
