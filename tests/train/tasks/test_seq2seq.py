"""Sequence-to-sequence trials of a tiny T5 on the CPU: their quality by hand, and what must not
change it.
"""

import html
import json
import math
import os
import runpy
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import within
from small_studies import study
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.errors import BadInput
from carbonopt.core.events import Evaluated
from carbonopt.export.recorded import recorded
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.study_file.input_files import input_files
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.data.packing import IGNORED
from carbonopt.train.data.source_target import SourceTarget, encode
from carbonopt.train.data.tokens import _bytes, complete
from carbonopt.train.tasks.task import task_for

LIBRARY = Path(__file__).parents[3] / "studies" / "library"
EVALUATION = 37  # rows: the last batch is ragged, and one rank has more than the other
SOURCE_LENGTH, TARGET_LENGTH = 16, 14  # tokens; some are cut
MODEL = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0,  # or each division drops other activations
    # Smooth: where ReLU has its kink, the last digits of two ways to add grew to 1e-3 of the
    # perplexity; so to 1e-6.
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
PARAMS = {
    "global_batch_size": 16,
    "micro_batch_size_per_gpu": 16,
    "learning_rate": 4e-3,
    "epochs": 3,
}
SPACE = {"global_batch_size": 16, "learning_rate": 4e-3, "epochs": 3}


def rows(part: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (LIBRARY / f"{part}.jsonl").read_text().splitlines()]


