"""Is it still the model whose replies are kept? A server can hold another one under the same name.

One prompt is asked greedily before a run's first request, and the reply is kept; on resuming it is
asked again. A model in this process
needs none of it: its identity is a hash of its files.
"""

from collections.abc import Callable
from dataclasses import replace

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.generator import Generation, Generator, ModelReply, Prompt
from quantkit.evaluation.results.store import ReplyJournal

PROBE_TOKENS = 64
_SHOWN = 60  # characters


def check_same_model(
    generator: Generator,
    journal: ReplyJournal,
    prompt: Prompt,
    generation: Generation,
    notice: Callable[[str], None],
) -> None:
    """Raise QuantkitError where another model answers now than the one whose replies `journal`
    keeps. prompt: asked if none was yet.

    A server that does not answer alike twice cannot be distinguished from another one: that is said
    with `notice`, and the run goes on.
    """
    if generator.identity_is_certain:
        return
    shortest = min(PROBE_TOKENS, generation.max_tokens or PROBE_TOKENS)
    greedy = Generation(temperature=0.0, top_p=1.0, max_tokens=shortest, stop=generation.stop)
    if journal.probe is None:
        reply = _ask(generator, prompt, greedy)
        if reply.error is None:
            journal.add_probe(prompt, reply)
        if journal.kept:
            notice(
                "it cannot be verified whether the kept replies are this model's: none was kept "
                "that "
                "was asked greedily"
            )
        return
    before = journal.probe.reply
    now = _ask(generator, journal.probe.prompt, greedy)
    if now.error is not None or not journal.kept or _alike(before, now):
        return
    again = _ask(generator, journal.probe.prompt, greedy)
    if again.error is not None or _alike(before, again):
        return
    if not _alike(now, again):
        notice(
            f"{generator.name} does not answer alike twice at temperature 0, so the server may set "
            "a temperature of its own: "
            "whether the kept replies are this model's cannot be verified; serve it without, or "
            "give "
            "another --out"
        )
        return
    raise QuantkitError(
        f"{generator.name} is not the model whose {len(journal.kept)} replies are kept in "
        f"{journal.path.parent.parent}: "
        f"to the same prompt, greedily, it now says {_shown(now)} and said {_shown(before)}",
        "give another --out or a --model-revision of its own; --trust-kept uses the replies all "
        "the same",
    )


def _ask(generator: Generator, prompt: Prompt, greedy: Generation) -> ModelReply:
    (reply,) = generator.generate([replace(prompt, seed=0)], greedy)
    return reply


def _text(reply: ModelReply) -> str:
    return f"{reply.reasoning or ''}{reply.text}"


def _alike(one: ModelReply, other: ModelReply) -> bool:
    """Equal as far as both go: another token limit may have cut one of them earlier."""
    a, b = _text(one), _text(other)
    if one.finish_reason == other.finish_reason:
        return a == b
    return a.startswith(b) or b.startswith(a)


def _shown(reply: ModelReply) -> str:
    text = _text(reply)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
