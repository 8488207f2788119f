"""Supervised fine-tuning: real trials of a tiny model on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import within
from export.test_rerun import Rerun
from small_studies import study
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.study_file.reader import parse_study
from carbonopt.train.data.packing import IGNORED
from carbonopt.train.tasks.task import task_for

STUDIES = Path(__file__).parents[3] / "studies"
LENGTH = 60  # tokens; no multiple of what batches are padded to
MODEL = {
    "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "initializer_range": 0.1,
    # or each division drops other activations
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 16, "word_embed_proj_dim": 16}
GEMMA2 = {"model_type": "gemma2", **SMALL, "num_key_value_heads": 1, "intermediate_size": 16}
PARAMS = {
    "global_batch_size": 16,
    "micro_batch_size_per_gpu": 8,
    "learning_rate": 1e-2,
    "epochs": 1,
}
SPACE = {"global_batch_size": 16, "learning_rate": 1e-2, "epochs": 1}
ROWS, EVAL_ROWS = 96, 13  # of the latter an odd number: ranks with unequal shares


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Sums of numbers, which have responses of different lengths."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        terms = [
            str(term)
            for term in random.integers(0, 10 ** random.integers(1, 6), random.integers(2, 6))
        ]
        rows.append(
            {
                "prompt": f"Add {', '.join(terms)}.\n",
                "response": f"{'+'.join(terms)}={sum(map(int, terms))}",
            }
        )
    return rows


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def workload(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    files = {
        "train_files": [write(folder / "train.jsonl", sums(ROWS, 0))],
        "eval_files": [write(folder / "eval.jsonl", sums(EVAL_ROWS, 1))],
    }
    return {
        "task": "sft",
        "model": {"from_config": MODEL},
        "tokenizer": {"train_bpe": 300},
        "dataset": files,
        "sequence_length": LENGTH,
        "evaluations": 2,
    }


@pytest.fixture(scope="module")
def prepared(workload, tmp_path_factory):
    """The folder, of each packing."""
    folders: dict[bool, Path] = {}

    def of(packing: bool) -> Path:
        if packing not in folders:
            folder = tmp_path_factory.mktemp("study")
            spec = {
                "workload": {**workload, "packing": packing},
                "space": {**SPACE, "output_layer": {"choices": ["standard", "fused"]}},
                "prepared_dir": str(folder / "prepared"),
                "fingerprint": "f",
            }
            assert start("prepare", spec, folder).exit_code == FINISHED_EXIT
            folders[packing] = folder / "prepared"
        return folders[packing]

    return of


@pytest.fixture(scope="module")
def trial(workload, prepared, tmp_path_factory):
    def run(packing=False, save=False, seed=0, model=None, **params) -> Run:
        folder, params = tmp_path_factory.mktemp("trial"), {**PARAMS, **params}
        changed = {"packing": packing, "model": model or workload["model"]}
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": {**workload, **changed},
            "prepared_dir": str(prepared(packing)), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        done = start("rank_main", spec, folder, params.get("world_size", 1))
        assert done.exit_code == FINISHED_EXIT
        return done

    return run


@pytest.fixture(scope="module")
def reference(trial) -> Run:
    return trial()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"zero_stage": 0, "micro_batch_size_per_gpu": 4},
        {"zero_stage": 1, "micro_batch_size_per_gpu": 16},
        {"zero_stage": 2, "micro_batch_size_per_gpu": 2, "offload": "optimizer"},
        {"zero_stage": 2, "micro_batch_size_per_gpu": 4, "world_size": 2},
        {"zero_stage": 3, "micro_batch_size_per_gpu": 4, "world_size": 2, "output_layer": "fused"},
        {"zero_stage": 3, "offload": "parameters", "attention_implementation": "eager"},
        {"torch_compile": True, "micro_batch_size_per_gpu": 4},
    ],
    ids=lambda params: "-".join(str(value) for value in params.values()),
)
def test_how_a_step_is_computed_does_not_change_it(params, reference, trial):
    assert trial(**params).values == pytest.approx(reference.values, rel=1e-5)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_perplexity_and_another_seed_another(reference, trial):
    assert trial().points == reference.points
    assert trial(seed=1).points[0].sum != reference.points[0].sum


@pytest.fixture(scope="module")
def packed(trial) -> Run:
    """Several examples a row, ZeRO 2, one rank; and its model."""
    return trial(packing=True, zero_stage=2, save=True)


@pytest.mark.slow
def test_how_a_step_of_packed_rows_is_computed_does_not_change_it_either(
    packed, trial, prepared, reference
):
    rows = PreparedFolder(prepared(True)).read_summary()
    assert 2 * PARAMS["global_batch_size"] <= rows.train_examples < ROWS / 1.5
    other = trial(packing=True, zero_stage=3, world_size=2, micro_batch_size_per_gpu=2)
    assert other.values == pytest.approx(packed.values, rel=1e-5)
    assert {point.count for point in packed.points} == {point.count for point in reference.points}
    assert packed.values[-1] != pytest.approx(reference.values[-1], rel=1e-3), (
        "other global batches"
    )


def independent_perplexity(model_folder: Path, eval_file: str) -> tuple[float, int]:
    """Plain transformers, row by row: prompt and response tokenized by themselves, no padding."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    total, count = 0.0, 0
    for row in map(json.loads, Path(eval_file).read_text().splitlines()):
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor((prompt + response)[: LENGTH + 1])
        with torch.no_grad():
            log_probabilities = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        of_targets = log_probabilities[torch.arange(len(ids) - 1), ids[1:]][len(prompt) - 1 :]
        total, count = total - of_targets.sum().item(), count + len(of_targets)
    return PERPLEXITY.value(total, count), count


