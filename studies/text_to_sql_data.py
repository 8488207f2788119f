"""Write question and SQL as JSON lines, for `task: seq2seq`, of two public kinds of files.

    python studies/text_to_sql_data.py advising.json PREFIX [--keep-variables]
    python studies/text_to_sql_data.py train.jsonl FILE.jsonl

A .json file is one of github.com/jkkummerfeld/text2sql-data: PREFIX-train.jsonl, PREFIX-dev.jsonl
and PREFIX-test.jsonl are written, split by query. As in that benchmark, a question has the first of
its equivalent queries, and its variables are filled in on both sides; with --keep-variables their
names (`department0`) stay.

A .jsonl file is one of github.com/salesforce/WikiSQL, with its tables beside it
(train.tables.jsonl).
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

SPLITS = ("train", "dev", "test")
# WikiSQL's lib/query.py has these in this order.
AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS = ("=", ">", "<", "OP")


def of_text2sql(
    groups: list[dict[str, Any]], keep_variables: bool
) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each query split."""
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for group in groups:
        examples = {variable["name"]: variable["example"] for variable in group["variables"]}
        for sentence in group["sentences"]:
            question, sql = sentence["text"], group["sql"][0]
            for name, given in () if keep_variables else sentence["variables"].items():
                value = given or examples.get(
                    name, name
                )  # one that stands in the query alone has no value of its own
                question, sql = (_filled(text, name, value) for text in (question, sql))
            rows[group["query-split"]].append({"question": question, "sql": sql})
    return rows


def _filled(text: str, name: str, value: str) -> str:
    return re.sub(rf"{re.escape(name)}(?!\d)", lambda match: value, text)


def of_wikisql(
    questions: list[dict[str, Any]], tables: list[dict[str, Any]]
) -> list[dict[str, str]]:
    """Return rows whose queries have the names of columns.

    WikiSQL's tables have numbers instead of names, and are all called `data` here.
    """
    headers = {table["id"]: table["header"] for table in tables}
    rows = []
    for question in questions:
        columns, query = [_quoted(name) for name in headers[question["table_id"]]], question["sql"]
        asked = columns[query["sel"]]
        asked = f"{AGGREGATES[query['agg']]}({asked})" if query["agg"] else asked
        conditions = [
            f"{columns[column]} {OPERATORS[sign]} {_literal(value)}"
            for column, sign, value in query["conds"]
        ]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        rows.append({"question": question["question"], "sql": f"SELECT {asked} FROM data{where}"})  # noqa: S608
    return rows


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: object) -> str:
    return (
        str(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "''") + "'"
    )


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description="Writes question and SQL as JSON lines.", allow_abbrev=False
    )
    parser.add_argument(
        "source", type=Path, help="a .json file of text2sql-data, or a .jsonl file of WikiSQL"
    )
    parser.add_argument(
        "target",
        type=Path,
        help="the beginning of three files' names, or of WikiSQL one file's name",
    )
    parser.add_argument(
        "--keep-variables",
        action="store_true",
        help="of text2sql-data: leave their names in the texts",
    )
    given = parser.parse_args()
    if given.source.suffix == ".json":
        groups = json.loads(given.source.read_text(encoding="utf-8"))
        for split, rows in of_text2sql(groups, given.keep_variables).items():
            _write(given.target.with_name(f"{given.target.name}-{split}.jsonl"), rows)
    else:
        tables = _lines(given.source.with_suffix(".tables.jsonl"))
        _write(given.target, of_wikisql(_lines(given.source), tables))


if __name__ == "__main__":
    main()
