"""Direct preference optimization: what a pair's loss is, and real trials of tiny models on the CPU
beside TRL's.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import within
from small_studies import study
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.errors import BadInput
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.study_file.reader import parse_study
from carbonopt.train.data.examples import ExampleMicroBatches
from carbonopt.train.data.packing import IGNORED, Division
from carbonopt.train.data.pair_rows import PreferenceExamples
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.tasks.dpo import DPO
from carbonopt.train.tasks.task import task_for

ROOT = Path(__file__).parents[3]
LENGTH, TRAIN_PAIRS, EVAL_PAIRS = 40, 160, 21
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32,
    "max_position_embeddings": LENGTH, "initializer_range": 0.1,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": LENGTH,
    "initializer_range": 0.1,
}
SPACE = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
PARAMS = {"global_batch_size": 8, "micro_batch_size_per_gpu": 8, "learning_rate": 1e-2, "epochs": 1}


def pairs(count: int) -> list[dict[str, str]]:
    """The chosen answer has more vowels; they differ in length, so that every batch is ragged."""
    random = np.random.default_rng(count)

    def word(letters: str) -> str:
        return "".join(random.choice(list(letters), random.integers(3, 17)))

    return [
        {"prompt": "say: ", "chosen": word("aeioubcd"), "rejected": word("aebcdfgh")}
        for _ in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared_in(folder: Path, **changes: Any) -> PreparedFolder:
    given = {
        "task": "dpo",
        "model": {"from_config": GPT2},
        "tokenizer": {"train_bpe": 280},
        "dataset": {
            "train_files": [write_jsonl(folder / "train.jsonl", pairs(TRAIN_PAIRS))],
            "eval_files": [write_jsonl(folder / "eval.jsonl", pairs(EVAL_PAIRS))],
        },
        "sequence_length": LENGTH,
        "evaluations": 2,
        **changes,
    }
    space = Space.model_validate(SPACE)
    prepare(
        PrepareSpec(
            workload=given, space=space, prepared_dir=str(folder / "prepared"), fingerprint="f"
        )
    )
    return PreparedFolder(folder / "prepared")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedFolder:
    return prepared_in(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def pretrained(prepared, tmp_path_factory) -> PreparedFolder:
    """From weights in a folder, with their tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return prepared_in(
        folder,
        model={"name_or_path": str(folder / "base")},
        tokenizer=None,
        training_arguments={"optim": "sgd"},
    )


# -------------------------------------------------------------------------------------------------------------
# the loss


def test_what_counts_begins_where_the_answers_differ(prepared):
    examples = PreferenceExamples(prepared.root / "train", first=100)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    rows = [
        json.loads(line) for line in (prepared.root.parent / "train.jsonl").read_text().splitlines()
    ]
    batch = examples.batch(np.array([3, 5, -1]))
    assert batch["pair"].tolist() == [103, 105, 100] and batch["weights"].tolist() == [1, 1, 0]
    for place, number in enumerate((3, 5)):
        whole = [
            tokenizer(rows[number]["prompt"] + rows[number][name])["input_ids"]
            for name in ("chosen", "rejected")
        ]
        shared = next(
            at for at, (one, other) in enumerate(zip(*whole, strict=False)) if one != other
        )
        for row, ids in ((place, whole[0]), (place + 3, whole[1])):
            targets = batch["targets"][row]
            counted = (targets != IGNORED).nonzero()[:, 0]
            assert targets[counted].tolist() == [*ids[shared:], tokenizer.eos_token_id]
            assert counted.tolist() == list(range(shared - 1, len(ids)))


