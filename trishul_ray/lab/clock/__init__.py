"""Clients on a simulated clock: devices, windows of time, strategies, energy."""

#: Groups of equal size, by speed, whose shares of the work are recorded.
DECILES = 10
#: Names of what a round's record has of the clock, beside those that begin with ``clock_``; see
#: docs/clock.md.
NUMBERS = frozenset(
    {
        "simulated_seconds", "joules", "jain_joules", "battery",
        "asked", "came", "late", "lost", "abandoned", "partial",
        *(f"kept_decile_{decile}" for decile in range(1, DECILES + 1)),
    }
)  # fmt: skip
