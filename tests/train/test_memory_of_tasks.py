"""The estimate of memory of tasks of examples, beside what their real batches and models need on
the CPU.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from train.test_memory import memory_of
from transformers import AutoConfig, PreTrainedModel

from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.train.models.live_memory import LiveMemory
from carbonopt.train.tasks.task import task_for
from carbonopt.train.tasks.trainer_task import ExampleTask

LENGTH, SIZES = 60, (4, 8)  # tokens, no multiple of what batches are padded to; examples
BATCH_BYTES = 16 * max(SIZES) * (LENGTH + 4)  # tokens and targets
SHORT, LONG = (
    "3 birds in a tree. ",
    "What a long sentence that is cut in the end, as are all others of its length. ",
)
NO_DROPOUT = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # the CPU's keeps another mask than a GPU's
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": LENGTH,
    **NO_DROPOUT,
}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0
}  # fmt: skip
TEXTS = {"tokenizer": {"kind": "byte"}, "sequence_length": LENGTH}
RESPONSES = [{"prompt": SHORT, "response": SHORT}, {"prompt": SHORT, "response": 2 * LONG}]
PAIRS = [{"prompt": SHORT, "chosen": "Yes.", "rejected": "No."}]
PAIRS += [{"prompt": LONG, "chosen": answer, "rejected": "No."} for answer in ("Yes.", "Maybe.")]
LABELLED = [{"text": text, "label": label} for text in (SHORT, LONG) for label in ("a", "b")]
SOURCES = [{"source": SHORT, "target": SHORT}, {"source": LONG, "target": LONG}]
TASKS = {
    "sft": ({"task": "sft", "model": GPT2, **TEXTS}, RESPONSES),
    "sft, packed": ({"task": "sft", "model": GPT2, "packing": True, **TEXTS}, RESPONSES),
    "reward": ({"task": "reward", "model": LLAMA, **TEXTS}, PAIRS),
    "dpo": ({"task": "dpo", "model": LLAMA, **TEXTS}, PAIRS),
    "classes of texts": ({"task": "classification", "model": BERT, **TEXTS}, LABELLED),
    "digits": ({"task": "classification", "model": VIT, "dataset": {"builtin": "digits"}}, []),
    "seq2seq": ({"task": "seq2seq", "model": T5, "max_target_length": 33, **TEXTS}, SOURCES),
}


def workload_of(name: str, folder: Path) -> dict:
    workload, rows = TASKS[name]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in 3 * rows))
    dataset = workload.get("dataset", {"train_files": [str(path)], "eval_files": [str(path)]})
    return {**workload, "model": {"from_config": workload["model"]}, "dataset": dataset}


def most_of(live: LiveMemory) -> dict[int, int]:
    return {moment.gradient_elements: moment.activation_bytes for moment in live.moments}


@pytest.mark.parametrize("name", TASKS)
def test_zeros_without_numbers_need_what_real_examples_need(name: str, tmp_path: Path) -> None:
    workload = workload_of(name, tmp_path)
    task = task_for(workload)
    assert isinstance(task, ExampleTask)
    (tmp_path / "prepared").mkdir()
    folder = PreparedFolder(tmp_path / "prepared")
    space = {"global_batch_size": 2, "learning_rate": 1e-3, "epochs": 1}
    task.prepare(Space.model_validate(space), folder, "f")
    config = AutoConfig.from_pretrained(folder.model_config)
    config.use_cache = False  # as the Trainer sets it
    if name == "digits":  # of which the data say that there are ten
        config.num_labels = 2
    model = task.model_kind.auto().from_config(config, attn_implementation="eager")
    sizes = {"micro_batch_size_per_gpu": {"choices": list(SIZES)}}
    (profile,) = memory_of(workload, attention_implementation="eager", **sizes).profiles
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    for expected, size in zip(profile.activations, SIZES, strict=True):
        measured, evaluation_bytes = real_need(task, folder, model, size)
        moments = {moment.gradient_elements: moment.activation_bytes for moment in expected.moments}
        assert moments.keys() == measured.keys()
        # Here the batch itself is there to the end.
        assert list(moments.values()) == pytest.approx(
            list(measured.values()), rel=0.01, abs=BATCH_BYTES
        )
        if size == SIZES[-1]:  # an evaluation's is no smaller
            # Packed rows have a mask, which evaluations of rows of their own do without.
            share = 0.2 if name == "sft, packed" else 0.01
            assert expected.evaluation_bytes == pytest.approx(
                evaluation_bytes, rel=share, abs=BATCH_BYTES
            )


def real_need(
    task: ExampleTask, folder: PreparedFolder, model: PreTrainedModel, size: int
) -> tuple[dict[int, int], int]:
    """Of a batch of the longest examples and the shortest one: a micro batch, and an evaluation."""
    train, evaluation = (examples_of(task, folder, part, size) for part in ("train", "eval"))
    live = LiveMemory()
    live.begin((*model.parameters(), *model.buffers()))
    hooks = [
        p.register_post_accumulate_grad_hook(live.gradient_is_made) for p in model.parameters()
    ]
    task.begin(model, compiled=False)
    with live:
        model.train()
        task.loss_sum(model, train).backward()
        measured = most_of(live)
        model.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
        model.eval()
        live.begin((*model.parameters(), *model.buffers()))
        with torch.no_grad():
            task.sums(model, evaluation)
    return measured, live.peak_bytes


def examples_of(
    task: ExampleTask, folder: PreparedFolder, part: str, size: int
) -> dict[str, torch.Tensor]:
    examples = task.examples(folder, part)
    longest = np.full(size - 1, examples.order[-1])
    batch = examples.batch(np.append(longest, examples.order[0]))
    if "pixel_values" in batch:
        batch["labels"] %= 2
    return batch


@pytest.mark.parametrize(
    "name", ["sft", "sft, packed", "reward", "dpo", "classes of texts", "seq2seq"]
)
def test_a_vocabulary_that_is_learnt_from_the_data_is_known_before(
    name: str, tmp_path: Path
) -> None:
    workload = workload_of(name, tmp_path)
    task = task_for({**workload, "tokenizer": {"kind": "char"}})
    (tmp_path / "prepared").mkdir()
    folder = PreparedFolder(tmp_path / "prepared")
    task.prepare(Space(global_batch_size=2, learning_rate=1e-3, epochs=1), folder, "f")
    config = AutoConfig.from_pretrained(folder.model_config)
    assert task.expected_config().vocab_size == config.vocab_size
    learnt = task_for({**workload, "tokenizer": {"train_bpe": 300}}).expected_config()
    assert 300 <= learnt.vocab_size <= 302


def test_images_of_any_size_are_not_known_before() -> None:
    resnet = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    workload = {
        "task": "classification",
        "model": {"from_config": resnet},
        "dataset": {"builtin": "digits"},
    }
    with pytest.raises(BadInput, match="size of the images is not known"):
        memory_of(workload)


@pytest.mark.slow
def test_lora_masks_in_half_precision_and_compiling(tmp_path: Path) -> None:
    """As on a GPU, whose kernels take a mask of their own type."""
    workload = workload_of("sft, packed", tmp_path)
    settings = {"precision": "bf16", "micro_batch_size_per_gpu": 8}

    def most(workload: dict, **changes) -> int:
        (profile,) = memory_of(workload, **settings, **changes).profiles
        return max(moment.activation_bytes for moment in profile.activations[0].moments)

    masks = GPT2["n_layer"] * 8 * LENGTH**2 * torch.bfloat16.itemsize
    assert most(workload) > most({**workload, "packing": False}) + masks // 2
    assert most(workload, attention_implementation="varlen") < most(workload) - masks // 2
    assert most(workload, output_layer="fused") < most(workload)
    assert most(workload, torch_compile=True) < most(workload)
    assert most(workload, lora_rank=2) > 0
