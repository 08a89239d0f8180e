"""The cells of the table of faults; see `fault_table`. One of each phase is lived in every run of the tests."""

import pytest
from fault_table import CELLS, QUICK, page, small_disk, strike

# Python waits for ever for a thread that has no memory to start, and trajectories are written by threads.
HANGS = [cell for cell in CELLS if cell[:2] == ("dataset write", "memory limit")]
SLOW = [pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in (*QUICK, *HANGS)]


@pytest.mark.parametrize(("phase", "fault", "learner"), [*QUICK, *SLOW], ids=lambda part: part)
def test_a_command_that_is_struck_goes_on_or_ends_with_nothing_lost(world, tmp_path, phase, fault, learner):
    with small_disk(tmp_path):
        ended = strike(world, tmp_path, phase, fault, learner)
    assert ended in page()[phase, fault, learner].split(" or ")


def test_the_page_has_every_cell():
    assert set(CELLS) <= page().keys()
