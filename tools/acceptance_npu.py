"""A day with a 910B in half an hour: one folder that says what runs there, how right and how fast,
to be sent back.

    make acceptance-npu                                    # the built-in model
    python tools/acceptance_npu.py --model R1-awq --tp 8   # and the speeds of a checkpoint, beside what was published

Every step is a process group with a time limit of its own, and the next one runs whatever became of
it: its reply lies in NAME.json, what it told in NAME.log as it goes, and summary.json and summary.md
say how each ended. After every step the folder is archived, so that what was interrupted can be sent
too. The time limits add up to 30 minutes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

QUANTKIT = (sys.executable, "-m", "quantkit")
PROMPT = "What is 12 + 7?"
SCHEMA = 1
"""Of summary.json."""
GUIDE = (
    "What a step printed lies in its name with .json or .txt, what it told besides in .log: "
    "`machine` has versions and free memory",
    "before and after a prompt, `operators` the error and the microseconds of every operator, "
    "`tokens` the built-in model's answer,",
    "`speeds` what was measured, beside the published grid.",
)


@dataclass(frozen=True)
class AcceptanceStep:
    """A command and its longest time in seconds. is_json: whether what it prints is one JSON
    object."""

    name: str
    command: tuple[str, ...]
    seconds: int
    is_json: bool = True


@dataclass(frozen=True)
class Ended:
    """How a step ended: "ok", or why not."""

    name: str
    how: str
    seconds: float


def steps(
    device: str,
    model: str | None,
    tp: int,
    program: Sequence[str] = QUANTKIT,
    python: Sequence[str] = (sys.executable,),
) -> list[AcceptanceStep]:
    """In the order of how much is lost without them. program: quantkit; python: what runs this
    file."""
    on = ("--device", device)
    greedy = ("run", "tiny-r1", "--prompt", PROMPT, "--max-new-tokens", "32", "--json")
    speeds = ("--output-len", "64", "--requests", "1", "--json")
    found = [
        AcceptanceStep("machine", (*python, __file__, "--facts", device), 90),
        AcceptanceStep("npu-smi", ("npu-smi", "info"), 20, is_json=False),
        AcceptanceStep("packages", (sys.executable, "-m", "pip", "freeze"), 20, is_json=False),
        AcceptanceStep("tokens", (*program, *greedy, *on), 120),
        AcceptanceStep("operators", (*program, "kernels", "--check", *on, "--json"), 590),
        AcceptanceStep(
            "tokens-on-cpu", (*program, *greedy, "--device", "cpu", "--backend", "reference"), 60
        ),
    ]
    tiny = ("--input-len", "128", "--concurrency", "1,8", *speeds)
    if model is not None:
        grid = (
            *("--input-len", "128,1024", "--concurrency", "1,8,32", "--output-len", "128"),
            *("--requests", "1", "--warmup", "1", "--json"),
        )
        found.append(
            AcceptanceStep("speeds", (*program, "bench", model, *on, "--tp", str(tp), *grid), 660)
        )
    found += [
        AcceptanceStep("speeds-of-tiny-r1", (*program, "bench", "tiny-r1", *on, *tiny), 110),
        AcceptanceStep(
            "ascendc",
            ("make", "-C", str(Path(__file__).parents[1]), "ascendc", f"PYTHON={sys.executable}"),
            120,
            is_json=False,
        ),
    ]
    return found


def run(step: AcceptanceStep, folder: Path) -> Ended:
    """Its standard output to NAME.json or NAME.txt, the rest to NAME.log."""
    out = folder / f"{step.name}.{'json' if step.is_json else 'txt'}"
    began = time.monotonic()
    try:
        with out.open("w") as printed, (folder / f"{step.name}.log").open("w") as told:
            code = _ended(
                subprocess.Popen(step.command, stdout=printed, stderr=told, start_new_session=True),
                step.seconds,
            )
        how = "ok" if code == 0 else f"ended with {code}"
        if code == 0 and step.is_json:
            json.loads(out.read_text())
    except subprocess.TimeoutExpired:
        how = f"not done after {step.seconds} s"
    except OSError as fault:
        how = f"could not be started: {fault}"
    except ValueError as fault:
        how = f"printed no JSON: {fault}"
    return Ended(step.name, how, round(time.monotonic() - began, 1))


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Its exit code. What it started, as the ranks of a `bench --tp 8` that hold their cards, ends
    with it, however it ends."""
    try:
        return process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def facts(device: str) -> dict[str, Any]:
    """What no command says: versions, whether a decode step is captured, whether the cube's layout
    is kept, memory around a prompt."""
    import torch
    from quantkit_kernels.torch_npu import calls, machine

    from quantkit.common.assets import builtin_model
    from quantkit.common.devices import find_device, free_bytes
    from quantkit.executor import memory_budget
    from quantkit.executor.engine import Engine
    from quantkit.executor.sampling.params import SamplingParams

    target = find_device(device)
    about: dict[str, Any] = {
        "versions": machine.describe(target)
        if target.type == "npu"
        else {"torch": torch.__version__}
    }
    if target.type == "npu":
        import torch_npu

        weight = calls.format_cast_nz(torch.ones(64, 64, dtype=torch.int8, device=target))
        about["format_of_a_cast_weight"] = torch_npu.get_npu_format(weight)
    engine = Engine.load(builtin_model("tiny-r1"), device=device, max_batch=4, max_model_len=256)
    about["free_bytes"] = {"loaded": free_bytes(target)}
    memory_budget.warm_up(engine.loaded, 128)
    about["free_bytes"]["after a prompt"] = free_bytes(target)
    done = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    about["tokens"] = [one.token_ids for one in done]
    about["why_decode_steps_are_not_captured"] = engine.runner.why_eager
    return about