def write(path: Path, some: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", rows("train"))
    write(folder / "eval.jsonl", rows("eval")[:EVALUATION])
    with sqlite3.connect(folder / "library.sqlite") as database:
        database.execute(
            "CREATE TABLE book (pages INTEGER, year INTEGER, price REAL, copies INTEGER, genre,"
            " language)"
        )
        genres, languages = (
            ("crime", "fantasy", "history", "poetry", "science", "travel"),
            ("English", "French"),
        )
        for number in range(24):
            row = (100 + 7 * number, 1950 + number, 5 + number / 8, number % 4, genres[number % 6])
            database.execute(
                "INSERT INTO book VALUES (?, ?, ?, ?, ?, ?)", (*row, languages[number % 2])
            )
    database.close()
    return folder


@pytest.fixture(scope="module")
def workload(data):
    def made(quality: str | None = "exact_match", **changes) -> dict:
        dataset = {
            "train_files": [str(data / "train.jsonl")], "eval_files": [str(data / "eval.jsonl")],
            "source_column": "question", "target_column": "sql", **changes.pop("dataset", {}),
        }  # fmt: skip
        return {
            "task": "seq2seq", "model": {"from_config": MODEL}, "tokenizer": {"train_bpe": 400}, "dataset": dataset,
            "sequence_length": SOURCE_LENGTH, "max_target_length": TARGET_LENGTH, "source_prefix": "SQL: ",
            "evaluations": 2, "quality": quality, **changes,
        }  # fmt: skip

    return made


def prepare(workload: dict, folder: Path, **space) -> Run:
    spec = {
        "workload": workload,
        "space": {**SPACE, **space},
        "prepared_dir": str(folder / "p"),
        "fingerprint": "f",
    }
    return start("prepare", spec, folder)


@pytest.fixture(scope="module")
def trial(workload, tmp_path_factory):
    """Runs one, of a workload that is prepared once."""
    prepared: dict[str, Path] = {}
    by_match = workload()

    def run(
        workload: dict = by_match,
        save: bool = False,
        seed: int = 0,
        forked: str = "carbonopt.train.fork_template",
        environment: dict[str, str] | None = None,
        **params,
    ) -> Run:
        if (key := json.dumps(workload)) not in prepared:
            prepared[key] = tmp_path_factory.mktemp("prepared")
            assert prepare(workload, prepared[key]).exit_code == FINISHED_EXIT
        folder, params = tmp_path_factory.mktemp("trial"), {**PARAMS, **params}
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": workload,
            "prepared_dir": str(prepared[key] / "p"), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        ranks = params.get("world_size", 1)
        done = start("rank_main", spec, folder, ranks, forked=forked, **(environment or {}))
        assert done.exit_code == FINISHED_EXIT
        return done

    return run


@pytest.fixture(scope="module")
def reference(trial) -> Run:
    """ZeRO 1, one rank, no accumulation."""
    return trial(save=True)


class ByHand:
    """A saved model's qualities with transformers alone, one example after the other."""

    def __init__(self, folder: Path, expected: list[dict[str, str]]) -> None:
        model, tokenizer = (
            kind.from_pretrained(folder) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
        )
        model.eval()
        nll, tokens, self.texts = 0.0, 0, []
        with torch.no_grad():
            for row in expected:
                source = tokenizer(
                    f"SQL: {row['question']}",
                    truncation=True,
                    max_length=SOURCE_LENGTH,
                    return_tensors="pt",
                )
                labels = torch.tensor([tokenizer(row["sql"])["input_ids"][:TARGET_LENGTH]])
                nll += float(model(**source, labels=labels).loss) * labels.numel()
                tokens += labels.numel()
                ids = model.generate(
                    **source, max_new_tokens=TARGET_LENGTH, do_sample=False, num_beams=1
                )
                self.texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
        self.perplexity, self.tokens = math.exp(nll / tokens), tokens
        matches = [
            text.split() == row["sql"].split()
            for text, row in zip(self.texts, expected, strict=True)
        ]
        self.exact_match = sum(matches) / len(matches)


def expected() -> list[dict[str, str]]:
    return rows("eval")[:EVALUATION]


def predictions(run: Run) -> list[tuple]:
    return [event.predictions for event in run.events if isinstance(event, Evaluated)]


@pytest.mark.slow
def test_quality_is_what_transformers_alone_computes(reference):
    by_hand = ByHand(reference.folder / "model", expected())
    first, last = reference.points
    assert 0 < last.value < 1 and (last.sum, last.count) == (last.value * EVALUATION, EVALUATION)
    assert last.value == pytest.approx(by_hand.exact_match, abs=1e-3)
    assert last.other_qualities == {"perplexity": pytest.approx(by_hand.perplexity, rel=1e-3)}
    assert by_hand.perplexity < first.other_qualities["perplexity"]

    before, shown = predictions(reference)
    assert before == () and len(shown) == 12
    texts = {
        f"SQL: {row['question']}": (row["sql"], text)
        for row, text in zip(expected(), by_hand.texts, strict=True)
    }
    for prediction in shown:
        assert texts[prediction.source] == (prediction.expected, prediction.predicted)
    assert len({prediction.source for prediction in shown}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_with_accumulation_and_any_zero_stage(stage, reference, trial):
    """And what they save is whole: its qualities, by hand, are those that were told."""
    run = trial(zero_stage=stage, world_size=2, micro_batch_size_per_gpu=4, save=stage == 3)
    for point, alike in zip(run.points, reference.points, strict=True):
        assert point.value == pytest.approx(alike.value, abs=1e-3)
        assert point.other_qualities["perplexity"] == pytest.approx(
            alike.other_qualities["perplexity"], rel=1e-4
        )
    assert predictions(run) == predictions(reference)
    if stage == 3:
        by_hand = ByHand(run.folder / "model", expected())
        assert run.points[-1].value == pytest.approx(by_hand.exact_match, abs=1e-3)
        assert run.points[-1].other_qualities["perplexity"] == pytest.approx(
            by_hand.perplexity, rel=1e-3
        )


@pytest.mark.slow
def test_zero_3_gathers_its_weights_once_for_all_tokens(reference, trial, tmp_path):
    """Not each block for each token; and it trains on afterwards."""
    counted = {"forked": "gathers", "environment": {"GATHERS_FILE": str(tmp_path / "gathers")}}
    run = trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=4, **counted)
    counts = json.loads((tmp_path / "gathers").read_text())
    assert counts["batches"] >= 2, "one at least at each of two evaluations"
    assert counts["gathers"] == 0
    assert predictions(run) == predictions(reference)
    for point, alike in zip(run.points, reference.points, strict=True):
        assert point.value == pytest.approx(alike.value, abs=1e-3)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_to_the_last_digit_and_another_another(reference, trial):
    again, other = trial(), trial(seed=1)
    assert again.points == reference.points and predictions(again) == predictions(reference)
    assert other.points[0].other_qualities != reference.points[0].other_qualities


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"zero_stage": 3, "world_size": 2, "micro_batch_size_per_gpu": 8, "lora_rank": 8, "learning_rate": 2e-2,
         "epochs": 1},
        {"zero_stage": 2, "offload": "optimizer", "precision": "bf16", "world_size": 2, "micro_batch_size_per_gpu": 8},
        {"zero_stage": 0, "precision": "bf16", "lr_scheduler": "cosine", "attention_implementation": "eager"},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)  # fmt: skip
