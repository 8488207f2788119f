"""Text to token arrays: nothing added, nothing lost, every target once; and what `prepare` refuses."""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizer

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Choices, Fixed, Space
from carbonopt.spec.trial_spec import ZeroLeaves
from carbonopt.spec.workload_settings import Workload
from carbonopt.train.data.packing import (
    IGNORED,
    Division,
    PrefetchLoader,
    TextMicroBatches,
    batch_size_that_fits,
    batches_of_rank,
    evaluation_steps,
    open_tokens,
    sequence_count,
    sequences,
    total_steps,
)
from carbonopt.train.data.text import TextDataset, read_text
from carbonopt.train.data.tokens import check_draws_nothing, make_encoder
from carbonopt.train.optim.arguments_check import check_training_arguments
from carbonopt.train.optim.deepspeed_config import deepspeed_config
from carbonopt.train.optim.deepspeed_keys import check_deepspeed_keys
from carbonopt.train.prepare import PrepareSpec, prepare

TINY: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 64,
}
TEXT = "The quick brown fox\r\njumps over the lazy dog, naïvely: 日本. \n" * 40
SPACE = Space.model_validate({"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1})


def workload(**changes) -> Workload:
    base = {"model": {"from_config": TINY}, "tokenizer": {"kind": "char"}, "sequence_length": 32}
    return Workload(**{**base, "dataset": {"builtin": "python-docs"}, **changes})


def plain(**changes) -> dict[str, Any]:
    return workload(**changes).model_dump(mode="json")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def refusal(tmp_path, **changes) -> str:
    target = tmp_path / "prepared"
    with pytest.raises(BadInput) as refused:
        prepare(
            PrepareSpec(
                workload=plain(**changes), space=SPACE, prepared_dir=str(target), fingerprint="x"
            )
        )
    assert not target.exists() and not list(tmp_path.glob(".prepared*")), (
        "a refusal leaves nothing behind"
    )
    return str(refused.value)


# -----------------------------------------------------------------------------------------------------------
# packing


@pytest.mark.parametrize("count", [2, 8, 9, 10, 12, 13])
def test_each_token_but_the_first_is_a_target_once(count):
    tokens = np.arange(100, 100 + count, dtype=np.uint16)
    length = 4
    kept = sequence_count(count, length, keep_tail=True)
    inputs, targets = sequences(tokens, np.arange(kept), length)
    counted = targets != IGNORED
    assert targets[counted].tolist() == tokens[1:].tolist()
    assert inputs[counted].tolist() == tokens[:-1].tolist()

    full = sequence_count(count, length, keep_tail=False)
    _, targets = sequences(tokens, np.arange(full), length)
    assert targets.flatten().tolist() == tokens[1 : 1 + full * length].tolist()


def test_no_sequence_has_no_target():
    _, targets = sequences(np.arange(9, dtype=np.uint16), np.array([-1, 1]), 4)
    assert targets.tolist() == [[IGNORED] * 4, [5, 6, 7, 8]]


def global_batches(micro_batch, world_size):
    tokens = np.arange(4 * 22 + 1, dtype=np.uint16)
    loaders = [
        TextMicroBatches(tokens, 4, Division(8, micro_batch, 5, 3, rank, world_size))
        for rank in range(world_size)
    ]
    accumulation = 8 // (micro_batch * world_size)
    return [
        sorted(
            int(index)
            for loader in loaders
            for part in range(accumulation)
            for index in loader.indices(step * accumulation + part)
        )
        for step in range(5)
    ]


def test_global_batches_do_not_depend_on_how_they_are_divided():
    whole = global_batches(8, 1)
    assert all(len(set(batch)) == 8 for batch in whole)
    assert len(set(whole[0] + whole[1])) == 16, "an epoch repeats no sequence"
    assert whole[0] != whole[2], "each epoch has its own order"
    for division in ((4, 1), (1, 1), (4, 2), (1, 2), (2, 4)):
        assert global_batches(*division) == whole


def test_micro_batches_hold_the_tokens_of_their_sequences():
    tokens = np.arange(4 * 22 + 1, dtype=np.uint16)
    loader = TextMicroBatches(tokens, 4, Division(8, 2, 5, 3, 1, 2))
    assert len(loader) == 10
    item = loader[3]
    indices = loader.indices(3)
    assert item["input_ids"][:, 0].tolist() == [
        (loader.offset + 4 * index) % len(tokens) for index in indices
    ]
    assert torch.equal(item["labels"], (item["input_ids"] + 1) % len(tokens))
    with pytest.raises(IndexError):
        loader[10]


@pytest.mark.parametrize(
    ("memory_gib", "vocab_size", "length", "count", "expected"),
    [
        (140, 50_304, 512, 1_000, 59),  # 60 would fit, 31 k tokens; 17 passes of 59 need as many
        (140, 256, 512, 10_000, 64),  # no more than tensor cores have a use for
        (24, 128_256, 2_048, 1_000, 1),  # 2,092 tokens
        (8, 256_000, 4_096, 1_000, 1),  # not one fits into the share: still one at a time
        (140, 256, 512, 65, 33),  # two passes of equal size, not one of 64 and one of 1
        (140, 256, 512, 3, 3),
    ],
)
def test_an_evaluation_takes_as_many_sequences_as_pay_and_fit(
    memory_gib, vocab_size, length, count, expected
):
    batch_size = batch_size_that_fits(memory_gib * 2**30, vocab_size, length, count)
    assert batch_size == expected


def test_batches_made_ahead_are_the_same_in_the_same_order(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(230, dtype=np.uint16))
    batches = TextMicroBatches(open_tokens(tmp_path / "tokens.npy"), 4, Division(8, 2, 5, 3, 1, 2))
    ahead = PrefetchLoader(batches, batch_size=None)
    assert len(ahead) == len(batches) == 10
    for _ in range(2):
        for expected, prefetched in zip(batches, ahead, strict=True):
            assert all(
                torch.equal(prefetched[name], expected[name]) for name in ("input_ids", "labels")
            )
    before = threading.active_count()
    some = iter(ahead)
    next(some)
    assert threading.active_count() == before + 1
    some.close()
    assert threading.active_count() == before, "what is not asked for any more is not made"


def test_each_epoch_cuts_the_text_elsewhere_and_loses_no_token():
    tokens = np.arange(4 * 22 + 1, dtype=np.uint16)
    loader, offsets = TextMicroBatches(tokens, 4, Division(22, 22, 6, 3, 0, 1)), set()
    for epoch in range(6):
        seen = loader[epoch]["input_ids"].flatten().tolist()
        assert len(set(seen)) == len(seen) == 88
        offsets.add(loader.offset)
    assert len(offsets) > 1


def test_total_steps():
    assert total_steps(103, 10, 1.0) == 10
    assert total_steps(103, 10, 2.5) == 25
    assert total_steps(103, 10, 0.01) == 1
    with pytest.raises(BadInput, match="at most the training set's 103 examples, but got 104"):
        total_steps(103, 104, 1.0)


@pytest.mark.parametrize(
    ("steps", "count", "expected"), [(100, 4, [25, 50, 75, 100]), (3, 8, [1, 2, 3]), (1, 1, [1])]
)
def test_evaluation_steps_are_distinct_and_end_with_the_last(steps, count, expected):
    assert evaluation_steps(steps, count) == expected


@pytest.mark.parametrize(("count", "batch", "world"), [(1, 8, 2), (7, 2, 2), (8, 4, 1), (9, 2, 4)])
def test_ranks_share_all_sequences_and_make_as_many_passes(count, batch, world):
    shares = [batches_of_rank(count, batch, rank, world) for rank in range(world)]
    assert len({share.shape for share in shares}) == 1
    assert sorted(
        index for share in shares for index in share.flatten().tolist() if index >= 0
    ) == list(range(count))


# --------------------------------------------------------------------------------------------------------------
# text


def test_a_text_file_keeps_every_character(text_file):
    train, evaluation = read_text(TextDataset(train_files=(str(text_file),), eval_fraction=0.1))
    assert train[0] + evaluation[0] == TEXT
    assert len(train[0]) == int(len(TEXT) * 0.9)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_of_every_format(tmp_path, kind):
    rows = ["one, two", 'line\nbreak "quoted"', "", "drei", "fünf"]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "body": row}) + "\n" for row in rows))
    elif kind == "csv":
        quoted = ['"' + row.replace('"', '""') + '"' for row in rows]
        path.write_text("id,body\n" + "".join(f"1,{row}\n" for row in quoted))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"id": [1] * 5, "body": rows}), path)
    dataset = TextDataset(train_files=(str(path),), text_column="body", eval_fraction=0.25)
    train, evaluation = read_text(dataset)
    assert (train, evaluation) == ([*rows[:2], "drei"], ["fünf"])
    with pytest.raises(BadInput, match=r"no column 'text'; its columns are id, body"):
        read_text(TextDataset(train_files=(str(path),)))


