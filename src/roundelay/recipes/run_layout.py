"""Paths inside the run directory of a recipe. No other module of this package joins them by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import UsageError
from roundelay.metrics import run_files

LSTM = "lstm"
"""Name of the network's system: a directory of the run, and a directory below decode/."""
FIRST_PASS = "tri"
"""The system whose hypotheses speaker adaptation uses."""


@dataclass(frozen=True)
class RunLayout:
    """The directory tree of one run.

    corpus/                          a synthesized corpus
    data/SET, data/lexicon.txt …     Kaldi data directories, lexicon, text of the language model
    features/SET                     log-mel features
    mono/ tri/ sat/ lstm/            trained systems
    adapted/SET                      speaker-adapted features; adapted/decoded/SET: estimated from hypotheses
    alignments/SET  archive/         tied states per frame; the packed training examples. alignments-2 … after realignment
    network/                         the training run of the engine. network-2 … after realignment
    graph-mono/ graph-tri/           decoding graphs
    decode/SYSTEM/SET.txt            hypotheses, and scale.json
    stages/STAGE.json  log/STAGE.txt fingerprints and logs of the stages
    """

    run: Path

    # -- data and features --------------------------------------------------------------------------------------------

    @property
    def corpus(self) -> Path:
        return self.run / "corpus"

    @property
    def data(self) -> Path:
        return self.run / "data"

    def data_set(self, name: str) -> Path:
        return self.data / name

    @property
    def sets(self) -> Path:
        return self.data / "sets.json"

    def test_sets(self) -> list[str]:
        """Read the names of the test sets."""
        return list(json.loads(self.sets.read_text())["test"])

    @property
    def lexicon(self) -> Path:
        return self.data / "lexicon.txt"

    @property
    def lm_text(self) -> Path:
        return self.data / "lm.txt"

    @property
    def speed_perturbed(self) -> Path:
        return self.data / "speed_perturb"

    @property
    def features_root(self) -> Path:
        return self.run / "features"

    def features(self, name: str) -> Path:
        return self.features_root / name

    def feature_spec(self, name: str, adapted: bool) -> str:
        """Return the feature specification of a set, with the adapted features appended if `adapted`."""
        return f"{self.features(name)}+{self.adapted(name)}" if adapted else str(self.features(name))

    # -- systems and alignments ---------------------------------------------------------------------------------------

    def system(self, name: str) -> Path:
        return self.run / name

    @property
    def adapted_root(self) -> Path:
        return self.run / "adapted"

    def adapted(self, name: str) -> Path:
        return self.adapted_root / name

    @property
    def adapted_settings(self) -> Path:
        return self.adapted_root / "sat.json"

    @property
    def adapted_decoded_root(self) -> Path:
        return self.adapted_root / "decoded"

    def adapted_decoded(self, name: str) -> Path:
        return self.adapted_decoded_root / name

    def alignments(self, number: int = 1) -> Path:
        """Return the alignments of a pass; the first pass is 1."""
        return self.run / numbered("alignments", number)

    def alignment_offsets(self, alignments: Path, name: str) -> Path:
        return alignments / f"offsets-{name}.json"

    def network(self, number: int = 1) -> Path:
        """Return the training directory of a pass; the first pass is 1."""
        return self.run / numbered(run_files.NETWORK, number)

    # -- language model, decoding, results ----------------------------------------------------------------------------

    @property
    def lm_arpa(self) -> Path:
        return self.run / "lm.arpa"

    @property
    def lm_info(self) -> Path:
        return self.run / "lm.json"

    def graph(self, system: str) -> Path:
        """Return the decoding graph of a system. The network shares that of the tied states it was trained on."""
        return self.run / ("graph-mono" if system == "mono" else "graph-tri")

    @property
    def decode_root(self) -> Path:
        return self.run / "decode"

    def decode(self, system: str) -> Path:
        return self.decode_root / system

    @property
    def result(self) -> Path:
        return self.run / run_files.RESULT

    @property
    def report(self) -> Path:
        return self.run / run_files.REPORT

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    @property
    def command(self) -> Path:
        return self.run / run_files.COMMAND

    @property
    def stamps(self) -> Path:
        return self.run / run_files.STAMPS

    def stamp(self, stage: str) -> Path:
        """Return the file that marks a stage as done."""
        return self.stamps / f"{stage}.json"

    def stage_log(self, stage: str) -> Path:
        return self.run / run_files.LOG / f"{stage}.txt"

    # -- networks trained on the data of another run (benchmarks, the demo) ----------------------------------------------

    def sub_run(self, name: str) -> RunLayout:
        """Return the layout of a directory inside this run that holds another network."""
        return RunLayout(self.run / name)

    @property
    def hypotheses(self) -> Path:
        """Hypotheses of a network that a benchmark trained in BASE/GROUP/NAME; the data is that of BASE."""
        return self.run / "hypotheses"

    def base(self) -> RunLayout:
        """Return the layout of the run whose data a benchmark's sub-run uses."""
        return RunLayout(self.run.parent.parent)


def numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def archive_dir(alignments: Path) -> Path:
    """Return the directory of the packed examples that belong to a directory of alignments."""
    return alignments.resolve().with_name(alignments.name.replace("alignments", "archive"))


def hypothesis_file(directory: Path, name: str) -> Path:
    """Return the hypotheses of a set in a system's decode directory."""
    return directory / f"{name}.txt"


def scale_file(directory: Path) -> Path:
    """Return the file with the acoustic scale that the development set chose."""
    return directory / "scale.json"


def aligned_run(name: str) -> Path:
    """Return the run directory of a recipe. Raise UsageError if its alignments do not exist yet."""
    run = Path(name)
    if not RunLayout(run).alignments().is_dir():
        problem = "this run has no alignments yet" if run.is_dir() else "the run directory does not exist"
        raise UsageError(problem, where=name, hint="run the recipe first (roundelay run spoken) and name its directory")
    return run
