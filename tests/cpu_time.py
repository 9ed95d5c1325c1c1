"""CPU seconds of each test file and of its slowest tests: `pytest -p tests.cpu_time`.

Wall time tells little on a machine with two cores and two workers. Processes that a test starts
count when they end, so those that a session keeps open count for its last test.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

NAME = "cpu_seconds"
SHOWN = 60


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Stopwatch:
    """The CPU time since it was last read."""

    def __init__(self) -> None:
        self.read_at = cpu_seconds()

    def lap(self) -> float:
        before, self.read_at = self.read_at, cpu_seconds()
        return self.read_at - before


stopwatch = Stopwatch()
files: defaultdict[str, float] = defaultdict(float)
tests: defaultdict[str, float] = defaultdict(float)


def pytest_collection_finish() -> None:
    stopwatch.lap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Each phase of a test has its own report, which a worker sends to the main process."""
    report = yield
    report.user_properties = [(NAME, stopwatch.lap())]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = dict(report.user_properties)[NAME]
    files[report.nodeid.partition("::")[0]] += seconds
    tests[f"{report.when:8s} {report.nodeid}"] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU seconds")
    for title, table in (("tests", tests), ("files", files)):
        terminalreporter.line(f"{title}:")
        longest = sorted(table.items(), key=lambda entry: -entry[1])[:SHOWN]
        for name, seconds in longest:
            terminalreporter.line(f"{seconds:8.2f}  {name}")
    terminalreporter.line(f"{sum(files.values()):8.2f}  all tests, without collection")
    terminalreporter.line(f"{cpu_seconds():8.2f}  this process and those that it started")
