"""A folder as people who have Kaldi hold it, in miniature: features in three streams, alignments, a text model, HCLG.

Every state of every phone has features of its own, so what is said can be learned in seconds; the true state of every frame is
the alignment. Written with kaldiio and kaldifst, not with our own writers.
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
"""The pdf of each (phone, state), in their order: not the order itself, so that no mistake can hide in it."""
NUM_PDFS = len(PDFS)
FMLLR, IVECTOR, LOGMEL = 6, 3, 5

SETS = {"train": (40, 5), "dev": (12, 2), "eval2000": (15, 3)}
"""Utterances and speakers."""


def enters(phone: int, state: int) -> int:
    """The transition-id of the first frame: Kaldi's graphs take the way out first, and hold afterwards."""
    return 2 * (STATES * phone + state) + 2


def holds(phone: int, state: int) -> int:
    return enters(phone, state) - 1


def pdf_of(transition: int) -> int:
    return int(PDFS[(transition - 1) // 2])


@dataclass
class Said:
    """One set: what was said, and the transition-id of every frame."""

    speakers: dict[str, str] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    frames: dict[str, np.ndarray] = field(default_factory=dict)


def write_kaldi_layout(folder: Path) -> dict[str, Said]:
    """data/ and exp/ below the folder, by the names that recipes/switchboard gives them."""
    sounds = np.random.default_rng(1).normal(size=(NUM_PDFS, FMLLR + LOGMEL)) * 1.5
    found = {}
    for number, (name, (utterances, speakers)) in enumerate(SETS.items()):
        dice = np.random.default_rng([5, number])
        said = speak(name, utterances, speakers, dice)
        write_features(folder / "data" / name, said, sounds, dice)
        found[name] = said
    for name in ("train", "dev"):
        write_alignments(folder / "exp", name, found[name].frames)
    (folder / "exp" / "ali_train" / "final.txt").write_text(text_model())
    write_graph(folder / "exp" / "graph", by_pdf=False)
    write_graph(folder / "exp" / "graph_pdfs", by_pdf=True)
    return found


def speak(name: str, utterances: int, speakers: int, dice: np.random.Generator) -> Said:
    said = Said()
    for n in range(utterances):
        speaker = f"{name}-s{n % speakers}"
        id = f"{speaker}-{n:03d}"
        words = dice.choice(sorted(WORDS), size=int(dice.integers(3, 7))).tolist()
        phones = [SILENCE, *(phone for word in words for phone in WORDS[word]), SILENCE]
        frames = [
            transition
            for phone in phones
            for state in range(STATES)
            for transition in [enters(phone, state)] + [holds(phone, state)] * int(dice.integers(1, 4))
        ]
        said.speakers[id], said.words[id], said.frames[id] = speaker, words, np.array(frames, np.int32)
    return said


def write_features(folder: Path, said: Said, sounds: np.ndarray, dice: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    voices = {speaker: dice.normal(size=IVECTOR) for speaker in sorted(set(said.speakers.values()))}
    colours = {speaker: (dice.uniform(0.5, 4.0), dice.normal(size=LOGMEL) * 5) for speaker in voices}
    fmllr, ivector, logmel = {}, {}, {}
    for id, frames in said.frames.items():
        speaker = said.speakers[id]
        scale, shift = colours[speaker]
        x = sounds[[pdf_of(transition) for transition in frames]]
        x = x + 0.4 * dice.normal(size=x.shape)
        fmllr[id] = x[:, :FMLLR].astype(np.float32)
        # What cmvn is for: every speaker's log-mels lie elsewhere.
        logmel[id] = (x[:, FMLLR:] * scale + shift).astype(np.float32)
        ivector[id] = np.tile(voices[speaker], (-(-len(frames) // 10), 1)).astype(np.float32)
    kaldiio.save_ark(str(folder / "fmllr.ark"), fmllr, scp=str(folder / "fmllr.scp"))
    kaldiio.save_ark(str(folder / "ivector.ark"), ivector, scp=str(folder / "ivector.scp"))
    kaldiio.save_ark(str(folder / "logmel.ark"), logmel, scp=str(folder / "logmel.scp"), compression_method=2)
    sums = {}
    for speaker in voices:
        own = np.concatenate([x for id, x in logmel.items() if said.speakers[id] == speaker]).astype(np.float64)
        sums[speaker] = np.stack([np.append(own.sum(0), len(own)), np.append(np.square(own).sum(0), 0.0)])
    kaldiio.save_ark(str(folder / "cmvn.ark"), sums, scp=str(folder / "cmvn.scp"))
    (folder / "utt2spk").write_text("".join(f"{id} {speaker}\n" for id, speaker in said.speakers.items()))
    (folder / "text").write_text("".join(f"{id} {' '.join(words)}\n" for id, words in said.words.items()))


def write_alignments(folder: Path, name: str, frames: dict[str, np.ndarray]) -> None:
    """ali_NAME/ali.*.gz as two jobs of Kaldi leave them, and pdf_NAME.txt as ali-to-pdf writes it."""
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
    """The transition model at the beginning of a final.mdl; phones count from 1 there."""
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
    """A loop over words and pauses; every state can be held."""
    folder.mkdir(parents=True)
    fst = kaldifst.StdVectorFst()
    hub = fst.add_state()
    fst.start = hub
    fst.set_final(hub, 0.0)

    def label(transition: int) -> int:
        return pdf_of(transition) + 1 if by_pdf else transition

    for number, phones in enumerate([(SILENCE,), *WORDS.values()]):
        context, written, cost = hub, number, math.log(len(WORDS) + 1)
        for phone in phones:
            for state in range(STATES):
                after = fst.add_state()
                fst.add_arc(context, kaldifst.StdArc(label(enters(phone, state)), written, cost + math.log(2), after))
                fst.add_arc(after, kaldifst.StdArc(label(holds(phone, state)), 0, math.log(2), after))
                context, written, cost = after, 0, 0.0
        fst.add_arc(context, kaldifst.StdArc(0, 0, 0.0, hub))
    fst.write(str(folder / "HCLG.fst"))
    names = ["<eps>", *WORDS, "#0", "<s>", "</s>"]
    (folder / "words.txt").write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
