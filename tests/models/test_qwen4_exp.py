"""Qwen3.8-Flash-Next against transformers, in float32 on tiny random models, and over a cache,
however a text is cut."""

import json
import random

import make_model
import pytest
import torch
from cut_texts import furthest_from_whole
from engines import check_same_answers, load
from plain_weights import PlainWeights
from refused import refused
from small_recipe import SMALL
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write
from transformers_peers import FLASH_NEXT, whole
from ulp_bound import assert_near, movement

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import expand_streams, pack_streams, unpack_streams
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.run import quantize

CASES = TABLES["qwen4_exp_cases"]
LENGTHS = [40, 7, 1]
"""Texts longer than what is selected, about as long, and shorter."""
TOKEN_IDS = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
TOKEN_IDS[torch.tensor([5, 11, 12, 20, 43])] = 3
"""Ends of texts."""
TEXT = {**CONFIGS["qwen4_exp"]["text_config"], "indexer_n_heads": 24}
"""Of 24 heads no score is 0."""
TABLE = "model.language_model.layers.1.ple.ple_embedding"


def forward(config_dict, tensors):
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    return architecture, config, architecture.Model(config, PlainWeights(tensors))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Of the whole stack, and layer by layer; under the names of the model alone, too."""
    peer, config_dict, tensors = whole({**FLASH_NEXT, **CASES[case]}, "Qwen4Exp")
    architecture, config, model = forward(config_dict, tensors)

    def stated():
        return torch.cat([peer(own[None]).logits[0] for own in TOKEN_IDS.split(LENGTHS)])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, peer.parameters())
        found = model(TOKEN_IDS, CausalContext(LENGTHS))
        assert expected.abs().max() > 1
        assert_near(model.logits(found), expected, moved)
        text = {**config_dict["text_config"], "indexer_budget": 60}
        seeing_all = forward({**config_dict, "text_config": text}, tensors)[2]
        seen = seeing_all.logits(seeing_all(TOKEN_IDS, CausalContext(LENGTHS)))
        assert (seen - expected).abs().max() > 1e-2, "the selection did nothing"
        hidden = pack_streams(expand_streams(model.embedding[TOKEN_IDS], model.count), TOKEN_IDS)
        context = CausalContext(LENGTHS)
        for layer in model.layers:
            hidden = layer.feed_forward(layer.attend(hidden, context), context)
        streams = unpack_streams(hidden, model.count)[0]
        end, _ = model.end(streams, model.norm, config.rms_norm_eps)
        assert (end - found).abs().max() < 1e-4
        flat = {name.replace("language_model.", ""): one for name, one in tensors.items()}
        alone = forward({**config_dict["text_config"], "model_type": "qwen4_exp_text"}, flat)[2]
        assert torch.equal(alone(TOKEN_IDS, CausalContext(LENGTHS)), found)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    table = {row.name: row.shape for row in architecture.parameters(config) if not row.optional}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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


def test_a_text_is_the_same_however_it_is_cut(tmp_path, monkeypatch):
    """Keys are cached as they are, not in 16 bits, by which experts would change."""
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    loaded = load_model(path, device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


def test_answers_do_not_depend_on_how_they_are_computed(tmp_path):
    """Prompts in chunks and beside steps, requests that make way for others, captured steps."""
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    check_same_answers(path, (True, {}))


def test_a_cache_of_codes_is_as_it_is_simulated(tmp_path, monkeypatch):
    for user in ("executor.weights.load", "models.context"):
        monkeypatch.setattr(f"quantkit.{user}.cached_dtype", lambda dtype: dtype)
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    loaded = load_model(path, device="cpu", dtype="float32", cache="int8")
    found = furthest_from_whole(loaded, random.Random(4), loaded.codes)
    with torch.inference_mode():
        text = torch.arange(90)
        plain, coded = (
            loaded.model(text, CausalContext([90], codes=codes)) for codes in (None, loaded.codes)
        )
    assert found < 1e-2 < (plain - coded).abs().max()


def test_drafts_and_shared_beginnings_are_refused(tmp_path):
    path = write(tmp_path / "model", "qwen4_exp")
    for options, reason in (
        ({"draft_length": 1}, "MTP"),
        ({"prompt_lookup": 2}, "rolled back"),
        ({"prefix_cache": True}, "prefix-cache"),
    ):
        with refused(reason):
            load(path, **options)


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
    quantize(coded, tmp_path / "out", SCHEMES["awq-w4a16"], "auto", recipe, device="cpu")
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


def test_a_table_whose_file_becomes_shorter_is_named(tmp_path):
    path = write(tmp_path / "model", "qwen4_exp")
    checkpoint = Checkpoint.open(path)
    shard = f"{TABLE}.ngram_embedding.shard_1.weight"
    with (path / checkpoint.tensors[shard].shard).open("r+b") as file:
        file.truncate(1000)
    with refused("became shorter"):
        checkpoint.read_rows(shard, torch.tensor([1]))


def test_other_numbers_of_the_hash_are_refused(tmp_path):
    text = {**TEXT, "seed": 4321}
    path = write(tmp_path / "model", "qwen4_exp", text_config=TEXT)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    with refused("layer_multipliers"):
        load_model(path, device="cpu")


def test_the_layout_of_the_release(tmp_path):
    """Experts of a layer in two tensors, a vision tower and an MTP layer, which are copied."""
    path = write(tmp_path / "plain", "qwen4_exp")
    plain = Checkpoint.open(path)
    tensors = {name: plain.read(name) for name in plain.tensors}
    release = {name: one for name, one in tensors.items() if ".experts." not in name}
    for mlp in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{mlp}.experts.{n}.{side}_proj.weight"] for n in range(4)])
            for side in ("gate", "up", "down")
        )
        release[f"{mlp}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        release[f"{mlp}.experts.down_proj"] = down
    release |= {
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
