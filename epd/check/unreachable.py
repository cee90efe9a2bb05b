"""Cells of the tables that no exploration visits, each with the reason.

One that is listed here and visited, or is no cell of the tables, is an error.
"""

from typing import Final

from epd.check.machines import Cell

UNREACHABLE: Final[dict[Cell, str]] = {}
