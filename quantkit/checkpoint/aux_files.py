"""The files beside the weights that go with a model: tokenizer, chat template, generation settings,
licence.

Everything else in a checkpoint's directory stays behind: it may be anything.
"""

from pathlib import Path

from quantkit.common.model_files import is_there, read_file

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)
SETTINGS = tuple(name for name in COMPANIONS if name.endswith(".json") and name != "tokenizer.json")
"""Those of them that are JSON objects."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""Those of them of which an engine needs one."""


def has_tokenizer(path: Path) -> bool:
    return any(is_there(path / name) for name in TOKENIZERS)


def read_companions(path: Path) -> dict[str, bytes]:
    """Contents of those COMPANIONS that the directory has, by name. Raises QuantkitError for one
    that is a link out of it.

    The code of a tokenizer in tiktoken's form goes with it: its split pattern is read there. It is
    never run.
    """
    code = (
        sorted(one.name for one in path.glob("tokenization_*.py"))
        if is_there(path / "tiktoken.model")
        else []
    )
    return {name: read_file(path / name) for name in (*COMPANIONS, *code) if is_there(path / name)}
