"""Faults of the files next to the weights: tokenizer, template, end-of-text tokens, fields of
config.json."""

from faulty.contents import Contents
from faulty.fault import fault, has_experts


@fault("tokenizer-missing")
def the_tokenizer_is_missing(c: Contents) -> None:
    del c.files["tokenizer.json"]


@fault("tokenizer-broken")
def the_tokenizer_is_cut_short(c: Contents) -> None:
    c.files["tokenizer.json"] = c.files["tokenizer.json"][:500]


@fault("tokenizer-too-large")
def the_tokenizer_is_of_another_model(c: Contents) -> None:
    tokenizer = c.json("tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"<more{number}>": len(vocab) + number for number in range(c.config["vocab_size"])}
    c.set_json("tokenizer.json", tokenizer)


@fault("eos-outside")
def eos_is_no_token(c: Contents) -> None:
    c.config["eos_token_id"] = c.config["vocab_size"] + 5


@fault("eos-differs", "eos-lost")
def eos_is_another_token(c: Contents) -> None:
    c.config["eos_token_id"] = 7
    c.files.pop("generation_config.json", None)
    described = c.json("tokenizer_config.json")
    if not described.get("eos_token"):
        described["eos_token"] = "<｜end▁of▁sentence｜>"
        c.set_json("tokenizer_config.json", described)


@fault("template-broken", suits=lambda c: "chat_template" in c.json("tokenizer_config.json"))
def the_template_does_not_parse(c: Contents) -> None:
    described = c.json("tokenizer_config.json")
    described["chat_template"] = described["chat_template"].replace("{% endif %}", "", 1)
    c.set_json("tokenizer_config.json", described)


@fault(
    "template-missing",
    suits=lambda c: "chat_template" in c.json("tokenizer_config.json"),
    source=True,
)
def the_template_is_lost(c: Contents) -> None:
    described = c.json("tokenizer_config.json")
    del described["chat_template"]
    c.set_json("tokenizer_config.json", described)


@fault(
    "config-differs", source=True, replays="a score that fell without an error: rope scaling lost"
)
def rope_is_lost(c: Contents) -> None:
    c.config.pop("rope_scaling", None)
    c.config["rope_theta"] = 500.0


@fault("config-differs", source=True)
def an_epsilon_is_another(c: Contents) -> None:
    c.config["rms_norm_eps"] = 1e-3


@fault("config-differs", source=True, suits=has_experts)
def fewer_experts_are_chosen(c: Contents) -> None:
    c.config["num_experts_per_tok"] -= 1


@fault("config-differs", source=True, suits=lambda c: "norm_topk_prob" in c.config)
def routing_weights_are_not_normalized(c: Contents) -> None:
    c.config["norm_topk_prob"] = not c.config["norm_topk_prob"]


@fault("tokenizer-broken")
def two_tokens_share_a_number(c: Contents) -> None:
    tokenizer = c.json("tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    names = list(vocab)
    vocab[names[40]] = vocab[names[41]]
    c.set_json("tokenizer.json", tokenizer)


@fault("eos-lost")
def no_file_ends_a_text(c: Contents) -> None:
    c.config.pop("eos_token_id", None)
    c.files.pop("generation_config.json", None)
    c.set_json(
        "tokenizer_config.json",
        {**c.json("tokenizer_config.json"), "eos_token": "<｜end▁of▁sentence｜>"},
    )


@fault("class-wrong")
def the_class_is_another_models(c: Contents) -> None:
    c.config["architectures"] = ["GPT2LMHeadModel"]


@fault("class-missing")
def no_class_is_named(c: Contents) -> None:
    del c.config["architectures"]


@fault("config-field")
def the_dtype_is_misspelt(c: Contents) -> None:
    c.config["torch_dtype"] = "bf16"


@fault("config-field")
def the_dtype_is_of_integers(c: Contents) -> None:
    c.config["torch_dtype"] = "int8"


@fault("config-field")
def an_epsilon_is_one(c: Contents) -> None:
    c.config["rms_norm_eps"] = 1.0


@fault("eos-outside")
def eos_is_a_text(c: Contents) -> None:
    c.config["eos_token_id"] = "</s>"


def _generation(c: Contents, **settings: object) -> None:
    c.set_json("generation_config.json", {**c.json("generation_config.json"), **settings})


@fault("eos-differs")
def generation_ends_with_another_token(c: Contents) -> None:
    _generation(c, eos_token_id=9)


@fault("token-outside")
def texts_are_filled_up_with_no_token(c: Contents) -> None:
    _generation(c, pad_token_id=c.config["vocab_size"] + 3)


@fault("sampling-wrong")
def temperature_is_negative(c: Contents) -> None:
    _generation(c, do_sample=True, temperature=-1.0)


@fault("sampling-wrong")
def every_end_of_a_text_is_suppressed(c: Contents) -> None:
    _generation(c, eos_token_id=1, suppress_tokens=[0, 1])


@fault("sampling-wrong")
def a_count_of_tokens_is_a_fraction(c: Contents) -> None:
    _generation(c, top_k=0.9)


@fault("sampling-differs", source=True)
def texts_end_after_twenty_tokens(c: Contents) -> None:
    _generation(c, max_new_tokens=20)


@fault("tokenizer-differs", source=True)
def letters_are_lowered(c: Contents) -> None:
    c.set_json("tokenizer.json", {**c.json("tokenizer.json"), "normalizer": {"type": "Lowercase"}})


@fault("tokenizer-differs", source=True)
def tokens_are_not_joined_again(c: Contents) -> None:
    c.set_json("tokenizer.json", {**c.json("tokenizer.json"), "decoder": None})


@fault("tokenizer-differs", source=True)
def an_end_is_put_behind_every_text(c: Contents) -> None:
    c.set_json("tokenizer_config.json", {**c.json("tokenizer_config.json"), "add_eos_token": True})


@fault("tokenizer-broken")
def a_merge_is_of_no_tokens(c: Contents) -> None:
    tokenizer = c.json("tokenizer.json")
    tokenizer["model"]["merges"] = [["zzzz", "yyyy"]]
    c.set_json("tokenizer.json", tokenizer)


@fault("tokenizer-broken")
def two_files_number_tokens_otherwise(c: Contents) -> None:
    first, second = c.json("tokenizer.json")["added_tokens"][:2]
    listed = {
        str(first["id"]): {"content": second["content"]},
        str(second["id"]): {"content": first["content"]},
    }
    c.set_json(
        "tokenizer_config.json", {**c.json("tokenizer_config.json"), "added_tokens_decoder": listed}
    )


def _template(c: Contents, text: str) -> None:
    c.set_json("tokenizer_config.json", {**c.json("tokenizer_config.json"), "chat_template": text})


@fault("template-broken")
def the_template_leaves_out_what_is_said(c: Contents) -> None:
    _template(c, "{{ bos_token }}{% if add_generation_prompt %}Assistant:{% endif %}")


@fault("template-broken")
def the_template_uses_an_unknown_filter(c: Contents) -> None:
    _template(c, "{% for m in messages %}{{ m['content'] | aloud }}{% endfor %}")


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}"
)


