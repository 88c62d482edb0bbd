"""The list of mutants (`make mutants` runs them): each still applies, its tests are there, and the table has it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import Outcome, judge
from tests.mutants.page import PAGE, TITLE, beginning, head_of
from tests.mutants.table import Mutant, has_test, mutants
from tests.support.store_helpers import ROOT

MUTANT = Mutant("fs: x", "tests/support/store_helpers.py", "", "class Sender:", "class Sender(1:", ("t::a", "t::b"))


def test_every_mutant_applies_and_names_tests_that_are_there() -> None:
    found = mutants()
    for mutant in found:
        mutant.mutated(ROOT)
        assert mutant.promise and mutant.tests and mutant.old != mutant.new, mutant.id
        assert [test for test in mutant.tests if not has_test(test)] == [], mutant.id
    parts = Counter(Path(mutant.file).parts[0] for mutant in found)
    assert len(found) >= 60 and min(parts[name] for name in ("writer_service", "schemas", "engine_side")) >= 15


def test_the_table_has_every_mutant() -> None:
    _, title, table = PAGE.read_text().partition(TITLE)
    assert title and "**nothing**" not in table
    listed = {beginning(line) for line in table.splitlines() if line.startswith("| `")}
    assert listed == {head_of(mutant) for mutant in mutants()}, 'make mutants K="part of an id" writes their lines'


def test_a_mutant_that_does_not_apply_is_said_to() -> None:
    with pytest.raises(SyntaxError):
        MUTANT.mutated(ROOT)
    with pytest.raises(ValueError, match="stands 0 times"):
        Mutant("fs: x", MUTANT.file, "", "nowhere to be found" * 2, "", ()).mutated(ROOT)


@pytest.mark.parametrize(("outcomes", "killed"), [
    ([("passed", ""), ("failed", "assert 1 == 2")], True),
    ([("passed", "")], False),
    ([("skipped", "no such machine")], False),
    ([("error", "fixture 'x' not found")], False),
    ([("failed", "no writer: '' ... NameError: name 'x' is not defined")], False),
    ([("failed", "ImportError: cannot import name")], False),
    ([("timeout", "Timeout (>120s)")], False),
])
def test_killed_is_only_what_fails_where_something_is_asserted(outcomes: list[tuple[str, str]], killed: bool) -> None:
    said = [Outcome(f"t::{number}", result, text) for number, (result, text) in enumerate(outcomes)]
    assert bool(judge(MUTANT, said).killed) == killed