# ----------------------------------------------------------------------------------------------------------
# encoders


def test_characters_number_what_the_training_text_has():
    encoder = make_encoder(workload(), ["bca\r\n"], ["aé日"])
    assert (
        len(encoder.tokenizer) == 6
    )  # five characters and, since the evaluation text needs it, the unknown one
    assert encoder.encode(["bca\r\n"]).tolist() == [3, 4, 2, 1, 0]
    assert encoder.encode(["aé日"]).tolist() == [2, 5, 5]
    assert len(make_encoder(workload(), ["bca\r\n"], ["abc"]).tokenizer) == 5


@pytest.mark.parametrize("tokenizer", [{"kind": "char"}, {"kind": "byte"}, {"train_bpe": 300}])
def test_the_saved_tokenizer_gives_the_same_ids_and_the_text_back(tmp_path, tokenizer):
    encoder = make_encoder(workload(tokenizer=tokenizer), [TEXT], [TEXT])
    encoder.tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ids = encoder.encode([TEXT])
    assert saved(TEXT, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert saved.decode(ids.tolist(), clean_up_tokenization_spaces=False) == TEXT
    assert ids.max() < len(encoder.tokenizer)
    if tokenizer == {"kind": "byte"}:
        assert ids.tolist() == list(TEXT.encode())


def test_end_of_text_stands_between_documents_only():
    bpe = make_encoder(workload(tokenizer={"train_bpe": 300}), ["ab", "cd"], ["ab"])
    end = bpe.tokenizer.eos_token_id
    parts = [bpe.encode([document]).tolist() for document in ("ab", "cd")]
    assert bpe.encode(["ab", "cd"]).tolist() == [*parts[0], end, *parts[1]]
    assert end not in parts[0] + parts[1]
    assert len(make_encoder(workload(), ["ab", "cd"], ["ab"]).encode(["ab", "cd"])) == 4


# -----------------------------------------------------------------------------------------------------------
# prepare


def test_prepare_counts_and_reuses(tmp_path, text_file):
    changes = {"dataset": {"train_files": [str(text_file)]}}
    spec = PrepareSpec(
        workload=plain(**changes), space=SPACE, prepared_dir=str(tmp_path / "p"), fingerprint="one"
    )
    made = prepare(spec)
    folder = PreparedFolder(tmp_path / "p")
    train, evaluation = open_tokens(folder.train), open_tokens(folder.evaluation)
    assert isinstance(train, np.memmap) and train.dtype == np.uint16
    assert (made.train_tokens, made.eval_tokens) == (len(train), len(evaluation) - 1)
    assert len(train) + len(evaluation) == len(TEXT)
    assert made.train_examples == (len(train) - 1) // 32
    assert made.vocab_size == len(set(TEXT))
    width = TINY[
        "n_embd"
    ]  # the two embeddings, one block, the last norm; the output layer is the embedding
    assert (
        made.model_parameters
        == (made.vocab_size + 64) * width + 12 * width**2 + 13 * width + 2 * width
    )

    text_file.unlink()
    assert prepare(spec) == made == folder.read_summary(), (
        "made for the same workload: taken as it is"
    )
    text_file.write_text("something else " * 200)
    again = prepare(spec.model_copy(update={"fingerprint": "two"}))
    assert again.train_tokens == 2700 and folder.read_summary() == again
    folder.summary.write_text(folder.summary.read_text()[:40])
    assert folder.made_for("two") is None
    assert (
        prepare(spec.model_copy(update={"fingerprint": "two"})) == again == folder.made_for("two")
    ), "made again"
    summary = folder.summary.read_text()
    folder.summary.unlink()
    os.mkfifo(folder.summary)
    assert folder.made_for("two") is None
    folder.summary.unlink()
    folder.summary.write_text(summary)
    for damaged in (folder.train, folder.evaluation, folder.model_config / "config.json"):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        assert folder.made_for("two") is None
        assert (
            prepare(spec.model_copy(update={"fingerprint": "two"})) == again
            and damaged.read_bytes() == whole
        )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_prepare_notes_what_may_be_joined_rows(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text('text\n"6 inch\nrow\n5"\n' + f"{TEXT[:40].strip()}\n" * 40)
    dataset = {"train_files": [str(table)], "text_column": "text"}
    spec = PrepareSpec(
        workload=plain(dataset=dataset),
        space=SPACE,
        prepared_dir=str(tmp_path / "p"),
        fingerprint="x",
    )
    (note,) = prepare(spec).notes
    assert "a.csv 1 cell " in note and prepare(spec).notes == (note,)


def test_prepare_leaves_a_folder_alone_that_is_not_its_own(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("years of work")
    spec = PrepareSpec(
        workload=plain(), space=SPACE, prepared_dir=str(tmp_path / "p"), fingerprint="x"
    )
    with pytest.raises(BadInput, match="must be empty or a prepared data set"):
        prepare(spec)
    assert (tmp_path / "p" / "thesis.tex").exists()
    file = tmp_path / "p" / "thesis.tex"
    with pytest.raises(BadInput, match="must be a folder, but is a file"):
        prepare(spec.model_copy(update={"prepared_dir": str(file)}))
    assert file.read_text() == "years of work"


# ------------------------------------------------------------------------------------------------------------
# refusals


def test_refuses_bad_files(tmp_path):
    def files(path, **more):
        return refusal(tmp_path, dataset={"train_files": [str(path)], **more})

    assert "No such file" in files(tmp_path / "missing.txt")
    (tmp_path / "empty.txt").touch()
    assert "must have text in it, but is empty" in files(tmp_path / "empty.txt")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    assert "no column 'text'; its columns are body" in files(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"text": 3}\n')
    assert "must hold text" in files(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"text": \n')
    assert "line 1, must be one JSON object" in files(tmp_path / "rows.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "must be UTF-8 text, but isn't in line 1" in files(tmp_path / "latin.txt")
    (tmp_path / "not.parquet").write_text("no")
    assert "must be Parquet" in files(tmp_path / "not.parquet")
    (tmp_path / "short.txt").write_text("too short a text")
    assert "at least one sequence of 32 tokens" in files(tmp_path / "short.txt")
    (tmp_path / "half.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800b"}\n')
    assert "half.jsonl, line 2, column 'text' must hold text, but has half" in files(
        tmp_path / "half.jsonl"
    )
    (tmp_path / "half.json").write_text('[{"text": {"a": ["\\udfff"]}}]')
    assert "half.json, item 1, column 'text' must hold text, but has half" in files(
        tmp_path / "half.json"
    )
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    assert "must name each column once, but has 'text' 2 times" in files(tmp_path / "twice.csv")
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    assert "must name each column once, but has 'text' 2 times" in files(tmp_path / "twice.parquet")
    for name, rows in (
        ("twice.jsonl", '{"text": "a", "text": "b"}\n'),
        ("twice.json", '[{"text": "a", "text": "b"}]'),
    ):
        (tmp_path / name).write_text(rows)
        assert "must name each column once, but has 'text' 2 times" in files(tmp_path / name)
    (tmp_path / "within.jsonl").write_text(
        '{"text": {"a": "b", "a": "c"}, "other": {"a": 1, "a": 2}}\n'
    )
    assert "but has one that names 'a' more than once" in files(tmp_path / "within.jsonl")
    (tmp_path / "ragged.csv").write_text("text,more\na,b\na,b,c\n")
    assert "line 3: a row must have at most 2 cells, but row 2 has 3" in files(
        tmp_path / "ragged.csv"
    )
    assert "must have text in it" in files(
        tmp_path / "short.txt", eval_files=[str(tmp_path / "empty.txt")]
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"text": "naïve \\ud83d\\ude00"}\n'),
        ("a.json", '[{"text": "naïve 😀"}]'),
        ("a.csv", "text,unread,unread\nnaïve 😀,,\n"),
        ("a.txt", "naïve 😀"),
    ],
)
def test_a_byte_order_mark_is_no_text(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    source = TextDataset(train_files=(str(tmp_path / name),), eval_files=(str(tmp_path / name),))
    assert read_text(source).train == ["naïve 😀"]


def test_refuses_bad_models(tmp_path, monkeypatch):
    def model(**fields):
        return refusal(tmp_path, model={"from_config": {**TINY, **fields}})

    assert "unknown field n_layers for gpt2; did you mean n_layer?" in model(n_layers=2)
    assert "'gtp2'; did you mean gpt2?" in model(model_type="gtp2")
    assert len(model(model_type="vit")) < 800, "not all of some 180 names"
    assert "but got 10 and " in model(vocab_size=10)
    assert "at most the model's number of positions, but got 32 and 16" in model(n_positions=16)
    assert "n_embd" in model(n_head=3) or "divisible" in model(n_head=3)
    (tmp_path / "model").mkdir()
    own = {"tokenizer": {"kind": "byte"}}
    assert "has no config.json" in refusal(
        tmp_path, model={"name_or_path": str(tmp_path / "model")}, **own
    )
    (tmp_path / "model" / "config.json").write_text(json.dumps({**TINY, "vocab_size": 256}))
    assert "no file named model.safetensors" in refusal(
        tmp_path, model={"name_or_path": str(tmp_path / "model")}, **own
    )
    (tmp_path / "model" / "config.json").write_text(json.dumps({**TINY, "vocab_size": 99}))
    assert "but got 99 and 255; use the model's own tokenizer or, if tokens were added" in refusal(
        tmp_path, model={"name_or_path": str(tmp_path / "model")}, **own
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "give a local folder" in refusal(
        tmp_path, model={"name_or_path": "nobody/no-such-model"}, **own
    )
    assert "give a local folder" in refusal(
        tmp_path, tokenizer={"name_or_path": "nobody/no-such-tokenizer"}
    )
    assert "give a local folder" in refusal(
        tmp_path, dataset={"name_or_path": "nobody/no-such-data"}
    )


def test_a_local_folder_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(
            '{"text": "some ' + split + '"}\n{"text": ""}\n'
        )
    folder: dict[str, Any] = {"name_or_path": str(tmp_path / "data")}
    assert read_text(TextDataset(**folder)) == (["some train"], ["some validation"])
    with pytest.raises(BadInput, match="no split 'test'; its splits are train, validation"):
        read_text(TextDataset(**folder, eval_split="test"))
    with pytest.raises(BadInput, match="no column 'body'"):
        read_text(TextDataset(**folder, text_column="body"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInput, match="can't load the data set"):
        read_text(TextDataset(name_or_path=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weight_decey": 0.1}, "did you mean weight_decay"),
        ({"learning_rate": 0.1}, "use search.space.learning_rate"),
        ({"per_device_train_batch_size": 2}, "use search.space.micro_batch_size_per_gpu"),
        ({"eval_steps": 2}, "workload.evaluations"),
        ({"report_to": "all"}, "use track"),
        ({"save_steps": 2}, "can't have save_steps: .* use checkpoint"),
        ({"resume_from_checkpoint": "folder"}, "use checkpoint"),
        ({"load_best_model_at_end": True}, "the quality of a trial is that of its last step"),
        ({"push_to_hub": True}, "uploads nothing"),
        ({"optim": "adamm"}, "not what transformers takes"),
        ({"lr_scheduler_type": "cosine"}, "but is in both"),
        (
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            r"min_lr_rate is nothing that lr_scheduler linear takes",
        ),
        ({"lr_scheduler_kwargs": "{}"}, "must hold keys and their values"),
        ({"adam_beta1": 5}, "the optimizer adamw_torch_fused can't be made here: .* 5;"),
        ({"dataloader_num_workers": 1.5}, "must be a whole number, but got 1.5"),
        ({"torch_compile_mode": "nope"}, "torch_compile_mode nope can't be compiled with"),
        ({"torch_compile_backend": "nope"}, "torch_compile_backend nope .* can't be compiled with"),
        (
            {"optim": "galore_adamw", "optim_target_modules": "all-linear"},
            "optimizer galore_adamw can't be made",
        ),
        ({"optim": "grokadamw"}, "optimizer grokadamw can't be made"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optimizer sgd can't be made here"),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9,foo=bar"},
            "foo=bar changes nothing of the optimizer sgd",
        ),
        ({"optim_args": "foo=bar"}, "foo=bar changes nothing of the optimizer adamw_torch_fused"),
        (
            {"optim": "sgd", "adam_epsilon": 1e-3},
            "adam_epsilon changes nothing of the optimizer sgd",
        ),
        (
            {"optim": "adagrad"},
            "adagrad has a state before its first step, which ZeRO can't divide",
        ),
        ({"log_level": "bogus"}, "log_level can't be had: .*bogus"),
        ({"dataloader_prefetch_factor": 2}, "carbonopt feeds the data itself"),
        ({"optim_target_modules": ["c_attn"]}, "optim_target_modules changes nothing"),
        ({"use_liger_kernel": True}, "use_liger_kernel can't be had here"),
        (
            {"liger_kernel_config": {"rope": True}},
            "liger_kernel_config has no effect without use_liger_kernel",
        ),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "no effect without gradient_checkpointing",
        ),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"foo": 1}},
            "{'foo': 1} is not what checkpointing takes",
        ),
        (
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": "x"},
            },
            "is not what checkpointing takes",
        ),
    ],
)
def test_refuses_training_arguments(given, says):
    with pytest.raises(BadInput, match=says):
        check_training_arguments(
            given, SPACE.model_copy(update={"lr_scheduler": Fixed(value="linear")})
        )


@pytest.mark.parametrize(
    ("given", "searched"),
    [
        ({"lr_scheduler_kwargs": {"num_decay_steps": 4}}, {"decay_ratio": 0.3}),
        ({"torch_compile_backend": "eager"}, {"torch_compile": False}),
        ({"torch_compile_mode": "default"}, {"torch_compile": False}),
        ({"activation_checkpointing": True}, {"gradient_checkpointing": False}),
        ({"optim_args": "momentum=0.9"}, {"optimizer": "adamw"}),
    ],
)
def test_what_a_dimension_says_is_said_once(given, searched):
    space = SPACE.model_copy(update={name: Fixed(value=value) for name, value in searched.items()})
    must = (
        f"{next(iter(given))} must be in .* or, as {next(iter(searched))}, in search.space, but is"
        " in both"
    )
    with pytest.raises(BadInput, match=must):
        check_training_arguments(given, space)


def test_refuses_a_dimension_that_the_given_scheduler_leaves_without_effect():
    warming = SPACE.model_copy(update={"warmup_ratio": Fixed(value=0.1)})
    with pytest.raises(
        BadInput,
        match=r"warmup_ratio acts only with lr_scheduler .*, but .* is constant in workload",
    ):
        check_training_arguments({"lr_scheduler_type": "constant"}, warming)
    check_training_arguments({"lr_scheduler_type": "cosine"}, warming)


@pytest.mark.parametrize(
    ("scheduler", "given"),
    [
        ("cosine_with_min_lr", {}),
        ("cosine", {"num_cycles": "x"}),
        ("warmup_stable_decay", {"decay_type": "nope"}),
        ("polynomial", {"lr_end": 1.0}),  # the rate would rise
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}),
    ],
)
def test_refuses_schedules_that_cannot_be_made(scheduler, given):
    given_there = {"lr_scheduler_type": scheduler} | (
        {"lr_scheduler_kwargs": given} if given else {}
    )
    with pytest.raises(BadInput, match=f"lr_scheduler {scheduler} can't be made"):
        check_training_arguments(given_there, SPACE)
    searched = SPACE.model_copy(update={"lr_scheduler": Choices(choices=("linear", scheduler))})
    if not given:
        with pytest.raises(BadInput, match=f"lr_scheduler {scheduler} can't be made"):
            check_training_arguments({}, searched)


