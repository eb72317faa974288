import shutil

import pytest
from edited import edited

from quantkit.evaluation.generators.generator import Generation, Prompt
from quantkit.evaluation.generators.local import Local, content_hash, template_reasons
from quantkit.executor.options import EngineOptions


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return Local(EngineOptions(tiny_checkpoint, max_batch=8), name="tiny")


def chat(text, seed=0, think=True):
    return Prompt(messages=({"role": "user", "content": text},), seed=seed, think=think)


def test_replies_keep_their_place_and_say_that_think_was_open(model, tiny_checkpoint):
    assert template_reasons(tiny_checkpoint)
    prompts = [chat(f"{n} + {n}") for n in range(5)]
    replies = list(model.generate(prompts, Generation(max_tokens=6)))
    assert sorted(reply.index for reply in replies) == list(range(5))
    for reply in replies:
        assert 0 < reply.completion_tokens <= 6
        assert (reply.prompt_tokens > 0, reply.think_open) == (True, True)
        assert reply.finish_reason == ("length" if reply.completion_tokens == 6 else "stop")


def test_the_same_seed_draws_the_same_reply_whatever_else_is_asked(model):
    parameters = Generation(temperature=1.0, top_p=0.95, max_tokens=8)
    asked, other = chat("7 + 5", seed=3), chat("7 + 5", seed=4)
    (alone,) = model.generate([asked], parameters)
    replies = model.generate([chat("1 + 1"), asked, other], parameters)
    among = {reply.index: reply.text for reply in replies}
    assert among[1] == alone.text != among[2]


def test_a_prompt_that_does_not_fit_is_a_miss_with_its_name_and_spares_the_others(model):
    prompts = [chat("1 + 1 " * model.engine.max_model_len), chat("1 + 1")]
    replies = {one.index: one for one in model.generate(prompts, Generation(max_tokens=2))}
    assert (replies[0].finish_reason, replies[0].error) == ("context", None)
    assert "the context is" in (replies[0].refusal or "")
    assert replies[1].error is None


def test_what_servers_take_of_the_models_own_settings_is_taken_here_too(
    model, tiny_checkpoint, tmp_path
):
    """top_k 1 leaves one token to draw; a protocol does not name it, and servers apply it."""
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    with edited(copy / "generation_config.json") as settings:
        settings |= {"temperature": 0.6, "top_p": 0.95, "top_k": 1}
    own, asked = Local(EngineOptions(copy, max_batch=2), name="own"), [chat("7 + 5", seed=3)]
    drawn, greedy, free = (
        next(one.generate(asked, Generation(temperature=temperature, max_tokens=8))).text
        for one, temperature in ((own, 1.0), (model, 0.0), (model, 1.0))
    )
    assert drawn == greedy != free
    assert own.identity["sampling"] == {"top_k": 1}
    assert "sampling" not in model.identity


@pytest.mark.parametrize("changed", ["*.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_the_content_hash_follows_the_weights_and_the_tokenizer(changed, tiny_checkpoint, tmp_path):
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    assert content_hash(copy) == content_hash(tiny_checkpoint)
    file = sorted(copy.glob(changed))[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert content_hash(copy) != content_hash(tiny_checkpoint)
