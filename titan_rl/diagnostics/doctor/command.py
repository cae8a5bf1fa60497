"""``titan-rl doctor CONFIG``: prints a line a check, and says by its exit code whether all is well."""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from titan_rl.config.load import load_config
from titan_rl.config.printable import say
from titan_rl.controller.device_report import settle
from titan_rl.controller.preflight import check
from titan_rl.diagnostics.doctor.examination import examine
from titan_rl.diagnostics.doctor.findings import Finding
from titan_rl.train import drive


def doctor(config_file: str | None, overrides: dict[str, dict[str, Any]], *, as_json: bool) -> int:
    """The exit code: 1 if anything is wrong. Errors: ConfigError, with nothing started."""
    start = time.monotonic()
    fitting, _, lines = settle(check(load_config(config_file, overrides)), under_torchrun=False)

    def tell(finding: Finding) -> None:
        if not as_json:
            say(finding.line())

    if not as_json:
        for line in lines:
            say(line)
    with tempfile.TemporaryDirectory(prefix="titan_rl_doctor_", ignore_cleanup_errors=True) as folder:
        findings = drive(examine(fitting, Path(folder), tell))
    count, seconds = Counter(finding.status for finding in findings), time.monotonic() - start
    if as_json:
        told = [finding.as_json() for finding in findings]
        print(json.dumps({"healthy": not count["wrong"], "seconds": round(seconds, 1), "checks": told}))
    else:
        counted = f"{count['passed']} passed, {count['wrong']} wrong, {count['not looked at']} not looked at"
        say(f"{counted}, in {seconds:.0f} s")
    return 1 if count["wrong"] else 0
