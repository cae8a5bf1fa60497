"""Files of an evaluation: for each suite a JSON of its estimates and a Parquet of every answer."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.data.storage.files import replace_text, replacing, wanting
from titan_rl.records.evaluations.results import SuiteResult

SCHEMA = pa.schema(
    {
        "suite": pa.string(),
        "question_id": pa.string(),
        "sample": pa.int32(),
        "question": pa.string(),
        "expected": pa.string(),
        "answer": pa.string(),
        "final": pa.string(),
        "correct": pa.bool_(),
        "reward": pa.float64(),
        "status": pa.string(),
        "num_tokens": pa.int32(),
        "readings": pa.map_(pa.string(), pa.bool_()),
    }
)


def write_result(folder: Path, result: SuiteResult) -> None:
    """Write a suite's files into a folder, which is made. Errors: DiskFull; OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / f"{result.name}.parquet", result)
    replace_text(folder / f"{result.name}.json", json.dumps(result.as_dict(), indent=2) + "\n")


def _write_table(path: Path, result: SuiteResult) -> None:
    rows = [
        {
            "suite": result.name,
            "question_id": question.id,
            "question": question.text,
            "expected": question.expected,
            "answer": answer.text,
            "readings": list(answer.readings.items()),
            **{name: getattr(answer, name) for name in ("sample", "final", "correct", "reward", "status")},
            "num_tokens": answer.num_tokens,
        }
        for question in result.questions
        for answer in question.answers
    ]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
    data = buffer.getvalue()
    with wanting(path, data.size), replacing(path) as writing:
        writing.write_bytes(data)
