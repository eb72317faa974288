"""Files next to the weights that belong to a model: tokenizer, chat template, generation settings,
licence.

Any other file of a checkpoint directory is not copied.
"""

from pathlib import Path

from quantkit.common.model_files import is_there, read_file

AUX_FILES = (
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
JSON_AUX_FILES = tuple(
    name for name in AUX_FILES if name.endswith(".json") and name != "tokenizer.json"
)
"""The auxiliary files that are JSON objects."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""An engine needs one of these."""


def has_tokenizer(path: Path) -> bool:
    return any(is_there(path / name) for name in TOKENIZER_FILES)


def read_aux_files(path: Path) -> dict[str, bytes]:
    """Contents of the AUX_FILES that exist in the directory, by name. Raises QuantkitError for a
    link that leads out of it.

    A tiktoken tokenizer's Python code is included, because its split pattern is read from there.
    The code is never run.
    """
    code = (
        sorted(file.name for file in path.glob("tokenization_*.py"))
        if is_there(path / "tiktoken.model")
        else []
    )
    return {name: read_file(path / name) for name in (*AUX_FILES, *code) if is_there(path / name)}
