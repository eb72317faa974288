"""Child process of math_equal.py: one JSON line in ({gold, answer}), one JSON line out (true or
false).

Run by path with `python -I`, so it must import nothing of quantkit. The parent owns the deadline
and kills this process past it: math-verify's own timeout needs SIGALRM in a main thread, and some
inputs hold the interpreter for minutes.
"""

import json
import resource
import sys


def equal(gold: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = [
        parse(f"${text}$", extraction_config=configs, parsing_timeout=None)
        for text in (gold, answer)
    ]
    return all(parsed) and bool(verify(parsed[0], parsed[1], timeout_seconds=None))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        # Any failure to parse or compare, a MemoryError included, means: not shown equal.
        try:
            verdict = equal(request["gold"], request["answer"])
        except Exception:
            verdict = False
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
