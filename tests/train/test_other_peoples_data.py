"""Data files, models and tokenizers as other people save them: read as what they are, or refused
with the place.
"""

import csv
import gzip
import json
import shutil
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    GPT2Config,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.spec.workload_settings import Dataset, Model
from carbonopt.train.data.class_names import names_of
from carbonopt.train.data.data_look import find_data, look_at
from carbonopt.train.data.data_notes import data_notes
from carbonopt.train.data.labels import (
    Labelled,
    LabelledDataset,
    LabelledRows,
    in_model_order,
    read_labelled,
)
from carbonopt.train.data.rows import check_columns, column_names, file_rows, read_rows
from carbonopt.train.data.text import TextDataset, read_text
from carbonopt.train.models.pretrained_head import own_classes
from carbonopt.train.tasks.classification import _IMAGE_KIND, _TEXT_KIND
from carbonopt.train.tasks.classification import _notes as class_notes
from carbonopt.train.tasks.task import training_task

FIXED = Space.model_validate(
    {"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1, "zero_stage": 0}
)


def texts(path: Path) -> list[str]:
    return [row.text("text") for row in file_rows(path, ("text",))]


def refusal(path: Path, *columns: str) -> str:
    with pytest.raises(BadInput) as refused:
        list(file_rows(path, columns or ("text",)))
    return str(refused.value)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# tables as text files


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ('1,"7 inch of nail', 3),  # never closed
        (
            '1,"7 inch of nail\n2,fine\n3,"8 inch of nail',
            3,
        ),  # closed by the next one, in the middle of its cell
        ('"1,fine', 3),
    ],
)
def test_a_quote_that_does_not_close_is_refused_with_its_line(tmp_path, row, line):
    path = written(
        tmp_path / "a.csv",
        f"id,text\n0,fine\n{row}\n" + "".join(f"{n},row {n}\n" for n in range(5, 20)),
    )
    assert f"{path}, line {line}:" in refusal(path)


@pytest.mark.parametrize("again", ["id,text", "\ufeffid,text", '"id","text"', "id, text "])
def test_a_header_in_the_middle_is_refused_with_its_line(tmp_path, again):
    path = written(tmp_path / "a.csv", f'id,text\n0,"a\nb"\n1,c\n{again}\n2,d\n')
    assert f"{path}, line 5:" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a.csv", b"text;label\nx;a\n", "by commas"),
        ("a.csv", b"text\tlabel\nx\ta\n", "by tabs"),
        ("a.csv", b"sep=,\ntext,label\nx,a\n", "first line"),
        ("a.csv", b"label, text\na,x\n", "spaces out of ' text'"),
        ("a.tsv", b'label\ttext\na\t"Hello" said x\n', "double those within"),
        ("a.jsonl", b'[{"text": "x"}]', ".json file"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "UTF-16"),
    ],
)
def test_files_that_need_another_form_are_refused_with_a_remedy(tmp_path, name, content, remedy):
    (tmp_path / name).write_bytes(content)
    assert remedy in refusal(tmp_path / name)


@pytest.mark.parametrize("suffix", [".bz2", ".zst", ".xz"])
def test_files_that_must_be_decompressed_first_are_told_so(tmp_path, suffix):
    dataset = Dataset(train_files=(str(written(tmp_path / f"a.jsonl{suffix}", "x")),))
    with pytest.raises(BadInput, match="decompress"):
        read_rows(dataset, ("text",))


def test_whole_decimal_numbers_are_labels(tmp_path):
    path = tmp_path / "a.parquet"
    for numbers in (("0.00", "1.00", "10"), ("0", "0.5", "1")):
        labels = pyarrow.array(list(map(Decimal, numbers)) * 2, pyarrow.decimal128(5, 2))
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 6, "label": labels}), path)
        dataset = LabelledDataset(train_files=(str(path),))
        if "0.5" not in numbers:
            assert read_labelled(dataset).classes == ("0", "1", "10")
            continue
        with pytest.raises(BadInput, match=r"0\.50"):
            read_labelled(dataset)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    assert "git lfs pull" in refusal(written(tmp_path / name, pointer))


def test_a_text_that_is_a_pointer_of_git_lfs_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    path = written(tmp_path / "a.txt", pointer)
    with pytest.raises(BadInput, match="git lfs pull"):
        read_text(TextDataset(train_files=(str(path),)))


def test_json_lines_in_a_json_file_are_read(tmp_path):
    path = written(tmp_path / "a.json", '{"text": "one"}\n\n{"text": "two"}\n')
    assert texts(path) == ["one", "two"] and column_names(path) == ("text",)
    path = written(tmp_path / "a.json", '{"text": "one"}\n{"txt": "two"}\n')
    assert "line 2" in refusal(path)


def test_a_list_of_words_may_hold_the_name_of_its_column(tmp_path):
    path = written(tmp_path / "a.csv", "text\nword\ntext\n")
    assert [row.text("text") for row in file_rows(path, ("text",))] == ["word", "text"]


