"""The files of winner/: each is what its reader takes, whatever the names in it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from small_studies import REPLAY, gpu_study, on_gpu, pruned, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.config import Budget
from carbonopt.record import StudyData
from carbonopt.report.winner import NAMES, winner_files
from carbonopt.study_file import load_study
from carbonopt.trial import TrialParams

EVIL = """<script>alert(1)</script> | `x` [a](javascript:b) "'&{{7*7}} %_&$ --- </script>"""


def winner_of(data: StudyData, folder: Path = Path("winner"), **given: str) -> dict[str, str]:
    return winner_files(data, recommend(data), folder, given)


def changed(**workload) -> dict:
    """The study's raw workload with these keys instead."""
    return {"workload": {**study().config.workload.model_dump(mode="json", exclude_none=True), **workload}}


def test_rerun_is_a_valid_study_of_the_winner_alone(tmp_path):
    record = trial(4, params={"learning_rate": 1e-5, "gradient_checkpointing": True})
    raw = {"search": study().config.search.model_dump(mode="json", exclude_none=True)}
    raw["search"]["space"]["gradient_checkpointing"] = {"choices": [True, False]}
    raw["search"]["start"] = {"epochs": 1}
    data = study(record, trial(5, 2e-3, 4.0), name="N" * 200, raw=raw)
    for name, text in winner_of(data).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
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
    (tmp_path / "rerun.yaml").write_text(winner_of(study(trial(0), name=name))["rerun.yaml"], encoding="utf-8")
    assert load_study(tmp_path / "rerun.yaml").name == f"{name} (winner)"
    data = study(trial(0), raw={"carbon": {"country": "USA", "region": name}})
    (tmp_path / "rerun.yaml").write_text(winner_of(data)["rerun.yaml"], encoding="utf-8")
    assert load_study(tmp_path / "rerun.yaml").carbon.region == name
    columns = changed(dataset={"train_files": [f"/data/{name}/text.csv"], "text_column": name})
    dataset = yaml.safe_load(winner_of(study(trial(0), raw=columns))["workload.yaml"])["dataset"]
    assert (dataset["text_column"], dataset["train_files"]) == (name, [f"/data/{name}/text.csv"])


def test_training_arguments_are_what_transformers_takes():
    params = {
        "precision": "bf16",
        "warmup_ratio": 0.1,
        "lr_scheduler": "cosine",
        "weight_decay": 0.01,
        "gradient_checkpointing": True,
    }
    files = winner_of(study(trial(0, params=params)), **{"ds_config.json": '{"zero": 1}'})
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
        "warmup_steps": 0.1,
        "gradient_checkpointing": True,
    }
    assert files["ds_config.json"] == '{"zero": 1}'
    assert json.loads(files["params.json"])["gradient_accumulation_steps"] == 2


TRIED = [
    {},
    {"precision": "fp32", "warmup_ratio": 0.13, "weight_decay": 0.1, "lr_scheduler": "cosine"},
    {"warmup_ratio": 1.0, "gradient_checkpointing": True, "torch_compile": False},
    {"zero_stage": 2, "offload": "optimizer"},
]


@pytest.mark.parametrize("params", TRIED, ids=lambda params: "-".join(params) or "defaults")
@pytest.mark.parametrize("given", [{}, {"optim": "adafactor", "lr_scheduler_type": "linear", "adam_beta2": 0.99}])
def test_training_arguments_are_those_of_the_trial(params, given, tmp_path):
    """Beside DeepSpeed's own, which needs its processes; what is left to a default is the same default."""
    from transformers import TrainingArguments

    from carbonopt.train.arguments import training_arguments

    given = {key: value for key, value in given.items() if key != "lr_scheduler_type" or "lr_scheduler" not in params}
    record = trial(0, params=params)
    data = study(record, raw={**changed(training_arguments=given), "launch": {"kind": "local", "gpus": []}})
    of_trial = training_arguments(record.params, data.config.workload, 40, 3, False, str(tmp_path), {})
    written = yaml.safe_load(winner_of(data)["training_args.yaml"])
    assert written.pop("deepspeed") == "ds_config.json"
    epochs = written.pop("num_train_epochs")
    mine = TrainingArguments(
        **written, deepspeed={}, output_dir=str(tmp_path), max_steps=40, report_to="none", save_strategy="no",
        logging_strategy="no", logging_nan_inf_filter=False, average_tokens_across_devices=False, disable_tqdm=True,
    )  # fmt: skip
    assert epochs == record.params.epochs
    one, other = mine.to_dict(), of_trial.to_dict()
    warmups = [arguments.get_warmup_steps(40) for arguments in (mine, of_trial)]
    assert warmups[0] == warmups[1]
    assert {key: value for key, value in one.items() if other[key] != value} == (
        {"warmup_steps": 0.13} if params.get("warmup_ratio") == 0.13 else {}
    )


