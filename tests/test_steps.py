"""The compiled steps against the cache-free reference: every way to feed a text gives its logits.

Slots run together at unequal lengths wherever they can, so each comparison also says that a
neighbour, its padding and its unused memory change nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.cache.bank import CacheKinds, rollback
from carat_jax.decoding.steps import SamplerKind
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from tests.oracle import Reference, log_softmax, top2_gap
from tests.toy_model import MAX_ROWS, build, poison, toy
from tests.toys import CONFIGS, make_ids, make_weights

W = 8
GREEDY = SamplerKind(draws=False, logprobs=False)


def assert_logits(got, want, atol=1e-4):
    assert got.shape == want.shape
    assert np.abs(got - want).max() < atol


def reference_logits(model, sequences):
    return [model.reference.logits(ids) for ids in sequences]


@pytest.fixture(scope="module")
def sequences():
    """Three texts of unequal length: four turns of the ring, a window and a bit, less than one."""
    return [make_ids(CONFIGS["T4"], n, seed=n) for n in (60, 11, 3)]


# One text, fed in every way.


@pytest.mark.parametrize("chunk", [1, 3, W - 1, W, W + 1, 50])
def test_every_chunk_size_gives_the_reference_logits_at_every_position(chunk, sequences):
    model = toy("T4")
    _, got = model.feed(model.bank(), sequences, chunk)
    for logits, want in zip(got, reference_logits(model, sequences), strict=True):
        assert_logits(logits, want)


def test_a_slot_without_rows_keeps_what_it_holds_and_looks_at_none_of_it(sequences):
    # given: three filled slots; then one row for the second alone
    model = toy("T4")
    bank, _ = model.feed(model.bank(), sequences, 8)
    tokens, num_valid = np.full((3, 1), 5, np.int32), np.array([0, 1, 0], np.int32)
    kept = [np.array(leaf[0]) for leaf in jax.tree.leaves(bank.layers)]
    held = [int(length) for length in bank.lengths]

    def spoilt(leaf):  # every row of the first slot, which nobody may read now
        return leaf.at[0].set(np.nan)

    layers, lengths = jax.tree.map(spoilt, bank.layers), bank.lengths + 0  # steps take theirs
    other = dataclasses.replace(bank, layers=layers, lengths=lengths)
    # when
    bank, hidden, _ = model.steps.verify(model.params, bank, tokens, num_valid)
    _, again, _ = model.steps.verify(model.params, other, tokens, num_valid)
    # then
    np.testing.assert_array_equal(hidden, again)
    assert [int(length) for length in bank.lengths] == [held[0], held[1] + 1, held[2]]
    for leaf, before in zip(jax.tree.leaves(bank.layers), kept, strict=True):
        np.testing.assert_array_equal(leaf[0], before)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [*(("T4e", chunk) for chunk in (1, MAX_ROWS, W + 1, 60)), ("26b", 1), ("26b", W + 1)],
)
def test_borrowing_per_layer_and_mixture_models_agree_too(name, chunk, sequences):
    model = toy(name)
    _, got = model.feed(model.bank(), sequences, chunk)
    for logits, want in zip(got, reference_logits(model, sequences), strict=True):
        assert_logits(logits, want)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_row_does_not_depend_on_its_slot_or_neighbours(order, sequences):
    model = toy("T4")
    _, alone = model.feed(model.bank(), sequences, W + 1)
    _, moved = model.feed(model.bank(), [sequences[i] for i in order], W + 1)
    for row, i in enumerate(order):
        np.testing.assert_array_equal(moved[row], alone[i])


def prefill(model, state, slot, ids, chunk):
    """Prefills a slot in chunks; the state and the logits after the last id."""
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        tokens = np.array([part + [9] * (chunk - len(part))], np.int32)
        state, logits = model.steps.prefill(
            model.params, state, tokens, np.array([len(part)]), np.array([slot])
        )
    return state, np.asarray(logits)


@pytest.mark.parametrize(("name", "chunk"), [("T4", W + 1), ("T4", 50), ("T4e", 50)])
def test_prefill_in_padded_chunks_gives_the_last_rows_logits(name, chunk, sequences):
    model = toy(name)
    state = model.state()
    for slot, ids in enumerate(sequences):
        state, logits = prefill(model, state, slot, ids, chunk)
        assert_logits(logits, model.reference.logits(ids)[-1])
    assert state.bank.lengths.tolist() == [len(ids) for ids in sequences]


@pytest.mark.parametrize(("kind", "chunk"), [("ring", 3), ("ring", 40), ("paged", 40)])
def test_layers_that_own_no_keys_run_for_the_last_row_of_a_prompt_alone(kind, chunk):
    # given caches of which nothing but what is written may be looked at
    model, kinds = toy("T4e"), CacheKinds(kind, "kv")
    graph, _ = split(Gemma4(model.config, jnp.float32))

    @functools.partial(jax.jit, static_argnames="only_last")
    def run(params, bank, tokens, num_valid, slots, only_last):
        return merge(graph, params)(tokens, bank, num_valid, slots, only_last=only_last)

    def poisoned(leaf):
        is_table = jnp.issubdtype(leaf.dtype, jnp.integer)
        return leaf if is_table else jnp.full_like(leaf, jnp.nan)

    params, ids = model.params["target"], make_ids(model.raw, 2 * chunk, seed=5)
    bank = model.bank(kinds=kinds)
    bank = dataclasses.replace(bank, layers=jax.tree.map(poisoned, bank.layers))
    told = np.array([chunk - 1]), np.array([1])
    arrays = params, bank, np.array([ids[:chunk]], np.int32), *told
    # when a prompt is prefilled with every row through every layer, and with the last alone
    runs = [run.lower(*arrays, only_last=only).compile() for only in (False, True)]
    banks = [bank] * 2
    for first in (0, chunk):
        tokens = np.array([ids[first : first + chunk]], np.int32)
        (every, full), (last, short) = (
            one(params, held, tokens, *told) for one, held in zip(runs, banks, strict=True)
        )
        banks = [full, short]
        # then the last real row and the caches are the same
        assert last.shape[1] == 1
        np.testing.assert_allclose(last[0, 0], every[0, chunk - 2], rtol=0, atol=2e-5)
        for one, other in zip(*map(jax.tree.leaves, (full, short)), strict=True):
            np.testing.assert_array_equal(one, other)
    # and the arithmetic of the other rows is gone
    flops = [one.cost_analysis()["flops"] for one in runs]
    weights = jax.tree.leaves([params["layers"][index] for index in (4, 5)])
    spared = (chunk - 1) * 2 * sum(leaf.size for leaf in weights if leaf.ndim > 1)
    assert flops[0] - flops[1] > 0.99 * spared


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_greedy_decoding_of_uneven_slots_writes_the_reference_text(name):
    # given prompts of 4, 8 and 21 ids: the window fills during, at the start of, and before decode
    model = toy(name)
    params, steps = model.params, model.steps
    prompts = [make_ids(model.raw, n, seed=1) for n in (4, W, 21)]
    bank, logits = model.feed(model.bank(), prompts, W + 1)
    state = model.state()
    state = dataclasses.replace(
        state,
        bank=bank,
        tokens=jnp.asarray([rows[-1].argmax() for rows in logits], jnp.int32),
        is_active=jnp.ones(3, bool),
    )
    texts = [[int(token)] for token in state.tokens]
    for step in range(39):
        state, drawn = steps.round(params, state, GREEDY)
        assert state.bank.lengths.tolist() == [len(ids) + step + 1 for ids in prompts]
        for text, token in zip(texts, np.asarray(drawn.tokens)[:, 0], strict=True):
            text.append(int(token))
    for ids, text in zip(prompts, texts, strict=True):
        want = model.reference.logits(ids + text)[len(ids) - 1 : -1]
        assert top2_gap(want).min() > 1e-3
        assert text == want.argmax(-1).tolist()


def test_idle_slots_keep_every_bit_while_others_decode(sequences):
    model = toy("T4")
    state = model.state()
    bank, _ = model.feed(model.bank(), sequences, W + 1)
    before = jax.tree.map(np.asarray, bank)
    state = dataclasses.replace(
        state,
        bank=bank,
        tokens=jnp.asarray([5, 6, 7], jnp.int32),
        is_active=jnp.asarray([False, True, False]),
    )
    for _ in range(3):
        state, _ = model.steps.round(model.params, state, GREEDY)
    assert state.bank.lengths.tolist() == [60, 14, 3]
    assert state.tokens.tolist()[::2] == [5, 7]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.bank), strict=True):
        np.testing.assert_array_equal(old[::2], np.asarray(new)[::2])


def test_a_forked_slot_continues_like_its_source(sequences):
    model = toy("T4")
    bank, _ = model.feed(model.bank(), sequences, W + 1)
    state = model.state()
    state = dataclasses.replace(state, bank=bank)
    state = model.steps.fork(state, jnp.int32(0), jnp.int32(2))
    more = [301, 302, 303]
    _, (first, _, third) = model.feed(state.bank, [more, [], more], 3)
    np.testing.assert_array_equal(first, third)
    assert_logits(first, model.reference.logits(sequences[0] + more)[-3:])


# Steps of several rows in the middle of a text, and rolling them back.


@pytest.mark.parametrize("name", ["T4", "T4e"])
@pytest.mark.parametrize("num_rows", [MAX_ROWS, W + 1])
def test_block_rows_agree_at_every_length_around_the_window(name, num_rows):
    model = toy(name)
    lengths = (7, 8, 9, 15, 16, 17, 40, 1, 2)
    texts = [make_ids(model.raw, n + num_rows, seed=3) for n in lengths]
    for first in range(0, len(lengths), 3):
        group = list(zip(lengths, texts, strict=True))[first : first + 3]
        bank, _ = model.feed(model.bank(), [ids[:n] for n, ids in group], W + 1)
        _, got = model.feed(bank, [ids[n:] for n, ids in group], num_rows)
        for logits, (_, ids) in zip(got, group, strict=True):
            assert_logits(logits, model.reference.logits(ids)[-num_rows:])


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("T4", CacheKinds()),
        ("T4e", CacheKinds()),
        ("T4", CacheKinds(block=8)),
        ("T4", CacheKinds(local_layers="paged")),
        ("T4", CacheKinds(local_layers="full")),
        ("T4", CacheKinds(global_layers="v_rot")),
    ],
    ids=["T4", "T4e", "block", "paged", "full", "v_rot"],
)
def test_rejected_rows_leave_no_trace_in_any_cache(name, kinds):
    # given a text in blocks of five of which the last `rejected` rows were wrong, cyclically,
    # and rejected by a rollback that differs from slot to slot
    model = toy(name)
    texts = [make_ids(model.raw, 70, seed=n) for n in range(3)]
    want = reference_logits(model, texts)
    starts = (3, 8, 14)
    prompts = [text[:n] for text, n in zip(texts, starts, strict=True)]
    bank, _ = model.feed(model.bank(kinds=kinds), prompts, W + 1)
    lengths = list(starts)
    for round_ in range(14):
        kept = [1 + (round_ + slot * 2) % MAX_ROWS for slot in range(3)]
        blocks = []
        for slot, text in enumerate(texts):
            block = text[lengths[slot] : lengths[slot] + MAX_ROWS]
            wrong = [300 + round_ % 8] * (MAX_ROWS - kept[slot])
            blocks.append(block[: kept[slot]] + wrong)
        bank, got = model.feed(bank, blocks, MAX_ROWS)
        for slot in range(3):
            first, lengths[slot] = lengths[slot], lengths[slot] + kept[slot]
            assert_logits(got[slot][: kept[slot]], want[slot][first : lengths[slot]])
            bank = rollback(bank, slot, lengths[slot], held=first + MAX_ROWS)
    assert bank.lengths.tolist() == lengths


@pytest.mark.parametrize("num_keys", [40, 64])
def test_a_declared_key_count_of_global_layers_changes_nothing(num_keys, sequences):
    # given texts that all end below the count
    model, texts = toy("T4"), [ids[:40] for ids in sequences]
    _, got = model.feed(model.bank(), texts, MAX_ROWS, num_keys=num_keys)
    for logits, want in zip(got, reference_logits(model, texts), strict=True):
        assert_logits(logits, want)


# What the caches hold.


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_caches_hold_the_reference_keys_and_values(name, sequences):
    model = toy(name)
    bank, _ = model.feed(model.bank(), sequences, MAX_ROWS)
    owners = [i for i in range(6) if model.reference.kv_owner(i) == i]
    assert sorted(bank.layers) == owners
    for slot, ids in enumerate(sequences):
        model.reference.hidden(ids)
        for layer, cache in bank.layers.items():
            is_ring = model.raw["layer_types"][layer] == "sliding_attention"
            for rows, kind in ((cache.k, "k"), (cache.v, "v")):
                want = model.reference.trace[f"layers.{layer}.{kind}"].swapaxes(0, 1)
                first = max(0, len(ids) - cache.capacity) if is_ring else 0
                where = np.arange(first, len(ids)) % cache.capacity
                np.testing.assert_allclose(rows[slot][:, where], want[:, first:], atol=5e-5)


def test_values_of_a_key_is_value_layer_know_neither_key_norm_nor_position():
    # given a first layer that is global, so that its input is the token alone
    raw = CONFIGS["T4"] | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    model = build(raw)
    bank, _ = model.feed(model.bank(1), [[2, 200, 201, 200, 202, 200]], MAX_ROWS)
    k, v = np.asarray(bank.layers[0].k[0, 0]), np.asarray(bank.layers[0].v[0, 0])
    np.testing.assert_allclose(v[[3, 5]], v[[1, 1]], atol=1e-6)
    assert np.abs(k[3] - k[1]).max() > 1e-2
    np.testing.assert_allclose(np.mean(v[:6] ** 2, axis=-1), 1.0, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, 1e30])
@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_unused_memory_never_reaches_a_result(name, value):
    # given slots with 1, 7 and 33 positions, and every entry behind none of them poisoned
    model = toy(name)
    texts = [make_ids(model.raw, n + 9, seed=5) for n in (1, 7, 33)]
    blocks = [ids[-9:] for ids in texts]
    for num_rows in (1, MAX_ROWS, W + 1):
        outputs = []
        for fill in (0.0, value):
            bank, _ = model.feed(model.bank(), [ids[:-9] for ids in texts], W + 1)
            bank, logits = model.feed(poison(bank, fill), blocks, num_rows)
            outputs.append(logits)
        for clean, poisoned in zip(*outputs, strict=True):
            assert np.isfinite(clean).all()
            np.testing.assert_array_equal(clean, poisoned)


def test_an_empty_slot_and_pad_rows_give_no_nan_and_change_no_neighbour(sequences):
    model = toy("T4")
    jax.config.update("jax_debug_nans", True)
    try:
        bank, got = model.feed(model.bank(), [sequences[0], [], sequences[2]], W + 1)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert bank.lengths.tolist() == [60, 0, 3]
    for slot in (0, 2):
        assert_logits(got[slot], model.reference.logits(sequences[slot]))


# Limits.


@pytest.mark.parametrize(("window", "limit"), [(8, 4), (8, 9), (64, 16)])
def test_context_limits_below_and_above_the_window(window, limit):
    model = build(CONFIGS["T4"] | {"sliding_window": window})
    ids = make_ids(model.raw, limit)
    _, got = model.feed(model.bank(1, max_context=limit), [ids], 1)
    assert_logits(got[0], model.reference.logits(ids))


def test_rows_past_the_limit_are_dropped_and_shift_nothing():
    model = toy("T4")
    ids = make_ids(model.raw, 22)
    bank, _ = model.feed(model.bank(3, max_context=22), [ids[:20]] * 3, MAX_ROWS)
    # when a block of five starts two rows before the limit
    bank, got = model.feed(bank, [ids[20:] + [300] * 3] * 3, MAX_ROWS)
    want = model.reference.logits(ids)
    for slot in range(3):
        assert_logits(got[slot][:2], want[20:])
    for layer in (2, 5):
        held = np.asarray(bank.layers[layer].k[0]).swapaxes(0, 1)
        np.testing.assert_allclose(held, model.reference.trace[f"layers.{layer}.k"], atol=5e-5)


# Logits and log-probabilities.


def test_soft_cap_holds_on_every_path():
    # given a table twenty times the usual: raw logits far above the cap
    weights = make_weights(CONFIGS["T4"])
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"] * 20
    model = toy("T4").reweighted(weights)
    ids = make_ids(model.raw, 20)
    want = model.reference.logits(ids)
    uncapped = Reference(model.raw | {"final_logit_softcapping": None}, weights).logits(ids)
    assert np.abs(uncapped).max() > 100
    np.testing.assert_allclose(want, 30 * np.tanh(uncapped / 30))
    # when the text goes in by a long chunk, a block, and single tokens
    bank, long = model.feed(model.bank(), [ids[:9]] * 3, W + 1)
    bank, block = model.feed(bank, [ids[9:14]] * 3, MAX_ROWS)
    _, single = model.feed(bank, [ids[14:]] * 3, 1)
    got = np.concatenate([long[0], block[0], single[0]])
    assert np.abs(got).max() <= 30
    assert_logits(got, want, atol=2e-3)
    _, last = model.steps.prefill(
        model.params, model.state(), np.array([ids[:9]], np.int32), np.array([9]), np.array([0])
    )
    assert_logits(np.asarray(last), want[8], atol=2e-3)


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_scores_are_the_reference_log_probabilities(name):
    model = toy(name)
    ids = make_ids(model.raw, 27, seed=7)
    want = log_softmax(model.reference.logits(ids))
    state, told = model.state(), []
    for first in range(0, 27, W + 1):
        tokens = np.array([ids[first : first + W + 1]], np.int32)
        targets = np.array([[*ids[1:], 0][first : first + W + 1]], np.int32)
        state, drawn = model.steps.score(
            model.params, state, tokens, np.array([W + 1]), np.array([1]), targets
        )
        told.append(drawn)
    got = np.concatenate([np.asarray(drawn.logprobs)[0] for drawn in told])
    np.testing.assert_allclose(got[:-1], want[np.arange(26), ids[1:]], atol=2e-4)
    top = np.concatenate([np.asarray(drawn.top_logprobs)[0] for drawn in told])
    np.testing.assert_allclose(top, -np.sort(-want, axis=-1)[:, :3], atol=2e-4)
    best = np.concatenate([np.asarray(drawn.top_ids)[0] for drawn in told])
    np.testing.assert_array_equal(best[:, 0], want.argmax(-1))


def test_the_embedding_scale_is_not_rounded_to_bfloat16_in_a_float32_model():
    # sqrt(72) = 8.485 would be 8.5
    raw = CONFIGS["T4"] | {"hidden_size": 72}
    weights = make_weights(raw)
    model = build(raw, weights)
    ids = make_ids(raw, 20)
    _, got = model.feed(model.bank(1), [ids], 20)
    assert_logits(got[0], Reference(raw, weights).logits(ids))
    rounded = Reference(raw, weights, embed_scale=8.5).logits(ids)
    assert np.abs(got[0] - rounded).max() > 1e-3


# Compilation and memory.


def test_lengths_and_contents_never_compile_again(sequences):
    model = toy("T4")
    model.feed(model.bank(), sequences, MAX_ROWS)
    count = model.steps.verify._cache_size()
    for n in (1, 4, 5, 6, 23):
        model.feed(model.bank(), [ids[:n] for ids in sequences], MAX_ROWS)
    assert model.steps.verify._cache_size() == count


def test_caches_are_donated_without_a_copy():
    model = toy("T4")
    state = model.state()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.bank.layers))
    memory = model.steps.round.lower(model.params, state, GREEDY).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    old = state.bank.layers[0].k
    model.steps.round(model.params, state, GREEDY)
    assert old.is_deleted()
