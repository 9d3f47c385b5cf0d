"""An engine takes what it was said to take; what does not fit is refused with the numbers."""

import dataclasses
import json
import re

import jax
import psutil
import pytest

import carat_jax
from carat_jax.config import read_settings
from carat_jax.engine import api
from carat_jax.engine.api import draw
from carat_jax.engine.memory import device_limit, new_state
from carat_jax.families import FAMILIES, from_hf
from carat_jax.model import checkpoint
from carat_jax.model.checkpoint import TINY
from tests.toys import CONFIGS, config_json

GIB = 2**30


def blueprint(facts, backend="cpu", **settings):
    return draw(read_settings(keywords=settings).build(), facts, TINY, backend)[1]


def num_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("local", ["ring", "paged", "full"])
@pytest.mark.parametrize(("name", "whole"), [("T4", "kv"), ("T4", "v_rot"), ("e2b", "kv")])
def test_the_state_takes_what_was_said(tmp_path, name, local, whole, dtype):
    # given an engine whose drafter has caches of its own
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIGS["31b"])))
    model = from_hf(CONFIGS[name])
    plan = blueprint(
        model, dtype=dtype, cache={"local_layers": local, "global_layers": whole},
        engine={"max_batch": 3, "max_context": 40},
        decode={"drafter": "model", "draft_model": str(tmp_path), "draft_len": 4},
    )  # fmt: skip
    # when it is made
    state = new_state(plan.config, model, plan.drafting, plan.options)
    # then every part is as it was said
    said = plan.memory()
    for is_sliding, size in ((True, said.local_caches), (False, said.global_caches)):
        layers = state.bank.layers.items()
        own = [cache for i, cache in layers if model.layer(i).is_sliding == is_sliding]
        assert num_bytes(own) == size > 0
    assert num_bytes(state.draft) == said.draft_caches > 0
    caches = num_bytes(state.bank.layers) + num_bytes(state.draft)
    assert num_bytes(state) - caches == said.slots
    assert said.total == sum(said.parts().values())
    assert {size * 3 for size in said.a_slot().values()} == {
        *(said.local_caches, said.global_caches, said.draft_caches, said.slots)
    }


def test_a_loaded_engine_takes_what_was_said():
    settings = {"engine": {"max_batch": 2, "max_context": 100}, "dtype": "bfloat16"}
    engine = carat_jax.load("tiny", **settings)
    said = blueprint(FAMILIES["tiny"], **settings).memory()
    assert engine.stats()["weight_bytes"] == said.weights
    assert engine.stats()["cache_bytes"] == said.local_caches + said.global_caches
    assert num_bytes(engine.loop._state) == said.total - said.weights - said.workspace


def test_the_31b_by_hand():
    # given the published sizes: 50 local layers, 10 global ones with a sixth of the KV heads' width
    width, mlp, vocab = 5376, 21_504, 262_144
    shared = 3 * width * mlp + 4 * width + 1
    local = width * (32 + 16 + 16) * 256 + 32 * 256 * width + 2 * 256
    whole = width * (32 + 4) * 512 + 32 * 512 * width + 2 * 512
    weights = 60 * shared + 50 * local + 10 * whole + vocab * width + width
    # when one sequence of 128K is planned for a GPU, where rings are multiples of 64
    sizes = {"engine": {"max_batch": 1, "max_context": 131_072}}
    kv = blueprint(FAMILIES["31b"], "gpu", **sizes).memory()
    v_rot = blueprint(FAMILIES["31b"], "gpu", **sizes, cache={"global_layers": "v_rot"}).memory()
    # then it takes
    assert kv.weights == 2 * weights == 61_394_690_680
    assert kv.local_caches == 50 * 2 * 16 * 1088 * 256 * 2 == 891_289_600
    assert kv.global_caches == 10 * 2 * 4 * 131_072 * 512 * 2 == 10 * GIB
    assert v_rot.global_caches == 10 * 4 * 131_072 * (512 + 128) * 2 == 6.25 * GIB
    assert kv.local_caches + kv.global_caches <= 10.9 * GIB
    assert v_rot.local_caches + v_rot.global_caches <= 7.1 * GIB
    # and rings kept whole would take more than ten times as much
    full = blueprint(FAMILIES["31b"], "gpu", **sizes, cache={"local_layers": "full"}).memory()
    assert full.local_caches == 50 * 2 * 16 * 131_072 * 256 * 2 == 100 * GIB