def test_dimensions_that_change_how_it_trains(params, trial):
    """All generate at each evaluation, and learn."""
    first, last = trial(**params).points
    assert last.count == EVALUATION
    assert last.other_qualities["perplexity"] < first.other_qualities["perplexity"] < 40


@pytest.mark.slow
def test_offload_and_checkpointing_change_nothing(reference, trial):
    run = trial(
        zero_stage=3, offload="parameters", gradient_checkpointing=True, micro_batch_size_per_gpu=8
    )
    assert [point.value for point in run.points] == pytest.approx(
        [point.value for point in reference.points], abs=1e-3
    )
    assert predictions(run) == predictions(reference)


@pytest.mark.slow
def test_perplexity_alone_generates_only_at_the_end(reference, trial, workload):
    """By token the same as beside a match; the predictions are those of the match, too."""
    run = trial(workload(quality=None), micro_batch_size_per_gpu=8, world_size=2)
    for point, alike in zip(run.points, reference.points, strict=True):
        assert point.value == pytest.approx(alike.other_qualities["perplexity"], rel=1e-3)
        assert point.other_qualities == {}
    tokens = sum(len(row[:TARGET_LENGTH]) for row in targets(reference.folder / "model"))
    assert {point.count for point in run.points} == {tokens}
    assert predictions(run) == predictions(reference)


def targets(folder: Path) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folder)([row["sql"] for row in expected()])["input_ids"]


WHOLE = {"max_target_length": 24, "sequence_length": 24}  # no query is cut
ON_TWO_RANKS = {"world_size": 2, "micro_batch_size_per_gpu": 8}


@pytest.fixture(scope="module")
def exact(trial, workload) -> Run:
    return trial(workload(**WHOLE), **ON_TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["canonical_match", "execution_match"])
def test_a_match_by_what_queries_mean(quality, exact, trial, workload, data, tmp_path):
    """The expected queries are written in another way than those that the model learns: no text is
    the same, and yet they are the same queries.
    """
    restyled = [{**row, "sql": restyle(row["sql"], quality)} for row in expected()]
    dataset = {
        "eval_files": [write(tmp_path / "eval.jsonl", restyled)],
        "database": str(data / "library.sqlite"),
    }
    points = trial(workload(quality, dataset=dataset, **WHOLE), **ON_TWO_RANKS).points
    assert [point.other_qualities["exact_match"] for point in points] == [0, 0]
    for point, same in zip(points, exact.points, strict=True):
        # Two different queries can return the same rows: of 24 books four or so.
        assert (
            point.value == same.value
            if quality == "canonical_match"
            else point.value >= same.value > 0
        )


def restyle(query: str, quality: str) -> str:
    if quality == "canonical_match":
        return query.replace("SELECT", "select").replace(" = ", "=").replace("WHERE", "where (") + (
            ")" if "WHERE" in query else ";"
        )
    return query.replace("FROM book", "FROM (SELECT * FROM book) AS shelf")


