"""HMM graphs of single utterances, for forced alignment.

The graph of an utterance contains every pronunciation of its words, and optional silence before, between and after them. With
context-dependent states the graph is exact: a phone at a word edge is duplicated for each neighbor that it can have, and only
copies whose contexts agree are connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.speech.hmm.lexicon import SILENCE_INDEX
from roundelay.speech.hmm.viterbi import Array, StateGraph

IndexedPronunciation = tuple[tuple[int, ...], float]
"""Phone indices and the natural logarithm of the probability."""


@dataclass(frozen=True)
class UtteranceGraph:
    """Phones in context as nodes, their HMM states in order, and the arcs between the states."""

    phone: Array  # int32 [nodes]
    word: Array  # int32 [nodes]: position of the word in the utterance, -1 for silence
    state_node: Array  # int32 [states]
    state_index: Array  # int32 [states]: position of the state in its phone
    state_key: Array  # int32 [states]
    arcs: StateGraph
    min_frames: int


class _Nodes:
    """Phones in context under construction, with their incoming arcs and log weights."""

    def __init__(self, context: bool) -> None:
        self.context = context
        self.phone: list[int] = []
        self.left: list[int] = []
        self.right: list[int] = []
        self.word: list[int] = []
        self.incoming: list[list[tuple[int, float]]] = []
        self.start: dict[int, float] = {}
        self.final: dict[int, float] = {}

    def add(self, phone: int, left: int, right: int, word: int) -> int:
        self.phone.append(phone)
        self.left.append(left if self.context else 0)
        self.right.append(right if self.context else 0)
        self.word.append(word)
        self.incoming.append([])
        return len(self.phone) - 1

    def contexts_agree(self, end: int, begin: int) -> bool:
        """Return whether the node `end` of one word may precede the node `begin` of the next word."""
        return not self.context or (self.right[end] == self.phone[begin] and self.left[begin] == self.phone[end])

    def add_word(
        self, number: int, variants: Sequence[IndexedPronunciation], lefts: list[int], rights: list[int]
    ) -> tuple[list[tuple[int, float]], list[int]]:
        """Add all pronunciations of a word. Return its entry nodes with the pronunciation's log weight, and its exit nodes."""
        entries: list[tuple[int, float]] = []
        exits: list[int] = []
        for phones, weight in variants:
            last = len(phones) - 1
            previous: list[int] = []
            for n, phone in enumerate(phones):
                left_choices = lefts if n == 0 else [phones[n - 1]]
                right_choices = rights if n == last else [phones[n + 1]]
                nodes = [self.add(phone, left, right, number) for left in left_choices for right in right_choices]
                for node in nodes:
                    self.incoming[node] += [(source, 0.0) for source in previous]
                if n == 0:
                    entries += [(node, weight) for node in nodes]
                if n == last:
                    exits += nodes
                previous = nodes
        return entries, exits


def _concatenate_words(
    words: Sequence[Sequence[IndexedPronunciation]], context: bool, silence: float, edge_silence: bool
) -> _Nodes:
    nodes = _Nodes(context)
    log_silence, log_none = float(np.log(silence)), float(np.log1p(-silence))
    exits: list[int] = []
    for number, variants in enumerate(words):
        pause = nodes.add(SILENCE_INDEX, 0, 0, -1)
        next_variants = words[number + 1] if number + 1 < len(words) else []
        lefts = sorted({SILENCE_INDEX, *(nodes.phone[e] for e in exits)}) if context else [0]
        rights = sorted({SILENCE_INDEX, *(phones[0] for phones, _ in next_variants)}) if context else [0]
        entries, word_exits = nodes.add_word(number, variants, lefts, rights)
        if number == 0:
            nodes.start[pause] = log_silence
        nodes.incoming[pause] += [(e, log_silence) for e in exits if nodes.right[e] == SILENCE_INDEX]
        for node, weight in entries:
            if nodes.left[node] == SILENCE_INDEX:
                nodes.incoming[node].append((pause, weight))
                if number == 0 and not edge_silence:
                    nodes.start[node] = log_none + weight
            nodes.incoming[node] += [(e, log_none + weight) for e in exits if nodes.contexts_agree(e, node)]
        exits = word_exits
    pause = nodes.add(SILENCE_INDEX, 0, 0, -1)
    nodes.incoming[pause] += [(e, log_silence) for e in exits]
    nodes.final = {pause: 0.0} if edge_silence else {pause: 0.0, **dict.fromkeys(exits, log_none)}
    if not words:
        nodes.start[pause] = 0.0
    return nodes


def utterance_graph(
    words: Sequence[Sequence[IndexedPronunciation]],
    states: Sequence[int],
    *,
    context: bool,
    silence: float,
    edge_silence: bool = False,
) -> UtteranceGraph:
    """Build the graph of an utterance from the pronunciations of its words.

    states: number of HMM states of each phone.
    context: use context-dependent states (triphones).
    silence: probability of silence before, between and after the words.
    edge_silence: make the silence before the first word and after the last word mandatory.
    """
    nodes = _concatenate_words(words, context, silence, edge_silence)
    phone = np.array(nodes.phone, np.int32)
    counts = np.asarray(states, np.int64)[phone]
    offset = np.concatenate([[0], np.cumsum(counts)])
    state_node = np.repeat(np.arange(len(phone), dtype=np.int32), counts)
    state_index = (np.arange(offset[-1]) - offset[state_node]).astype(np.int32)
    first, source, weight = [0], [], []
    for node, incoming in enumerate(nodes.incoming):
        source += [int(offset[i + 1]) - 1 for i, _ in incoming]
        weight += [cost for _, cost in incoming]
        first.append(len(source))
        for state in range(int(offset[node]), int(offset[node + 1]) - 1):
            source.append(state)
            weight.append(0.0)
            first.append(len(source))
    start, final = np.full(offset[-1], -np.inf), np.full(offset[-1], -np.inf)
    for node, cost in nodes.start.items():
        start[offset[node]] = cost
    for node, cost in nodes.final.items():
        final[offset[node + 1] - 1] = cost
    phones, width = len(states), max(states)
    left, right = np.array(nodes.left, np.int32), np.array(nodes.right, np.int32)
    key = (((left * phones + phone) * phones + right) * width).astype(np.int32)
    shortest = sum(min(sum(states[p] for p in pronunciation) for pronunciation, _ in variants) for variants in words)
    return UtteranceGraph(
        phone,
        np.array(nodes.word, np.int32),
        state_node,
        state_index,
        key[state_node] + state_index,
        StateGraph(np.array(first, np.int32), np.array(source, np.int32), np.array(weight), start, final),
        shortest + (2 * states[SILENCE_INDEX] if edge_silence else 0) if words else states[SILENCE_INDEX],
    )
