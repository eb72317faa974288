"""Models in GGUF files: dequantized to BF16 into a folder of the user's cache, as transformers reads
them."""

import hashlib
import math
import tempfile
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import psutil

from quantkit.common.atomic_write import sync_tree
from quantkit.common.errors import QuantkitError

_TOKENIZERS = {"default", "gpt-2", "gpt2"}
"""Pre-tokenizers (tokenizer.ggml.pre) that are GPT-2's, as transformers assumes of others, too."""
_BYTES_OF_VALUE, _BYTES_OF_LARGEST = 4, 8
"""Of memory: 3.1 to 3.7 bytes a value were measured in all, of any kind of file (189 million values;
F32, F16, Q8_0, Q4_0). The largest tensor is in float32 meanwhile, twice where it is permuted."""
_INSTEAD = "give the safetensors checkpoint that the file was made of"


def unpack(path: Path) -> Path:
    """The folder with config.json, model.safetensors in BF16 and the tokenizer of a GGUF file; made
    once, in the user's cache.

    A tokenizer.json next to the file is preferred to its own vocabulary. Raises QuantkitError for a
    file that transformers cannot read, or whose text is split in an unknown way.
    """
    from quantkit_kernels.compiled import cache_directory  # the package imports torch

    status = path.stat()
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    target = cache_directory() / "gguf" / hashlib.sha256(key).hexdigest()[:12] / path.stem
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "model"
            dequantize(path, made)
            sync_tree(made)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # another process made it meanwhile
                    raise
    return target


def dequantize(path: Path, folder: Path) -> None:
    """Write the files of `unpack` into `folder`. Raises as it does."""
    import torch

    try:
        from transformers import AutoModelForCausalLM, GgufConfig, modeling_gguf_pytorch_utils
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
        from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise QuantkitError(
            f"{path} needs transformers 5.23 or newer", "pip install -U transformers"
        ) from error
    disable_progress_bar()
    # Its own bar of the reader is drawn all the same.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    try:
        metadata, _ = read_gguf_metadata(str(path))
        sizes = [math.prod(tensor.shape) for tensor in GgufHeader.from_file(str(path)).tensors]
    except Exception as error:
        raise QuantkitError(f"{path} cannot be read as GGUF ({error})", _INSTEAD) from error
    tokenizer = _tokenizer(path, metadata, GGUF_PRE_TOKENIZER_SPLITS)
    needed = _BYTES_OF_VALUE * sum(sizes) + _BYTES_OF_LARGEST * max(sizes, default=0)
    free = psutil.virtual_memory().available
    if needed > free:
        raise QuantkitError(
            f"{path} takes about {needed / 2**30:.1f} GiB of memory to dequantize, and "
            f"{free / 2**30:.1f} GiB are free",
            _INSTEAD,
        )
    warnings.warn(
        f"{path.name} is dequantized to BF16; what its own quantization lost stays lost",
        stacklevel=2,
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except Exception as error:
        raise QuantkitError(f"{path}: transformers cannot read it ({error})", _INSTEAD) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(path: Path, metadata: dict[str, Any], splits: Container[str]) -> Any:
    """splits: ways to split text that transformers knows."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    if (path.parent / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(path.parent)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    split = metadata.get("tokenizer.ggml.pre", "default")
    if split == "smollm":  # GPT-2's, with a token for each digit
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    elif (
        metadata.get("tokenizer.ggml.model") == "gpt2"
        and split not in splits
        and split not in _TOKENIZERS
    ):
        raise QuantkitError(
            f"{path} splits text as {split}, which transformers does not know",
            f"put the model's tokenizer.json and tokenizer_config.json next to it, or {_INSTEAD}",
        )
    return tokenizer
