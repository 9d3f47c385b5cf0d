"""A short soak; `python -m tools.soak` runs the full one of 2,000 requests."""

from tools.soak import soak


def test_mixed_requests_are_answered_as_their_single_runs_and_nothing_grows():
    report = soak(100, seed=1)
    assert report["wrong"] == []
    assert (report["requests"], report["compilations"], report["restarts"]) == (100, 0, 0)
    assert report["arrays_grown"] <= 0
    # and the workload was what it says
    assert min(report[name] for name in ("cancelled", "refused", "reused_tokens")) > 0
    assert report["passed"]
