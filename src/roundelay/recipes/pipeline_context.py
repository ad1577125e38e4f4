"""What all stages of a recipe share: the recipe, the run directory, the number of processes, the log of a stage."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

from roundelay.recipes.config import Recipe
from roundelay.recipes.run_layout import RunLayout
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Corpus
from roundelay.speech.features.feature_store import FeatureStore
from roundelay.speech.hmm.lexicon import Lexicon

logger = logging.getLogger(__name__)
SPEECH_LOGGER = "roundelay.speech"


@dataclass
class PipelineContext:
    """A recipe and the run directory its stages write to."""

    recipe: Recipe
    run: Path
    jobs: int
    progress: str = "auto"

    @cached_property
    def layout(self) -> RunLayout:
        return RunLayout(self.run)

    def corpus(self, name: str) -> Corpus:
        return read_data_dir(self.layout.data_set(name))

    def store(self, name: str) -> FeatureStore:
        return FeatureStore.open(self.layout.features(name))

    def lexicon(self) -> Lexicon:
        return Lexicon.read(self.layout.lexicon)

    def sets(self) -> list[str]:
        """Return the names of the test sets."""
        return self.layout.test_sets()


class StageLog(logging.Handler):
    """Write the records of `roundelay.speech` to RUN/log/STAGE.txt while the context is open.

    Only warnings reach the console. When the stage ends without an error, its last record is logged again for the console.
    """

    def __init__(self, context: PipelineContext, stage: str) -> None:
        super().__init__(logging.INFO)
        self.path = context.layout.stage_log(stage)
        self.last = ""
        self._speech = logging.getLogger(SPEECH_LOGGER)

    def __enter__(self) -> StageLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._before = self._speech.level, self._speech.propagate
        self._speech.setLevel(logging.INFO)
        self._speech.propagate = False
        self._speech.addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
        self._file.write(self.last + "\n")
        self._file.flush()
        if record.levelno >= logging.WARNING:
            logger.handle(record)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._speech.removeHandler(self)
        level, self._speech.propagate = self._before
        self._speech.setLevel(level)
        self._file.close()
        if kind is None:
            logger.info("  %s", self.last.strip())


def recreate_dir(directory: Path) -> Path:
    """Delete a directory with its contents, create it again and return it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
