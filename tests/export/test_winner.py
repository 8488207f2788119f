"""The files of winner/: each is what its reader takes, whatever the names in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from packaging.requirements import Requirement
from small_studies import REPLAY, gpu_study, on_gpu, pruned, study, trial

import carbonopt
from carbonopt.analysis.recommend import recommend
from carbonopt.core.channel import GPU_UUIDS
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.engines.process.environment import work_environment
from carbonopt.export.winner import CONFIG, NAMES, winner_files
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.search_settings import Budget
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import Workload
from carbonopt.study_file.reader import load_study

EVIL = """<script>alert(1)</script> | `x` [a](javascript:b) "'&{{7*7}} %_&$ --- </script>"""


def winner_of(data: StudyData, **given: str) -> dict[str, str]:
    return winner_files(data, recommend(data), given)


def changed(**workload) -> dict:
    """The study's raw workload with these keys instead."""
    return {
        "workload": {
            **study().config.workload.model_dump(mode="json", exclude_none=True),
            **workload,
        }
    }


def test_rerun_is_a_valid_study_of_the_winner_alone(tmp_path):
    record = trial(4, params={"learning_rate": 1e-5, "gradient_checkpointing": True})
    raw = {"search": study().config.search.model_dump(mode="json", exclude_none=True)}
    raw["search"]["space"]["gradient_checkpointing"] = {"choices": [True, False]}
    raw["search"]["start"] = {"epochs": 1}
    data = study(record, trial(5, 2e-3, 4.0), name="N" * 200, raw=raw)
    (tmp_path / "rerun.yaml").write_text(winner_of(data)["rerun.yaml"], encoding="utf-8")
    again = load_study(tmp_path / "rerun.yaml")
    space = again.search.space.model_dump(exclude_none=True)
    assert space == {
        "global_batch_size": {"value": 16},
        "learning_rate": {"value": 1e-5},
        "epochs": {"value": 2},
        "zero_stage": {"value": 1},
        "offload": {"value": "none"},
        "gradient_checkpointing": {"value": True},
    }
    assert again.name.endswith(" (winner)") and len(again.name) == 200
    assert again.budget == Budget(trials=1)
    assert again.search.start is None and again.search.seed == record.seed
    assert (again.workload, again.target, again.carbon, again.launch) == (
        data.config.workload,
        data.config.target,
        data.config.carbon,
        data.config.launch,
    )


@pytest.mark.parametrize("name", ["1e-3", "yes", "null", "a: b # c", EVIL, "- x", "'", "12"])
def test_text_that_looks_like_something_else_stays_text(name, tmp_path):
    (tmp_path / "rerun.yaml").write_text(
        winner_of(study(trial(0), name=name))["rerun.yaml"], encoding="utf-8"
    )
    assert load_study(tmp_path / "rerun.yaml").name == f"{name} (winner)"
    data = study(trial(0), raw={"carbon": {"country": "USA", "region": name}})
    (tmp_path / "rerun.yaml").write_text(winner_of(data)["rerun.yaml"], encoding="utf-8")
    assert load_study(tmp_path / "rerun.yaml").carbon.region == name
    base = name.replace("/", "") + ".csv"
    columns = changed(dataset={"train_files": [f"/text/{base}"], "text_column": name})
    dataset = yaml.safe_load(winner_of(study(trial(0), raw=columns))["workload.yaml"])["dataset"]
    assert (dataset["text_column"], dataset["train_files"]) == (name, [f"data/{base}"])


def test_training_arguments_are_what_transformers_takes():
    params = {
        "precision": "bf16",
        "warmup_ratio": 0.1,
        "lr_scheduler": "cosine",
        "weight_decay": 0.01,
        "gradient_checkpointing": True,
    }
    files = winner_of(study(trial(0, params=params)), **{"ds_config.json": '{"zero": 1}'})
    assert "# warmup_steps is 10 % of the trial's 40 steps" in files["training_args.yaml"]
    assert yaml.safe_load(files["training_args.yaml"]) == {
        "deepspeed": "ds_config.json",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "seed": 3,
        "bf16": True,
        "fp16": False,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "gradient_checkpointing": True,
    }
    assert files["ds_config.json"] == '{"zero": 1}'
    assert json.loads(files["params.json"])["gradient_accumulation_steps"] == 2


