"""Trains `tiny`, the model inside the package, and writes its folder.

    python -m tools.train_tiny --out /tmp/first --steps 4323 --rate 3e-3
    python -m tools.train_tiny --out /tmp/tiny --init /tmp/first --seed 1 --steps 1055 \\
        --batch 96 --length 320 --rate 2e-3
    python -m tools.train_tiny --out carat_jax/tiny --score_only    # held-out scores of a folder

The first two made the shipped weights: 5 minutes on one H200, extra `train`.
The model is `families.FAMILIES["tiny"]`, run by the package's own Flax modules in plain JAX:
float32 master weights, bfloat16 compute, so the network learns with the rounding it is shipped
with. Batch i is a function of (seed, i) alone, drawn from the corpus by worker processes and never
repeated. `--minutes` instead of `--steps` fits a run into a time; the log prints its steps.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.tiny_tokenizer import CONTROL, build_tokenizer, token_rows

TINY = Path(__file__).parent.parent / "carat_jax" / "tiny"
_BATCHES_PER_TASK = 4


def parse_flags() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--init", type=Path, help="folder whose weights to start from")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall time of the training loop")
    parser.add_argument("--steps", type=int, help="exact number of steps, instead of --minutes")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new_tokenizer", action="store_true", help="learn tokenizer.json again")
    parser.add_argument("--skip_score", action="store_true", help="train and write, judge nothing")
    parser.add_argument("--score_only", action="store_true", help="judge --out, train nothing")
    return parser.parse_args()


def batches(folder: str, rows: int, length: int, seed: int, workers: int) -> Iterator[np.ndarray]:
    """Batches without end, in order, each drawn by some worker."""
    draw = functools.partial(_draw, folder, rows, length, seed)
    pool = multiprocessing.get_context("spawn").Pool(workers)
    # Tasks go out a bounded number ahead: `imap` alone would draw until memory ends.
    ahead = [pool.apply_async(draw, (task,)) for task in range(4 * workers)]
    for task in itertools.count(len(ahead)):
        ahead.append(pool.apply_async(draw, (task,)))
        yield from ahead.pop(0).get()


def _draw(folder: str, rows: int, length: int, seed: int, task: int) -> np.ndarray:
    drawn = token_rows(folder, seed * 10_000_000 + task + 1, _BATCHES_PER_TASK * rows, length)
    return drawn.reshape(_BATCHES_PER_TASK, rows, length)


class PassThrough:
    """A cache that keeps nothing: a training row sees itself and no past."""

    def extend(self, k, v, starts, num_valid, slots, window):
        """Shows the queries of these rows these rows; see `RingCache.extend`."""
        import jax.numpy as jnp

        from carat_jax.numerics.attention import KeyView

        del num_valid, slots, window
        positions = starts[:, None] + jnp.arange(k.shape[1])
        return self, KeyView(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), positions)


def make_loss(config):
    """`loss(params, rows)`: mean cross-entropy of the next token, and the specs of `params`."""
    import jax
    import jax.numpy as jnp

    from carat_jax.cache.bank import CacheBank
    from carat_jax.model.gemma4 import Gemma4
    from carat_jax.model.params import merge, split

    graph, specs = split(Gemma4(config, jnp.bfloat16))

    def loss(params, rows):
        model = merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
        num_rows, num_tokens = rows.shape[0], rows.shape[1] - 1
        bank = CacheBank(
            {layer.index: PassThrough() for layer in config.kv_owners},
            jnp.zeros(num_rows, jnp.int32),
            max_rollback=0,
        )
        full = jnp.full(num_rows, num_tokens, jnp.int32)
        hidden, _ = model(rows[:, :-1], bank, full, jnp.arange(num_rows))
        logits = model.logits(hidden)
        chosen = jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
        weights = _weights(rows)[:, 1:]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return loss, specs


def _weights(rows):
    """Weight of each token in the loss: what users write is mostly chance, so it counts little."""
    import jax.numpy as jnp
    from jax import lax
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode("model").ids[0]
    place = jnp.arange(rows.shape[1])
    is_mark = (rows == CONTROL["<bos>"]) | (rows == CONTROL["<|turn>"])
    mark = lax.cummax(jnp.where(is_mark, place, 0), axis=1)
    role = jnp.take_along_axis(rows, jnp.minimum(mark + 1, rows.shape[1] - 1), axis=1)
    is_turn = jnp.take_along_axis(rows, mark, axis=1) == CONTROL["<|turn>"]
    return jnp.where(is_turn & (role != model), 0.1, 1.0)


def initial_params(specs, seed: int):
    """Float32 weights to start from.

    Scores are not scaled in this family, so the head norms start where scores have variance one;
    the norms that write to the residual stream start small, as depth asks.
    """
    import jax
    import jax.numpy as jnp

    from carat_jax.model.params import ParamSpec, random_params

    is_spec = lambda x: isinstance(x, ParamSpec)  # noqa: E731
    specs = jax.tree.map(
        lambda s: dataclasses.replace(s, dtype=jnp.float32), specs, is_leaf=is_spec
    )

    def adapt(path, leaf):
        name = jax.tree_util.keystr(path)
        if "q_norm" in name or "k_norm" in name:
            return leaf * leaf.shape[0] ** -0.25
        return leaf * 0.25 if "post_" in name else leaf

    return jax.tree_util.tree_map_with_path(adapt, random_params(specs, seed))


def loaded_params(specs, folder: Path):
    """Float32 weights of a trained folder, to go on from."""
    import jax
    import jax.numpy as jnp

    from carat_jax.model.checkpoint import load_params

    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), load_params(folder, specs))


def train(flags: argparse.Namespace, config):
    """Runs the training loop; returns the parameters."""
    feed = batches(str(TINY), flags.batch, flags.length + 1, flags.seed, flags.workers)
    loss, specs = make_loss(config)
    params = loaded_params(specs, flags.init) if flags.init else initial_params(specs, flags.seed)
    return optimise(loss, params, feed, flags, decay=0.05, warmup=200), specs


def optimise(loss, params, feed, flags: argparse.Namespace, *, decay: float, warmup: int):
    """Adam with a cosine schedule over `flags.steps` steps, or as many as `flags.minutes` allow.

    Args:
      loss: of (params, rows).
      params: to start from; donated.
      feed: gives rows of token ids.
      flags: steps, minutes and the peak rate.
      decay: weight decay of matrices.
      warmup: steps until the peak rate.
    """
    import jax
    import jax.numpy as jnp
    import optax

    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters", flush=True)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(decay, mask=jax.tree.map(lambda x: x.ndim > 1, params)),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows, rate):
        value, grads = jax.value_and_grad(loss)(params, rows.astype(jnp.int32))
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, value

    # The first steps compile; the ones until `timed` tell how many the minutes allow.
    first, timed = 5, 105
    state, began, num_steps = optimizer.init(params), time.time(), flags.steps
    for index, rows in enumerate(feed):
        if index == first:
            jax.block_until_ready(params)
            began = time.time()
        if index == timed and num_steps is None:
            jax.block_until_ready(params)
            each = (time.time() - began) / (timed - first)
            num_steps = index + int((flags.minutes * 60 - (time.time() - began)) / each)
            print(f"{each * 1e3:.1f} ms a step: --steps {num_steps}", flush=True)
        if index == num_steps:
            break
        progress = index / num_steps if num_steps else 0.0
        rate = flags.rate * min(1.0, (index + 1) / warmup) * 0.5 * (1 + np.cos(np.pi * progress))
        params, state, value = step(params, state, jnp.asarray(rows), np.float32(rate))
        if index % 100 == 0:
            print(f"{index:6d} {time.time() - began:6.1f} s  loss {float(value):.4f}", flush=True)
    print(f"last loss {float(value):.4f} after {time.time() - began:.0f} s", flush=True)
    return params


def checkpoint_tensors(params, specs) -> dict[str, np.ndarray]:
    """The parameters as published tensors: what loading does, backwards."""
    import jax

    from carat_jax.model.params import ParamSpec

    tensors = {}
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    for spec, leaf in zip(leaves, jax.tree.leaves(params), strict=True):
        array = np.asarray(leaf.astype(spec.dtype))
        for source in spec.tensors:
            part = array[source.index] if source.index else array
            if source.order:
                part = part.transpose(np.argsort(source.order))
            tensors[f"model.{source.name}"] = np.ascontiguousarray(part).reshape(source.shape)
    return tensors


def hf_config(config) -> dict:
    """`config.json` of the model, as a text-only Gemma 4."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
                "num_key_value_heads num_global_key_value_heads head_dim global_head_dim "
                "attention_k_eq_v sliding_window max_position_embeddings rms_norm_eps "
                "final_logit_softcapping num_kv_shared_layers use_double_wide_mlp "
                "hidden_size_per_layer_input enable_moe_block num_experts top_k_experts "
                "moe_intermediate_size tie_word_embeddings pad_token_id bos_token_id"
            ).split()
        },
        "eos_token_id": [CONTROL["<eos>"], CONTROL["<turn|>"]],
        "vocab_size_per_layer_input": config.vocab_size,
        "layer_types": list(config.layer_types),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_bidirectional_attention": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": config.sliding_rope_theta},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": config.partial_rotary_factor,
                "rope_theta": config.full_rope_theta,
            },
        },
    }


GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
    "bos_token_id": CONTROL["<bos>"],
    "pad_token_id": CONTROL["<pad>"],
    "eos_token_id": [CONTROL["<eos>"], CONTROL["<turn|>"], CONTROL["<|tool_response>"]],
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "padding_side": "left",
    **{f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")},
}


def write_folder(folder: Path, config, params, specs) -> None:
    """Writes every file of the published format."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        if folder.resolve() != TINY.resolve():
            shutil.copy(TINY / name, folder / name)
    for name, content in (
        ("config.json", hf_config(config)),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = checkpoint_tensors(params, specs)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def print_scores(folder: Path) -> None:
    """Answers the held-out prompts greedily with the public engine and prints how well."""
    import carat_jax
    from tools.tiny_score import held_out_prompts, score

    prompts = held_out_prompts()
    engine = carat_jax.load(str(folder), dtype="float32", engine={"max_batch": 16})
    greedy = carat_jax.SamplingParams(temperature=0.0, max_tokens=200)
    asked = [
        engine.tokenizer.encode_chat([{"role": "user", "content": p.text}]) if p.is_chat else p.text
        for p in prompts
    ]
    replies = [result.text for result in engine.generate(asked, greedy)]
    result = score(prompts, replies)
    print("\n".join(result.mistakes))
    print(f"sentences well formed {result.well_formed:.1%}, answers right {result.right:.1%}")


def main() -> None:
    """Trains, writes and judges."""
    flags = parse_flags()
    if not flags.score_only:
        from carat_jax.families import FAMILIES

        if flags.new_tokenizer:
            build_tokenizer(TINY, flags.seed)
        config = FAMILIES["tiny"]
        write_folder(flags.out, config, *train(flags, config))
    if not flags.skip_score:
        print_scores(flags.out)


if __name__ == "__main__":
    main()