@pytest.mark.slow
def test_perplexity_is_what_plain_transformers_computes_on_the_saved_model(packed, trial, workload):
    (eval_file,) = workload["dataset"]["eval_files"]
    ragged = trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=4, save=True)
    for run in (packed, ragged):
        perplexity, count = independent_perplexity(run.folder / "model", eval_file)
        assert (
            run.values[-1] == pytest.approx(perplexity, rel=1e-5) and run.points[-1].count == count
        )


@pytest.mark.slow
def test_a_pretrained_model_goes_on_from_its_weights(packed, trial):
    """Under ZeRO 3, where loading partitions; a learning rate of nothing leaves the weights as they
    were.
    """
    model = {"name_or_path": str(packed.folder / "model")}
    run = trial(
        model=model, zero_stage=3, learning_rate=1e-12, world_size=2, micro_batch_size_per_gpu=4
    )
    assert run.values == pytest.approx(packed.values[-1:] * 2, rel=1e-5)


@pytest.mark.slow
def test_every_optional_dimension(trial, reference):
    options = {
        "precision": "bf16",
        "gradient_checkpointing": True,
        "lora_rank": 4,
        "output_layer": "fused",
    }
    for packing in (False, True):
        first, last = trial(packing=packing, **options, attention_implementation="eager").values
        assert reference.values[-1] < last < first, (
            "adapters learn, and learn less than all weights"
        )


# -----------------------------------------------------------------------------------------------------------
# the data


def prepare(workload: dict, folder: Path, **space):
    folder.mkdir()
    task = task_for(workload)
    return task, task.prepare(Space.model_validate(SPACE | space), PreparedFolder(folder), "f")


def test_targets_are_the_responses_and_their_end(workload, tmp_path):
    rows = [{"prompt": "Say hi.\n", "response": "hi"}, {"prompt": "Count.\n", "response": "1 2 3"}]
    data = {
        "train_files": [write(tmp_path / "rows.jsonl", rows * 4)],
        "eval_files": [write(tmp_path / "e.jsonl", rows)],
    }
    task, summary = prepare({**workload, "dataset": data}, tmp_path / "prepared")
    tokenizer = AutoTokenizer.from_pretrained(PreparedFolder(tmp_path / "prepared").tokenizer)
    examples = task.examples(PreparedFolder(tmp_path / "prepared"), "eval")
    batch = examples.batch(np.array([1, 0, -1]))
    assert batch["input_ids"].shape == batch["targets"].shape and "position_ids" not in batch
    for index, row in ((0, rows[1]), (1, rows[0])):
        targets = batch["targets"][index]
        assert tokenizer.decode(targets[targets != IGNORED]) == row["response"] + "<|endoftext|>"
        read = batch["input_ids"][index][
            : len(tokenizer(row["prompt"] + row["response"])["input_ids"])
        ]
        assert tokenizer.decode(read) == row["prompt"] + row["response"]
    assert (batch["targets"][2] == IGNORED).all()
    assert (
        summary.eval_tokens
        == int((batch["targets"] != IGNORED).sum())
        == int(examples.weights.sum())
    )
    assert (summary.train_examples, summary.eval_examples, summary.notes) == (8, 2, ())


