"""The small charts: what lies where, and that nothing but numbers gets into them."""

import re

import pytest

from carbonopt.watch.charts import Chart, Line


def places(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'points="\n([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in points.split("\n")]


def test_points_lie_in_proportion():
    first, second, third = places(Chart([Line([(0, 0), (5, 10), (10, 5)], "power")]).svg())
    assert (first[0], third[0]) == (44, 336)
    assert (first[1], second[1]) == (168, 8)
    assert second[0] == pytest.approx(190)
    assert third[1] == pytest.approx(88)


def test_a_tick_of_which_the_text_is_that_of_another_has_none():
    chart = Chart([Line([(0.0, 1.0), (2.0, 1.0)], "power")], x_text=lambda x: f"{int(x)} s")
    assert re.findall(">([0-9]) s<", chart.svg()) == ["2", "1", "0"]


def test_a_far_range_is_logarithmic():
    _, middle, _ = places(Chart([Line([(0, 1), (1, 10), (2, 100)], "best")]).svg())
    assert middle[1] == pytest.approx(88)


@pytest.mark.parametrize("points", [[], [(3.0, 4.0)], [(0.0, 0.0), (1.0, 0.0)]])
def test_few_points_are_no_fault(points):
    svg = Chart([Line(points, "best")], from_zero=True).svg()
    assert bool(svg) == bool(points)
    assert "nan" not in svg


def test_a_long_curve_keeps_its_last_point():
    points = [(float(x), float(x)) for x in range(5001)]
    drawn = places(Chart([Line(points, "best")]).svg())
    assert len(drawn) <= 200
    assert drawn[-1] == (336, 8)