class Known(torch.nn.Module):
    """Finds everything equally likely but token 1, as likely as it is told, at every place."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids, attention_mask, use_cache):
        logits = torch.zeros(*input_ids.shape, 4)
        logits[..., 1] = self.logit
        return type("Output", (), {"logits": logits})


def test_a_loss_is_of_how_far_the_answers_have_moved_apart_since_the_start():
    task = task_for({"task": "dpo", "model": {"from_config": GPT2}, "tokenizer": {"kind": "char"},
                     "dataset": {"builtin": "python-docs"}, "sequence_length": 8})  # fmt: skip
    assert isinstance(task, DPO)
    task._beta, task._label_smoothing = 0.5, 0.25
    model = Known(logit=2.0)
    task.begin(model, compiled=False)
    targets = torch.tensor([[1, 1], [2, IGNORED], [1, 2], [3, IGNORED]])  # two chosen, two rejected
    batch = {"input_ids": torch.zeros(4, 2, dtype=torch.int64), "attention_mask": torch.ones(4, 2),
             "targets": targets, "weights": torch.ones(2), "pair": torch.tensor([4, 0])}  # fmt: skip
    log_sum = math.log(3 + math.exp(2))
    ratios = [2 * (2 - log_sum) - (2 - log_sum) + log_sum, 0.0]
    assert task.log_ratios(model, batch).tolist() == pytest.approx(ratios, abs=1e-6)
    task._reference = torch.tensor([1.5, 0, 0, 0, 0.5])
    margins = [0.5 * (ratios[0] - 0.5), 0.5 * (ratios[1] - 1.5)]
    loss = sum(
        0.75 * math.log1p(math.exp(-margin)) + 0.25 * math.log1p(math.exp(margin))
        for margin in margins
    )
    assert task.loss_sum(model, batch).item() == pytest.approx(loss)
    evaluation = task.evaluation(task.sums(model, batch).tolist())
    assert (evaluation.sum, evaluation.count) == (1.0, 2)
    assert evaluation.others == {"mean_margin": pytest.approx(sum(margins) / 2)}


# --------------------------------------------------------------------------------------------------------------
# trials


@pytest.fixture(scope="module")
def trial(prepared, tmp_path_factory):
    def run(seed=0, save=False, at=prepared, **params) -> Run:
        folder = tmp_path_factory.mktemp("trial")
        params = {**PARAMS, **params}
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": json.loads(at.workload.read_text()),
            "prepared_dir": str(at.root), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        made = start("rank_main", spec, folder, params.get("world_size", 1))
        assert made.exit_code == FINISHED_EXIT, made.events[-1]
        return made

    return run


@pytest.fixture(scope="module")
def reference(trial) -> Run:
    """ZeRO 1, one rank, no accumulation."""
    return trial()


def qualities(run: Run) -> list[tuple[float, float]]:
    return [(point.value, point.other_qualities["mean_margin"]) for point in run.points]


def close(run: Run) -> Any:
    """Accuracies to 1e-3, which is to the pair, and the margins that say far more of the weights."""
    return [pytest.approx(values, rel=1e-3, abs=1e-4) for values in qualities(run)]


@pytest.mark.slow
def test_it_learns(reference):
    first, last = reference.points
    assert last.count == EVAL_PAIRS and last.sum == round(last.value * EVAL_PAIRS) >= 15
    assert last.other_qualities["mean_margin"] > first.other_qualities["mean_margin"] > 0
    assert last.tokens is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"zero_stage": 0, "micro_batch_size_per_gpu": 2},
        {"zero_stage": 1, "micro_batch_size_per_gpu": 4, "world_size": 2},
        {"zero_stage": 2, "micro_batch_size_per_gpu": 2, "world_size": 2, "offload": "optimizer"},
        {"zero_stage": 3, "micro_batch_size_per_gpu": 4, "gradient_checkpointing": True},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_how_a_step_is_computed_does_not_change_it(params, reference, trial):
    assert qualities(trial(**params)) == close(reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"zero_stage": 0},
        {"zero_stage": 2, "lora_rank": 4},
        {"zero_stage": 3, "world_size": 2, "lora_rank": 4},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_the_model_that_it_begins_with_has_no_margin(params, pretrained, trial):
    """At a learning rate of nothing; and adapters learn."""
    size = 8 // params.get("world_size", 1)
    still = trial(
        at=pretrained, **{**params, "learning_rate": 1e-12, "micro_batch_size_per_gpu": size}
    )
    assert [margin for _, margin in qualities(still)] == pytest.approx([0, 0], abs=1e-6)
    learnt = trial(
        at=pretrained, **{**params, "learning_rate": 1.0, "micro_batch_size_per_gpu": size}
    )
    assert qualities(learnt)[-1][1] > 0.05


TRL = """
import json, sys
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

base, rows, out = sys.argv[1:]

class InOrder(DPOTrainer):
    def _get_train_sampler(self, *arguments):
        return SequentialSampler(self.train_dataset)

