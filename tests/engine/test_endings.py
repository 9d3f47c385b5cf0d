"""How answers end and how they stream: end tokens, stop strings, limits, thoughts.

The scripted engine says the lines of `toy_engine.LINES`, so every border is hit on purpose.
"""

import pytest

from tests.engine.toy_engine import LINES, MESSAGES, line_ids, prompt, starts, tokenizer


def say(engine, name, skip=0, **settings):
    """The engine's answer to a prompt that makes it say a line, without its first `skip` ids.

    Streaming and generating give the same, or this fails.
    """
    ids = prompt(starts()[name] + skip)
    result = engine.generate(ids, **settings)
    deltas = list(engine.stream(ids, **settings))
    assert "".join(delta.text for delta in deltas) == result.text
    assert tuple(i for delta in deltas for i in delta.ids) == result.ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == result.finish_reason
    if result.logprobs is not None:
        assert tuple(info for delta in deltas for info in delta.logprobs) == result.logprobs
    return result


# End tokens.


@pytest.mark.parametrize("name", ["abcd", "emoji", "space"])
def test_each_end_token_stops_and_is_not_text(scripted, name):
    # given lines that end with <eos>, <turn|> and <|tool_response>
    result = say(scripted, name)
    assert result.ids == tuple(line_ids(name))
    assert result.finish_reason == "stop"
    assert result.text == tokenizer().decode(line_ids(name)[:-1])
    assert LINES[name][-1] not in result.text


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7, "logprobs": 0}, {"stop_token_ids": [390]}, {"top_k": 3}]
)
def test_settings_of_a_request_do_not_lose_the_end_tokens(scripted, settings):
    result = say(scripted, "abcd", seed=1, **settings)
    assert (result.text, result.finish_reason) == ("xabcd", "stop")


def test_end_tokens_of_a_request_join_the_checkpoints(scripted):
    first, last = line_ids("abcd")[1], line_ids("abcd")[-1]
    assert say(scripted, "abcd", stop_token_ids=[first]).ids == tuple(line_ids("abcd")[:2])
    assert say(scripted, "abcd", stop_token_ids=[last]).text == "xabcd"


def test_end_tokens_can_be_ignored_but_not_a_requests_own(scripted):
    past = say(scripted, "abcd", ignore_eos=True, max_tokens=6)
    assert past.ids == tuple(line_ids("abcd") + line_ids("abe")[:2])
    assert past.finish_reason == "length"
    own = say(scripted, "abcd", ignore_eos=True, stop_token_ids=[1], max_tokens=6)
    assert (own.ids, own.finish_reason) == (tuple(line_ids("abcd")), "stop")


@pytest.mark.parametrize("end", [1, 6, 14])
def test_a_forced_end_token_ends_at_once(engine, end):
    result = engine.generate(prompt(9), logit_bias={end: 1e6}, temperature=1.0)
    assert (result.ids, result.text, result.finish_reason) == ((end,), "", "stop")


# A stop against the limit on tokens.


@pytest.mark.parametrize("at", range(4))
def test_a_stop_on_the_last_allowed_token_is_a_stop(scripted, at):
    ids = line_ids("abcd")
    short = say(scripted, "abcd", stop_token_ids=[ids[at]], max_tokens=at)
    exact = say(scripted, "abcd", stop_token_ids=[ids[at]], max_tokens=at + 1)
    ample = say(scripted, "abcd", stop_token_ids=[ids[at]], max_tokens=at + 2)
    assert (short.ids, short.finish_reason) == (tuple(ids[:at]), "length")
    for result in (exact, ample):
        assert (result.ids, result.finish_reason) == (tuple(ids[: at + 1]), "stop")


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(scripted):
    result = say(scripted, "abcd", stop="abc", max_tokens=3)
    assert (result.text, result.finish_reason) == ("x", "stop")
    result = say(scripted, "abcd", stop="abc", max_tokens=2)
    assert (result.text, result.finish_reason) == ("xab", "length")


# Stop strings.


@pytest.mark.parametrize(
    ("stop", "text", "num_ids"),
    [
        ("abc", "x", 3),  # over three tokens, of which it cuts the first and the last
        ("x", "", 1),
        ("xabcd", "", 3),
        (["abcde", "abcd"], "x", 3),
        (["bcx", "abe", "cd"], "xab", 3),
        (["d", "c"], "xab", 3),
        ("zzz", "xabcd", 4),
        (["b", "a"], "x", 1),
    ],
)
def test_stop_strings_cut_across_tokens(scripted, stop, text, num_ids):
    result = say(scripted, "abcd", stop=stop)
    assert result.text == text
    assert result.ids == tuple(line_ids("abcd")[:num_ids])
    assert result.finish_reason == "stop"