@pytest.mark.parametrize(
    "given",
    [
        {"weight_decay": 0.1, "max_grad_norm": 0.5, "adam_beta2": 0.95},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 4, "min_lr_ratio": 0.1},
        },
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
        {"optim": "adafactor"},
        {"optim": "adamw_torch", "adam_beta1": 0.8},
        {"torch_compile": True},
        {"torch_compile_mode": "max-autotune"},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"every_n_layers": 2},
        },
        {"dataloader_num_workers": 2},
    ],
    ids=str,
)
def test_takes_training_arguments(given):
    check_training_arguments(given, SPACE)


def test_checkpointing_that_is_searched_takes_arguments():
    space = SPACE.model_copy(update={"gradient_checkpointing": Choices(choices=(False, True))})
    check_training_arguments({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, space)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"zero_optimisation": {}}, "deepspeed.zero_optimisation; did you mean zero_optimization"),
        (
            {"zero_optimization": {"stage3_param_persistance_threshold": 1}},
            (
                "zero_optimization.stage3_param_persistance_threshold; did you mean"
                " stage3_param_persistence_threshold"
            ),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"pinmemory": True}}},
            "zero_optimization.offload_optimizer.pinmemory; did you mean pin_memory",
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointng": True}},
            "did you mean cpu_checkpointing",
        ),
        ({"flops_profiler": {"enable": True}}, "did you mean enabled"),
        ({"data_types": {"grad_accum_dtyp": "fp32"}}, "did you mean grad_accum_dtype"),
        ({"bf16": {"chek_grad_overflow": False}}, "did you mean check_grad_overflow"),
        (
            {"zero_optimization": {"overlap_comm": "maybe"}},
            "zero_optimization.overlap_comm: .* but got 'maybe'",
        ),
        ({"train_batch_size": 8}, "use search.space.global_batch_size"),
        ({"zero_optimization": {"stage": 2}}, "use search.space.zero_stage"),
        ({"fp16": {"enabled": True}}, "use search.space.precision"),
        ({"optimizer": {"type": "Adam"}}, "workload.training_arguments.optim"),
        ({"elasticity": {}}, "has been removed"),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}},
            "can't have zero_optimization.stage3_gather_16bit_weights_on_model_save: carbonopt sets",
        ),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": False}},
            "can't have zero_optimization.stage3_gather_fp16_weights_on_model_save: carbonopt sets",
        ),
        (
            {"zero_optimization": {"gather_16bit_weights_on_model_save": False}},
            "its name is stage3_gather_16bit_weights_on_model_save",
        ),
        (
            {"zero_optimization": {"module_granularity_threshold": 5}},
            "its name is stage3_module_granularity_threshold",
        ),
        ({"weight_quantization": {"post_init_quant": {}}}, "can't have weight_quantization"),
    ],
)
def test_refuses_deepspeed_keys(given, says):
    with pytest.raises(BadInput, match=says):
        check_deepspeed_keys(given)