@pytest.mark.slow
def test_a_trained_model_is_tuned_by_adapters(reference, trial, workload, data):
    """With its own tokenizer, loaded in parts on two ranks: it begins where the other one ended."""
    params = {
        "zero_stage": 3,
        "world_size": 2,
        "micro_batch_size_per_gpu": 8,
        "lora_rank": 4,
        "epochs": 0.5,
    }
    model = {"name_or_path": str(reference.folder / "model")}
    (untouched,) = trial(
        workload(model=model, tokenizer=None, evaluations=1), **params, learning_rate=1e-9
    ).points
    assert untouched.value == reference.points[-1].value
    assert untouched.other_qualities == pytest.approx(
        reference.points[-1].other_qualities, rel=1e-5
    )
    # More of the same training fits what it trains on; what is new to it needn't.
    by_training_rows = {"eval_files": [str(data / "train.jsonl")]}
    fitted = workload(None, model=model, tokenizer=None, evaluations=2, dataset=by_training_rows)
    first, last = trial(fitted, **params, learning_rate=1e-3).points
    assert last.value < first.value


def with_settings(source: Path, folder: Path, **own: object) -> dict:
    """Return a copy of the model with settings of generation of its own."""
    shutil.copytree(source, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, **own}))
    return {"model": {"name_or_path": str(folder)}, "tokenizer": None}


@pytest.mark.slow
def test_own_settings_of_generation_that_have_no_effect(reference, trial, workload, tmp_path):
    own = {
        "return_dict_in_generate": True, "num_beams": 3, "num_return_sequences": 3, "prompt_lookup_num_tokens": 2,
        "stop_strings": ["no such text"],
    }  # fmt: skip
    copies = [
        with_settings(reference.folder / "model", tmp_path / name, **settings)
        for name, settings in (("plain", {}), ("own", own))
    ]
    plain, same = (
        trial(workload(**model, evaluations=1), learning_rate=1e-12, epochs=0.5) for model in copies
    )
    assert same.values == plain.values == [reference.values[-1]]
    assert predictions(same) == predictions(plain)


@pytest.mark.slow
def test_another_family_of_models_with_characters(trial, workload):
    """Bart has defaults of its own tokenizer: where decoding starts and what ends it."""
    model = {
        "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 80,
        "dropout": 0.0,
    }  # fmt: skip
    changes = {"sequence_length": 80, "max_target_length": 80, "source_prefix": "SQL: "}
    characters = workload(model={"from_config": model}, tokenizer={"kind": "char"}, **changes)
    run = trial(characters, save=True, epochs=0.5)
    model = AutoModelForSeq2SeqLM.from_pretrained(run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    settings = model.generation_config
    assert settings.decoder_start_token_id == settings.pad_token_id == tokenizer.pad_token_id
    assert settings.eos_token_id == tokenizer.eos_token_id and settings.forced_eos_token_id is None
    row = expected()[0]
    source = tokenizer(f"SQL: {row['question']}", return_tensors="pt")
    text = tokenizer.decode(
        model.generate(**source, max_new_tokens=80, num_beams=1)[0], skip_special_tokens=True
    )
    assert predictions(run)[-1][0].predicted == " ".join(text.split())


# ------------------------------------------------------------------------------------------------------------
# bad input


def settings(workload: dict):
    return task_for({key: value for key, value in workload.items() if value is not None})


def refusal(workload: dict, folder: Path, **space) -> str:
    folder.mkdir(exist_ok=True)
    with pytest.raises(BadInput) as refused:
        settings(workload).prepare(
            Space.model_validate({**SPACE, **space}), PreparedFolder(folder), "f"
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "space", "said"),
    [
        ({}, {"precision": "fp16"}, "precision must be bf16 or fp32 for t5, but got fp16"),
        ({}, {"precision": {"choices": ["bf16", "fp16"]}}, "float16's range"),
        ({}, {"output_layer": "fused"}, "output_layer must be standard for the task seq2seq"),
        ({}, {"output_layer": {"choices": ["standard", "fused"]}}, "output_layer must be standard"),
        ({"dataset": {"source_column": "asked"}}, {}, "has no column 'asked'; its columns are question, sql"),
        ({"dataset": {"target_column": "query"}}, {}, "has no column 'query'"),
        ({"quality": "execution_match"}, {}, "target.execution_match needs workload.dataset.database"),
        ({"quality": "execution_match", "dataset": {"database": "/dev/null/x"}}, {}, "must be an SQLite file"),
        ({"model": {"from_config": {"model_type": "gpt2"}}}, {}, "model_type must be a sequence-to-sequence model"),
        ({"model": {"from_config": {**MODEL, "d_modle": 8}}}, {}, "unknown field d_modle for t5; did you mean"),
        ({"model": {"from_config": {**MODEL, "eos_token_id": 7}}}, {}, "eos_token_id must be the tokenizer's"),
        ({"model": {"from_config": {**MODEL, "vocab_size": 99}}}, {}, "but got 99 and 400"),
        ({"source_prefix": "x" * 500, "tokenizer": {"kind": "byte"}}, {}, "source_prefix must leave room for a source"),
        ({"max_target_length": 4}, {}, "but 37 of 37 evaluation targets can't be matched"),
        (
            {"model": {"from_config": {"model_type": "bart", "max_position_embeddings": 16}}, "max_target_length": 17},
            {},
            "max_target_length must be at most the model's number of positions, but got 17 and 16",
        ),
    ],
)  # fmt: skip
def test_what_would_make_every_trial_fail_is_refused(changes, space, said, workload, tmp_path):
    assert said in refusal(workload(**changes), tmp_path / "p", **space)


