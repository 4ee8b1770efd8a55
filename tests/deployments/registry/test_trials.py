from __future__ import annotations

from deployments.registry.trials import Trials


def test_a_version_is_there_for_its_trials_alone_until_the_last_fails_or_it_is_kept() -> None:
    trials = Trials()
    trials.begin("x", 1, is_new=True)
    trials.begin("x", 1, is_new=False)
    assert [trials.fail("x", 1), trials.fail("x", 1), trials.fail("x", 1)] == [False, True, False]
    trials.begin("x", 2, is_new=True)
    trials.keep("x", 2)
    trials.begin("x", 2, is_new=False)
    assert not trials.fail("x", 2)
    trials.begin("y", 1, is_new=False)
    assert not trials.fail("y", 1)