def test_takes_deepspeed_keys_and_merges_them():
    given = {
        "wall_clock_breakdown": True,
        "zero_optimization": {"overlap_comm": True, "offload_optimizer": {"pin_memory": True}},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "communication_data_type": "fp32",
    }
    params = TrialParams(
        global_batch_size=16, micro_batch_size_per_gpu=2, learning_rate=1e-3, epochs=1, zero_stage=3, world_size=2,
        offload="parameters", precision="bf16",
    )  # fmt: skip
    config = deepspeed_config(params, workload(deepspeed=given), on_gpu=False)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[size] for size in sizes] == [16, 2, 4]
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (3, True)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False} and config["fp16"] == {
        "enabled": False
    }
    assert "auto" not in json.dumps(config)


@pytest.mark.parametrize(
    ("chosen", "saves_memory"),
    [({}, False), ({"stage3_max_live_parameters": 100}, True)],
)
def test_zero_3_lets_go_of_linear_weights_only_where_that_saves_memory(chosen, saves_memory):
    leaves = ZeroLeaves(classes=("a.Block",), largest_parameters=10, model_parameters=101)
    params = TrialParams(
        global_batch_size=2, micro_batch_size_per_gpu=2, learning_rate=1e-3, epochs=1, zero_stage=3
    )
    given = workload(deepspeed={"zero_optimization": chosen})
    zero = deepspeed_config(params, given, on_gpu=True, leaves=leaves)["zero_optimization"]
    assert zero["memory_efficient_linear"] is saves_memory
    assert zero["leaf_module"] == {"classes": ["a.Block"]}


