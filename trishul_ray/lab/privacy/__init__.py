"""Client-level differential privacy: clipped changes, noise on their sum, and what it is worth."""

#: Names of what a round's record has of it, beside those that begin with ``privacy_``: none.
