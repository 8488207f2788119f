"""A data set's folder is read as it lies there now, whatever the datasets library has in its cache."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil
import zipfile
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.data_notes import data_notes
from carbonopt.train.data.labels import LabelledDataset, read_labelled
from carbonopt.train.data.rows import hub_rows

CLASSES = datasets.ClassLabel(names=["neg", "pos"])

README = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path:"
    " rows.jsonl\n---\n"
)


def write_jsonl(folder: Path, texts: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "rows.jsonl").write_text(lines)
    return folder / "rows.jsonl"


def write_named(folder: Path, texts: list[str]) -> Path:
    (folder / "README.md").write_text(README)
    return write_jsonl(folder, texts)


def write_gzip(folder: Path, texts: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    return folder / "rows.jsonl.gz"


def write_csv(folder: Path, texts: list[str]) -> Path:
    (folder / "train.csv").write_text("\n".join(["text", *texts]) + "\n")
    return folder / "train.csv"


def write_parquet(folder: Path, texts: list[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.parametrize("write", [write_jsonl, write_named, write_gzip, write_csv, write_parquet])
def test_a_file_replaced_with_its_time_kept_is_read_anew(write, tmp_path: Path) -> None:
    dataset = Dataset(name_or_path=str(tmp_path), eval_split="train")
    for texts in (["old 1", "old 2"], ["new 1", "new 2"], ["other", "and", "more"]):
        os.utime(write(tmp_path, texts), (1_700_000_000, 1_700_000_000))
        assert [row.text("text") for row in hub_rows(dataset, ("text",)).train] == texts


# --------------------------------------------------------------------------------------------------------------
# splits


def draw(folder: Path, *names: str) -> None:
    """Draw a small picture for each of these paths below a folder."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(folder / name)


def pictures(folder: Path, **splits: str) -> tuple[list[str], list[str]]:
    """Return which pictures are in the training and in the evaluation split, as class/file."""
    rows = hub_rows(Dataset(name_or_path=str(folder), **splits), ("image", "label"))
    parts = (rows.train, rows.train if rows.evaluation is None else rows.evaluation)
    return tuple(
        sorted(f"{row.values['label']}/{Path(row.values['image']['path']).name}" for row in part)
        for part in parts
    )


@pytest.mark.parametrize("name", ["dev", "train", "test", "val", "Dev", "evaluation"])
def test_a_class_with_the_name_of_a_split_stays_in_its_own(name: str, tmp_path: Path) -> None:
    draw(
        tmp_path,
        f"train/{name}/1.png",
        "train/cat/2.png",
        f"validation/{name}/3.png",
        "validation/cat/4.png",
    )
    train, evaluation = pictures(tmp_path)
    assert train == sorted([f"{name}/1.png", "cat/2.png"])
    assert evaluation == sorted([f"{name}/3.png", "cat/4.png"])


def test_a_picture_named_like_a_split_is_one_of_many(tmp_path: Path) -> None:
    names = ["cat/my-test-photo.png", "cat/2.png", "dog/train.png", "dog/4.png"]
    draw(tmp_path, *names)
    assert pictures(tmp_path, eval_split="train")[0] == sorted(names)


def test_classes_beside_one_with_the_name_of_a_split_are_refused(tmp_path: Path) -> None:
    draw(tmp_path, "bus/1.png", "car/2.png", "train/3.png")
    with pytest.raises(BadInput, match="bus, car beside train"):
        pictures(tmp_path, eval_split="train")


@pytest.mark.parametrize("stray", ["logo.png", "cat/black/3.png", "cat/a/b/3.png"])
def test_a_stray_picture_is_named(stray: str, tmp_path: Path) -> None:
    draw(tmp_path, "cat/1.png", "dog/2.png", "dog/4.png", stray)
    with pytest.raises(BadInput, match=stray):
        pictures(tmp_path, eval_split="train")