@fault("template-foreign")
def the_template_is_another_familys(c: Contents) -> None:
    _template(
        c, _CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


@fault("tokenizer-broken")
def a_file_that_is_a_pointer_hides_the_template(c: Contents) -> None:
    c.files["chat_template.jinja"] = (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4317\n"
    )


@fault("template-broken")
def the_template_asks_for_no_answer(c: Contents) -> None:
    _template(c, _CHATML)


@fault("template-broken")
def the_template_leaves_out_answers(c: Contents) -> None:
    _template(
        c,
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor "
        "%}",
    )


@fault("template-broken")
def no_template_of_several_is_the_default(c: Contents) -> None:
    c.set_json(
        "tokenizer_config.json",
        {**c.json("tokenizer_config.json"), "chat_template": [{"name": "rag", "template": "x"}]},
    )


@fault("templates-disagree")
def two_files_have_other_templates(c: Contents) -> None:
    _template(c, "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}")
    c.files["chat_template.jinja"] = (
        b"{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
    )


@fault("config-field")
def the_model_type_is_lost(c: Contents) -> None:
    del c.config["model_type"]


@fault("text-cut", source=True)
def texts_are_said_to_be_short(c: Contents) -> None:
    c.set_json(
        "tokenizer_config.json", {**c.json("tokenizer_config.json"), "model_max_length": 128}
    )