def test_offloaded_states_on_a_gpu_have_no_optimizer_that_transformers_knows():
    record = trial(0, params={"offload": "optimizer"})
    assert "optim" not in yaml.safe_load(winner_of(study(record))["training_args.yaml"])
    chosen = study(record, raw=changed(training_arguments={"optim": "adafactor"}))
    assert yaml.safe_load(winner_of(chosen)["training_args.yaml"])["optim"] == "adafactor"


def test_deepspeed_settings_are_made_where_the_trial_s_are_gone():
    params = {"zero_stage": 3, "offload": "parameters", "world_size": 2, "micro_batch_size_per_gpu": 4}
    settings = json.loads(winner_of(study(trial(0, params=params)))["ds_config.json"])
    assert settings["train_batch_size"] == 16 and settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_reads_its_file(stage, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    params = {"zero_stage": stage, "world_size": 2}
    path = tmp_path / "accelerate.yaml"
    path.write_text(winner_of(study(trial(0, params=params)))["accelerate.yaml"], encoding="utf-8")
    read = load_config_from_file(str(path))
    assert read.distributed_type == DistributedType.DEEPSPEED and read.num_processes == 2
    assert read.deepspeed_config == {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": stage == 3}


def run_script(folder: Path, launch: dict, **environment: str) -> list[str]:
    """What run.sh starts, by a stand-in for accelerate: its folder, its environment, its arguments."""
    files = winner_of(study(trial(0), raw={"launch": launch}))
    script, bin_folder = folder / "run.sh", folder.parent / "bin"
    folder.mkdir(parents=True)
    script.write_text(files["run.sh"])
    bin_folder.mkdir()
    stand_in = bin_folder / "accelerate"
    stand_in.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$PWD" "$OMP_NUM_THREADS ${DS_ACCELERATOR-} ${CUDA_VISIBLE_DEVICES-}" "$@"\n'
    )
    stand_in.chmod(0o755)
    environment |= {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    command = ["sh", script.relative_to(folder.parent)]
    ran = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_run_script_runs_in_its_own_folder_from_any_other(tmp_path):
    folder = tmp_path / "a folder; 'it' $x `y`"
    (tmp_path / "elsewhere" / folder.name).mkdir(parents=True)
    lines = run_script(
        folder, {"kind": "local", "gpus": [3]}, CDPATH=str(tmp_path / "elsewhere"), CUDA_VISIBLE_DEVICES="5"
    )
    cores = len(os.sched_getaffinity(0))
    assert lines == [str(folder), f"{cores}  5", "launch", "--config_file", "accelerate.yaml", "train.py"]


def test_run_script_stays_on_the_cpu_and_shares_it(tmp_path):
    launch = {"kind": "local", "gpus": [], "cpu_ranks": 64}
    assert run_script(tmp_path / "one" / "winner", launch, CUDA_VISIBLE_DEVICES="0")[1] == "1 cpu "
    assert run_script(tmp_path / "two" / "winner", launch, OMP_NUM_THREADS="7")[1] == "7 cpu "


def test_paths_lead_from_the_folder_where_they_can(tmp_path):
    inside = [str(tmp_path / "data" / "a file.txt")]
    data = study(trial(0), raw=changed(dataset={"train_files": inside, "eval_files": ["/elsewhere/eval.txt"]}))
    dataset = yaml.safe_load(winner_of(data, tmp_path / "report" / "winner")["workload.yaml"])["dataset"]
    assert dataset["train_files"] == ["../../data/a file.txt"] and dataset["eval_files"] == ["/elsewhere/eval.txt"]


def test_workload_says_what_the_model_and_the_evaluation_are():
    record = trial(0, params={"lora_rank": 4, "attention_implementation": "eager", "micro_batch_size_per_gpu": 2})
    workload = yaml.safe_load(winner_of(study(record))["workload.yaml"])
    assert workload["lora_rank"] == 4 and workload["attention_implementation"] == "eager"
    assert workload["eval_batch_size_per_gpu"] == 8 and workload["model"]["trust_remote_code"] is False
    assert workload["recorded"] == {"trial": 0, "perplexity": 5.0}
    assert "lora_rank" not in winner_of(study(trial(0, params={"lora_rank": 0})))["workload.yaml"]


def test_a_replay_has_no_script_and_says_why():
    files = winner_of(study(trial(0), raw=REPLAY))
    assert sorted(files) == ["model_card.md", "params.json", "rerun.yaml", "training_args.yaml"]
    assert "there is no train.py here" in files["model_card.md"]
    assert "/somewhere" not in files["model_card.md"]
    settings = yaml.safe_load(files["training_args.yaml"])
    assert "deepspeed" not in settings and "optim" not in settings


def test_no_winner_no_files():
    assert winner_of(study(pruned(0))) == {}
    assert sorted(winner_of(study(trial(0)))) == sorted(NAMES)


# ---------------------------------------------------------------------------------------------------------------- card


def test_card_has_what_the_hub_reads():
    model, dataset = "EleutherAI/gpt-neo-125m", "Salesforce/wikitext"
    raw = changed(model={"name_or_path": model}, dataset={"name_or_path": dataset, "config": "wikitext-2-raw-v1"})
    data = gpu_study(on_gpu(0, perplexity=4.98765), on_gpu(1, 20e3, perplexity=4.0), name="a study", raw=raw)
    text = winner_of(data)["model_card.md"]
    card = ModelCard(text).data
    grams = 11e3 / 3.6e6 * 230 * 1.1
    assert card.co2_eq_emissions == {
        "emissions": float(f"{grams:.3g}"),
        "source": "carbonopt with CodeCarbon; energy of the training window: GPU measured, CPU modelled, RAM modelled; "
        "230 g CO2e/kWh (given in the study file), PUE 1.1",
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
    assert (result.task_type, result.metric_type, result.metric_value) == ("text-generation", "perplexity", 4.988)
    assert (card.model_name, card.base_model, card.datasets) == ("a study", model, [dataset])
    assert f"emitted {grams * 1000:.3g} mg CO2e:" in text or f"emitted {grams:.3g} g CO2e:" in text
    assert "It reached 4.988 (one run)." in text and "in a study of 2 trials" in text


def test_card_is_valid_whatever_the_names_and_tells_no_path():
    raw = changed(
        dataset={"train_files": [f"/home/me/{EVIL.replace('/', '')}.txt"]}, model={"name_or_path": "/home/me/m"}
    )
    text = winner_of(study(trial(0), name=EVIL, raw=raw))["model_card.md"]
    card = ModelCard(text)
    assert card.data.model_name == EVIL and card.data.base_model is None
    assert card.data.eval_results[0].dataset_name == f"{EVIL.replace('/', '')}.txt"
    assert "<script>" not in card.text and "/home/me" not in text and "trained from m on" in card.text


def test_card_of_gpu_energy_alone_names_no_other_component():
    raw = {"carbon": {**study().config.carbon.model_dump(mode="json", exclude_none=True), "objective": "gpu"}}
    card = ModelCard(winner_of(gpu_study(on_gpu(0), raw=raw))["model_card.md"])
    assert "GPU measured; 230 g" in card.data.co2_eq_emissions["source"] and "of the GPUs alone" in card.text
    assert card.data.co2_eq_emissions["training_type"] == "pre-training"


def test_card_of_repeats_says_that_its_figures_are_means():
    same = {"params": trial(0).params.model_dump()}
    records = (
        trial(0),
        *(trial(number, seed=3 + number, repeat_of=0, perplexity=5.0 + number / 100, **same) for number in (1, 2)),
    )
    data = study(*records, raw={"confirm": {"seeds": 3}})
    rec = recommend(data)
    assert rec.trial == 0 and rec.confidence.seeds == 3 and TrialParams(**same["params"]) == rec.params
    text = winner_of(data)["model_card.md"]
    assert "It reached 5.01 (geometric mean over 3 seeds)." in text and "means over 3 seeds:" in text
    assert yaml.safe_load(winner_of(data)["workload.yaml"])["recorded"]["perplexity"] == 5.0
