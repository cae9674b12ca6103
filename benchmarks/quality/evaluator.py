"""One prompt after another on one model, and the records that come of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.quality import suites
from benchmarks.quality.measure import Measured, PromptRun
from benchmarks.quality.methods import FULL, Method
from benchmarks.quality.prompts import PromptBuilder
from benchmarks.quality.results import Record
from benchmarks.quality.sample import Sample
from benchmarks.report import cpu_name
from engine.encode import PrefixCache
from engine.model import Model, text_decoder

_WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is loaded from, and what results call it."""

    name: str
    folder: Path
    device: str
    dtype: str
    codec: str = "raw"  # how chunk KV is written

    def load(self, threads: int = 0) -> Model:
        """Loads the weights. threads: of this process's computations; 0 leaves torch's choice."""
        if threads:
            torch.set_num_threads(threads)
        return Model.load(self.folder, self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and the methods whose records are missing; `seconds` were spent on making the sample."""

    sample: Sample
    methods: tuple[Method, ...]
    seconds: float = 0.0


class Evaluator:
    """Computes records with one model."""

    measures: ClassVar[str] = "answers"  # what its records tell of

    def __init__(self, model: Model, name: str, chunk_tokens: int | None, codec: str = "raw") -> None:
        """`chunk_tokens` None: every text of a context is a chunk. Raises UnsupportedModel without a chat template."""
        self.model = model
        self.name = name
        self.chunk_tokens = chunk_tokens
        self.codec = codec
        self.builder = PromptBuilder(model)
        self._device = _device_name(model)
        # Each task has a prefix of its own; a cache holds a few.
        self._prefixes: dict[tuple[int, ...], PrefixCache] = {}

    def settings(self) -> dict[str, Any]:
        """All of the model and of the chunks that decides results."""
        return {
            "model": self.name,
            "fingerprint": self.model.fingerprint,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "chunk_tokens": self.chunk_tokens,
            "measures": self.measures,
            **({} if self.codec == "raw" else {"codec": self.codec}),
        }

    @property
    def machine(self) -> str:
        """What the records are measured on."""
        return f"{self._device}, {torch.get_num_threads()} threads, torch {torch.__version__}"

    @property
    def room(self) -> int:
        """Tokens of the model's window that a chat template leaves."""
        return self.model.window - self.builder.overhead

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A short pass, so that the first measured one does not pay for what comes once."""
        self.model.plain_logits(torch.arange(_WARM_UP_TOKENS) % self.model.vocab_size)

    def start(self, sample: Sample) -> PromptRun:
        """The sample's prompt on the model. Raises PromptTooLong when it does not fit."""
        prompt = self.builder(sample, self.chunk_tokens)
        prefixes = self._prefixes.setdefault(prompt.prefix, PrefixCache(self.model))
        return PromptRun(self.model, prefixes, prompt, self.codec)

    @torch.inference_mode()
    def records(self, work: Work) -> Iterator[Record]:
        """One record a method, as each is done.

        Full prefill is computed in any case, for the others are compared with it. A method that fails has a record that
        says so, and the next one goes on.
        """
        begun = time.perf_counter()
        run = self.start(work.sample)
        prepared = {"prepare": round(1000 * (work.seconds + time.perf_counter() - begun), 3)}
        wanted = {method.name for method in work.methods}
        for method in (Method(FULL), *(method for method in work.methods if method.strategy != FULL)):
            found = self._attempt(run, method)
            if method.name in wanted:
                record = self._record(work.sample, method, found)
                yield replace(record, timings={**record.timings, **prepared})
                prepared = {}

    def _attempt(self, run: PromptRun, method: Method) -> Measured | Exception:
        try:
            return run.measure(method)
        except Exception as error:  # whatever a method does wrong belongs to its results
            return error

    def blank(self, sample: Sample, method: Method) -> Record:
        """A record that says of what it is, and nothing else."""
        return Record(
            model=self.name,
            suite=sample.suite,
            task=sample.task,
            index=sample.index,
            strategy=method.strategy,
            options=method.options,
            digest=sample.digest,
            group=sample.group,
            score=0.0,
            prediction="",
            machine=self.machine,
        )

    def _record(self, sample: Sample, method: Method, found: Measured | Exception) -> Record:
        """The record of a method's answer, or of its failure."""
        blank = self.blank(sample, method)
        if isinstance(found, Exception):
            return replace(blank, error=f"{type(found).__name__}: {found}")
        begun = time.perf_counter()
        decode = text_decoder(self.model.tokenizer)
        prediction = "".join(map(decode, found.answer))
        score, more = suites.score(sample, prediction)
        timings = {**found.timings, "score": 1000 * (time.perf_counter() - begun)}
        return replace(
            blank,
            score=score,
            more=more,
            prediction=prediction,
            kl=found.kl,
            nll=found.nll,
            tokens=found.tokens,
            timings={name: round(value, 3) for name, value in timings.items()},
        )


def _device_name(model: Model) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name()
