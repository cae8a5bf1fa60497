"""``titan-rl doctor CONFIG``: prints a line a check, and says by its exit code whether all is well."""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from titan_rl.config.io.printable import say
from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import load_config
from titan_rl.controller.planning.device_report import fit_and_place
from titan_rl.controller.preflight.checks import check, stops_of, tokenizer_of
from titan_rl.data.text.checks import text_facts
from titan_rl.diagnostics.doctor.findings import Finding
from titan_rl.diagnostics.doctor.runner import run_doctor
from titan_rl.train import drive


def print_facts(facts: dict[str, str]) -> None:
    """Print the facts of the model's tokenizer and template, a line each."""
    table = Table("text", "as this model has it", box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, repr(value) if value != value.strip() or "\n" in value else value)
    Terminal().print(table)


def doctor(config_file: str | None, overrides: dict[str, dict[str, Any]], *, as_json: bool) -> int:
    """The exit code: 1 if anything is wrong or a check did not end. Errors: ConfigError, with nothing started."""
    start = time.monotonic()
    fitting, _, lines = fit_and_place(check(load_config(config_file, overrides)), under_torchrun=False)

    def print_finding(finding: Finding) -> None:
        if not as_json:
            say(finding.line())

    if not as_json:
        for line in lines:
            say(line)
        print_facts(text_facts(tokenizer_of(fitting.config), stops_of(fitting.config)))
    with tempfile.TemporaryDirectory(prefix="titan_rl_doctor_", ignore_cleanup_errors=True) as folder:
        findings = drive(run_doctor(fitting, Path(folder), print_finding))
    count, seconds = Counter(finding.status for finding in findings), time.monotonic() - start
    is_unwell = bool(count["wrong"] or count["not finished"])
    if as_json:
        rows = [finding.as_json() for finding in findings]
        facts = text_facts(tokenizer_of(fitting.config), stops_of(fitting.config))
        report = {"healthy": not is_unwell, "seconds": round(seconds, 1), "text": facts, "checks": rows}
        print(json.dumps(report))
    else:
        unfinished = f"{count['not finished']} not finished, " if count["not finished"] else ""
        counted = (
            f"{count['passed']} passed, {count['wrong']} wrong, {unfinished}{count['not looked at']} not looked at"
        )
        say(f"{counted}, in {seconds:.0f} s")
    return 1 if is_unwell else 0
