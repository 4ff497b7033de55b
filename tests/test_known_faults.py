"""The tests that docs/known-faults.md names are there, and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAULTS = (ROOT / "docs" / "known-faults.md").read_text()
ROWS = [line for line in FAULTS.splitlines() if re.match(r"\| \S+/\S+#\d+", line)]
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py::\w+)`", FAULTS)))
# What a speculative test has to have seen, in one of these words.
SEEN = re.compile(r"accepted|branches|emitted|assert_exact")


class Collected:
    """Plugin of an inner pytest: what it collected, by test function."""

    def __init__(self) -> None:
        self.items: dict[str, list[pytest.Item]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.items.setdefault(item.nodeid.partition("[")[0], []).append(item)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[pytest.Item]]:
    files = sorted({name.partition("::")[0] for name in NAMED})
    plugin = Collected()
    cache = tmp_path_factory.mktemp("cache")
    arguments = ["--collect-only", "-qq", f"--rootdir={ROOT}", f"-ocache_dir={cache}"]
    pytest.main([*arguments, *(str(ROOT / file) for file in files)], [plugin])
    return plugin.items


def _skipped(item: pytest.Item) -> bool:
    conditions = [mark.args[:1] for mark in item.iter_markers("skipif")]
    return any(item.iter_markers("skip")) or any(
        bool(condition) for args in conditions for condition in args
    )


def test_every_row_names_a_report_and_a_test() -> None:
    assert len(ROWS) > 60
    for row in ROWS:
        _, reports, fault, tests, _ = row.split("|")
        assert all(
            re.fullmatch(r"[\w-]+/[\w-]+#\d+", r.strip()) for r in reports.split(",")
        )
        assert fault.strip() and re.search(r"`tests/", tests), row


@pytest.mark.parametrize("name", NAMED)
def test_named_test_is_collected_and_runs(
    name: str, collected: dict[str, list[pytest.Item]]
) -> None:
    assert not all(map(_skipped, collected[name]))


@pytest.mark.parametrize("name", NAMED)
def test_file_of_a_speculative_one_looks_at_what_was_accepted(
    name: str, collected: dict[str, list[pytest.Item]]
) -> None:
    file = ROOT / name.partition("::")[0]
    if any("engine" in item.fixturenames for item in collected[name]):
        assert SEEN.search(file.read_text())
