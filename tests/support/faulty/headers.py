"""Faults that headers and files show: of shards and index, names and shapes, the description of the
quantization, config.json, the tokenizer and its template."""

import json
import re

import torch
from safetensors.torch import load_file, save_file

from faulty.contents import SHARD
from faulty.fault import (
    always,
    bits_of,
    codes_of,
    has_block,
    has_experts,
    has_groups,
    has_mtp,
    has_quantized_experts,
    is_fp8,
    is_quantized,
    keep,
    layers,
    listed,
    lists_plain_modules,
    of_depth,
    of_format,
    relist,
    rename,
    scale_of,
)

INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
CONFIG, SIDE = "tokenizer_config.json", "quant_model_description.json"
EOS = "<｜end▁of▁sentence｜>"


AROUND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"x": {"id": "x", "ids": [128000], "tokens": ["x"]}},
}


fault, named = of_depth("headers", always)


def breaks(what):
    """Of the written folder."""
    return lambda c: c.broken.update({"broken": what})


def config(**fields):
    return lambda c: c.config.update(fields)


def lacks(*fields):
    return lambda c: [c.config.pop(field, None) for field in fields]


def group(**fields):
    return lambda c: c.block["config_groups"]["group_0"].update(fields)


def block(**fields):
    return lambda c: c.block.update(fields)


def file(name, **fields):
    return lambda c: c.set_json(name, {**c.json(name), **fields})


def edited(name, edit):
    def apply(c):
        value = c.json(name)
        edit(value)
        c.set_json(name, value)

    return apply


def both(*parts):
    return lambda c: [part(c) for part in parts]


def template(text):
    return file(CONFIG, chat_template=text)


# --- shards and index


def edit_index(edit):
    def apply(folder):
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return breaks(apply)


def copied(change):
    """The last tensor of the second shard also in the first, changed; the index does not list the
    copy."""

    def apply(folder):
        first, second = (folder / SHARD.format(number) for number in (1, 2))
        name, tensor = list(load_file(second).items())[-1]
        save_file(load_file(first) | {name: change(tensor)}, first, metadata={"format": "pt"})

    return apply


def one_byte_inverted(tensor):
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


def copied_without_index(folder):
    copied(torch.clone)(folder)
    (folder / INDEX).unlink()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000000000\n"
for finds, name, what in (
    ("shard-missing", "shard_is_missing", lambda at: (at / SHARD.format(2)).unlink()),
    (
        "shard-damaged",
        "shard_is_cut_short",
        lambda at: (at / SHARD.format(1)).write_bytes((at / SHARD.format(1)).read_bytes()[:-1000]),
    ),
    ("index-missing", "index_is_missing", lambda at: (at / INDEX).unlink()),
    (
        "config-unreadable",
        "config_is_no_json",
        lambda at: (at / "config.json").write_text("{'model_type': "),
    ),
    (
        "shards-disagree",
        "two_shards_hold_other_shapes",
        copied(lambda tensor: tensor.reshape(1, *tensor.shape).clone()),
    ),
    ("tensor-twice", "two_shards_hold_a_tensor_and_no_index_says_which", copied_without_index),
):
    fault(finds, name, breaks(what))