def test_what_is_left_out_or_cut_is_counted(workload, tmp_path):
    long = "word " * LENGTH
    rows = [
        *sums(10, 0),
        {"prompt": long, "response": "never reached"},
        {"prompt": "Nothing?\n", "response": " "},
        {"prompt": "Nothing?\n", "response": None},
        {"prompt": "Much?\n", "response": long},
    ]
    data = {
        "train_files": [write(tmp_path / "rows.jsonl", rows)],
        "eval_files": workload["dataset"]["eval_files"],
    }
    task, summary = prepare(
        {**workload, "dataset": data, "tokenizer": {"kind": "byte"}}, tmp_path / "prepared"
    )
    long_sums = sum(
        len((row["prompt"] + row["response"]).encode()) > LENGTH + 1 for row in rows[:10]
    )
    assert all(len(row["prompt"]) < LENGTH for row in rows[:10])
    train, _ = summary.notes
    said = (
        "Of 14 training rows 11 are used: 2 had no response, the prompt of 1 left no room for a"
        " response, {} were cut"
    )
    assert train.startswith(said.format(long_sums + 1))
    assert summary.train_examples == 11
    lengths = (
        task.examples(PreparedFolder(tmp_path / "prepared"), "train").batch(np.arange(11))[
            "input_ids"
        ]
    ).shape
    assert lengths == (11, LENGTH)


def test_the_built_in_pairs_need_no_file(workload, tmp_path):
    _, summary = prepare({**workload, "dataset": {"builtin": "python-docs"}}, tmp_path / "prepared")
    assert summary.train_examples > 50 and summary.eval_examples > 5
    assert summary.eval_tokens < summary.eval_examples * LENGTH


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_by_which_kernels_are_loaded_is_one_of_examples(workload, packing, tmp_path):
    task, _ = prepare({**workload, "packing": packing}, tmp_path / "prepared")
    folder = PreparedFolder(tmp_path / "prepared")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder.model_config)).eval()
    loss = task.example_loss(model, folder)
    loss.backward()
    count = 2 * task.examples(folder, "train").weights[0]
    assert loss.item() / count == pytest.approx(np.log(model.config.vocab_size), rel=0.2)


def with_data(**dataset):
    return {"dataset": dataset}


def test_varlen_without_packing_is_refused_by_the_study_file(workload):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    raw["search"]["space"]["attention_implementation"] = {"choices": ["sdpa", "varlen"]}
    parse_study({**raw, "workload": {**workload, "packing": True}}, "study.yaml")
    with pytest.raises(BadInput, match="varlen"):
        parse_study({**raw, "workload": workload}, "study.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packing": "yes"}, "workload.packing"),
        ({"sequence_length": None}, "workload.sequence_length"),
        ({"tokenizer": None}, "a model from_config has no tokenizer"),
        (with_data(builtin="digits"), "workload.dataset.builtin"),
        (
            with_data(builtin="python-docs", text_column="text"),
            "unknown key workload.dataset.text_column",
        ),
        (with_data(builtin="python-docs", messages_column="messages"), "python-docs has not"),
        (
            with_data(train_files=["a.jsonl"], response_column="prompt"),
            "must differ, but both are 'prompt'",
        ),
        (
            with_data(train_files=["a.jsonl"], messages_column="m", prompt_column="p"),
            "messages_column goes without",
        ),
        (with_data(train_files=["a.csv"], messages_column="m"), "can hold lists"),
        (
            with_data(train_files=["a.jsonl"], messages_column="m"),
            "needs a tokenizer that has a chat template",
        ),
    ],
)
def test_a_study_file_that_can_not_be_is_refused(workload, changes, said):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    settings = {key: value for key, value in {**workload, **changes}.items() if value is not None}
    with pytest.raises(BadInput) as refused:
        parse_study({**raw, "workload": settings}, "study.yaml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([{"prompt": "a"}], {}, "has no column 'response'; its columns are prompt"),
        ([{"prompt": "a", "response": 3}] * 2, {}, "column 'response' must hold text, but"),
        ([{"prompt": "a", "response": ""}] * 20, {}, "but of its 18 rows 18 had no response"),
        (
            [{"prompt": "a" * 100, "response": "b"}] * 20,
            {},
            "the prompt of 18 left no room for a response",
        ),
        (
            [{"prompt": "a", "response": "b"}],
            {},
            "must be enough to set eval_fraction=0.1 of them aside",
        ),
        (sums(20, 0), {"packing": True, "model": {"from_config": OPT}}, "packing: opt lets"),
        (
            sums(20, 0),
            {"packing": True, "attention_implementation": "flash_attention_2"},
            "batches of one row alone",
        ),
        (sums(20, 0), {"sequence_length": 2 * LENGTH}, "number of positions, but got 120 and 60"),
        (sums(20, 0), {"output_layer": "fused", "model": {"from_config": GEMMA2}}, "scales"),
    ],
)
def test_data_and_models_with_which_every_trial_would_fail_are_refused(
    workload, rows, changes, said, tmp_path
):
    space = {
        key: changes[key] for key in changes if key in ("attention_implementation", "output_layer")
    }
    data = {"train_files": [write(tmp_path / "rows.jsonl", rows)]}
    settings = {**workload, "dataset": data, "tokenizer": {"kind": "byte"}}
    settings |= {key: value for key, value in changes.items() if key not in space}
    settings["packing"] = settings.get("packing", False) or "attention_implementation" in space
    with pytest.raises(BadInput) as refused:
        prepare(settings, tmp_path / "prepared", **space)
    assert said in str(refused.value) and str(refused.value).count(". ") == 0


