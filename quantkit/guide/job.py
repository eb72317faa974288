"""The steps of `quantkit go`. Each runs once: its result is stored in go.json, and a run that was
stopped resumes with the next step.

quantize   the checkpoint, which itself resumes from its last work unit
measure    perplexity and KL against the source, on text not used for calibration
score      tasks, against the source, if requested; replies are stored as they arrive
launch     the commands that serve it
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quantkit import api
from quantkit.calibrate.data import OWN_TEXT, SHIPPED_TEXT, load_sequences
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.hub import find_model, model_basename
from quantkit.checkpoint.output_dir import MANIFEST, partial_path
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.atomic_write import write_atomic
from quantkit.common.devices import default_dtype, find_device, free_bytes
from quantkit.common.progress import OnEvent, ignore_event
from quantkit.common.result import JsonObject, Result
from quantkit.common.sizes import format_bytes
from quantkit.deploy.launch import deploy
from quantkit.evaluation.distance.perplexity import Report as TextReport
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import EvaluateOptions, PerplexityOptions
from quantkit.evaluation.run import Report as EvalReport
from quantkit.evaluation.run import run_evaluation
from quantkit.grids.schemes import find_scheme
from quantkit.guide.options import QUANTKIT, GoOptions
from quantkit.guide.record import Agreed, Record
from quantkit.models import is_known
from quantkit.planning.devices import Devices
from quantkit.quantization.model_text import SELF, text_path, with_own_text
from quantkit.quantization.options import QuantizeOptions
from quantkit.quantization.report import judge, read_findings
from quantkit.quantization.request import NO_MIXTURE, read_scheme
from quantkit.tokenizer.chat import ChatTokenizer

STEPS = ("quantize", "measure", "score", "launch")
DOCUMENTS = 24
"""Documents to measure on, of at most the recipe's seq_len tokens each."""
_CONCURRENCY = 32
_RECORDED = ("scheme", "engine", "calibration", "samples", "seq_len")
"""Options of quantize that go.json always has, null where they were not given."""
_UNRECORDED = ("device", "memory", "overwrite")
"""Options on which no result depends."""


@dataclass(frozen=True)
class GoRequest:
    """`quantkit go`, with the devices of `options` read and the output folder chosen."""

    model: str
    out: Path
    box: Devices
    options: GoOptions = GoOptions()

    @property
    def scheme(self) -> str | None:
        """The one that is given, by name, by the recipe or by mixed precision, as for quantize."""
        chosen, _, mixture = read_scheme(self.options.scheme, self.options)
        named = self.options.scheme or self.options.recipe or mixture != NO_MIXTURE
        return chosen.name if named else None

    def record(self) -> JsonObject:
        """What go.json stores, and a resumed run must match."""
        options, other = self.options, {}
        for one in fields(QuantizeOptions):
            value = getattr(options, one.name)
            if one.name not in (*_RECORDED, *_UNRECORDED) and value != one.default:
                other[one.name] = str(value)
        return {
            "model": self.model,
            "devices": f"{self.box.count} x {self.box.memory_bytes} bytes ({self.box.device})",
            **{name: getattr(options, name) for name in _RECORDED},
            **other,
        }

    @property
    def scored(self) -> str:
        return f"{self.options.limit} problems of {', '.join(self.options.scored_tasks)}"

    def recipe(self, scheme: str, source: Path) -> Recipe:
        """The scheme's recipe with the options given, and the text to calibrate on."""
        recipe = read_scheme(scheme, self.options)[1].with_given(seed=self.options.seed)
        return api.load_settings(source, recipe, calibration=self.options.calibration)


@dataclass(frozen=True)
class Listeners:
    """Callbacks: a step begins or is already done; work units; measured tokens; replies."""

    step: Callable[[str, str], None] = lambda name, text: None
    units: OnEvent = ignore_event
    text: TextReport | None = None
    replies: EvalReport | None = None
    notice: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, repr=False)
class Outcome(Result):
    """The result. quality, scores: as in go.json. launch: the commands of every machine, as a
    script."""

    model: Path
    scheme: str
    engine: str
    verdict: str
    quality: JsonObject
    scores: JsonObject
    problems: tuple[str, ...]
    launch: tuple[str, ...]
    scripts: tuple[Path, ...]

    def to_json(self) -> JsonObject:
        return {
            **vars(self),
            "model": str(self.model),
            "scripts": [str(path) for path in self.scripts],
        }

    @property
    def heading(self) -> str:
        return f"{self.model} as {self.scheme}, for {self.engine}"

    def facts(self) -> list[tuple[str, str]]:
        rows = [("verdict", self.verdict)]
        if "ppl" in self.quality:
            rows.append(
                (
                    "perplexity",
                    f"{self.quality['ppl']:.4f}, the source's {self.quality['baseline_ppl']:.4f}",
                )
            )
        rows.append(("measured on", self.quality["on"]))
        rows += [(name, text) for name, text in self.scores.items()]
        rows += [("problem", text) for text in self.problems]
        return [
            *rows,
            ("report", str(self.model / "report.html")),
            *(("launch", str(path)) for path in self.scripts),
        ]