of_depth("tensors", always)[0](
    "shards-disagree", "two_shards_hold_other_values", breaks(copied(one_byte_inverted))
)
fault(
    "index-wrong",
    "index_names_the_wrong_shard",
    edit_index(lambda places: places.update({next(iter(places)): SHARD.format(2)})),
)
fault(
    "index-wrong",
    "index_lists_what_is_nowhere",
    edit_index(lambda places: places.update({"model.layers.0.extra.weight": SHARD.format(1)})),
)
fault(
    "index-wrong",
    "the_index_leaves_tensors_out",
    edit_index(lambda places: [places.pop(name) for name in list(places)[3:6]]),
)
fault("index-wrong", "the_index_lists_nothing", breaks(lambda at: (at / INDEX).write_text("{}")))
fault(
    "adapter-beside",
    "an_adapter_lies_beside",
    lambda c: c.files.update(
        {"adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "some/base"}'}
    ),
)

# --- names, shapes and experts


def without(ending):
    return lambda c: keep(c, lambda name: ending not in name)


def drop_mtp(c):
    for name in c.mtp:
        del c.tensors[name]


fault("tensors-missing", "a_norm_is_lost", without("model.layers.1.input_layernorm.weight"))
fault(
    "config-field",
    "queries_are_said_to_have_no_low_rank",
    config(q_lora_rank=None),
    lambda c: bool(c.config.get("q_lora_rank")),
)


def has_head(c):
    return "lm_head.weight" in c.tensors


fault("head-missing", "the_head_is_lost", without("lm_head.weight"), has_head)
fault(
    "config-differs",
    "the_head_is_lost_and_said_to_be_tied",
    both(without("lm_head.weight"), config(tie_word_embeddings=True)),
    has_head,
    source=True,
)
fault(
    "names-wrong",
    "names_have_another_prefix",
    lambda c: rename(c, lambda name: name.replace("model.", "model.language_model.", 1)),
    # as GPTQModel 2694: model.layers for model.language_model.layers
)
fault(
    "names-wrong",
    "an_adapters_wrapper_was_kept",
    lambda c: rename(c, lambda name: f"student.base_model.model.{name}"),
    # as peft: a merged model that was saved without unloading
)
fault(
    "names-wrong",
    "names_lack_their_prefix",
    lambda c: rename(c, lambda name: name.removeprefix("model.")),
)


def mixtrals(name):
    if ".experts." in name:
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f".{old}.", f".{new}.")
    return name.replace(".mlp.experts.", ".block_sparse_moe.experts.")


fault(
    "names-wrong",
    "experts_have_mixtrals_names",
    lambda c: rename(c, mixtrals),
    has_experts,
    # as vllm 54047: block_sparse_moe.experts.w2
)


@named("experts-fused", has_experts)  # as llm-compressor 2939, vllm 40885, 54444
def experts_are_one_tensor(c):
    prefix = c.experts[0].rpartition(".")[0]
    own = [name for name in c.tensors if name.startswith(f"{prefix}.")]
    for ending in sorted({name.split(".", 6)[-1] for name in own}):
        each = [c.tensors.pop(f"{prefix}.{number}.{ending}") for number in range(len(c.experts))]
        new = ending.replace(".weight_", "_").replace(".weight", "").replace(".q", "_q")
        c.tensors[f"{prefix}.{new}"] = torch.stack(each)


@named("layers-beyond")
def config_counts_too_few_layers(c):
    c.config["num_hidden_layers"] -= 1
    if "num_nextn_predict_layers" in c.config:
        c.config["num_nextn_predict_layers"] = 0
        without(f"model.layers.{c.config['num_hidden_layers'] + 1}.")(c)


@named("tensors-missing")
def config_counts_too_many_layers(c):
    c.config["num_hidden_layers"] += 2
    c.config.pop("num_nextn_predict_layers", None)


@named("shape-wrong")
def a_plain_matrix_is_transposed(c):
    c.tensors["model.embed_tokens.weight"] = c.tensors["model.embed_tokens.weight"].T.contiguous()


@named("architecture-wrong", lambda c: c.config["model_type"] == "qwen3_moe")
def the_model_is_said_to_be_an_older_one(c):
    """It has no norms of queries and keys."""
    config(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=len(c.experts),
        intermediate_size=c.config["moe_intermediate_size"],
    )(c)


fault(
    "mtp-missing",
    "mtp_was_dropped",
    drop_mtp,
    has_mtp,
    # as llm-compressor 2735, Model-Optimizer 2141, ms-swift 7848
)
fault(
    "mtp-missing",
    "mtp_was_dropped_and_config_agrees",
    both(drop_mtp, config(num_nextn_predict_layers=0)),
    has_mtp,
    source=True,
)
fault(
    "mtp-incomplete",
    "mtp_lost_its_projection",
    lambda c: keep(c, lambda name: name not in c.mtp or not ("eh_proj" in name or "hnorm" in name)),
    has_mtp,
    # as vllm 52111
)
fault(
    "mtp-not-announced",
    "mtp_is_stored_and_not_announced",
    config(num_nextn_predict_layers=0),
    has_mtp,
    # as sglang 34807
)


