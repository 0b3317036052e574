"""Draw the figures of a sweep from DataFrames of its runs and rounds."""
