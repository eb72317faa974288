"""GGUF files as models: their values in BF16, and what cannot be read is refused."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from refused import refused
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from quantkit.checkpoint import gguf as reader
from quantkit.checkpoint.hub import find_model

HIDDEN, HEADS, ROWS = 64, 4, 128
TOKENS = [*sorted(ByteLevel.alphabet()), "\u0120a", "<s>", "</s>"]
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (ROWS, HIDDEN),
    "blk.0.ffn_up": (ROWS, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, ROWS),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "output_norm": (HIDDEN,),
}


def write(path, kind, split="llama-bpe"):
    """A small random Llama; returns its values as stored. path: of the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(ROWS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(["\u0120 a"])
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    random, stored = np.random.default_rng(0), {}
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape, dtype=np.float32)
        type_ = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        data = gguf.quantize(values, type_)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type_)
        stored[name] = torch.from_numpy(gguf.dequantize(data, type_)).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_values_are_those_of_the_file(tmp_path, kind):
    stored = write(tmp_path / "model.gguf", kind)
    with pytest.warns(UserWarning, match=r"model\.gguf is dequantized to BF16"):
        folder = find_model(str(tmp_path / "model.gguf"))
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], stored["token_embd"])
    layer = "model.layers.0."
    for theirs, ours in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        assert torch.equal(found[f"{layer}{ours}.weight"], stored[f"blk.0.{theirs}"])
    # llama.cpp rotates neighbours, Llama's checkpoints halves: the rows of a head are in that order.
    query = stored["blk.0.attn_q"].view(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    assert torch.equal(
        found[f"{layer}self_attn.q_proj.weight"], query.transpose(1, 2).reshape(HIDDEN, HIDDEN)
    )
    assert find_model(str(tmp_path / "model.gguf")) == folder, "it is made once"


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF nothing")
    with refused("cannot be read as GGUF"):
        find_model(str(tmp_path / "no.gguf"))
    write(tmp_path / "odd.gguf", "F16", split="never-heard-of")
    with refused(r"splits text as never-heard-of.*tokenizer\.json"):
        find_model(str(tmp_path / "odd.gguf"))
    assert not [*(tmp_path / "cache" / "quantkit" / "gguf").glob("**/config.json")]


def test_memory_is_counted_by_values_and_another_process_may_be_first(tmp_path, monkeypatch):
    write(tmp_path / "model.gguf", "F16")
    memory = SimpleNamespace(available=1 << 10)
    monkeypatch.setattr(reader.psutil, "virtual_memory", lambda: memory)
    with refused("of memory to dequantize"):
        find_model(str(tmp_path / "model.gguf"))
    memory.available = 5 * (tmp_path / "model.gguf").stat().st_size
    dequantize = reader.dequantize

    def twice(path, folder):
        monkeypatch.setattr(reader, "dequantize", dequantize)
        find_model(str(path))
        dequantize(path, folder)

    monkeypatch.setattr(reader, "dequantize", twice)
    with pytest.warns(UserWarning, match="dequantized"):
        folder = find_model(str(tmp_path / "model.gguf"))
    assert (folder / "config.json").exists()
    assert [*folder.parent.iterdir()] == [folder]
