"""A short soak on the toy; `python -m tools.soak` runs the full one, 2,000 requests on `tiny`."""

import numpy as np

from tests.engine.toy_engine import tokenizer
from tools.soak import Workload, soak


def test_mixed_requests_are_answered_as_their_single_runs_and_nothing_grows(engine):
    slots = {"max_batch": 6, "max_queue": 10}
    crowd = engine.variant(engine=slots, decode={"drafter": "ngram", "draft_len": 3})
    rng = np.random.default_rng(0)
    texts = [rng.integers(310, tokenizer().vocab_size, 9).tolist() for _ in range(20)]
    report = soak(crowd, engine, Workload(crowd, texts, seed=1), 100)
    assert report["wrong"] == []
    assert (report["requests"], report["compilations"], report["restarts"]) == (100, 0, 0)
    assert report["arrays_grown"] <= 0
    # and the workload was what it says
    assert min(report[name] for name in ("cancelled", "refused", "reused_tokens")) > 0
    assert report["passed"]