@pytest.fixture(scope="module")
def pretrained(workload, tmp_path_factory) -> Path:
    """A model with random weights and its tokenizer."""
    folder = PreparedFolder(tmp_path_factory.mktemp("prepared"))
    settings(workload()).prepare(Space.model_validate(SPACE), folder, "f")
    target = tmp_path_factory.mktemp("pretrained")
    config = AutoConfig.from_pretrained(folder.model_config)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder.tokenizer).save_pretrained(target)
    return target


@pytest.mark.parametrize(
    ("name", "value"),
    [("guidance_scale", 2.0), ("force_words_ids", [[3]]), ("cache_implementation", "quantized")],
)
def test_own_settings_with_which_no_trial_could_generate_are_refused(
    name, value, pretrained, workload, tmp_path
):
    model = with_settings(pretrained, tmp_path / "m", **{name: value})
    assert f"take {name} out" in refusal(workload(**model), tmp_path / "p")
    (tmp_path / "q").mkdir()
    by_loss = settings(workload(None, **model))  # generates nothing
    by_loss.prepare(Space.model_validate(SPACE), PreparedFolder(tmp_path / "q"), "f")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "How?", "sql": "SELECT weight FROM book"},
            "eval.jsonl, line 3 doesn't: no such column: weight",
        ),
        ({"question": "How?", "sql": "DELETE FROM book"}, "line 3 doesn't: not authorized"),
        (
            {
                "question": "How?",
                "sql": "SELECT 1 FROM book AS a, book AS b, book AS c, book AS d, book AS e",
            },
            "more than",
        ),
        ({"question": "How?", "sql": 7}, "column 'sql' must hold text, but"),
    ],
)
def test_an_expected_query_that_fails_is_refused_with_its_row(row, said, workload, data, tmp_path):
    dataset = {"eval_files": [write(tmp_path / "eval.jsonl", [*expected()[:2], row])]}
    by_rows = workload(
        "execution_match", dataset={**dataset, "database": str(data / "library.sqlite")}
    )
    assert said in refusal(by_rows, tmp_path / "p")


