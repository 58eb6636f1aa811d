from __future__ import annotations

from tokenleap.bench.report import markdown_table


def test_a_table_is_markdown() -> None:
    table = markdown_table(["name", "value"], [["a", "1"], ["bc", "10"]])
    assert table.splitlines() == [
        "| name | value |",
        "| ---- | ----: |",
        "| a    |     1 |",
        "| bc   |    10 |",
    ]
