"""The cache in 8 bits, from an engine's option to its tokens: latents, keys and values."""

from dataclasses import replace

import make_model
import pytest
import torch
from engines import load, tokens
from guessed_models import ask_ranks
from packed_model import GROUPED, write_random
from paged_pass import PROMPTS, causal_pass, paged_pass
from refused import refused
from tiny_models import write

from quantkit import SamplingParams
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.generators.local import Local
from quantkit.evaluation.options import PerplexityOptions
from quantkit.evaluation.speed.targets import open_target
from quantkit.executor.cache.cache import cache_dtype
from quantkit.executor.options import EngineOptions
from quantkit.executor.weights import load as loading
from quantkit.executor.weights.load import load_model
from quantkit.models.architecture import KeyValueCache, LatentCache
from quantkit.models.context import CausalContext

KINDS = pytest.mark.parametrize("cache", ["int8", "fp8"])
WINDOWED = GROUPED | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 20,
}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Grouped queries, some of whose keys leave the window."""
    return write_random(tmp_path_factory.mktemp("models") / "grouped", WINDOWED)


@pytest.fixture(params=["latents", "keys"])
def path(request, tiny_dense_checkpoint, grouped):
    return tiny_dense_checkpoint if request.param == "latents" else grouped


def asked(engine):
    return tokens(engine, PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True))


def answers(path, cache, **options):
    engine = load(path, max_model_len=128, cache=cache, **options)
    try:
        return asked(engine)
    finally:
        engine.close()


@KINDS
@torch.inference_mode()
def test_through_the_cache_tokens_attend_to_its_codes(path, cache):
    """Prompts in chunks, then one token a row, as one causal pass over what 8 bits hold. The last
    rows tell them from one that is not."""
    loaded = load_model(path, device="cpu", dtype="float32", cache=cache)
    found = paged_pass(loaded)[0]
    exact = causal_pass(loaded, loaded.codes)
    apart = (causal_pass(loaded, None) - exact).norm()
    # Sums in another order may round a value at the edge of two codes to the other one: 3 % of what
    # all the codes make.
    assert (found - exact).norm() < 0.1 * apart
    assert apart < 0.2 * exact.norm()


@KINDS
def test_tokens_are_the_same_however_they_were_scheduled(path, cache):
    options = {"prefix_cache": True, "chunk_tokens": 9, "cache_tokens": 320}
    assert answers(path, cache, **options) == answers(path, cache)


@pytest.mark.parametrize("cache", [None, "int8", "fp8"])
def test_a_plan_counts_what_a_token_takes_with_an_indexer(tmp_path, cache):
    loaded = load_model(write(tmp_path / "model", "deepseek_v32"), device="cpu", cache=cache)
    sizes, tokens = loaded.config.cache, 3 * loaded.cache_layout.block_size
    bits = 16 if cache is None else 8
    assert loaded.new_cache(3).nbytes == tokens * loaded.cache_token_bytes
    own = sizes.token_bytes(bits) - replace(sizes, index_dim=0).token_bytes(bits)
    assert own == (256 if cache is None else 132)


@KINDS
def test_drafts_change_no_token(tiny_checkpoint, cache):
    assert answers(tiny_checkpoint, cache, draft_length=2) == answers(tiny_checkpoint, cache)


def test_two_ranks_have_the_same_tokens_as_one(grouped, tmp_path):
    found = ask_ranks(2, tmp_path, grouped, asked, max_model_len=128, cache="int8")
    assert found == answers(grouped, "int8")


def test_bytes_of_models_that_are_served():
    r1, qwen = LatentCache(512, 64), KeyValueCache(8, 128)
    assert (r1.token_bytes(16), r1.token_bytes(8, 8)) == (1152, 644)
    assert (qwen.token_bytes(16), qwen.token_bytes(8)) == (4096, 2112)
    assert (qwen.token_bytes(16, 4), qwen.token_bytes(8, 4)) == (1024, 528)


@KINDS
def test_perplexity_tells_what_the_cache_costs(path, cache):
    text = [torch.tensor(ids) for ids in PROMPTS]
    asked = {"baseline": str(path), "device": "cpu"}
    same, coded = (
        measure(str(path), text, PerplexityOptions(**asked, **more))
        for more in ({}, {"cache": cache})
    )
    assert same.kl == 0
    assert 0 < coded.kl < 0.05
    assert coded.baseline_ppl == same.ppl


def uneven(latents, folder):
    """A model whose latents, or normed keys, have channels of very different sizes, made up for
    behind the cache."""
    torch.manual_seed(9)
    if latents:
        config = make_model.tiny_config(num_nextn_predict_layers=0)
        tensors = make_model.random_tensors(config)
    else:
        plain = Checkpoint.open(write_random(folder / "plain", GROUPED))
        config, tensors = plain.config, {name: plain.read(name) for name in plain.tensors}
    for name, tensor in tensors.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            sizes = torch.randn(config["kv_lora_rank"]).mul(1.5).exp()
            tensor[: len(sizes)] *= sizes[:, None]
            tensors[name.replace("kv_a_proj_with_mqa", "kv_b_proj")] /= sizes
        elif name.endswith("k_norm.weight"):
            sizes = torch.randn(config["head_dim"] // 2).mul(1.5).exp().repeat(2)
            tensor.copy_(sizes)
            tensors[name.replace("k_norm", "q_norm")].copy_(2 / sizes)
    return make_model.write_dense(folder / "uneven", config, tensors)


@pytest.mark.parametrize("latents", [True, False])
def test_channels_are_of_one_size_in_the_cache(latents, tmp_path, monkeypatch):
    """Which changes nothing that is computed, and makes the loss far smaller."""
    source, text = uneven(latents, tmp_path), [torch.tensor(ids) for ids in PROMPTS]
    lengths, options = [len(ids) for ids in text], {"device": "cpu", "cache": "int8"}
    with torch.inference_mode():
        plain, even = (
            load_model(source, device="cpu", dtype="float32", cache=cache).model(
                torch.cat(text), CausalContext(lengths)
            )
            for cache in (None, "int8")
        )
    assert torch.equal(even, plain)

    def loss():
        return measure(str(source), text, PerplexityOptions(baseline=str(source), **options)).kl

    found = loss()
    monkeypatch.setattr(loading, "equalize_kv_channels", lambda *_: None)
    assert found < 0.2 * loss()


@pytest.fixture
def local(grouped):
    model = Local(EngineOptions(grouped, max_batch=1, device="cpu", cache="fp8"), name="grouped")
    yield model
    model.close()


def test_kept_replies_are_of_one_cache(local):
    assert local.identity["cache"] == "fp8"
    assert local.engine.cache.layers[0][0].dtype == torch.float8_e4m3fn


def test_what_there_is_not_is_refused(grouped):
    with refused("cache of 'int4' is not supported; use --cache int8 or fp8"):
        load_model(grouped, device="cpu", cache="int4")
    with refused("applies to a model loaded here"):
        open_target("http://127.0.0.1:1", EngineOptions(cache="int8"), input_len=4, output_len=4)
    assert cache_dtype(None) is None
