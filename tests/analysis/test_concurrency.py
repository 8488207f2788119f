"""How many trials several workers may run at once, and what the study file may say of it."""

import math

import pytest
from small_studies import study

from carbonopt.analysis.concurrency import most_concurrent_trials, price
from carbonopt.core.errors import BadInput
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.reader import parse_study


def config(most: object, sampler: str = "carbon", workers: int = 4) -> StudyConfig:
    raw = study().config.model_dump(mode="json")
    launch = {"kind": "local", "gpus": [], "workers": workers, "max_concurrent_trials": most}
    return StudyConfig.model_validate(
        {**raw, "launch": launch, "search": {**raw["search"], "sampler": sampler}}
    )


def test_auto_lets_more_trials_run_as_more_have_ended() -> None:
    assert [most_concurrent_trials(config("auto"), ended) for ended in (0, 5, 6, 12)] == [
        2,
        2,
        3,
        4,
    ]


def test_a_number_is_the_most_and_samplers_that_learn_nothing_have_none() -> None:
    assert {most_concurrent_trials(config(3), ended) for ended in (0, 100)} == {3}
    assert most_concurrent_trials(config("auto", "random"), 0) == math.inf


def test_the_price_is_that_of_the_nearest_number_of_workers() -> None:
    assert "4 workers used 1.41 × the energy of one" in price(config("auto", workers=4))
    assert "2.03 × and 1.97 × with 4" in price(config("auto", workers=5))
    assert price(config("auto", workers=1)) == price(config("auto", "random")) == ""


@pytest.mark.parametrize("most", ["lots", 0, -1, 1.5, True, 10**7, None, [2]])
def test_what_is_no_number_of_trials_is_refused_by_its_key(most: object, tiny_study: dict) -> None:
    tiny_study["launch"] = {"kind": "local", "gpus": [], "max_concurrent_trials": most}
    with pytest.raises(BadInput) as refused:
        parse_study(tiny_study, "study.yaml")
    text = str(refused.value)
    assert "launch.max_concurrent_trials" in text and "literal" not in text
    assert "auto or a whole number from 1" in text