def test_a_cell_that_has_swallowed_rows_is_refused(tmp_path):
    rows = "".join(f"{number},row {number}\n" for number in range(5))
    path = written(tmp_path / "a.csv", f'id,text\n0,"7 inch\n{rows}9,a nail of 8"\n10,fine\n')
    assert f"{path}, line 2:" in refusal(path) and "5 lines" in refusal(path)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("poem.csv", "\n".join(f"line {number}, and on" for number in range(6))),
        ("table.csv", "name,age\n" + "\n".join(f"Ann,{number}" for number in range(5))),
        ("code.tsv", "def f(x):\n" + "\tx += 1\n" * 4 + "\treturn x"),
    ],
)
def test_quoted_cells_of_many_lines_are_read_whole(tmp_path, name, cell):
    path, mark = tmp_path / name, "\t" if name.endswith(".tsv") else ","
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=mark).writerows([("text", "label"), (cell, "a"), ("b", "b")])
    (first, _) = file_rows(path, ("text", "label"))
    assert first.values == {"text": cell, "label": "a"}


def test_a_cell_that_nobody_reads_loses_no_rows(tmp_path):
    rows = "".join(f"row {number},{number}\n" for number in range(5))
    path = written(tmp_path / "a.csv", f'text,size\na,"7 inch\n{rows}b,8 inch"\nc,9\n')
    assert f"{path}, line 2:" in refusal(path) and "'size'" in refusal(path)


# Tables such as those of GLUE are written without quotes, and their texts may begin with one.
@pytest.mark.parametrize("text", ['0\t"Hello\n1\tbye"\n', '"Hello\t0\nbye"\t1\n'])
def test_a_tsv_whose_texts_begin_with_quotes_loses_no_rows(tmp_path, text):
    header = "label\ttext" if text[0] == "0" else "text\tlabel"
    path = written(tmp_path / "a.tsv", f"{header}\n{text}")
    assert f"{path}, line 2:" in refusal(path) and "tabs" in refusal(path)


ORDINARY = "".join(f"row {number},{'ab'[number % 2]}\n" for number in range(60))


@pytest.mark.parametrize(
    ("header", "rows", "line"),
    [
        ("text,label", '"6 inch,a\nrow,b\nrow,a\n5",b\n', 2),
        ("text,label", '"6 inch,a\nrow,b\n5",b\n' * 15, 2),
        ("text,label", ORDINARY + '"6 inch,a\n5",b\n' * 3, 62),
        ("text,label", '"6 inch,a\n\nrow,b\nrow,a\n\nrow,b\n\n5",b\n', 2),
        ("label,text", 'a,"6 inch\nb,row\na,5"\n' * 2, 2),
        ("id,text,label", '1,"6 inch,a\n2,5",b\n' * 3, 2),
        ("text,label", '"one\ntwo\nthree",a\n' + '"6 inch,a\nrow,b\n5",b\n' * 5, 5),
    ],
    ids=["one", "threes", "twos", "blank lines", "label first", "in the middle", "beside a poem"],
)
def test_few_rows_in_each_of_several_cells_add_up(tmp_path, header, rows, line):
    path = written(tmp_path / "a.csv", f"{header}\n{rows}")
    assert f"{path}, line {line}:" in refusal(path)


POEMS = [
    '"Roses are red,\nViolets are blue,\nSugar is sweet,\nAnd so are you.",love\n',
    '"Tyger Tyger, burning bright,\nIn the forests of the night;\n\nWhat immortal hand",awe\n',
    '"I have 1,000 words\nand no line for them",awe\n',
]


def test_poems_are_read_whole_and_noted_where_they_could_be_rows(tmp_path):
    path = written(tmp_path / "a.csv", "text,label\n" + "".join(POEMS * 2))
    with data_notes() as notes:
        assert [text.count("\n") for text in texts(path)] == [3, 3, 1] * 2
    (note,) = notes  # on the first and the third poem, whose lines have a row's number of commas
    assert "a.csv 4 cells" in note and "8 rows" in note


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_joined_rows_of_a_single_column_are_noted(tmp_path, name):
    rows = "".join(f"row {number}\n" for number in range(50))
    path = written(tmp_path / name, f'text\n"6 inch\n{rows}5"\nlast\n')
    with data_notes() as notes:
        assert len(texts(path)) == 2
    assert len(notes) == 1 and "1 cell " in notes[0] and "51 rows" in notes[0]
    with data_notes() as notes:
        assert texts(written(path, 'text\n"one line"\nanother\n')) == ["one line", "another"]
    assert notes == []


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"text,label\r\nhello\rthere,a\r\nworld,b\r\n", 2),
        (b"label,text\na,one\nb,two\rhalf\nc,three\n", 3),
        (b"text\none\ntwo\rhalf\n", 3),
        (b"text\rone\rtwo\nthree\r", 3),
    ],
)
def test_a_carriage_return_within_a_cell_without_quotes_is_named(tmp_path, content, line):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert f"{path}, line {line}:" in refusal(path) and "carriage return" in refusal(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n", "\n\r"])
@pytest.mark.parametrize("last", [True, False])
def test_every_end_of_line_that_is_the_same_throughout_is_read(tmp_path, end, last):
    path = tmp_path / "a.csv"
    text = end.join(["id,text", "1,one", '2,"two\rhalf\nmore"', "3,three"]) + end * last
    path.write_bytes(text.encode())
    assert texts(path) == ["one", "two\rhalf\nmore", "three"]


def test_line_feeds_with_and_without_carriage_returns_may_be_mixed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\r\none\ntwo\r\n")
    assert texts(path) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", b"text,id\none,1\ntw\0o,2\n", 3),
        ("a.tsv", b"text\tid\none\t\0\n", 2),
        ("a.csv", "text,id\none,1\n".encode("utf-16-le"), 1),
    ],
)
def test_a_table_with_nul_characters_is_refused_with_its_line(tmp_path, name, content, line):
    path = tmp_path / name
    path.write_bytes(content)
    assert f"{path}, line {line}:" in refusal(path) and "NUL" in refusal(path)


