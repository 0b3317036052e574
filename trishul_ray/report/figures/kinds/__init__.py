"""The kinds of figures, and the charts of single runs: numbers in long form, nothing drawn."""