def test_a_stray_picture_of_a_split_is_named(tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "train/dog/2.png", "val/cat/1.png", "val/4.png")
    with pytest.raises(BadInput, match=r"val/4\.png"):
        pictures(tmp_path)


@pytest.mark.parametrize("names", [["cat/1.png", "cat/2.png"], ["a/cat/1.png", "b/cat/2.png"]])
def test_pictures_of_one_class_are_refused_with_its_name(names: list[str], tmp_path: Path) -> None:
    draw(tmp_path, *names)
    with pytest.raises(BadInput, match="'cat'"):
        pictures(tmp_path, eval_split="train")


@pytest.mark.parametrize(
    "names, found",
    [
        (["train/cat/a/1.png", "train/dog/b/2.png"], "train/cat/a and train/dog/b"),
        (["cat/2020/1.png", "cat/2021/2.png", "dog/2020/3.png"], "cat/2020 and dog/2020"),
        (["cat/train/1.png", "dog/train/2.png", "cat/val/3.png"], "train/cat"),
        (["Train/cat/1.png", "Train/dog/2.png", "Validation/cat/3.png"], "lower case"),
    ],
)
def test_folders_of_folders_of_pictures_are_refused(
    names: list[str], found: str, tmp_path: Path
) -> None:
    draw(tmp_path, *names)
    with pytest.raises(BadInput, match=found):
        pictures(tmp_path, eval_split="train")


def test_a_folder_around_all_others_names_no_class(tmp_path: Path) -> None:
    draw(tmp_path, "photos/cat/1.png", "photos/dog/2.png")
    assert pictures(tmp_path, eval_split="train")[0] == ["cat/1.png", "dog/2.png"]


def test_nested_folders_of_an_archive_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "in", "cat/a/1.png", "dog/b/2.png")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("cat/a/1.png", "dog/b/2.png"):
            archive.write(tmp_path / "in" / name, name)
            (tmp_path / "in" / name).unlink()
    with pytest.raises(BadInput, match=r"cat/a and .*dog/b"):
        pictures(tmp_path, eval_split="train")