def test_every_family_with_random_weights_is_planned():
    for size, facts in FAMILIES.items():
        assert blueprint(facts, model=f"random:{size}").memory().weights > 2**20


# ---- refusals --------------------------------------------------------------------------------


def limited(monkeypatch, limit: int) -> None:
    """A device of `limit` free bytes, and no weights to be read."""

    def unread(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(api, "device_limit", lambda: limit)
    monkeypatch.setattr(checkpoint, "load_params", unread)


def test_what_does_not_fit_is_refused_with_the_numbers_before_weights_are_read(monkeypatch):
    said = blueprint(FAMILIES["tiny"], engine={"max_batch": 64, "max_context": 4096}).memory()
    limited(monkeypatch, said.total - 1)
    with pytest.raises(ValueError, match=r"^engine: 64 x 4096 positions need ") as caught:
        carat_jax.load("tiny", engine={"max_batch": 64, "max_context": 4096})
    text = str(caught.value)
    assert "\n" not in text
    for name, size in said.parts().items():
        assert re.search(rf"\b{name} {size / 2**20:.1f} MiB", text)
    # the way out is exact: what it names fits, and one more does not
    context = int(re.search(r"engine.max_context=(\d+)", text)[1])
    batch = int(re.search(r"engine.max_batch=(\d+)", text)[1])
    assert (context, batch) == (4095, 63)


def test_the_largest_sizes_are_exact():
    plan = blueprint(FAMILIES["e2b"], "gpu", model="random:e2b", engine={"max_batch": 4})
    limit = 12 * GIB
    context, batch = plan.largest_context(limit), plan.largest_batch(limit)
    for fits, other in ((plan.sized(None, context), plan.sized(None, context + 1)),
                        (plan.sized(batch), plan.sized(batch + 1))):  # fmt: skip
        assert fits.memory().total <= limit < other.memory().total
    assert plan.largest_context(140 * GIB) == 131_072


def test_a_model_that_is_too_large_says_so(monkeypatch):
    limited(monkeypatch, 50 * GIB)
    with pytest.raises(ValueError, match=r"weights 57.18 GiB.*50.00 GiB left; not even one"):
        carat_jax.load("random:31b")


def test_a_default_context_is_refused_and_not_shrunk(monkeypatch):
    default = blueprint(FAMILIES["tiny"])
    assert default.max_context == 4096
    limited(monkeypatch, default.memory().total - 1)
    with pytest.raises(ValueError, match=r"4 x 4096 positions"):
        carat_jax.load("tiny")


def test_a_device_that_does_not_say_refuses_nothing():
    plan = blueprint(FAMILIES["31b"], model="random:31b", engine={"max_batch": 4096})
    plan.check_fits(None)


def test_a_machine_without_a_gpu_holds_what_its_memory_does():
    assert device_limit() == psutil.virtual_memory().total


def test_a_cpu_that_cannot_hold_a_widened_copy_says_so(monkeypatch):
    limited(monkeypatch, 30 * GIB)
    with pytest.raises(ValueError, match=r"weights, dtype=float32 leaves them$"):
        carat_jax.load("random:12b")
    with pytest.raises(ValueError, match=r"not even one position fits$"):
        carat_jax.load("random:12b", dtype="float32")


def test_a_variant_counts_the_weights_it_shares_once(monkeypatch):
    engine = carat_jax.load("tiny", dtype="float32")
    plan = blueprint(engine.model, dtype="float32")
    needed = plan.memory().total - plan.memory().weights
    monkeypatch.setattr(api, "device_limit", lambda: needed)
    assert engine.variant(sampling={"top_k": 3}).loop.num_slots == 4
    monkeypatch.setattr(api, "device_limit", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"what fits: engine.max_context=4095 or"):
        engine.variant(sampling={"top_k": 3})
    # the reference is a second copy of the weights
    with pytest.raises(ValueError, match=r"weights 18\.4 MiB"):
        engine.reference()


def test_a_limit_counts_what_is_in_use(monkeypatch):
    @dataclasses.dataclass
    class Device:
        stats: dict | None
        platform: str = "tpu"

        def memory_stats(self):
            return self.stats

    for stats, want in (
        ({"bytes_limit": 100, "bytes_in_use": 30}, 70),
        ({"bytes_limit": 100}, 100),
        ({"bytes_in_use": 3}, None),
        (None, None),
    ):
        monkeypatch.setattr(jax, "devices", lambda stats=stats: [Device(stats)])
        assert device_limit() == want
