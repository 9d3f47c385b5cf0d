"""What drafters propose, apart from any model."""

import jax.numpy as jnp
import numpy as np

from carat_jax.decoding.drafters import (
    CombinedDrafter,
    NgramDrafter,
    NoDrafter,
    look_up,
    shortened,
    sources,
)
from tests.engine.drafter_toys import drafting


def test_looked_up_tokens_are_those_after_the_latest_longest_match():
    # given a text whose end "3 4 5" occurred twice, followed by 6 and by 8 9
    ids = np.zeros((3, 32), np.int32)
    texts = [[3, 4, 5, 6, 1, 3, 4, 5, 8, 9, 3, 4, 5], [1, 2, 3, 4], [7, 7, 7, 7]]
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    found, num = look_up(jnp.asarray(ids), lengths, num_drafts=4, longest=4, shortest=2)
    assert num.tolist() == [4, 0, 1]
    assert found[0].tolist() == [8, 9, 3, 4]
    assert found[2, 0] == 7


def test_a_shorter_drafter_is_the_same_otherwise_and_of_length_nothing_it_is_none():
    combined = drafting("combined", 5).drafter
    short = shortened(combined, 2)
    assert isinstance(short, CombinedDrafter)
    assert (short.num_drafts, short.ngram.num_drafts, short.assistant.num_drafts) == (2, 2, 2)
    assert short.assistant.graph == combined.assistant.graph
    assert shortened(combined, 0) == shortened(NgramDrafter(3), 0) == NoDrafter()
    # one that keeps caches of its own must still take in what it did not draft
    model = drafting("model", 5).drafter
    assert shortened(model, 0).name == "model"
    assert shortened(model, 0).num_drafts == 0
    assert sources(combined) == ("ngram", "assistant")
    assert sources(model) == ("model",)
