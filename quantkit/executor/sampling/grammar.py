"""Structured output: which tokens a grammar allows next, by the library llguidance.

    text = json_schema({"type": "object"})              a grammar as text
    guide = Grammars(tokenizer, vocab_size).guide(text, after=None)
    guide.write(executor, bits, row, drafts)            before a token is sampled
    guide.advance(token)                                after it was

Grammars come with requests, so their size, their depth and the work of a step are limited.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quantkit.common.errors import QuantkitError

MAX_GRAMMAR = 128 << 10
"""Characters of a grammar."""
MAX_DEPTH = 64
"""Of nested brackets: the library parses them by recursion."""

SPACES = {"whitespace_pattern": r"(\x0A\x20{0,24}|\x20{1,2})"}
"""Options of llguidance's JSON grammars: white space between the parts of JSON, enough to indent
it."""

_SCHEMA_KEYWORDS = frozenset(
    {
        "items",
        "additionalItems",
        "prefixItems",
        "contains",
        "additionalProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    }
)
_KEYWORDS_OF_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords of a JSON schema whose values are a schema or a list of schemas, and those with schemas
by name."""

_CACHE_SIZE = 32
"""Compiled grammars."""
_LEXER_STATES, _GRAMMAR_SYMBOLS = 20_000, 100_000
"""Limits of a grammar; a state takes 1 to 2 kB."""
_NO_FORCING = '%llguidance {"no_forcing": true}'
_REMEDY = "use a grammar that llguidance supports (https://github.com/guidance-ai/llguidance)"


class GrammarError(QuantkitError):
    """A grammar that came with a request and cannot be followed to its end."""


