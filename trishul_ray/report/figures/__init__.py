"""Figures of sweeps and of single runs.

A figure of a sweep has a kind, a class of ``FIGURES``, which makes a chart of the finished cells:
numbers in long form, which are the figure's CSV file, and how they are drawn. A note below says
which cells are missing. Charts of single runs are drawn in the same way (``runs/artifacts.py``).
"""
