"""The contents of a store: what is deleted is forgotten after a while, and no change is missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.fleet import table as table_module
from roundelay.fleet.table import KEPT_DELETIONS, Table


def test_deleted_keys_do_not_accumulate() -> None:
    table = Table()
    for number in range(3 * KEPT_DELETIONS):
        table.write(f"key/{number}", "1")
        table.write(f"key/{number}", None)
    table.write("kept", "1")
    assert table.list("") == {"kept": "1"}
    assert len(table._changed) == KEPT_DELETIONS + 1
    assert len(table._deleted) == KEPT_DELETIONS


def test_an_old_deletion_counts_as_a_change_for_those_who_have_not_seen_it_and_not_for_others() -> None:
    table = Table()
    table.write("a", "1")
    before = table.revision
    table.write("a", None)
    for number in range(KEPT_DELETIONS + 1):
        table.write(str(number), "1")
        table.write(str(number), None)
    assert "a" not in table._changed
    assert table.changed_since(["a"], before)
    assert not table.changed_since(["a", "never written"], table.revision)


operations = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["1", "2", None])), max_size=60)


@given(operations, st.integers(0, 60))
def test_no_change_is_missed(steps: list[tuple[str, str | None]], seen_after: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "KEPT_DELETIONS", 2)
        table = Table()
        for key, value in steps[:seen_after]:
            table.write(key, value)
        seen, exists = table.revision, table.list("")
        changed = set()
        for key, value in steps[seen_after:]:
            if value is not None or table.get(key) is not None:
                changed.add(key)
            table.write(key, value)
        for key in "abcdef":
            if key in changed:
                assert table.changed_since([key], seen)
            elif key in exists:
                assert not table.changed_since([key], seen), "an existing key that was not written has not changed"