def test_cells_of_several_lines_are_read_whole(tmp_path):
    path = written(
        tmp_path / "a.csv", 'id,text\n0,"one,\ntwo,\nthree ""quoted""\nfour\nfive"\n\n1,7" nail\n'
    )
    assert texts(path) == ['one,\ntwo,\nthree "quoted"\nfour\nfive', '7" nail']


def test_a_row_without_a_cell_that_is_read_is_refused_with_its_line(tmp_path):
    path = written(tmp_path / "a.csv", "id,text,note\n0,fine\n1\n")
    assert texts_until_refused(path) == ["fine"] and f"{path}, line 3:" in refusal(path)


def texts_until_refused(path: Path) -> list[str]:
    read = []
    with pytest.raises(BadInput):
        for row in file_rows(path, ("text",)):
            read.append(row.text("text"))
    return read


def test_a_tsv_is_a_table_whose_quotes_and_commas_are_text(tmp_path):
    path = written(tmp_path / "a.tsv", 'id\ttext\n0\ta, b and 7" c\n1\tsecond\n')
    assert texts(path) == ['a, b and 7" c', "second"]
    assert read_text(TextDataset(train_files=(str(path),))).train == ['a, b and 7" c']


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.tsv"])
def test_a_compressed_file_is_read_as_what_it_holds(tmp_path, name):
    lines = {
        "a.csv": "text\none\ntwo\n",
        "a.tsv": "text\none\ntwo\n",
        "a.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    }
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(lines[name].encode()))
    assert texts(path) == ["one", "two"]


def test_compressed_text_keeps_every_character(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("first\r\nsecond ü".encode()))
    train, evaluation = read_text(TextDataset(train_files=(str(path),)))
    assert "".join(train + evaluation) == "first\r\nsecond ü"


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"text\none\n", mtime=0)[:-6]], ids=["no gzip", "cut off"]
)
def test_damaged_compression_names_the_file(tmp_path, content):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(content)
    assert str(path) in refusal(path)