def test_a_database_that_is_written_to_is_refused(workload, data, tmp_path):
    copy = tmp_path / "copy.sqlite"
    shutil.copy(data / "library.sqlite", copy)
    (tmp_path / "copy.sqlite-wal").write_bytes(b"more")
    said = refusal(workload("execution_match", dataset={"database": str(copy)}), tmp_path / "p")
    assert "workload.dataset.database must be closed" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": {"builtin": "python-docs"}}, "python-docs has no sources and targets"),
        (
            {"dataset": {"train_files": ["a.jsonl"], "source_column": "a", "target_column": "a"}},
            "must differ, but both",
        ),
        (
            {"dataset": {"train_files": ["a.jsonl"], "text_column": "a"}},
            "unknown key workload.dataset.text_column",
        ),
        ({"max_target_length": 1}, "workload.max_target_length: "),
        ({"sequence_length": None}, "workload.sequence_length"),
        ({"tokenizer": None}, "a model from_config has no tokenizer"),
    ],
)
def test_what_the_settings_refuse(changes, said):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    good = {
        "task": "seq2seq", "model": {"from_config": MODEL}, "tokenizer": {"kind": "byte"}, "sequence_length": 16,
        "dataset": {"train_files": ["a.jsonl"]},
    }  # fmt: skip
    given = {key: value for key, value in {**good, **changes}.items() if value is not None}
    with pytest.raises(BadInput) as refused:
        parse_study({**raw, "target": {"exact_match": 0.5}, "workload": given}, "study.yaml")
    assert said in str(refused.value)
    wrong = {**raw, "target": {"accuracy": 0.5}, "workload": good}
    with pytest.raises(BadInput, match="target must be perplexity or exact_match or"):
        parse_study(wrong, "study.yaml")


# ------------------------------------------------------------------------------------------------------
# the preparation


@pytest.mark.parametrize(("side", "kept"), [("left", "last"), ("right", "first")])
def test_sources_are_cut_on_the_tokenizers_side_and_targets_at_their_end(side, kept):
    tokenizer = _bytes().tokenizer
    complete(tokenizer)
    tokenizer.truncation_side = side
    encoded = encode(tokenizer, [SourceTarget("abcdef", "uvwxyz", "here")], 4, 4)
    end = tokenizer.eos_token
    source = f"def{end}" if side == "left" else f"abc{end}"
    assert tokenizer.decode(encoded.sources[0]) == source
    assert tokenizer.decode(encoded.targets[0]) == "uvwx"
    assert (encoded.cut_sources, encoded.kept_end, encoded.cut_targets) == (1, kept, [0])


@pytest.mark.parametrize(
    ("template", "end", "read"),
    [
        (None, "</s>", "1 2 </s>"),
        ("<s> $A", "</s>", "<s> 1 2 </s>"),
        ("<s> $A </s>", "</s>", "<s> 1 2 </s>"),
        ("$A </s> <s>", "</s>", "1 2 </s> <s>"),
        ("<s> $A <sep>", None, "<s> 1 2 <sep>"),
    ],
)
def test_texts_have_the_tokenizers_own_tokens_around_them_and_an_end(template, end, read, tmp_path):
    words = ["<s>", "</s>", "<sep>", "<pad>", "1", "2"]
    own = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    own.pre_tokenizer = WhitespaceSplit()
    if template is not None:
        own.post_processor = TemplateProcessing(
            single=template, special_tokens=[(word, words.index(word)) for word in words[:3]]
        )
    special = {"bos_token": "<s>", "sep_token": "<sep>", "pad_token": "<pad>", "eos_token": end}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, **{name: word for name, word in special.items() if word}
    )
    complete(tokenizer)
    pair = SourceTarget("1 2", "1 2", "here")
    encoded = encode(tokenizer, [pair], 9, 9)
    assert tokenizer.decode(encoded.sources[0]) == tokenizer.decode(encoded.targets[0]) == read
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved("1 2")["input_ids"] == encoded.sources[0] and len(saved) == len(words)
    shorter = encode(tokenizer, [pair], len(encoded.sources[0]) - 1, 9).sources[0]
    assert tokenizer.decode(shorter) == read.replace(" 2", "")


