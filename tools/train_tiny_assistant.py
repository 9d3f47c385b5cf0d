"""Trains the MTP assistant of `tiny` against its frozen files, and writes the assistant's folder.

    python -m tools.train_tiny_assistant --out /tmp/assistant --minutes 3    # GPU, extra `train`
    python -m tools.train_tiny_assistant --out carat_jax/tiny/assistant --score_only

A training row is a text of the corpus, read once by the target. Every position of it starts a
burst, exactly as in inference: one position, the keys before it, the target's state, then the
assistant's own states fed back; only the tokens are the text's. Learned is the target's own choice
at each step, weighted by how sure the target is, because that is what a draft must meet.
"""

import argparse
import dataclasses
import json
import multiprocessing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import carat_jax
from carat_jax.assistant_families import ASSISTANTS, AssistantConfig
from carat_jax.cache.bank import CacheBank
from carat_jax.cache.linear import LinearCache
from carat_jax.families import FAMILIES
from carat_jax.model.assistant import Assistant, draft, load_assistant, target_views
from carat_jax.model.checkpoint import load_params
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from carat_jax.numerics.attention import KeyView
from tools.tiny_score import held_out_prompts
from tools.train_tiny import (
    GENERATION_CONFIG,
    TINY,
    batches,
    checkpoint_tensors,
    hf_config,
    initial_params,
    optimise,
)

_BFLOAT16 = jnp.dtype("bfloat16")


def parse_flags() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=3.0, help="wall time of the training loop")
    parser.add_argument("--steps", type=int, help="exact number of steps, instead of --minutes")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--length", type=int, default=384, help="tokens of a row")
    parser.add_argument("--num_drafts", type=int, default=4, help="steps of a burst")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seed", type=int, default=1, help="not that of the target's texts")
    parser.add_argument("--skip_score", action="store_true", help="train and write, judge nothing")
    parser.add_argument("--score_only", action="store_true", help="judge --out, train nothing")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Recorded(LinearCache):
    """A cache that holds the rows of one step and nothing before them."""

    k: jax.Array | None = None
    v: jax.Array | None = None

    def extend(self, k, v, starts, num_valid, slots, window):
        """Holds these rows; see `RingCache.extend`."""
        held = Recorded(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        return held, held.view(starts + num_valid, slots)

    def view(self, ends, slots):
        """Shows all rows; see `RingCache.view`."""
        del slots
        positions = jnp.broadcast_to(jnp.arange(self.k.shape[2]), (len(ends), self.k.shape[2]))
        return KeyView(self.k, self.v, positions)


def read(target: Gemma4, tokens):
    """The target's states of a text, and what an assistant sees of its caches."""
    num_rows, length = tokens.shape
    empty = {layer.index: Recorded() for layer in target.config.kv_owners}
    bank = CacheBank(empty, jnp.zeros(num_rows, jnp.int32), max_rollback=0)
    hidden, bank = target(tokens, bank, jnp.full(num_rows, length, jnp.int32))
    return hidden, target_views(target, bank)


def at_every_position(function):
    """`function` of rows `[B, ...]`, over the second axis of `[B, N, ...]`."""
    return jax.vmap(function, in_axes=1, out_axes=1)


def make_loss(config: AssistantConfig, num_drafts: int):
    """`loss(params, target_params, rows)` of a burst from every position, and the specs."""
    target_graph, _ = split(Gemma4(FAMILIES["tiny"], _BFLOAT16))
    graph, specs = split(Assistant(config, FAMILIES["tiny"], _BFLOAT16))

    def loss(params, target_params, tokens):
        assistant = merge(graph, jax.tree.map(lambda x: x.astype(_BFLOAT16), params))
        target = merge(target_graph, target_params)
        hidden, views = read(target, tokens)
        target_logits = target.logits(hidden)
        choice = jnp.argmax(target_logits, axis=-1)
        certainty = jnp.exp(jnp.max(jax.nn.log_softmax(target_logits), axis=-1))
        embedding = target.embed_tokens.get_value()[tokens]
        embedding *= jnp.asarray(config.backbone_hidden_size**0.5, _BFLOAT16)

        step = at_every_position(lambda *rows: assistant(*rows, views))
        score = at_every_position(assistant.logits)
        count = tokens.shape[1] - num_drafts
        positions = jnp.broadcast_to(1 + jnp.arange(count), (len(tokens), count))
        state, losses, weights = hidden[:, :count], 0.0, 0.0
        for drafted in range(num_drafts):
            here = slice(1 + drafted, 1 + drafted + count)
            y, state = step(embedding[:, here], state, positions)
            logits = score(y)
            chosen = jnp.take_along_axis(logits, choice[:, here, None], axis=-1)[..., 0]
            entropy = jax.nn.logsumexp(logits, axis=-1) - chosen
            losses += jnp.sum(entropy * certainty[:, here])
            weights += jnp.sum(certainty[:, here])
        return losses / weights

    return loss, specs


def initial(specs, target_params, config: AssistantConfig, seed: int):
    """Weights to start from: the target's own head, seen through its strongest directions.

    In these directions the target's state enters, leaves for the next step and meets the table, so
    that training starts near "the state says the next token" and learns what two tokens change.
    """
    params = initial_params(specs, seed)
    table = np.asarray(target_params["embed_tokens"], np.float32)
    directions = np.linalg.svd(table, full_matrices=False)[2][: config.hidden_size].T
    params["embed_tokens"] = jnp.asarray(table @ directions)
    params["post_projection"] = jnp.asarray(directions.T)
    into = params["pre_projection"].at[config.backbone_hidden_size :].set(directions)
    return params | {"pre_projection": into}


def train(flags: argparse.Namespace, config: AssistantConfig):
    """Runs the training loop; returns the parameters and their specs."""
    feed = batches(str(TINY), flags.batch, flags.length, flags.seed, flags.workers)
    target_params = load_params(TINY, split(Gemma4(FAMILIES["tiny"], _BFLOAT16))[1])
    loss, specs = make_loss(config, flags.num_drafts)
    params = initial(specs, target_params, config, flags.seed)

    def loss_of(params, rows):
        return loss(params, target_params, rows)

    return optimise(loss_of, params, feed, flags, decay=0.02, warmup=100), specs


def assistant_config_json(config: AssistantConfig) -> dict:
    """`config.json` of the assistant, as published ones are written."""
    text = hf_config(config)
    del text["architectures"]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": config.backbone_hidden_size,
        "use_ordered_embeddings": config.use_ordered_embeddings,
        "num_centroids": config.num_centroids,
        "centroid_intermediate_top_k": config.centroid_intermediate_top_k,
        "tie_word_embeddings": True,
        "text_config": text
        | {"num_kv_shared_layers": config.num_hidden_layers, "vocab_size_per_layer_input": 0},
    }


