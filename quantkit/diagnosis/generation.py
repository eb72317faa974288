"""Numbers of tokens and settings of sampling, in config.json and generation_config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey

FILE = "generation_config.json"
_TOKENS = (
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
_TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, float("inf")),
    "repetition_penalty": (1e-6, 100.0),
}
"""What transformers and vLLM accept, both ends included."""
_WHOLE = ("top_k",)
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
}
"""Of transformers, which leaves out what has its default."""
_LENGTHS = ("max_new_tokens", "max_length")


def check_generation(survey: Survey, rows: int, findings: DiagnosisFindings) -> None:
    """rows: of the embedding; 0 if that is not known."""
    generation = survey.settings.get(FILE, {})
    for file, values in (("config.json", survey.config), (FILE, generation)):
        outside = [f"{key} {number}" for key, number in _numbers(values) if rows and number >= rows]
        if outside:
            findings.add(
                "token-outside", file, f"{', '.join(outside)}: the embedding has {rows} rows"
            )
    wrong = [
        key for key, (low, high) in _RANGES.items() if _is_outside(generation.get(key), low, high)
    ]
    wrong += [key for key in _WHOLE if isinstance(generation.get(key), float) and key not in wrong]
    if wrong:
        findings.add(
            "sampling-wrong",
            FILE,
            f"{', '.join(f'{key} {generation[key]!r:.40}' for key in wrong)}: engines refuse it",
        )
    ends, suppressed = ends_that_count(end_tokens(survey)), generation.get("suppress_tokens")
    if ends and isinstance(suppressed, list) and ends <= set(map(str, suppressed)):
        findings.add(
            "sampling-wrong",
            FILE,
            f"suppress_tokens has every end of a text, {', '.join(sorted(ends))}: replies never end",
        )


def compare_generation(survey: Survey, source: Survey, findings: DiagnosisFindings) -> None:
    """How the source is sampled, by its file or by transformers' defaults. Writers may leave the
    file out, or set do_sample."""
    ours, theirs = survey.settings.get(FILE), source.settings.get(FILE, {})
    if ours is None:
        return
    differ = [
        (key, ours.get(key, default), theirs.get(key, default))
        for key, default in _DEFAULTS.items()
    ]
    differ += [(key, ours.get(key), theirs.get(key)) for key in _LENGTHS]
    told = [f"{key} {mine} (source {other})" for key, mine, other in differ if mine != other]
    if told:
        findings.add("sampling-differs", FILE, ", ".join(told))


def end_tokens(survey: Survey) -> dict[str, list[Any]]:
    """Numbers of the tokens that end a text, by the file that says so; what is no number, too."""
    places = {"config.json": survey.config, FILE: survey.settings.get(FILE, {})}
    found = {}
    for name, values in places.items():
        said = values.get("eos_token_id")
        numbers = said if isinstance(said, list) else [] if said is None else [said]
        if numbers:
            found[name] = numbers
    return found


def ends_that_count(ends: Mapping[str, list[Any]]) -> set[str]:
    """Engines that read generation_config.json go by it alone. ends: as end_tokens() has them."""
    return set(map(str, ends.get(FILE) or ends.get("config.json", [])))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key in (*_TOKENS, *_TOKEN_LISTS):
        found = values.get(key)
        for number in found if isinstance(found, list) else [found]:
            if type(number) is int:
                yield key, number


def _is_outside(value: Any, low: float, high: float) -> bool:
    if value is None:
        return False
    return not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high