def test_leaves_that_the_study_chooses_change_nothing_else_of_zero_3():
    leaves = ZeroLeaves(classes=(), largest_parameters=60_000_000, model_parameters=10**8)
    params = TrialParams(
        global_batch_size=2, micro_batch_size_per_gpu=2, learning_rate=1e-3, epochs=1, zero_stage=3
    )
    own = {"leaf_module": {"classes": ["Own"]}}
    given = workload(deepspeed={"zero_optimization": own})
    zero = deepspeed_config(params, given, on_gpu=True, leaves=leaves)["zero_optimization"]
    assert zero["leaf_module"] == own["leaf_module"]
    assert zero["stage3_prefetch_bucket_size"] == 60_000_000
    assert zero["memory_efficient_linear"] is False


def test_warm_up_beside_a_rate_that_has_none_is_refused():
    space = SPACE.model_copy(update={"lr_scheduler": Fixed(value="constant")})
    with pytest.raises(BadInput, match="warmup_steps has no effect with lr_scheduler constant"):
        check_training_arguments({"warmup_steps": 5}, space)


def test_a_folder_without_its_tokenizer_is_refused(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=8, vocab_size=30)
    ).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="its files are missing; save it there, too"):
        make_encoder(
            workload(model={"name_or_path": str(tmp_path)}, tokenizer=None), ["abc"], ["abc"]
        )