TRIED = [
    {},
    {"precision": "fp32", "warmup_ratio": 0.13, "weight_decay": 0.1, "lr_scheduler": "cosine"},
    {"warmup_ratio": 1.0, "gradient_checkpointing": True, "torch_compile": False},
    {"zero_stage": 2, "offload": "optimizer"},
    {"lr_scheduler": "warmup_stable_decay", "decay_ratio": 0.3},
    {"lr_scheduler": "warmup_stable_decay", "dropout": 0.1},
]


@pytest.mark.parametrize("params", TRIED, ids=lambda params: "-".join(params) or "defaults")
@pytest.mark.parametrize(
    "given", [{}, {"optim": "adafactor", "lr_scheduler_type": "linear", "adam_beta2": 0.99}]
)
def test_training_arguments_are_those_of_the_trial(params, given, tmp_path):
    """Beside DeepSpeed's own, which needs its processes; what is left to a default is the same
    default.
    """
    from transformers import TrainingArguments

    from carbonopt.train.optim.arguments import training_arguments

    given = {
        key: value
        for key, value in given.items()
        if key != "lr_scheduler_type" or "lr_scheduler" not in params
    }
    record = trial(0, params=params)
    data = study(
        record, raw={**changed(training_arguments=given), "launch": {"kind": "local", "gpus": []}}
    )
    of_trial = training_arguments(
        record.params, data.config.workload, 40, 3, False, str(tmp_path), {}
    )
    written = yaml.safe_load(winner_of(data)["training_args.yaml"])
    assert written.pop("deepspeed") == "ds_config.json"
    epochs = written.pop("num_train_epochs")
    mine = TrainingArguments(
        **written, deepspeed={}, output_dir=str(tmp_path), max_steps=40, report_to="none", save_strategy="no",
        logging_strategy="no", logging_nan_inf_filter=False, average_tokens_across_devices=False, disable_tqdm=True,
    )  # fmt: skip
    assert epochs == record.params.epochs
    winner_arguments, other = mine.to_dict(), of_trial.to_dict()
    assert {key: value for key, value in winner_arguments.items() if other[key] != value} == {}


@pytest.mark.parametrize(("given", "steps"), [(0.13, 6), (0.01, 1), (0, 0), (7, 7)])
def test_a_share_of_warmup_that_the_study_gives_is_written_as_steps(given, steps, tmp_path):
    from transformers import TrainingArguments

    data = study(trial(0), raw=changed(training_arguments={"warmup_steps": given}))
    written = yaml.safe_load(winner_of(data)["training_args.yaml"])["warmup_steps"]
    assert written == steps and type(written) is int
    assert TrainingArguments(str(tmp_path), warmup_steps=given).get_warmup_steps(40) == steps


def test_muon_has_no_name_in_transformers_and_adamw_has_one():
    written = {name: {"zero_stage": 0, "optimizer": name} for name in ("muon", "adamw")}
    files = {name: winner_of(study(trial(0, params=params))) for name, params in written.items()}
    assert "optim" not in yaml.safe_load(files["muon"]["training_args.yaml"])
    assert "carbonopt/train/optim/muon.py's Muon" in files["muon"]["training_args.yaml"]
    assert yaml.safe_load(files["adamw"]["training_args.yaml"])["optim"] == "adamw_torch_fused"


@pytest.mark.parametrize(("share", "said"), [(0.1, True), (0.0, False)])
def test_averaged_weights_have_no_name_in_transformers_either(share, said):
    written = winner_of(study(trial(0, params={"weight_averaging": share})))["training_args.yaml"]
    assert ("carbonopt/train/optim/averaging.py" in written) is said


def test_offloaded_states_on_a_gpu_have_no_optimizer_that_transformers_knows():
    record = trial(0, params={"offload": "optimizer"})
    assert "optim" not in yaml.safe_load(winner_of(study(record))["training_args.yaml"])
    chosen = study(record, raw=changed(training_arguments={"optim": "adafactor"}))
    assert yaml.safe_load(winner_of(chosen)["training_args.yaml"])["optim"] == "adafactor"


