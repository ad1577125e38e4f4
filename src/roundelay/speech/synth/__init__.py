"""A spoken corpus out of nothing: sentences of a small grammar, said by many voices of espeak-ng, over bad telephone lines."""