@pytest.mark.parametrize("end", [":", "$", "$A", "<|end:$0|>", "a:b"])
@pytest.mark.parametrize("begin", [None, "<s:1>"])
def test_special_tokens_may_have_the_signs_of_a_template(end: str, begin: str | None) -> None:
    words = ["<pad>", "1", "2", end, *([begin] if begin else [])]
    own = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    own.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end, pad_token="<pad>")
    if begin:
        own_tokens = [{"id": "begin", "ids": [4], "tokens": [begin]}]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=["begin", "$A"], special_tokens=own_tokens
        )
    complete(tokenizer)
    assert tokenizer("1 2")["input_ids"] == [*([4] if begin else []), 1, 2, 3]


def test_what_is_left_out_cut_or_known_by_heart_is_counted(workload, tmp_path):
    repeated = rows("train")[:3]
    lacking = [{"question": "", "sql": "SELECT 1"}, {"question": "What?", "sql": None}]
    files = {
        "train_files": [write(tmp_path / "train.jsonl", [*rows("train"), *lacking])],
        "eval_files": [write(tmp_path / "eval.jsonl", [*expected(), *repeated])],
    }
    (tmp_path / "p").mkdir()
    longest = 11  # tokens of a target
    made = settings(workload(dataset=files, max_target_length=longest)).prepare(
        Space.model_validate(SPACE), folder := PreparedFolder(tmp_path / "p"), "f"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    evaluation = [*expected(), *repeated]
    sources, queries = (
        [len(ids) for ids in tokenizer([prefix + row[column] for row in evaluation])["input_ids"]]
        for prefix, column in (("SQL: ", "question"), ("", "sql"))
    )
    cut_sources, cut_targets = (
        sum(n > SOURCE_LENGTH for n in sources),
        sum(n > longest for n in queries),
    )
    assert 0 < cut_sources < 40 and 0 < cut_targets < 40
    text = " ".join(made.notes)
    for sentence in (
        "2 of 452 training rows have no source or no target and were left out.",
        f"{cut_sources} of 40 evaluation sources were cut to their first {SOURCE_LENGTH} tokens.",
        f"{cut_targets} of 40 evaluation targets were cut to their first {longest} tokens.",
        "3 of 40 evaluation targets are also targets of training rows",
        "evaluation targets can't be matched; of the first, ",
    ):
        assert sentence in text
    assert (made.train_examples, made.eval_examples, made.sequence_length) == (450, 40, None)
    assert made.eval_tokens == sum(min(n, longest) for n in queries)
    assert made.vocab_size == len(tokenizer) == 401


def test_targets_are_shifted_once_and_padding_never_counts(workload, tmp_path):
    task = settings(workload())
    (tmp_path / "p").mkdir()
    folder = PreparedFolder(tmp_path / "p")
    task.prepare(Space.model_validate(SPACE), folder, "f")
    examples, tokenizer = (
        task.examples(folder, "eval"),
        AutoTokenizer.from_pretrained(folder.tokenizer),
    )
    batch = examples.batch(np.array([5, -1, 0]))
    for place, index in ((0, 5), (2, 0)):
        row = expected()[index]
        labels = tokenizer(row["sql"])["input_ids"][:TARGET_LENGTH]
        padding = batch["labels"].shape[1] - len(labels)
        assert batch["labels"][place].tolist() == labels + [IGNORED] * padding
        decoder = batch["decoder_input_ids"][place].tolist()
        assert (
            decoder[: len(labels)] == [tokenizer.pad_token_id, *labels[:-1]]
            and IGNORED not in decoder
        )
        read = batch["input_ids"][place][batch["attention_mask"][place] == 1].tolist()
        question = tokenizer(f"SQL: {row['question']}", truncation=True, max_length=SOURCE_LENGTH)[
            "input_ids"
        ]
        assert read == question and read[-1] == tokenizer.eos_token_id
        assert examples.weights[index] == len(labels)
    assert (batch["labels"][1] == IGNORED).all(), "a filler has no target"
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(folder.model_config))
    own = model.prepare_decoder_input_ids_from_labels(batch["labels"][[0, 2]])
    counted = batch["labels"][[0, 2]] != IGNORED
    assert (own == batch["decoder_input_ids"][[0, 2]])[counted].all(), (
        "as the model itself shifts them"
    )


