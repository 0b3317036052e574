"""Report the results of finished runs: summaries, tables with tests, figures, and a page."""
