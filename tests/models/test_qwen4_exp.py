"""Qwen3.8-Flash-Next against transformers, in float32 on tiny random models, and as it is
published."""

import make_model
import pytest
import torch
from edited import edited
from engines import load
from quantized import quantized
from refused import refused
from releases import stacked
from small_recipe import SMALL
from stated_logits import check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write
from transformers_peers import FLASH_NEXT, whole

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.executor.weights.load import load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model

CASES = TABLES["qwen4_exp_cases"]
LENGTHS = [40, 7, 1]
"""Texts longer than what is selected, about as long, and shorter."""
TOKEN_IDS = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
TOKEN_IDS[torch.tensor([5, 11, 12, 20, 43])] = 3
"""Ends of texts."""
TEXT = {**CONFIGS["qwen4_exp"]["text_config"], "indexer_n_heads": 24}
"""Of 24 heads no score is 0."""
TABLE = "model.language_model.layers.1.ple.ple_embedding"


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Under the names of the model alone, too."""
    peer, config_dict, tensors = whole({**FLASH_NEXT, **CASES[case]}, "Qwen4Exp")
    model, found, logits = check_logits(peer, config_dict, tensors, LENGTHS, TOKEN_IDS)
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    text = config_dict["text_config"]
    architecture, config, weights = opened(
        {**config_dict, "text_config": {**text, "indexer_budget": 60}}, tensors
    )
    seen = architecture.Model(config, weights)
    apart = seen.logits(seen(TOKEN_IDS, CausalContext(LENGTHS))) - logits
    assert apart.abs().max() > 1e-2, "the selection did nothing"
    flat = {name.replace("language_model.", ""): one for name, one in tensors.items()}
    architecture, config, weights = opened({**text, "model_type": "qwen4_exp_text"}, flat)
    alone = architecture.Model(config, weights)
    assert torch.equal(alone(TOKEN_IDS, CausalContext(LENGTHS)), found)


def test_the_hash_is_that_of_the_release():
    """Its numbers, as users of the release print them."""
    text = {**TEXT, "vocab_size": 248320, "ple_embed_dim": 2560, "eos_token_id": 248044}
    text |= {"ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8, "split_ngram_parts": 128}
    config = find_architecture({"model_type": "qwen4_exp"}).Config.from_dict({"text_config": text})
    sizes = config.ngrams[1]
    assert sizes.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert sizes.primes[:3] == (20000003, 20000023, 20000033)
    assert sizes.primes[-1] == 20000171
    assert sizes.part_rows == [2500012] * 128


def coded_table(path, target):
    """The model with its table in E4M3 and one scale, and with what these codes are worth."""
    source = Checkpoint.open(path)
    tensors = {name: source.read(name) for name in source.tensors}
    scale = torch.tensor([0.125], dtype=torch.bfloat16)
    codes = {
        name: (one.float() * 16).to(torch.float8_e4m3fn)
        for name, one in tensors.items()
        if ".shard_" in name
    }
    worth = {name: (one.float() * scale.float()).bfloat16() for name, one in codes.items()}
    tensors[f"{TABLE}.ngram_embedding.weight_scale"] = torch.ones(1, dtype=torch.bfloat16)
    plain = make_model.write_dense(target / "plain", source.config, tensors | worth)
    own = {f"{TABLE}.ngram_embedding.weight_scale": scale}
    return plain, make_model.write_dense(target / "coded", source.config, tensors | codes | own)


def test_a_table_in_fp8_is_looked_up_and_kept_as_it_is(tmp_path):
    """Its rows are read from the file, also in what is quantized from it."""
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    plain, coded = coded_table(path, tmp_path)
    ids = torch.arange(90)
    with torch.inference_mode():
        expected, found = (
            load_model(one, device="cpu", dtype="float32").model(ids, CausalContext([90]))
            for one in (plain, coded)
        )
    assert torch.equal(expected, found)
    recipe = Recipe(scheme="awq-w4a16", **SMALL)
    quantized(coded, tmp_path / "out", recipe)
    for folder in (coded, tmp_path / "out"):
        errors = [one for one in diagnose(str(folder)).findings.found if one.severity == "error"]
        assert not errors
    source, made = Checkpoint.open(coded), Checkpoint.open(tmp_path / "out")
    some = torch.tensor([1, 5, 15])
    shard = f"{TABLE}.ngram_embedding.shard_1.weight"
    rows, whole = source.read_rows(shard, some), source.read(shard)
    assert torch.equal(rows.view(torch.uint8), whole.view(torch.uint8)[some])
    kept = [name for name in source.tensors if "ple_embedding" in name]
    assert len(kept) == 8
    for name in kept:
        one, other = source.read(name), made.read(name)
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_other_numbers_of_the_hash_are_refused(tmp_path):
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    with edited(path / "config.json") as config:
        config["text_config"]["seed"] = 4321
    with refused("layer_multipliers"):
        load_model(path, device="cpu")


def test_the_layout_of_the_release(tmp_path):
    """Experts of a layer in two tensors, a vision tower and an MTP layer, which are copied."""
    path = write(tmp_path / "plain", "qwen4_exp")
    plain = Checkpoint.open(path)
    tensors = {name: plain.read(name) for name in plain.tensors}
    release = stacked(tensors) | {
        name: torch.randn(8, 8).bfloat16()
        for name in ("mtp.fc_hidden.weight", "model.visual.blocks.0.attn.qkv.weight")
    }
    made = make_model.write_dense(tmp_path / "out", plain.config, release)
    found = Checkpoint.open(made)
    rows = read_model(found).rows
    assert {row.name for row in rows if row.role != "copied"} == {*tensors}
    assert all(torch.equal(found.read(name), one) for name, one in tensors.items())
    assert sum(row.role == "copied" for row in rows) == 2
    with refused("keeps and does not run"):
        load(made, draft_length=1)
