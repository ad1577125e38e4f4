"""What a recipe says: recipe.toml, checked field by field; `section.key=value` on the command line overrides it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.errors import UsageError, did_you_mean
from roundelay.speech.decode import SCALES, DecodeOptions
from roundelay.speech.features.extract import LONGEST_S
from roundelay.speech.hmm.train_gmm import MonoOptions, SatOptions, TriOptions

FILE = "recipe.toml"
LABELS = ("transitions", "pdfs")
TOLD_BY_THE_RECIPE = ("task", "task_options", "run", "resume")
LIMITS = ("longest_s",)
"""Settings that decide what is refused, not what comes out: changing them is no reason to do a stage again."""


@dataclass(frozen=True)
class SourceConfig:
    """One corpus of a recipe."""

    kind: str = ""
    """synth, or a publisher's name: kaldi fsdd audiomnist speech_commands speechocean762 librispeech"""
    name: str = ""
    """What its sets are called in results; default: the kind. With one source they are just `test`."""
    root: str = ""
    """Its folder; a relative one is looked for in $ROUNDELAY_DATA, then beside the recipe."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the synthesizer."""


@dataclass(frozen=True)
class FeatureConfig:
    rate: int = 8000  # samples per second that features are made at: 8000 for telephone speech, 16000 otherwise
    resample: bool = True
    """Bring other rates to this one; false: another rate is an error."""
    mels: int = 40  # bands of the log-mel spectrum
    deltas: int = 2  # orders of slopes beside them: 2 makes 120 values of 40
    cmvn: str = "speaker"  # mean and variance taken out per speaker, per utterance, or none
    longest_s: float = LONGEST_S
    """An utterance that lasts longer is an error: memory holds it whole."""


@dataclass(frozen=True)
class LanguageConfig:
    """Pronunciations and the language model."""

    lexicon: str = "corpus"
    """corpus (the synthesizer writes one), espeak (generated for the words at hand), or a file beside the recipe"""
    text: str = "corpus"
    """LM text: corpus (the synthesizer's), train (the training transcripts), or a file beside the recipe"""
    order: int = 2  # of the n-gram
    isolated_words: bool = False
    """Every utterance is one word of the lexicon, all equally likely; `text` is not used."""


@dataclass(frozen=True)
class NetworkConfig:
    model: str = "small"  # roundelay list models; the fields below change it
    window: int = 21  # frames a sample has
    context: int = 0  # frames of context on both sides that are seen and not learnt from
    layers: int | None = None
    hidden: int | None = None
    bottleneck: int | None = None
    dropout: float | None = None
    spec_augment_freq: int = 0
    """Widest band of mels hidden from the network while it learns: for small corpora."""
    spec_augment_time: int = 0  # longest stretch of frames hidden likewise
    vtlp: float = 0.0
    """Frequencies are stretched by up to this share while it learns, as by throats of other lengths: for few speakers."""
    init_from: str = ""
    """Another recipe (a folder beside this one, such as ../spoken: it is run first), a run, or a model's folder: that network's
    layers but the last are where training begins. For small corpora."""
    adapted: bool = False
    """Paste features adapted to each speaker beside the log-mels; needs "sat" among the systems."""
    packed: bool = False
    """Train from an archive, packed before the first epoch: the corpus is read in long stretches, whatever its size."""
    speed: float = 0.0
    """Largest change of tempo, drawn per example and epoch (0.1: 0.9 to 1.1); only with `packed`."""
    noise: float = 0.0
    """Noise on the normalised features, as a standard deviation; only with `packed`."""

    def __post_init__(self) -> None:
        if (self.speed or self.noise) and not self.packed:
            raise UsageError(
                "speed and noise are added when examples leave an archive", where="network", hint="set packed = true"
            )
        if self.adapted and (self.spec_augment_freq or self.spec_augment_time or self.vtlp):
            raise UsageError(
                "masks and warps do not fit adapted features, which are no mels",
                where="network.adapted",
                hint="set spec_augment_freq, spec_augment_time and warp to 0, or adapted = false",
            )

    def task_kwargs(self) -> dict[str, Any]:
        """What the task is told: all that is not left to the model, and how to feed it only where it is packed."""
        told = {k: v for k, v in asdict(self).items() if v is not None and k not in ("adapted", "packed", "speed", "noise")}
        return {**told, "speed": self.speed, "noise": self.noise} if self.packed else told


