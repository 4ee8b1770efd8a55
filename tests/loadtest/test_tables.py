from __future__ import annotations

import math

import pytest

from loadtest.tables import markdown_table, number


def test_columns_line_up() -> None:
    assert markdown_table(("run", "ms"), [("a", "1"), ("long", "1,000")]) == (
        "| run  |    ms |\n| ---- | ----: |\n| a    |     1 |\n| long | 1,000 |"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.96, "100.0"), (1.234, "1.23"), (math.nan, "-"), (0.0, "0.00")]
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert number(value) == text
