"""Traces: every array equals the independent reference's, and the engine does not notice."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import read_settings
from carat_jax.decoding.steps import SamplerKind
from carat_jax.engine.compile_counter import num_compilations
from carat_jax.engine.trace import Tracer, matching_names
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from carat_jax.model.taps import Taps, tap_names
from tests.engine.toy_engine import prompt
from tests.engine.toy_engine import toy as engine_toy
from tests.oracle import Reference, softmax
from tests.toy_model import toy
from tests.toys import make_ids, make_weights

LENGTH = 30  # almost four windows of the toys


class Recording(Reference):
    """The reference, keeping what the engine's names stand for."""

    def attention(self, x, layer):
        out = self.trace[f"layers.{layer}.attn.out"] = super().attention(x, layer)
        q = self.trace[f"layers.{layer}.attn.q"] = self.trace.pop(f"layers.{layer}.q")
        owner = self.kv_owner(layer)
        k = self.trace[f"layers.{owner}.k"]
        if owner == layer:
            self.trace[f"layers.{layer}.attn.k"] = k
            self.trace[f"layers.{layer}.attn.v"] = self.trace[f"layers.{layer}.v"]
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        mask = self.visible(len(x), self.is_sliding(layer))
        scores = np.where(mask, np.einsum("inh,jnh->nij", q, k), -np.inf)
        self.trace[f"layers.{layer}.attn.scores"] = scores
        self.trace[f"layers.{layer}.attn.probs"] = softmax(scores)
        return out

    def mlp(self, x, layer):
        self.trace[f"layers.{layer}.mlp.out"] = super().mlp(x, layer)
        return self.trace[f"layers.{layer}.mlp.out"]

    def mixture(self, residual, layer):
        out = self.trace[f"layers.{layer}.experts.out"] = super().mixture(residual, layer)
        shares, probs = (self.trace[f"layers.{layer}.{name}"] for name in ("shares", "router"))
        order = np.argsort(-probs, axis=-1, kind="stable")[:, : self.config["top_k_experts"]]
        self.trace[f"layers.{layer}.router.experts"] = order
        self.trace[f"layers.{layer}.router.weights"] = np.take_along_axis(shares, order, -1)
        return out

    def arrays(self, ids) -> dict[str, np.ndarray]:
        """Everything by the engine's names."""
        logits, head = self.logits(ids), self.weights["embed_tokens.weight"]
        found = dict(self.trace) | {"logits": logits}
        for layer in range(self.config["num_hidden_layers"]):
            stream = found[f"layers.{layer}.residual"] = found[f"layers.{layer}"]
            normed = self.rms_norm(stream, self.weights["norm.weight"])
            found[f"layers.{layer}.logits"] = self.softcap(normed @ head.T)
        return found


def tracer(name: str, **settings) -> Tracer:
    model = toy(name)
    graph, _ = split(Gemma4(model.config, model.dtype))
    config = read_settings(keywords={"dtype": "float32", **settings}).build()
    return Tracer(config, model.config, graph)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    raw = toy(name).raw
    return Recording(raw, make_weights(raw)).arrays(make_ids(raw, LENGTH))


def assert_equal(got: np.ndarray, want: np.ndarray, name: str) -> None:
    assert got.shape == want.shape, name
    hidden = np.isneginf(want)
    assert (np.isneginf(got) == hidden).all(), name
    assert np.abs(got[~hidden] - want[~hidden]).max() < 1e-4, name


@pytest.mark.parametrize("name", ["T4", "T4e", "26b"])
def test_every_array_there_is_equals_the_reference(name):
    model, traced = toy(name), tracer(name)
    names = [n for n in traced.names if not n.endswith("per_layer.out")]
    found = traced.run(model.params["target"], make_ids(model.raw, LENGTH), names)
    assert list(found) == names
    for array, got in found.items():
        assert got.dtype == (np.int32 if array.endswith(".experts") else np.float32)
        assert_equal(got, reference(name)[array], array)