@pytest.mark.parametrize(
    "name", ["a.jsonl.zst", "a.xlsx", "a.arrow", "a.tar.gz", "a.jsonlines", "a.tab"]
)
def test_what_is_no_text_is_not_trained_on(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(
        gzip.compress(b"words of an archive") if name.endswith(".gz") else b"id\ttext\n1\tone\n"
    )
    with pytest.raises(BadInput, match=name):
        read_text(TextDataset(train_files=(str(path),)))


def test_a_column_of_plain_text_and_a_binary_file_are_refused(tmp_path):
    table = written(tmp_path / "table.data", "id;text\n0;one\n")
    for source in ({"train_files": (str(table),)}, {"builtin": "python-docs"}):
        with pytest.raises(ValidationError, match=r"text_column|has no columns"):
            TextDataset(**source, text_column="text")
    binary = tmp_path / "binary.data"
    binary.write_bytes(b"\x00\x01words")
    with pytest.raises(BadInput, match="NUL"):
        read_text(TextDataset(train_files=(str(binary),)))


def test_what_is_nested_too_deeply_names_the_line(tmp_path):
    deep = written(tmp_path / "deep.jsonl", '{"text": ' + "[" * 600 + "]" * 600 + "}\n")
    assert "line 1, column 'text' must not be nested so deeply" in refusal(deep, "text")


def test_other_encodings_name_the_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\n" + b"row\n" * 5000 + "café\n".encode("latin-1"))
    assert f"{path} must be UTF-8 text, but isn't in line 5002" in refusal(path)


# JSON and Parquet


def test_a_huge_number_does_no_harm_where_nobody_reads_it(tmp_path):
    digits = "1" * 5000
    path = written(
        tmp_path / "a.jsonl",
        f'{{"text": "one", "id": {digits}}}\n{{"text": "two", "id": [-{digits}]}}\n',
    )
    assert texts(path) == ["one", "two"]
    assert f"{path}, line 2, column 'id'" in refusal_of_second(path)
    as_list = written(tmp_path / "a.json", f'[{{"text": "one", "id": {digits}}}]')
    assert texts(as_list) == ["one"] and "item 1, column 'id'" in refusal(as_list, "id")


def refusal_of_second(path: Path) -> str:
    lines = path.read_text().splitlines()
    path.write_text('{"text": "one", "id": 1}\n' + lines[1] + "\n")
    return refusal(path, "id")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' * 50_000, '{"text": "a"', "3"])
def test_what_is_no_object_names_its_line(tmp_path, line):
    path = written(tmp_path / "a.jsonl", f'{{"text": "one"}}\n{line}\n')
    assert f"{path}, line 2, must be one JSON object" in refusal(path)


def test_a_parquet_value_that_python_lacks_names_file_and_column(tmp_path):
    beyond = pyarrow.array([2**52, 1], pyarrow.int64()).cast(pyarrow.timestamp("ms"))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"], "at": beyond}), path)
    assert texts(path) == ["one", "two"]
    assert str(path) in refusal(path, "at") and "at" in refusal(path, "at")
    usual = tmp_path / "usual.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["one"], "at": [datetime(2026, 1, 1)]}), usual
    )
    assert texts(usual) == ["one"]


def test_folders_that_save_to_disk_wrote_are_read(tmp_path):
    import datasets

    both = {
        name: datasets.Dataset.from_dict({"text": [name, "more"]})
        for name in ("train", "validation")
    }
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "both"))
    both["train"].save_to_disk(str(tmp_path / "one"))
    split = read_rows(Dataset(name_or_path=str(tmp_path / "both")), ("text",))
    assert [row.values["text"] for row in split.train + split.evaluation] == [
        "train",
        "more",
        "validation",
        "more",
    ]
    held_back = read_rows(
        Dataset(name_or_path=str(tmp_path / "one"), eval_split="train"), ("text",)
    )
    assert [len(held_back.train), len(held_back.evaluation)] == [1, 1]
    with pytest.raises(BadInput, match="no split 'validation'"):
        read_rows(Dataset(name_or_path=str(tmp_path / "one")), ("text",))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.tsv"])
def test_a_missing_column_is_known_before_anything_starts(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"body": ["one"]}), path)
    else:
        path.write_text('{"body": "one"}\n' if name.endswith("jsonl") else "body\none\n")
    with pytest.raises(BadInput, match="no column 'text'; its columns are body"):
        check_columns(TextDataset(train_files=(str(path),)))
    check_columns(TextDataset(train_files=(str(path),), text_column="body"))


# token ids


def tokenizer_of(ids: dict[str, int], folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("largest", [2**16 - 1, 2**16, 70_431])
def test_token_ids_with_a_gap_are_stored_as_they_are(tmp_path, largest):
    tokenizer = tokenizer_of({"?": 0, "a": 1, "b": 2, "c": largest}, tmp_path / "tokenizer")
    path = written(tmp_path / "text.txt", "a b c " * 100)
    workload = {
        "task": "causal_lm", "model": {"from_config": {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 2}},
        "tokenizer": {"name_or_path": str(tokenizer)}, "dataset": {"train_files": [str(path)]}, "sequence_length": 8,
    }  # fmt: skip
    folder = PreparedFolder(tmp_path / "prepared")
    folder.root.mkdir()
    training_task(workload).prepare(FIXED, folder, "fingerprint")
    assert set(np.load(folder.train).tolist()) == {1, 2, largest}
    assert AutoConfig.from_pretrained(folder.model_config).vocab_size == largest + 1

    model = {"from_config": {**workload["model"]["from_config"], "vocab_size": largest}}
    with pytest.raises(BadInput, match=f"got {largest} and {largest}"):
        training_task({**workload, "model": model}).prepare(FIXED, folder, "fingerprint")


# classes of a head


def labelled(*classes: str) -> Labelled:
    """One row of each class, for training and for evaluation."""
    rows = LabelledRows([], np.arange(len(classes)))
    return Labelled(rows, rows, classes)


@pytest.mark.parametrize(
    ("words", "own", "places", "notes"),
    [
        (("negative", "positive"), ("positive", "negative"), [1, 0], 0),
        (("Negative", "POSITIVE"), ("positive", "negative"), [1, 0], 1),
        (("0", "1"), ("positive", "negative"), [0, 1], 1),
        (("0", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), [0, 2], 0),
        (("LABEL_0", "LABEL_1"), ("LABEL_0", "LABEL_1"), [0, 1], 0),
        (("bad", "good"), ("LABEL_0", "LABEL_1"), [0, 1], 1),
        (("negative", "positive"), ("neutral", "positive", "negative"), [2, 1], 0),
        (("1", "2"), ("2", "1", "0"), [1, 0], 0),
        (("1", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), [1, 2], 1),
        (("1", "2"), ("0 stars", "1 star", "2 stars"), [1, 2], 1),
        (("0", "1", "2"), ("1 star", "2 stars", "3 stars"), [0, 1, 2], 1),
        (("0", "1"), ("ordinary", "spam of 1 line"), [0, 1], 1),
    ],
)
def test_a_heads_own_order_of_classes_is_kept(words, own, places, notes):
    ordered, said = in_model_order(labelled(*words), own)
    assert ordered.train.labels.tolist() == ordered.evaluation.labels.tolist() == places
    assert len(said) == notes and len(ordered.classes) == len(own)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (("ham", "spam"), ("positive", "negative")),
        (("0", "2"), ("positive", "negative")),
        (("bad", "good", "ugly"), ("LABEL_0", "LABEL_1")),
        (("neutral", "positive"), ("positive", "negative")),
        (("no", "yes"), ("NO", "No")),
    ],
)
def test_labels_that_a_head_lacks_are_refused(words, own):
    with pytest.raises(BadInput, match=words[0]) as refused:
        in_model_order(labelled(*words), own)
    assert all(name in str(refused.value) for name in own)


