"""SentencePiece's tokenizer.model, converted to `tokenizers`.

Ids equal those of the SentencePiece library, including the file's treatment of spaces, bytes and
normalization. For Llama's class they equal those of transformers, which differ where a text begins
with spaces, or continues after a special token. transformers cannot do the conversion: for a class
that it does not have it ignores the file's whitespace and prefix settings, and its BPE merges are
not ordered by score.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_file
from quantkit.common.result import JsonObject

_COPY_AGAIN = "copy it from the original model"
_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def convert(file: Path, settings: JsonObject) -> tuple[Tokenizer, JsonObject]:
    """The tokenizer, and the names of special tokens in the file. settings: tokenizer_config.json,
    of which add_prefix_space and legacy are used. Raises QuantkitError where the file is damaged or
    has another format, and where the library is not installed."""
    proto = _read(file)
    llama = _is_llama(settings) and proto.trainer_spec.model_type == _BPE
    prefix = settings.get("add_prefix_space")
    prefix = (llama or proto.normalizer_spec.add_dummy_prefix) if prefix is None else bool(prefix)
    tokenizer = Tokenizer(_model(file, proto))
    steps = [] if llama else _normalizers(proto)
    if llama:  # as in transformers' class, which ignores the file's settings
        scheme = "never" if not prefix else "always" if settings.get("legacy", False) else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme=scheme, split=False
        )
    else:
        steps += [
            *([normalizers.Prepend(_SPACE)] if prefix else []),
            normalizers.Replace(" ", _SPACE),
        ]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    steps_back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps_back, decoders.Strip(content=" ", left=1)] if prefix else steps_back
    )
    for kind, add in (
        (_CONTROL, tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.add_tokens),
    ):
        found = [
            piece.piece
            for piece in proto.pieces
            if piece.type == kind and (kind == _CONTROL or _SPACE not in piece.piece)
        ]
        add([AddedToken(piece, normalized=False, special=kind == _CONTROL) for piece in found])
    return tokenizer, _special(proto)


def _is_llama(settings: JsonObject) -> bool:
    return str(settings.get("tokenizer_class")).removesuffix("Fast") in (
        "LlamaTokenizer",
        "CodeLlamaTokenizer",
    )


def _read(file: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise QuantkitError(
            f"{file} needs sentencepiece and protobuf, which are not installed",
            "pip install sentencepiece protobuf, or save tokenizer.json with transformers",
        ) from error
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(read_file(file))
    except QuantkitError:
        raise
    except Exception as error:  # depends on the version of protobuf
        raise QuantkitError(f"{file} is not a sentencepiece model: {error}", _COPY_AGAIN) from error
    if not proto.pieces:
        raise QuantkitError(f"{file} is not a sentencepiece model: it has no pieces", _COPY_AGAIN)
    return proto


def _model(file: Path, proto: Any) -> models.BPE | models.Unigram:
    pieces, trained = proto.pieces, proto.trainer_spec
    kind, unknown = trained.model_type, trained.unk_id
    if kind == _UNIGRAM:
        return models.Unigram(
            [(piece.piece, piece.score) for piece in pieces],
            unk_id=unknown,
            byte_fallback=trained.byte_fallback,
        )
    if kind != _BPE:
        raise QuantkitError(
            f"{file} holds words or characters and not pieces",
            "save tokenizer.json with transformers",
        )
    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    merges = []
    for number, piece in enumerate(pieces):
        if piece.type not in (_NORMAL, _USER_DEFINED):
            continue
        text = piece.piece
        splits = [
            (ids.get(text[:at]), ids.get(text[at:]), text[:at], text[at:])
            for at in range(1, len(text))
        ]
        pairs = sorted(split for split in splits if split[0] is not None and split[1] is not None)
        merges += [(-piece.score, number, left, right) for _, _, left, right in pairs]
    merges.sort(key=lambda one: one[:2])
    pairs_of_pieces = [(left, right) for _, _, left, right in merges]
    return models.BPE(
        ids,
        pairs_of_pieces,
        unk_token=pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=trained.byte_fallback,
    )


def _normalizers(proto: Any) -> list[Any]:
    """Normalizers applied before: the file's character map, and collapsing of spaces where the file
    asks for it."""
    spec = proto.normalizer_spec
    steps: list[Any] = (
        [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    )
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _special(proto: Any) -> JsonObject:
    """bos_token and so on, where the file has such a piece."""
    trained, pieces = proto.trainer_spec, proto.pieces
    ids = {
        "bos_token": trained.bos_id,
        "eos_token": trained.eos_id,
        "unk_token": trained.unk_id,
        "pad_token": trained.pad_id,
    }
    return {name: pieces[number].piece for name, number in ids.items() if 0 <= number < len(pieces)}