def test_deepspeed_settings_are_made_where_the_trial_s_are_gone():
    params = {
        "zero_stage": 3,
        "offload": "parameters",
        "world_size": 2,
        "micro_batch_size_per_gpu": 4,
    }
    settings = json.loads(winner_of(study(trial(0, params=params)))["ds_config.json"])
    assert settings["train_batch_size"] == 16 and settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("text", ["", '{"train_batch_size": 1', "[1]", "null", "[" * 100_000])
def test_damaged_deepspeed_settings_are_said_in_a_sentence(text):
    with pytest.raises(
        BadInput,
        match=r"^trials/0000/ds_config.json is damaged: .*; remove it, and the report makes",
    ):
        winner_of(study(trial(0)), **{"ds_config.json": text})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_reads_its_file(stage, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    params = {"zero_stage": stage, "world_size": 2}
    path = tmp_path / "accelerate.yaml"
    path.write_text(winner_of(study(trial(0, params=params)))["accelerate.yaml"], encoding="utf-8")
    read = load_config_from_file(str(path))
    assert read.distributed_type == DistributedType.DEEPSPEED and read.num_processes == 2
    assert read.deepspeed_config == {
        "deepspeed_config_file": "ds_config.json",
        "zero3_init_flag": stage == 3,
    }


def run_script(folder: Path, launch: dict, **environment: str) -> list[str]:
    """What run.sh starts, by a stand-in for accelerate: its folder, its environment, its arguments."""
    files = winner_of(study(trial(0), raw={"launch": launch}))
    script, bin_folder = folder / "run.sh", folder.parent / "bin"
    folder.mkdir(parents=True)
    script.write_text(files["run.sh"])
    bin_folder.mkdir()
    stand_in = bin_folder / "accelerate"
    shown = (
        '"$OMP_NUM_THREADS ${DS_ACCELERATOR-} ${CUDA_VISIBLE_DEVICES-}"'
        ' "${TORCH_CUDA_ARCH_LIST-none}"'
    )
    stand_in.write_text(f'#!/bin/sh\nenv > "$0.environment"\nprintf "%s\\n" "$PWD" {shown} "$@"\n')
    stand_in.chmod(0o755)
    environment |= {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    command = ["sh", script.relative_to(folder.parent)]
    ran = subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_run_script_runs_in_its_own_folder_from_any_other(tmp_path):
    folder = tmp_path / "a folder; 'it' $x `y`"
    (tmp_path / "elsewhere" / folder.name).mkdir(parents=True)
    lines = run_script(
        folder,
        {"kind": "local", "gpus": [3]},
        CDPATH=str(tmp_path / "elsewhere"),
        CUDA_VISIBLE_DEVICES="5",
    )
    cores = len(os.sched_getaffinity(0))
    assert lines == [
        str(folder),
        f"{cores}  5",
        "none",
        "launch",
        "--config_file",
        "accelerate.yaml",
        "train.py",
    ]


@pytest.mark.parametrize("given", ["9.0a", "9.0", "8.0;9.0a", "9.0a+PTX 10.3a", ""])
def test_run_script_mends_the_list_of_architectures_as_trials_do(given, tmp_path):
    launch = LocalLaunch(gpus=(0,))
    mended = work_environment(launch, [], {"TORCH_CUDA_ARCH_LIST": given})["TORCH_CUDA_ARCH_LIST"]
    assert "a" not in mended
    ran = run_script(
        tmp_path / "winner", {"kind": "local", "gpus": [0]}, TORCH_CUDA_ARCH_LIST=given
    )
    assert ran[2] == mended


def test_run_script_stays_on_the_cpu_and_shares_it(tmp_path):
    launch = {"kind": "local", "gpus": [], "cpu_ranks": 64}
    assert run_script(tmp_path / "one" / "winner", launch, CUDA_VISIBLE_DEVICES="0")[1] == "1 cpu "
    assert run_script(tmp_path / "two" / "winner", launch, OMP_NUM_THREADS="7")[1] == "7 cpu "


@pytest.mark.parametrize(
    "given", [{}, {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "1"}]
)
def test_run_script_gives_a_cpu_the_environment_of_trials(given, tmp_path):
    run_script(tmp_path / "winner", {"kind": "local", "gpus": []}, **given)
    lines = (tmp_path / "bin" / "accelerate.environment").read_text().splitlines()
    ran = dict(line.split("=", 1) for line in lines)
    of_trials = work_environment(LocalLaunch(gpus=()), [], given)
    # The order of GPUs and which they are, where compiled code is kept, whether a log has each line
    # at once.
    for name in (
        "CUDA_DEVICE_ORDER",
        GPU_UUIDS,
        "TORCHINDUCTOR_CACHE_DIR",
        "PYTHONUNBUFFERED",
        "PATH",
    ):
        del of_trials[name]
    assert {name: ran.get(name) for name in of_trials} == of_trials
    assert ("GOMP_SPINCOUNT" in ran) == ("GOMP_SPINCOUNT" in of_trials)
    assert ran["PATH"].split(":")[0] == str(tmp_path / "bin"), (
        "of the environment that accelerate is of"
    )


def test_requirements_are_the_recorded_versions():
    versions = {"python": "3.12.3", "torch": "2.13.0+cu130", "deepspeed": "0.19.8+0fd3", "transformers": "5.23.0",
                "accelerate": "1.15.0", "datasets": "5.2.0", "tokenizers": "0.23.3", "numpy": "2.4.6", "cuda": "13.0",
                "carbonopt": "0.1.0", "optuna": "5.0.0"}  # fmt: skip

    def written(raw: dict, **params) -> tuple[str, dict[str, str]]:
        data = study(trial(0, params=params), raw=raw)
        provenance = data.provenance.model_copy(update={"versions": versions})
        text = winner_of(data.model_copy(update={"provenance": provenance}))["requirements.txt"]
        lines = [
            Requirement(line.partition("  #")[0])
            for line in text.splitlines()
            if not line.startswith("#")
        ]
        return text, {requirement.name: str(requirement.specifier) for requirement in lines}

    text, plain = written({})
    assert plain == {"torch": "==2.13.0", "deepspeed": "==0.19.8", "transformers": "==5.23.0", "accelerate": "==1.15.0",
                     "tokenizers": "==0.23.3", "numpy": "==2.4.6", "pyyaml": "", "pydantic": ""}  # fmt: skip
    assert (
        "Python 3.12.3 and CUDA 13.0" in text
        and "recorded: 2.13.0+cu130: pip install torch==2.13.0 --index" in text
    )
    assert (
        "https://download.pytorch.org/whl/cu130\n" in text and "# recorded: 0.19.8+0fd3\n" in text
    )
    _, more = written(changed(dataset={"name_or_path": "Salesforce/wikitext"}), lora_rank=4)
    assert more.items() - plain.items() == {
        ("datasets", "==5.2.0"),
        ("huggingface_hub", ""),
        ("peft", ""),
    }
    _, more = written(
        changed(dataset={"train_files": ["/x/a.txt"], "eval_files": ["/x/b.PARQUET"]})
    )
    assert more.items() - plain.items() == {("pyarrow", "")}


def test_requirements_name_compilers_where_something_is_compiled():
    def needed(raw: dict, **params) -> bool:
        return (
            "C++ compiler" in winner_of(study(trial(0, params=params), raw=raw))["requirements.txt"]
        )

    gpu = {"launch": {"kind": "local", "gpus": [0]}}
    assert not needed(gpu) and not needed(gpu, torch_compile=False, output_layer="standard")
    for params in ({"torch_compile": True}, {"output_layer": "fused"}, {"offload": "optimizer"}):
        assert needed(gpu, **params)
    assert needed(gpu | changed(training_arguments={"torch_compile_backend": "inductor"}))
    assert needed({"launch": {"kind": "local", "gpus": []}})


def test_workload_and_parameters_are_the_study_s_own():
    record = trial(
        0,
        params={"lora_rank": 4, "attention_implementation": "eager", "micro_batch_size_per_gpu": 2},
    )
    data = study(record, raw=changed(training_arguments={"adam_beta2": 0.9}))
    files = winner_of(data)
    workload = yaml.safe_load(files["workload.yaml"])
    assert workload.pop("recorded") == {
        "trial": 0,
        "seed": 3,
        "quality": "perplexity",
        "value": 5.0,
    }
    recorded = data.config.workload.model_dump(exclude_none=True)
    assert Workload(**workload).model_dump(exclude_none=True) == recorded
    assert TrialParams.from_record(json.loads(files["params.json"])) == record.params


@pytest.mark.parametrize(
    ("given", "by_memory", "written"), [(None, 59, 59), (7, 59, 7), (None, None, None)]
)
def test_evaluation_takes_as_many_sequences_as_on_the_study_s_gpu(given, by_memory, written):
    data = study(
        trial(0), raw=changed(**({} if given is None else {"eval_batch_size_per_gpu": given}))
    )
    prepared = Prepared(
        fingerprint="", train_examples=1, eval_examples=1, train_tokens=9, eval_tokens=8, sequence_length=8,
        vocab_size=9, model_parameters=1, versions={}, eval_batch_size_per_gpu=by_memory,
    )  # fmt: skip
    workload = yaml.safe_load(
        winner_of(data.model_copy(update={"prepared": prepared}))["workload.yaml"]
    )
    assert workload.get("eval_batch_size_per_gpu") == written
    assert (workload["recorded"]["train_tokens"], workload["recorded"]["eval_tokens"]) == (9, 8)


def test_the_copy_of_carbonopt_is_verbatim_and_has_what_it_imports():
    files = winner_of(study(trial(0)))
    copied = {name: text for name, text in files.items() if name.startswith("carbonopt/")}
    package = Path(carbonopt.__file__).parents[1]
    assert {name: (package / name).read_bytes() for name in copied} == {
        name: text.encode() for name, text in copied.items()
    }
    assert {
        "carbonopt/__init__.py",
        "carbonopt/train/rerun.py",
        "carbonopt/train/tasks/causal_lm.py",
    } <= {*copied}
    # What belongs to the study, its preparation and its forks stays out, and so does all that isn't
    # train's or below.
    assert not {
        "carbonopt/train/prepare.py",
        "carbonopt/train/forked_rank.py",
        "carbonopt/train/fork_template.py",
        "carbonopt/study.py",
    } & {*copied}
    for_types = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", re.M)
    imported = {
        name
        for text in copied.values()
        for name in re.findall(r"^\s*from (carbonopt[\w.]*) import", for_types.sub("", text), re.M)
    }
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in copied
    }
    assert imported <= modules


def test_requirements_are_what_the_copy_imports():
    files = winner_of(
        study(
            trial(0, params={"lora_rank": 4, "float8": "tensorwise"}),
            raw=changed(dataset={"train_files": ["/x/a.parquet"]}),
        )
    )
    listed = {
        line.partition("=")[0].split()[0]
        for line in files["requirements.txt"].splitlines()
        if line[0] != "#"
    }
    text = "".join(text for name, text in files.items() if name.endswith(".py"))
    imported = {
        module.partition(".")[0]
        for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.M)
    }
    third_party = imported - sys.stdlib_module_names - {"carbonopt", "inputs"}
    of_data_sets = {"datasets", "huggingface_hub"}
    assert third_party - {"yaml", "pydantic_core"} - of_data_sets == listed - {
        "pyyaml",
        "accelerate",
    }
    assert {"pyyaml", "accelerate"} <= listed and not of_data_sets & listed