@pytest.mark.parametrize(
    ("words", "own", "wrong"),
    [
        (("1", "2"), ("1 star", "2 stars", "3 stars", "4 stars"), "1 is '2 stars'"),
        (("2", "3"), ("1 star", "2 stars", "3 stars", "4 stars"), "2 is '3 stars'"),
        (("1", "2"), ("negative", "neutral", "positive"), "1 is 'neutral'"),
        (("0", "1", "2"), ("2 stars", "1 star", "0 stars"), "0 is '2 stars'"),
        (("0", "1"), ("level_1", "level_0", "level_2"), "0 is 'level_1'"),
    ],
)
def test_numbers_that_may_be_other_classes_than_those_at_their_places_are_refused(
    words, own, wrong
):
    with pytest.raises(BadInput, match=wrong) as refused:
        in_model_order(labelled(*words), own)
    assert all(name in str(refused.value) for name in own)


@pytest.mark.parametrize(("pad", "is_used"), [(5, False), (1, True)])
def test_a_models_own_padding_stays_unless_it_stands_in_a_text(pad, is_used, tmp_path):
    """RoBERTa counts positions from it; `<e>` would shift them, too."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "bad": 1, "good": 2, "<e>": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="<e>")
    saved.save_pretrained(tmp_path / "model")
    config = RobertaConfig(**SIZES, vocab_size=8, max_position_embeddings=32, pad_token_id=pad)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    lines = '{"text": "good good", "label": 1}\n{"text": "bad", "label": 0}\n' * 6
    workload = {
        "task": "classification", "model": {"name_or_path": str(tmp_path / "model")},
        "dataset": {"train_files": [str(written(tmp_path / "a.jsonl", lines))]}, "sequence_length": 8,
    }  # fmt: skip
    folder = PreparedFolder(tmp_path / "prepared")
    folder.root.mkdir()
    training_task(workload).prepare(FIXED, folder, "fingerprint")
    prepared = AutoConfig.from_pretrained(folder.model_config)
    assert prepared.pad_token_id == (3 if is_used else pad)


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


def classifier_of(folder: Path, classes: list[str]) -> None:
    config = BertConfig(
        **SIZES, vocab_size=8, max_position_embeddings=16, id2label=dict(enumerate(classes))
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("id2label", "said"),
    [
        ({"1": "bad", "2": "good"}, "lacks 0 and has 2"),
        ({"0": "bad", "2": "good"}, "lacks 1 and has 2"),
        ({"-1": "bad", "0": "good"}, "lacks 1 and has 0"),
    ],
)
def test_classes_that_are_not_numbered_from_0_are_refused(id2label, said, tmp_path):
    classifier_of(tmp_path, ["bad", "good"])

    def classes(names: dict) -> tuple[str, ...] | None:
        change_config(tmp_path, id2label=names)
        return own_classes(_TEXT_KIND, Model(name_or_path=str(tmp_path)))

    with pytest.raises(BadInput, match=said):
        classes(id2label)
    assert classes({"1": 5, "0": 7}) == ("7", "5")


@pytest.mark.parametrize("architectures", [None, ["BertModel"], ["OurClassifier"]])
def test_a_head_is_known_by_its_weights(architectures, tmp_path):
    classifier_of(tmp_path, ["owl", "cat", "dog"])
    change_config(tmp_path, architectures=architectures)
    assert own_classes(_TEXT_KIND, Model(name_or_path=str(tmp_path))) == ("owl", "cat", "dog")


def test_a_head_may_be_called_otherwise(tmp_path):
    config = DeiTConfig(
        **SIZES, image_size=8, patch_size=4, id2label={0: "owl", 1: "cat", 2: "dog"}
    )
    DeiTForImageClassificationWithTeacher(config).save_pretrained(tmp_path)
    assert own_classes(_IMAGE_KIND, Model(name_or_path=str(tmp_path))) == ("owl", "cat", "dog")


@pytest.mark.parametrize("of", [BertModel, BertForMaskedLM, ModernBertForMaskedLM])
def test_a_model_without_a_head_has_no_classes(of, tmp_path):
    ids = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 1,
    }
    config = of.config_class(**SIZES, **ids, vocab_size=8, max_position_embeddings=16)
    of(config).save_pretrained(tmp_path)
    assert own_classes(_TEXT_KIND, Model(name_or_path=str(tmp_path))) is None


def test_a_pretrained_classifier_is_right_from_the_start(tmp_path):
    tokenizer = tokenizer_of({"?": 0, "bad": 1, "good": 2, "[PAD]": 3}, tmp_path / "model")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    config = BertConfig(
        **sizes, vocab_size=8, id2label={0: "positive", 1: "negative"}, max_position_embeddings=16
    )
    BertForSequenceClassification(config).save_pretrained(tokenizer)
    path = written(
        tmp_path / "a.jsonl",
        '{"text": "good", "label": "positive"}\n{"text": "bad", "label": "negative"}\n' * 6,
    )
    workload = {
        "task": "classification", "model": {"name_or_path": str(tokenizer)}, "dataset": {"train_files": [str(path)]},
        "sequence_length": 8,
    }  # fmt: skip
    folder = PreparedFolder(tmp_path / "prepared")
    folder.root.mkdir()
    training_task(workload).prepare(FIXED, folder, "fingerprint")
    assert AutoConfig.from_pretrained(folder.model_config).id2label == {
        0: "positive",
        1: "negative",
    }
    tokens, labels = (
        np.load(folder.root / "train" / f"{name}.npy") for name in ("tokens", "labels")
    )
    assert labels.tolist() == [0 if token == 2 else 1 for token in tokens.tolist()]


# models with their code

CODE = {
    "configuration_own.py": (
        "from transformers import GPT2Config\n\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
    ),
    "modeling_own.py": (
        "from transformers import GPT2LMHeadModel\nfrom .configuration_own import OwnConfig\n\n"
        "class OwnForCausalLM(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    ),
}


@pytest.fixture
def own_model(tmp_path) -> Path:
    from transformers import GPT2LMHeadModel

    folder = tokenizer_of({"?": 0, "a": 1, "b": 2}, tmp_path / "own")
    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=16, vocab_size=3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    named = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    stored |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": named}
    (folder / "config.json").write_text(json.dumps(stored))
    for name, text in CODE.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_a_model_that_brings_its_code_is_prepared_only_where_it_is_trusted(tmp_path, own_model):
    from carbonopt.train import prepare

    path = written(tmp_path / "text.txt", "a b " * 200)
    model = {"name_or_path": str(own_model), "trust_remote_code": True}
    workload = {
        "task": "causal_lm", "model": model, "dataset": {"train_files": [str(path)]}, "sequence_length": 8,
    }  # fmt: skip
    spec = prepare.PrepareSpec(
        workload=training_task(workload).workload.model_dump(mode="json"), space=FIXED, fingerprint="",
        prepared_dir=str(tmp_path / "prepared"),
    )  # fmt: skip
    prepared = prepare.prepare(spec)
    assert prepared.model_parameters == sum(size for size in (3 * 4, 16 * 4, 4 * 2, 4 * 12 + 12, 4 * 4 + 4, 4 * 16 + 16,
                                                              16 * 4 + 4, 4 * 2, 4 * 2))  # fmt: skip
    shutil.rmtree(tmp_path / "prepared")
    untrusted = spec.model_copy(
        update={"workload": {**spec.workload, "model": {**model, "trust_remote_code": False}}}
    )
    with pytest.raises(BadInput, match="trust_remote_code"):
        prepare.prepare(untrusted)


# ------------------------------------------------------------------------------------------------
# labels that others have written


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("spam", "spam "), ("spam", " spam"), ("1", "1.0"), ("01", "1"), ("True", "true"), ("a b", "a  b"),
        ("caf\u00e9", "cafe\u0301"), ("spam", "spam\u200b"), ("spam", "\ufeffspam"), ("spam", "sp\u00adam"),
        ("\u2764", "\u2764\ufe0f"), ("a b", "a\u00a0b"),
    ],
)  # fmt: skip
def test_a_class_that_is_spelt_in_two_ways_is_refused(tmp_path, one, other):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + f"x,{one}\ny,ham\nz,{other}\n" * 5)
    dataset = LabelledDataset(train_files=(str(path),))
    with pytest.raises(BadInput, match="in one way") as refused:
        read_labelled(dataset)
    shown = str(refused.value)
    assert any(spelt(one) in shown and spelt(other) in shown for spelt in (repr, ascii))
    path.write_text("text,label\n" + f"x,{one}\ny,ham\nz,{one.upper()}2\n" * 5)
    assert len(read_labelled(dataset).classes) == 3


def classes_of(path: Path, labels: list) -> tuple[str, ...]:
    path.write_text("".join(json.dumps({"text": "x", "label": label}) + "\n" for label in labels))
    return read_labelled(LabelledDataset(train_files=(str(path),))).classes


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([True, False], ("false", "true")),
        ([1.0, 0.0, 10.0], ("0", "1", "10")),
        ([1.0, 2, -1], ("-1", "1", "2")),
        (["True", "False"], ("False", "True")),
    ],
)
def test_truth_values_and_whole_floats_are_labels(tmp_path, labels, classes):
    assert classes_of(tmp_path / "a.jsonl", labels * 3) == classes
    table = pyarrow.table({"text": ["x"] * len(labels) * 2, "label": pyarrow.array(labels * 2)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    read = read_labelled(LabelledDataset(train_files=(str(tmp_path / "a.parquet"),)))
    assert read.classes == classes


@pytest.mark.parametrize(
    "labels", [[True, 1], [False, "false"], [1, "1"], [0.5, 1.0], [None, 1.0], [float("nan"), 1.0]]
)
def test_labels_of_several_kinds_or_fractions_are_refused_with_their_row(tmp_path, labels):
    with pytest.raises(BadInput, match=r"'label'.*a\.jsonl, line 1"):
        classes_of(tmp_path / "a.jsonl", labels * 3)


@pytest.mark.parametrize(
    ("label", "other"),
    [
        ("pos", "Pos"),
        ("pos", '"pos"'),
        ("pos", "\u201cpos\u201d"),
        ("don't", "don\u2019t"),
        ("-1", "\u22121"),
        ("sci-fi", "sci\u2013fi"),
        ("1", "1e0"),
        ("0.5", ".5"),
        ("1", "\uff11"),
        ("spam", "\uff53\uff50\uff41\uff4d"),
        ("fit", "\ufb01t"),
    ],
)
def test_labels_that_differ_in_spelling_alone_are_refused(tmp_path, label, other):
    with pytest.raises(BadInput, match="in one way") as refused:
        classes_of(tmp_path / "a.jsonl", [label, "else", other] * 3)
    assert "rename one if they are two classes" in str(refused.value)


@pytest.mark.parametrize(("label", "other"), [("1.1", "1.10"), ("Polish", "polish")])
def test_two_classes_of_like_spelling_can_be_renamed(tmp_path, label, other):
    with pytest.raises(BadInput) as refused:
        classes_of(tmp_path / "a.jsonl", [label, other] * 3)
    renamed = str(refused.value).rpartition("as in ")[2].removesuffix(".")
    kept = {label, other} - {renamed.removesuffix(" (2)")}
    assert set(classes_of(tmp_path / "b.jsonl", [*kept, renamed] * 3)) == {*kept, renamed}


@pytest.mark.parametrize(
    "labels",
    [
        ["a", "A"],  # letters as signs
        ["Co", "CO"],
        ["``", "''"],  # parts of speech
        ["m2", "m\u00b2"],
        ["s", "\u017f"],
        ["-", "\u2013", "\u2212"],
        ["NN", "NNS", "-1"],
        ["1", "1.5", "-1"],
    ],
)
def test_labels_that_only_resemble_each_other_stay_classes(tmp_path, labels):
    assert set(classes_of(tmp_path / "a.jsonl", labels * 3)) == set(labels)


def test_classes_without_evaluation_examples_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "x,a\ny,b\n" * 20 + "40,TOTAL\n")
    labelled = read_labelled(LabelledDataset(train_files=(str(tmp_path / "a.csv"),)))
    (note,) = class_notes(labelled, torch.nn.Linear(1, 1))
    assert "1 of 3 classes" in note and "(TOTAL)" in note


def test_a_class_that_the_evaluation_spells_otherwise_is_refused(tmp_path):
    train, evaluation = tmp_path / "a.csv", tmp_path / "b.csv"
    train.write_text("text,label\nx,caf\u00e9\ny,ham\n")
    evaluation.write_text("text,label\nz,cafe\u0301\n")
    dataset = LabelledDataset(train_files=(str(train),), eval_files=(str(evaluation),))
    with pytest.raises(BadInput, match=r"'caf\\xe9'.*'cafe\\u0301'|'cafe\\u0301'.*'caf\\xe9'"):
        read_labelled(dataset)


@pytest.mark.parametrize("other", ["cat ", "cat\u200b"])
def test_folders_of_classes_that_look_alike_are_refused(tmp_path, other):
    for number, name in enumerate(["cat", "dog", other] * 2):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    dataset = {"name_or_path": str(tmp_path), "image_column": "image", "eval_split": "train"}
    with pytest.raises(BadInput, match="in one way"):
        read_labelled(LabelledDataset(**dataset))
    with pytest.raises(BadInput, match="in one way"):
        look_at("classification", find_data(str(tmp_path), ()), {"image_column": "image"})


def test_splits_that_number_their_classes_otherwise_keep_the_names(tmp_path):
    import datasets

    def split(names):
        kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        rows = {"text": ["bad", "good"] * 5, "label": ["neg", "pos"] * 5}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))

    both = datasets.DatasetDict(train=split(["neg", "pos"]), validation=split(["pos", "neg"]))
    both.save_to_disk(str(tmp_path / "both"))
    found = read_labelled(LabelledDataset(name_or_path=str(tmp_path / "both")))
    assert found.classes == ("neg", "pos")
    assert found.evaluation.labels.tolist() == found.train.labels.tolist() == [0, 1] * 5


NAMED = ["bug", "feature", "question"]


def write_encoded(path: Path, labels: list[str], names: list[str]) -> Path:
    """Write rows as class_encode_column and to_parquet do, or the same as Arrow."""
    import datasets

    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    texts = [f"a {label}" for label in labels]
    features = datasets.Features(kinds)
    rows = datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = rows.data.table.replace_schema_metadata(features.arrow_schema.metadata)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    return path


def spoken(found: Labelled) -> list[list[str]]:
    """Return each row's class, of the training and of the evaluation, by name."""
    parts = (found.train, found.evaluation)
    return [[found.classes[label] for label in part.labels] for part in parts]


