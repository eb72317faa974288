"""The shipped checkpoint lies on disk exactly as DeepSeek-R1 does, by make_model.py, which
tells it from R1's description and not from the exporter."""

import json
import math
import struct

import make_model
import pytest
import r1_headers

_KEYS = """
    architectures attention_bias attention_dropout aux_loss_alpha bos_token_id eos_token_id ep_size first_k_dense_replace hidden_act
    hidden_size initializer_range intermediate_size kv_lora_rank max_position_embeddings model_type moe_intermediate_size moe_layer_freq
    n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers
    num_key_value_heads num_nextn_predict_layers pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config
    rms_norm_eps rope_scaling rope_theta routed_scaling_factor scoring_func seq_aux tie_word_embeddings topk_group topk_method
    torch_dtype transformers_version use_cache v_head_dim vocab_size
"""
R1_KEYS = set(_KEYS.split())


@pytest.fixture(scope="module")
def config(tiny_r1):
    return json.loads((tiny_r1 / "config.json").read_text())


def read_headers(directory):
    """Shard name -> tensor name -> dtype and shape."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with shard.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        found[shard.name] = {
            name: (t["dtype"], tuple(t["shape"]))
            for name, t in header.items()
            if name != "__metadata__"
        }
    return found


def expected_tensors(config):
    """Every tensor of a DeepSeek-R1 checkpoint of these sizes."""
    found = {}
    for name, shape in make_model.tensor_shapes(config).items():
        kind = "F32" if name.endswith("correction_bias") else "BF16"
        if make_model.is_fp8(name):
            kind = "F8_E4M3"
            found[f"{name}_scale_inv"] = ("F32", tuple(math.ceil(size / 128) for size in shape))
        found[name] = (kind, shape)
    return found


def test_config_has_the_keys_of_r1(config):
    assert set(config) == R1_KEYS
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    routing = [config[name] for name in ("topk_method", "scoring_func", "norm_topk_prob")]
    assert routing == ["noaux_tc", "sigmoid", True]
    assert config["quantization_config"] == r1_headers.r1_config()["quantization_config"]
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["num_nextn_predict_layers"] == 1


def test_tensors_are_those_of_r1(tiny_r1, config):
    headers = read_headers(tiny_r1)
    assert len(headers) >= 3
    held = [name for shard in headers.values() for name in shard]
    assert len(held) == len(set(held))
    found = {}
    for shard in headers.values():
        found |= shard
    assert found == expected_tensors(config)
    inputs = {shape[1] for name, (dtype, shape) in found.items() if dtype == "F8_E4M3"}
    assert all(k % 128 == 0 for k in inputs)
