"""The trained assistant of `tiny`: published form, how much it is worth, and transformers on it."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import carat_jax
from carat_jax.assistant_families import ASSISTANTS
from carat_jax.engine.tokenizer import Tokenizer
from carat_jax.families import FAMILIES
from carat_jax.model.assistant import load_assistant, read_assistant_config
from tools.train_tiny_assistant import acceptance

TINY = Path(carat_jax.__file__).parent / "tiny"
ASSISTANT = TINY / "assistant"


def test_it_is_two_layers_in_published_form_and_small():
    config = read_assistant_config(ASSISTANT)
    assert config == dataclasses.replace(ASSISTANTS["tiny"], eos_token_id=(1, 106))
    assert [layer.is_sliding for layer in config.layers] == [True, False]
    assert config.backbone_hidden_size == FAMILIES["tiny"].hidden_size
    _, params = load_assistant(ASSISTANT, FAMILIES["tiny"], np.dtype("float32"))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    sizes = {file: file.stat().st_size for file in TINY.rglob("*") if file.is_file()}
    assert sum(size for file, size in sizes.items() if ASSISTANT in file.parents) < 1.5e6
    assert sum(sizes.values()) < 12e6


def test_held_out_text_commits_three_tokens_a_pass_with_three_drafts():
    tokens, places = acceptance(ASSISTANT, temperature=0.0, every=4, max_tokens=120)
    assert tokens >= 3.0, places


@pytest.mark.parity
def test_transformers_drives_it_and_writes_the_same_text_in_fewer_passes():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    models = []
    for folder in (TINY, ASSISTANT):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
        models.append(model)
    target, assistant = models
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    tokenizer = Tokenizer.from_folder(TINY)
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    plain = target.generate(ids, do_sample=False, max_new_tokens=60)
    passes = []
    target.model.register_forward_hook(lambda *_: passes.append(1))
    drafted = target.generate(ids, do_sample=False, max_new_tokens=60, assistant_model=assistant)
    assert drafted.tolist() == plain.tolist()
    assert len(passes) <= (plain.shape[1] - ids.shape[1]) / 2