def test_names_of_classes_by_number_are_read_in_the_order_of_the_numbers(tmp_path):
    path = write_encoded(tmp_path / "train.parquet", NAMED, NAMED)
    schema = pyarrow.parquet.read_schema(path)
    written = json.loads(schema.metadata[b"huggingface"])
    written["info"]["features"]["label"]["names"] = {"2": "question", "0": "bug", "1": "feature"}
    assert names_of(schema.with_metadata({"huggingface": json.dumps(written)}), path) == {
        "label": NAMED
    }


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("names", [["bug", "question"], ["question", "bug", "feature"]])
def test_parquet_files_keep_their_own_names_of_classes(tmp_path, is_folder, names):
    train = write_encoded(tmp_path / "train.parquet", NAMED * 2, NAMED)
    held = write_encoded(tmp_path / "validation.parquet", ["bug", "question", "bug"], names)
    files = {"train_files": [str(train)], "eval_files": [str(held)]}
    dataset = {"name_or_path": str(tmp_path)} if is_folder else files
    found = read_labelled(LabelledDataset(**dataset))
    assert found.classes == tuple(NAMED)
    assert spoken(found) == [NAMED * 2, ["bug", "question", "bug"]]


@pytest.mark.parametrize("is_folder", [True, False])
def test_shards_that_lack_classes_keep_the_names_of_theirs(tmp_path, is_folder):
    paths = [
        write_encoded(tmp_path / f"train-0000{place}-of-00002.parquet", labels, sorted(set(labels)))
        for place, labels in enumerate((["feature", "bug"] * 4, ["question", "bug"] * 4))
    ]
    dataset = {"name_or_path": str(tmp_path), "eval_split": "train"}
    if not is_folder:
        dataset = {"train_files": list(map(str, paths))}
    found = read_labelled(LabelledDataset(**dataset, eval_fraction=0.1))
    rows = [*found.train.rows, *found.evaluation.rows]
    assert found.classes == tuple(NAMED)
    assert [f"a {word}" for part in spoken(found) for word in part] == [
        row.values["text"] for row in rows
    ]


