"""Speech Commands: WORD/SPEAKER_nohash_TAKE.wav, with validation_list.txt and testing_list.txt."""

from __future__ import annotations

from pathlib import Path

from roundelay.speech.corpora.layout import matching_files
from roundelay.speech.corpora.utterance import Sets, Utterance

COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = (("dev", "validation_list.txt"), ("test", "testing_list.txt"))


def prepare_speech_commands(folder: Path) -> Sets:
    """Return the utterances of the ten command words in `folder`. Without testing_list.txt all sets are empty."""
    sets: Sets = {"train": [], "dev": [], "test": []}
    members = {part: set((folder / file).read_text().split()) if (folder / file).is_file() else set() for part, file in LISTS}
    if not members["test"]:
        return sets
    for path, match in matching_files(folder, r"([0-9a-f]+)_nohash_([0-9]+)\.wav"):
        word, (speaker, take) = path.parent.name, match.groups()
        if word not in COMMANDS:
            continue
        name = f"{word}/{path.name}"
        part = next((part for part, names in members.items() if name in names), "train")
        sets[part].append(Utterance(f"{speaker}-{word}-{take}", speaker, (word.upper(),), path))
    return sets
