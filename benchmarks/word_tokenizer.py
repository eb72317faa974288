"""A tokenizer of whole words, for models with made-up weights whose speed is measured.

The words of `quantkit bench`'s prompts are a token each, so that a prompt has as many tokens as
were asked for, and every other id is a
word too: any token that such a model says can be told, and its arrival seen.
"""

import json

from tokenizers import Tokenizer, models, pre_tokenizers

from quantkit.evaluation.speed.endpoint import WORDS

_SPECIAL = ("<s>", "</s>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_word_tokenizer(path, vocab_size):
    """tokenizer.json and its settings, in place of those that are there."""
    names = [*_SPECIAL, *WORDS]
    names += [f"w{number}" for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[-1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "pad_token": _SPECIAL[1],
        "unk_token": names[-1],
        "chat_template": _TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
