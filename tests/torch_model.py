"""The transformers side of the parity tests: load a folder, ask for logits or a greedy text.

Imported only by tests marked `parity`: it needs torch and transformers.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


def load(folder, dtype: str = "float32"):
    """The model of a folder; a tensor that is missing, unused or mis-shaped is an error."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    faults = {kind: found for kind, found in report.items() if found}
    assert not faults, faults
    return model.eval()


def text_model(model):
    """The text stack inside a causal or conditional model."""
    return getattr(model.model, "language_model", model.model)


@torch.no_grad()
def logits(model, ids) -> np.ndarray:
    """Logits [T, V] of one sequence, in one pass without a cache."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].double().numpy()


@torch.no_grad()
def greedy(model, ids, num_tokens: int) -> list[int]:
    """The greedy continuation by transformers' own cached generation; no id ends it."""
    output = model.generate(
        torch.tensor([list(ids)]),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
    )
    return output[0, len(ids) :].tolist()
