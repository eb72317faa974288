"""A rank reads its share of the file and what the ranks have in common, in every packed format, and
together they answer as one."""

import engines
import make_model
import pytest
import torch
import transformers
import transformers_peers
from engines import tokens
from guessed_models import PROMPTS, ask_ranks
from packed_model import GROUPED, write_packed, write_random
from quantkit_kernels import cpu as cpu_backend
from quantkit_kernels import silu_and_mul
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint import shards
from quantkit.checkpoint.formats import (
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    modelopt,
    modelslim,
)
from quantkit.executor.hf_engine import open_engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models.context import CausalContext

CASES = {
    "awq": (awq.FORMAT, IntGrid(4, 32, False)),
    "compressed-tensors int4": (compressed_int4.FORMAT, IntGrid(4, 32, True)),
    "compressed-tensors int8": (compressed_int8.FORMAT, IntGrid(8, None, True)),
    "modelslim int8": (modelslim.FORMAT, IntGrid(8, None, True)),
    "modelopt NVFP4": (modelopt.FORMAT, Nvfp4Grid()),
    "compressed-tensors NVFP4": (compressed_fp4.FORMAT, Nvfp4Grid()),
}


SIZE = 4


@pytest.fixture(scope="module", params=CASES)
def packed(request, tmp_path_factory):
    config = make_model.tiny_config()
    return write_packed(
        tmp_path_factory.mktemp("packed") / "model",
        config,
        make_model.random_tensors(config),
        *CASES[request.param],
    )


def load(path, rank):
    """As one of SIZE ranks, which needs no others to load."""
    return load_model(path, device="cpu", dtype="float32", parallel=Parallel(rank, SIZE))


def stored_bytes(loaded, *splits):
    """Of the tensors that the file holds of the model's parameters with these splits, but the MTP
    layer's."""
    checkpoint, found = loaded.checkpoint, 0
    for row in loaded.weights._parameters.values():
        if row.split in splits and not row.mtp:
            names = checkpoint.parts(row.module) if row.name.endswith(".weight") else (row.name,)
            found += sum(checkpoint.tensors[name].nbytes for name in names)
    return found


def test_a_rank_reads_its_share(packed, monkeypatch):
    """A quarter of what four ranks share out, beside it only the scales per channel of linears cut
    along their inputs."""
    monkeypatch.setattr(shards, "SMALLEST_PIECE", 1)
    for rank in range(SIZE):
        loaded = load(packed, rank)
        common, shared = (
            stored_bytes(loaded, "replicate"),
            stored_bytes(loaded, "column", "row", "gathered"),
        )
        assert shared > 2 * common, "most of the model is shared out"
        least = common + shared / SIZE
        assert least <= loaded.checkpoint.bytes_read < common + 1.1 * shared / SIZE


def test_shares_are_those_of_the_whole_weight(packed):
    whole = load_model(packed, device="cpu", dtype="float32")
    down, up = "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.experts.3.up_proj"
    shares = [load(packed, rank).weights for rank in range(SIZE)]
    for module, dim in ((down, 1), (up, 0)):
        assert torch.equal(
            torch.cat([share.dequantized(module) for share in shares], dim=dim),
            whole.weights.dequantized(module),
        )


@pytest.mark.parametrize(
    "packed", ["awq", "compressed-tensors int4", "modelopt NVFP4"], indirect=True
)
def test_ranks_answer_as_one(packed, tmp_path, monkeypatch):
    """Over a cache of 32 bits: where sums come in another order, 16 make other tokens likelier."""
    monkeypatch.setattr(LoadedModel, "cache_dtype", torch.float32)

    def asked(engine):
        return tokens(engine, PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))

    alone = asked(engines.load(packed, max_model_len=128))
    assert ask_ranks(2, tmp_path, packed, asked, max_model_len=128) == alone


def test_each_model_of_a_process_computes_by_its_own_backend(tmp_path, monkeypatch):
    """The one that is loaded last does not decide for the one before it, nor for what computes
    without a model."""
    by_cpu = []
    path = write_random(tmp_path / "model", GROUPED)

    def counted(operator, run):
        return lambda *given: by_cpu.append(operator) or run(*given)

    for operator in ("gqa_prefill", "silu_and_mul"):
        monkeypatch.setattr(
            cpu_backend, operator, counted(operator, getattr(cpu_backend, operator))
        )
    models = {
        asked: load_model(path, device="cpu", dtype="float32", backend=asked).model
        for asked in ("reference", "auto")
    }
    ids, found = torch.arange(5, 25), {}
    for asked in ("reference", "auto", "reference"):
        by_cpu.clear()
        with torch.inference_mode():
            found[asked] = models[asked].logits(models[asked](ids, CausalContext([len(ids)])))
        assert bool(by_cpu) == (asked == "auto"), (asked, by_cpu)
    torch.testing.assert_close(found["auto"], found["reference"], atol=1e-3, rtol=0)
    by_cpu.clear()
    silu_and_mul(torch.ones(2, 8))
    assert by_cpu == ["silu_and_mul"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_that_computes_no_numbers_is_refused(tmp_path, tp):
    """A NaN makes every logit one, and the likeliest token of these the first: answers were empty,
    and nobody was told."""
    config = make_model.tiny_config()
    tensors = make_model.random_tensors(config)
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 5] = float("nan")
    path = make_model.write_dense(tmp_path / "nan", config, tensors)
    with refused(r"nan computes logits that are not numbers in float32; quantkit check .*nan"):
        Engine.load(path, device="cpu", dtype="float32", tp=tp)


def test_a_model_of_transformers_that_computes_no_numbers_is_refused(tmp_path):
    config = transformers.GemmaConfig(**{**transformers_peers.SHARED, "head_dim": 16})
    model = transformers.GemmaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    make_model.write_tokenizer(tmp_path, 211)
    engine = open_engine(EngineOptions(tmp_path, device="cpu"))
    with refused("the model's logits are not numbers; quantkit check names the tensor"):
        list(engine.stream([5, 6], SamplingParams(max_new_tokens=2)))
