"""Conversion of espeak-ng's IPA to ARPAbet phones without stress."""

from __future__ import annotations

from roundelay.errors import DataError

PHONES: dict[str, tuple[str, ...]] = {
    ipa: tuple(phones.split())
    for ipa, phones in {
        # vowels and vowel sequences; from_ipa takes the longest match
        **{"aɪə": "AY AH", "aɪɚ": "AY ER", "aʊə": "AW AH", "aʊɚ": "AW ER", "iə": "IY AH", "ɪə": "IH AH", "eə": "EH AH"},
        **{"ʊə": "UH AH", "aɪ": "AY", "aʊ": "AW", "eɪ": "EY", "ɔɪ": "OY", "oɪ": "OY", "oʊ": "OW", "əʊ": "OW", "oː": "OW"},
        **{"oːɹ": "AO R", "oːr": "AO R", "eː": "EY", "aː": "AA", "ʌɹ": "ER", "ɜːɹ": "ER", "ɜɹ": "ER", "ɜ": "ER", "ɚ": "ER"},
        **{"ɝ": "ER", "æ": "AE", "a": "AE", "ɑ": "AA", "ɒ": "AA", "ɔ": "AO", "o": "OW", "ʌ": "AH", "ə": "AH", "ɐ": "AH"},
        **{"ɛ": "EH", "e": "EH", "ɪ": "IH", "ᵻ": "IH", "ɨ": "IH", "i": "IY", "ʊ": "UH", "u": "UW", "ʉ": "UW", "ɵ": "UH"},
        **{"n̩": "AH N", "l̩": "AH L", "m̩": "AH M"},
        # consonants
        **{"tʃ": "CH", "dʒ": "JH", "b": "B", "d": "D", "ð": "DH", "f": "F", "ɡ": "G", "g": "G", "h": "HH", "j": "Y", "k": "K"},
        **{"x": "K", "l": "L", "ɫ": "L", "m": "M", "n": "N", "ŋ": "NG", "p": "P", "ɹ": "R", "r": "R", "ɾ": "T", "ʔ": "T"},
        **{"s": "S", "ʃ": "SH", "t": "T", "θ": "TH", "v": "V", "w": "W", "ʍ": "W", "z": "Z", "ʒ": "ZH", "t̪": "T", "d̪": "D"},
    }.items()
}
LONGEST = max(map(len, PHONES))
IGNORED = "ˈˌː_ˑ͡‿-ʰʲ"
"""Stress, length marks that change no phone, ties, separators."""


def from_ipa(ipa: str) -> tuple[str, ...]:
    """Return the phones of one word; DataError for a sound that has no ARPAbet phone."""
    text = ipa.replace("ˈ", "").replace("ˌ", "").replace("_", "").replace(":", "ː")
    result: list[str] = []
    at = 0
    while at < len(text):
        for length in range(min(LONGEST, len(text) - at), 0, -1):
            phones = PHONES.get(text[at : at + length])
            if phones:
                result += phones
                at += length
                break
        else:
            if text[at] not in IGNORED:
                raise DataError(
                    f"the sound '{text[at]}' has no ARPAbet phone", where=f"pronunciation {ipa}", hint="write it by hand"
                )
            at += 1
    return tuple(result)
