"""A training loop that is killed again and again: a small part of the storm, one kill a phase."""

import pytest
from kill_storm import PHASES, storm


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_killed_in_every_phase_of_a_save_goes_on(tmp_path, count):
    storm(tmp_path, count, len(PHASES), seed=count)
