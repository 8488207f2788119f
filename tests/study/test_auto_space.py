"""`space: auto` in a study: chosen in its preparation, kept with it, shown, and refused where
nothing can be chosen.
"""

import json
import sys
from pathlib import Path

import pytest
from commands import refusal, within
from transformers import GPT2Config, LlamaConfig

from carbonopt.core.errors import BadInput
from carbonopt.report.assemble import whole
from carbonopt.report.study_view import StudyView
from carbonopt.space.auto_space import choose
from carbonopt.spec.auto_facts import known_facts
from carbonopt.spec.space_settings import Range, Space, UnchosenSpace
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.models.model_check import lacking
from carbonopt.train.tasks.task import task_for


@pytest.fixture
def auto_study(tiny_study: dict) -> dict:
    tiny_study["search"]["space"] = "auto"
    return tiny_study


def read(folder: Path):
    paths = StudyPaths(folder)
    return StudyStorage.of_folder(connect(storage_url(paths, None)), paths).read()


@pytest.mark.slow
def test_a_study_chooses_its_space_and_goes_on_with_it(
    auto_study: dict, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a cat sat on a mat. " * 250)
    auto_study["workload"]["dataset"] = {"train_files": ["text.txt"]}
    study, folder = write_study(auto_study), tmp_path / "runs" / "tiny"
    assert (
        "chosen by carbonopt: global_batch_size, learning_rate, epochs, zero_stage"
        in within("check", study).stdout
    )
    assert within("run", study, "--trials", 1).returncode in (0, 3)
    data = read(folder)
    assert data.prepared is not None
    assert data.prepared.auto is not None
    auto = data.prepared.auto
    assert data.config.search.space == auto.space
    assert data.records[0].params.learning_rate == auto.start["learning_rate"]
    assert isinstance(auto.space["learning_rate"], Range)
    assert auto.facts.parameters == data.prepared.model_parameters
    assert within("run", study, "--trials", 2).returncode in (0, 3)
    again = read(folder)
    assert (again.config.search, len(again.records)) == (data.config.search, 2)
    assert again.provenance.study_file == study.read_text()

    shown = within("check", study).stdout
    assert "infinitely many configurations, chosen by carbonopt" in shown
    assert f"learning_rate: {auto.space['learning_rate'].low:g} to" in shown
    assert "torch_compile: compiling takes longer on a CPU than it saves" in shown
    met = StudyView(again, target=1e6)
    assert met.recommendation.baseline is not None and met.recommendation.baseline.is_chosen
    assert "baseline_chosen" in {caveat.key for caveat in whole(met).caveats}
    section = next(
        section for section in whole(StudyView(again)).sections if section.key == "space"
    )
    chosen, left_out = section.blocks
    assert [row[0].text for row in chosen.rows] == list(auto.why)
    assert [row[1].text for row in left_out.rows] == list(auto.left_out.values())
    exported = [json.loads(line) for line in within("export", folder).stdout.splitlines()]
    assert exported[1]["params"]["zero_stage"] == 0

    auto_study["search"]["space"] = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
    assert "holds another study: search.s" in refusal("run", write_study(auto_study))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"search": {"start": {"epochs": 1}}},
            "search.start is of a space that is not known yet; leave start out",
        ),
        ({"search": {"sampler": "grid"}}, "sampler grid .*learning_rate.*use carbon"),
        (
            {"launch": {"kind": "replay", "table": "t.jsonl"}},
            "launch.kind is replay, whose table has dimensions of its own; name the dimensions",
        ),
    ],
)
def test_where_nothing_can_be_chosen_it_is_refused(
    auto_study: dict, changes: dict, said: str
) -> None:
    for part, change in changes.items():
        auto_study[part] = change if part == "launch" else auto_study[part] | change
    with pytest.raises(BadInput, match=f"search.space can't be auto: .*{said}"):
        parse_study(auto_study, "study.yaml")


def test_a_script_has_to_name_its_dimensions(auto_study: dict) -> None:
    auto_study["workload"] = {"task": "script", "command": "python train.py", "folder": "/tmp"}
    with pytest.raises(
        BadInput,
        match="the task is script, whose model and data only the script knows; name the dim",
    ):
        parse_study(auto_study, "study.yaml")


def test_the_start_that_is_chosen_can_be_confirmed(auto_study: dict) -> None:
    auto_study["confirm"] = {"seeds": 2, "baseline": True}
    assert parse_study(auto_study, "study.yaml").confirm.baseline
    with pytest.raises(BadInput, match=r"search\.start, but there is none"):
        auto_study["search"]["space"] = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
        parse_study(auto_study, "study.yaml")


def test_before_the_preparation_the_space_is_not_the_studys(auto_study: dict) -> None:
    config = parse_study(auto_study, "study.yaml")
    assert isinstance(config.search.space, UnchosenSpace)
    checked = check(config)
    assert not checked.is_settled
    assert checked.auto == choose(known_facts(config.workload, 1, on_gpu=False))
    given = {"fingerprint": "f", "train_examples": 1, "eval_examples": 1, "versions": {}}
    settled = checked.settled(Prepared(**given, auto=checked.auto))
    assert settled.is_settled
    assert settled.config.search.start == settled.start == checked.auto.start


def test_what_a_model_cannot_have_is_found() -> None:
    workload = {
        "task": "causal_lm",
        "model": {"from_config": {"model_type": "gpt2"}},
        "tokenizer": {"kind": "byte"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": 16,
    }
    task = task_for(workload)
    space = Space.model_validate(
        {"dropout": {"choices": [0.0, 0.1]}, "optimizer": "muon", "output_layer": "fused"}
    )
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    assert lacking(task, GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64), space) == {}
    llama = lacking(task, LlamaConfig(**small, intermediate_size=32), space)
    assert llama.keys() <= {"dropout"}


def test_float8_is_chosen_only_where_torchao_is(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = {
        "task": "causal_lm",
        "model": {"from_config": {"model_type": "llama"}},
        "tokenizer": {"kind": "byte"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": 16,
    }
    wide = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 1}
    space = Space.model_validate({"float8": {"choices": ["none", "tensorwise"]}})
    task, config = task_for(workload), LlamaConfig(**wide, num_attention_heads=32)
    assert lacking(task, config, space) == {}
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    assert lacking(task, config, space).keys() == {"float8"}
    large = {"parameters": 6_738_415_616, "layers": 32, "width": 4096, "vocab_size": 32_000}
    facts = known_facts(task.workload, 1, on_gpu=True).model_copy(
        update=large
        | {"train_tokens": 10**7, "train_examples": 20_000, "gpu_memory_gib": 141.0}
        | {"has_float8": True, "pretrained": True}
    )
    assert choose(facts).space["float8"] is not None
    without = choose(facts.model_copy(update={"lacking": lacking(task, config, space)}))
    assert without.space["float8"] is None
    assert "torchao" in without.left_out["float8"]