def bpe_folder(folder: Path, dropout: float | None) -> Path:
    """Save a model with a tokenizer whose `tokenizer.json` has this dropout."""
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=8, vocab_size=300)
    ).save_pretrained(folder)
    make_encoder(workload(tokenizer={"train_bpe": 300}), [TEXT], [TEXT]).tokenizer.save_pretrained(
        folder
    )
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["dropout"] = dropout
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_a_tokenizer_with_dropout_is_refused(key, tmp_path):
    def encoded(dropout: float | None) -> list[int]:
        named = {"name_or_path": str(bpe_folder(tmp_path, dropout))}
        given = {"tokenizer": None, key: named}
        return make_encoder(workload(**given), [TEXT], [TEXT]).encode([TEXT]).tolist()

    # too rare to be seen in a few texts
    with pytest.raises(BadInput, match=r"BPE dropout of 1e-09; set dropout of model to null"):
        encoded(1e-9)
    assert encoded(None) == encoded(0.0)


class DrawingTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python that divides words at a place of its choice."""

    vocab_size = 26

    def __init__(self, draw, **kwargs) -> None:
        self.draw, self.sp_model_kwargs = draw, kwargs.pop("sp_model_kwargs", {})
        super().__init__(**kwargs)

    def get_vocab(self):
        # the longest words are added ones, which are never divided
        return {**{"a" * (index + 1): index for index in range(26)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        parts = (self.draw(len(word)) for word in text.split())
        return [
            token
            for word, first in zip(text.split(), parts, strict=True)
            for token in ("a" * first, "a" * (len(word) - first))
            if token
        ]

    def _convert_token_to_id(self, token):
        return len(token) - 1

    def _convert_id_to_token(self, index):
        return "a" * (index + 1)


def test_a_tokenizer_in_python_that_draws_is_refused():
    added = [f"<reserved for what comes later {index:03}>" for index in range(99)]

    def check(draw, **options) -> None:
        tokenizer = DrawingTokenizer(draw, additional_special_tokens=added, **options)
        check_draws_nothing(tokenizer, "the tokenizer")

    check(lambda length: length // 2)
    check(lambda length: length // 2, sp_model_kwargs={"enable_sampling": False, "alpha": 0.1})
    with pytest.raises(BadInput, match="8 different rows of tokens of one text in 8 calls"):
        check(lambda length: random.Random().randint(0, length))
    with pytest.raises(BadInput, match="has enable_sampling: true"):
        check(lambda length: length // 2, sp_model_kwargs={"enable_sampling": True})


def test_an_evaluation_in_another_alphabet_is_refused():
    encoder = make_encoder(workload(), ["abc"], ["abяю"])
    assert encoder.unknown_share(encoder.encode(["abca"])) == 0.0
    assert encoder.unknown_share(encoder.encode(["abяю"])) == 0.5
