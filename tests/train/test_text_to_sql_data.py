"""The script that makes a study's rows of public sets of questions: on two small ones of the same
form.
"""

import json
import subprocess
import sys
from pathlib import Path

from carbonopt.train.matches import canonical_sql

SCRIPT = Path(__file__).parents[2] / "studies" / "text_to_sql_data.py"


def run(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def group(split: str, sql: str, *texts: str, **values: str) -> dict:
    variables = [
        {"name": name, "example": f"{name} of old", "location": "both", "type": "x"}
        for name in values
    ]
    sentences = [{"question-split": "train", "text": text, "variables": values} for text in texts]
    return {
        "query-split": split,
        "sql": [sql, "SELECT another"],
        "sentences": sentences,
        "variables": variables,
    }


def test_text2sql_data_is_split_by_query_and_filled_in(tmp_path):
    sql = 'SELECT a1 FROM t WHERE n = number1 AND m = number10 AND d = "dept0" ;'
    source = tmp_path / "source.json"
    groups = [
        group(
            "train", sql, "number1 or number10 ?", "number10 ?", number1="7", number10="8", dept0=""
        ),
        group("dev", "SELECT b", "b ?"),
        group("test", "SELECT c", "c ?", "C ?"),
    ]
    source.write_text(json.dumps(groups))
    run(source, tmp_path / "rows" / "all")
    filled = 'SELECT a1 FROM t WHERE n = 7 AND m = 8 AND d = "dept0 of old" ;'
    assert rows(tmp_path / "rows" / "all-train.jsonl") == [
        {"question": "7 or 8 ?", "sql": filled},
        {"question": "8 ?", "sql": filled},
    ]
    assert rows(tmp_path / "rows" / "all-dev.jsonl") == [{"question": "b ?", "sql": "SELECT b"}]
    assert len(rows(tmp_path / "rows" / "all-test.jsonl")) == 2
    run(source, tmp_path / "kept", "--keep-variables")
    assert rows(tmp_path / "kept-train.jsonl")[1] == {"question": "number10 ?", "sql": sql}


def test_wikisql_is_written_out(tmp_path):
    table = {
        "id": "1-2",
        "header": ["No.", 'Name "x"', "Points"],
        "types": ["text", "text", "real"],
        "rows": [],
    }
    asked = [
        {"sel": 1, "agg": 0, "conds": []},
        {"sel": 2, "agg": 4, "conds": [[1, 0, "O'Hara"], [2, 1, 3.5]]},
    ]
    questions = [
        {"table_id": "1-2", "question": f"Question {number}?", "sql": sql}
        for number, sql in enumerate(asked)
    ]
    (tmp_path / "dev.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )
    (tmp_path / "dev.tables.jsonl").write_text(json.dumps(table) + "\n")
    run(tmp_path / "dev.jsonl", tmp_path / "rows.jsonl")
    made = rows(tmp_path / "rows.jsonl")
    summed = 'SELECT SUM("Points") FROM data WHERE "Name ""x""" = '
    assert made == [
        {"question": "Question 0?", "sql": 'SELECT "Name ""x""" FROM data'},
        {"question": "Question 1?", "sql": summed + "'O''Hara' AND \"Points\" > 3.5"},
    ]
    assert all(canonical_sql(row["sql"]) for row in made)
