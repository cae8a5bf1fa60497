"""Failures told as they happen: a session that is ended from outside has no summary."""

import pytest


class FailuresAtOnce:
    """Plugin of the session that hears of all tests."""

    def pytest_configure(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (terminal := self._plugins.get_plugin("terminalreporter")):
            crash = getattr(report.longrepr, "reprcrash", None)
            first = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {first}", red=True)