train = Dataset.from_list([json.loads(line) for line in open(rows)])
arguments = DPOConfig(
    output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1, beta=0.3,
    learning_rate=1.0, lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False, use_cpu=True,
    max_length=None, report_to="none", save_strategy="no", logging_strategy="no",
    optim="sgd", disable_tqdm=True,
)
tokenizer = AutoTokenizer.from_pretrained(base)
model = AutoModelForCausalLM.from_pretrained(base)
trainer = InOrder(model, args=arguments, train_dataset=train, processing_class=tokenizer)
trainer.train()
trainer.model.save_pretrained(out)
"""


@pytest.mark.slow
def test_its_weights_are_those_of_trls_trainer(pretrained, trial, tmp_path):
    """On the same pairs in the same order, with another reference: TRL's is a second model. Without
    Adam, which makes steps of what only rounding leaves of the answers' common part.
    """
    params = {
        "learning_rate": 1.0,
        "beta": 0.3,
        "lr_scheduler": "constant",
        "micro_batch_size_per_gpu": 4,
    }
    own = trial(at=pretrained, save=True, **params)
    rows = [
        json.loads(line)
        for line in (pretrained.root.parent / "train.jsonl").read_text().splitlines()
    ]
    steps = TRAIN_PAIRS // 8
    batches = ExampleMicroBatches(
        PreferenceExamples(pretrained.root / "train", first=0), Division(8, 8, steps, 0, 0, 1)
    )
    in_order = [rows[index] for step in range(steps) for index in batches.global_batch(step)]
    base = json.loads(pretrained.workload.read_text())["model"]["name_or_path"]
    given = [
        sys.executable,
        "-c",
        TRL,
        base,
        write_jsonl(tmp_path / "rows.jsonl", in_order),
        str(tmp_path / "trl"),
    ]
    done = subprocess.run(given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folders = (base, own.folder / "model", tmp_path / "trl")
    begun, mine, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders
    )
    moved = max((mine[name] - begun[name]).abs().max() for name in mine)
    apart = max((mine[name] - theirs[name]).abs().max() for name in mine)
    assert moved > 0.1 and apart < 1e-3 * moved


@pytest.mark.slow
def test_plain_transformers_finds_the_same_on_the_saved_model(pretrained, trial):
    """ZeRO 3 on two ranks, an odd number of pairs; each text by itself, from the file, through the
    saved tokenizer.
    """
    run = trial(at=pretrained, zero_stage=3, world_size=2, micro_batch_size_per_gpu=2, save=True)
    base = json.loads(pretrained.workload.read_text())["model"]["name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    models = [
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (run.folder / "model", base)
    ]

    def log_likelihood(model: Any, text: str) -> float:
        """Of all its tokens but the first: what the answers have in common cancels out."""
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        return float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum())

    margins = []
    for row in map(json.loads, (pretrained.root.parent / "eval.jsonl").read_text().splitlines()):
        ratios = [
            log_likelihood(model, row["prompt"] + row["chosen"])
            - log_likelihood(model, row["prompt"] + row["rejected"])
            for model in models
        ]
        margins.append(0.1 * (ratios[0] - ratios[1]))
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    assert qualities(run)[-1] == pytest.approx((accuracy, sum(margins) / len(margins)), rel=1e-3)


# ------------------------------------------------------------------------------------------------------------
# the study


@pytest.mark.parametrize(
    ("workload", "space", "said"),
    [
        ({}, {"beta": 0}, "search.space.beta: must be above 0"),
        ({}, {"label_smoothing": 0.6}, "search.space.label_smoothing: must be"),
        (
            {"task": "reward"},
            {"beta": 0.1},
            "search.space.beta goes with the task dpo, but the task is reward",
        ),
        ({"beta": 0.1}, {}, "unknown key workload.beta"),
    ],
)
def test_settings_that_can_not_be_are_refused(workload, space, said):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    given = {"task": "dpo", "model": {"from_config": GPT2}, "tokenizer": {"kind": "char"},
             "dataset": {"builtin": "python-docs"}, "sequence_length": LENGTH, **workload}  # fmt: skip
    searched = {"space": {**SPACE, **space}}
    raw |= {"target": {"preference_accuracy": 0.5}, "workload": given, "search": searched}
    with pytest.raises(BadInput) as refused:
        SearchSpace(parse_study(raw, "study.yaml").search.space, world_size=1, on_gpu=False)
    assert said in str(refused.value)


def test_another_output_layer_is_refused(tmp_path):
    space = Space.model_validate({**SPACE, "output_layer": "fused"})
    task = task_for({"task": "dpo", "model": {"from_config": GPT2}, "tokenizer": {"kind": "char"},
                     "dataset": {"builtin": "python-docs"}, "sequence_length": 8})  # fmt: skip
    with pytest.raises(BadInput, match="output_layer must be standard"):
        task.prepare(space, PreparedFolder(tmp_path), "f")


@pytest.mark.slow
def test_the_shipped_study_runs_to_its_end_and_its_winner_is_found_again(tmp_path):
    done = within("run", ROOT / "studies" / "dpo.yaml", "--out", tmp_path / "out", "--trials", "1")
    assert done.returncode == 0, done.stderr
    records = {
        record["trial"]: record
        for record in map(json.loads, within("export", tmp_path / "out").stdout.splitlines())
    }
    recommended = json.loads(within("recommend", tmp_path / "out", "--json").stdout)
    assert len(records) == 1 and recommended["met"] and "beta" in recommended["params"]
    quality = records[recommended["trial"]]["quality"]
    winner = tmp_path / "out" / "report" / "winner"
    again = subprocess.run(
        ["sh", "run.sh"], cwd=winner, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    result = json.loads((winner / "output" / "result.json").read_text())
    assert result["quality"]["value"] == pytest.approx(quality["value"], abs=1e-3)
    assert result["quality"]["count"] == quality["count"]
    assert "pipeline_tag: text-generation" in (winner / "model_card.md").read_text()