SETTINGS = {
    "paged": {"cache.local_layers": "paged"},
    "full, v_rot": {"cache.local_layers": "full", "cache.global_layers": "v_rot"},
    "stages": {"attention.verify": "three_stage", "attention.group_heads": False},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_they_are_the_same_with_every_cache_and_every_way_to_attend(kind):
    model, traced = toy("T4"), tracer("T4", **SETTINGS[kind])
    names = matching_names(["*.probs", "*.scores", "*.out", "hidden"], traced.names)
    found = traced.run(model.params["target"], make_ids(model.raw, LENGTH), names)
    for array, got in found.items():
        assert_equal(got, reference("T4")[array], array)


def test_per_layer_inputs_add_what_is_missing_between_the_streams():
    model, traced = toy("T4e"), tracer("T4e")
    names = ["layers.1.per_layer.out", "layers.0.residual", "layers.1.residual"]
    names += ["layers.1.attn.out", "layers.1.mlp.out"]
    names = matching_names(names, traced.names)
    found = traced.run(model.params["target"], make_ids(model.raw, LENGTH), names)
    weights = {k: v.astype(np.float64) for k, v in make_weights(model.raw).items()}
    norm = Reference(model.raw, weights).rms_norm
    parts = [
        norm(found[f"layers.1.{part}.out"], weights[f"layers.1.post_{name}.weight"])
        for part, name in (
            ("attn", "attention_layernorm"),
            ("mlp", "feedforward_layernorm"),
            ("per_layer", "per_layer_input_norm"),
        )
    ]
    total = found["layers.0.residual"] + sum(parts)
    want = total * weights["layers.1.layer_scalar"]
    assert np.abs(found["layers.1.residual"] - want).max() < 1e-4


def test_the_list_of_names_is_complete():
    names = tap_names(toy("T4e").config)
    assert "layers.3.attn.k" in names
    assert "layers.4.attn.k" not in names  # it borrows layer 3's
    assert "layers.4.per_layer.out" in names
    others = tap_names(toy("T4").config)
    assert not any("per_layer" in name or "expert" in name for name in others)
    assert "layers.5.experts.out" in tap_names(toy("26b").config)
    assert len(set(names)) == len(names)


# Through the engine.


def test_a_trace_by_patterns_comes_in_the_order_of_the_computation(engine):
    ids = prompt(12)
    found = engine.trace(ids, ["logits", "layers.2.attn.probs", "layers.*.residual"])
    streams = [f"layers.{i}.residual" for i in range(3)]
    assert list(found) == [*streams[:2], "layers.2.attn.probs", streams[2], "logits"]
    assert set(found) <= set(engine.trace_names())
    assert np.abs(found["logits"] - engine_toy().reference.logits(ids)).max() < 1e-4
    np.testing.assert_allclose(found["layers.2.attn.probs"].sum(-1), 1, rtol=1e-5)


def test_the_lens_of_the_last_layer_is_the_models_own_answer(engine):
    found = engine.trace(prompt(9), ["layers.2.logits", "logits"])
    np.testing.assert_allclose(found["layers.2.logits"], found["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("capture", "says"),
    [
        ("layers.2.attn.score", "the nearest are layers.2.attn.scores"),
        (["layers.*.residual", "layers.7.residual"], r"'layers.7.residual'; layers are 0 to 2\Z"),
        ("layers.-1.residual", r"layers are 0 to 2\Z"),
        ("layers.*.atn.scores", r"the nearest are layers\.\*\.attn\.scores\b"),
        ("layers.[01].residul", r"the nearest are layers\.\[01\]\.residual\Z"),
        ("layer.*.residual", r"the nearest are layers\.\*\.residual\b"),
        ("hiden", r"the nearest are hidden\Z"),
        ("layers.*.zzz", "see trace_names"),
        ("zzz", "see trace_names"),
        ([], "is not a name"),
        (5, "is not a name"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(engine, capture, says):
    with pytest.raises(ValueError, match=says):
        engine.trace("abc", capture)


def test_too_much_to_hold_is_refused_before_it_is_computed(engine, monkeypatch):
    monkeypatch.setattr("carat_jax.engine.trace._MOST_BYTES", 2**17)
    with pytest.raises(ValueError, match=r"the largest is layers\.\d\.logits .* shorter prompt"):
        engine.trace(prompt(50), "layers.*.logits")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (prompt(200), r"\Atrace: 200 ids do not fit engine\.max_context="),
        ([], r"\Atrace: no token ids"),
        ([10**6], r"\Atrace: id 1000000 is outside the vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_traced_is_refused_in_its_own_words(engine, ids, says):
    with pytest.raises(ValueError, match=says):
        engine.trace(ids, "hidden")


def test_the_example_of_the_docs_prints_what_they_say(capsys):
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == printed.splitlines()


def test_served_work_and_compiled_steps_are_left_as_they_are(engine):
    def round_text() -> str:
        loop = engine.loop
        kind = SamplerKind(draws=False, logprobs=False)
        return loop._steps.round.lower(loop._params, loop._state, kind, None).as_text()

    ids, options = prompt(10), {"seed": 1, "ignore_eos": True}
    want, text = engine.generate(ids, **options).ids, round_text()
    stream = engine.stream(ids, **options)
    got = [next(stream).ids for _ in range(4)]
    engine.trace(ids, ["*.attn.out", "logits"])
    compiled = num_compilations()
    got += [delta.ids for delta in stream]
    assert sum(got, ()) == want
    assert engine.generate(ids, **options).ids == want
    assert num_compilations() == compiled  # neither the steps nor anything else
    assert round_text() == text


def test_a_step_without_taps_holds_nothing_of_them():
    model = toy("T4")
    graph, _ = split(Gemma4(model.config, model.dtype))
    tokens, num_valid = jnp.ones((3, 2), jnp.int32), jnp.full(3, 2)

    def text(**options) -> str:
        def step(params, bank):
            made = merge(graph, params)
            return made(tokens, bank, num_valid, **options)

        return jax.jit(step).lower(model.params["target"], model.bank()).as_text()

    watched = Taps(frozenset({"layers.0.attn.scores"}))
    assert text() == text(taps=Taps())
    assert watched.found == {}
    text(taps=watched)
    assert list(watched.found) == ["layers.0.attn.scores"]
