"""How many keys the three-stage path of a global layer looks at: the key-padding policy.

A matrix product over exactly as many keys as there are may be given a slower kernel than one over
a few masked keys more, because a count that is no multiple of 64 rules out the matrix units of some
libraries. And with static shapes every count is a compilation. So the count is rounded up to a
declared rung: the padding, doubled up to the context. What lies past the true count is masked.
"""

from collections.abc import Sequence

# `exact` compiles once per length: for operators and short runs.
EXACT = "exact"


def default_rungs(pad_keys: int, max_context: int) -> tuple[int, ...]:
    """`pad_keys`, doubled until `max_context` is covered; the last is `max_context`, rounded up."""
    rungs = [pad_keys]
    while rungs[-1] < max_context:
        rungs.append(2 * rungs[-1])
    # The last one need not reach past the context by more than the padding.
    rungs[-1] = -(-max_context // pad_keys) * pad_keys if len(rungs) > 1 else rungs[-1]
    return tuple(rungs)


def padded_keys(num_keys: int, pad_keys: int | str, rungs: Sequence[int]) -> int:
    """The key count a step over `num_keys` keys is compiled for.

    Args:
      num_keys: keys of the longest sequence in the step, its new rows included.
      pad_keys: `exact`, or the multiple all rungs are of.
      rungs: declared counts, ascending; not read when exact.

    Raises:
      ValueError: more keys than the last rung.
    """
    if pad_keys == EXACT:
        return num_keys
    for rung in rungs:
        if rung >= num_keys:
            return rung
    raise ValueError(f"{num_keys} keys are past the last declared rung, {rungs[-1]}")