@dataclass(frozen=True)
class KaldiInputs:
    """What a user of Kaldi has already; paths are relative to the recipe. Features may be pasted: "a.scp+b.scp"."""

    num_pdfs: int  # tied states: outputs of the network
    train_features: str  # scp files, pasted with +; [cmvn,deltas] behind a name
    train_alignments: str  # a folder with ali.*.gz, or a file
    dev_features: str
    dev_alignments: str
    transitions: str = ""
    """A text final.mdl, where the alignments or the graph hold transition-ids."""
    alignment_labels: str = "transitions"
    """What the alignments hold: transitions (ali.*.gz of Kaldi) or pdfs (what ali-to-pdf wrote)."""
    dev_text: str = ""
    test_features: str = ""
    test_text: str = ""
    test_utt2spk: str = ""
    graph: str = ""
    """A folder with HCLG.fst and words.txt."""
    graph_labels: str = "transitions"
    """What the graph's input labels are: transitions (Kaldi's own) or pdfs (pdf + 1)."""

    def __post_init__(self) -> None:
        for name, used in (("alignment_labels", True), ("graph_labels", bool(self.graph))):
            labels = getattr(self, name)
            if labels not in LABELS:
                raise UsageError(f"{name} cannot be '{labels}'", where="kaldi", hint=did_you_mean(str(labels), LABELS))
            if used and labels == "transitions" and not self.transitions:
                raise UsageError(
                    f"{name} is transitions, but no model says which pdf each of them has",
                    where="kaldi.transitions",
                    hint=f'name the text form of final.mdl, or set {name} = "pdfs"',
                )


@dataclass(frozen=True)
class Recipe:
    """All of it."""

    folder: Path
    title: str = ""
    seed: int = 0  # of the split into train and dev, the first weights, the order of samples
    sources: tuple[SourceConfig, ...] = ()
    dev_share: float = 0.1
    """Of the training speakers, where a corpus has no development set."""
    speed_perturb: tuple[float, ...] = ()
    """Train on copies played at these speeds, too, such as 0.9 and 1.1: for small corpora."""
    systems: tuple[str, ...] = ("mono", "tri", "lstm")
    """Which are decoded and scored; "sat", behind "tri", is the tied-state GMM in features adapted to each speaker."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    mono: MonoOptions = field(default_factory=MonoOptions)
    tri: TriOptions = field(default_factory=TriOptions)
    sat: SatOptions = field(default_factory=SatOptions)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of the engine, as `roundelay train` takes them."""
    realign_passes: int = 0
    """How often the trained network aligns the training set anew and is trained again from that."""
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    scales: tuple[float, ...] = SCALES
    """Acoustic scales tried on the development set."""
    dev_utterances: int = 200
    """For that choice."""
    kaldi: KaldiInputs | None = None
    """Instead of sources: features and alignments made elsewhere."""

    def __post_init__(self) -> None:
        if self.network.adapted and "sat" not in self.systems:
            raise UsageError(
                "the network wants features adapted to speakers, and nothing adapts them",
                where="network.adapted",
                hint='add "sat" to systems, behind "tri"',
            )
        if "sat" in self.systems and "tri" not in self.systems[: self.systems.index("sat")]:
            raise UsageError("sat adapts to what tri has recognised", where="systems", hint='put "tri" before "sat"')
        named = self.network.init_from
        if named and self.pretraining_recipe is None and not Path(named).is_dir():
            raise UsageError(
                f"there is no recipe, run or model '{named}' to start from",
                where="network.init_from",
                hint="name a recipe as seen from this one's folder; or as seen from here the run of a recipe, or a folder with "
                "model.json and model.safetensors",
            )
        if self.pretraining_recipe is not None and "init_from" in read_tree(self.pretraining_recipe / FILE).get("network", {}):
            raise UsageError(
                f"the network of '{self.pretraining_recipe.name}' begins from another one itself",
                where="network.init_from",
                hint="name a recipe whose network begins from nothing",
            )

    @property
    def pretraining_recipe(self) -> Path | None:
        """The recipe whose network this one's begins from."""
        named = self.network.init_from
        beside = (self.folder / named).resolve()
        return beside if named and (beside / FILE).is_file() else None

    def part(self, name: str) -> Any:
        """A section, or `section.key`, as plain data, for fingerprints."""
        table, _, key = name.partition(".")
        value = getattr(self, table)
        if key:
            value = getattr(value, key)
        return [plain(v) for v in value] if isinstance(value, tuple) else plain(value)


