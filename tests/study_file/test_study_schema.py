"""The JSON schema of study files: what the reader accepts validates, and what it refuses for a key,
a type or a range doesn't.
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import within
from jsonschema import Draft7Validator
from shipped_studies import shipped_studies
from test_docs import Block, blocks, laid_over

from carbonopt.core.dimensions import DIMENSION_NAMES
from carbonopt.core.errors import BadInput
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.field_meanings import field_meanings
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.space_settings import UnchosenSpace
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_schema import schema_text, study_schema
from carbonopt.study_file.yaml_file import read_yaml
from carbonopt.train.tasks.task import TASKS, task_class

ROOT = Path(__file__).parents[2]
STUDIES = sorted(shipped_studies())
FILES = [*STUDIES, *sorted((ROOT / "docs" / "examples").glob("*.yaml"))]
SCHEMA = ROOT / "studies" / "study.schema.json"
VALIDATOR = Draft7Validator(study_schema())


def problems(values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(values)]


def set_at(study: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(study)
    *parents, last = path.split(".")
    place = changed
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return changed


@pytest.fixture
def read_here(tmp_path: Path):
    """Whether the reader takes a study file with these values, beside the files that it may name."""
    (tmp_path / "space.yaml").write_text("global_batch_size: 8\nlearning_rate: 1.0e-3\nepochs: 1\n")
    (tmp_path / "carbon.yaml").write_text("country: FRA\n")
    (tmp_path / "deepspeed.yaml").write_text("gradient_clipping: 1.0\n")
    (tmp_path / "hosts").write_text("one slots=2\n")
    (tmp_path / "template.toml").write_text("lr = {learning_rate}\n")
    path = tmp_path / "study.yaml"

    def reads(study: Any) -> bool:
        path.write_text(yaml.safe_dump(study))
        try:
            config = load_study(path)
            if not isinstance(config.search.space, UnchosenSpace):
                SearchSpace(config.search.space, config.launch.world_size, True, config.is_script)
        except BadInput:
            return False
        return True

    return reads


def test_it_is_a_schema_of_draft_7_in_which_every_word_counts() -> None:
    schema = study_schema()
    Draft7Validator.check_schema(schema)
    for value in _objects(schema):
        assert "$ref" not in value or len(value) == 1, value
        assert "title" not in value or value is schema, value
    referred = set(re.findall(r'"#/definitions/(\w+)"', json.dumps(schema)))
    assert referred == schema["definitions"].keys()


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _objects(each)


def test_the_shipped_schema_is_what_the_command_prints() -> None:
    done = within("schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == SCHEMA.read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_study_names_the_shipped_schema_in_its_first_line(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match is not None, first
    assert (path.parent / match[1]).resolve() == SCHEMA


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_study_validates(path: Path) -> None:
    assert problems(read_yaml(path, "the study file").values) == []


@pytest.mark.parametrize("block", blocks("yaml") + blocks("yml"), ids=str)
def test_every_study_of_the_documentation_validates(block: Block, tmp_path: Path) -> None:
    if block.title is not None:
        (tmp_path / block.title).write_text(block.text)
        values = read_yaml(tmp_path / block.title, "the study file").values
    else:
        (small,) = (each for each in blocks("yaml") if each.title == "small-study.yaml")
        part = yaml.safe_load(block.text)
        if "notify" in part:
            part["notify"]["on"] = part["notify"].pop(True)  # YAML 1.1 reads `on` as true
        values = laid_over(yaml.safe_load(small.text), part)
    assert problems(values) == []


def test_the_line_for_an_editor_changes_no_study(tmp_path: Path) -> None:
    text = (ROOT / "studies" / "quickstart.yaml").read_text()
    (tmp_path / "with.yaml").write_text(text)
    (tmp_path / "without.yaml").write_text(text.partition("\n")[2])
    both = [load_study(tmp_path / name).identity() for name in ("with.yaml", "without.yaml")]
    assert both[0] == both[1]


SHORT_FORMS = [
    ("search.space", "auto"),
    ("search.space", "space.yaml"),
    ("search.space.epochs", 0.5),
    ("search.space.epochs", {"choices": [1, 2.5]}),
    ("search.space.epochs", {"low": 1, "high": 4, "step": 1}),
    ("search.space.learning_rate", {"low": 1e-4, "high": 1e-2, "log": True}),
    ("search.space.zero_stage", {"low": 0, "high": 3}),
    ("search.space.zero_stage", None),
    ("search.space.torch_compile", {"choices": [True, False]}),
    ("search.start", None),
    ("search.start", {"epochs": 1, "global_batch_size": 64}),
    ("carbon", "carbon.yaml"),
    ("carbon", {"cloud_provider": "gcp", "cloud_region": "europe-west1"}),
    ("carbon", {"intensity_g_co2e_per_kwh": 230}),
    ("workload.deepspeed", "deepspeed.yaml"),
    ("workload.tokenizer", {"kind": "byte", "name_or_path": None}),
    ("workload.dataset", {"train_files": "train.txt"}),
    ("workload.dataset", {"train_files": ["train.txt"], "eval_files": "eval.txt"}),
    ("search.learn_from", "runs/earlier"),
    ("launch", {}),
    ("launch", {"gpus": [], "max_concurrent_trials": 3, "trial_time_limit_s": "02:30:00"}),
    ("launch", {"gpus": [0, 1], "max_concurrent_trials": "auto", "trial_time_limit_s": 90}),
    ("launch", {"kind": "slurm", "time": "1-08:00:00"}),
    ("launch", {"kind": "slurm", "time": 90}),
    ("launch", {"kind": "hostfile", "hostfile": "hosts"}),
    ("schedule", {"finish_by": "+24h", "forecast": "grid.csv"}),
    ("schedule", {"finish_by": "2026-12-01T09:00+01:00", "forecast": "grid.csv"}),
    ("notify", {"on": ["finished"], "attach": False}),
    ("checkpoint", {}),
    ("track", {"wandb": {}, "tensorboard": False}),
    ("budget", {"hours": 1, "until": "converged"}),
    ("confirm", None),
    ("target", {"perplexity": 40}),
]


@pytest.mark.parametrize(("path", "value"), SHORT_FORMS)
def test_every_form_that_the_reader_takes_validates(
    path: str, value: object, tiny_study: dict, read_here
) -> None:
    study = set_at(tiny_study, path, value)
    assert read_here(study)
    assert problems(study) == []


SCRIPT = {
    "task": "script",
    "command": "python train.py --lr {learning_rate} --mine {mine}",
    "config_template": "template.toml",
    "files": "data",
    "quality_from": {"pattern": "score ([0-9.]+)"},
}


def test_a_script_has_dimensions_of_its_own(tiny_study: dict, read_here) -> None:
    study = {**tiny_study, "workload": SCRIPT, "target": {"quality": "bleu", "at_least": 30}}
    study["search"] = {"space": {"mine": {"choices": ["a", "b"], "affects": "cost"}}}
    assert read_here(study)
    assert problems(study) == []
    assert not read_here({**tiny_study, "search": study["search"]})
    assert problems({**tiny_study, "search": study["search"]})


def test_a_replay_needs_no_workload(replay_study: dict, read_here) -> None:
    assert read_here(replay_study)
    assert problems(replay_study) == []
    unknown = set_at(replay_study, "search.space.mine", 1)
    assert not read_here(unknown)
    assert problems(unknown)


REFUSED = [
    ("budgett", {"trials": 3}),
    ("target.perplexty", 3),
    ("target", {}),
    ("target", {"perplexity": 3.0, "accuracy": 0.5}),
    ("target.perplexity", 0.5),
    ("target.perplexity", "45"),
    ("target.perplexity", True),
    ("search.space.learning_rat", 1e-3),
    ("search.space.beta", 0.1),
    ("search.space.epochs.choice", [1]),
    ("search.space.epochs", {"step": 2}),
    ("search.space.epochs", {"choices": [None]}),
    ("search.space.epochs", {"low": "1", "high": 8}),
    ("search.space.epochs", [1, 2]),
    ("search.space", {"epochs": 1}),
    ("search.space", ["auto"]),
    ("search.sampler", "bayes"),
    ("search.seed", -1),
    ("budget.trials", 2.5),
    ("budget.trials", 0),
    ("carbon.pue", 0.5),
    ("carbon.embodied", {"kg_co2e_per_gpu": 150}),
    ("launch", {"gpu": [0]}),
    ("launch", {"gpus": 0}),
    ("launch", {"kind": "torque"}),
    ("launch", {"kind": "slurm", "gpus": [0]}),
    ("launch", {"kind": "slurm", "time": "soon"}),
    ("launch", {"kind": "hostfile"}),
    ("launch", {"kind": "hostfile", "hostfile": "hosts", "hosts": []}),
    ("launch", {"gpus": [], "max_concurrent_trials": 0}),
    ("launch", {"gpus": [], "trial_time_limit_s": "2 h"}),
    ("workload.task", "sftt"),
    ("workload.task", "script"),
    ("workload.sequence_length", 1),
    ("workload.model", {}),
    ("workload.model", {"name_or_path": "gpt2", "from_config": {"model_type": "gpt2"}}),
    ("workload.model", "gpt2"),
    ("workload.tokenizer", {"kind": "word"}),
    ("workload.tokenizer", {"train_bpe": 100}),
    ("workload.dataset", {"builtin": "python-doc"}),
    ("workload.dataset", {"train_files": ["a.txt"], "label_column": "label"}),
    ("workload.packing", True),
    ("notify", {"on": ["never"]}),
    ("checkpoint", {"every_minutes": 0}),
    ("name", ""),
    ("name", 3),
]


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_what_the_reader_refuses_does_not_validate(
    path: str, value: object, tiny_study: dict, read_here
) -> None:
    study = set_at(tiny_study, path, value)
    assert not read_here(study)
    assert problems(study)


@pytest.mark.parametrize("missing", ["name", "target", "search", "budget", "carbon"])
def test_a_missing_part_does_not_validate(missing: str, tiny_study: dict) -> None:
    del tiny_study[missing]
    assert problems(tiny_study)


@pytest.mark.parametrize("name", ["chat-small.yaml", "chat.yaml"])
def test_a_pipeline_with_a_wrong_step_does_not_validate(name: str) -> None:
    pipeline = read_yaml(ROOT / "studies" / name, "the study file").values
    for wrong in (
        {**pipeline, "target": {"perplexity": 3.0}},
        {**pipeline, "pipeline": []},
        {**pipeline, "pipeline": [{**pipeline["pipeline"][0], "carry": 10}]},
        {**pipeline, "pipeline": [{"step": "one"}]},
        {**pipeline, "pipeline": [{**pipeline["pipeline"][0], "needs": {"data": "sft"}}]},
    ):
        assert problems(pipeline) == []
        assert problems(wrong)


MUTATIONS = (None, True, 0, 3, 0.5, "text", "auto", [], ["text"], [0], {}, {"choices": [1, 2]})


def _mutated(value: Any) -> Iterator[Any]:
    """Yield a study's parts with each value exchanged, and each key left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {other: value[other] for other in value if other != key}
            for changed in (*MUTATIONS, *_mutated(inner)):
                yield {**value, key: changed}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_no_study_that_the_reader_takes_is_refused(task: str, read_here) -> None:
    """Over thousands of studies that differ from a valid one in one place."""
    name = {"causal_lm": "quickstart", "classification": "digits", "seq2seq": "library-sql"}
    path = ROOT / "studies" / f"{name.get(task, task.replace('script', 'own-script'))}.yaml"
    study = read_yaml(path, "the study file").values
    study["search"]["space"] = {
        key: study["search"]["space"][key]
        for key in ("global_batch_size", "learning_rate", "epochs")
    }
    study["search"].pop("start")
    taken = 0
    for changed in _mutated(study):
        if read_here(changed):
            taken += 1
            assert problems(changed) == [], changed
    assert taken > 40


def test_every_key_is_explained() -> None:
    """By its own docstring, which the documentation's tables show, or by that of its class."""
    schema = study_schema()
    definitions = schema["definitions"]

    def explained(value: dict[str, Any]) -> bool:
        reference = value.get("$ref", "").rpartition("/")[2]
        inner = [*value.get("anyOf", ()), *value.get("allOf", ()), value.get("then", {})]
        return (
            "description" in value
            or "const" in value
            or bool(reference and explained(definitions[reference]))
            or any(explained(each) for each in inner if each)
        )

    for name, definition in definitions.items():
        for key, value in definition.get("properties", {}).items():
            assert explained(value), f"{name}.{key}"
    assert definitions["Space"]["properties"].keys() == set(DIMENSION_NAMES)
    slurm = definitions["SlurmLaunch"]["properties"]
    assert slurm["partition"]["description"] == field_meanings(SlurmLaunch)["partition"]
    settings = task_class("sft").settings
    assert (
        definitions[settings.__name__]["properties"]["packing"]["description"]
        == field_meanings(settings)["packing"]
    )