def summary(folder: Path, ended: list[Ended]) -> dict[str, Any]:
    """How the steps ended, what the operators' errors are worth, whether two machines wrote the
    same, what the machine is."""
    rows = _read(folder / "operators.json").get("rows", [])
    texts = [_read(folder / f"{name}.json").get("text") for name in ("tokens", "tokens-on-cpu")]
    machine = _read(folder / "machine.json")
    return {
        "schema": SCHEMA,
        "versions": machine.get("versions", {}),
        "why_decode_steps_are_not_captured": machine.get("why_decode_steps_are_not_captured"),
        "steps": [
            {
                **asdict(one),
                "told": "" if one.how == "ok" else _last_words(folder / f"{one.name}.log"),
            }
            for one in ended
        ],
        "operators": len(rows),
        "operators_out_of_tolerance": [
            f"{row['operator']} of {row['backend']}, {row['case']}"
            for row in rows
            if row["error"] > row["tolerance"]
        ],
        "same_text_as_on_cpu": texts[0] == texts[1] if None not in texts else None,
    }


def _last_words(path: Path) -> str:
    """Of what a step told, three lines at most; a command that says why it ended says so last, and
    make only that it did."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    told = [line.strip() for line in lines if line.strip() and not line.startswith("make")]
    return " ".join(told[-3:])[-200:]


def _read(path: Path) -> dict[str, Any]:
    """An object that a step printed; empty where it printed none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def accept(folder: Path, chosen: list[AcceptanceStep]) -> dict[str, Any]:
    """Run every step and write the summary, again after each: what was interrupted is told too."""
    folder.mkdir(parents=True, exist_ok=True)
    ended: list[Ended] = []
    told: dict[str, Any] = {}
    for step in chosen:
        sys.stderr.write(f"{step.name} ... ")
        sys.stderr.flush()
        ended.append(run(step, folder))
        sys.stderr.write(f"{ended[-1].how}, {ended[-1].seconds} s\n")
        told = summary(folder, ended)
        (folder / "summary.json").write_text(json.dumps(told, indent=1))
        (folder / "summary.md").write_text(_page(told))
        _archive(folder)
    return told


def archive_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.gz")


def _archive(folder: Path) -> None:
    """The folder as one file next to it, whole at any moment."""
    partial = archive_of(folder).with_suffix(".part")
    with tarfile.open(partial, "w:gz") as archive:
        archive.add(folder, folder.name)
    partial.replace(archive_of(folder))


def _page(told: dict[str, Any]) -> str:
    lines = [
        "# Acceptance on an NPU",
        "",
        "| step | ended | seconds | its last words, where it failed |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one['name']} | {one['how']} | {one['seconds']} | {one['told'].replace('|', '/')} |"
        for one in told["steps"]
    ]
    lines += ["", *GUIDE]
    lines += [
        "",
        "Versions: "
        f"{', '.join(f'{name} {version}' for name, version in told['versions'].items()) or 'not known'}.",
    ]
    why = told["why_decode_steps_are_not_captured"]
    captured = {None: "not known whether captured", "": "captured"}.get(why, f"not captured: {why}")
    lines += ["", f"Decode steps: {captured}."]
    bad = told["operators_out_of_tolerance"]
    lines += [
        "",
        f"{told['operators']} operators measured, {len(bad)} out of "
        f"tolerance{': ' if bad else ''}{'; '.join(bad)}.",
    ]
    same = {True: "the same as", False: "not the same as", None: "not known beside"}[
        told["same_text_as_on_cpu"]
    ]
    lines += [
        "",
        f"The built-in model's answer: {same} the reference's on the CPU.",
        "",
        "Send back the archive next to this folder, by an issue made from the template `Ascend`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("acceptance-npu"))
    parser.add_argument("--model", help="a checkpoint whose speeds are measured too")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="npu")
    parser.add_argument("--facts", metavar="DEVICE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.facts:
        print(json.dumps(facts(asked.facts)))
        return
    told = accept(asked.out, steps(asked.device, asked.model, asked.tp))
    sys.exit(any(one["how"] != "ok" for one in told["steps"]))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
