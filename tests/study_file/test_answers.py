"""Answers about models: one process for all questions, and what is remembered of them."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.answer_cache import CachedAnswer
from carbonopt.study_file.memory_estimate import ask_memory
from carbonopt.study_file.model_questions import Answers
from carbonopt.study_file.weight_files import check_weights, has_unchecked_weights
from carbonopt.study_file.workload_keys import check_library_keys, has_unchecked_keys

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 256}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "carbonopt"


@pytest.fixture
def config(tiny_study: dict, tmp_path: Path) -> StudyConfig:
    """A study of a pretrained model in a folder."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2))
    model.save_pretrained(tmp_path / "model")
    tiny_study["workload"] |= {
        "model": {"name_or_path": str(tmp_path / "model")},
        "tokenizer": {"kind": "byte"},
    }
    return StudyConfig.model_validate(tiny_study)


class NoAnswers(Answers):
    """Fails the test where a process would be started."""

    def begin(self) -> None:
        raise AssertionError("a question whose answer is remembered was asked")


@pytest.mark.slow
def test_one_process_answers_and_what_it_answered_is_not_asked_again(
    config: StudyConfig, cache: Path
) -> None:
    with Answers() as answers:
        check_weights([(config, ())], answers)
        process = answers._process
        estimated = ask_memory(config, answers, 24.0)
        assert answers._process is process
    assert process is not None and process.poll() is not None, "it ends with the context"
    assert estimated.memory is not None
    assert len(list(cache.glob("*/*.json"))) == 2
    assert not list(cache.glob("**/.*")), "a file that was written aside"
    assert not has_unchecked_weights([(config, ())])
    check_weights([(config, ())], NoAnswers())
    assert ask_memory(config, NoAnswers(), 24.0) == estimated
    with pytest.raises(AssertionError):
        ask_memory(config, NoAnswers(), 80.0)


@pytest.mark.slow
def test_weights_that_are_refused_are_read_again(
    config: StudyConfig, cache: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with Answers() as answers:
        with pytest.raises(BadInput, match=r"model\.safetensors"):
            check_weights([(config, ())], answers)
        assert has_unchecked_weights([(config, ())])
        weights.write_bytes(whole)
        check_weights([(config, ())], answers)
    assert not has_unchecked_weights([(config, ())])
    os.utime(weights, (1, 1))
    assert has_unchecked_weights([(config, ())]), "another file may be there now"


@pytest.mark.slow
def test_keys_that_only_the_libraries_know_are_checked_once(tiny_study: dict, cache: Path) -> None:
    def study(**workload: object) -> StudyConfig:
        return StudyConfig.model_validate(
            {**tiny_study, "workload": {**tiny_study["workload"], **workload}}
        )

    refused = {
        "deepspeed.zero_optimisation": {"deepspeed": {"zero_optimisation": {}}},
        "zero_optimization.stage": {"deepspeed": {"zero_optimization": {"stage": 3}}},
        "zero_optimization.reduce_bucket_size.*big": {
            "deepspeed": {"zero_optimization": {"reduce_bucket_size": "big"}}
        },
        "train_batch_size.*global_batch_size": {"deepspeed": {"train_batch_size": 4}},
        "training_arguments.max_gard_norm": {"training_arguments": {"max_gard_norm": 1.0}},
        "max_steps.*search.space.epochs": {"training_arguments": {"max_steps": 9}},
    }
    right = study(
        deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}},
        training_arguments={"max_grad_norm": 0.5},
    )
    with Answers() as answers:
        for says, workload in refused.items():
            with pytest.raises(BadInput, match=says):
                check_library_keys(study(**workload), answers)
            assert has_unchecked_keys(study(**workload))
        check_library_keys(right, answers)
    assert not has_unchecked_keys(right)
    check_library_keys(right, NoAnswers())
    check_library_keys(study(), NoAnswers())


def test_an_answer_follows_from_all_that_it_was_made_of(cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")

    def file(question: str = "q", about: str = "memory") -> Path | None:
        return CachedAnswer(about, question, [str(model)])._file

    before, of_weights = file(), file(about="weights")
    assert before == file() and before.parent == cache / "memory"
    assert before != file("another question")
    (model / "model.safetensors").write_bytes(b"other weights")
    assert file() == before, "an estimate reads no weights"
    assert file(about="weights") != of_weights
    (model / "config.json").write_text('{"n_layer": 3}')
    assert file() != before
    assert CachedAnswer("memory", "q", ["name/on-a-hub"])._file is None


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[1, 2", '{"a": 1, "a": 2}', "\x00"])
def test_a_damaged_answer_is_as_good_as_none(cache: Path, text: str) -> None:
    cached = CachedAnswer("memory", "q", [])
    cached.keep('{"a": 1}')
    assert cached.read(json.loads) == {"a": 1}
    cached._file.write_text(text)

    def strict(answer: str) -> dict:
        from carbonopt.core.files import parsed_json

        return parsed_json(answer)

    assert cached.read(strict) is None


def test_a_cache_that_cannot_be_written_is_left_alone(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where a folder would be")
    cached = CachedAnswer("memory", "q", [])
    cached.keep("{}")
    assert cached.read(json.loads) is None and cache.is_file()


@pytest.mark.slow
def test_a_process_that_ends_says_why() -> None:
    with Answers() as answers:
        with pytest.raises(CarbonoptError, match="JSONDecodeError"):
            answers.ask("weights", "no JSON")
        assert json.loads(answers.ask("weights", "[]")) == [], "the next question starts another"