class Grammars:
    """Compiles grammars for one tokenizer, in any thread. vocab_size: width of the logits; eos_ids:
    tokens that may end the output. The tokenizer's vocabulary is read with the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._lock = threading.Lock()
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._vocabulary: Any = None
        self._marks: frozenset[str] = frozenset()

    def guide(self, grammar: str, after: int | None) -> "Guide":
        """A guide for one output. Raises QuantkitError for an invalid grammar or one beyond the
        limits."""
        with self._lock:
            matcher = self._matchers.get(grammar)
        if matcher is None:  # compiled without the lock, which cached grammars need
            matcher = self._compiled(grammar)
        with self._lock:
            self._matchers[grammar] = matcher
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > _CACHE_SIZE:
                self._matchers.popitem(last=False)
        return Guide(matcher.deep_copy(), self._vocab_size, after, self._eos_ids)

    def _compiled(self, grammar: str) -> Any:
        library = _library()
        if len(grammar) > MAX_GRAMMAR:
            raise QuantkitError(
                f"the grammar has {len(grammar)} characters", f"give at most {MAX_GRAMMAR}"
            )
        if self._vocabulary is None:
            self._marks = self._read_marks()
            self._vocabulary = self._read_vocabulary(library)
        if any(mark in grammar.replace("\\", "") for mark in self._marks):
            grammar = _without_forcing(grammar)
        limits = library.LLParserLimits(
            max_lexer_states=_LEXER_STATES, max_grammar_size=_GRAMMAR_SYMBOLS, verbose_errors=False
        )
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise QuantkitError(f"the grammar cannot be used: {matcher.get_error()[:300]}", _REMEDY)
        started = matcher.deep_copy()
        started.compute_bitmask()
        if started.is_error():  # such as a schema that refers to nothing but itself
            raise QuantkitError(
                f"the grammar allows no first token: {started.get_error()[:300]}", _REMEDY
            )
        return matcher

    def _read_vocabulary(self, library: Any) -> Any:
        size = max(self._vocab_size, self._tokenizer.get_vocab_size())
        try:
            return library.LLTokenizer(
                self._tokenizer.to_str(), n_vocab=size, eos_token=self._eos_ids
            )
        except ValueError as fault:  # no end-of-text token, or an unsupported kind of tokenizer
            raise QuantkitError(
                f"grammars are not supported with this model's tokenizer: {fault}",
                "send no schema and no grammar",
            ) from fault

    def _read_marks(self) -> frozenset[str]:
        """Texts of added tokens, plain and JSON-escaped, without backslashes."""
        texts = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if not token.content.isspace()
        ]
        return frozenset(
            form.replace("\\", "") for text in texts for form in (text, json.dumps(text)[1:-1])
        )


@dataclass(eq=False)
class Guide:
    """Allowed next tokens of one output. after: the token after which the grammar begins; until
    then every token is allowed but `eos_ids`, as an output that ends there would not match."""

    _matcher: Any
    _vocab_size: int
    _after: int | None
    _eos_ids: Sequence[int]

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return -(-self._vocab_size // 32)

    def new_executor(self, threads: int) -> Any:
        """Threads of the library for `write`, which do not hold the interpreter lock."""
        return _library().LLExecutor(threads)

    def write(self, executor: Any, bits: np.ndarray, first: int, drafts: list[int]) -> None:
        """Write the masks of the next token after the output and after each of `drafts`: bits int32
        [rows, words] from row `first` on, one bit per token, 1 if it is allowed. Rows where all are
        allowed are not written, nor those after a draft that is not allowed, where no token is
        kept. Raises GrammarError if no token can follow.
        """
        if self._after is not None:
            started = drafts.index(self._after) + 1 if self._after in drafts else 1 + len(drafts)
            for token in self._eos_ids:
                bits.view(np.uint32)[first : first + started, token >> 5] &= np.uint32(
                    0xFFFFFFFF ^ 1 << (token & 31)
                )
            if started > len(drafts):
                return
            first, drafts = first + started, drafts[started:]
        where = (bits.ctypes.data, bits.shape[1] * 4, len(bits))
        if drafts:
            executor.unsafe_compute_mask_ptr_with_draft_token(
                [(self._matcher, first, drafts)], *where
            )
        else:
            executor.unsafe_compute_mask_ptr([(self._matcher, first)], *where)
        if self._matcher.is_error():  # its mask would end the output
            raise GrammarError(
                f"the grammar allows no next token: {self._matcher.get_error()[:300]}", _REMEDY
            )

    def advance(self, token_id: int) -> bool:
        """Advance by a sampled token. Returns whether the grammar is complete and nothing can
        follow. Raises GrammarError at a limit."""
        if self._after is not None:
            self._after = None if token_id == self._after else self._after
            return False
        if not self._matcher.consume_token(token_id):
            raise GrammarError(
                f"the output left the grammar: {self._matcher.get_error()[:300]}", _REMEDY
            )
        return bool(self._matcher.is_stopped())


def json_schema(schema: dict[str, Any]) -> str:
    """JSON of a schema. Raises QuantkitError if the schema is too large."""
    check_size(json.dumps(schema))
    text: str = _library().LLMatcher.grammar_from_json_schema(
        json.dumps(_with_known_formats(schema)), defaults=SPACES
    )
    return text


def _with_known_formats(schema: Any) -> Any:
    """The schema without formats that the library does not know, which do not restrict values (JSON
    Schema 2020-12, Validation, 7.2.1)."""
    if not isinstance(schema, dict):
        return schema
    known = {
        key: value
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or _knows_format(value)
    }
    for key, value in known.items():
        if key in _SCHEMA_KEYWORDS:
            known[key] = (
                [*map(_with_known_formats, value)]
                if isinstance(value, list)
                else _with_known_formats(value)
            )
        elif key in _KEYWORDS_OF_NAMED_SCHEMAS and isinstance(value, dict):
            known[key] = {name: _with_known_formats(one) for name, one in value.items()}
    return known


@functools.lru_cache(256)
def _knows_format(name: str) -> bool:
    matcher = _library().LLMatcher
    return not matcher.validate_grammar(
        matcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
    )


def regex(expression: str) -> str:
    """The whole output matches the expression (Rust's syntax)."""
    check_size(expression)
    text: str = _library().LLMatcher.grammar_from_regex(expression)
    return text


def choice(texts: list[str]) -> str:
    """One of `texts`."""
    # The library reads JSON strings, except that a delete character must be escaped.
    return lark(
        "start: "
        + " | ".join(
            json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts
        )
    )


def lark(grammar: str) -> str:
    """A context-free grammar in Lark's notation, as llguidance extends it."""
    check_size(grammar)
    text: str = _library().LLMatcher.grammar_from_lark(grammar)
    return text


def _without_forcing(grammar: str) -> str:
    """The grammar without forced tokens, for texts that contain an added token's, such as </think>.
    Where only one text can follow, the library forces the tokens that the tokenizer encodes it to,
    and then refuses the added token."""
    if not grammar.startswith("{"):
        return f"{_NO_FORCING}\n{grammar}"
    try:
        (part,) = json.loads(grammar)["grammars"]
        lark_grammar = part.get("lark_grammar") or f"start: %json {json.dumps(part['json_schema'])}"
    except (ValueError, TypeError, KeyError, AttributeError):  # the library reports what is wrong
        return grammar
    return f"{_NO_FORCING}\n{lark_grammar}"


def check_size(text: str) -> None:
    """Refuse what is too long or nested too deeply."""
    if len(text) > MAX_GRAMMAR:
        raise QuantkitError(
            f"the grammar has {len(text)} characters", f"give at most {MAX_GRAMMAR}"
        )
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise QuantkitError(
            f"the grammar has {deepest} nested brackets", f"use at most {MAX_DEPTH}"
        )


def _library() -> Any:
    try:
        import llguidance
    except ImportError as missing:
        remedy = "pip install llguidance on the server"
        raise QuantkitError("structured output needs the package llguidance", remedy) from missing
    return llguidance
