"""`make reproduce` rewrites its own sections of the results page and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = """# Results

Words of a person.

<!-- reproduce: first -->
old
<!-- /reproduce: first -->
between
<!-- reproduce: second -->
<!-- /reproduce: second -->
end
"""


@pytest.fixture(scope="module")
def tools(repository: Path) -> Any:
    """The modules of `benches/python`, which are no package."""
    sys.path.insert(0, str(repository / "benches" / "python"))
    try:
        import reproduce
        import sections

        yield type("Tools", (), {"reproduce": reproduce, "sections": sections})
    finally:
        sys.path.pop(0)


def test_sections_are_rewritten_and_the_rest_stays(tools: Any) -> None:
    new = tools.sections.rewrite(PAGE, {"first": "| a |\n|---|\n", "second": "x"})
    assert new == PAGE.replace("old", "| a |\n|---|").replace("second -->\n<!-- /", "second -->\nx\n<!-- /")
    assert tools.sections.rewrite(new, {"second": "x", "first": "| a |\n|---|"}) == new
    assert tools.sections.rewrite(PAGE, {}) == PAGE


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (PAGE.replace("<!-- /reproduce: first -->", ""), "begins inside|no end"),
        (PAGE.replace("second", "first"), "twice"),
        (PAGE.replace("first", "other"), "no section 'first': there are other, second"),
    ],
)
def test_broken_page_is_refused(tools: Any, page: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tools.sections.rewrite(page, {"first": "x"})


def test_every_part_has_its_section_on_the_results_page(tools: Any, repository: Path) -> None:
    page = (repository / "benches" / "RESULTS.md").read_text()
    assert sorted(tools.sections.names(page)) == sorted(tools.reproduce.PARTS)
    assert tools.reproduce.PAGES[0] == repository / "benches" / "RESULTS.md"
    assert tools.sections.names(tools.reproduce.PAGES[1].read_text()) == ["speed"]


def test_parts_that_time_nothing_come_out_the_same_each_time(
    tools: Any, shared_dir: Path, tmp_path: Path
) -> None:
    """A small sample of the real thing, twice."""
    page = tmp_path / "RESULTS.md"
    names = ("overflow", "tenants")
    page.write_text("".join(f"<!-- reproduce: {name} -->\n<!-- /reproduce: {name} -->\n" for name in names))
    arguments = [
        "--shared",
        str(shared_dir),
        "--requests",
        "40",
        "--page",
        str(page),
        "--only",
        ",".join(names),
    ]
    tools.reproduce.main(arguments)
    first = page.read_text()
    assert first.count("\n|") == 2 * 2 + 6 + 9
    assert "forecast" in first
    tools.reproduce.main(arguments)
    assert page.read_text() == first