def test_a_near_miss_is_given_out_whole(scripted):
    result = say(scripted, "abe", stop=["abc", "bex"])
    assert (result.text, result.finish_reason) == ("xabe", "stop")
    assert result.ids == tuple(line_ids("abe"))


def test_the_stop_string_can_stay(scripted):
    assert say(scripted, "abcd", stop="abc", include_stop=True).text == "xabc"
    assert say(scripted, "abe", stop="abc", include_stop=True).text == "xabe"


def test_a_stream_never_gives_out_what_a_stop_string_may_claim(scripted):
    pieces = [d.text for d in scripted.stream(prompt(starts()["abe"]), stop=["abc"])]
    assert pieces == ["x", "", "abe", ""]


def test_logprobs_have_one_entry_for_each_id(scripted):
    result = say(scripted, "abcd", stop="abc", logprobs=1)
    assert len(result.logprobs) == len(result.ids) == 3
    assert [info.top[0][0] for info in result.logprobs] == line_ids("abcd")[:3]
    assert all(info.logprob == pytest.approx(0, abs=1e-6) for info in result.logprobs)


# Characters.


def test_characters_of_several_tokens_arrive_whole(scripted):
    pieces = [d.text for d in scripted.stream(prompt(starts()["emoji"]))]
    assert pieces == ["", "", "", "😀", "日本", "\ufffd", "h", ""]
    assert say(scripted, "emoji").text == "😀日本\ufffdh"


def test_a_character_cut_by_the_limit_is_flushed(scripted):
    for max_tokens in (1, 2, 3):
        assert say(scripted, "emoji", max_tokens=max_tokens).text == "\ufffd" * max_tokens


def test_a_stop_string_after_a_character_of_several_tokens(scripted):
    assert say(scripted, "emoji", stop="日").text == "😀"
    assert say(scripted, "emoji", stop="😀").text == ""
    assert say(scripted, "emoji", stop="\ufffd").text == "😀日本"


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_leading_spaces_stay(scripted, skip):
    text = say(scripted, "space", skip=skip).text
    assert text == [" the   a", "   a", " a"][skip]


# Conversations.


def test_a_chat_answer_is_parted_from_its_thought(scripted):
    result = scripted.chat(MESSAGES)
    assert (result.thought, result.text, result.finish_reason) == ("h", "in", "stop")
    assert result.ids == tuple(line_ids("chat"))
    deltas = list(scripted.stream_chat(MESSAGES))
    assert "".join(d.thought for d in deltas) == "h"
    assert "".join(d.text for d in deltas) == "in"
    assert deltas[-1].finish_reason == "stop"


def test_a_raw_prompt_is_not_parted(scripted):
    result = say(scripted, "chat")
    assert (result.thought, result.text) == ("", "thought\nhin")


def test_stop_strings_concern_the_answer_not_the_thought(scripted):
    assert scripted.chat(MESSAGES, stop="h").text == "in"
    assert scripted.chat(MESSAGES, stop="n").text == "i"


def test_a_thought_without_an_end_leaves_no_answer(scripted):
    result = scripted.chat(MESSAGES, max_tokens=4)
    assert (result.thought, result.text, result.finish_reason) == ("h", "", "length")


# Streams.


def test_several_samples_cannot_be_streamed(engine):
    with pytest.raises(ValueError, match=r"sampling.n: 2 samples cannot be streamed"):
        engine.stream(prompt(5), n=2)


def test_a_stream_tells_each_token_as_it_comes(engine):
    want = engine.generate(prompt(9), max_tokens=12, ignore_eos=True)
    stream = engine.stream(prompt(9), max_tokens=12, ignore_eos=True)
    first = next(stream)
    assert first.ids == want.ids[:1]
    assert not engine.loop.is_idle
    rest = list(stream)
    assert [delta.ids for delta in rest] == [(i,) for i in want.ids[1:]]
    assert rest[-1].finish_reason == "length"
    assert list(stream) == []


def test_streams_and_batches_run_side_by_side(engine):
    settings = {"temperature": 0.9, "max_tokens": 14, "ignore_eos": True}
    alone = [engine.generate(prompt(n), seed=n, **settings).ids for n in (5, 9, 21)]
    one = engine.stream(prompt(5), seed=5, **settings)
    other = engine.stream(prompt(21), seed=21, **settings)
    got = {5: [next(one)], 21: [next(other), next(other)]}
    assert engine.generate(prompt(9), seed=9, **settings).ids == alone[1]
    # when the batch is done, both streams are too, and still have everything to tell
    rounds = engine.stats()["rounds"]
    for _ in range(3):
        got[5].append(next(one))
        got[21].append(next(other))
    got[21] += other
    got[5] += one
    assert engine.stats()["rounds"] <= rounds + 2
    assert tuple(i for delta in got[5] for i in delta.ids) == alone[0]
    assert tuple(i for delta in got[21] for i in delta.ids) == alone[2]
