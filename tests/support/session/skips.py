"""Skips that are expected by name: any other one fails a session that was given ``--expected-skips``."""

import fnmatch
from pathlib import Path

import pytest


def expected_patterns(text: str) -> list[str]:
    """Patterns of node ids below tests/, one a line, as ``fnmatch`` reads them; what follows ``#`` is the reason."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def is_expected(name: str, patterns: list[str]) -> bool:
    """Whether a test's node id below tests/ is one of these; brackets of its parameters stand for themselves."""
    return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


class ExpectedSkips:
    """Plugin of the session that hears of all tests."""

    def __init__(self, file: Path):
        self._file, self._patterns = file, expected_patterns(file.read_text())
        self._unexpected: dict[str, str] = {}
        """Why each was skipped, by node id."""

    def _hear(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        name = report.nodeid.removeprefix("tests/")
        if report.skipped and not hasattr(report, "wasxfail") and not is_expected(name, self._patterns):
            self._unexpected[name] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._hear(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for name, reason in sorted(self._unexpected.items()):
            terminalreporter.write_line(f"UNEXPECTED SKIP {name}: {reason}", red=True)
        if self._unexpected:
            terminalreporter.write_line(f"{self._file} names what may be skipped; none of these is there", red=True)
