"""Figures of a sweep: its runs and rounds as DataFrames, drawn by a function per kind of figure."""
