"""Training of alignment models: monophones from a flat start, then tied triphones, by Viterbi passes over a corpus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from roundelay.errors import DataError, UsageError
from roundelay.log.progress import Progress
from roundelay.speech.hmm.adaptation import PRIOR_FRAMES
from roundelay.speech.hmm.em_workers import EmWorkers, FeatureSource, PassResult
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.hmm import SILENCE, AlignmentModel, Frontend, monophone_table
from roundelay.speech.hmm.transforms import LdaStatistics, MlltStatistics, rotated
from roundelay.speech.hmm.tree import ContextStatistics, TiedStates, grow
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.corpora.utterance import Corpus
    from roundelay.speech.hmm.lexicon import Lexicon

Say = Callable[[str], None]
OnMissing = Literal["error", "skip"]

# Variances stay above this share of the variance of all frames.
VARIANCE_FLOOR = 0.01
FRAMES_PER_COMPONENT = 60
# Discriminant analysis tells apart the states of a model with deltas that had this much training.
DELTA_PASSES, DELTA_ALIGNING, DELTA_GAUSSIANS = 10, (4, 7, 10), 3
# Passes after which the projected features are rotated to suit the Gaussians.
ROTATING = (2, 4, 6, 12)
LOOP_PRIOR = 0.6
LOOP_PRIOR_FRAMES = 5.0


@dataclass(frozen=True)
class MonoOptions:
    """states, silence_states   in a row, each with a loop
    silence_probability      of a pause at the ends and between words
    passes                   over the corpus; the first ten align anew, later ones at wider intervals
    gaussians                per state, on average, at the end
    deltas                   orders of slopes beside the cepstra
    force_edge_silence_passes           share of the passes, from the first, in which utterances begin and end with a pause for certain:
                             so silence learns all kinds of background, which words would otherwise take for their own.
                             Not for recordings that were cut close to the words
    """

    states: int = 3
    silence_states: int = 3
    silence_probability: float = 0.5
    passes: int = 30
    gaussians: int = 16
    deltas: int = 2
    force_edge_silence_passes: float = 0.0
    seed: int = 0
    on_missing: OnMissing = "error"


@dataclass(frozen=True)
class TriOptions:
    """leaves       tied states at most; a small corpus gets fewer
    least_frames    of a leaf
    least_gain      in log likelihood that a split must bring
    passes          over the corpus; every third aligns anew
    gaussians       per tied state, on average, at the end
    splice          frames on each side that linear discriminant analysis sees; 0 keeps cepstra with deltas
    dim             features after the analysis
    """

    leaves: int = 1000
    least_frames: float = 150.0
    least_gain: float = 200.0
    passes: int = 30
    gaussians: int = 10
    splice: int = 4
    dim: int = 40
    seed: int = 0
    on_missing: OnMissing = "error"


@dataclass(frozen=True)
class SatOptions:
    """passes        over the adapted corpus; every third aligns anew
    prior_frames     frames' worth of belief that a speaker needs no transform
    """

    passes: int = 9
    prior_frames: float = PRIOR_FRAMES
    seed: int = 0
    on_missing: OnMissing = "error"

    def __post_init__(self) -> None:
        if not self.prior_frames > 0:
            raise UsageError(
                f"prior_frames is {self.prior_frames:g}", where="sat", hint="give some: who says nothing has no other transform"
            )


def train_mono(
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: MonoOptions | None = None,
    *,
    jobs: int = 1,
    say: Say = print,
    progress: str = "none",
) -> AlignmentModel:
    """Monophone models from nothing but transcripts: equal shares first, then better and better alignments."""
    options = options or MonoOptions()
    utterances = spoken_utterances(store, corpus, lexicon, options.on_missing, say)
    phones = [SILENCE, *(phone for phone in lexicon.phones if phone != SILENCE)]
    table = monophone_table(len(phones), options.states, options.silence_states)
    pdfs = int(table.max()) + 1
    frontend = Frontend(deltas=options.deltas)
    with EmWorkers(utterances, store, lexicon, jobs) as crew:
        moments = sum(crew.call("moments", frontend))
        mean, variance = _gaussian(moments)
        model = AlignmentModel(
            phones,
            table,
            np.full(pdfs, LOOP_PRIOR),
            Gmm.single(np.tile(mean, (pdfs, 1)), np.tile(variance, (pdfs, 1))),
            states_per_phone=options.states,
            silence_states=options.silence_states,
            silence_probability=options.silence_probability,
            frontend=frontend,
        )
        skipped: dict[str, str] = {}
        for part in crew.call("flat_start", model):
            skipped |= part
        if len(skipped) == len(utterances):
            raise DataError(f"no utterance can be aligned: {_reasons(skipped)}", where=str(corpus.folder))
        budget = min(options.gaussians * pdfs, int(moments[0]) // FRAMES_PER_COMPONENT)
        aligning = [n for n in range(2, options.passes + 1) if n <= 11 or (n <= 21 and n % 2) or n % 3 == 0]
        edges = int(options.force_edge_silence_passes * options.passes)
        schedule = _Schedule("mono", options.passes, aligning, max(budget, pdfs), options.seed, edges=edges)
        return schedule.run(model, crew, VARIANCE_FLOOR * variance, say, progress)


def train_tri(
    mono: AlignmentModel,
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: TriOptions | None = None,
    *,
    jobs: int = 1,
    say: Say = print,
    progress: str = "none",
) -> AlignmentModel:
    """Context-dependent models with states tied by a decision tree, from the alignments of a trained model."""
    options = options or TriOptions()
    utterances = spoken_utterances(store, corpus, lexicon, options.on_missing, say)
    with EmWorkers(utterances, store, lexicon, jobs) as crew:
        _collect(crew, mono, True, str(corpus.folder))
        frontend: Frontend = mono.frontend
        rotating: tuple[int, ...] = ()
        if options.splice > 0:
            frontend, rotating = _discriminant(crew, mono, options, say, progress), ROTATING
        model, floor, frames = _tied(crew, mono, frontend, options, say)
        budget = max(min(options.gaussians * model.num_pdfs, frames // FRAMES_PER_COMPONENT), model.num_pdfs)
        aligning = [n for n in range(4, options.passes + 1) if n % 3 == 1]
        schedule = _Schedule("tri", options.passes, aligning, budget, options.seed, rotating)
        return schedule.run(model, crew, floor, say, progress)


def train_adapted(
    tri: AlignmentModel,
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: SatOptions | None = None,
    *,
    jobs: int = 1,
    say: Say = print,
    progress: str = "none",
) -> AlignmentModel:
    """The same tied states in features that were adapted to their speakers (`adapt`): what is left are sounds, not throats."""
    options = options or SatOptions()
    utterances = spoken_utterances(store, corpus, lexicon, options.on_missing, say)
    model = replace_model(tri, gmm=tri.gmm, self_loop=tri.self_loop, frontend=Frontend(keep=0, deltas=0))
    with EmWorkers(utterances, store, lexicon, jobs) as crew:
        floor = VARIANCE_FLOOR * _gaussian(sum(crew.call("moments", model.frontend)))[1]
        aligning = [n for n in range(1, options.passes + 1) if n % 3 == 1]
        schedule = _Schedule("sat", options.passes, aligning, model.gmm.components, options.seed)
        return schedule.run(model, crew, floor, say, progress)


def _discriminant(crew: EmWorkers, mono: AlignmentModel, options: TriOptions, say: Say, progress: str) -> Frontend:
    """Spliced cepstra projected to tell tied states apart: states tied and briefly trained with deltas, aligned anew."""
    model, floor, frames = _tied(crew, mono, mono.frontend, options, say)
    budget = max(min(DELTA_GAUSSIANS * model.num_pdfs, frames // FRAMES_PER_COMPONENT), model.num_pdfs)
    schedule = _Schedule("tri, deltas", DELTA_PASSES, DELTA_ALIGNING, budget, options.seed)
    model = schedule.run(model, crew, floor, say, progress)
    plain = Frontend(mono.frontend.keep, 0, options.splice)
    parts: list[LdaStatistics] = crew.call("lda", plain, model.by_key, model.num_pdfs)
    for part in parts[1:]:
        parts[0].add(part)
    return Frontend(plain.keep, 0, plain.splice, parts[0].transform(options.dim))


def _tied(
    crew: EmWorkers, model: AlignmentModel, frontend: Frontend, options: TriOptions, say: Say
) -> tuple[AlignmentModel, Array, int]:
    """Single Gaussians for the leaves of a tree over the crew's alignments; the floor of variances; how many frames."""
    began = time.perf_counter()
    statistics = ContextStatistics.merged([part for part in crew.call("contexts", frontend) if part is not None])
    total = statistics.moments.sum(0)
    floor = VARIANCE_FLOOR * _gaussian(total)[1]
    phones = len(model.lexicon_phones)
    tied: TiedStates = grow(
        statistics,
        phones,
        [model.states(phone) for phone in range(phones)],
        leaves=options.leaves,
        least_frames=options.least_frames,
        least_gain=options.least_gain,
        floor=floor,
    )
    say(
        f"tree: {len(statistics.keys)} states in context tied to {len(tied.occupancy)}, "
        f"log likelihood +{sum(tied.gains) / total[0]:.3f} per frame, {time.perf_counter() - began:.1f} s"
    )
    made = AlignmentModel(
        model.lexicon_phones,
        tied.table,
        _inherited_loops(model, tied.table),
        Gmm.single(tied.mean, tied.variance),
        states_per_phone=model.states_per_phone,
        silence_states=model.silence_states,
        silence_probability=model.silence_probability,
        frontend=frontend,
    )
    return made, floor, int(total[0])