def test_the_database_is_an_input_of_the_study(workload, data, tmp_path):
    """Noted with its sha256, named without this machine's path, taken from the study file's own
    folder.
    """
    raw = study().config.model_dump(mode="json", exclude_none=True)
    given = workload("execution_match", dataset={"database": "library.sqlite"})
    path = data / "study.yaml"
    raw |= {
        "target": {"execution_match": 0.5},
        "workload": given,
        "launch": {"kind": "local", "gpus": []},
    }
    path.write_text(yaml.safe_dump(raw))
    config = load_study(path)
    assert config.workload.dataset.database == str(data / "library.sqlite")
    assert check(config).config == config
    inputs = input_files(config)
    assert [Path(file.path).name for file in inputs] == [
        "train.jsonl",
        "eval.jsonl",
        "library.sqlite",
    ]
    dumped = config.model_dump(mode="json")
    assert (
        recorded(dumped, inputs)["data/library.sqlite"][0]["bytes"]
        == (data / "library.sqlite").stat().st_size
    )
    assert dumped["workload"]["dataset"]["database"] == "data/library.sqlite"
    path.write_text(yaml.safe_dump(raw).replace("library.sqlite", "lost.sqlite"))
    with pytest.raises(BadInput, match=r"workload.dataset.database: no file .*lost.sqlite"):
        check(load_study(path))


# ------------------------------------------------------------------------------------------------------
# the whole study


@pytest.mark.slow
def test_the_shipped_study_its_report_and_its_winner(tmp_path):
    """Its first trial alone, which is the start: it meets the target, its predictions are in the
    report, and run.sh reaches the same quality.
    """
    out = tmp_path / "out"
    done = within("run", LIBRARY.parent / "library-sql.yaml", "--out", out, "--trials", "1")
    assert done.returncode == 0, done.stderr
    record = json.loads(within("export", out, "--format", "jsonl").stdout)
    assert record["quality"]["name"] == "exact_match" and record["quality"]["count"] == 74
    assert record["quality"]["value"] >= 0.85 and len(record["predictions"]) == 12
    page, markdown = ((out / "report" / name).read_text() for name in ("index.html", "report.md"))
    assert "## Predictions" in markdown
    for prediction in record["predictions"]:
        assert html.escape(prediction["predicted"], quote=False).replace("'", "&#39;") in page
    winner = out / "report" / "winner"
    assert "sqlglot" not in (winner / "requirements.txt").read_text(), (
        "only a canonical match needs it"
    )
    command = ["sh", str(winner / "run.sh"), "--data", str(LIBRARY)]
    again = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=without_carbonopt(tmp_path)
    )
    assert again.returncode == 0, again.stderr
    result = json.loads((winner / "output" / "result.json").read_text())
    assert result["quality"] == record["quality"]


def without_carbonopt(folder: Path) -> dict[str, str]:
    stub = folder / "stub" / "carbonopt" / "__init__.py"
    stub.parent.mkdir(parents=True)
    stub.write_text("raise ImportError('not here')\n")
    path = f"{os.environ['PATH']}:{Path(sys.executable).parent}"
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(folder / "stub"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def test_the_rows_are_those_that_their_script_makes():
    """And no query of the evaluation rows is one of the training rows."""
    made = runpy.run_path(str(LIBRARY / "make.py"))["rows"]()
    assert made == (rows("train"), rows("eval"))
    assert not {row["sql"] for row in made[0]} & {row["sql"] for row in made[1]}
