"""Every idea that can be switched has an ablation, an equality test and a place in the docs."""

from pathlib import Path

import pytest
import yaml

from carat_jax.config import KEYS
from tests.engine.test_switches import SWITCHES

ROOT = Path(__file__).parent.parent
SECTIONS = ("cache", "attention", "products", "decode", "moe")
# What chooses nothing that could be compared on `tiny`.
NO_SWITCH = {
    "attention.impl": "where attention runs, not how; tests/kernels compare the implementations",
    "decode.draft_model": "names the drafter's weights",
    "decode.sample_drafts": "keeps the law of the output and not its ids; tests/decoding",
    "decode.simulate_acceptance": "a text that means nothing, to measure speed",
    "moe.impl": "needs a mixture of experts; tests/engine/test_mixture.py",
}
KEYS_TO_SWITCH = [k for k in KEYS if k.partition(".")[0] in SECTIONS and k not in NO_SWITCH]


def test_exceptions_exist():
    assert NO_SWITCH.keys() <= KEYS.keys()


def test_the_readme_has_every_key_and_the_docs_say_which_are_no_ideas():
    readme, docs = ((ROOT / name).read_text() for name in ("README.md", "docs/README.md"))
    keys = [key for key in KEYS if key.partition(".")[0] in SECTIONS]
    assert [key for key in keys if f"`{key}`" not in readme] == []
    assert [key for key in NO_SWITCH if f"`{key}`" not in docs] == []


@pytest.mark.parametrize("key", KEYS_TO_SWITCH)
def test_a_shipped_ablation_turns_it(key):
    files = [yaml.safe_load(p.read_text()) for p in (ROOT / "configs/ablations").glob("*.yaml")]
    assert any(key in variant for file in files for variant in file["variants"])


@pytest.mark.parametrize("key", KEYS_TO_SWITCH)
def test_an_equality_test_turns_it(key):
    assert any(key in settings for settings in SWITCHES.values())


@pytest.mark.parametrize("key", KEYS_TO_SWITCH)
def test_the_docs_name_it(key):
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    assert f"`{key}`" in pages.pop("README.md")  # the list of all switches
    section, _, name = key.partition(".")
    told = (f"`{key}", f"{section}: {{{name}:", f"{key}=", f"{key}:")
    assert any(form in text for text in pages.values() for form in told)