class GuidedJob:
    """One job in its folder. record: of that folder, which this process has locked."""

    def __init__(
        self, request: GoRequest, choice: Agreed, record: Record, listeners: Listeners
    ) -> None:
        self.request, self.choice, self.record, self.listeners = request, choice, record, listeners
        self.name = f"{model_basename(request.model)}-{choice.scheme}"
        self.target = request.out.absolute() / self.name

    def run(self) -> Outcome:
        """Run every unfinished step. Raises QuantkitError as the steps do; finished steps stay
        finished."""
        self.listeners.step(
            "download", "" if Path(self.request.model).expanduser().is_dir() else self.request.model
        )
        source = find_model(self.request.model)
        recipe = self.request.recipe(self.choice.scheme, source)
        self._quantize(source, recipe)
        quality = self._step("measure", lambda: self._measure(source, recipe))
        scores = (
            self._step("score", lambda: self._score(source), self.request.scored)
            if self.request.options.scored_tasks
            else {}
        )
        launched = self._step("launch", self._launch, f"context {self.request.options.context}")
        verdict = judge(
            quality["kl"], quality["top1_agree"], quality["tokens"], quality.get("plain_kl")
        )
        scripts = tuple(self.target.parent / name for name in launched["scripts"])
        texts = tuple(path.read_text(encoding="utf-8") for path in scripts)
        return Outcome(
            self.target,
            self.choice.scheme,
            self.choice.engine,
            verdict.sentence,
            quality,
            scores,
            tuple(launched["problems"]),
            texts,
            scripts,
        )

    def _step(self, name: str, work: Callable[[], JsonObject], of: str = "") -> JsonObject:
        """The step's result, stored or new. of: settings that it depends on besides the
        record's."""
        before = self.record.done(name)
        if before is not None and before["of"] == of:
            self.listeners.step(name, f"done {self.record.when(name)}")
            return dict(before["found"])
        self.listeners.step(name, "")
        found = work()
        self.record.finish(name, {"of": of, "found": found})
        return found

    def _quantize(self, source: Path, recipe: Recipe) -> None:
        """A complete output is recognized as such, an incomplete one resumes."""
        self.listeners.step("quantize", "")
        engine = None if self.choice.engine == QUANTKIT else self.choice.engine
        options = replace(self.request.options, engine=engine)
        if options.calibration is None and self._writes_text(source, recipe):
            options = replace(options, calibration=SELF)
        report = api.quantize(
            source,
            self.target,
            self.choice.scheme,
            options=options,
            on_event=self.listeners.units,
        )
        made = hashlib.sha256((self.target / MANIFEST).read_bytes()).hexdigest()
        before = self.record.done("quantize")
        if before is not None and before["manifest"] != made:
            self.record.undo(STEPS[1:])  # they belong to another output
        if report.done_already and before is not None:
            self.listeners.step("quantize", f"done {self.record.when('quantize')}")
            return
        self.record.finish(
            "quantize",
            {"manifest": made, "seconds": round(report.seconds, 1), "bytes": report.output_bytes},
        )

    def _writes_text(self, source: Path, recipe: Recipe) -> bool:
        """Whether the model writes half of the calibration text; an interrupted run goes on as it
        began."""
        if text_path(self.target).is_file() or (self.target / SHIPPED_TEXT).is_file():
            return True
        if self.target.exists() or partial_path(self.target).exists():
            return False
        checkpoint = Checkpoint.open(source)
        return writes_text(self.request, recipe, checkpoint.config, _run_bytes(source))

    def _measure(self, source: Path, recipe: Recipe) -> JsonObject:
        """Run both models, one after the other, if they fit in memory; else use what the run found
        layer by layer."""
        held_out = read_findings(self.target).next_token
        needed, there = _run_bytes(source), free_bytes(find_device("auto"))
        if needed > there and held_out:
            tokens = int(held_out["tokens"])
            reason = (
                f"the source needs {format_bytes(needed)} to run, and {format_bytes(there)} "
                "are free"
            )
            return dict(held_out) | {
                "tokens": tokens,
                "on": f"{tokens:,} held-out tokens, while quantizing: {reason}",
            }
        text = read_calibration_text(source, recipe)
        quality = measure(
            str(self.target),
            list(text.documents),
            PerplexityOptions(baseline=str(source)),
            progress=self.listeners.text,
        )
        found = quality.to_json()
        if "plain_kl" in held_out:  # on other tokens, so as a share
            found["plain_kl"] = (
                quality.kl * held_out["plain_kl"] / held_out["kl"]
                if quality.kl is not None and held_out["kl"]
                else None
            )
        return found | {"on": f"{quality.tokens:,} tokens of {text.name}"}

    def _score(self, source: Path) -> JsonObject:
        baseline = str(source) if _run_bytes(source) <= free_bytes(find_device("auto")) else None
        results = run_evaluation(
            str(self.target),
            list(self.request.options.scored_tasks),
            EvaluateOptions(
                limit=self.request.options.limit,
                baseline=baseline,
                out=self.request.out / "scores",
                concurrency=_CONCURRENCY,
            ),
            progress=self.listeners.replies,
            notice=self.listeners.notice,
        )
        return {name: _scored(task.to_json()) for name, task in results.tasks.items()}

    def _launch(self) -> JsonObject:
        """Scripts in the output folder, and problems of the engine with the checkpoint."""
        if self.choice.engine == QUANTKIT:
            cache = find_scheme(self.choice.scheme).cache
            command = [
                "quantkit",
                "serve",
                str(self.target),
                *(["--cache", cache] if cache else []),
            ]
            script = f"#!/bin/bash\n{shlex.join(command)}\n"
            return {"scripts": self._written({"launch.sh": script}), "problems": []}
        box = self.request.box
        options: JsonObject = (
            {"boxes": box.boxes} if box.boxes > 1 else {"devices": self.choice.devices}
        )
        memory = box.memory_bytes / 2**30
        made = deploy(
            self.target,
            self.choice.engine,
            device=box.device,
            context=self.request.options.context,
            memory_gib=memory,
            **options,
        )
        one = len(made.launches) == 1
        scripts = {
            "launch.sh" if one else f"launch-{launch.box}.sh": launch.script()
            for launch in made.launches
        }
        problems = [f"{found.severity}: {found.problem}; {found.remedy}" for found in made.problems]
        return {"scripts": self._written(scripts), "problems": problems}

    def _written(self, scripts: dict[str, str]) -> list[str]:
        for name, text in scripts.items():
            write_atomic(self.target.parent / name, text)
        return list(scripts)