def test_a_heads_classes_are_found_by_the_names_in_parquet(tmp_path):
    path = write_encoded(tmp_path / "a.parquet", ["pos", "neg"] * 5, ["pos", "neg"])
    found = read_labelled(LabelledDataset(train_files=[str(path)]))
    ordered, notes = in_model_order(found, ("NEG", "POS"))
    assert ordered.train.labels.tolist() == [1, 0] * 4
    assert "another spelling" in notes[0]


@pytest.mark.parametrize("names", [NAMED, ["question", "bug", "feature"]])
def test_arrow_files_are_read_where_they_name_their_classes_alike(tmp_path, names):
    write_encoded(tmp_path / "train.arrow", NAMED * 2, NAMED)
    write_encoded(tmp_path / "validation.arrow", NAMED, names)
    dataset = LabelledDataset(name_or_path=str(tmp_path))
    if names == NAMED:
        assert spoken(read_labelled(dataset)) == [NAMED * 2, NAMED]
        return
    with pytest.raises(BadInput, match=r"'label'.*validation\.arrow has question, bug, feature"):
        read_labelled(dataset)


def test_names_of_classes_and_numbers_without_names_are_not_mixed(tmp_path):
    named = write_encoded(tmp_path / "a.parquet", NAMED, NAMED)
    rows = {"text": ["a", "b"], "label": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "b.parquet")
    files = [str(named), str(tmp_path / "b.parquet")]
    with pytest.raises(BadInput, match="not several of them"):
        read_labelled(LabelledDataset(train_files=files))


def test_a_folder_that_can_not_be_read_says_why(tmp_path):
    (tmp_path / "train.csv").write_bytes("text\na\n".encode("utf-16"))
    with pytest.raises(BadInput, match=r"train\.csv must be UTF-8 .* line 1"):
        read_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))