def test_a_replay_has_no_script_and_says_why():
    files = winner_of(study(trial(0), raw=REPLAY))
    assert yaml.safe_load(files["rerun.yaml"])["launch"]["table"] == "data/runs.jsonl"
    assert sorted(files) == ["model_card.md", "params.json", "rerun.yaml", "training_args.yaml"]
    assert "there is no train.py here" in files["model_card.md"]
    assert (
        not any("/somewhere" in text for text in files.values())
        and "run.sh" not in files["model_card.md"]
    )
    settings = yaml.safe_load(files["training_args.yaml"])
    assert "deepspeed" not in settings and "optim" not in settings


def test_no_winner_no_files():
    assert winner_of(study(pruned(0))) == {}

    def outside_the_copy(data: StudyData) -> set[str]:
        return {"carbonopt/" if name.startswith("carbonopt/") else name for name in winner_of(data)}

    of_models = {*NAMES} - {CONFIG}  # a script's alone
    assert outside_the_copy(study(trial(0))) == of_models - {
        "inputs.py",
        "inputs.json",
    }, "the text is built in"
    assert (
        outside_the_copy(study(trial(0), raw=changed(dataset={"train_files": ["/x/a.txt"]})))
        == of_models
    )


# ----------------------------------------------------------------------------------------------------------------
# card