def write_folder(folder: Path, config: AssistantConfig, params, specs) -> None:
    """Writes every file of the published format."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", assistant_config_json(config)),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name.removeprefix("model./"): tensor
        for name, tensor in checkpoint_tensors(params, specs).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_drafts(folder: Path, num_drafts: int):
    """`drafts(row)`: what is drafted after each of `[1, T]` ids but the first, `[T - 1, M]`."""
    dtype = jnp.dtype("float32")
    target_graph, target_specs = split(Gemma4(FAMILIES["tiny"], dtype))
    graph, params = load_assistant(folder, FAMILIES["tiny"], dtype)
    target_params = load_params(TINY, target_specs)

    @jax.jit
    def drafts(params, target_params, row):
        assistant, target = merge(graph, params), merge(target_graph, target_params)
        hidden, views = read(target, row)

        def burst(token, state, position):
            return draft(assistant, target, views, token, state, position, num_drafts).tokens

        positions = jnp.arange(1, row.shape[1])[None]
        return at_every_position(burst)(row[:, 1:], hidden[:, :-1], positions)[0]

    return lambda row: np.asarray(drafts(params, target_params, row))


def acceptance(
    folder: Path, temperature: float, every: int = 1, num_drafts: int = 3, max_tokens: int = 200
) -> tuple[float, np.ndarray]:
    """Drafts along held-out texts that `tiny` writes itself.

    The rounds are those of point-mass drafts: a draft is accepted iff it is the text's next token.

    Args:
      folder: the assistant.
      temperature: of the texts.
      every: takes every n-th of the prompts.
      num_drafts: M.
      max_tokens: of a text.

    Returns:
      Tokens committed per pass of the target, its own included, and how often a draft was accepted
      at each place among the rounds that got there.
    """
    drafts_of, length = make_drafts(folder, num_drafts), 320
    engine = carat_jax.load(str(TINY), dtype="float32", engine={"max_batch": 16})
    asked = [
        engine.tokenizer.encode_chat([{"role": "user", "content": p.text}]) if p.is_chat else p.text
        for p in held_out_prompts()[::every]
    ]
    law = carat_jax.SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    committed, reached, accepted = 0, np.zeros(num_drafts), np.zeros(num_drafts)
    for result in engine.generate(asked, law):
        ids = [*result.prompt_ids, *result.ids][:length]
        drafts = drafts_of(np.array([ids + [0] * (length - len(ids))], np.int32))
        # The first token comes from the prefill: it is the first burst's bonus.
        bonus = len(result.prompt_ids)
        while bonus < len(ids) - 1:
            wanted = ids[bonus + 1 : bonus + 1 + num_drafts]
            matches = drafts[bonus - 1, : len(wanted)] == wanted
            num_accepted = int(np.cumprod(matches).sum())
            reached[: min(num_accepted + 1, len(wanted))] += 1
            accepted[:num_accepted] += 1
            committed += min(num_accepted + 1, len(ids) - 1 - bonus)
            bonus += num_accepted + 1
    return committed / reached[0], accepted / np.maximum(reached, 1)


def main() -> None:
    """Trains, writes and judges."""
    flags = parse_flags()
    if not flags.score_only:
        config = ASSISTANTS["tiny"]
        write_folder(flags.out, config, *train(flags, config))
    if not flags.skip_score:
        for temperature in (0.0, 1.0):
            tokens, places = acceptance(flags.out, temperature)
            print(
                f"temperature {temperature}: {tokens:.3f} tokens a pass with 3 drafts; "
                f"accepted at each place {np.round(places, 3)}"
            )


if __name__ == "__main__":
    main()
