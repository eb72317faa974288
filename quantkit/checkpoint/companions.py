"""The files beside the weights that go with a model: tokenizer, chat template, generation settings, licence.

Everything else in a checkpoint's directory stays behind: it may be anything.
"""

from pathlib import Path

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)


def read_companions(path: Path) -> dict[str, bytes]:
    """Contents of those COMPANIONS that the directory has, by name."""
    return {name: (path / name).read_bytes() for name in COMPANIONS if (path / name).is_file()}
