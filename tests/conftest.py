"""Options of the whole test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scripts",
        action="store_true",
        help="write the outcome that tests/scripts/*.txt have now into them; review the diff",
    )