def _inherited_loops(model: AlignmentModel, table: Array) -> Array:
    """Self-loops of new pdfs from the old pdfs of the same states."""
    old = np.broadcast_to(model.table, table.shape).reshape(-1)
    new = table.reshape(-1)
    used = new >= 0
    count = np.bincount(new[used])
    return np.asarray(np.bincount(new[used], weights=model.self_loop[old[used]]) / count)


@dataclass(frozen=True)
class _Schedule:
    name: str
    passes: int
    aligning: Sequence[int]  # passes that align anew
    components: int  # at the end of growth
    seed: int
    rotating: tuple[int, ...] = ()  # passes after which features are rotated
    edges: int = 0  # first passes, with certain pauses at both ends

    def run(self, model: AlignmentModel, crew: EmWorkers, floor: Array, say: Say, progress: str) -> AlignmentModel:
        """Align, estimate, grow, until the passes are over. The last fourth of them grows no more."""
        with Progress(self.name, "passes", progress) as shown:
            return self._passes(model, crew, floor, say, shown)

    def _passes(self, model: AlignmentModel, crew: EmWorkers, floor: Array, say: Say, shown: Progress) -> AlignmentModel:
        growing = max(1, self.passes * 3 // 4)
        began_with = model.gmm.components
        for number in range(1, self.passes + 1):
            began = time.perf_counter()
            realign_passes = number in self.aligning
            found = _collect(crew, model, realign_passes, edges=number <= self.edges)
            gmm = model.gmm.updated(found.gmm, floor)
            if number < growing:
                target = began_with + (self.components - began_with) * number // (growing - 1)
                occupancy = np.add.reduceat(found.gmm.occupancy, model.gmm.first[:-1])
                gmm = gmm.grown(occupancy, target, seed=self.seed + number)
            say(
                f"{self.name} pass {number}/{self.passes}: log likelihood {found.gmm.loglike / found.gmm.frames:.3f}, "
                f"{model.gmm.components} Gaussians, {found.utterances} utterances"
                + (f", skipped {len(found.skipped)}" if found.skipped else "")
                + f"{', aligned' if realign_passes else ''}, {time.perf_counter() - began:.1f} s"
            )
            shown.step(number, self.passes, f"log likelihood {found.gmm.loglike / found.gmm.frames:.2f}")
            seen = found.stay + found.leave
            loops = (found.stay + LOOP_PRIOR * LOOP_PRIOR_FRAMES) / (seen + LOOP_PRIOR_FRAMES)
            model = replace_model(model, gmm=gmm, self_loop=np.clip(loops, 0.02, 0.98))
            if number in self.rotating:
                model, floor = _rotated(model, crew)
        return model


def _rotated(model: AlignmentModel, crew: EmWorkers) -> tuple[AlignmentModel, Array]:
    """The model in features turned so that its diagonal Gaussians fit better, and the floor of variances there."""
    parts: list[MlltStatistics] = crew.call("mllt", model)
    for part in parts[1:]:
        parts[0].add(part)
    turn = parts[0].transform()
    old = model.frontend
    assert old.matrix is not None
    frontend = Frontend(old.keep, old.deltas, old.splice, (turn @ old.matrix).astype(np.float32))
    floor = VARIANCE_FLOOR * _gaussian(sum(crew.call("moments", frontend)))[1]
    return replace_model(model, gmm=rotated(model.gmm, turn), self_loop=model.self_loop, frontend=frontend), floor


def replace_model(model: AlignmentModel, *, gmm: Gmm, self_loop: Array, frontend: Frontend | None = None) -> AlignmentModel:
    """The same phones and states with other numbers."""
    return AlignmentModel(
        model.lexicon_phones,
        model.table,
        self_loop,
        gmm,
        states_per_phone=model.states_per_phone,
        silence_states=model.silence_states,
        silence_probability=model.silence_probability,
        frontend=frontend or model.frontend,
    )


def _collect(crew: EmWorkers, model: AlignmentModel, realign_passes: bool, where: str = "", edges: bool = False) -> PassResult:
    results: list[PassResult] = crew.call("train", model, realign_passes, edges)
    total = results[0]
    for result in results[1:]:
        total.add(result)
    if total.utterances == 0:
        raise DataError(f"no utterance can be aligned: {_reasons(total.skipped)}", where=where)
    return total


def _gaussian(moments: Array) -> tuple[Array, Array]:
    dim = (len(moments) - 1) // 2
    mean = moments[1 : 1 + dim] / moments[0]
    return mean, np.maximum(moments[1 + dim :] / moments[0] - mean * mean, 1e-6)


def spoken_utterances(
    store: FeatureSource, corpus: Corpus, lexicon: Lexicon, on_missing: OnMissing, say: Say
) -> list[tuple[str, tuple[str, ...]]]:
    """Ids and words of the utterances that have features; a word without pronunciation is an error, or skips them."""
    have = set(store.ids)
    found, without, unknown = [], 0, Counter[str]()
    for utterance in corpus.utterances:
        missing = [word for word in utterance.words if not lexicon.entries.get(word)]
        if missing and on_missing == "error":
            raise DataError(
                f"the word '{missing[0]}' has no pronunciation",
                where=f"utterance {utterance.id} of {corpus.folder}",
                hint="add it to the lexicon, or skip utterances with unknown words (on_missing='skip')",
            )
        if missing:
            unknown.update(missing[:1])
        elif utterance.id not in have:
            without += 1
        else:
            found.append((utterance.id, utterance.words))
    if without:
        say(f"{without} utterances have no features and are left out")
    if unknown:
        words = ", ".join(word for word, _ in unknown.most_common(5))
        say(f"{sum(unknown.values())} utterances have words without pronunciation ({words}) and are left out")
    if not found:
        raise DataError("no utterance has features and pronunciations", where=str(corpus.folder))
    return found


def _reasons(skipped: dict[str, str]) -> str:
    id, reason = next(iter(skipped.items()))
    return f"{len(skipped)} skipped, for instance {id} ({reason})"
