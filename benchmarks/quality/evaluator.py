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
from benchmarks.quality.suites import PromptId
from benchmarks.report import cpu_name
from engine.encode import PrefixCache
from engine.model import Model, text_decoder
from errors import PromptTooLong
from service.version import __version__

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
        threads = torch.get_num_threads()
        return f"{self._device}, {threads} threads, torch {torch.__version__}, prophetkv {__version__}"

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
        """One record a method, as each is done. Those of a prompt that does not fit the window say so."""
        begun = time.perf_counter()
        try:
            run = self.start(work.sample)
        except PromptTooLong as error:
            for method in work.methods:
                yield self.failure(work.sample, method, error)
            return
        yield from self.measured(work, run, begun)

    def measured(self, work: Work, run: PromptRun, begun: float) -> Iterator[Record]:
        """The records of a prompt that fits, whose preparation began at `begun`, of time.perf_counter().

        Full prefill is computed in any case, for the others are compared with it. A method that fails has a record that
        says so, and the next one goes on.
        """
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

    def failure(self, prompt: Sample | PromptId, method: Method, error: Exception) -> Record:
        """The record of what could not be measured."""
        return replace(self.blank(prompt, method), error=f"{type(error).__name__}: {error}")

    def blank(self, prompt: Sample | PromptId, method: Method) -> Record:
        """A record that says of what it is, and nothing else. A prompt that could not be made has its name only."""
        made = prompt if isinstance(prompt, Sample) else None
        return Record(
            model=self.name,
            suite=prompt.suite,
            task=prompt.task,
            index=prompt.index,
            strategy=method.strategy,
            options=method.options,
            digest=made.digest if made else "",
            group=made.group if made else "",
            score=0.0,
            prediction="",
            machine=self.machine,
        )

    def _record(self, sample: Sample, method: Method, found: Measured | Exception) -> Record:
        """The record of a method's answer, or of its failure."""
        if isinstance(found, Exception):
            return self.failure(sample, method, found)
        begun = time.perf_counter()
        decode = text_decoder(self.model.tokenizer)
        prediction = "".join(map(decode, found.answer))
        score, more = suites.score(sample, prediction)
        timings = {**found.timings, "score": 1000 * (time.perf_counter() - begun)}
        return replace(
            self.blank(sample, method),
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
