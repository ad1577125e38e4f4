"""Damage files in the ways that disks, editors and attackers do. Every damage is a function of a seed."""

from __future__ import annotations

import random
import re

CANARY = "fuzz-canary"
"""Name of the file that the shell payloads would create. It must never appear."""
WORDS = [
    b"nan", b"-inf", b"1e999", b"-1", b"0", b"9" * 30, b"1e308", b"null", b"true", b"[]", b"{}", b'"text"', b"\x00",
    b"\xff\xfe",
    b"../../etc/passwd", b"/" + b"x" * 5000, b"$(touch fuzz-canary)", b"touch fuzz-canary |", b"`touch fuzz-canary`",
    b'"><img src=x onerror=alert(1)>', b"[" * 3000, b"\n", b"=", b" ",
]  # fmt: skip
TOKEN = re.compile(rb"-?[\w.]+|\"[^\"\n]*\"")
KEY = re.compile(rb'"[\w ]+": [^,{}\[\]]+,?')


def mutate(content: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """Return the content with one to three damages; `other` is the content of another file, for swaps."""
    for _ in range(rng.randint(1, 3)):
        content = rng.choice(DAMAGES)(content, rng, other)
    return content


def _flip(content: bytes, rng: random.Random, other: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_start(content: bytes, rng: random.Random, other: bytes) -> bytes:
    return _flip(content[:96], rng, other) + content[96:]


def _truncate(content: bytes, rng: random.Random, other: bytes) -> bytes:
    return content[: rng.randint(0, len(content))]


def _insert(content: bytes, rng: random.Random, other: bytes) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + rng.choice(WORDS) + content[at:]


def _replace_token(content: bytes, rng: random.Random, other: bytes) -> bytes:
    tokens = list(TOKEN.finditer(content[:200_000]))
    if not tokens:
        return content
    token = rng.choice(tokens)
    return content[: token.start()] + rng.choice(WORDS) + content[token.end() :]


def _delete_key(content: bytes, rng: random.Random, other: bytes) -> bytes:
    keys = list(KEY.finditer(content[:200_000])) or list(re.finditer(rb"[^\n]*\n", content[:200_000]))
    if not keys:
        return content
    key = rng.choice(keys)
    return content[: key.start()] + content[key.end() :]


def _overwrite(content: bytes, rng: random.Random, other: bytes) -> bytes:
    at = rng.randint(0, len(content))
    word = rng.choice([b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", rng.randbytes(8)])
    return content[:at] + word + content[at + len(word) :]


def _swap(content: bytes, rng: random.Random, other: bytes) -> bytes:
    return other or content


DAMAGES = (_flip, _flip_start, _truncate, _insert, _replace_token, _replace_token, _delete_key, _overwrite, _swap)