def card_words(text: str) -> str:
    return text.partition("\n---\n")[2]


def test_card_has_what_the_hub_reads():
    model, dataset = "EleutherAI/gpt-neo-125m", "Salesforce/wikitext"
    raw = changed(
        model={"name_or_path": model},
        dataset={"name_or_path": dataset, "config": "wikitext-2-raw-v1"},
    )
    data = gpu_study(
        on_gpu(0, perplexity=4.98765), on_gpu(1, 20e3, perplexity=4.0), name="a study", raw=raw
    )
    text = winner_of(data)["model_card.md"]
    card = ModelCard(text).data
    grams = 11e3 / 3.6e6 * 230 * 1.1
    assert card.co2_eq_emissions == {
        "emissions": float(f"{grams:.3g}"),
        "source": (
            "carbonopt with CodeCarbon; energy of the training window: GPU measured, CPU modelled,"
            " RAM modelled; 230 g CO2e/kWh (given in the study file), PUE 1.1"
        ),
        "training_type": "fine-tuning",
        "geographical_location": "USA",
        "hardware_used": "1 × a GPU",
    }
    (result,) = card.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == (
        dataset,
        "wikitext-2-raw-v1",
        "validation",
    )
    assert (result.task_type, result.metric_type, result.metric_value) == (
        "text-generation",
        "perplexity",
        4.988,
    )
    assert (card.model_name, card.base_model, card.datasets) == ("a study", model, [dataset])
    assert f"emitted {grams * 1000:.3g} mg CO2e:" in text or f"emitted {grams:.3g} g CO2e:" in text
    assert (
        "./run.sh\n" in text
        and "pip install -r requirements.txt\n" in text
        and "data/" not in card_words(text)
    )
    assert (
        "repeats trial 0 with its seed, 3, which reached a perplexity of 4.988. Another seed"
        in text
    )
    assert "It reached 4.988 (one run)." in text and "in a study of 2 trials" in text


