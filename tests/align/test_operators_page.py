"""The documentation of the catalog is the catalog's own words."""

from pathlib import Path

from align.operators_page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"


def test_the_committed_page_is_the_one_the_catalog_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m align.operators_page > docs/operators.md"