# ---------------------------------------------------------------------------------------------------
# shipped and copied


@pytest.mark.slow
def test_the_winner_s_copy_reaches_the_recorded_perplexity(tmp_path):
    settings = {
        "task": "sft",
        "tokenizer": {"train_bpe": 300},
        "dataset": {"builtin": "python-docs"},
        "packing": True,
    }
    rerun = Rerun(
        tmp_path,
        settings,
        {"cpu_ranks": 2},
        global_batch_size=8,
        micro_batch_size_per_gpu=2,
        epochs=2,
    )
    assert (
        "carbonopt/train/tasks/sft.py" in rerun.files
        and "carbonopt/train/tasks/causal_lm.py" not in rerun.files
    )
    rerun.run()


@pytest.mark.slow
def test_the_small_study_runs_to_its_end(tmp_path):
    done = within("run", STUDIES / "sft-small.yaml", "--out", tmp_path / "out", "--trials", "1")
    assert done.returncode == 0, done.stderr
    record = json.loads(within("export", tmp_path / "out", "--format", "jsonl").stdout)
    assert record["state"] == "complete" and record["quality"]["value"] < 60
    assert record["quality"]["count"] > 500


@pytest.mark.slow
def test_the_small_batch_sweep_sets_everything_over_the_batch(tmp_path):
    done = within("run", STUDIES / "sft-batch-sweep-small.yaml", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    effect = json.loads((tmp_path / "out" / "report" / "data" / "report.json").read_text())["batch"]
    assert [at["global_batch_size"] for at in effect["batches"]] == [4, 8, 16, 32]
    for at in effect["batches"]:
        for what in ("duration_s", "peak_memory_gib", "energy_kwh", "emissions_kg_co2e", "quality"):
            assert at[what]["lowest"] > 0
    reached = [at["quality"]["lowest"] for at in effect["batches"]]
    assert reached == sorted(reached) and effect["best_quality"] == 4, (
        "at equal epochs fewer steps reach less"
    )


PLAY = """\
All:
Speak, speak.

First Citizen:
You are resolved?
Are you not?

Enter MENENIUS

MENENIUS:

All:
Resolved.
"""


def test_a_play_becomes_prompts_and_responses(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    command = [sys.executable, str(STUDIES / "dialogue.py"), str(tmp_path / "play.txt")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    citizen = "First Citizen:\nYou are resolved?\nAre you not?"
    assert [json.loads(line) for line in lines] == [
        {"prompt": "All:\nSpeak, speak.\n\n", "response": citizen},
        {"prompt": f"{citizen}\n\n", "response": "All:\nResolved."},
    ]
