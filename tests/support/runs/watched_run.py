"""A small run directory for the page's tests: three steps, with a hostile answer in the first."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.diagnostics.bench.page.synthetic_run import make_run
from titan_rl.records.run_directory.rundir import RunDir


def make(root: Path, evil: str = "") -> RunDir:
    """``evil``: what the first sample answered."""
    run_dir = make_run(root, 3 * 128)
    if evil:
        path = run_dir.rollouts / "step-000001.parquet"
        table = pq.read_table(path)
        texts = [evil, *table["text"].to_pylist()[1:]]
        place = table.schema.get_field_index("text")
        pq.write_table(table.set_column(place, "text", pa.array(texts)), path)
    return run_dir