@dataclass(frozen=True)
class CalibrationText:
    """tokens: of the text. documents: to measure on, which the run does not calibrate on; if there
    are none, those that it holds out. name: of the documents."""

    tokens: int
    documents: Sequence[Any]
    name: str


def read_calibration_text(source: Path, recipe: Recipe) -> CalibrationText:
    """The recipe's text; quantkit's own where the model writes half of it."""
    recipe = with_own_text(recipe)
    read = load_sequences(
        recipe.calibration, ChatTokenizer(source), **recipe.sizes, further=DOCUMENTS
    )
    tokens = sum(map(len, [*read.calibration, *read.held_out]))
    name = OWN_TEXT if recipe.calibration is None else Path(recipe.calibration).name
    if len(read.further) > 1:
        return CalibrationText(tokens, read.further, f"{name} that calibration did not take")
    held_out = read.held_out or read.calibration
    return CalibrationText(tokens, held_out, f"{name}, held out while quantizing")


def _run_bytes(source: Path) -> int:
    tensors = Checkpoint.open(source).tensors.values()
    return run_bytes(sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors))


def writes_text(request: GoRequest, recipe: Recipe, config: Mapping[str, Any], needed: int) -> bool:
    """Whether a model that needs so many bytes to run writes half of its calibration text: where
    the user names none, the model ships none, and it fits the device."""
    options = request.options
    if recipe.calibration or options.calibration is not None or options.memory is not None:
        return False
    return is_known(config) and needed <= free_bytes(find_device(options.device))


def run_bytes(values: int) -> int:
    """Memory to run a model of so many: each in the compute dtype, and a tenth for activations."""
    return int(1.1 * values * default_dtype(find_device("auto")).itemsize)


def _scored(task: JsonObject) -> str:
    if task["accuracy"] is None:
        return "no reply could be scored"
    spread = "" if task["stderr"] is None else f" ± {100 * task['stderr']:.1f}"
    comparison = "" if task["comparison"] is None else f"; {task['comparison']['sentence']}"
    return f"{100 * task['accuracy']:.1f} %{spread} over {task['n']} problems{comparison}"
