"""Write a miniature Kaldi experiment: features in three streams, alignments, a text model, HCLG.

Every state of every phone has distinct features, so a network learns them in seconds. The alignment is the true state of every
frame. The files are written with kaldiio and kaldifst, not with the writers under test.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, field
from pathlib import Path

import kaldifst
import kaldiio
import numpy as np

WORDS = {"LARK": (1, 2), "WREN": (2, 3), "ROBIN": (3, 4, 1), "FINCH": (5, 6), "SWIFT": (6, 4, 5)}
SILENCE = 0
PHONES, STATES = 7, 2
PDFS = np.random.default_rng(7).permutation(PHONES * STATES)
"""The pdf of each (phone, state): a permutation, so that a test detects pdfs in the wrong order."""
NUM_PDFS = len(PDFS)
FMLLR, IVECTOR, LOGMEL = 6, 3, 5

SETS = {"train": (40, 5), "dev": (12, 2), "eval2000": (15, 3)}
"""Utterances and speakers."""


def enters(phone: int, state: int) -> int:
    """Return the transition-id of the first frame in a state. Kaldi's graphs put the forward transition before self-loops."""
    return 2 * (STATES * phone + state) + 2


def holds(phone: int, state: int) -> int:
    """Return the transition-id of the self-loop of a state."""
    return enters(phone, state) - 1


