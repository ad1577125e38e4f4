"""Settings of a recipe: recipe.toml, with `section.key=value` items of the command line on top."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.config import ResolvedConfig, TrainConfig
from roundelay.core.settings import setting
from roundelay.errors import UsageError, did_you_mean
from roundelay.recipes import FILE, FOLDER, names
from roundelay.speech.decode import SCALES, DecodeOptions
from roundelay.speech.features.extract import LONGEST_S
from roundelay.speech.hmm.train_gmm import MonoOptions, SatOptions, TriOptions

LABELS = ("transitions", "pdfs")
DERIVED_KEYS = ("task", "task_options", "run", "resume")
"""Settings of training that the pipeline derives from the recipe."""
LIMITS = ("longest_s",)
"""Settings that decide which input is refused and not what is computed: changing them does not invalidate a stage."""


@dataclass(frozen=True)
class SourceConfig:
    """One corpus of a recipe."""

    kind: str = setting("", help="synth, kaldi, fsdd, audiomnist, speech_commands, speechocean762, librispeech or lhotse.")
    name: str = setting("", help="Name of its sets in results; default: the kind. With one source the test set is named test.")
    root: str = setting(
        "", help="Folder of the corpus. A relative path is searched in $ROUNDELAY_DATA, then next to the recipe."
    )
    options: dict[str, Any] = setting(factory=dict, help="Options of the synthesizer: keys of roundelay synth.")


@dataclass(frozen=True)
class FeatureConfig:
    """Feature extraction."""

    rate: int = setting(8000, minimum=1, help="Sample rate of the audio: 8000 for telephone speech, 16000 otherwise.")
    resample: bool = setting(True, help="Resample audio of another rate; false makes another rate an error.")
    mels: int = setting(40, minimum=1, help="Bands of the log-mel spectrum.")
    deltas: int = setting(2, minimum=0, help="Orders of delta features; 2 turns 40 values into 120.")
    cmvn: str = setting("speaker", choices=("speaker", "utterance", "none"), help="Scope of mean and variance normalization.")
    longest_s: float = setting(LONGEST_S, above=0, help="Longest utterance in seconds; a longer one is an error.")


@dataclass(frozen=True)
class LanguageConfig:
    """Pronunciations and the language model."""

    lexicon: str = setting(
        "corpus", help="corpus (written by the synthesizer), espeak (generated for the words), or a file next to the recipe."
    )
    text: str = setting(
        "corpus", help="LM text: corpus (the synthesizer's), train (training transcripts), or a file next to the recipe."
    )
    order: int = setting(2, minimum=1, help="Order of the n-gram model.")
    isolated_words: bool = setting(
        False, help="Each utterance is one word of the lexicon, with equal probabilities; text is not used."
    )


@dataclass(frozen=True)
class NetworkConfig:
    """The acoustic model and its training data."""

    model: str = setting("small", help="Preset (roundelay list models); layers, hidden, bottleneck and dropout change it.")
    window: int = setting(21, minimum=1, help="Frames per sample.")
    context: int = setting(0, minimum=0, help="Extra input frames on both sides of a sample, without a loss.")
    layers: int | None = setting(None, minimum=1, help="LSTM layers; default: the preset's.")
    hidden: int | None = setting(None, minimum=1, help="Units per layer and direction; default: the preset's.")
    bottleneck: int | None = setting(
        None, minimum=0, help="Units of the linear layer before the output; default: the preset's."
    )
    dropout: float | None = setting(None, minimum=0, maximum=1, help="Dropout probability; default: the preset's.")
    spec_augment_freq: int = setting(0, minimum=0, help="Largest number of mel bands masked in training; for small corpora.")
    spec_augment_time: int = setting(0, minimum=0, help="Largest number of frames masked in training; for small corpora.")
    vtlp: float = setting(
        0.0, minimum=0, help="Vocal-tract length perturbation: largest relative stretch of frequencies; for few speakers."
    )
    init_from: str = setting(
        "",
        help="Start from the layers (without the last) of another network: a recipe relative to this folder, such as ../spoken "
        "(it runs first), a run directory, or a model folder.",
    )
    adapted: bool = setting(False, help='Append speaker-adapted features to the log-mels; needs "sat" in systems.')
    packed: bool = setting(False, help="Train from an archive that is packed before the first epoch, for large corpora.")
    speed: float = setting(
        0.0, minimum=0, help="Largest change of tempo per example and epoch (0.1: 0.9 to 1.1); needs packed."
    )
    noise: float = setting(0.0, minimum=0, help="Standard deviation of noise on the normalized features; needs packed.")

    def __post_init__(self) -> None:
        if (self.speed or self.noise) and not self.packed:
            raise UsageError(
                "[network] speed and noise need packed = true", where="network", hint="set packed = true, or remove them"
            )
        if self.adapted and (self.spec_augment_freq or self.spec_augment_time or self.vtlp):
            raise UsageError(
                "[network] adapted cannot be combined with spec_augment_freq, spec_augment_time or vtlp",
                where="network.adapted",
                hint="set spec_augment_freq, spec_augment_time and vtlp to 0, or adapted = false",
            )

    def task_kwargs(self) -> dict[str, Any]:
        """Return the options of the training task: the keys that are set, and speed and noise only if packed."""
        values = {k: v for k, v in asdict(self).items() if v is not None and k not in ("adapted", "packed", "speed", "noise")}
        return {**values, "speed": self.speed, "noise": self.noise} if self.packed else values


@dataclass(frozen=True)
class KaldiInputs:
    """Features and alignments from Kaldi; paths are relative to the recipe. Features may be pasted: "a.scp+b.scp"."""

    num_pdfs: int = setting(minimum=1, help="Tied states: outputs of the network.")
    train_features: str = setting(help="scp files, pasted with +; append [cmvn,deltas] to a name to process it.")
    train_alignments: str = setting(help="Folder with ali.*.gz, or a file.")
    dev_features: str = setting(help="Features of the development set.")
    dev_alignments: str = setting(help="Alignments of the development set.")
    transitions: str = setting("", help="Text form of final.mdl, if alignments or graph hold transition ids.")
    alignment_labels: str = setting(
        "transitions", choices=LABELS, help="Labels of the alignments: transitions (ali.*.gz) or pdfs (of ali-to-pdf)."
    )
    dev_text: str = setting("", help="Transcripts of the development set, to choose the acoustic scale.")
    test_features: str = setting("", help="Features of the test set.")
    test_text: str = setting("", help="Transcripts of the test set.")
    test_utt2spk: str = setting("", help="Speakers of the test set, for confidence intervals.")
    graph: str = setting("", help="Folder with HCLG.fst and words.txt.")
    graph_labels: str = setting(
        "transitions", choices=LABELS, help="Input labels of the graph: transitions (Kaldi's) or pdfs (pdf + 1)."
    )

    def __post_init__(self) -> None:
        for name, used in (("alignment_labels", True), ("graph_labels", bool(self.graph))):
            labels = getattr(self, name)
            if labels not in LABELS:
                raise UsageError(
                    f"[kaldi] {name} must be one of: {', '.join(LABELS)} (got '{labels}')",
                    where="kaldi",
                    hint=did_you_mean(str(labels), LABELS),
                )
            if used and labels == "transitions" and not self.transitions:
                raise UsageError(
                    f'[kaldi] {name} = "transitions" needs the transition model',
                    where="kaldi.transitions",
                    hint=f'set transitions to the text form of final.mdl, or set {name} = "pdfs"',
                )


@dataclass(frozen=True)
class Recipe:
    """All settings of a recipe."""

    title: str = setting("", help="Title in lists and reports.")
    seed: int = setting(0, minimum=0, help="Seed of the train/dev split, the initial weights and the order of samples.")
    sources: tuple[SourceConfig, ...] = setting((), key="source", help="Corpora.")
    dev_share: float = setting(
        0.1, above=0, maximum=1, help="Share of the training speakers for the development set of a corpus without one."
    )
    speed_perturb: tuple[float, ...] = setting((), help="Also train on copies at these speeds, such as 0.9 and 1.1.")
    systems: tuple[str, ...] = setting(
        ("mono", "tri", "lstm"), help='Systems to decode and score; "sat", after "tri", is a GMM in speaker-adapted features.'
    )
    features: FeatureConfig = setting(factory=FeatureConfig, help="Features.")
    mono: MonoOptions = setting(factory=MonoOptions, help="Monophone GMM-HMM.")
    tri: TriOptions = setting(factory=TriOptions, help="Triphone GMM-HMM.")
    sat: SatOptions = setting(factory=SatOptions, help="Speaker-adaptive training.")
    language: LanguageConfig = setting(factory=LanguageConfig, help="Lexicon and language model.")
    network: NetworkConfig = setting(factory=NetworkConfig, help="Acoustic model.")
    train: dict[str, Any] = setting(
        factory=dict, schema=TrainConfig, reserved=DERIVED_KEYS, help="Settings of roundelay train."
    )
    realign_passes: int = setting(
        0, minimum=0, help="Times that the trained network realigns the training set and is trained again."
    )
    decode: DecodeOptions = setting(factory=DecodeOptions, help="Decoder.")
    scales: tuple[float, ...] = setting(SCALES, help="Acoustic scales to try on the development set.")
    dev_utterances: int = setting(200, minimum=1, help="Development utterances that the acoustic scale is chosen on.")
    kaldi: KaldiInputs | None = setting(None, help="Features and alignments from Kaldi, in place of [[source]].")
    folder: Path = field(default=Path(), metadata={"hidden": True})
    """Folder of the recipe; not a key of the file."""

    def __post_init__(self) -> None:
        if not self.sources and self.kaldi is None:
            raise UsageError(
                "the recipe has no corpus", where="source", hint='add [[source]] with kind = "synth" or another, or [kaldi]'
            )
        if self.network.adapted and "sat" not in self.systems:
            raise UsageError(
                '[network] adapted needs "sat" in systems', where="network.adapted", hint='add "sat" to systems, after "tri"'
            )
        if "sat" in self.systems and "tri" not in self.systems[: self.systems.index("sat")]:
            raise UsageError('systems must list "tri" before "sat"', where="systems", hint='put "tri" before "sat"')
        init_from = self.network.init_from
        if init_from and self.pretraining_recipe is None and not Path(init_from).is_dir():
            raise UsageError(
                f"[network] init_from must be a recipe, a run or a model folder (got '{init_from}')",
                where="network.init_from",
                hint="give a recipe relative to this one's folder, or the path of a run or of a folder with model.json "
                "and model.safetensors",
            )
        before = self.pretraining_recipe
        if before is not None and "init_from" in config.read_toml(before / FILE)[0].get("network", {}):
            raise UsageError(
                f"the network of recipe '{before.name}' sets init_from itself",
                where="network.init_from",
                hint="give a recipe whose network starts from random weights",
            )

    @property
    def pretraining_recipe(self) -> Path | None:
        """The folder of the recipe that `init_from` names, or None if it names a run or a model."""
        folder = (self.folder / self.network.init_from).resolve()
        return folder if self.network.init_from and (folder / FILE).is_file() else None

    def part(self, name: str) -> Any:
        """Return a section, or `section.key`, as plain data for fingerprints."""
        section, _, key = name.partition(".")
        value = getattr(self, section)
        if key:
            value = getattr(value, key)
        return [plain(v) for v in value] if isinstance(value, tuple) else plain(value)


def plain(value: Any) -> Any:
    """Return a dataclass as a dict without the keys in LIMITS; other values unchanged."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {key: inner for key, inner in asdict(value).items() if key not in LIMITS}


def settings_hash(*settings: Any) -> str:
    """Return an 8-hex-digit hash of settings, for directory names of cached results."""
    text = json.dumps([plain(part) for part in settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find(recipe: str | Path) -> Path:
    """Return the file of a recipe: the path of a folder or file, or else the name of a recipe in the package."""
    path = Path(recipe)
    for candidate in (path / FILE, path, FOLDER / path / FILE if str(recipe) in names() else path):
        if candidate.is_file():
            return candidate
    raise UsageError(
        f"unknown recipe '{recipe}'",
        where="RECIPE",
        hint=f"{did_you_mean(path.name, names())} or give a folder with a {FILE} (roundelay list recipes)",
    )


def resolve(recipe: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig[Recipe]:
    """Return the settings of a recipe, by path or name, and their origins."""
    path = find(recipe)
    tree, origins = config.read_toml(path)
    if "folder" in tree:
        raise UsageError("unknown key 'folder'", where=str(path), hint="remove it")
    config.apply(tree, origins, overrides, Recipe)
    folder = path.resolve().parent
    return ResolvedConfig(config.build(Recipe, {**tree, "folder": folder}, str(path), origins), origins, folder)


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the settings of a recipe, by path or name."""
    return resolve(recipe, overrides).settings