# --- the description of the quantization, and parts of a linear


@named("description-missing", has_block)  # as vllm 39256
def quantization_config_is_lost(c):
    del c.config["quantization_config"]
    c.files.pop("hf_quant_config.json", None)


@named("description-wrong", has_block)
def another_format_is_said(c):
    said = {"bits": 4, "group_size": 128}
    awq = {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    gptq = {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    c.config["quantization_config"] = said | (gptq if c.format.name == "awq" else awq)
    c.files.pop("hf_quant_config.json", None)


fault(
    "nothing-quantized",
    "everything_is_plain",
    lambda c: [c.plain(module) for module in list(c.linears)],
    has_block,
)


@named("group-size-wrong", has_groups)
def another_group_size_is_said(c):
    bits_of(c)["group_size"] *= 2


fault(
    "part-missing",
    "a_scale_is_lost",
    lambda c: c.tensors.pop(scale_of(c, c.linear())),
    is_quantized,
    # as vllm-ascend 4096
)
fault(
    "part-orphan tensors-missing",
    "codes_are_lost",
    lambda c: c.tensors.pop(c.linear() + c.linears[c.linear()].format.marker),
    is_quantized,
)
fault(
    "part-malformed",
    "codes_are_in_another_dtype",
    lambda c: c.tensors.update(
        {codes_of(c, c.linear()): c.tensors[codes_of(c, c.linear())].long()}
    ),
    is_quantized,
)
fault(
    "part-malformed",
    "a_scale_has_another_shape",
    lambda c: c.tensors.update({scale_of(c, c.linear()): c.tensors[scale_of(c, c.linear())][:-1]}),
    is_quantized,
)
PATTERNS = {"compressed-tensors": r"re:.*{}.*", "awq": "{}", "modelopt": "*{}*"}


def also_listed(part):
    """In the words of the format's list."""

    def apply(c):
        said = re.escape(part) if c.format.name == "compressed-tensors" else part
        relist(c, [*listed(c), PATTERNS[c.format.name].format(said)])

    return apply


fault(
    "listed-but-quantized",
    "experts_are_listed_as_plain",
    also_listed("down_proj"),
    lists_plain_modules,
    # as llm-compressor 2060: experts in the ignore list
)
fault(
    "listed-but-quantized",
    "the_router_is_listed_by_a_part_of_its_name",
    lambda c: relist(c, ["mlp.gate", "kv_b_proj", "lm_head"]),
    lambda c: c.format.name == "awq" and any(".mlp.gate_proj" in m for m in c.linears),
)


@named("plain-not-listed", lists_plain_modules)  # as vllm 45212
def a_linear_was_left_out_and_not_listed(c):
    relist(c, listed(c) or ["lm_head"])
    for ending in ("gate_proj", "up_proj", "down_proj"):
        c.plain(c.linear().rpartition(".")[0] + f".{ending}")


fault(
    "experts-mixed",
    "one_expert_was_left_plain",
    lambda c: [c.plain(m) for m in list(c.linears) if m.startswith(f"{c.experts[1]}.")],
    has_quantized_experts,
    # as GPTQModel 1680: some experts are not quantized
)


@named(
    "experts-plain",
    lambda c: has_quantized_experts(c) and any(".experts." not in m for m in c.linears),
    # as llm-compressor 2060
)
def no_expert_was_quantized(c):
    for module in [m for m in c.linears if ".experts." in m]:
        c.plain(module)
    if lists_plain_modules(c):
        also_listed(".experts.")(c)


@named(
    "siblings-mixed",
    lambda c: is_quantized(c) and any(m.endswith("mlp.gate_proj") for m in c.linears),
)
def gate_is_quantized_and_up_is_not(c):
    gate = next(m for m in c.linears if m.endswith("mlp.gate_proj"))
    c.plain(up := gate.replace("gate_proj", "up_proj"))
    if lists_plain_modules(c):
        relist(c, [*listed(c), up])


def other_bits(bits):
    def say(c):
        said = bits_of(c)
        said["num_bits" if "num_bits" in said else "bits"] = bits

    return say


for bits, name in ((3, "three_bits_are_said"), (8, "eight_bits_are_said")):
    kinds = of_format("compressed-tensors pack", "awq", "gptq")
    fault("description-wrong", name, other_bits(bits), kinds)


@named("description-wrong", has_block)
def the_method_is_misspelt(c):
    c.block["quant_method"] += "-x"
    c.files.pop("hf_quant_config.json", None)


COMPRESSED, SLIM = of_format("compressed-tensors"), of_format("modelslim")
fault("listed-but-quantized", "a_group_is_for_no_module", group(targets=[]), COMPRESSED)
fault(
    "listed-but-quantized",
    "the_group_is_for_attention_alone",
    group(targets=[r"re:.*self_attn.*"]),
    COMPRESSED,
)
fault(
    "group-size-wrong part-malformed",
    "groups_are_said_to_be_channels",
    lambda c: bits_of(c).update(strategy="channel", group_size=None),
    lambda c: has_groups(c) and c.format.name == "compressed-tensors",
)
fault(
    "descriptions-disagree",
    "modelopts_two_files_disagree",
    edited("hf_quant_config.json", lambda side: side["quantization"].update(exclude_modules=[])),
    of_format("modelopt"),
)
fault(
    "plain-not-listed",
    "modelslim_says_that_the_head_is_quantized",
    file(SIDE, **{"lm_head.weight": "W8A8_DYNAMIC"}),
    SLIM,
)
GPTQ = of_format("gptq")
fault("plain-not-listed", "gptq_says_that_the_head_is_quantized", block(lm_head=True), GPTQ)
fault(
    "part-missing",
    "a_scale_of_inputs_is_lost",
    lambda c: c.tensors.update(
        {f"{module}.input_scale": torch.tensor(0.01) for module in list(c.linears)[1:]}
    ),
    is_quantized,
    # as Model-Optimizer 1340: experts that were never calibrated have no input_scale
)


@named("part-orphan", lambda c: is_quantized(c) and has_experts(c))
def a_routers_scale_is_left(c):
    router = next(name for name in c.tensors if name.endswith("mlp.gate.weight"))
    c.tensors[f"{router}_scale"] = torch.ones(len(c.tensors[router]), 1)


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
fault(
    "cache-scales-missing",
    "the_cache_is_said_to_have_scales",
    block(kv_cache_scheme=CACHE),
    lambda c: has_block(c) and "config_groups" in c.block,
)
fault(
    "part-missing",
    "an_order_of_groups_is_said_and_not_stored",
    lambda c: bits_of(c).update(actorder="group"),
    of_format("compressed-tensors pack"),
)
fault("part-missing", "fp8_inputs_are_said_to_be_static", block(activation_scheme="static"), is_fp8)
fault(
    "description-unreadable",
    "an_exception_is_no_pattern",
    block(dynamic={"+:*down(": {"bits": 8}}),
    GPTQ,
)
fault(
    "listed-but-quantized",
    "fp8_linears_are_listed_as_plain",
    lambda c: c.block.update(modules_to_not_convert=[c.linear().rpartition(".")[0]]),
    is_fp8,
)
fault(
    "description-old-key",
    "the_description_has_its_old_key",
    lambda c: c.config.update(compression_config=c.config.pop("quantization_config")),
    COMPRESSED,
)
fault(
    "description-old-key",
    "an_older_description_says_otherwise",
    lambda c: c.config.update(compression_config={**c.block, "ignore": []}),
    COMPRESSED,
)
fault(
    "list-matches-nothing",
    "routers_are_listed_under_another_name",
    lambda c: relist(c, [entry.replace("mlp", "feed_forward") for entry in listed(c)]),
    lambda c: of_format("compressed-tensors", "modelopt")(c) and has_experts(c),
)
OTHER = {"W8A8_DYNAMIC": "W4A8_DYNAMIC", "W4A8_DYNAMIC": "W8A8_DYNAMIC"}
fault(
    "description-wrong",
    "modelslim_says_other_bits",
    edited(
        SIDE,
        lambda side: side.update(
            {name: OTHER[kind] for name, kind in side.items() if str(kind) in OTHER}
        ),
    ),
    SLIM,
)
fault(
    "part-missing",
    "a_cache_in_8_bits_has_no_offsets",
    lambda c: c.tensors.update(
        {
            f"model.layers.{layer}.self_attn.k_proj.kv_cache_scale": torch.full((64,), 0.02)
            for layer in layers(c)
        }
    ),
    SLIM,
    # as vllm-ascend 2144, 5630: a cache without its offsets
)


# --- config.json, generation, tokenizer and template


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}"
)
for finds, name, apply in (
    ("config-field", "the_model_type_is_lost", lacks("model_type")),
    ("config-field", "the_dtype_is_misspelt", config(torch_dtype="bf16")),
    ("config-field", "an_epsilon_is_one", config(rms_norm_eps=1.0)),
    ("class-wrong", "the_class_is_another_models", config(architectures=["GPT2LMHeadModel"])),
    ("class-missing", "no_class_is_named", lacks("architectures")),
    (
        "special-token-unknown",
        "extra_token_is_not_there",
        file(CONFIG, extra_special_tokens=["<|nowhere|>"]),
    ),
    (
        "special-token-unknown",
        "a_map_names_a_token_that_is_not_there",
        lambda c: c.files.update({"special_tokens_map.json": b'{"cls_token": "<|nowhere|>"}'}),
    ),
    (
        "token-outside",
        "a_word_that_is_not_wanted_is_no_token",
        lambda c: file(GENERATION, bad_words_ids=[[5], [c.config["vocab_size"]]])(c),
    ),
    (
        "tokenizer-too-large",
        "what_is_put_around_texts_is_no_token",
        file("tokenizer.json", post_processor=AROUND),
    ),
    (
        "special-token-unknown",
        "token_of_a_role_is_not_there",
        file(CONFIG, image_token={"content": "<|nowhere|>"}),
    ),
    (
        "eos-outside",
        "eos_is_no_token",
        lambda c: c.config.update(eos_token_id=c.config["vocab_size"] + 5),
    ),
    (
        "eos-differs eos-lost",
        "eos_is_another_token",
        both(
            config(eos_token_id=7),
            lambda c: c.files.pop(GENERATION, None),
            file(CONFIG, eos_token=EOS),
        ),
    ),
    (
        "eos-lost",
        "no_file_ends_a_text",
        both(
            lacks("eos_token_id"),
            lambda c: c.files.pop(GENERATION, None),
            file(CONFIG, eos_token=EOS),
        ),
    ),
    ("eos-differs", "generation_ends_with_another_token", file(GENERATION, eos_token_id=9)),
    (
        "token-outside",
        "texts_are_filled_up_with_no_token",
        lambda c: file(GENERATION, pad_token_id=c.config["vocab_size"] + 3)(c),
    ),
    (
        "sampling-wrong",
        "temperature_is_negative",
        file(GENERATION, do_sample=True, temperature=-1.0),
    ),
    (
        "sampling-wrong",
        "every_end_of_a_text_is_suppressed",
        file(GENERATION, eos_token_id=1, suppress_tokens=[0, 1]),
    ),
    ("tokenizer-missing", "the_tokenizer_is_missing", lambda c: c.files.pop("tokenizer.json")),
    (
        "tokenizer-broken",
        "the_tokenizer_is_cut_short",
        lambda c: c.files.update({"tokenizer.json": c.files["tokenizer.json"][:500]}),
    ),
    (
        "tokenizer-broken",
        "a_merge_is_of_no_tokens",
        edited("tokenizer.json", lambda t: t["model"].update(merges=[["zzzz", "yyyy"]])),
    ),
    (
        "template-broken",
        "a_file_that_is_a_pointer_hides_the_template",
        lambda c: c.files.update({"chat_template.jinja": POINTER.encode()}),
    ),
    (
        "template-broken",
        "the_template_leaves_out_what_is_said",
        template("{{ bos_token }}{% if add_generation_prompt %}Assistant:{% endif %}"),
    ),
    (
        "template-broken",
        "the_template_uses_an_unknown_filter",
        template("{% for m in messages %}{{ m['content'] | aloud }}{% endfor %}"),
    ),
    ("template-broken", "the_template_asks_for_no_answer", template(_CHATML)),
    (
        "template-broken",
        "the_template_leaves_out_answers",
        template(
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
            "{% endfor %}"
        ),
    ),
    (
        "template-broken",
        "no_template_of_several_is_the_default",
        file(CONFIG, chat_template=[{"name": "rag", "template": "x"}]),
    ),
    (
        "template-foreign",
        "the_template_is_another_familys",
        template(
            _CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
    ),
    (
        "templates-disagree",
        "two_files_have_other_templates",
        both(
            template("{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}"),
            lambda c: c.files.update(
                {
                    "chat_template.jinja": b"{% for m in messages %}"
                    b"{{ '<' + m['content'] + '>' }}{% endfor %}"
                }
            ),
        ),
    ),
):
    fault(finds, name, apply)
for finds, name, apply in (
    (
        "config-differs",
        "rope_is_lost",  # a score that fell without an error
        both(lacks("rope_scaling"), config(rope_theta=500.0)),
    ),
    ("sampling-differs", "texts_end_after_twenty_tokens", file(GENERATION, max_new_tokens=20)),
    (
        "tokenizer-differs",
        "letters_are_lowered",
        file("tokenizer.json", normalizer={"type": "Lowercase"}),
    ),
    ("tokenizer-differs", "tokens_are_not_joined_again", file("tokenizer.json", decoder=None)),
    ("tokenizer-differs", "an_end_is_put_after_every_text", file(CONFIG, add_eos_token=True)),
    ("text-cut", "texts_are_said_to_be_short", file(CONFIG, model_max_length=128)),
):
    fault(finds, name, apply, source=True)


@named("tokenizer-too-large")
def the_tokenizer_is_of_another_model(c):
    names = (f"<more{number}>" for number in range(c.config["vocab_size"]))
    edited(
        "tokenizer.json",
        lambda t: [t["model"]["vocab"].update({one: len(t["model"]["vocab"])}) for one in names],
    )(c)


def share_a_number(tokenizer):
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one] = vocab[other]