@pytest.mark.parametrize("file", ["train/bird/1.heic", "train/bird/1.svg", "train/bird/a/1.npy"])
def test_a_class_without_a_readable_picture_is_refused(file: str, tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(BadInput, match="train/bird"):
        pictures(tmp_path)


def test_files_beside_pictures_that_are_left_out_are_counted(tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "train/dog/2.png", "val/cat/3.png")
    for name in ("train/cat/2.heic", "train/cat/3.HEIC", "val/cat/a.pdf", "train/dog/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "val/dog").mkdir()  # a class may have no picture for evaluation
    (tmp_path / "train/annotations").mkdir()
    (tmp_path / "train/annotations/1.xml").write_text("<a/>")
    with data_notes() as notes:
        assert len(pictures(tmp_path)[0]) == 2
    assert len(notes) == 1 and "3 files" in notes[0] and "2 .heic, 1 .pdf" in notes[0]


def test_pictures_that_a_table_does_not_name_are_counted(tmp_path: Path) -> None:
    draw(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "metadata.csv").write_text("file_name,label\n1.png,cat\n2.png,dog\n")
    dataset = Dataset(name_or_path=str(tmp_path), eval_split="train")
    with data_notes() as notes:
        assert len(hub_rows(dataset, ("image", "label")).train) == 2
    assert len(notes) == 1 and "2 of 3 pictures" in notes[0]


def test_a_table_about_the_pictures_of_one_split_is_refused(tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "train/dog/2.png", "validation/cat/3.png")
    (tmp_path / "train/metadata.csv").write_text("file_name,label\ncat/1.png,x\ndog/2.png,y\n")
    with pytest.raises(BadInput, match="one for train and none for validation"):
        pictures(tmp_path)


def test_pictures_at_any_depth_have_the_classes_of_a_table(tmp_path: Path) -> None:
    draw(tmp_path, "1.png", "more/2.png")
    (tmp_path / "metadata.csv").write_text("file_name,label\n1.png,cat\nmore/2.png,dog\n")
    dataset = Dataset(name_or_path=str(tmp_path), eval_split="train")
    assert [row.values["label"] for row in hub_rows(dataset, ("image", "label")).train] == [
        "cat",
        "dog",
    ]


@pytest.mark.parametrize("name", ["train.jsonl.gz", "data.zip", "rows.jsonl.xz", "rows.csv.bz2"])
@pytest.mark.parametrize("content", ["no archive", "cut off"])
def test_a_damaged_archive_is_refused(name: str, content: str, tmp_path: Path) -> None:
    rows = b'{"text": "one"}\n' * 1000
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("rows.jsonl", rows)
    packed = {
        ".gz": gzip.compress(rows), ".zip": made.getvalue(), ".xz": lzma.compress(rows),
        ".bz2": bz2.compress(b"text\n" + rows),
    }[Path(name).suffix]  # fmt: skip
    (tmp_path / name).write_bytes(packed[: len(packed) // 2] if content == "cut off" else b"text")
    with pytest.raises(BadInput, match=str(tmp_path)):
        hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "val/cat/2.png", "dev/cat/3.png")
    with pytest.raises(BadInput, match="dev and val are both validation"):
        pictures(tmp_path)


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ("train.jsonl", "validation.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
        ("train/rows.jsonl", "dev/rows.jsonl"),
        ("my_train.jsonl", "my_valid.jsonl"),
    ],
)
def test_splits_are_told_by_folders_or_by_the_names_of_files(
    train: str, evaluation: str, tmp_path: Path
) -> None:
    for name, text in ((train, "to learn"), (evaluation, "to judge by")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    rows = hub_rows(Dataset(name_or_path=str(tmp_path)), ("text",))
    assert [row.text("text") for row in rows.train] == ["to learn"]
    assert [row.text("text") for row in rows.evaluation] == ["to judge by"]


def test_cells_that_pandas_takes_for_missing_are_texts(tmp_path: Path) -> None:
    texts = ["NA", "None", "null", "nan", "N/A", "plain"]
    write_csv(tmp_path, texts)
    rows = hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",)).train
    assert [row.text("text") for row in rows] == texts


# --------------------------------------------------------------------------------------------------------------
# links


def linked(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target, target_is_directory=True)


@pytest.mark.parametrize("beside", [["cat/1.png", "dog/2.png"], []])
def test_classes_that_are_links_are_read(beside: list[str], tmp_path: Path) -> None:
    draw(tmp_path / "store", "bird/7.png", "bird/8.png", "more/inner/9.png")
    draw(tmp_path / "data", *beside)
    linked(tmp_path / "data/bird", tmp_path / "store/bird")
    linked(tmp_path / "data/fish", tmp_path / "store/more/inner")
    expected = sorted([*beside, "bird/7.png", "bird/8.png", "fish/9.png"])
    assert pictures(tmp_path / "data", eval_split="train")[0] == expected


def test_links_within_splits_and_within_links_are_read(tmp_path: Path) -> None:
    draw(tmp_path / "store", "bird/7.png")
    draw(tmp_path / "animals", "cat/1.png")
    linked(tmp_path / "animals/bird", tmp_path / "store/bird")
    draw(tmp_path / "data", "validation/cat/3.png")
    linked(tmp_path / "data/train", tmp_path / "animals")
    linked(tmp_path / "data/validation/bird", tmp_path / "store/bird")
    train, evaluation = pictures(tmp_path / "data")
    assert (train, evaluation) == (["bird/7.png", "cat/1.png"], ["bird/7.png", "cat/3.png"])


@pytest.mark.parametrize("name", ["data/bird", "bird [x]"])
def test_links_that_the_library_leaves_out_are_refused(name: str, tmp_path: Path) -> None:
    draw(tmp_path / "store", "7.png")
    place = (tmp_path / "set" / name).parent
    draw(place, "cat/1.png", "dog/2.png")
    linked(tmp_path / "set" / name, tmp_path / "store")
    with pytest.raises(BadInput, match=rf"{Path(name).name.split()[0]}.*7\.png"):
        pictures(tmp_path / "set", eval_split="train")


@pytest.mark.parametrize("name", ["bird", "cat/3.png"])
def test_links_of_data_that_lead_nowhere_are_refused(name: str, tmp_path: Path) -> None:
    draw(tmp_path, "cat/1.png", "dog/2.png")
    linked(tmp_path / name, Path("nowhere"))
    with pytest.raises(BadInput, match=f"{tmp_path / name} must"):
        pictures(tmp_path, eval_split="train")


@pytest.mark.parametrize(
    ("name", "target"), [("all", "."), ("cat/up", ".."), ("old.log", "nowhere")]
)
def test_links_around_and_of_no_data_change_nothing(name: str, target: str, tmp_path: Path) -> None:
    draw(tmp_path, *(f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(4)))
    before = pictures(tmp_path, eval_split="train")
    linked(tmp_path / name, Path(target))
    assert pictures(tmp_path, eval_split="train") == before


def test_a_folder_behind_a_link_is_read_as_the_folder_itself(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        draw(
            tmp_path / "set" / split,
            *(f"{kind}/{n}.png" for kind in ("cat", "dog") for n in range(3)),
        )
    linked(tmp_path / "link", tmp_path / "set")
    linked(tmp_path / "above", tmp_path)
    direct = pictures(tmp_path / "set")
    assert pictures(tmp_path / "link") == pictures(tmp_path / "above" / "set") == direct


def test_hidden_links_and_links_beside_named_tables_do_no_harm(tmp_path: Path) -> None:
    linked(tmp_path / "data/orig", tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train.csv").write_text("text,label\nold,x\n")
    linked(tmp_path / "data/.lock", Path("host.1234"))
    linked(tmp_path / "data/old", tmp_path / "store")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/rows.csv").write_text("text,label\nold,x\n")
    (tmp_path / "data/train.csv").write_text("text,label\nnew,x\n")
    assert cells_of(tmp_path / "data", eval_split="train") == [["new", "x"]]


# --------------------------------------------------------------------------------------------------------------
# tables


def table_refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as refused:
        hub_rows(Dataset(name_or_path=str(folder), eval_split="train"), ("text", "label"))
    return str(refused.value)


def cells_of(folder: Path, **splits: str) -> list[list[str]]:
    rows = hub_rows(Dataset(name_or_path=str(folder), **splits), ("text", "label"))
    return [[*row.values.values()] for row in (*rows.train, *(rows.evaluation or ()))]


ROWS = "".join(f"row {number},{'ab'[number % 2]}\n" for number in range(8))
SWALLOWED = f'"6 inch,a\n{ROWS}5",b\n'
SHIFTED = ROWS.replace("row", "row, or")


@pytest.mark.parametrize("rows", [SWALLOWED, SHIFTED, ROWS + SHIFTED, '"6 inch,a\n5",b\n' * 3])
@pytest.mark.parametrize("name", ["train.csv", "rows.csv", "train/rows.tsv", "train.csv.gz"])
def test_tables_of_a_folder_are_read_by_the_rules_of_files(
    name: str, rows: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = f"text,label\n{rows}"
    text = text.replace(",", "\t") if ".tsv" in name else text
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert f"{path}, line" in table_refusal(tmp_path)


@pytest.mark.parametrize("rows", [SWALLOWED, SHIFTED, '"6 inch,a\n5",b\n' * 3])
def test_a_table_that_its_card_describes_is_checked_too(rows: str, tmp_path: Path) -> None:
    card = "---\nconfigs:\n- config_name: default\n  data_files: rows.csv\n  sep: ';'\n---\n"
    (tmp_path / "README.md").write_text(card)
    table = tmp_path / "rows.csv"
    table.write_text(f"text;label\n{ROWS.replace(',', ';')}a, b;c\n")
    assert cells_of(tmp_path, eval_split="train")[-1] == ["a, b", "c"]
    table.write_text(f"text;label\n{rows.replace(',', ';')}")
    assert str(tmp_path) in table_refusal(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.csv", "train.jsonl"),
        ("a.csv", "b.jsonl"),
        ("train.csv", "train-2.json"),
        ("train/a.tsv", "train/b.json"),
        ("data/a.csv.gz", "data/b.ndjson"),
    ],
)
def test_tables_in_several_formats_are_refused(one: str, other: str, tmp_path: Path) -> None:
    for name in (one, other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    table = b"text,label\none,x\ntwo,y\n"
    (tmp_path / one).write_bytes(gzip.compress(table) if one.endswith(".gz") else table)
    (tmp_path / other).write_text('{"text": "three", "label": "x"}\n')
    said = table_refusal(tmp_path)
    assert Path(one).name in said and Path(other).name in said


TABLE = "text,label\none,0\ntwo,1\nthree,0\n"


def write_files(folder: Path, *names: str) -> None:
    """Write tables below a folder; those below a name that ends in .zip are in that archive."""
    for name in names:
        archive, inside, member = name.partition(".zip/")
        if inside:
            with zipfile.ZipFile(folder / f"{archive}.zip", "a") as file:
                file.writestr(member, TABLE)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(TABLE)


@pytest.mark.parametrize(
    "names",
    [
        ("Train.csv", "Validation.csv"),
        ("TRAIN-1.csv", "Test-1.csv"),
        ("Train/a.csv", "Val/a.csv"),
        ("all.zip/train/a.csv", "all.zip/validation/a.csv"),
        ("all.zip/train.csv", "all.zip/dev.csv"),
    ],
)
@pytest.mark.parametrize("eval_split", ["train", "validation"])
def test_files_for_evaluation_are_not_read_for_training(
    names: tuple[str, str], eval_split: str, tmp_path: Path
) -> None:
    write_files(tmp_path, *names)
    with pytest.raises(BadInput, match=f"{Path(names[1]).name} .*{Path(names[0]).name}"):
        hub_rows(Dataset(name_or_path=str(tmp_path), eval_split=eval_split), ("text",))


@pytest.mark.parametrize(
    "names", [("Training.csv", "more.csv"), ("latest.csv", "contest.csv"), ("pool/Test 1.csv",)]
)
def test_other_names_of_tables_are_read_for_training(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    write_files(tmp_path, *names)
    rows = hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))
    assert len(rows.train) == 3 * len(names) and rows.evaluation is None


def test_a_missing_split_names_what_looks_like_one(tmp_path: Path) -> None:
    draw(tmp_path / "a", "cat/train_1.png", "cat/test_2.png", "dog/train_3.png")
    with pytest.raises(BadInput, match=r"cat/test_2\.png"):
        pictures(tmp_path / "a")
    assert len(pictures(tmp_path / "a", eval_split="train")[0]) == 3
    write_files(tmp_path / "b", "train.csv", "Validation.csv")
    with pytest.raises(BadInput, match=r"no split 'validation'.*Validation\.csv"):
        hub_rows(Dataset(name_or_path=str(tmp_path / "b")), ("text",))
    write_files(tmp_path / "c", "rows.csv")
    with pytest.raises(BadInput, match="eval_split: train") as refusal:
        hub_rows(Dataset(name_or_path=str(tmp_path / "c")), ("text",))
    assert "looks like" not in str(refusal.value)
    write_files(tmp_path / "d", "validation.csv")
    write_jsonl(tmp_path / "d", ["one", "two"])
    (tmp_path / "d/README.md").write_text(README)
    with pytest.raises(BadInput, match="eval_split: train") as refusal:
        hub_rows(Dataset(name_or_path=str(tmp_path / "d")), ("text",))
    assert "looks like" not in str(refusal.value)


def rows_of(folder: Path) -> list[dict]:
    dataset = Dataset(name_or_path=str(folder), eval_split="train")
    return [row.values for row in hub_rows(dataset, ("text", "label")).train]


JSON_ROWS = [{"text": f"text {number}", "label": number % 2} for number in range(4)]


@pytest.mark.parametrize(
    "files",
    [
        {"a.json": json.dumps(JSON_ROWS)},
        {"a.json": json.dumps(JSON_ROWS, indent=1)},
        {"a.jsonl": json.dumps(JSON_ROWS)},
        {"a.json": "".join(json.dumps(row) + "\n" for row in JSON_ROWS)},
        {"a.json": "\n".join(json.dumps(row, indent=1) for row in JSON_ROWS)},
        {f"{number}.json": json.dumps(row) for number, row in enumerate(JSON_ROWS)},
        {f"{number}.jsonl": json.dumps(row) + "\n" for number, row in enumerate(JSON_ROWS)},
    ],
)
def test_json_of_a_folder_is_read_in_every_layout(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert rows_of(tmp_path) == JSON_ROWS


def test_json_of_a_folder_is_read_by_the_rules_of_files(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"text": "2024-01-01", "label": 1}\n' * 2)
    (tmp_path / "2.jsonl").write_text('{"text": "good", "label": 0},\n')
    with pytest.raises(BadInput, match=r"2\.jsonl, line 1"):
        rows_of(tmp_path)
    (tmp_path / "2.jsonl").write_text('{"text": "good", "label": "pos"}\n')
    assert [row["text"] for row in rows_of(tmp_path)] == ["2024-01-01"] * 2 + ["good"]
    with pytest.raises(BadInput, match=r"2\.jsonl, line 1 has 'pos'"):
        read_labelled(LabelledDataset(name_or_path=str(tmp_path), eval_split="train"))


@pytest.mark.parametrize("labels", [[True, False], ["0", "1"]])
def test_files_of_a_folder_must_have_one_kind_of_labels(labels: list, tmp_path: Path) -> None:
    for name, of in (("1.parquet", [1, 0]), ("2.parquet", labels)):
        table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": of})
        table.to_parquet(tmp_path / name)
    with pytest.raises(BadInput, match=r"2\.parquet, row 1"):
        read_labelled(LabelledDataset(name_or_path=str(tmp_path), eval_split="train"))


def test_classes_that_a_parquet_file_names_keep_their_names(tmp_path: Path) -> None:
    classes = datasets.Features({"text": datasets.Value("string"), "label": CLASSES})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=classes)
    table.to_parquet(tmp_path / "a.parquet")
    dataset = Dataset(name_or_path=str(tmp_path), eval_split="train")
    assert hub_rows(dataset, ("text", "label")).names == {"label": ["neg", "pos"]}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv.gz", "a/rows.csv"])
@pytest.mark.parametrize("card", ["", README])
def test_a_pointer_of_git_lfs_is_named(name: str, card: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(POINTER)
    if card:
        (tmp_path / "README.md").write_text(card.replace("rows.jsonl", name))
    with pytest.raises(BadInput, match="git lfs pull"):
        hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))


def test_a_picture_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    draw(tmp_path, "cat/1.png", "dog/2.png")
    (tmp_path / "dog/2.png").write_text(POINTER)
    with pytest.raises(BadInput, match=r"dog/2\.png.*git lfs pull"):
        pictures(tmp_path, eval_split="train")


@pytest.mark.parametrize("card", [False, True])
def test_a_header_in_the_middle_of_a_table_is_refused(card: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\none,a\ntext,label\ntwo,b\n")
    if card:
        (tmp_path / "README.md").write_text(README.replace("jsonl", "csv"))
    with pytest.raises(BadInput, match="text, label"):
        hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))


def test_other_files_beside_named_tables_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\none,x\n")
    (tmp_path / "vocabulary.json").write_text("{}")
    (tmp_path / "notes.jsonl").write_text("{}")
    assert cells_of(tmp_path, eval_split="train") == [["one", "x"]]


def test_classes_that_a_card_names_keep_their_names(tmp_path: Path) -> None:
    label = "{name: label, dtype: {class_label: {names: {'0': bad, '1': good}}}}"
    features = f"[{{name: text, dtype: string}}, {label}]"
    (tmp_path / "README.md").write_text(f"---\ndataset_info: {{features: {features}}}\n---\n")
    (tmp_path / "train.csv").write_text("text,label\none,1\ntwo,0\n")
    rows = hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text", "label"))
    assert [row.values["label"] for row in rows.train] == ["good", "bad"]
    assert rows.names == {"label": ["bad", "good"]}


def test_a_folder_of_csv_and_tsv_reads_each_as_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\none\ttab,x\n")
    (tmp_path / "b.tsv").write_text("label\ttext\ny\tone, two\n")
    assert cells_of(tmp_path, eval_split="train") == [["one\ttab", "x"], ["one, two", "y"]]


def test_labels_and_numbers_of_a_table_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n1,007\n2.50,010\n")
    (tmp_path / "dev.csv").write_text('label,text\nTrue,"one, two"\n')
    assert cells_of(tmp_path) == [["1", "007"], ["2.50", "010"], ["one, two", "True"]]


def test_a_card_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path, ["a"])
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(BadInput, match="can't load the data set"):
        hub_rows(Dataset(name_or_path=str(tmp_path), eval_split="train"), ("text",))


def write_table(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text,label\na,x\nb,y\n")


@pytest.mark.parametrize("name", ["eval.csv", "test.csv"])
def test_another_split_is_advised_for_evaluation(name: str, tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv")
    write_table(tmp_path / name)
    with pytest.raises(BadInput) as refused:
        read_labelled(LabelledDataset(name_or_path=str(tmp_path)))
    (advised,) = re.findall(r"eval_split: (\w+) takes", str(refused.value))
    assert advised == "test"
    found = read_labelled(LabelledDataset(name_or_path=str(tmp_path), eval_split=advised))
    assert (len(found.train.rows), len(found.evaluation.rows)) == (2, 2)


@pytest.mark.parametrize("names", [("train.csv", "dev.csv"), ("train/a.csv", "validation/b.csv")])
def test_splits_in_a_folder_within_are_named_by_it(names, tmp_path: Path) -> None:
    for name in names:
        write_table(tmp_path / "en" / name)
    with pytest.raises(BadInput, match=f"give the folder .*, {tmp_path / 'en'}\\."):
        read_labelled(LabelledDataset(name_or_path=str(tmp_path), eval_split="train"))
    found = read_labelled(LabelledDataset(name_or_path=str(tmp_path / "en")))
    assert (len(found.train.rows), len(found.evaluation.rows)) == (2, 2)


def test_splits_in_upper_case_within_a_folder_are_to_be_renamed(tmp_path: Path) -> None:
    for name in ("en/Train.csv", "en/Dev.csv"):
        write_table(tmp_path / name)
    with pytest.raises(BadInput, match="lower case"):
        read_labelled(LabelledDataset(name_or_path=str(tmp_path), eval_split="train"))


@pytest.mark.parametrize("names", [["data.zip"], ["train.zip", "test.zip"]])
def test_classes_in_archives_are_to_be_unpacked(names: list[str], tmp_path: Path) -> None:
    draw(tmp_path, "pictures/cat/1.png", "pictures/dog/2.png")
    for name in names:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for picture in ("cat/1.png", "dog/2.png"):
                archive.write(tmp_path / "pictures" / picture, picture)
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises(BadInput, match=rf"{names[0]} must be unpacked"):
        pictures(tmp_path, eval_split="train")