def test_card_is_valid_whatever_the_names_and_tells_no_path():
    raw = changed(
        dataset={"train_files": [f"/home/me/{EVIL.replace('/', '')}.txt"]},
        model={"name_or_path": "/home/me/m"},
    )
    text = winner_of(study(trial(0), name=EVIL, raw=raw))["model_card.md"]
    card = ModelCard(text)
    assert card.data.model_name == EVIL and card.data.base_model is None
    assert card.data.eval_results[0].dataset_name == f"{EVIL.replace('/', '')}.txt"
    assert (
        "<script>" not in card.text and "/home/me" not in text and "trained from m on" in card.text
    )
    assert "Put the data (" in card.text and "--data FOLDER" in card.text


def test_card_of_gpu_energy_alone_names_no_other_component():
    raw = {
        "carbon": {
            **study().config.carbon.model_dump(mode="json", exclude_none=True),
            "objective": "gpu",
        }
    }
    card = ModelCard(winner_of(gpu_study(on_gpu(0), raw=raw))["model_card.md"])
    assert (
        "GPU measured; 230 g" in card.data.co2_eq_emissions["source"]
        and "of the GPUs alone" in card.text
    )
    assert card.data.co2_eq_emissions["training_type"] == "pre-training"


def test_card_of_repeats_says_that_its_figures_are_means():
    same = {"params": trial(0).params.model_dump()}
    records = (
        trial(0),
        *(
            trial(number, seed=3 + number, repeat_of=0, perplexity=5.0 + number / 100, **same)
            for number in (1, 2)
        ),
    )
    data = study(*records, raw={"confirm": {"seeds": 3}})
    rec = recommend(data)
    assert (
        rec.trial == 0 and rec.confidence.seeds == 3 and TrialParams(**same["params"]) == rec.params
    )
    text = winner_of(data)["model_card.md"]
    assert f"It reached {PERPLEXITY.text(rec.value)} (geometric mean over 3 seeds)." in text
    assert "means over 3 seeds:" in text
    assert yaml.safe_load(winner_of(data)["workload.yaml"])["recorded"]["value"] == 5.0