def add_token(tokenizer):
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"].append(first | {"content": "<|tool|>", "id": 50})


def lone_shard(folder):
    (folder / "model.safetensors.index.json").unlink()
    (folder / SHARD.format(2)).unlink()


def lora(c):
    c.tensors["model.layers.0.self_attn.o_proj.lora_magnitude_vector"] = torch.ones(256)


fault("tokenizer-broken", "two_tokens_share_a_number", edited("tokenizer.json", share_a_number))
fault("tokenizer-broken", "an_added_token_has_a_words_number", edited("tokenizer.json", add_token))
fault("shard-missing", "a_shard_of_two_is_alone", breaks(lone_shard))
fault("tensors-unknown", "an_adapter_was_not_merged", lora)


@named("tokenizer-broken")
def two_files_number_tokens_otherwise(c):
    first, second = c.json("tokenizer.json")["added_tokens"][:2]
    ids = {
        str(one["id"]): {"content": other["content"]}
        for one, other in ((first, second), (second, first))
    }
    file(CONFIG, added_tokens_decoder=ids)(c)


def has_template(c):
    return "chat_template" in c.json(CONFIG)


fault(
    "template-missing",
    "the_template_is_lost",
    edited(CONFIG, lambda said: said.pop("chat_template")),
    has_template,
    source=True,
)
