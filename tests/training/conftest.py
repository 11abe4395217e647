"""The kill matrix, at the end of the test output."""

from __future__ import annotations

from tests.training import matrix


def pytest_terminal_summary(terminalreporter) -> None:
    if matrix.ROWS:
        terminalreporter.write_sep("=", "kill matrix")
        for line in matrix.table():
            terminalreporter.write_line(line)