def pdf_of(transition: int) -> int:
    return int(PDFS[(transition - 1) // 2])


@dataclass
class ToySet:
    """One set: speakers, words and the transition-id of every frame, by utterance."""

    speakers: dict[str, str] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    frames: dict[str, np.ndarray] = field(default_factory=dict)


def write_kaldi_layout(folder: Path) -> dict[str, ToySet]:
    """Write data/ and exp/ below the folder, with the names of the recipe switchboard, and return the sets."""
    means = np.random.default_rng(1).normal(size=(NUM_PDFS, FMLLR + LOGMEL)) * 1.5
    sets = {}
    for number, (name, (utterances, speakers)) in enumerate(SETS.items()):
        rng = np.random.default_rng([5, number])
        toy_set = draw_set(name, utterances, speakers, rng)
        write_features(folder / "data" / name, toy_set, means, rng)
        sets[name] = toy_set
    for name in ("train", "dev"):
        write_alignments(folder / "exp", name, sets[name].frames)
    (folder / "exp" / "ali_train" / "final.txt").write_text(text_model())
    write_graph(folder / "exp" / "graph", by_pdf=False)
    write_graph(folder / "exp" / "graph_pdfs", by_pdf=True)
    return sets


def draw_set(name: str, utterances: int, speakers: int, rng: np.random.Generator) -> ToySet:
    toy_set = ToySet()
    for n in range(utterances):
        speaker = f"{name}-s{n % speakers}"
        id = f"{speaker}-{n:03d}"
        words = rng.choice(sorted(WORDS), size=int(rng.integers(3, 7))).tolist()
        phones = [SILENCE, *(phone for word in words for phone in WORDS[word]), SILENCE]
        frames = [
            transition
            for phone in phones
            for state in range(STATES)
            for transition in [enters(phone, state)] + [holds(phone, state)] * int(rng.integers(1, 4))
        ]
        toy_set.speakers[id], toy_set.words[id], toy_set.frames[id] = speaker, words, np.array(frames, np.int32)
    return toy_set


def write_features(folder: Path, toy_set: ToySet, means: np.ndarray, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    voices = {speaker: rng.normal(size=IVECTOR) for speaker in sorted(set(toy_set.speakers.values()))}
    scales = {speaker: (rng.uniform(0.5, 4.0), rng.normal(size=LOGMEL) * 5) for speaker in voices}
    fmllr, ivector, logmel = {}, {}, {}
    for id, frames in toy_set.frames.items():
        speaker = toy_set.speakers[id]
        scale, shift = scales[speaker]
        x = means[[pdf_of(transition) for transition in frames]]
        x = x + 0.4 * rng.normal(size=x.shape)
        fmllr[id] = x[:, :FMLLR].astype(np.float32)
        # Every speaker has another mean and scale, which cmvn removes.
        logmel[id] = (x[:, FMLLR:] * scale + shift).astype(np.float32)
        ivector[id] = np.tile(voices[speaker], (-(-len(frames) // 10), 1)).astype(np.float32)
    kaldiio.save_ark(str(folder / "fmllr.ark"), fmllr, scp=str(folder / "fmllr.scp"))
    kaldiio.save_ark(str(folder / "ivector.ark"), ivector, scp=str(folder / "ivector.scp"))
    kaldiio.save_ark(str(folder / "logmel.ark"), logmel, scp=str(folder / "logmel.scp"), compression_method=2)
    sums = {}
    for speaker in voices:
        own = np.concatenate([x for id, x in logmel.items() if toy_set.speakers[id] == speaker]).astype(np.float64)
        sums[speaker] = np.stack([np.append(own.sum(0), len(own)), np.append(np.square(own).sum(0), 0.0)])
    kaldiio.save_ark(str(folder / "cmvn.ark"), sums, scp=str(folder / "cmvn.scp"))
    (folder / "utt2spk").write_text("".join(f"{id} {speaker}\n" for id, speaker in toy_set.speakers.items()))
    (folder / "text").write_text("".join(f"{id} {' '.join(words)}\n" for id, words in toy_set.words.items()))


def write_alignments(folder: Path, name: str, frames: dict[str, np.ndarray]) -> None:
    """Write ali_NAME/ali.*.gz like two jobs of Kaldi, and pdf_NAME.txt like ali-to-pdf."""
    (folder / f"ali_{name}").mkdir(parents=True)
    ids = list(frames)
    for job, part in enumerate((ids[::2], ids[1::2]), 1):
        archive = folder / "one.ark"
        kaldiio.save_ark(str(archive), {id: frames[id] for id in part})
        (folder / f"ali_{name}" / f"ali.{job}.gz").write_bytes(gzip.compress(archive.read_bytes()))
        archive.unlink()
    lines = [f"{id} {' '.join(str(pdf_of(t)) for t in row)} \n" for id, row in frames.items()]
    (folder / f"pdf_{name}.txt").write_text("".join(lines))


def text_model() -> str:
    """Return the transition model at the beginning of a final.mdl, where phones count from 1."""
    rows = "".join(
        f"{phone + 1} {state} {PDFS[STATES * phone + state]}\n" for phone in range(PHONES) for state in range(STATES)
    )
    states = "".join(
        f"<State> {n} <PdfClass> {n} <Transition> {n} 0.5 <Transition> {n + 1} 0.5 </State>\n" for n in range(STATES)
    )
    phones = " ".join(str(phone + 1) for phone in range(PHONES))
    return (
        f"<TransitionModel>\n<Topology>\n<TopologyEntry>\n<ForPhones>\n{phones}\n</ForPhones>\n"
        f"{states}<State> {STATES} </State>\n</TopologyEntry>\n</Topology>\n"
        f"<Triples> {NUM_PDFS}\n{rows}</Triples>\n<LogProbs>\n [ 0 ]\n</LogProbs>\n</TransitionModel>\n"
        f"<DIMENSION> {FMLLR} <NUMPDFS> {NUM_PDFS}\n"
    )


def write_graph(folder: Path, *, by_pdf: bool) -> None:
    """Write a loop over words and silence in which every state has a self-loop."""
    folder.mkdir(parents=True)
    fst = kaldifst.StdVectorFst()
    hub = fst.add_state()
    fst.start = hub
    fst.set_final(hub, 0.0)

    def label(transition: int) -> int:
        return pdf_of(transition) + 1 if by_pdf else transition

    for number, phones in enumerate([(SILENCE,), *WORDS.values()]):
        state_before, output, cost = hub, number, math.log(len(WORDS) + 1)
        for phone in phones:
            for state in range(STATES):
                after = fst.add_state()
                fst.add_arc(state_before, kaldifst.StdArc(label(enters(phone, state)), output, cost + math.log(2), after))
                fst.add_arc(after, kaldifst.StdArc(label(holds(phone, state)), 0, math.log(2), after))
                state_before, output, cost = after, 0, 0.0
        fst.add_arc(state_before, kaldifst.StdArc(0, 0, 0.0, hub))
    fst.write(str(folder / "HCLG.fst"))
    names = ["<eps>", *WORDS, "#0", "<s>", "</s>"]
    (folder / "words.txt").write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