def plain(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {key: inner for key, inner in asdict(value).items() if key not in LIMITS}


SECTIONS: dict[str, Any] = {
    "features": FeatureConfig, "mono": MonoOptions, "tri": TriOptions, "sat": SatOptions, "language": LanguageConfig, "network": NetworkConfig,
    "decode": DecodeOptions, "kaldi": KaldiInputs,
}  # fmt: skip


def settings_hash(*told: Any) -> str:
    """Eight digits that differ where settings do: a benchmark names its folders by them, and takes up only its own work."""
    said = json.dumps([plain(part) for part in told], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def load(where: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """A recipe from its folder (or its file)."""
    path = Path(where)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"there is no recipe at {where}", where="RECIPE", hint="name a folder with a recipe.toml, such as recipes/spoken"
        )
    tree = read_tree(path)
    for item in overrides:
        override(tree, item)
    return build(tree, path)


def read_tree(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the recipe is not valid TOML: {error}", where=str(path), hint="mend that line") from error


def set_apart(items: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Those `key=value` that the command itself takes, and the recipe's."""
    own = {key: value for key, _, value in (item.partition("=") for item in items) if key in names}
    config.check(own, "command line")
    return own, [item for item in items if item.partition("=")[0] not in names]


def override(tree: dict[str, Any], item: str) -> None:
    """Puts `section.key=value` into the tree."""
    key, equals, text = item.partition("=")
    if not equals:
        raise UsageError(f"'{item}' is not key=value", where="command line", hint="write for example train.learners=4")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.split(".")
    here = tree
    for number, name in enumerate(tables):
        if name == "source":  # source.root=… speaks to the first one
            here = here.setdefault("source", [{}])[0]
            continue
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            raise UsageError(f"'{'.'.join(tables[: number + 1])}' is not a table", where=item, hint="see the recipe's file")
    here[last] = value


def build(tree: dict[str, Any], path: Path) -> Recipe:
    known = {f.name for f in fields(Recipe)} - {"folder", "sources"} | {"source"}
    for key in tree:
        if key not in known:
            raise UsageError(f"a recipe has no '{key}'", where=str(path), hint=did_you_mean(key, known))
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "source":
            values["sources"] = tuple(section(SourceConfig, one, f"{path}, source") for one in value)
        elif key in SECTIONS:
            values[key] = section(SECTIONS[key], value, f"{path}, {key}")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    if "train" in values:
        check_train(values["train"], f"{path}, train")
    if not values.get("sources") and "kaldi" not in values:
        raise UsageError(
            "the recipe names no corpus", where=str(path), hint='add [[source]] with kind = "synth" or another, or [kaldi]'
        )
    return Recipe(folder=path.resolve().parent, **values)


def check_train(value: Any, where: str) -> None:
    """What the engine would refuse is refused now, not after the alignments are made."""
    table(value, where)
    config.check(value, where)
    for key in TOLD_BY_THE_RECIPE:
        if key in value:
            raise UsageError(f"'{key}' is what the recipe itself tells the engine", where=where, hint="remove it")


def table(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise UsageError("this must be a table", where=where, hint="write [name] and key = value below it")


def section(kind: Any, value: Any, where: str) -> Any:
    table(value, where)
    known = {f.name for f in fields(kind)}
    for key in value:
        if key not in known:
            raise UsageError(f"there is no '{key}' here", where=where, hint=did_you_mean(key, known))
    try:
        return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in value.items()})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error), where=where, hint="see the comments in the recipe's file") from error
